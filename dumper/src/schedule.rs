//! Which steps this rank records: those of its settings, and those that the coordinator asks for
//! while the job runs.
//!
//! What becomes of a step is decided once, when the training thread first asks for it; the
//! heartbeat adds steps. Both hold the same lock for a few comparisons, so an order of the
//! coordinator either takes part in the decision on a step, or is found to be too late for it.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use backtape::selection::{Planned, Selection};

use crate::recording::lock;
use crate::steps::Steps;

/// How many steps' durations are remembered: the shortest of them gives the rate.
const PACE_STEPS: usize = 16;

/// Late steps that are named one by one.
const MAX_LATE: usize = 1024;

/// What becomes of a step on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// It is recorded.
    Record(Arc<Selection>),
    /// Other ranks record it: this one closes its part, which is empty.
    Empty(Arc<Selection>),
    /// The ring keeps it.
    Hold(Arc<Selection>),
    /// Other ranks record it: the ring of this one keeps an empty entry.
    HoldEmpty(Arc<Selection>),
    /// It is not recorded.
    Pass,
}

pub(crate) struct Schedule {
    rank: u32,
    watching: bool,
    ring: bool,
    state: Mutex<State>,
}

struct State {
    configured: Arc<Selection>,
    /// Selections of the coordinator's plans, each with the first step that it holds for.
    plans: Vec<(u64, Arc<Selection>)>,
    /// Steps that were asked for one by one.
    asked: BTreeSet<u64>,
    /// Steps that have, or had, a tape, or were closed without one.
    taken: Steps,
    /// Newest step that the ring began.
    newest_in_ring: Option<u64>,
    current: Option<u64>,
    began: Option<Instant>,
    durations: VecDeque<Duration>,
}

impl State {
    fn selection(&self, step: u64) -> &Arc<Selection> {
        let holds = self.plans.iter().rev().find(|(from, _)| *from <= step);
        holds.map_or(&self.configured, |(_, selection)| selection)
    }

    fn selects(&self, step: u64) -> bool {
        self.asked.contains(&step) || self.selection(step).steps.contains(step)
    }
}

impl Schedule {
    pub(crate) fn new(rank: u32, selection: Selection, watching: bool, ring: bool) -> Schedule {
        let state = State {
            configured: Arc::new(selection),
            plans: Vec::new(),
            asked: BTreeSet::new(),
            taken: Steps::default(),
            newest_in_ring: None,
            current: None,
            began: None,
            durations: VecDeque::new(),
        };
        Schedule { rank, watching, ring, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What becomes of the step that the training thread is at.
    pub(crate) fn look(&self, step: u64) -> Course {
        let mut state = self.lock();
        if self.watching {
            state.advance(step);
        }
        if state.taken.contains(step) {
            return Course::Pass;
        }
        let selection = state.selection(step).clone();
        let ours = selection.ranks.contains(self.rank);
        match (state.selects(step), ours) {
            (true, true) => Course::Record(selection),
            (true, false) => Course::Empty(selection),
            // A job that has gone back to an older step: the ring has kept that step before.
            _ if !self.ring || state.newest_in_ring >= Some(step) => Course::Pass,
            (false, true) => Course::Hold(selection),
            (false, false) => Course::HoldEmpty(selection),
        }
    }

    /// Takes a step, which is then recorded or closed; true the first time.
    pub(crate) fn take(&self, step: u64) -> bool {
        self.lock().taken.insert(step)
    }

    /// True when the step has, or had, its tape.
    pub(crate) fn is_taken(&self, step: u64) -> bool {
        self.lock().taken.contains(step)
    }

    /// Every step that has, or had, its tape.
    pub(crate) fn taken(&self) -> Steps {
        self.lock().taken.clone()
    }

    /// The ring begins to keep this step; true the first time.
    pub(crate) fn hold(&self, step: u64) -> bool {
        let mut state = self.lock();
        let new = state.newest_in_ring < Some(step) && !state.taken.contains(step);
        if new {
            state.newest_in_ring = Some(step);
        }
        new
    }

    /// The step that this rank is at, and the steps per second of its fastest recent step.
    pub(crate) fn progress(&self) -> (Option<u64>, f64) {
        let state = self.lock();
        let fastest = state.durations.iter().min().map(Duration::as_secs_f64);
        (state.current, fastest.map_or(0.0, |seconds| 1.0 / seconds.max(1e-6)))
    }

    /// Adds a plan. Returns the steps that it selects and that are over already; they are taken,
    /// and the caller is to say of each what became of it.
    pub(crate) fn add_plan(&self, plan: &Planned) -> Vec<u64> {
        let mut state = self.lock();
        let selection = Arc::new(plan.over(&state.configured));
        state.plans.push((plan.from.0, selection.clone()));
        let Some(current) = state.current else { return Vec::new() };
        // Only the plan before it can still hold for steps to come.
        let before = state.plans.iter().rposition(|(from, _)| *from <= current).unwrap_or(0);
        state.plans.drain(..before);
        let late = selection.steps.within(plan.from.0, current, MAX_LATE);
        late.into_iter().filter(|&step| state.taken.insert(step)).collect()
    }

    /// Asks for one step. One that is over already is taken, and the caller is to say what became
    /// of it.
    pub(crate) fn ask(&self, step: u64) -> Asked {
        let mut state = self.lock();
        if state.current.is_none_or(|current| current < step) {
            state.asked.insert(step);
            return Asked::Ahead;
        }
        if state.taken.insert(step) { Asked::Over } else { Asked::Taken }
    }

    /// The selection that holds for a step.
    pub(crate) fn selection(&self, step: u64) -> Arc<Selection> {
        self.lock().selection(step).clone()
    }
}

/// What became of asking for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It will be recorded when the job gets there.
    Ahead,
    /// It was recorded, or is being.
    Taken,
    /// The job had passed it without a tape; it is taken now.
    Over,
}

impl State {
    fn advance(&mut self, step: u64) {
        if self.current >= Some(step) {
            return;
        }
        let now = Instant::now();
        if let (Some(current), Some(began)) = (self.current, self.began) {
            let steps = u32::try_from(step - current).unwrap_or(u32::MAX);
            if self.durations.len() == PACE_STEPS {
                self.durations.pop_front();
            }
            self.durations.push_back((now - began) / steps);
        }
        (self.current, self.began) = (Some(step), Some(now));
    }
}

#[cfg(test)]
mod tests {
    use backtape::identity::Step;
    use backtape::selection::Changes;

    use super::*;

    fn waiting(ring: bool) -> Schedule {
        let selection = Selection { steps: "none".parse().unwrap(), ..Selection::default() };
        Schedule::new(1, selection, true, ring)
    }

    fn plan(version: u32, from: u64, steps: &str, ranks: &str) -> Planned {
        let (steps, ranks) = (steps.parse().ok(), ranks.parse().ok());
        let changes = Changes { steps, ranks, ..Changes::default() };
        Planned { version, from: Step(from), changes }
    }

    #[test]
    fn a_plan_holds_from_its_step_on_and_until_the_next_one() {
        let schedule = waiting(false);
        assert_eq!(schedule.look(10), Course::Pass);
        assert_eq!(schedule.add_plan(&plan(1, 12, "every:1", "all")), [0u64; 0]);
        assert_eq!(schedule.add_plan(&plan(2, 14, "every:1", "0")), [0u64; 0]);
        assert_eq!(schedule.look(11), Course::Pass);
        assert!(matches!(schedule.look(12), Course::Record(_)));
        assert!(schedule.take(12) && !schedule.take(12));
        assert_eq!(schedule.look(12), Course::Pass, "it has its tape");
        assert!(matches!(schedule.look(13), Course::Record(_)));
        assert!(matches!(schedule.look(14), Course::Empty(_)), "rank 1 is not asked");
    }

    #[test]
    fn steps_that_were_over_when_the_order_came_are_named_once_and_taken() {
        let schedule = waiting(true);
        for step in 0..=20 {
            assert!(matches!(schedule.look(step), Course::Hold(_)));
        }
        assert_eq!(schedule.add_plan(&plan(1, 17, "18-30", "all")), [18, 19, 20]);
        assert_eq!(schedule.ask(19), Asked::Taken);
        assert_eq!(schedule.ask(15), Asked::Over);
        assert_eq!(schedule.ask(25), Asked::Ahead);
        assert!(matches!(schedule.look(25), Course::Record(_)));
    }

    #[test]
    fn the_ring_begins_each_step_once_and_none_that_is_older() {
        let schedule = waiting(true);
        assert!(schedule.hold(5) && !schedule.hold(5) && !schedule.hold(4));
        assert_eq!(schedule.look(4), Course::Pass);
        assert!(matches!(schedule.look(6), Course::Hold(_)));
    }
}
