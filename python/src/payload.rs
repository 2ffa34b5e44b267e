//! The bytes of a Python array while the recorder's thread reads them.
//!
//! The recorder holds an export of the array's buffer, not a copy. Releasing an export needs the
//! interpreter (the GIL), and the recorder's thread must never wait for that: a thread that asks
//! for the GIL while the interpreter ends is killed where it stands. So a payload that is dropped
//! only moves its export to a list, and the next call into the binding, which has the GIL anyway,
//! releases the exports in the list. Those that are left at exit go with the process.

use std::sync::{Mutex, PoisonError};

use backtape_dumper::Payload;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::dlpack;
use crate::gpu::{self, Arriving};
use crate::staging::Block;

/// Exports that wait to be released. There are no more of them than the recorder's queue holds.
static SPENT: Mutex<Vec<PyBuffer<u8>>> = Mutex::new(Vec::new());

/// A contiguous buffer export, kept until the payload is dropped.
pub(crate) struct HeldBuffer(Option<PyBuffer<u8>>);

impl HeldBuffer {
    /// Takes an export of `data`, which must be C-contiguous bytes and must not change from now on:
    /// Python has copied what is mutable. Raises ValueError for bytes that are not contiguous.
    pub(crate) fn new(data: &Bound<'_, PyAny>) -> PyResult<HeldBuffer> {
        let buffer = PyBuffer::<u8>::get(data)?;
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("the bytes of a shard must be contiguous"));
        }
        Ok(HeldBuffer(Some(buffer)))
    }
}

/// The payload of a shard's `data`: the memory of a staging block, bytes that arrive from a GPU, or
/// an export of any other buffer. Also true where the framework's own fingerprint arrives with it.
pub(crate) fn payload(data: &Bound<'_, PyAny>) -> PyResult<(Box<dyn Payload>, bool)> {
    if let Ok(block) = data.cast::<Block>() {
        return Ok((Box::new(block.get().staged()), false));
    }
    if let Ok(arriving) = data.cast::<Arriving>() {
        let arriving = arriving.get().take()?;
        let summed = arriving.framework_sums();
        return Ok((Box::new(arriving), summed));
    }
    Ok((Box::new(HeldBuffer::new(data)?), false))
}

impl AsRef<[u8]> for HeldBuffer {
    fn as_ref(&self) -> &[u8] {
        let Some(buffer) = &self.0 else { return &[] };
        if buffer.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the export pins the memory until it is released, which takes
        // the `&mut self` of drop; it is `len_bytes` contiguous bytes (checked
        // in `new`), and nobody writes to it: a jax array is immutable, and of
        // anything else Python hands over a copy that it does not keep.
        unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) }
    }
}

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        let mut spent = SPENT.lock().unwrap_or_else(PoisonError::into_inner);
        spent.extend(self.0.take());
    }
}

/// Releases the buffers, capsules and memory of GPUs that the recorder has read. Called wherever
/// the GIL is held.
pub(crate) fn release_spent(attached: Python<'_>) {
    gpu::reap();
    dlpack::release_spent(attached);
    // Taken out of the list first: releasing runs Python code, which may call this again.
    let spent = std::mem::take(&mut *SPENT.lock().unwrap_or_else(PoisonError::into_inner));
    drop(spent);
}
