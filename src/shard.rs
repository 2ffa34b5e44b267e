//! The shard record: the description of the bytes that one rank held of one tensor.

use serde::{Deserialize, Serialize};

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
    /// In the backward pass, where activation checkpointing computes the forward pass a second
    /// time.
    Recompute,
}

/// Who computed a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FingerprintSource {
    /// The framework, on the sharded array, with its own global indices: independent of the box in
    /// the record, so that it also checks the box.
    Framework,
    /// The recorder, from the box that the job gave: it detects damage on the way to the dump, but
    /// not a wrong box.
    Recorder,
}

/// Identifies one captured value of a tensor: the same name can be captured for each microbatch and
/// at several moments of a step.
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

/// One shard: of which tensor, which box of it, which rank held it, and the hash of its bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// The tensor, its microbatch and when it was captured.
    #[serde(flatten)]
    pub key: TensorKey,
    /// Its part in the loss head, if it has one.
    pub role: Option<Role>,
    /// Element type of the bytes, as the job held them.
    pub dtype: Dtype,
    /// Shape of the global tensor.
    pub shape: Vec<u64>,
    /// The box of the global tensor that the bytes hold, row-major.
    #[serde(rename = "box")]
    pub place: IndexBox,
    /// The rank that held it.
    pub rank: Rank,
    /// The rank's machine.
    pub host: Name,
    /// The launch of the run.
    pub attempt: Attempt,
    /// The rank's coordinates on the mesh.
    pub mesh: MeshCoordinates,
    /// How the tensor is distributed over the mesh, as far as the framework reports it.
    pub placement: Placements,
    /// Set if the bytes are only this rank's addend of the tensor: how the addends of all ranks
    /// combine to its value.
    pub partial: Option<Reduction>,
    /// 0 for one of the ranks that hold this box, 1, 2, … for its replicas.
    pub replica: u32,
    /// xxh3-128 of the bytes, taken in the training process.
    pub hash: ContentHash,
    /// Number of bytes.
    pub length: u64,
    /// Position-sensitive fingerprint of this shard's elements.
    pub fingerprint: Fingerprint,
    /// Who computed `fingerprint`.
    pub fingerprint_source: FingerprintSource,
    /// True when the captured code was compiled by a graph compiler (torch.compile).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compiled: bool,
    /// The name of the safetensors entry that holds the bytes.
    pub entry: String,
}

/// Why a shard record contradicts itself.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It has more dimensions than any framework supports.
    #[error("{key} has {found} dimensions: at most {MAX_DIMENSIONS} are accepted")]
    Dimensions {
        /// Which tensor.
        key: TensorKey,
        /// The claimed number of dimensions.
        found: usize,
    },
    /// The box does not fit in the tensor's shape.
    #[error("{key} of rank {rank}: {source}")]
    Box {
        /// Which tensor.
        key: TensorKey,
        /// The rank that held it.
        rank: Rank,
        /// Which box does not fit in which shape.
        source: crate::index_box::BoxError,
    },
    /// The length is not the number of elements in the box times the width of the dtype.
    #[error("{key} of rank {rank}: box {place} of {dtype} does not take {length} bytes")]
    Length {
        /// Which tensor.
        key: TensorKey,
        /// The rank that held it.
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
    /// Refuses a record whose box, shape, dtype and length contradict each other.
    pub fn check(&self) -> Result<(), RecordError> {
        let (key, rank) = (self.key.clone(), self.rank);
        if self.shape.len() > MAX_DIMENSIONS {
            return Err(RecordError::Dimensions { key, found: self.shape.len() });
        }
        let boxed = self.place.check(&self.shape);
        if !faults::seeded("box-not-checked") {
            boxed.map_err(|source| RecordError::Box { key: key.clone(), rank, source })?;
        }
        let bytes = self.place.elements().and_then(|n| n.checked_mul(self.dtype.width() as u64));
        if bytes != Some(self.length) {
            let (place, dtype, length) = (self.place.clone(), self.dtype, self.length);
            return Err(RecordError::Length { key, rank, place, dtype, length });
        }
        Ok(())
    }
}
