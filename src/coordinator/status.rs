//! The status of steps and runs: what is present and what is missing, in numbers and in words.

use std::path::PathBuf;

use super::metrics::Totals;
use super::request::StepAsk;
use super::state::{AttemptState, StepState, Sums};
use crate::identity::{Attempt, Name, Rank, Step};

/// Most ranks that a reason names: a few of 10,000 missing ones are enough.
const RANKS_NAMED: usize = 8;
/// Most steps that an overview lists: a job that records every step has a million.
const STEPS_LISTED: usize = 100;

/// The state of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StepStatus {
    pub committed: bool,
    pub world_size: u32,
    pub closed_ranks: Vec<Rank>,
    pub missing_ranks: Vec<Rank>,
    pub shards: u64,
    pub bytes: u64,
    /// Why it is partial: its deadline passed, or all ranks closed it and one had stopped recording
    /// early. Empty if it is open or complete.
    pub reason: String,
    /// Why the manifest of a complete step is not written yet.
    pub trouble: String,
}

/// What is known of a run's newest attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Overview {
    pub attempt: Attempt,
    pub world_size: u32,
    pub joined: u32,
    /// Ranks that did not join, as ranges, at most a few.
    pub absent: String,
    pub directory: PathBuf,
    /// Steps that are not committed, and the newest that are; at most 100 of each.
    pub steps: Vec<Progress>,
    /// Counts over all steps.
    pub committed: u64,
    pub open: u64,
    pub bytes: u64,
}

/// The progress of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Progress {
    pub step: Step,
    pub committed: bool,
    pub partial: bool,
    pub closed: u32,
    pub files: u64,
    pub shards: u64,
    pub bytes: u64,
    /// Which ranks have yet to do what.
    pub missing: String,
}

/// A step that is not committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsettled {
    /// The run.
    pub run: Name,
    /// The attempt.
    pub attempt: Attempt,
    /// The step.
    pub step: Step,
    /// True when its deadline passed.
    pub partial: bool,
    /// Ranks that never joined the attempt.
    pub never_joined: Vec<Rank>,
    /// The ranks that did not close, with what is known of each.
    pub missing: String,
}

impl AttemptState {
    /// The status of a step; of an unknown step every rank is missing.
    pub(crate) fn status(&self, StepAsk { step, brief }: StepAsk) -> StepStatus {
        let world_size = self.opened.world_size;
        let listed = if brief { 0 } else { world_size };
        if let Some(sums) = self.released.get(&step) {
            return StepStatus {
                committed: true,
                world_size,
                closed_ranks: (0..listed).map(Rank).collect(),
                shards: sums.shards,
                bytes: sums.bytes,
                reason: self.cut_short.get(&step).cloned().unwrap_or_default(),
                ..StepStatus::default()
            };
        }
        let unknown = StepState::default();
        let state = self.steps.get(&step).unwrap_or(&unknown);
        let closed = |rank: &Rank| state.closed.contains_key(rank);
        let (closed_ranks, missing_ranks) = (0..listed).map(Rank).partition(closed);
        let reason = match (state.committed, state.overdue) {
            (true, _) => self.cut_short.get(&step).cloned().unwrap_or_default(),
            (false, true) => self.missing(step),
            (false, false) => String::new(),
        };
        StepStatus {
            committed: state.committed,
            world_size,
            closed_ranks,
            missing_ranks,
            shards: state.sums.shards,
            bytes: state.sums.bytes,
            reason,
            trouble: if self.is_ready(step) { self.trouble.clone() } else { String::new() },
        }
    }

    /// The overview of the attempt without its directory.
    pub(crate) fn overview(&self) -> Overview {
        let world_size = self.opened.world_size;
        let absent: Vec<u32> =
            (0..world_size).filter(|&rank| !self.has_joined(Rank(rank))).collect();
        let committed = self.steps.iter().rev().filter(|(_, state)| state.committed);
        let committed =
            committed.take(STEPS_LISTED).map(|(&step, state)| self.progress(step, state));
        let released = self.released.iter().rev().take(STEPS_LISTED);
        let released = released.map(|(&step, sums)| self.past(step, sums));
        let mut committed: Vec<Progress> = committed.chain(released).collect();
        committed.sort_unstable_by_key(|progress| std::cmp::Reverse(progress.step));
        committed.truncate(STEPS_LISTED);
        let open = self.open.iter().rev().take(STEPS_LISTED);
        let open = open.filter_map(|step| self.steps.get_key_value(step));
        let open = open.map(|(&step, state)| self.progress(step, state));
        let mut steps: Vec<Progress> = committed.into_iter().chain(open).collect();
        steps.sort_unstable_by_key(|progress| progress.step);
        Overview {
            attempt: self.opened.attempt,
            world_size,
            joined: world_size - absent.len() as u32,
            absent: listing(&absent),
            directory: PathBuf::new(),
            steps,
            committed: self.committed(),
            open: self.open.len() as u64,
            bytes: self.sums.bytes,
        }
    }

    fn committed(&self) -> u64 {
        (self.steps.len() - self.open.len() + self.released.len()) as u64
    }

    /// The totals with this attempt's added.
    pub(crate) fn add_to(&self, sum: Totals) -> Totals {
        Totals {
            ranks: sum.ranks + self.ranks.len() as u64,
            committed: sum.committed + self.committed(),
            open: sum.open + self.open.len() as u64 - self.overdue,
            partial: sum.partial + self.overdue,
            bytes: sum.bytes.saturating_add(self.sums.bytes),
            ..sum
        }
    }

    fn progress(&self, step: Step, state: &StepState) -> Progress {
        Progress {
            step,
            committed: state.committed,
            partial: state.overdue && !state.committed,
            closed: state.closed.len() as u32,
            files: state.sums.files,
            shards: state.sums.shards,
            bytes: state.sums.bytes,
            missing: if state.committed { String::new() } else { self.missing(step) },
        }
    }

    /// The progress of a released step, which every rank closed.
    fn past(&self, step: Step, sums: &Sums) -> Progress {
        Progress {
            step,
            committed: true,
            closed: self.opened.world_size,
            files: sums.files,
            shards: sums.shards,
            bytes: sums.bytes,
            ..Progress::default()
        }
    }

    /// The ranks that did not close a step, with what is known of each, or why its manifest is not
    /// written.
    pub(crate) fn missing(&self, step: Step) -> String {
        if self.is_ready(step) {
            return self.trouble.clone();
        }
        let world_size = self.opened.world_size;
        let state = self.steps.get(&step);
        let closed = state.map_or(0, |state| state.closed.len() as u64);
        let short = state.map_or(0, |state| state.short.len() as u64);
        let owing = u64::from(world_size) - closed + short;
        // Both are sorted by rank, so that one pass finds the first missing ranks, however many
        // there are.
        let mut done = state.into_iter().flat_map(|state| state.closed.keys());
        let mut next = done.next();
        let owes = |rank: &Rank| {
            let here = next == Some(rank);
            if here {
                next = done.next();
            }
            !here || state.is_some_and(|state| state.short.contains(rank))
        };
        let named = (0..world_size).map(Rank).filter(owes).take(RANKS_NAMED);
        let named: Vec<String> = named.filter_map(|rank| self.rank_progress(step, rank)).collect();
        let rest = owing - named.len() as u64;
        match rest {
            0 => named.join("; "),
            n => format!("{}; and {n} more ranks", named.join("; ")),
        }
    }

    /// What a rank has yet to do for a step; `None` if nothing.
    fn rank_progress(&self, step: Step, rank: Rank) -> Option<String> {
        let state = self.steps.get(&step);
        let reported = state.map_or(0, |state| state.reported(rank));
        if let Some(closing) = state.and_then(|state| state.closed.get(&rank)) {
            let counted = closing.files;
            return (reported < counted)
                .then(|| format!("rank {rank} closed and reported {reported} of {counted} files"));
        }
        let Some(joined) = self.ranks.get(&rank) else {
            return Some(format!("rank {rank} never joined"));
        };
        let host = &joined.host;
        Some(match reported {
            0 => format!("rank {rank} on {host} joined, reported nothing and did not close"),
            1 => format!("rank {rank} on {host} reported 1 file and did not close"),
            n => format!("rank {rank} on {host} reported {n} files and did not close"),
        })
    }

    /// Every step that is not committed.
    pub(crate) fn unsettled(&self) -> Vec<Unsettled> {
        let ranks = (0..self.opened.world_size).map(Rank);
        let never_joined: Vec<Rank> = ranks.filter(|rank| !self.has_joined(*rank)).collect();
        let open = self.open.iter().filter_map(|step| self.steps.get_key_value(step));
        let unsettled_step = |(&step, state): (&Step, &StepState)| Unsettled {
            run: self.opened.run.clone(),
            attempt: self.opened.attempt,
            step,
            partial: state.overdue,
            never_joined: never_joined.clone(),
            missing: self.missing(step),
        };
        open.map(unsettled_step).collect()
    }
}

/// The ranks as ranges, at most a few: `0-3, 7 and 12 more`.
fn listing(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |&(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let named: Vec<String> = runs.iter().take(RANKS_NAMED).map(text).collect();
    let rest: u32 = runs.iter().skip(RANKS_NAMED).map(|(first, last)| last - first + 1).sum();
    match rest {
        0 => named.join(", "),
        n => format!("{} and {n} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_ranks_are_listed_as_ranges_and_thousands_in_a_line() {
        assert_eq!(listing(&[]), "");
        assert_eq!(listing(&[0, 1, 2, 7]), "0-2, 7");
        let every_other: Vec<u32> = (0..10_000).step_by(2).collect();
        let text = listing(&every_other);
        assert!(text.ends_with("14 and 4992 more") && text.len() < 60, "{text}");
    }
}
