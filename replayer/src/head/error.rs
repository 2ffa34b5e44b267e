//! Why a step's head cannot be replayed.

use backtape::role::Role;
use backtape::shard::TensorKey;

use crate::assemble::{self, Tensor};

/// Why a step's head cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The dump holds only a part of the step.
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
        /// Why the job's declaration was refused, if it made one.
        refused: Option<String>,
    },
    /// The declaration cannot be replayed.
    #[error(transparent)]
    Head(#[from] super::options::HeadError),
    /// A role that every replay needs was not recorded.
    #[error(
        "the dump holds no {role}{of_microbatch}: record it with tape.record(\"{role}\", ...) or do not ask for it; recorded: {recorded}"
    )]
    Missing {
        /// The role.
        role: Role,
        /// In which microbatch, in words.
        of_microbatch: String,
        /// The names of the tensors that were recorded.
        recorded: String,
    },
    /// A tensor that every replay needs was recorded and cannot be trusted.
    #[error("{key} cannot be used: {why}")]
    Unusable {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        why: String,
    },
    /// A tensor that was recorded cannot be assembled from its shards.
    #[error("{key} cannot be reassembled: {source}")]
    Assemble {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        source: assemble::AssembleError,
    },
    /// A part of the replay that another process should compute was not computed.
    #[error("a task of the replay has no result: {why}")]
    Task {
        /// Why.
        why: String,
    },
    /// A GPU failed during the replay.
    #[error("{why}; with --device cpu the replay needs no device")]
    Device {
        /// Why.
        why: String,
    },
    /// The user's own kernel failed.
    #[error("--kernel {name}: {why}")]
    Kernel {
        /// The name that was asked for.
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
    /// True where the dump lacks something that this stage needs, so that another stage may still
    /// be judged.
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
    let dtype_and_shape = format!("{} {:?}", tensor.dtype, tensor.shape);
    StepError::Unfit { key: tensor.key.clone(), found: dtype_and_shape, wanted: wanted.into() }
}
