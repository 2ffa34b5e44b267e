//! What a recorder did, for the log line at the end of a job.

use std::path::PathBuf;

/// Counts and named troubles of one recorder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Shards that the coordinator acknowledged.
    pub shards: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Rows of scalars that lie in the store.
    pub scalar_rows: u64,
    /// Steps whose manifest stands at its final name.
    pub steps_committed: Vec<u64>,
    /// Steps recorded here that are not known to be committed.
    pub steps_partial: Vec<u64>,
    /// What was not recorded, each with its reason.
    pub omissions: Vec<String>,
    /// What went wrong in the background, each one sentence.
    pub faults: Vec<String>,
    /// What the coordinator asked for while the job ran, each one sentence.
    pub orders: Vec<String>,
    /// Steps that fell out of the ring before their time, for want of memory.
    pub ring_dropped: u64,
    /// Which launch of the run this is, once the coordinator has said so.
    pub attempt: Option<u32>,
    /// Directory of the attempt, as the coordinator sees it.
    pub directory: Option<PathBuf>,
    /// True when the files were sent to the coordinator, not written beside its own.
    pub streamed: bool,
}
