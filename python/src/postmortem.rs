//! What is done after the job: a dump is opened, its tensors are read, and it is replayed.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use backtape::identity::Rank;
use backtape::shard::{TensorKey, When};
use backtape_replayer::algebra::against::Mapping;
use backtape_replayer::assemble::AssembleError;
use backtape_replayer::diagnose::Causes;
use backtape_replayer::dump::{self, FindError, Selection};
use backtape_replayer::postmortem::{AskedDevice, Extras, PageFile, RunError};
use backtape_replayer::replay::against::{Asked, PatternError};
use backtape_replayer::report;
use backtape_replayer::trajectory::Declared;
use backtape_replayer::verify::{Verification, verify};
use backtape_replayer::{assemble, postmortem};
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::chain;
use crate::memory::Memory;
use crate::report::Report;

/// One step of a dump, open for reading.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct StepDump {
    dump: Arc<dump::StepDump>,
    /// What verifying the dump has found; made once, before anything is computed from its tensors.
    proof: OnceLock<Verification>,
}

/// The steps that were dumped of a run, ascending.
#[pyfunction]
#[pyo3(signature = (path, run=None, attempt=None))]
pub(crate) fn dumped_steps(
    py: Python<'_>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
) -> PyResult<Vec<u64>> {
    let selection = Selection { run, attempt, step: None };
    let steps = safely(py, || dump::steps(&path, &selection))?.map_err(failed)?;
    Ok(steps.into_iter().map(|step| step.0).collect())
}

/// Calls `work` without the GIL. A panic in it raises RuntimeError: pyo3's own `PanicException` is
/// no `Exception`, so it would end a program that handles errors.
pub(crate) fn safely<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    py.detach(|| postmortem::caught(work)).map_err(failed)
}

/// RuntimeError with an error and its sources on one line.
pub(crate) fn failed(error: impl std::error::Error) -> PyErr {
    PyRuntimeError::new_err(chain(&error))
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
        let dump = safely(py, || dump::open(&path, &selection))?.map_err(failed)?;
        Ok(StepDump { dump: Arc::new(dump), proof: OnceLock::new() })
    }

    /// The manifest as JSON.
    fn manifest(&self) -> PyResult<String> {
        serde_json::to_string(&self.dump.manifest).map_err(failed)
    }

    /// The step's number.
    #[getter(step)]
    fn number(&self) -> u64 {
        self.dump.step.0
    }

    /// True when the step was committed.
    #[getter]
    fn committed(&self) -> bool {
        self.dump.committed()
    }

    /// Name, microbatch and moment of every tensor.
    fn keys(&self) -> Vec<(String, Option<u32>, Option<String>)> {
        let name_of =
            |key: &TensorKey| (key.tensor.to_string(), key.microbatch.map(|mb| mb.0), moment(key));
        self.dump.tensors().keys().map(name_of).collect()
    }

    /// A tensor's memory, numpy's name of its dtype, and its shape; with `rank`, that rank's
    /// addend. Raises KeyError for a tensor that is not there, RuntimeError for one that cannot be
    /// assembled.
    #[pyo3(signature = (name, microbatch=None, when=None, rank=None))]
    fn tensor(
        &self,
        py: Python<'_>,
        name: String,
        microbatch: Option<u32>,
        when: Option<String>,
        rank: Option<u32>,
    ) -> PyResult<(Memory, &'static str, Vec<u64>)> {
        let key = self.find(&name, microbatch, when)?;
        let rank = rank.map(Rank);
        safely(py, || self.memory(&key, rank))?.map_err(failed)
    }
}

impl StepDump {
    /// The step.
    pub(crate) fn dump(&self) -> &dump::StepDump {
        &self.dump
    }

    /// What verifying the step finds.
    pub(crate) fn proof(&self) -> &Verification {
        self.proof.get_or_init(|| verify(&self.dump, &|_| {}))
    }

    /// The file itself, mapped, where one shard holds the whole tensor and is aligned for its
    /// dtype; otherwise one buffer that the tensor is assembled in.
    fn memory(
        &self,
        key: &TensorKey,
        rank: Option<Rank>,
    ) -> Result<(Memory, &'static str, Vec<u64>), AssembleError> {
        if let (Some((bytes, shape)), Some(info)) =
            (assemble::in_place(&self.dump, key, rank), self.dump.tensors().get(key))
            && bytes.as_ptr().align_offset(info.dtype.width()) == 0
        {
            let memory = Memory::mapped(bytes, self.dump.clone());
            return Ok((memory, info.dtype.numpy_name(), shape));
        }
        let tensor = match rank {
            None => assemble::assemble(&self.dump, key),
            Some(rank) => assemble::addend(&self.dump, key, rank),
        }?;
        let (dtype, shape) = (tensor.dtype.numpy_name(), tensor.shape.clone());
        Ok((Memory::assembled(tensor), dtype, shape))
    }

    /// The key of the one tensor that is meant. Raises KeyError where there is none, and where
    /// several moments of it were recorded and `when` does not say which.
    fn find(
        &self,
        name: &str,
        microbatch: Option<u32>,
        when: Option<String>,
    ) -> PyResult<TensorKey> {
        let parse = |word: String| serde_json::from_value::<When>(word.into());
        let when = when.map(parse).transpose();
        let when = when.map_err(|error| PyValueError::new_err(format!("when: {error}")))?;
        self.dump.find(name, microbatch, when).map_err(|error| match &error {
            FindError::Name { source, .. } => PyValueError::new_err(format!("{error}: {source}")),
            _ => PyKeyError::new_err(error.to_string()),
        })
    }
}

/// The report of a replay, which is also written as a page to the file `page`, if there is to be
/// one. `replay` is called with true where it is to gather what drawings need: for a page, and for
/// a report that a notebook shows (`draws`).
pub(crate) fn report_and_page(
    py: Python<'_>,
    (page, draws): (Option<PathBuf>, bool),
    replay: impl FnOnce(bool) -> Result<report::Report, RunError> + Send,
) -> PyResult<Report> {
    let made = || -> Result<report::Report, RunError> {
        // A page that cannot be written is refused before the replay, which may take long.
        let page = page.as_deref().map(PageFile::beside).transpose()?;
        let report = replay(draws || page.is_some())?;
        page.map(|page| page.write(&report)).transpose()?;
        Ok(report)
    };
    Ok(safely(py, made)?.map_err(failed)?.into())
}

/// The report of a replay, schema `backtape.report/1`; `mapping` is the text of a mapping, `report`
/// the file of the page.
#[pyfunction]
#[pyo3(signature = (
    path, run=None, attempt=None, step=None, compare=None, against=None, mapping=None, report=None,
    draws=false, device=None, causes="quick"
))]
#[allow(clippy::too_many_arguments)] // Python's own, by name.
pub(crate) fn replay(
    py: Python<'_>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
    step: Option<u64>,
    compare: Option<Vec<String>>,
    against: Option<PathBuf>,
    mapping: Option<&str>,
    report: Option<PathBuf>,
    draws: bool,
    device: Option<&str>,
    causes: &str,
) -> PyResult<Report> {
    let wrong = |error: PatternError| PyValueError::new_err(error.to_string());
    let compare = Asked::parse(compare.unwrap_or_default()).map_err(wrong)?;
    let selection = Selection { run, attempt, step };
    let mapping = mapping.map(Mapping::read).transpose();
    let mapping = mapping.map_err(|error| PyValueError::new_err(format!("map=: {error}")))?;
    let (device, causes) = (asked_device(device)?, asked_causes(causes)?);
    report_and_page(py, (report, draws), |draws| {
        let (device, mapping) = (device.as_ref(), mapping.as_ref());
        let extras = Extras { draws, causes, device, mapping, ..Extras::default() };
        postmortem::full_report(&path, &selection, compare, against.as_deref(), extras)
    })
}

/// The device that a name means. Raises ValueError for a name that means none.
pub(crate) fn asked_device(name: Option<&str>) -> PyResult<Option<AskedDevice>> {
    let wrong =
        |why| PyValueError::new_err(format!("device={:?}: {why}", name.unwrap_or_default()));
    name.map(str::parse).transpose().map_err(|why: String| wrong(why))
}

/// How closely causes are looked for. Raises ValueError for a word that says none of it.
pub(crate) fn asked_causes(word: &str) -> PyResult<Causes> {
    let wrong = |why: String| PyValueError::new_err(format!("causes={word:?}: {why}"));
    word.parse().map_err(wrong)
}

/// What the checks find, schema `backtape.checks/1`.
#[pyfunction]
#[pyo3(signature = (path, run=None, attempt=None, step=None))]
pub(crate) fn checks(
    py: Python<'_>,
    path: PathBuf,
    run: Option<String>,
    attempt: Option<u32>,
    step: Option<u64>,
) -> PyResult<Report> {
    let selection = Selection { run, attempt, step };
    let report = safely(py, || postmortem::checks_report(&path, &selection))?;
    Ok(report.map_err(failed)?.into())
}

/// What is found in the scalars of a run, schema `backtape.trajectory/1`.
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
) -> PyResult<Report> {
    let selection = Selection { run, attempt, step: None };
    let (local, shared) = (local.unwrap_or_default(), shared.unwrap_or_default());
    let declared = Declared { vocabulary, local, shared };
    let report = safely(py, || postmortem::trajectory_report(&path, &selection, &declared))?;
    Ok(report.map_err(failed)?.into())
}
