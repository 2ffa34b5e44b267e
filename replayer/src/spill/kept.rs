//! Keeps large arrays that were freed, for the next allocation of their size.
//!
//! A replay frees and allocates the same large arrays for every slab of the vocabulary. The
//! system's allocator returns all pages of such an array to the kernel and gets new ones, which are
//! cleared and mapped at first use. In a replay on a GPU this took a third of the host's time.

use std::alloc::{Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of the smallest array that is kept: the system's allocator reuses smaller ones itself.
pub(super) const LEAST: usize = 1 << 20;
/// Bytes of the smallest array that is put into large pages, of which it fills several (2 MiB
/// each).
const LARGE: usize = 8 << 20;
/// A multiple of every size of small pages on Linux.
const PAGES: usize = 64 << 10;
/// Most blocks that are kept at a time, as every lookup scans them.
const MOST: usize = 64;
/// At most 1/`SHARE` of the memory is kept, and never more than [`LIMIT`].
const SHARE: usize = 16;
const LIMIT: usize = 1 << 30;

/// Most bytes that are kept; 0 until a replay calls [`keep_arrays`], so that a recording job, which
/// may fork, never takes the lock.
static ROOM: AtomicUsize = AtomicUsize::new(0);
static KEPT: Mutex<Kept> = Mutex::new(Kept::NONE);

/// Keeps freed arrays from now on until the process ends.
pub fn keep_arrays() {
    ROOM.store((memory() / SHARE).min(LIMIT), Ordering::Relaxed);
}

/// Bytes of memory that this process may use: the machine's, or the limit of its control group
/// (cgroup v2, `memory.max`) where that is less.
pub fn memory() -> usize {
    let machine = usize::try_from(rustix::system::sysinfo().totalram).unwrap_or(usize::MAX);
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max");
    let group = group.ok().and_then(|bytes| bytes.trim().parse().ok());
    group.map_or(machine, |group: usize| group.min(machine))
}

/// A free block from the system's allocator.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Block {
    start: usize,
    layout: Layout,
}

/// The kept blocks, in the order in which they were freed.
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

    /// Removes the block at an index.
    fn remove(&mut self, index: usize) -> Block {
        let block = self.blocks[index];
        self.blocks.copy_within(index + 1..self.count, index);
        self.count -= 1;
        self.bytes -= block.layout.size();
        block
    }

    /// Removes the block of this layout that was freed last, which is most likely still in a cache.
    fn take(&mut self, layout: Layout) -> Option<Block> {
        let index = self.blocks[..self.count].iter().rposition(|block| block.layout == layout)?;
        Some(self.remove(index))
    }

    /// Removes the oldest block if there is no room for another one of so many bytes.
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

/// Most bytes that are kept in all, if an array of this size may be kept.
fn room(layout: Layout) -> Option<usize> {
    let room = ROOM.load(Ordering::Relaxed);
    (layout.size() >= LEAST && layout.size() <= room).then_some(room)
}

/// Asks the kernel to put a new array into large pages, if [`keep_arrays`] was called: the page
/// fault at the first use of each small page takes longer than clearing it.
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

/// Takes a kept block of exactly this layout, with its old contents.
pub(super) fn take(layout: Layout) -> Option<*mut u8> {
    room(layout)?;
    kept().take(layout).map(|block| block.start as *mut u8)
}

/// Keeps a block of the system's allocator; returns false if the caller has to free it.
///
/// # Safety
///
/// The block comes from the system's allocator with this layout, and is no longer used.
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
        let layout = |size, align| Layout::from_size_align(size, align).unwrap();
        assert_eq!(kept.take(layout(8, 16)), None);
        assert_eq!(kept.take(layout(9, 8)), None);
        assert_eq!(kept.take(layout(8, 8)), Some(block(3, 8)));
        assert_eq!(kept.take(layout(8, 8)), Some(block(1, 8)));
        assert_eq!(kept.take(layout(8, 8)), None);
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

    /// A single test, since `keep_arrays` affects the whole process.
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
