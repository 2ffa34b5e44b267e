//! Committed steps that are still known file by file.

use std::collections::VecDeque;

use super::limits::KEPT_FILES;
use crate::identity::Step;

/// Steps with their files, by when they were committed or recalled.
#[derive(Default)]
pub(crate) struct Recent {
    steps: VecDeque<(Step, u64)>,
    files: u64,
}

impl Recent {
    /// Takes a step up; those that are to be let go of for it. It stays itself, however many
    /// files it has: its ranks are about to ask.
    pub(crate) fn push(&mut self, step: Step, files: u64) -> Vec<Step> {
        self.steps.push_back((step, files));
        self.files += files;
        let mut gone = Vec::new();
        while self.files > KEPT_FILES && self.steps.len() > 1 {
            let Some((old, files)) = self.steps.pop_front() else { break };
            self.files -= files;
            gone.push(old);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_let_go_of_and_the_last_stays_however_large() {
        let mut recent = Recent::default();
        let half = KEPT_FILES / 2;
        assert_eq!(recent.push(Step(0), half), []);
        assert_eq!(recent.push(Step(9), half), []);
        assert_eq!(recent.push(Step(1), 1), [Step(0)]);
        assert_eq!(recent.push(Step(2), 100 * KEPT_FILES), [Step(9), Step(1)]);
        assert_eq!(recent.push(Step(3), 1), [Step(2)]);
    }
}
