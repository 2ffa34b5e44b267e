//! The committed steps whose details are still in memory.

use std::collections::VecDeque;

use super::limits::{KEPT_BYTES, KEPT_FILES};
use crate::identity::Step;

/// Steps with the memory that they take, in the order in which they were committed or recalled.
#[derive(Default)]
pub(crate) struct Recent {
    steps: VecDeque<(Step, Taken)>,
    all: Taken,
}

/// The memory that a step takes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Taken {
    /// The larger of the number of its files and of the ranks that closed it, since a step without
    /// files takes memory too.
    pub(crate) entries: u64,
    /// Bytes of its ranks' closes.
    pub(crate) bytes: u64,
}

impl Recent {
    /// Adds a step and returns the older steps that must be released for it. The new step itself
    /// always stays, however many files it has, because its ranks are about to ask for it.
    pub(crate) fn push(&mut self, step: Step, taken: Taken) -> Vec<Step> {
        self.steps.push_back((step, taken));
        self.all.entries += taken.entries;
        self.all.bytes += taken.bytes;
        let mut gone = Vec::new();
        while self.is_too_much() && self.steps.len() > 1 {
            let Some((old, taken)) = self.steps.pop_front() else { break };
            self.all.entries -= taken.entries;
            self.all.bytes -= taken.bytes;
            gone.push(old);
        }
        gone
    }

    fn is_too_much(&self) -> bool {
        self.all.entries > KEPT_FILES || self.all.bytes > KEPT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_let_go_of_and_the_last_stays_however_large() {
        let mut recent = Recent::default();
        let mut push = |step, entries, bytes| recent.push(Step(step), Taken { entries, bytes });
        let half = KEPT_FILES / 2;
        assert_eq!(push(0, half, 0), []);
        assert_eq!(push(9, half, 0), []);
        assert_eq!(push(1, 1, 0), [Step(0)]);
        assert_eq!(push(2, 100 * KEPT_FILES, 0), [Step(9), Step(1)]);
        assert_eq!(push(3, 1, 1), [Step(2)]);
        assert_eq!(push(4, 1, KEPT_BYTES), [Step(3)]);
        assert_eq!(push(5, 1, 0), []);
    }
}
