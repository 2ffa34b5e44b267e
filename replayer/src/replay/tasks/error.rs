//! Why a task has no result.

use backtape::shard::TensorKey;

use crate::assemble::AssembleError;
use crate::dump::OpenError;
use crate::head::step::StepError;
use crate::parcel::ParcelError;
use crate::spill::SpillError;

/// Why a task has no result.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// It was sent by another build, or damaged on the way.
    #[error(transparent)]
    Parcel(#[from] ParcelError),
    /// Large arrays cannot be kept where the command said.
    #[error("on a worker's host")]
    Spill(#[from] SpillError),
    /// The dump cannot be opened where the task runs.
    #[error("the dump cannot be opened on the worker's host, which must see it at the same path")]
    Open(#[from] OpenError),
    /// What it reads is not there, or damaged.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// The head is not the one that was sent.
    #[error(transparent)]
    Step(#[from] Box<StepError>),
    /// What it reads is no matrix of floats.
    #[error("{0} holds no floats")]
    NoFloats(TensorKey),
}
