//! Staging: host memory into which mutable arrays (torch tensors) are copied. Its pages are made
//! present beforehand, and it is used again.
//!
//! The first write to a new page costs a page fault, so a copy into new memory takes about twice as
//! long as one into memory that was used before. Memory that a capture no longer needs is therefore
//! kept for the next one, up to a limit. The recorder's own thread gives a range back when it drops
//! the payload, which does not need the interpreter.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backtape_dumper::{Ranges, squares};
use memmap2::{Advice, MmapRaw};
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::shard::{Copied, Cuts};

/// Least size of an arena: small tensors share one.
const ARENA_BYTES: usize = 16 << 20;

/// Ranges start and end at multiples of this, so that no two share a cache line and vector loads
/// are aligned.
const ALIGNMENT: usize = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One mapping, and which of its ranges are free.
struct Arena {
    map: MmapRaw,
    free: Arc<Ranges>,
}

impl Arena {
    fn new(bytes: usize) -> std::io::Result<Arena> {
        let map = memmap2::MmapMut::map_anon(bytes)?;
        // The kernel may refuse both. The pages are then made present one by one, at the first
        // copy.
        let _ = map.advise(Advice::HugePage);
        let _ = map.advise(Advice::PopulateWrite);
        Ok(Arena { map: map.into(), free: Ranges::new(bytes, ALIGNMENT) })
    }
}

/// A range of an arena, given back when it is dropped.
struct Range {
    arena: Arc<Arena>,
    part: backtape_dumper::Range,
    length: usize,
}

impl Range {
    fn pointer(&self) -> *mut u8 {
        self.arena.map.as_mut_ptr().wrapping_add(self.part.start())
    }
}

/// The host memory for captures of one process. Of memory that nobody uses it keeps at most
/// `keep_bytes`.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Staging {
    arenas: Mutex<Vec<Arc<Arena>>>,
    keep_bytes: usize,
}

#[pymethods]
impl Staging {
    #[new]
    fn new(keep_bytes: usize) -> Staging {
        Staging { arenas: Mutex::default(), keep_bytes }
    }

    /// Makes `bytes` of memory present now, so that the first capture does not have to.
    fn reserve(&self, py: Python<'_>, bytes: usize) -> PyResult<()> {
        let arena = py.detach(|| Arena::new(bytes.max(ARENA_BYTES)))?;
        lock(&self.arenas).push(Arc::new(arena));
        Ok(())
    }

    /// Bytes that are mapped, used or not.
    fn mapped(&self) -> usize {
        lock(&self.arenas).iter().map(|arena| arena.map.len()).sum()
    }

    /// A writable block of `length` bytes. Raises MemoryError where there is no memory.
    fn take(&self, py: Python<'_>, length: usize) -> PyResult<Block> {
        py.detach(|| self.block(length)).map(Block)
    }

    /// A block with a copy of the `length` bytes at an address: for a tensor so small that the
    /// calls to have torch copy it would take longer than the copy itself. Raises ValueError for a
    /// null address, MemoryError where there is no memory.
    fn copy_of(&self, address: usize, length: usize) -> PyResult<Block> {
        if address == 0 {
            return Err(PyValueError::new_err("a tensor without memory cannot be copied"));
        }
        let range = self.block(length)?;
        // SAFETY: `backtape.torch_arrays.plain_memory` has seen that the tensor is contiguous
        // memory of this process, `length` is its own size in bytes, and the caller holds the
        // tensor and the interpreter while it is copied. The range is `length` bytes that nobody
        // else has.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, range.pointer(), length);
        }
        Ok(Block(range))
    }

    /// The parts `cuts` of a tensor of `length` bytes at an address, copied one after the other
    /// into one block: for a sample of a tensor, of which each part by itself would take longer to
    /// hand over than to copy. Raises ValueError for a null address, a part that is not in the
    /// tensor or a dtype that cannot be dumped, MemoryError where there is no memory.
    pub(crate) fn copy_cuts(
        &self,
        address: usize,
        length: usize,
        dtype: &str,
        cuts: Py<Cuts>,
    ) -> PyResult<Copied> {
        let dtype = crate::shard::dtype(dtype)?;
        let runs = cuts.get().runs(dtype.width());
        let inside = |run: &std::ops::Range<usize>| run.start <= run.end && run.end <= length;
        if address == 0 || !runs.iter().all(inside) {
            return Err(PyValueError::new_err("a part that is not in the tensor cannot be copied"));
        }
        let range = self.block(runs.iter().map(ExactSizeIterator::len).sum())?;
        let mut parts = Vec::with_capacity(runs.len());
        let mut end = 0;
        for run in runs {
            let part = end..end + run.len();
            // SAFETY: `plain_memory` has seen that the tensor is `length` contiguous bytes of this
            // process, in which the run was just seen to lie; the caller holds the tensor and the
            // interpreter meanwhile. The range is as long as all runs, and nobody else has it.
            unsafe {
                let from = (address as *const u8).add(run.start);
                std::ptr::copy_nonoverlapping(from, range.pointer().add(part.start), part.len());
            }
            end = part.end;
            parts.push(Staged { range: range.clone(), part });
        }
        Ok(Copied::new(dtype, cuts, parts))
    }
}

/// The sum of the squares, in f64, and a sum of the bits, modulo 2⁶⁴, of the numbers of `length`
/// bytes at an address, which are float32 or bfloat16. Raises ValueError for a null address or any
/// other dtype.
#[pyfunction]
pub(crate) fn sums_of(
    py: Python<'_>,
    address: usize,
    length: usize,
    dtype: &str,
) -> PyResult<(f64, u64)> {
    if address == 0 {
        return Err(PyValueError::new_err("a tensor without memory cannot be summed"));
    }
    // SAFETY: `backtape.torch_arrays.is_plain` has seen that the tensor is `length` contiguous
    // bytes of this process, and the caller holds it until this returns.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, length) };
    let sums = match dtype {
        "float32" => py.detach(|| squares::of_f32(bytes)),
        "bfloat16" => py.detach(|| squares::of_bf16(bytes)),
        _ => return Err(PyValueError::new_err(format!("{dtype} is not summed here"))),
    };
    Ok((sums.squares, sums.bits))
}

impl Staging {
    fn block(&self, length: usize) -> PyResult<Arc<Range>> {
        let range = self.range(length).map_err(|error| {
            PyMemoryError::new_err(format!("no {length} bytes to copy a tensor into: {error}"))
        })?;
        Ok(Arc::new(range))
    }

    fn range(&self, length: usize) -> std::io::Result<Range> {
        let mut arenas = lock(&self.arenas);
        let part_and_arena =
            arenas.iter().find_map(|arena| Some((arena.free.take(length)?, arena.clone())));
        if let Some((part, arena)) = part_and_arena {
            return Ok(Range { arena, part, length });
        }
        let bytes = length.max(1).next_multiple_of(ALIGNMENT).max(ARENA_BYTES);
        let mapped: usize = arenas.iter().map(|arena| arena.map.len()).sum();
        if mapped + bytes > self.keep_bytes {
            arenas.retain(|arena| !arena.free.is_free());
        }
        let arena = Arc::new(Arena::new(bytes)?);
        let Some(part) = arena.free.take(length) else {
            return Err(std::io::ErrorKind::OutOfMemory.into());
        };
        arenas.push(arena.clone());
        Ok(Range { arena, part, length })
    }
}

/// Memory that Python fills once and then hands to `Tape.record`.
#[pyclass(frozen, module = "backtape._native")]
pub(crate) struct Block(Arc<Range>);

impl Block {
    /// The payload with the bytes that were copied into the block.
    pub(crate) fn staged(&self) -> Staged {
        Staged { range: self.0.clone(), part: 0..self.0.length }
    }
}

#[pymethods]
impl Block {
    /// A writable view for the copy; nobody may write once the block was handed to `Tape.record`.
    ///
    /// # Safety
    /// Called by the interpreter, with a `view` that it releases.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let range = slf.get().0.clone();
        let length = isize::try_from(range.length)
            .map_err(|error| PyBufferError::new_err(error.to_string()))?;
        // SAFETY: the range is mapped for as long as this object lives, and the view holds it.
        let failed = unsafe {
            let memory = range.pointer().cast();
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory, length, 0, flags)
        };
        if failed == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// The bytes of a block, or of a part of it, while the recorder reads them.
#[derive(Clone)]
pub(crate) struct Staged {
    range: Arc<Range>,
    part: std::ops::Range<usize>,
}

impl AsRef<[u8]> for Staged {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range is inside the arena's mapping, which lives as long as the range; nobody
        // else has it before it is given back. `backtape.torch_arrays.staged` fills it before it
        // hands it over, and keeps no view.
        let all = unsafe { std::slice::from_raw_parts(self.range.pointer(), self.range.length) };
        &all[self.part.clone()]
    }
}

// SAFETY: a range is memory that its holder alone uses; see `Staged::as_ref`.
unsafe impl Send for Range {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Range {}
