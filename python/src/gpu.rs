//! Captures of arrays in a GPU's memory, for `backtape.gpu`, `jax_arrays` and `torch_arrays`.

use std::sync::{Mutex, PoisonError};

use backtape::index_box::IndexBox;
use backtape_dumper::ByteLimit;
use backtape_dumper::device::{self, NotTaken, Order, Sizes, Source, Sums};
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::dlpack::{self, CUDA, CUDA_MANAGED, Place, TakenTensor};
use crate::errors::invalid;
use crate::shard::dtype;

/// GPUs that were opened, so that the next call into the binding lets go of the memory of captures
/// that have arrived.
static OPENED: Mutex<Vec<device::Gpu>> = Mutex::new(Vec::new());

/// Lets go of the memory that captures held which have arrived; waits for nothing.
pub(crate) fn reap() {
    for gpu in &*OPENED.lock().unwrap_or_else(PoisonError::into_inner) {
        gpu.reap();
    }
}

/// The number of bytes that `text` spells, such as "256MiB". Raises ValueError that names `option`.
#[pyfunction]
#[pyo3(name = "_bytes_of")]
pub(crate) fn bytes_of(option: &str, text: &str) -> PyResult<u64> {
    let limit: ByteLimit = text.parse().map_err(|error| invalid(option, &error))?;
    Ok(limit.0)
}

/// A GPU that captures come from.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Gpu {
    gpu: device::Gpu,
    ordinal: i32,
}

/// A capture on its way from a GPU, until it becomes the payload of a shard.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Arriving(Mutex<Option<device::Arriving>>);

impl Arriving {
    /// The payload. Raises ValueError the second time: a capture is recorded once.
    pub(crate) fn take(&self) -> PyResult<device::Arriving> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| PyValueError::new_err("a capture from a GPU was recorded twice"))
    }
}

#[pymethods]
impl Gpu {
    /// Opens GPU number `ordinal`: compiles the kernel, reserves memory (`pinned` bytes of the
    /// host, `snapshots` bytes of the GPU) and tries a copy. It takes time, so the thread that
    /// trains does not call it. Raises RuntimeError with one sentence.
    #[new]
    fn open(py: Python<'_>, ordinal: i32, pinned: usize, snapshots: usize) -> PyResult<Gpu> {
        let opened = py.detach(|| device::Gpu::open(ordinal, Sizes { pinned, snapshots }));
        let gpu = opened.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        OPENED.lock().unwrap_or_else(PoisonError::into_inner).push(gpu.clone());
        Ok(Gpu { gpu, ordinal })
    }

    /// The stream on which captures are copied: `__dlpack__(stream=)` is given it, so that it waits
    /// for the array to be computed.
    #[getter]
    fn stream(&self) -> u64 {
        self.gpu.stream()
    }

    /// Starts a capture, or returns None where there is no room for it.
    ///
    /// `capsule` holds the bytes. `stream` is the job's stream whose work so far computes them;
    /// None where the capsule was asked for with `stream=` the one of this GPU, and nobody writes
    /// to the bytes again. `changing`: later work on `stream` may write to them. The device
    /// computes the fingerprint of the elements at `ranges`, [start, end) per dimension; or `sums`
    /// is a capsule of the framework's own, uint32 [2]. `hold` lives until the device has read the
    /// bytes.
    ///
    /// Raises BufferError or TypeError for a capsule that cannot be captured from, RuntimeError
    /// when the device fails.
    #[pyo3(signature = (
        capsule, dtype_name, ranges, *, stream=None, changing=false, sums=None, hold=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn capture(
        &self,
        py: Python<'_>,
        capsule: &Bound<'_, PyAny>,
        dtype_name: &str,
        ranges: Vec<(u64, u64)>,
        stream: Option<u64>,
        changing: bool,
        sums: Option<&Bound<'_, PyAny>>,
        hold: Option<Py<PyAny>>,
    ) -> PyResult<Option<Arriving>> {
        let array = dlpack::take(capsule)?;
        let place = self.place(&array)?;
        let order = match (stream, changing) {
            (None, _) => Order::Settled,
            (Some(stream), false) => Order::Made(stream),
            (Some(stream), true) => Order::Changing(stream),
        };
        let mut capsules = vec![array];
        let sums = match sums {
            None => Sums::Device(dtype(dtype_name)?, IndexBox(ranges)),
            Some(capsule) => {
                let sums_array = dlpack::take(capsule)?;
                let place = self.place(&sums_array)?;
                if place.bytes != 2 * size_of::<u32>() {
                    return Err(PyBufferError::new_err("the framework's sums are not two u32"));
                }
                capsules.push(sums_array);
                Sums::Framework(place.address)
            }
        };
        let (address, bytes) = (place.address, place.bytes);
        let hold = Box::new((capsules, hold));
        let source = Source { address, bytes, order, sums, hold };
        // SAFETY: a framework's capsule says that the bytes lie on this GPU, and is held.
        match py.detach(|| unsafe { self.gpu.capture(source) }) {
            Ok(arriving) => Ok(Some(Arriving(Mutex::new(Some(arriving))))),
            Err(NotTaken::Full { .. }) => Ok(None),
            Err(error) => Err(PyRuntimeError::new_err(error.to_string())),
        }
    }
}

impl Gpu {
    /// Where a capsule's bytes lie. Raises BufferError where that is not this GPU.
    fn place(&self, array: &TakenTensor) -> PyResult<Place> {
        let place = array.place()?;
        let cuda = [CUDA, CUDA_MANAGED].contains(&place.device_type);
        if !cuda || place.device_id != self.ordinal {
            let (kind, id) = (place.device_type, place.device_id);
            return Err(PyBufferError::new_err(format!(
                "a DLPack capsule of device {id} of type {kind}, where GPU {} was opened",
                self.ordinal
            )));
        }
        Ok(place)
    }
}
