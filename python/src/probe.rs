//! What `backtape doctor` asks of a store, of a coordinator and of a GPU.

use std::path::PathBuf;

use backtape::coordinator::asking;
use backtape::store::probe;
use backtape_replayer::device::{self, Description, DeviceError};
use pyo3::prelude::*;

use crate::postmortem::failed;

/// Each thing that was tried with a store: its name, true where it worked, and what was found.
#[pyfunction]
pub(crate) fn probe_store(py: Python<'_>, place: PathBuf) -> Vec<(&'static str, bool, String)> {
    let probed = py.detach(|| probe::probe(&place));
    probed.into_iter().map(|probed| (probed.what, probed.works, probed.outcome)).collect()
}

/// A coordinator's version, build and seconds to answer, and what it says of a run. Raises
/// RuntimeError with one sentence where it does not answer.
#[pyfunction]
#[pyo3(signature = (address, run, credentials=None))]
pub(crate) fn probe_coordinator(
    py: Python<'_>,
    address: String,
    run: String,
    credentials: Option<PathBuf>,
) -> PyResult<(String, String, f64, String)> {
    let greeted = py.detach(|| asking::greet(&address, &run, credentials.as_deref()));
    let greeting = greeted.map_err(failed)?;
    Ok((greeting.version, greeting.build, greeting.seconds, greeting.says))
}

/// The GPU, compiler and library that a replay would compute with, once its kernels were compiled.
/// Raises RuntimeError with one sentence.
#[pyfunction]
pub(crate) fn probe_device(py: Python<'_>, ordinal: usize) -> PyResult<String> {
    let opened = py.detach(|| {
        let device = device::open(&[ordinal])?;
        let Description { name, compiler, products } = device.description().clone();
        Ok(format!("{name}; {compiler}; {products}"))
    });
    opened.map_err(|error: DeviceError| failed(error))
}
