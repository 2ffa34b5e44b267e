//! The free ranges of a memory. The first one that is long enough is taken; when its holder drops
//! it, it is joined with its free neighbours.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The free ranges of one memory, by start.
#[derive(Debug)]
pub struct Ranges {
    free: Mutex<BTreeMap<usize, usize>>,
    total: usize,
    alignment: usize,
}

impl Ranges {
    /// A memory of `total` bytes, all of them free. Ranges start and end at multiples of
    /// `alignment`; what is left of the total beyond the last multiple is not used.
    pub fn new(total: usize, alignment: usize) -> Arc<Ranges> {
        let total = total / alignment * alignment;
        let free = (total > 0).then_some((0, total)).into_iter().collect();
        Arc::new(Ranges { free: Mutex::new(free), total, alignment })
    }

    /// Takes a range of at least `length` bytes, and at least one; `None` where there is none.
    pub fn take(self: &Arc<Ranges>, length: usize) -> Option<Range> {
        let reserved = length.max(1).checked_next_multiple_of(self.alignment)?;
        let mut free = self.lock();
        let (&start, &room) = free.iter().find(|&(_, &room)| room >= reserved)?;
        free.remove(&start);
        if room > reserved {
            free.insert(start + reserved, room - reserved);
        }
        Some(Range { ranges: self.clone(), start, reserved })
    }

    /// True where nobody holds a range.
    pub fn is_free(&self) -> bool {
        self.total == 0 || self.lock().get(&0) == Some(&self.total)
    }

    fn give_back(&self, start: usize, length: usize) {
        let mut free = self.lock();
        let (mut start, mut length) = (start, length);
        if let Some(after) = free.remove(&(start + length)) {
            length += after;
        }
        if let Some((&before, &room)) = free.range(..start).next_back()
            && before + room == start
        {
            start = before;
            length += room;
        }
        free.insert(start, length);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A range, given back when it is dropped.
#[derive(Debug)]
pub struct Range {
    ranges: Arc<Ranges>,
    start: usize,
    reserved: usize,
}

impl Range {
    /// Where it starts.
    pub fn start(&self) -> usize {
        self.start
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        self.ranges.give_back(self.start, self.reserved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Goal: no byte has two holders, and what is given back can be taken in one piece.
        /// Method: random takes and drops, against a list of who holds each byte.
        #[test]
        fn no_byte_has_two_holders_and_all_comes_back(
            steps in prop::collection::vec((0usize..200, 0usize..8), 1..60)
        ) {
            let ranges = Ranges::new(1000, 8);
            let mut ranges_taken: Vec<(Range, usize)> = Vec::new();
            for (length, drop_at) in steps {
                if let Some(range) = ranges.take(length) {
                    let (start, end) = (range.start(), range.start() + length);
                    prop_assert!(start % 8 == 0 && end <= 1000);
                    for (other, length) in &ranges_taken {
                        prop_assert!(end <= other.start() || other.start() + length <= start);
                    }
                    ranges_taken.push((range, length));
                }
                if drop_at < ranges_taken.len() {
                    ranges_taken.swap_remove(drop_at);
                }
            }
            prop_assert_eq!(ranges.is_free(), ranges_taken.is_empty());
            ranges_taken.clear();
            prop_assert!(ranges.is_free());
            prop_assert!(ranges.take(1000).is_some());
        }
    }

    #[test]
    fn a_memory_of_nothing_gives_nothing_and_no_length_overflows() {
        assert!(Ranges::new(0, 8).take(0).is_none());
        assert!(Ranges::new(64, 8).take(usize::MAX).is_none());
    }
}
