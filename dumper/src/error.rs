//! Why a call of the recorder failed. Unless the job asked for strict mode, the Python binding logs
//! these errors and does not raise them.

use std::path::PathBuf;

use backtape::credentials::CredentialsError;
use backtape::identity::NameError;

/// Why a call of the recorder failed. Each error is one sentence: what, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecorderError {
    /// The rank cannot be one of this job.
    #[error(
        "rank {rank} does not exist in a job of world size {world_size}: ranks count from 0; fix the job's rank or world size"
    )]
    RankOutside {
        /// The rank as given.
        rank: u32,
        /// The world size as given.
        world_size: u32,
    },
    /// A name from outside was refused.
    #[error("the {what} cannot be recorded under its name: {problem}")]
    Name {
        /// Which thing.
        what: &'static str,
        /// What is wrong with it.
        problem: NameError,
    },
    /// What is to be shown to the coordinator cannot be used.
    #[error("{0}")]
    Credentials(#[from] CredentialsError),
    /// The directory has no last component to name the run by.
    #[error("{path} does not name a run: give a directory such as dumps/run-a, or a store and a run", path = path.display())]
    Directory {
        /// As given.
        path: PathBuf,
    },
    /// Several ranks, a bucket and no coordinator: ranks find the coordinator inside rank 0 by a
    /// file that nobody else can read, and a bucket has no such file.
    #[error(
        "{world_size} ranks cannot find each other through the bucket {store}: start `coordinator --store {store} --world-size {world_size}` and set BACKTAPE_COORDINATOR"
    )]
    BucketAlone {
        /// The store.
        store: String,
        /// Ranks of the job.
        world_size: u32,
    },
    /// A ring longer than the coordinator accepts.
    #[error(
        "a ring of {steps} steps is too long: at most {} are kept",
        backtape::coordinator::limits::MAX_RING_STEPS
    )]
    RingTooLong {
        /// As given.
        steps: u32,
    },
    /// The background thread could not be started.
    #[error("the recorder's thread cannot be started on rank {rank}: {problem}")]
    Thread {
        /// Whose.
        rank: u32,
        /// Why.
        problem: std::io::Error,
    },
    /// The step is not among those selected.
    #[error("step {step} is not selected for recording: ask Recorder::wants first")]
    NotSelected {
        /// Which.
        step: u64,
    },
    /// The step has, or had, a tape already.
    #[error("step {step} was recorded before on rank {rank}: one tape for each step")]
    AlreadyRecorded {
        /// Which.
        step: u64,
        /// Who.
        rank: u32,
    },
    /// A second head declaration that says something else.
    #[error("step {step} on rank {rank} has two different head declarations: the first is kept")]
    HeadDisagrees {
        /// Which.
        step: u64,
        /// Who.
        rank: u32,
    },
    /// The declaration holds NaN or an infinity.
    #[error(
        "the head of step {step} on rank {rank} holds a number that is not finite: declare a finite one, or none"
    )]
    HeadNotFinite {
        /// Which.
        step: u64,
        /// Who.
        rank: u32,
    },
    /// The capture is not in the dump; its reason will be.
    #[error("{tensor} of step {step} on rank {rank} was omitted: {reason}")]
    Omitted {
        /// Which tensor.
        tensor: String,
        /// Of which step.
        step: u64,
        /// Who held it.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// The recorder was closed.
    #[error("the recorder of rank {rank} is closed: start a new one")]
    Closed {
        /// Whose.
        rank: u32,
    },
    /// Something failed in the background (strict mode only).
    #[error("the recorder of rank {rank} failed: {detail}")]
    Faulty {
        /// Whose.
        rank: u32,
        /// The first fault.
        detail: String,
    },
}
