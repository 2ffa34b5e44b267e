//! Large arrays that were freed, kept for the next of their size.
//!
//! A walk over slabs of the vocabulary frees and allocates the same large arrays again and again. Of
//! arrays of this size the system gives every page back and takes a new one, which is cleared and
//! mapped at its first touch: of the host's time in a replay on a GPU that was a third.

use std::alloc::{Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of the smallest array that is kept: smaller ones the system keeps itself.
pub(super) const LEAST: usize = 1 << 20;
/// Bytes of the smallest array that is put into large pages: it fills several of 2 MiB.
const LARGE: usize = 8 << 20;
/// A multiple of every size that Linux gives its small pages.
const PAGES: usize = 64 << 10;
/// More are never kept at a time: all are looked at.
const MOST: usize = 64;
/// Of the machine's memory, one part in so many may be kept, and never more than [`LIMIT`].
const SHARE: usize = 16;
const LIMIT: usize = 1 << 30;

/// Bytes that may be kept; none until a replay asks, so that a job that records and may fork never
/// comes to the lock.
static ROOM: AtomicUsize = AtomicUsize::new(0);
static KEPT: Mutex<Kept> = Mutex::new(Kept::NONE);

/// Has freed arrays kept from now on, for as long as the process lives.
pub fn keep_arrays() {
    ROOM.store((memory() / SHARE).min(LIMIT), Ordering::Relaxed);
}

/// Bytes of memory that this process may have: the machine's, or what its control group is given
/// (cgroup v2, `memory.max`) where that is less.
pub fn memory() -> usize {
    let machine = usize::try_from(rustix::system::sysinfo().totalram).unwrap_or(usize::MAX);
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max");
    let group = group.ok().and_then(|bytes| bytes.trim().parse().ok());
    group.map_or(machine, |group: usize| group.min(machine))
}

/// A block of the system's that nobody uses.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Block {
    start: usize,
    layout: Layout,
}

/// The blocks, those that were freed first in front.
struct Kept {
    blocks: [Block; MOST],
    count: usize,
    bytes: usize,
}

impl Kept {
    const NONE: Kept = Kept {
        blocks: [Block { start: 0, layout: Layout::new::<()>() }; MOST],
        count: 0,
        bytes: 0,
    };

    /// Takes out the block at a place.
    fn remove(&mut self, at: usize) -> Block {
        let block = self.blocks[at];
        self.blocks.copy_within(at + 1..self.count, at);
        self.count -= 1;
        self.bytes -= block.layout.size();
        block
    }

    /// The one of this layout that was freed last: the likeliest to be in a cache.
    fn take(&mut self, layout: Layout) -> Option<Block> {
        let at = self.blocks[..self.count].iter().rposition(|block| block.layout == layout)?;
        Some(self.remove(at))
    }

    /// The oldest one, where another of so many bytes has no place beside it.
    fn evict(&mut self, bytes: usize, room: usize) -> Option<Block> {
        let full = self.count == MOST || self.bytes + bytes > room;
        (full && self.count > 0).then(|| self.remove(0))
    }

    fn push(&mut self, block: Block) {
        self.blocks[self.count] = block;
        self.count += 1;
        self.bytes += block.layout.size();
    }
}

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an array of this size may be kept, and in how many bytes all of them.
fn room(layout: Layout) -> Option<usize> {
    let room = ROOM.load(Ordering::Relaxed);
    (layout.size() >= LEAST && layout.size() <= room).then_some(room)
}

/// Asks the kernel to put a new array of the system's into large pages, once a replay asked to keep
/// arrays: the first touch of each small page costs more than clearing it does.
pub(super) fn in_large_pages(start: *mut u8, layout: Layout) -> *mut u8 {
    let asked = ROOM.load(Ordering::Relaxed) > 0 && layout.size() >= LARGE && !start.is_null();
    if asked {
        let before = start.align_offset(PAGES);
        let inside = (layout.size() - before) / PAGES * PAGES;
        // SAFETY: these pages lie in the array, and how large they are changes nothing in them. A
        // kernel that has no large pages says so, and all is as it was.
        let _ = unsafe {
            rustix::mm::madvise(start.add(before).cast(), inside, rustix::mm::Advice::LinuxHugepage)
        };
    }
    start
}

/// A kept block of exactly this layout, holding what it held.
pub(super) fn take(layout: Layout) -> Option<*mut u8> {
    room(layout)?;
    kept().take(layout).map(|block| block.start as *mut u8)
}

/// Keeps a block of the system's, or says that it is the caller's to free.
///
/// # Safety
///
/// The block is the system's, of this layout, and nobody uses it any more.
pub(super) unsafe fn give(start: *mut u8, layout: Layout) -> bool {
    let Some(room) = room(layout) else { return false };
    loop {
        let mut kept = kept();
        let Some(oldest) = kept.evict(layout.size(), room) else {
            kept.push(Block { start: start as usize, layout });
            return true;
        };
        // After the lock: this takes long.
        drop(kept);
        // SAFETY: it was the system's when it was given, and is out of the table now.
        unsafe { free(oldest) };
    }
}

/// # Safety
///
/// As for [`give`].
unsafe fn free(block: Block) {
    use std::alloc::GlobalAlloc;
    // SAFETY: the caller's.
    unsafe { System.dealloc(block.start as *mut u8, block.layout) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(start: usize, size: usize) -> Block {
        Block { start, layout: Layout::from_size_align(size, 8).unwrap() }
    }

    fn all(kept: &Kept) -> Vec<usize> {
        kept.blocks[..kept.count].iter().map(|block| block.start).collect()
    }

    #[test]
    fn a_block_goes_to_who_asks_for_its_very_size_the_last_freed_first() {
        let mut kept = Kept::NONE;
        for (start, size) in [(1, 8), (2, 16), (3, 8)] {
            kept.push(block(start, size));
        }
        let of = |size, align| Layout::from_size_align(size, align).unwrap();
        assert_eq!(kept.take(of(8, 16)), None);
        assert_eq!(kept.take(of(9, 8)), None);
        assert_eq!(kept.take(of(8, 8)), Some(block(3, 8)));
        assert_eq!(kept.take(of(8, 8)), Some(block(1, 8)));
        assert_eq!(kept.take(of(8, 8)), None);
        assert_eq!((all(&kept), kept.bytes), (vec![2], 16));
    }

    #[test]
    fn the_oldest_go_until_there_is_room_and_never_too_many_are_kept() {
        let mut kept = Kept::NONE;
        for start in 1..=4 {
            kept.push(block(start, 10));
        }
        assert_eq!(kept.evict(10, 50), None);
        assert_eq!(kept.evict(25, 50), Some(block(1, 10)));
        assert_eq!(kept.evict(25, 50), Some(block(2, 10)));
        assert_eq!(kept.evict(25, 50), None);
        for start in 5.. {
            if let Some(oldest) = kept.evict(1, usize::MAX) {
                assert_eq!((oldest, kept.count), (block(3, 10), MOST - 1));
                break;
            }
            kept.push(block(start, 1));
        }
        assert_eq!(kept.bytes, 10 + (MOST - 2));
    }

    /// In one test, as what a replay asks for holds for the whole process.
    #[test]
    fn until_a_replay_asks_nothing_is_kept_and_then_arrays_come_back_as_they_are_asked_for() {
        use std::alloc::GlobalAlloc;

        use crate::spill::Spilling;

        let layout = Layout::from_size_align(LEAST + 8, 8).unwrap();
        // SAFETY: each array is used within its layout, and given back once.
        unsafe {
            let filled = |start: *mut u8| {
                start.write_bytes(7, layout.size());
                start
            };
            Spilling.dealloc(filled(Spilling.alloc(layout)), layout);
            assert_eq!(take(layout), None);

            keep_arrays();
            let freed = filled(Spilling.alloc(layout));
            Spilling.dealloc(freed, layout);
            let zeros = Spilling.alloc_zeroed(layout);
            assert_eq!(zeros, freed);
            assert!(std::slice::from_raw_parts(zeros, layout.size()).iter().all(|&x| x == 0));
            let other = Spilling.alloc(layout);
            assert_ne!(other, zeros);

            let grown = Spilling.realloc(filled(zeros), layout, 2 * layout.size());
            assert!(std::slice::from_raw_parts(grown, layout.size()).iter().all(|&x| x == 7));
            let large = Layout::from_size_align(2 * layout.size(), 8).unwrap();
            Spilling.dealloc(grown, large);
            Spilling.dealloc(other, layout);
            assert_eq!(Spilling.alloc(large), grown);
            Spilling.dealloc(grown, large);
        }
    }
}
