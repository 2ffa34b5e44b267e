//! What is said of a shard, the bytes that one rank held of a tensor: by the job ([`TensorKey`],
//! [`Shard`]) and in a dump ([`ShardRecord`]).

mod record;

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::identity::{Microbatch, Name};
use crate::index_box::IndexBox;
use crate::placement::{Placements, Reduction};
use crate::role::Role;

pub(crate) use record::SortedRecord;
pub use record::{FingerprintSource, RecordError, ShardRecord};

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
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// The tensor's part in the loss head, if it has one. In a dump a value that the backward pass
    /// computed again has none: the forward's value has it, with which it is compared.
    pub role: Option<Role>,
    /// Element type; the bits are the job's own.
    pub dtype: Dtype,
    /// Shape of the global tensor.
    pub shape: Vec<u64>,
    /// The part of it that the bytes are, row-major.
    pub place: IndexBox,
    /// How the tensor lies on the mesh, as far as the framework says.
    pub placement: Placements,
    /// Set when the bytes are this rank's addend of the tensor, not its value.
    pub partial: Option<Reduction>,
    /// 0 for the first holder of this box, higher for its replicas.
    pub replica: u32,
    /// True when a graph compiler (torch.compile) made the code around the capture.
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

#[cfg(test)]
mod tests {
    use super::*;

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
