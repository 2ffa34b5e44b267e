//! The memory of a numpy array that was read from a dump: the mapped file, a tensor that was
//! assembled from shards, or recomputed numbers. It lives as long as the array. It is read-only, as
//! a dump is evidence.

use std::ffi::c_int;
use std::sync::Arc;

use backtape_replayer::assemble::Tensor;
use backtape_replayer::dump::StepDump;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Read-only bytes that numpy takes a view of, without a copy.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Memory(Source);

enum Source {
    /// Bytes of a shard, in the file as it is mapped.
    Mapped { start: *const u8, length: usize, _dump: Arc<StepDump> },
    /// One buffer into which several shards were copied.
    Assembled(Tensor),
    /// Values of a recomputed stage.
    Numbers(Vec<f64>),
}

// SAFETY: nobody writes to any of the three, and the pointer is into the mapping that the dump
// beside it holds.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Bytes that lie in the dump itself.
    pub(crate) fn mapped(bytes: &[u8], dump: Arc<StepDump>) -> Memory {
        Memory(Source::Mapped { start: bytes.as_ptr(), length: bytes.len(), _dump: dump })
    }

    /// The buffer of an assembled tensor.
    pub(crate) fn assembled(tensor: Tensor) -> Memory {
        Memory(Source::Assembled(tensor))
    }

    /// Numbers in f64.
    pub(crate) fn numbers(values: Vec<f64>) -> Memory {
        Memory(Source::Numbers(values))
    }

    fn place(&self) -> (*const u8, usize) {
        match &self.0 {
            Source::Mapped { start, length, .. } => (*start, *length),
            Source::Assembled(tensor) => (tensor.bytes().as_ptr(), tensor.bytes().len()),
            Source::Numbers(values) => (values.as_ptr().cast(), size_of_val(&values[..])),
        }
    }
}

#[pymethods]
impl Memory {
    /// True when the bytes are those of the file, mapped, and no copy of them.
    #[getter]
    fn mapped_file(&self) -> bool {
        matches!(self.0, Source::Mapped { .. })
    }

    fn __len__(&self) -> usize {
        self.place().1
    }

    /// # Safety
    /// Called by the interpreter, with a `view` that it releases.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (start, length) = slf.get().place();
        let length =
            isize::try_from(length).map_err(|error| PyBufferError::new_err(error.to_string()))?;
        // SAFETY: the bytes lie there for as long as this object lives, which the view holds;
        // they are handed out as read-only.
        let failed = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast_mut().cast(), length, 1, flags)
        };
        if failed == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
