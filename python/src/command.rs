//! The commands that the wheel brings.

use pyo3::prelude::*;

/// The command `replay` with these arguments, the program's name first.
#[pyfunction]
pub(crate) fn replay_main(py: Python<'_>, arguments: Vec<String>) -> i32 {
    py.detach(|| backtape_replayer::cli::main(arguments.into_iter().map(Into::into)))
}

/// The command `coordinator`, likewise.
#[pyfunction]
pub(crate) fn coordinator_main(py: Python<'_>, arguments: Vec<String>) -> i32 {
    py.detach(|| backtape::cli::main(arguments.into_iter().map(Into::into)))
}
