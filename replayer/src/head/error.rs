//! Why a step's head cannot be replayed.

use backtape::role::Role;
use backtape::shard::TensorKey;

use crate::assemble::{self, Tensor};

/// Why a step's head cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The dump holds a part of the step.
    #[error("step {step} is partial, and a part is not judged: {why}")]
    Partial {
        /// The step.
        step: u64,
        /// Why.
        why: String,
    },
    /// The job declared no head.
    #[error("step {step} declares no loss head: {}", why_none(*step, refused.as_deref()))]
    NoHead {
        /// The step.
        step: u64,
        /// Why a declaration that was made was not taken.
        refused: Option<String>,
    },
    /// The declaration cannot be replayed.
    #[error(transparent)]
    Head(#[from] super::options::HeadError),
    /// A role that every replay needs was not recorded.
    #[error(
        "the dump holds no {role}{of}: record it with tape.record(\"{role}\", ...) or do not ask for it; recorded: {recorded}"
    )]
    Missing {
        /// The role.
        role: Role,
        /// Of which microbatch, as words.
        of: String,
        /// What there is instead.
        recorded: String,
    },
    /// A role that every replay needs is there and cannot be believed.
    #[error("{key} cannot be used: {why}")]
    Unusable {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        why: String,
    },
    /// A tensor that is there cannot be put together.
    #[error("{key} cannot be reassembled: {source}")]
    Assemble {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        source: assemble::AssembleError,
    },
    /// A part of it that others compute was not computed.
    #[error("a task of the replay has no result: {why}")]
    Task {
        /// Why.
        why: String,
    },
    /// A device failed in the middle of it.
    #[error("{why}; with --device cpu the replay needs no device")]
    Device {
        /// Why.
        why: String,
    },
    /// A kernel of the user's did not run.
    #[error("--kernel {name}: {why}")]
    Kernel {
        /// As it was asked for.
        name: String,
        /// Why.
        why: String,
    },
    /// Shape or dtype does not fit the head.
    #[error("{key} is {found}, the head needs {wanted}")]
    Unfit {
        /// Which tensor.
        key: TensorKey,
        /// Its dtype and shape.
        found: String,
        /// What would fit.
        wanted: String,
    },
}

impl StepError {
    /// True where the dump, or what the job says of it, lacks what would be judged: another
    /// stage may be judged all the same.
    pub fn is_of_dump(&self) -> bool {
        match self {
            StepError::Missing { .. }
            | StepError::Unusable { .. }
            | StepError::Assemble { .. }
            | StepError::Unfit { .. } => true,
            StepError::Partial { .. }
            | StepError::NoHead { .. }
            | StepError::Head(_)
            | StepError::Task { .. }
            | StepError::Device { .. }
            | StepError::Kernel { .. } => false,
        }
    }
}

fn why_none(step: u64, refused: Option<&str>) -> String {
    match refused {
        Some(why) => format!("what the job declared was refused while it ran: {why}"),
        None => format!("call tape.head(...) inside recorder.step({step})"),
    }
}

pub(crate) fn unfit(tensor: &Tensor, wanted: &str) -> StepError {
    let found = format!("{} {:?}", tensor.dtype, tensor.shape);
    StepError::Unfit { key: tensor.key.clone(), found, wanted: wanted.into() }
}
