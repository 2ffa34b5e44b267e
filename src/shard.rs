//! The shard record: everything there is to know about the bytes one rank held.

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

/// One shard: which tensor, which box of it, who held it, and what its bytes hash to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Which value of which tensor.
    #[serde(flatten)]
    pub key: TensorKey,
    /// Its part in the loss head, if it has one.
    pub role: Option<Role>,
    /// Element type; the bits are the job's own.
    pub dtype: Dtype,
    /// Shape of the global tensor.
    pub shape: Vec<u64>,
    /// The part of it that these bytes are, row-major.
    #[serde(rename = "box")]
    pub place: IndexBox,
    /// Who held it.
    pub rank: Rank,
    /// On which machine.
    pub host: Name,
    /// In which launch of the run.
    pub attempt: Attempt,
    /// Where the holder sits on the mesh.
    pub mesh: MeshCoordinates,
    /// How the tensor lies on the mesh, as far as the framework says.
    pub placement: Placements,
    /// Set when the bytes are this rank's addend of the tensor, not its value.
    pub partial: Option<Reduction>,
    /// 0 for the first holder of this box, higher for its replicas.
    pub replica: u32,
    /// xxh3-128 of the bytes, taken in the training process.
    pub hash: ContentHash,
    /// Number of bytes.
    pub length: u64,
    /// Position-sensitive fingerprint of this shard's elements.
    pub fingerprint: Fingerprint,
    /// Who computed the fingerprint.
    pub fingerprint_source: FingerprintSource,
    /// True when a graph compiler (torch.compile) made the code around the capture.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compiled: bool,
    /// The entry of the safetensors file that holds the bytes.
    pub entry: String,
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
        let bytes = self.place.elements().and_then(|n| n.checked_mul(self.dtype.width() as u64));
        if bytes != Some(self.length) {
            let (place, dtype, length) = (self.place.clone(), self.dtype, self.length);
            return Err(RecordError::Length { key, rank, place, dtype, length });
        }
        Ok(())
    }
}
