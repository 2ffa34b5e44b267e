//! Large arrays in files, for a replay that needs more memory than the machine has
//! (`replay --spill DIR`).
//!
//! [`Spilling`] is the program's allocator. Once a directory is named, every array of at least
//! [`LEAST`] bytes is an unlinked, mapped file in it: the kernel writes out pages that were not
//! used lately and reads them again, as it does with the shards. A replay reads a `[T, D]` array
//! once for each slab of classes, so there are thousands of multiplications for each byte that is
//! read from disk. No result changes: the same code runs on the same bits.
//!
//! Rejected: a special type for large arrays, since every vector of the replay may be large; and
//! swap, which users cannot add to a cluster's node.

mod kept;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use memmap2::MmapMut;
use rustix::fs::{FallocateFlags, fallocate, fstatfs};
use rustix::io::Errno;

pub use kept::{keep_arrays, memory};

/// Bytes of the smallest array that goes into a file: for smaller ones page faults cost more than
/// is saved. The allocator's own allocations are far smaller, so it never calls itself.
pub const LEAST: usize = 32 << 20;

/// File systems that keep files in memory: tmpfs and ramfs (linux/magic.h).
const OF_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// The directory of the files, once [`spill_to`] was called.
static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
/// The arrays that are mapped files, by address.
static MAPPED: Mutex<BTreeMap<usize, MmapMut>> = Mutex::new(BTreeMap::new());
/// Whether the message that the disk is full was already printed.
static FULL: AtomicBool = AtomicBool::new(false);

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpillError {
    /// No file can be created in it.
    #[error("--spill {}: no file can be made there, name a directory that you may write to", path.display())]
    Unwritable {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is a file system in memory.
    #[error("--spill {} lies in memory (tmpfs): name a directory on a disk", path.display())]
    Memory {
        /// The directory.
        path: PathBuf,
    },
    /// Its file system cannot reserve space for a file: a later write to the array could then kill
    /// the process with a signal.
    #[error("--spill {}: its file system cannot reserve space (fallocate): name a directory on a local disk", path.display())]
    Reserve {
        /// The directory.
        path: PathBuf,
    },
    /// The program has another allocator.
    #[error("this program cannot keep arrays in files: run the command `replay`")]
    Absent,
}

/// Puts large arrays into files of this directory from now on until the process ends. A second call
/// with another directory has no effect.
pub fn spill_to(path: &Path) -> Result<(), SpillError> {
    let unwritable = |source: io::Error| SpillError::Unwritable { path: path.into(), source };
    let real = path.canonicalize().map_err(unwritable)?;
    if DIRECTORY.get() == Some(&real) {
        return Ok(());
    }
    let kind = File::open(&real).and_then(|open| Ok(fstatfs(open)?)).map_err(unwritable)?;
    // The type of `f_type` depends on the machine; the numbers have 32 bits.
    if OF_MEMORY.contains(&(kind.f_type as u32)) {
        return Err(SpillError::Memory { path: path.into() });
    }
    match file(&real, LEAST) {
        Ok(_) => {}
        Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => {
            return Err(SpillError::Reserve { path: path.into() });
        }
        Err(error) => return Err(unwritable(error)),
    }
    DIRECTORY.get_or_init(|| real);
    let array = Vec::<u8>::with_capacity(LEAST);
    match mapped().contains_key(&(array.as_ptr() as usize)) {
        true => Ok(()),
        false => Err(SpillError::Absent),
    }
}

/// An unlinked file for which space on the disk is reserved.
fn file(directory: &Path, length: usize) -> io::Result<File> {
    let file = tempfile::tempfile_in(directory)?;
    fallocate(&file, FallocateFlags::empty(), 0, length as u64)?;
    Ok(file)
}

fn mapped() -> MutexGuard<'static, BTreeMap<usize, MmapMut>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates like the system's allocator, except for large arrays once [`spill_to`] or
/// [`keep_arrays`] was called.
///
/// ```text
/// #[global_allocator]
/// static SPILLING: backtape_replayer::spill::Spilling = backtape_replayer::spill::Spilling;
/// ```
pub struct Spilling;

impl Spilling {
    /// A zeroed array in a file; `None` where arrays of this size stay in memory.
    fn put(layout: Layout) -> Option<*mut u8> {
        if layout.size() < LEAST {
            return None;
        }
        let directory = DIRECTORY.get()?;
        let made = file(directory, layout.size()).and_then(|file| {
            // SAFETY: nobody else has the file, which has no name.
            unsafe { MmapMut::map_mut(&file) }
        });
        match made {
            Ok(mut map) => {
                // The mapping is aligned to a page, which is enough for every array.
                let start = map.as_mut_ptr();
                let fits = (start as usize).is_multiple_of(layout.align());
                fits.then(|| {
                    mapped().insert(start as usize, map);
                    start
                })
            }
            Err(error) => {
                if !FULL.swap(true, Ordering::Relaxed) {
                    let directory = directory.display();
                    eprintln!(
                        "replay: --spill {directory} takes no more ({error}): memory is used"
                    );
                }
                None
            }
        }
    }

    /// Whether an array of this size may be in a file. Without a directory the table is never
    /// locked: a job that forks must not inherit a locked table in its child.
    fn may_be_put(layout: Layout) -> bool {
        layout.size() >= LEAST && DIRECTORY.get().is_some()
    }

    /// Bytes of the file that holds an array, if it is in one.
    fn length(start: *mut u8, layout: Layout) -> Option<usize> {
        Spilling::may_be_put(layout).then(|| Some(mapped().get(&(start as usize))?.len()))?
    }
}

// SAFETY: memory of the system is asked for and given back with the caller's own layouts; an array
// in a file is mapped as long as it is in the table, which its address alone finds.
unsafe impl GlobalAlloc for Spilling {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let mine = Spilling::put(layout).or_else(|| kept::take(layout));
        // SAFETY: the caller's promise.
        mine.unwrap_or_else(|| kept::in_large_pages(unsafe { System.alloc(layout) }, layout))
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if let Some(zeros) = Spilling::put(layout) {
            return zeros;
        }
        match kept::take(layout) {
            Some(start) => {
                // SAFETY: the block has that many bytes, and is nobody's yet.
                unsafe { start.write_bytes(0, layout.size()) };
                start
            }
            // SAFETY: the caller's promise.
            None => kept::in_large_pages(unsafe { System.alloc_zeroed(layout) }, layout),
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        let mapped = || mapped().remove(&(start as usize));
        match Spilling::may_be_put(layout).then(mapped).flatten() {
            // Unmapping takes long, so it happens after the lock is released.
            Some(map) => drop(map),
            // SAFETY: the caller's promise; it is no array in a file, so it is the system's.
            None if unsafe { kept::give(start, layout) } => {}
            // SAFETY: the same.
            None => unsafe { System.dealloc(start, layout) },
        }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let length = Spilling::length(start, layout);
        let stays = match length {
            Some(length) => size >= LEAST && size <= length,
            None => size < LEAST || DIRECTORY.get().is_none(),
        };
        match (stays, length) {
            (true, Some(_)) => start,
            // SAFETY: the caller's promise.
            (true, None) => unsafe { System.realloc(start, layout, size) },
            // SAFETY: the new layout has the old one's alignment; what both have is copied.
            (false, _) => unsafe {
                let made = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                if !made.is_null() {
                    std::ptr::copy_nonoverlapping(start, made, layout.size().min(size));
                    self.dealloc(start, layout);
                }
                made
            },
        }
    }
}
