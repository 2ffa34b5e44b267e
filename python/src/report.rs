//! A report as Python holds it: what was found, which it writes as JSON, as text or as HTML.

use std::sync::atomic::{AtomicU64, Ordering};

use backtape_replayer::report::checked::{self, ChecksReport};
use backtape_replayer::report::trajectory::{self, TrajectoryReport};
use backtape_replayer::report::{self, html, text};
use pyo3::prelude::*;

use crate::postmortem::failed;

/// What a replay, the checks or a look at the trajectory found.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Report(AnyReport);

enum AnyReport {
    Replay(Box<report::Report>),
    Checks(ChecksReport),
    Trajectory(TrajectoryReport),
}

impl From<report::Report> for Report {
    fn from(report: report::Report) -> Report {
        Report(AnyReport::Replay(Box::new(report)))
    }
}

impl From<ChecksReport> for Report {
    fn from(report: ChecksReport) -> Report {
        Report(AnyReport::Checks(report))
    }
}

impl From<TrajectoryReport> for Report {
    fn from(report: TrajectoryReport) -> Report {
        Report(AnyReport::Trajectory(report))
    }
}

#[pymethods]
impl Report {
    /// The report as one JSON object, whose `schema` says of which kind it is.
    fn json(&self) -> PyResult<String> {
        match &self.0 {
            AnyReport::Replay(report) => serde_json::to_string(report),
            AnyReport::Checks(report) => serde_json::to_string(report),
            AnyReport::Trajectory(report) => serde_json::to_string(report),
        }
        .map_err(failed)
    }

    /// What the command line prints.
    fn text(&self) -> String {
        match &self.0 {
            AnyReport::Replay(report) => text::render(report),
            AnyReport::Checks(report) => checked::render(report),
            AnyReport::Trajectory(report) => trajectory::render(report),
        }
    }

    /// The report as a fragment of a page. A page may hold several, so each has ids of its own.
    fn html(&self) -> String {
        static SHOWN: AtomicU64 = AtomicU64::new(0);
        match &self.0 {
            AnyReport::Replay(report) => {
                let number = SHOWN.fetch_add(1, Ordering::Relaxed);
                html::fragment(report, &format!("bt-{}-{number}", std::process::id()))
            }
            _ => preformatted(&self.text()),
        }
    }
}

/// A text as a fragment of a page, for reports that have no drawings.
fn preformatted(text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<pre class=\"backtape-report\">{escaped}</pre>")
}
