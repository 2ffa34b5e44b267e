//! What is present and what is missing of a step, in numbers and in a sentence.

use super::state::{AttemptState, StepState};
use crate::identity::{Attempt, Name, Rank, Step};

/// Ranks that a reason names; of 10,000 missing ones a few show the pattern.
const RANKS_NAMED: usize = 8;

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
    /// Why it is partial; empty while it is open or committed.
    pub reason: String,
}

/// A step that is not committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsettled {
    /// Of which run.
    pub run: Name,
    /// Of which attempt.
    pub attempt: Attempt,
    /// Which step.
    pub step: Step,
    /// True when its deadline passed.
    pub partial: bool,
    /// Ranks that never joined the attempt.
    pub never_joined: Vec<Rank>,
    /// Who did not close, with what is known of each.
    pub missing: String,
}

impl AttemptState {
    /// What is known of a step; a step nobody spoke of misses every rank.
    pub(crate) fn status(&self, step: Step) -> StepStatus {
        let world_size = self.opened.world_size;
        let unknown = StepState::default();
        let state = self.steps.get(&step).unwrap_or(&unknown);
        let closed = |rank: &Rank| state.closed.contains_key(rank);
        let (closed_ranks, missing_ranks) = (0..world_size).map(Rank).partition(closed);
        let files = || state.files.values().flat_map(|own| own.values());
        let late = state.overdue && !state.committed;
        StepStatus {
            committed: state.committed,
            world_size,
            closed_ranks,
            missing_ranks,
            shards: files().map(|file| file.shards.len() as u64).sum(),
            bytes: files().flat_map(|file| &file.shards).map(|shard| shard.length).sum(),
            reason: if late { self.missing(step) } else { String::new() },
        }
    }

    /// Who did not close a step, with what is known of each.
    pub(crate) fn missing(&self, step: Step) -> String {
        let status = |rank: &Rank| self.rank_progress(step, *rank);
        let ranks = (0..self.opened.world_size).map(Rank);
        let missing: Vec<String> = ranks.filter_map(|rank| status(&rank)).collect();
        let mut text = missing[..missing.len().min(RANKS_NAMED)].join("; ");
        if missing.len() > RANKS_NAMED {
            text += &format!("; and {} more ranks", missing.len() - RANKS_NAMED);
        }
        text
    }

    /// What a rank still owes a step; `None` when it owes nothing.
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
        let open = self.steps.iter().filter(|(_, state)| !state.committed);
        let one = |(&step, state): (&Step, &StepState)| Unsettled {
            run: self.opened.run.clone(),
            attempt: self.opened.attempt,
            step,
            partial: state.overdue,
            never_joined: (0..self.opened.world_size)
                .map(Rank)
                .filter(|rank| !self.ranks.contains_key(rank))
                .collect(),
            missing: self.missing(step),
        };
        open.map(one).collect()
    }
}
