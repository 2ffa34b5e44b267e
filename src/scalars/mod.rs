//! The scalars of a training run: one row for each step of each rank, also at steps at which no
//! tensors are recorded.
//!
//! ```text
//! <attempt>/scalars/rank-00003.jsonl               what readers of backtape go by
//! <attempt>/scalars/rank-00003.csv                 step,time,rank,name,value
//! <attempt>/scalars/rank-00003/events.out.tfevents.*   for TensorBoard, one run each rank
//! <attempt>/scalars/rank-00003/<process>-<from>-<to>.jsonl   in a bucket, which cannot append
//! ```
//!
//! Scalars are telemetry and less durable than shards: each line is appended in one write and
//! survives a kill of the process, but nothing waits for an fsync, and a reader skips an incomplete
//! last line.

pub mod csv;
pub mod events;
pub mod files;
pub mod line;
pub mod objects;

pub use files::ScalarFiles;
pub use line::{Header, Line, LineError};
pub use objects::ScalarObjects;

use std::path::{Path, PathBuf};

use crate::identity::Rank;

/// Name of the directory of the scalars, below an attempt's directory.
pub const DIRECTORY: &str = "scalars";

/// Most bytes of a scalar's name: the longest parameter path seen so far has 120.
pub const MAX_NAME_BYTES: usize = 256;

/// Most scalars of one step: six times those of 1,000 layers with ten numbers each.
pub const MAX_VALUES: usize = 1 << 16;

/// The gradient of a step counts as clipped if its norm before clipping is more than this many
/// times the norm after: 1 plus one ulp of bf16, the coarsest format in which jobs keep norms.
pub const CLIPPED_BEYOND: f64 = 1.0 + 1.0 / 128.0;

/// The scalars that one rank recorded together.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The step.
    pub step: u64,
    /// Seconds since the epoch, by the rank's clock.
    pub time: f64,
    /// Names with their values; a name with a `/` belongs to one layer or parameter.
    pub values: Vec<(String, f64)>,
}

impl Row {
    /// The row without values whose name is empty or too long, and without those beyond
    /// [`MAX_VALUES`]; and the number of values left out.
    pub fn bounded(mut self) -> (Row, usize) {
        let before = self.values.len();
        self.values.retain(|(name, _)| !name.is_empty() && name.len() <= MAX_NAME_BYTES);
        self.values.truncate(MAX_VALUES);
        let left_out = before - self.values.len();
        (self, left_out)
    }
}

/// True for a scalar of the whole model, false for one of a single layer.
pub fn is_global_name(name: &str) -> bool {
    !name.contains('/')
}

/// The JSON lines of a rank below an attempt's directory.
pub fn json_lines(attempt: &Path, rank: Rank) -> PathBuf {
    attempt.join(DIRECTORY).join(format!("rank-{:05}.jsonl", rank.0))
}

/// The text for a value that is not finite, for which JSON and CSV have no number.
pub(crate) fn word(value: f64) -> Option<&'static str> {
    match value {
        v if v.is_nan() => Some("NaN"),
        f64::INFINITY => Some("Infinity"),
        f64::NEG_INFINITY => Some("-Infinity"),
        _ => None,
    }
}
