//! The exceptions that the binding raises.

use std::error::Error;

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};

create_exception!(
    backtape,
    RecorderError,
    PyException,
    "Recording failed; raised with strict=True only. The text says what, where and what to do."
);

/// An error and its sources on one line; the messages do not repeat each other.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

/// The exception for what the recorder refuses or fails at: it has named what is left out already.
pub(crate) fn refused(error: &backtape_dumper::RecorderError) -> PyErr {
    RecorderError::new_err(chain(error))
}

/// The exception for an argument that cannot be read and does not get as far as the recorder.
pub(crate) fn invalid(what: &str, error: &dyn Error) -> PyErr {
    PyValueError::new_err(format!("{what}: {}", chain(error)))
}
