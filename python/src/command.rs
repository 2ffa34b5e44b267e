//! The commands that the wheel brings.

use pyo3::prelude::*;

use crate::tasks::cluster;

/// The command `replay` with these arguments, the program's name first; returns its exit code.
/// `connect(address, task_cpus)` connects to a cluster where the arguments ask for one.
#[pyfunction]
#[pyo3(signature = (arguments, connect=None))]
pub(crate) fn replay_main(
    py: Python<'_>,
    arguments: Vec<String>,
    connect: Option<Py<PyAny>>,
) -> i32 {
    let arguments = arguments.into_iter().map(Into::into);
    py.detach(|| match &connect {
        Some(connect) => {
            backtape_replayer::cli::main_with(arguments, Some(&|asked| cluster(connect, asked)))
        }
        None => backtape_replayer::cli::main(arguments),
    })
}

/// The command `coordinator` with these arguments, the program's name first; returns its exit code.
#[pyfunction]
pub(crate) fn coordinator_main(py: Python<'_>, arguments: Vec<String>) -> i32 {
    py.detach(|| backtape::cli::main(arguments.into_iter().map(Into::into)))
}
