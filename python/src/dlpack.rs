//! DLPack capsules: the address of an array of any framework, whose memory stays while it is held.
//!
//! A capsule has one consumer, who renames it and then owes it one call of its deleter. A deleter
//! may run Python code, so it is called where the GIL is held: tensors that the recorder or a
//! device has read wait in a list for the next call into the binding, as exports do (`payload`).

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use backtape::fingerprint::Fingerprint;
use backtape::index_box::IndexBox;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::shard::dtype;

/// Device types of DLPack that are told apart here.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(crate) const CUDA_MANAGED: i32 = 13;

/// Most dimensions that are believed: a capsule that claims more is broken.
const MAX_DIMENSIONS: i32 = 64;

/// The major version that is read.
const VERSION: u32 = 1;

/// `DLTensor`, as dlpack.h has it.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, before version 1.
#[repr(C)]
struct Unversioned {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Unversioned)>,
}

/// `DLManagedTensorVersioned`; up to the deleter it is the same in every version.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

enum Managed {
    Unversioned(NonNull<Unversioned>),
    Versioned(NonNull<Versioned>),
}

// SAFETY: the producer's memory stays where it is until the deleter is called, which is done where
// the GIL is held; nothing else is written.
unsafe impl Send for Managed {}

impl Managed {
    fn delete(&self) {
        // SAFETY: whoever consumed the capsule owns the tensor, and this is called once, when the
        // owner is gone. A deleter that is null has nothing to do.
        unsafe {
            match self {
                Managed::Unversioned(tensor) => {
                    if let Some(delete) = tensor.as_ref().deleter {
                        delete(tensor.as_ptr());
                    }
                }
                Managed::Versioned(tensor) => {
                    if let Some(delete) = tensor.as_ref().deleter {
                        delete(tensor.as_ptr());
                    }
                }
            }
        }
    }
}

/// Tensors whose deleters wait to be called. There are no more of them than pinned memory has room
/// for.
static SPENT: Mutex<Vec<Managed>> = Mutex::new(Vec::new());

/// Calls the deleters that wait.
pub(crate) fn release_spent(_attached: Python<'_>) {
    // Taken out of the list first: a deleter may run Python code, which may call this again.
    let spent = std::mem::take(&mut *SPENT.lock().unwrap_or_else(PoisonError::into_inner));
    for managed in spent {
        managed.delete();
    }
}

/// A tensor that was taken out of its capsule; its producer keeps the memory until this is dropped.
pub(crate) struct TakenTensor(Option<Managed>);

impl Drop for TakenTensor {
    fn drop(&mut self) {
        SPENT.lock().unwrap_or_else(PoisonError::into_inner).extend(self.0.take());
    }
}

/// Where a held tensor's bytes lie, in C order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// Takes the tensor out of a capsule of either version of the protocol. Raises TypeError for
/// anything else, and for a capsule that was taken from before.
pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<TakenTensor> {
    if let Some(pointer) = consume(capsule, c"dltensor_versioned", c"used_dltensor_versioned")? {
        return Ok(TakenTensor(Some(Managed::Versioned(pointer.cast()))));
    }
    if let Some(pointer) = consume(capsule, c"dltensor", c"used_dltensor")? {
        return Ok(TakenTensor(Some(Managed::Unversioned(pointer.cast()))));
    }
    Err(PyTypeError::new_err("what was handed over is no DLPack capsule, or one that was used"))
}

/// The pointer in a capsule that has the name `name`, which is then renamed to `used`; `None` for a
/// capsule of another name.
fn consume(
    capsule: &Bound<'_, PyAny>,
    name: &'static CStr,
    used: &'static CStr,
) -> PyResult<Option<NonNull<c_void>>> {
    // SAFETY: any object may be asked; the names live as long as the program; the pointer is not
    // null where the capsule is valid.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
            return Ok(None);
        }
        let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr());
        if ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(NonNull::new(pointer))
    }
}

impl TakenTensor {
    /// Where the bytes lie. Raises BufferError with one sentence where they are not a C-ordered
    /// array of elements of whole bytes.
    pub(crate) fn place(&self) -> PyResult<Place> {
        let refused = |why: String| PyBufferError::new_err(format!("a DLPack capsule {why}"));
        let tensor = match &self.0 {
            // SAFETY: the producer keeps it until the deleter is called.
            Some(Managed::Unversioned(tensor)) => unsafe { &tensor.as_ref().tensor },
            Some(Managed::Versioned(tensor)) => {
                // SAFETY: as above; the version is the first field in every version.
                let major = unsafe { (*tensor.as_ptr()).major };
                if major != VERSION {
                    return Err(refused(format!("of version {major}, where {VERSION} is read")));
                }
                // SAFETY: as above, and the version is the one that this struct is of.
                unsafe { &tensor.as_ref().tensor }
            }
            None => return Err(refused("that was given back".into())),
        };
        tensor.place().map_err(refused)
    }
}

impl DlTensor {
    fn place(&self) -> Result<Place, String> {
        let shape = self.sizes(self.shape)?.ok_or("without a shape")?;
        let bytes = self.bytes(shape)?;
        if let Some(strides) = self.sizes(self.strides)?
            && !in_c_order(shape, strides)
        {
            return Err("whose elements are not in C order".into());
        }
        let address = (self.data as u64).checked_add(self.byte_offset);
        let address = address.ok_or("that lies beyond all memory")?;
        if bytes > 0 && self.data.is_null() {
            return Err("without memory".into());
        }
        let (device_type, device_id) = (self.device_type, self.device_id);
        Ok(Place { device_type, device_id, address, bytes })
    }

    /// The list at `list`, which has a number for each dimension; `None` for a null pointer.
    fn sizes(&self, list: *const i64) -> Result<Option<&[i64]>, String> {
        if !(0..=MAX_DIMENSIONS).contains(&self.ndim) {
            return Err(format!("of {} dimensions", self.ndim));
        }
        if self.ndim == 0 {
            return Ok(Some(&[]));
        }
        if list.is_null() {
            return Ok(None);
        }
        // SAFETY: the protocol says that the list has `ndim` numbers and lives as the tensor does.
        Ok(Some(unsafe { std::slice::from_raw_parts(list, self.ndim as usize) }))
    }

    fn bytes(&self, shape: &[i64]) -> Result<usize, String> {
        if self.lanes != 1 || self.bits == 0 || !self.bits.is_multiple_of(8) {
            let (bits, lanes) = (self.bits, self.lanes);
            return Err(format!("with elements of {lanes} x {bits} bits"));
        }
        let width = usize::from(self.bits / 8);
        let sizes = shape.iter().map(|&size| usize::try_from(size).ok());
        let bytes = sizes.into_iter().try_fold(width, |n, size| n.checked_mul(size?));
        bytes.filter(|&n| isize::try_from(n).is_ok()).ok_or(format!("of the shape {shape:?}"))
    }
}

/// True where these strides, in elements, are those of C order. The stride of a dimension of length
/// 1 does not matter, and none does in an array without elements.
fn in_c_order(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected: i64 = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected = expected.saturating_mul(size);
            fits
        })
}

/// The bytes in a capsule of this process's memory, and their fingerprint at `ranges`, [start, end)
/// per dimension: for the tests of this module, which need no GPU.
#[pyfunction]
#[pyo3(name = "_read_capsule")]
pub(crate) fn read_capsule<'py>(
    capsule: &Bound<'py, PyAny>,
    dtype_name: &str,
    ranges: Vec<(u64, u64)>,
) -> PyResult<(Bound<'py, pyo3::types::PyBytes>, (u32, u32))> {
    let py = capsule.py();
    let array = take(capsule);
    let read = array.and_then(|tensor| {
        let place = tensor.place()?;
        if place.device_type != CPU {
            return Err(PyBufferError::new_err("a DLPack capsule of a device's memory"));
        }
        let (kind, ranges) = (dtype(dtype_name)?, IndexBox(ranges));
        let wanted = ranges.elements().and_then(|n| n.checked_mul(kind.width() as u64));
        if wanted != Some(place.bytes as u64) {
            return Err(PyBufferError::new_err("a DLPack capsule of another size than its box"));
        }
        let bytes = match place.bytes {
            0 => &[],
            // SAFETY: the producer says that so many bytes of this process lie there, and `tensor`
            // keeps them.
            n => unsafe { std::slice::from_raw_parts(place.address as *const u8, n) },
        };
        let Fingerprint(a, b) = Fingerprint::of(kind, &ranges, bytes);
        Ok((pyo3::types::PyBytes::new(py, bytes), (a, b)))
    });
    release_spent(py);
    read
}
