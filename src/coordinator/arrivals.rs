//! Which processes of a run were alive at the same time, as far as that follows without a clock.
//! Pure.
//!
//! The first request of each process to enter is an arrival and gets a number. Every answer
//! contains the number of the newest arrival, and a process that sends that number back was alive
//! after that arrival. If each of two processes was alive after the other's arrival, they were
//! alive at the same time. A launcher ends one launch before it starts the next, so that the two
//! belong to the same launch, whatever was killed meanwhile and however long a request took.
//!
//! Arrivals are not durable: after a restart of the coordinator processes arrive again. Its numbers
//! then begin at a new random value, so that numbers from before are recognised and ignored.

use std::collections::BTreeMap;

use crate::identity::{LaunchName, Rank};

/// Most processes that are remembered per rank: the living one and some that were killed.
const KEPT_PER_RANK: usize = 4;

/// A process: its rank and its incarnation.
pub(crate) type Process = (Rank, u64);

/// The arrivals of processes at one run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arrivals {
    begin: u64,
    count: u64,
    /// The processes of each rank, in the order of their arrival.
    known: BTreeMap<Rank, Vec<Arrived>>,
}

#[derive(Clone, Debug)]
struct Arrived {
    incarnation: u64,
    /// The launcher's name of its launch.
    launch: Option<LaunchName>,
    number: u64,
    /// The newest arrival whose number it has sent back.
    heard: u64,
}

impl Arrivals {
    /// No arrivals; the coordinator draws `begin` at random when it starts.
    pub(crate) fn begin(begin: u64) -> Arrivals {
        Arrivals { begin, ..Arrivals::default() }
    }

    /// The number of the newest arrival, which answers contain.
    pub(crate) fn newest(&self) -> u64 {
        self.begin.wrapping_add(self.count)
    }

    /// Records a request of a process: its launch, and the newest arrival that it was told.
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

    /// True when the process sent a second request after its arrival. A first request alone may be
    /// from a process that has died since.
    pub(crate) fn came_back(&self, process: Process) -> bool {
        self.get(process).is_some_and(|arrived| arrived.heard >= arrived.number)
    }

    /// True when both are known to have been alive at the same time.
    pub(crate) fn together(&self, first: Process, other: Process) -> bool {
        let both = self.get(first).zip(self.get(other));
        both.is_some_and(|(a, b)| a.heard >= b.number && b.heard >= a.number)
    }

    /// True when a later process of the same rank and the same launch name asked twice: then this
    /// one is dead or left over. The launch must be the same, because after a restart of the
    /// coordinator left-over processes of older launches may arrive later.
    pub(crate) fn is_followed(&self, process: Process) -> bool {
        let Some(arrived) = self.get(process) else { return false };
        let later =
            |other: &&Arrived| other.number > arrived.number && other.launch == arrived.launch;
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
        let (zero, second) = ((Rank(0), 10), (Rank(1), 11));
        let mut arrivals = Arrivals::begin(u64::MAX);
        arrivals.note(zero, None, 0);
        assert!(!arrivals.came_back(zero), "its first request may be all that is left of it");
        let first = arrivals.newest();
        arrivals.note(zero, None, first);
        assert!(arrivals.came_back(zero));
        arrivals.note(second, None, 0);
        let both = arrivals.newest();
        // So far only one of the two has shown that it was alive after the other's arrival.
        arrivals.note(second, None, both);
        assert!(!arrivals.together(zero, second) && !arrivals.together(second, zero));
        arrivals.note(zero, None, both);
        assert!(arrivals.together(zero, second) && arrivals.together(second, zero));
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
