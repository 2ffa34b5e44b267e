//! What a recorder did, as Python sees it.

use std::path::PathBuf;

use backtape_dumper::Steps;
use pyo3::prelude::*;

/// What one recorder did: counts, and sentences about what went wrong.
#[pyclass(frozen, get_all, module = "backtape._native")]
pub(crate) struct Summary {
    shards: u64,
    bytes: u64,
    scalar_rows: u64,
    steps_committed: Vec<u64>,
    steps_partial: Vec<u64>,
    omissions: Vec<String>,
    faults: Vec<String>,
    orders: Vec<String>,
    ring_dropped: u64,
    attempt: Option<u32>,
    directory: Option<PathBuf>,
    streamed: bool,
}

impl From<backtape_dumper::Summary> for Summary {
    fn from(summary: backtape_dumper::Summary) -> Summary {
        Summary {
            shards: summary.shards,
            bytes: summary.bytes,
            scalar_rows: summary.scalar_rows,
            steps_committed: summary.steps_committed.iter().collect(),
            steps_partial: summary.steps_partial.iter().collect(),
            omissions: summary.omissions,
            faults: summary.faults,
            orders: summary.orders,
            ring_dropped: summary.ring_dropped,
            attempt: summary.attempt,
            directory: summary.directory,
            streamed: summary.streamed,
        }
    }
}

#[pymethods]
impl Summary {
    /// One line for the log.
    fn __str__(&self) -> String {
        let runs = |steps: &[u64]| steps.iter().copied().collect::<Steps>();
        let (committed, partial) = (runs(&self.steps_committed), runs(&self.steps_partial));
        let (shards, bytes) = (self.shards, self.bytes);
        let mut text = format!(
            "{shards} shards, {bytes} bytes; steps committed {committed:?}, partial {partial:?}"
        );
        if self.scalar_rows > 0 {
            text.push_str(&format!("; {} rows of scalars", self.scalar_rows));
        }
        let lists =
            [(&self.orders, "order"), (&self.omissions, "omitted"), (&self.faults, "fault")];
        for (list, what) in lists {
            if let Some(first) = list.first() {
                text.push_str(&format!("; {} {what}, the first: {first}", list.len()));
            }
        }
        text
    }

    fn __repr__(&self) -> String {
        format!("<backtape.Summary: {}>", self.__str__())
    }
}
