//! What a dump says of a shard, and its JSON.

use std::ops::{Deref, DerefMut};

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::{MAX_DIMENSIONS, Shard, TensorKey, When};
use crate::dtype::Dtype;
use crate::faults;
use crate::fingerprint::Fingerprint;
use crate::hash::ContentHash;
use crate::identity::{Attempt, Microbatch, Name, Rank};
use crate::index_box::IndexBox;
use crate::placement::{MeshCoordinates, Placements, Reduction};
use crate::role::Role;

/// Who computed a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FingerprintSource {
    /// The framework, on the sharded array, with its own global indices:
    /// independent of the box in the record.
    Framework,
    /// The recorder, from the box that the job gave: proves transport, not place.
    Recorder,
}

/// What a dump says of one shard: the job's description, who held it, and what its bytes are
/// known by. Its fields are those of the [`Shard`] too: `record.place`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Fields")]
pub struct ShardRecord {
    /// Which value of which tensor.
    pub key: TensorKey,
    /// Which part of it.
    pub shard: Shard,
    /// Who held it.
    pub rank: Rank,
    /// On which machine.
    pub host: Name,
    /// In which launch of the run.
    pub attempt: Attempt,
    /// Where the holder sits on the mesh.
    pub mesh: MeshCoordinates,
    /// xxh3-128 of the bytes, taken in the training process.
    pub hash: ContentHash,
    /// Number of bytes.
    pub length: u64,
    /// Position-sensitive fingerprint of this shard's elements.
    pub fingerprint: Fingerprint,
    /// Who computed the fingerprint.
    pub fingerprint_source: FingerprintSource,
    /// The entry of the safetensors file that holds the bytes.
    pub entry: String,
}

impl Deref for ShardRecord {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl DerefMut for ShardRecord {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

/// The JSON of a record, which has all fields side by side. A manifest may hold a million of them:
/// read by `#[serde(flatten)]`, which buffers the fields of each, they take twice the time.
#[derive(Deserialize)]
struct Fields {
    tensor: Name,
    microbatch: Option<Microbatch>,
    when: Option<When>,
    role: Option<Role>,
    dtype: Dtype,
    shape: Vec<u64>,
    #[serde(rename = "box")]
    place: IndexBox,
    rank: Rank,
    host: Name,
    attempt: Attempt,
    mesh: MeshCoordinates,
    placement: Placements,
    partial: Option<Reduction>,
    replica: u32,
    hash: ContentHash,
    length: u64,
    fingerprint: Fingerprint,
    fingerprint_source: FingerprintSource,
    #[serde(default)]
    compiled: bool,
    entry: String,
}

impl From<Fields> for ShardRecord {
    fn from(fields: Fields) -> ShardRecord {
        ShardRecord {
            key: TensorKey {
                tensor: fields.tensor,
                microbatch: fields.microbatch,
                when: fields.when,
            },
            shard: Shard {
                role: fields.role,
                dtype: fields.dtype,
                shape: fields.shape,
                place: fields.place,
                placement: fields.placement,
                partial: fields.partial,
                replica: fields.replica,
                compiled: fields.compiled,
            },
            rank: fields.rank,
            host: fields.host,
            attempt: fields.attempt,
            mesh: fields.mesh,
            hash: fields.hash,
            length: fields.length,
            fingerprint: fields.fingerprint,
            fingerprint_source: fields.fingerprint_source,
            entry: fields.entry,
        }
    }
}

impl Serialize for ShardRecord {
    /// Writes the fields in the order of `Fields`, which is part of the format: the header of a
    /// shard file has them in this order, and equal dumps are equal byte for byte.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Shard { role, dtype, shape, place, placement, partial, replica, compiled } =
            &self.shard;
        let mut fields = serializer.serialize_map(None)?;
        fields.serialize_entry("tensor", &self.key.tensor)?;
        fields.serialize_entry("microbatch", &self.key.microbatch)?;
        fields.serialize_entry("when", &self.key.when)?;
        fields.serialize_entry("role", role)?;
        fields.serialize_entry("dtype", dtype)?;
        fields.serialize_entry("shape", shape)?;
        fields.serialize_entry("box", place)?;
        fields.serialize_entry("rank", &self.rank)?;
        fields.serialize_entry("host", &self.host)?;
        fields.serialize_entry("attempt", &self.attempt)?;
        fields.serialize_entry("mesh", &self.mesh)?;
        fields.serialize_entry("placement", placement)?;
        fields.serialize_entry("partial", partial)?;
        fields.serialize_entry("replica", replica)?;
        fields.serialize_entry("hash", &self.hash)?;
        fields.serialize_entry("length", &self.length)?;
        fields.serialize_entry("fingerprint", &self.fingerprint)?;
        fields.serialize_entry("fingerprint_source", &self.fingerprint_source)?;
        if *compiled {
            fields.serialize_entry("compiled", compiled)?;
        }
        fields.serialize_entry("entry", &self.entry)?;
        fields.end()
    }
}

/// Why a shard record contradicts itself.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// More dimensions than any framework makes.
    #[error("{key} has {found} dimensions: at most {MAX_DIMENSIONS} are accepted")]
    Dimensions {
        /// Which tensor.
        key: TensorKey,
        /// How many it claims.
        found: usize,
    },
    /// The box leaves the tensor.
    #[error("{key} of rank {rank}: {source}")]
    Box {
        /// Which tensor.
        key: TensorKey,
        /// Who held it.
        rank: Rank,
        /// The box and the shape.
        source: crate::index_box::BoxError,
    },
    /// The length is not what box and dtype make.
    #[error("{key} of rank {rank}: box {place} of {dtype} does not take {length} bytes")]
    Length {
        /// Which tensor.
        key: TensorKey,
        /// Who held it.
        rank: Rank,
        /// The claimed box.
        place: IndexBox,
        /// The claimed dtype.
        dtype: Dtype,
        /// The claimed length.
        length: u64,
    },
}

impl ShardRecord {
    /// Refuses a record whose box, dtype and length cannot all be true.
    pub fn check(&self) -> Result<(), RecordError> {
        let (key, rank) = (self.key.clone(), self.rank);
        if self.shape.len() > MAX_DIMENSIONS {
            return Err(RecordError::Dimensions { key, found: self.shape.len() });
        }
        let boxed = self.place.check(&self.shape);
        if !faults::seeded("box-not-checked") {
            boxed.map_err(|source| RecordError::Box { key: key.clone(), rank, source })?;
        }
        if self.shard.bytes() != Some(self.length) {
            let (place, dtype, length) = (self.place.clone(), self.dtype, self.length);
            return Err(RecordError::Length { key, rank, place, dtype, length });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record as backtape 0.1.0 wrote it into the header of a file.
    const WRITTEN: &str = concat!(
        r#"{"tensor":"q","microbatch":3,"when":"after_op","role":"q","dtype":"f32","shape":[4,2],"#,
        r#""box":[[2,4],[0,2]],"rank":1,"host":"node-1","attempt":0,"mesh":{"data":1},"#,
        r#""placement":{"data":{"shard":0},"model":"replicate"},"partial":"sum","replica":2,"#,
        r#""hash":"00000000000000000000000000000001","length":16,"fingerprint":[7,9],"#,
        r#""fingerprint_source":"framework","compiled":true,"entry":"q@after_op"}"#,
    );

    #[test]
    fn a_record_is_read_and_written_again_byte_for_byte() {
        let record: ShardRecord = serde_json::from_str(WRITTEN).unwrap();
        assert_eq!((record.replica, record.partial), (2, Some(Reduction::Sum)));
        assert_eq!(serde_json::to_string(&record).unwrap(), WRITTEN);
        record.check().unwrap();
        let plain = WRITTEN.replace(r#""compiled":true,"#, "");
        let record: ShardRecord = serde_json::from_str(&plain).unwrap();
        assert!(!record.compiled);
        assert_eq!(serde_json::to_string(&record).unwrap(), plain);
    }
}
