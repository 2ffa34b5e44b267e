//! The scalars of a training run: one row for each step of each rank, recorded at every
//! step whether or not tensors are.
//!
//! ```text
//! <attempt>/scalars/rank-00003.jsonl               what readers of backtape go by
//! <attempt>/scalars/rank-00003.csv                 step,time,rank,name,value
//! <attempt>/scalars/rank-00003/events.out.tfevents.*   for TensorBoard, one run each rank
//! <attempt>/scalars/rank-00003/<process>-<from>-<to>.jsonl   in a bucket, which cannot append
//! ```
//!
//! Scalars are telemetry, not shards: lines are appended whole and survive a kill of the
//! process, but nothing waits for an fsync, and a torn last line is left out by the reader.

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

/// Directory of the scalars below an attempt's.
pub const DIRECTORY: &str = "scalars";

/// Bytes of a scalar's name: the longest path of a parameter we have seen is 120.
pub const MAX_NAME_BYTES: usize = 256;

/// Scalars of one step: a thousand layers with ten numbers each, sixfold.
pub const MAX_VALUES: usize = 1 << 16;

/// A step counts as clipped where the norm before is this many times the norm after: one
/// spacing of bf16, the coarsest format that norms are kept in.
pub const CLIPPED_BEYOND: f64 = 1.0 + 1.0 / 128.0;

/// The scalars that one rank recorded together.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Which step.
    pub step: u64,
    /// Seconds since the epoch, by the rank's clock.
    pub time: f64,
    /// By name; a name with a `/` is one of many of its kind (a layer's).
    pub values: Vec<(String, f64)>,
}

impl Row {
    /// The row without what nobody could store: names that are too long or empty, and
    /// values beyond the most that a row may have; with the number of those.
    pub fn bounded(mut self) -> (Row, usize) {
        let before = self.values.len();
        self.values.retain(|(name, _)| !name.is_empty() && name.len() <= MAX_NAME_BYTES);
        self.values.truncate(MAX_VALUES);
        let left_out = before - self.values.len();
        (self, left_out)
    }
}

/// True for a scalar that stands for the whole model, not for one of its layers.
pub fn is_global_name(name: &str) -> bool {
    !name.contains('/')
}

/// The JSON lines of a rank below an attempt's directory.
pub fn json_lines(attempt: &Path, rank: Rank) -> PathBuf {
    attempt.join(DIRECTORY).join(format!("rank-{:05}.jsonl", rank.0))
}

/// JSON and CSV have no words of their own for these.
pub(crate) fn word(value: f64) -> Option<&'static str> {
    match value {
        v if v.is_nan() => Some("NaN"),
        f64::INFINITY => Some("Infinity"),
        f64::NEG_INFINITY => Some("-Infinity"),
        _ => None,
    }
}
