//! What a dump says of a shard, and its JSON.

use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;

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

/// The fields of a record's JSON in their order, which is part of the format: the header of a shard
/// file has them in this order, and equal dumps are equal byte for byte.
const FIELDS: [&str; 20] = [
    "tensor",
    "microbatch",
    "when",
    "role",
    "dtype",
    "shape",
    "box",
    "rank",
    "host",
    "attempt",
    "mesh",
    "placement",
    "partial",
    "replica",
    "hash",
    "length",
    "fingerprint",
    "fingerprint_source",
    "compiled",
    "entry",
];

/// The same fields as a manifest has them, whose objects are sorted by key.
static SORTED: LazyLock<[&str; FIELDS.len()]> = LazyLock::new(|| {
    let mut fields = FIELDS;
    fields.sort_unstable();
    fields
});

impl Serialize for ShardRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize_in(&FIELDS, serializer)
    }
}

/// A record whose JSON has its fields sorted by name. Its own objects are maps that are sorted.
pub(crate) struct SortedRecord<'a>(pub(crate) &'a ShardRecord);

impl Serialize for SortedRecord<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize_in(&*SORTED, serializer)
    }
}

impl ShardRecord {
    fn serialize_in<S: Serializer>(
        &self,
        order: &[&'static str],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let Shard { role, dtype, shape, place, placement, partial, replica, compiled } =
            &self.shard;
        let mut fields = serializer.serialize_map(None)?;
        for &name in order {
            match name {
                "tensor" => fields.serialize_entry(name, self.key.tensor.as_str())?,
                "microbatch" => fields.serialize_entry(name, &self.key.microbatch)?,
                "when" => fields.serialize_entry(name, &self.key.when)?,
                "role" => fields.serialize_entry(name, role)?,
                "dtype" => fields.serialize_entry(name, dtype)?,
                "shape" => fields.serialize_entry(name, shape)?,
                "box" => fields.serialize_entry(name, place)?,
                "rank" => fields.serialize_entry(name, &self.rank)?,
                "host" => fields.serialize_entry(name, self.host.as_str())?,
                "attempt" => fields.serialize_entry(name, &self.attempt)?,
                "mesh" => fields.serialize_entry(name, &self.mesh)?,
                "placement" => fields.serialize_entry(name, placement)?,
                "partial" => fields.serialize_entry(name, partial)?,
                "replica" => fields.serialize_entry(name, replica)?,
                "hash" => fields.serialize_entry(name, &self.hash)?,
                "length" => fields.serialize_entry(name, &self.length)?,
                "fingerprint" => fields.serialize_entry(name, &self.fingerprint)?,
                "fingerprint_source" => {
                    fields.serialize_entry(name, &self.fingerprint_source)?;
                }
                "compiled" if *compiled => fields.serialize_entry(name, compiled)?,
                "entry" => fields.serialize_entry(name, &self.entry)?,
                _ => {}
            }
        }
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
        let (key, rank) = (|| self.key.clone(), self.rank);
        if self.shape.len() > MAX_DIMENSIONS {
            return Err(RecordError::Dimensions { key: key(), found: self.shape.len() });
        }
        let boxed = self.place.check(&self.shape);
        if !faults::seeded("box-not-checked") {
            boxed.map_err(|source| RecordError::Box { key: key(), rank, source })?;
        }
        if self.shard.bytes() != Some(self.length) {
            let (place, dtype, length) = (self.place.clone(), self.dtype, self.length);
            return Err(RecordError::Length { key: key(), rank, place, dtype, length });
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

    /// Goal: a manifest's text is what sorting a tree of values gives, and no field is left out.
    #[test]
    fn a_sorted_record_is_the_text_of_its_sorted_tree() {
        for text in [WRITTEN.to_owned(), WRITTEN.replace(r#""compiled":true,"#, "")] {
            let record: ShardRecord = serde_json::from_str(&text).unwrap();
            let tree: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(serde_json::to_string(&SortedRecord(&record)).unwrap(), tree.to_string());
        }
    }
}
