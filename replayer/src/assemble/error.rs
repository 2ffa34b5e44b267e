//! Why a tensor cannot be assembled, and what is missing.

use backtape::identity::Rank;
use backtape::index_box::{BoxError, IndexBox};
use backtape::shard::TensorKey;

use crate::dump::{Disagreement, name_ranks};

/// Most boxes and faults that a sentence names; the others are only counted.
const NAMED: usize = 4;

/// Why a tensor cannot be assembled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AssembleError {
    #[error("{key} was not dumped: the step holds {}", some(held))]
    Absent { key: TensorKey, held: Vec<TensorKey> },
    #[error(
        "{key} is held as addends, one per rank, and has no value of its own: ask for one rank's addend (--rank 0, in Python rank=0)"
    )]
    Addends { key: TensorKey },
    #[error("{key} is held as values, not as addends: assemble it")]
    Values { key: TensorKey },
    #[error("{key} has no one meaning: {disagreement}")]
    Disagreement { key: TensorKey, disagreement: Box<Disagreement> },
    #[error("{key} has no such part: ask for one inside of it")]
    Outside { key: TensorKey, source: Box<BoxError> },
    #[error("{0}")]
    Incomplete(Box<Incomplete>),
    #[error(
        "{key} needs {bytes} bytes of memory, which this machine does not give: ask for a part of it"
    )]
    Memory { key: TensorKey, bytes: u64 },
    #[error("rank {rank} holds no addend of {key}: {} do", name_ranks(ranks))]
    NoAddend { key: TensorKey, rank: Rank, ranks: Vec<Rank> },
    #[error("the addend of {key} on rank {rank} is in {boxes} separate boxes: ask for its parts")]
    Scattered { key: TensorKey, rank: Rank, boxes: usize },
}

/// What is missing of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incomplete {
    /// Which tensor.
    pub key: TensorKey,
    /// The parts that no intact shard holds.
    pub gaps: Vec<IndexBox>,
    /// Ranks whose records claim to hold a part of the gaps; may be empty.
    pub ranks: Vec<Rank>,
    /// Ranks of the job of which the dump holds no file: any of them may have held it.
    pub missing_ranks: Vec<Rank>,
    /// What is wrong with the shards that should fill the gaps.
    pub faults: Vec<String>,
}

impl std::fmt::Display for Incomplete {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is incomplete: nothing intact holds {}", self.key, some(&self.gaps))?;
        if !self.ranks.is_empty() {
            write!(f, ", which {} should", name_ranks(&self.ranks))?;
        } else if !self.missing_ranks.is_empty() {
            write!(f, ", and {} left no file", name_ranks(&self.missing_ranks))?;
        } else {
            f.write_str(", and no rank recorded it")?;
        }
        if !self.faults.is_empty() {
            write!(f, " ({})", self.faults[..self.faults.len().min(NAMED)].join("; "))?;
        }
        Ok(())
    }
}

/// The first few values, and how many more there are.
fn some<T: std::fmt::Display>(values: &[T]) -> String {
    if values.is_empty() {
        return "nothing".into();
    }
    let mut shown: Vec<String> = values.iter().take(NAMED).map(T::to_string).collect();
    if values.len() > NAMED {
        shown.push(format!("{} more", values.len() - NAMED));
    }
    shown.join(", ")
}
