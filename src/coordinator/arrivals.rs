//! Which processes of a run were alive at the same time, as far as that can be known without a
//! clock: pure.
//!
//! Each process that asks to enter is an arrival and has a number. Every answer names the newest
//! arrival, and who says that number again was alive after it. Two processes of which each was
//! alive after the other came were alive together. A launcher ends one launch before it starts
//! the next, so they are of one launch, whatever was killed meanwhile and however long a request
//! was under way.
//!
//! None of it is durable: processes arrive again when the coordinator was restarted. Its numbers
//! begin at a place of their own then, so that what was heard before means nothing.

use std::collections::BTreeMap;

use crate::identity::{LaunchName, Rank};

/// Processes that are kept of one rank: some that were killed, and the one that lives.
const KEPT_PER_RANK: usize = 4;

/// One process.
pub(crate) type Process = (Rank, u64);

/// The arrivals at one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arrivals {
    begin: u64,
    count: u64,
    /// Those of a rank in the order in which they came.
    known: BTreeMap<Rank, Vec<Arrived>>,
}

#[derive(Clone, Debug)]
struct Arrived {
    incarnation: u64,
    /// What the launcher calls its launch.
    launch: Option<LaunchName>,
    number: u64,
    /// The newest arrival that it said again.
    heard: u64,
}

impl Arrivals {
    /// None yet; `begin` is drawn anew whenever the coordinator starts.
    pub(crate) fn begin(begin: u64) -> Arrivals {
        Arrivals { begin, ..Arrivals::default() }
    }

    /// The newest arrival, as processes are told it.
    pub(crate) fn newest(&self) -> u64 {
        self.begin.wrapping_add(self.count)
    }

    /// Takes in that a process asks, of which launch it is, and what it has heard.
    pub(crate) fn note(
        &mut self,
        (rank, incarnation): Process,
        launch: Option<&LaunchName>,
        heard: u64,
    ) {
        let heard = match heard.wrapping_sub(self.begin) {
            number if number <= self.count => number,
            _ => 0,
        };
        let of_rank = self.known.entry(rank).or_default();
        if let Some(known) = of_rank.iter_mut().find(|known| known.incarnation == incarnation) {
            known.heard = known.heard.max(heard);
            return;
        }
        if of_rank.len() == KEPT_PER_RANK {
            of_rank.remove(0);
        }
        self.count += 1;
        let (number, launch) = (self.count, launch.cloned());
        of_rank.push(Arrived { incarnation, launch, number, heard: 0 });
    }

    /// True when the process asked again after it had arrived: a first request may have been
    /// sent by one that is dead by now.
    pub(crate) fn came_back(&self, process: Process) -> bool {
        self.get(process).is_some_and(|own| own.heard >= own.number)
    }

    /// True when both were alive at one time.
    pub(crate) fn together(&self, one: Process, other: Process) -> bool {
        let both = self.get(one).zip(self.get(other));
        both.is_some_and(|(a, b)| a.heard >= b.number && b.heard >= a.number)
    }

    /// True when a process of the same rank arrived after this one and asked again, and is not
    /// known to be of another launch: who arrives after the coordinator was restarted may be
    /// left over.
    pub(crate) fn is_followed(&self, process: Process) -> bool {
        let Some(own) = self.get(process) else { return false };
        let later = |other: &&Arrived| other.number > own.number && other.launch == own.launch;
        let of_rank = self.known.get(&process.0).into_iter().flatten();
        of_rank.filter(later).any(|other| other.heard >= other.number)
    }

    fn get(&self, (rank, incarnation): Process) -> Option<&Arrived> {
        self.known.get(&rank)?.iter().find(|known| known.incarnation == incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_are_together_when_each_was_alive_after_the_other_came() {
        let (zero, one) = ((Rank(0), 10), (Rank(1), 11));
        let mut arrivals = Arrivals::begin(u64::MAX);
        arrivals.note(zero, None, 0);
        assert!(!arrivals.came_back(zero), "its first request may be all that is left of it");
        let first = arrivals.newest();
        arrivals.note(zero, None, first);
        assert!(arrivals.came_back(zero));
        arrivals.note(one, None, 0);
        let both = arrivals.newest();
        // Only one of the two has shown that it outlived the other's arrival.
        arrivals.note(one, None, both);
        assert!(!arrivals.together(zero, one) && !arrivals.together(one, zero));
        arrivals.note(zero, None, both);
        assert!(arrivals.together(zero, one) && arrivals.together(one, zero));
    }

    #[test]
    fn what_another_coordinator_said_is_not_believed() {
        let zero = (Rank(0), 10);
        let mut before = Arrivals::begin(1 << 40);
        before.note(zero, None, 0);
        let mut arrivals = Arrivals::begin(1 << 50);
        arrivals.note(zero, None, before.newest());
        arrivals.note(zero, None, before.newest());
        assert!(!arrivals.came_back(zero));
    }

    #[test]
    fn of_a_rank_the_latest_processes_are_kept_and_who_came_later_is_known() {
        let mut arrivals = Arrivals::begin(5);
        for incarnation in 0..10 {
            arrivals.note((Rank(3), incarnation), None, 0);
        }
        assert_eq!(arrivals.known[&Rank(3)].len(), KEPT_PER_RANK);
        let (older, newest) = ((Rank(3), 8), (Rank(3), 9));
        assert!(!arrivals.is_followed(older), "the newer one may be dead");
        arrivals.note(newest, None, arrivals.newest());
        assert!(arrivals.is_followed(older) && !arrivals.is_followed(newest));
        let (left_over, other) = ((Rank(3), 10), LaunchName::new("job/1").ok());
        arrivals.note(left_over, other.as_ref(), 0);
        arrivals.note(left_over, other.as_ref(), arrivals.newest());
        assert!(!arrivals.is_followed(newest), "it is of another launch");
    }
}
