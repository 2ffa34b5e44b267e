//! What comes after the job: opening a dump, its tensors, and the replay.

use std::path::PathBuf;

use backtape::identity::Rank;
use backtape::shard::{TensorKey, When};
use backtape_replayer::cli::{PageFile, RunError};
use backtape_replayer::dump::{self, FindError, Selection};
use backtape_replayer::replay::against::{Asked, PatternError};
use backtape_replayer::report::Report;
use backtape_replayer::trajectory::Declared;
use backtape_replayer::{assemble, cli};
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// One step of a dump, open for reading.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct StepDump(dump::StepDump);

/// The whole chain of an error, on one line.
pub(crate) fn failed(error: impl std::error::Error) -> PyErr {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    PyRuntimeError::new_err(text)
}

/// The moment of a tensor as Python spells it.
pub(crate) fn moment(key: &TensorKey) -> Option<String> {
    let when = key.when.and_then(|when| serde_json::to_value(when).ok());
    when.and_then(|when| when.as_str().map(str::to_string))
}

#[pymethods]
impl StepDump {
    #[new]
    #[pyo3(signature = (path, run=None, attempt=None, step=None))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        run: Option<String>,
        attempt: Option<u32>,
        step: Option<u64>,
    ) -> PyResult<StepDump> {
        let selection = Selection { run, attempt, step };
        py.detach(|| dump::open(&path, &selection)).map(StepDump).map_err(failed)
    }

    /// The manifest as JSON.
    fn manifest(&self) -> PyResult<String> {
        serde_json::to_string(&self.0.manifest).map_err(failed)
    }

    /// True when the step was committed.
    #[getter]
    fn committed(&self) -> bool {
        self.0.committed()
    }

    /// Name, microbatch and moment of every tensor.
    fn keys(&self) -> Vec<(String, Option<u32>, Option<String>)> {
        let one =
            |key: &TensorKey| (key.tensor.to_string(), key.microbatch.map(|mb| mb.0), moment(key));
        self.0.tensors().keys().map(one).collect()
    }

    /// Bytes, numpy's name of the dtype, and shape of a tensor; of one rank's
    /// addend when `rank` is given.
    #[pyo3(signature = (name, microbatch=None, when=None, rank=None))]
    fn tensor<'py>(
        &self,
        py: Python<'py>,
        name: String,
        microbatch: Option<u32>,
        when: Option<String>,
        rank: Option<u32>,
    ) -> PyResult<(Bound<'py, PyBytes>, &'static str, Vec<u64>)> {
        let key = self.find(&name, microbatch, when)?;
        let found = py.detach(|| match rank {
            None => assemble::assemble(&self.0, &key),
            Some(rank) => assemble::addend(&self.0, &key, Rank(rank)),
        });
        let tensor = found.map_err(failed)?;
        Ok((PyBytes::new(py, tensor.bytes()), tensor.dtype.numpy_name(), tensor.shape.clone()))
    }
}

impl StepDump {
    /// The one tensor of this name; several moments must be told apart.
    fn find(
        &self,
        name: &str,
        microbatch: Option<u32>,
        when: Option<String>,
    ) -> PyResult<TensorKey> {
        let parse = |word: String| serde_json::from_value::<When>(word.into());
        let when = when.map(parse).transpose();
        let when = when.map_err(|error| PyValueError::new_err(format!("when: {error}")))?;
        self.0.find(name, microbatch, when).map_err(|error| match &error {
            FindError::Name { source, .. } => PyValueError::new_err(format!("{error}: {source}")),
            _ => PyKeyError::new_err(error.to_string()),
        })
    }
}

/// What a replay made, as JSON, schema `backtape.report/1`, and as text; and its page under
/// the name `page`, where it has one. `replay` is told whether to gather what a page draws.
pub(crate) fn told(
    py: Python<'_>,
    page: Option<PathBuf>,
    replay: impl FnOnce(bool) -> Result<Report, RunError> + Send,
) -> PyResult<(String, String)> {
    let made = || {
        // What cannot be written is said before the replay, which may take long.
        let page = page.as_deref().map(PageFile::beside).transpose()?;
        let report = replay(page.is_some())?;
        page.map(|page| page.write(&report)).transpose()?;
        Ok(report)
    };
    let report = py.detach(made).map_err(|error: RunError| failed(error))?;
    let json = serde_json::to_string(&report).map_err(failed)?;
    Ok((json, backtape_replayer::report::text::render(&report)))
}

/// The report of a replay as JSON, schema `backtape.report/1`, and as text; `report` is the
/// file of its page.
#[pyfunction]
#[pyo3(signature = (path, run=None, attempt=None, step=None, compare=None, against=None, report=None))]
#[allow(clippy::too_many_arguments)] // Python's own, by name.
pub(crate) fn replay(
    py: Python<'_>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
    step: Option<u64>,
    compare: Option<Vec<String>>,
    against: Option<PathBuf>,
    report: Option<PathBuf>,
) -> PyResult<(String, String)> {
    let wrong = |error: PatternError| PyValueError::new_err(error.to_string());
    let compare = Asked::parse(compare.unwrap_or_default()).map_err(wrong)?;
    let selection = Selection { run, attempt, step };
    told(py, report, |drawn| match drawn {
        true => cli::drawn_report(&path, &selection, compare, against.as_deref(), &[]),
        false => cli::replay_report(&path, &selection, compare, against.as_deref()),
    })
}

/// What the checks find as JSON, schema `backtape.checks/1`, and as text.
#[pyfunction]
#[pyo3(signature = (path, run=None, attempt=None, step=None))]
pub(crate) fn checks(
    py: Python<'_>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
    step: Option<u64>,
) -> PyResult<(String, String)> {
    let selection = Selection { run, attempt, step };
    let found = py.detach(|| cli::checks_report(&path, &selection));
    let report = found.map_err(failed)?;
    let json = serde_json::to_string(&report).map_err(failed)?;
    Ok((json, backtape_replayer::report::checked::render(&report)))
}

/// What the scalars of a run say of its trajectory as JSON, schema `backtape.trajectory/1`,
/// and as text.
#[pyfunction]
#[pyo3(signature = (path, run=None, attempt=None, vocabulary=None, local=None, shared=None))]
pub(crate) fn trajectory(
    py: Python<'_>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
    vocabulary: Option<u64>,
    local: Option<Vec<String>>,
    shared: Option<Vec<String>>,
) -> PyResult<(String, String)> {
    let selection = Selection { run, attempt, step: None };
    let (local, shared) = (local.unwrap_or_default(), shared.unwrap_or_default());
    let declared = Declared { vocabulary, local, shared };
    let found = py.detach(|| cli::trajectory_report(&path, &selection, &declared));
    let report = found.map_err(failed)?;
    let json = serde_json::to_string(&report).map_err(failed)?;
    Ok((json, backtape_replayer::report::trajectory::render(&report)))
}

/// The command `replay` with these arguments, the program's name first.
#[pyfunction]
pub(crate) fn replay_main(py: Python<'_>, arguments: Vec<String>) -> i32 {
    py.detach(|| cli::main(arguments.into_iter().map(Into::into)))
}
