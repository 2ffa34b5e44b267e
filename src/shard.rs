//! What is said of a shard, the bytes that one rank held of a tensor: by the job ([`TensorKey`],
//! [`Shard`]) and in a dump ([`ShardRecord`]).

use std::ops::{Deref, DerefMut};

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use crate::dtype::Dtype;
use crate::faults;
use crate::fingerprint::Fingerprint;
use crate::hash::ContentHash;
use crate::identity::{Attempt, Microbatch, Name, Rank};
use crate::index_box::IndexBox;
use crate::placement::{MeshCoordinates, Placements, Reduction};
use crate::role::Role;

/// Most dimensions a tensor may have; numpy's own limit is 64.
pub const MAX_DIMENSIONS: usize = 32;

/// When a tensor was captured, as `when=` names it. NVIDIA/Megatron-LM issue
/// 7400 reached no conclusion because "inputs were saved afterward".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Before the op that the tensor enters.
    BeforeOp,
    /// After the op that made it.
    AfterOp,
    /// Before the reduction over ranks.
    PreReduce,
    /// After the reduction over ranks.
    PostReduce,
    /// Again, in the backward pass: activation checkpointing computes the forward anew.
    Recompute,
}

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

/// Which value of a tensor: one name can be captured per microbatch and at
/// several moments of a step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorKey {
    /// The tensor's name.
    pub tensor: Name,
    /// Its microbatch; `None` for weights and reduced gradients.
    pub microbatch: Option<Microbatch>,
    /// When it was captured.
    pub when: Option<When>,
}

impl std::fmt::Display for TensorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.tensor)?;
        if let Some(microbatch) = self.microbatch {
            write!(f, " microbatch {microbatch}")?;
        }
        match self.when {
            Some(When::BeforeOp) => f.write_str(" before the op"),
            Some(When::AfterOp) => f.write_str(" after the op"),
            Some(When::PreReduce) => f.write_str(" before the reduction"),
            Some(When::PostReduce) => f.write_str(" after the reduction"),
            Some(When::Recompute) => f.write_str(" as recomputed"),
            None => Ok(()),
        }
    }
}

/// A word that a job gave as a role and that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not a role; the roles are {known}")]
pub struct UnknownRole {
    /// The word, or its beginning.
    word: String,
    /// Every role.
    known: String,
}

impl TensorKey {
    /// The role that the job gives the tensor by `word`, or by the tensor's own name where that is
    /// a role and `word` is absent.
    pub fn role(&self, word: Option<&str>) -> Result<Option<Role>, UnknownRole> {
        let Some(word) = word else { return Ok(Role::from_name(self.tensor.as_str())) };
        match Role::from_name(word) {
            // What is computed again plays no role (`Shard::role`): no word for one is wrong.
            None if self.when != Some(When::Recompute) => Err(UnknownRole {
                word: word.chars().take(80).collect(),
                known: Role::ALL.iter().map(|role| role.name()).collect::<Vec<_>>().join(" "),
            }),
            role => Ok(role),
        }
    }
}

/// One shard as the job describes it: which part of a tensor its bytes are. Python's
/// `backtape.shards.Shard` says the same; this is carried unchanged from the Python binding through
/// the recorder into the shard's record ([`ShardRecord`]).
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Shard {
    /// The tensor's part in the loss head, if it has one. In a dump a value that the backward pass
    /// computed again has none: the forward's value has it, with which it is compared.
    pub role: Option<Role>,
    /// Element type; the bits are the job's own.
    pub dtype: Dtype,
    /// Shape of the global tensor.
    pub shape: Vec<u64>,
    /// The part of it that the bytes are, row-major.
    #[serde(rename = "box")]
    pub place: IndexBox,
    /// How the tensor lies on the mesh, as far as the framework says.
    pub placement: Placements,
    /// Set when the bytes are this rank's addend of the tensor, not its value.
    pub partial: Option<Reduction>,
    /// 0 for the first holder of this box, higher for its replicas.
    pub replica: u32,
    /// True when a graph compiler (torch.compile) made the code around the capture.
    #[serde(default)]
    pub compiled: bool,
}

impl Shard {
    /// A box of a tensor of which nothing more is said.
    pub fn new(dtype: Dtype, shape: Vec<u64>, place: IndexBox) -> Shard {
        Shard {
            role: None,
            dtype,
            shape,
            place,
            placement: Placements::new(),
            partial: None,
            replica: 0,
            compiled: false,
        }
    }

    /// How many bytes the box takes; `None` when that overflows.
    pub fn bytes(&self) -> Option<u64> {
        self.place.elements()?.checked_mul(self.dtype.width() as u64)
    }
}

/// What a dump says of one shard: the job's description, who held it, and what its bytes are
/// known by. Its fields are those of the [`Shard`] too: `record.place`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ShardRecord {
    /// Which value of which tensor.
    #[serde(flatten)]
    pub key: TensorKey,
    /// Which part of it.
    #[serde(flatten)]
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

impl Serialize for ShardRecord {
    /// Written out, as the order of the fields is part of the format: the header of a shard file
    /// has them in this order, and equal dumps are equal byte for byte. Deriving would put the
    /// description's fields together.
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

    #[test]
    fn a_role_is_the_word_or_the_name_and_a_wrong_word_is_refused_with_the_roles() {
        let key = |tensor: &str, when| TensorKey {
            tensor: Name::new(tensor).unwrap(),
            microbatch: None,
            when,
        };
        assert_eq!(key("q", None).role(None), Ok(Some(Role::Q)));
        assert_eq!(key("hidden", None).role(None), Ok(None));
        assert_eq!(key("hidden", None).role(Some("q")), Ok(Some(Role::Q)));
        let refused = key("q", None).role(Some("query")).unwrap_err().to_string();
        assert!(refused.starts_with("\"query\" is not a role; the roles are q k "), "{refused}");
        assert_eq!(key("q", Some(When::Recompute)).role(Some("query")), Ok(None));
    }
}
