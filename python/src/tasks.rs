//! Tasks of a replay on a cluster: Python starts them there (`backtape/engine_ray.py`), and Rust
//! computes them.

use std::sync::OnceLock;

use backtape_replayer::postmortem::AskedCluster;
use backtape_replayer::replay::tasks::perform::{Dumps, perform};
use backtape_replayer::replay::tasks::{Handle, Workers};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::postmortem::{failed, safely};

/// A cluster that Python is connected to.
struct Cluster(Py<PyAny>);

/// The first line of an exception's text, with its type unless it is a RuntimeError.
fn clause(py: Python<'_>, error: &PyErr) -> String {
    let text = error.value(py).to_string();
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    match error.is_instance_of::<PyRuntimeError>(py) {
        true => first.to_string(),
        false => format!("{}: {first}", error.get_type(py)),
    }
}

/// Calls Python's `connect(address, task_cpus)`. The error is one clause that says why it failed.
pub(crate) fn cluster(
    connect: &Py<PyAny>,
    asked: &AskedCluster,
) -> Result<Box<dyn Workers>, String> {
    Python::attach(|py| {
        let connected = connect.call1(py, (asked.address.as_deref(), asked.task_cpus));
        let engine = connected.map_err(|error| clause(py, &error))?;
        Ok(Box::new(Cluster(engine)) as Box<dyn Workers>)
    })
}

impl Workers for Cluster {
    fn start(
        &self,
        task: Vec<u8>,
        from: Vec<Option<Handle>>,
        gives: usize,
    ) -> Result<Vec<Handle>, String> {
        let from: Vec<Option<u64>> =
            from.into_iter().map(|handle| handle.map(|handle| handle.0)).collect();
        Python::attach(|py| {
            let given = (PyBytes::new(py, &task), from, gives);
            let started = self.0.call_method1(py, "start", given);
            let started = started.and_then(|started| started.extract::<Vec<u64>>(py));
            let handles = started.map_err(|error| clause(py, &error))?;
            Ok(handles.into_iter().map(Handle).collect())
        })
    }

    fn fetch(&self, sums: Handle) -> Result<Vec<u8>, String> {
        Python::attach(|py| {
            let fetched = self.0.call_method1(py, "fetch", (sums.0,));
            let fetched = fetched.map_err(|error| clause(py, &error))?;
            let bytes = fetched.bind(py).cast::<PyBytes>();
            Ok(bytes.map_err(|error| error.to_string())?.as_bytes().to_vec())
        })
    }
}

/// Computes a task with so many threads, on a worker of the cluster: it adds to the `sums` that
/// other tasks have made. Raises RuntimeError with one sentence.
#[pyfunction]
pub(crate) fn perform_task<'py>(
    py: Python<'py>,
    task: &[u8],
    sums: Vec<Option<Bound<'py, PyBytes>>>,
    threads: usize,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    static DUMPS: OnceLock<Dumps> = OnceLock::new();
    let sums: Vec<&[u8]> =
        sums.iter().map(|of| of.as_ref().map_or(&[][..], |of| of.as_bytes())).collect();
    let results = safely(py, || {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
        let pool = pool.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let dumps = DUMPS.get_or_init(Dumps::default);
        pool.install(|| perform(dumps, task, &sums)).map_err(failed)
    })??;
    Ok(results.into_iter().map(|bytes| PyBytes::new(py, &bytes)).collect())
}
