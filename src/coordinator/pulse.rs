//! How far the ranks of an attempt are, from their heartbeats. Pure, and not durable: after a
//! restart the next heartbeats repeat it.
//!
//! ```text
//!            rank r, last heard at step 100, 0.8 s ago, 2.5 steps/s, period 1 s
//!            it hears within 1.25 × 1 s + 0.5 s, so it may have begun step
//!            100 + floor((0.8 + 1.75) × 2.5) + 1 = 107 by then: ask for 108
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::limits::{
    HEARING_SLACK, MAX_BEAT_PERIOD, MAX_BEATS_PER_SECOND, MAX_STEP_RATE, RANK_SILENCE,
};
use super::refusal::Refusal;
use crate::identity::{Rank, Step};
use crate::selection::Trigger;

/// Longest time between two heartbeats, in periods: ranks add jitter.
const PERIOD_STRETCH: f64 = 1.25;

/// A rank's heartbeat; the `wire` module has checked it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Beat {
    /// The newest step it has begun.
    pub step: Option<Step>,
    /// Rate of its fastest recent step.
    pub steps_per_second: f64,
    /// Time between two heartbeats.
    pub period_ms: u64,
    /// The newest plan it knows.
    pub plan_version: u32,
    /// How many triggers it has settled.
    pub triggers_settled: u32,
    /// A watched condition that it found.
    pub report: Option<Report>,
    /// Which steps its ring buffer holds.
    pub ring: Option<RingReport>,
    /// True while its recorder is being closed.
    pub leaving: bool,
}

/// A condition that a rank was to watch for and found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// The step.
    pub step: Step,
    /// What it found, in words.
    pub reason: String,
}

/// The steps in a rank's ring buffer, which it keeps until the trigger is settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RingReport {
    /// The trigger's number.
    pub trigger: u32,
    /// Steps, ascending.
    pub steps: Vec<Step>,
}

/// What is known of the running ranks.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    ranks: BTreeMap<Rank, Seen>,
    /// The steps in the ranks' ring buffers, by number of the trigger and rank.
    rings: BTreeMap<u32, BTreeMap<Rank, Vec<Step>>>,
    /// When the first heartbeat arrived: the silence of other ranks counts from then on.
    since_ms: Option<u64>,
    /// The rank that was found last not to be leaving, and, per trigger, the one whose ring report
    /// was found missing. Searches begin there: otherwise, while 10,000 ranks wait for one, each of
    /// their heartbeats, ten per second, would search all ranks.
    stays: Option<Rank>,
    missing: BTreeMap<u32, Rank>,
}

#[derive(Debug)]
struct Seen {
    at_ms: u64,
    step: Option<Step>,
    steps_per_second: f64,
    period_ms: u64,
    leaving: bool,
    /// Heartbeats in the second that began at `window_ms`.
    window_ms: u64,
    beats: u32,
}

impl Pulse {
    /// Records a heartbeat.
    pub(crate) fn note(&mut self, rank: Rank, beat: &Beat, now_ms: u64) -> Result<(), Refusal> {
        self.since_ms.get_or_insert(now_ms);
        let (mut window_ms, mut beats) = (now_ms, 1);
        let mut step = beat.step;
        if let Some(seen) = self.ranks.get(&rank) {
            if now_ms.saturating_sub(seen.window_ms) < 1000 {
                (window_ms, beats) = (seen.window_ms, seen.beats + 1);
            }
            if beats > MAX_BEATS_PER_SECOND {
                return Err(Refusal::TooOften(rank, MAX_BEATS_PER_SECOND));
            }
            step = step.max(seen.step);
        }
        let rate = beat.steps_per_second;
        let seen = Seen {
            at_ms: now_ms,
            step,
            // NaN and negative rates are ignored.
            steps_per_second: if rate > 0.0 { rate.min(MAX_STEP_RATE) } else { 0.0 },
            period_ms: beat.period_ms.min(millis(MAX_BEAT_PERIOD)),
            leaving: beat.leaving,
            window_ms,
            beats,
        };
        self.ranks.insert(rank, seen);
        Ok(())
    }

    /// Records which steps a rank's ring buffer holds, for a trigger that is not settled.
    pub(crate) fn hold(&mut self, rank: Rank, ring: RingReport) {
        self.rings.entry(ring.trigger).or_default().insert(rank, ring.steps);
    }

    /// The newest step that any rank is known to have begun.
    pub(crate) fn newest(&self) -> Option<Step> {
        self.ranks.values().filter_map(|seen| seen.step).max()
    }

    /// The first step that no rank can begin before it has received the next answer to its
    /// heartbeats; `None` if no rank has begun a step.
    pub(crate) fn reach(&self, now_ms: u64) -> Option<Step> {
        let next_of_rank = |seen: &Seen| {
            // A rank that fell silent is assumed to have stopped after its silence limit.
            let age = now_ms.saturating_sub(seen.at_ms).min(seen.silence_ms()) as f64;
            let hearing = seen.period_ms as f64 * PERIOD_STRETCH + millis(HEARING_SLACK) as f64;
            let begun = (age + hearing) / 1000.0 * seen.steps_per_second;
            // Rates and times are capped, so that this is far below 2^53. The rank may begin one
            // more step right away; the one after that is the first that can be asked for.
            seen.step.map(|step| Step(step.0.saturating_add(begun.floor() as u64 + 2)))
        };
        self.ranks.values().filter_map(next_of_rank).max()
    }

    /// True when this rank has been silent for too long, so that nobody waits for it.
    fn absent(&self, rank: Rank, now_ms: u64) -> bool {
        match self.ranks.get(&rank) {
            Some(seen) => now_ms.saturating_sub(seen.at_ms) >= seen.silence_ms(),
            None => {
                let since = self.since_ms.unwrap_or(now_ms);
                now_ms.saturating_sub(since) >= millis(RANK_SILENCE)
            }
        }
    }

    /// True when every rank that is not absent is leaving. Ranks that have not sent a heartbeat yet
    /// are waited for: in a job of few steps the last ranks find the coordinator only after the
    /// others are done, and rank 0 must not end it before.
    pub(crate) fn all_leaving(&mut self, world_size: u32, now_ms: u64) -> bool {
        let stays = |rank: Rank| {
            let leaving = self.ranks.get(&rank).is_some_and(|seen| seen.leaving);
            !leaving && !self.absent(rank, now_ms)
        };
        self.stays = first_from(self.stays, world_size, stays);
        self.stays.is_none()
    }

    /// The steps that every rank must write from its ring buffer, once all ranks that are not
    /// absent have reported theirs: the steps that all of them hold, and the step that caused the
    /// trigger if any rank holds it.
    pub(crate) fn ring_choice(
        &mut self,
        trigger: &Trigger,
        world_size: u32,
        now_ms: u64,
    ) -> Option<Vec<Step>> {
        let number = trigger.number;
        let rings = self.rings.get(&number).filter(|rings| !rings.is_empty())?;
        let lacks = |rank: Rank| !rings.contains_key(&rank) && !self.absent(rank, now_ms);
        let known = self.missing.get(&number).copied();
        if let Some(rank) = first_from(known, world_size, lacks) {
            self.missing.insert(number, rank);
            return None;
        }
        let mut lists = rings.values();
        let mut common: BTreeSet<Step> = lists.next()?.iter().copied().collect();
        for list in lists {
            let list: BTreeSet<Step> = list.iter().copied().collect();
            common.retain(|step| list.contains(step));
        }
        if rings.values().any(|list| list.contains(&trigger.seen)) {
            common.insert(trigger.seen);
        }
        // The trigger's own step will be recorded anyway.
        common.remove(&trigger.record);
        Some(common.into_iter().collect())
    }

    /// Drops the reports for a trigger that is settled.
    pub(crate) fn forget(&mut self, trigger: u32) {
        self.rings.remove(&trigger);
        self.missing.remove(&trigger);
    }
}

/// A rank for which `is` holds. The search begins at the one found last and wraps around.
fn first_from(known: Option<Rank>, world_size: u32, is: impl Fn(Rank) -> bool) -> Option<Rank> {
    let from = known.map_or(0, |rank| rank.0);
    (from..world_size).chain(0..from).map(Rank).find(|&rank| is(rank))
}

impl Seen {
    fn silence_ms(&self) -> u64 {
        millis(RANK_SILENCE).max(self.period_ms * 5)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn beat(step: u64, steps_per_second: f64, leaving: bool) -> Beat {
        Beat {
            step: Some(Step(step)),
            steps_per_second,
            period_ms: 1000,
            plan_version: 0,
            triggers_settled: 0,
            report: None,
            ring: None,
            leaving,
        }
    }

    fn trigger(seen: u64) -> Trigger {
        Trigger {
            number: 1,
            reason: String::new(),
            rank: None,
            seen: Step(seen),
            record: Step(90),
            ring: None,
        }
    }

    /// Goal: no rank that keeps its speed passes the step before it has received the order. Method:
    /// advance every rank to the latest moment at which it receives it.
    #[test]
    fn the_chosen_step_is_ahead_of_every_rank_when_it_hears() {
        for rate in [0.0, 0.05, 0.4, 1.0, 7.3, 250.0] {
            for age_ms in [0, 300, 1250] {
                let mut pulse = Pulse::default();
                pulse.note(Rank(0), &beat(100, rate, false), 5000).unwrap();
                pulse.note(Rank(1), &beat(97, rate, false), 5000 + age_ms).unwrap();
                let now = 5000 + age_ms;
                let chosen = pulse.reach(now).unwrap().0;
                // Rank 0 may have begun step 101 right after its heartbeat.
                let heard_ms = now + 1250 + 500;
                let begun = 101 + ((heard_ms - 5000) as f64 / 1000.0 * rate).floor() as u64;
                assert!(chosen > begun, "{rate} {age_ms}: {chosen} {begun}");
                assert!(chosen <= begun + 1, "no further ahead than it must be");
            }
        }
    }

    #[test]
    fn lies_about_rates_and_times_do_not_overflow() {
        let mut pulse = Pulse::default();
        for (rank, rate) in (0..).zip([f64::NAN, f64::INFINITY, -1.0, 1e308]) {
            let lie = Beat { period_ms: u64::MAX, ..beat(1 << 53, rate, false) };
            pulse.note(Rank(rank), &lie, 0).unwrap();
        }
        assert!(pulse.reach(u64::MAX).unwrap().0 > 1 << 53);
    }

    #[test]
    fn more_heartbeats_than_a_rank_may_send_are_refused_until_the_next_second() {
        let mut pulse = Pulse::default();
        for _ in 0..MAX_BEATS_PER_SECOND {
            pulse.note(Rank(0), &beat(1, 1.0, false), 10).unwrap();
        }
        assert!(pulse.note(Rank(0), &beat(1, 1.0, false), 1009).is_err());
        pulse.note(Rank(1), &beat(1, 1.0, false), 1009).unwrap();
        pulse.note(Rank(0), &beat(1, 1.0, false), 1010).unwrap();
    }

    #[test]
    fn the_rings_write_what_all_hold_and_the_step_that_went_wrong() {
        let mut pulse = Pulse::default();
        let steps = |range: std::ops::Range<u64>| range.map(Step).collect::<Vec<_>>();
        for (rank, range) in [(0, 10..20), (1, 15..22)] {
            pulse.note(Rank(rank), &beat(20, 1.0, false), 0).unwrap();
            pulse.hold(Rank(rank), RingReport { trigger: 1, steps: steps(range) });
        }
        assert_eq!(pulse.ring_choice(&trigger(18), 3, 100), None, "rank 2 may answer yet");
        let gone_ms = millis(RANK_SILENCE);
        let all = pulse.ring_choice(&trigger(18), 3, gone_ms).unwrap();
        assert_eq!(all, steps(15..20), "a rank that is gone is not waited for");
        pulse.note(Rank(2), &beat(20, 1.0, false), 200).unwrap();
        pulse.hold(Rank(2), RingReport { trigger: 1, steps: vec![] });
        let some = pulse.ring_choice(&trigger(18), 3, 300).unwrap();
        assert_eq!(some, steps(18..19), "what went wrong is kept by whoever holds it");
    }

    /// Goal: thousands of ranks that wait for one, each asking ten times a second, do not overload
    /// the coordinator. Method: count the examined ranks while the ranks report in order and then
    /// ask repeatedly for the last one.
    #[test]
    fn ranks_that_wait_for_one_are_answered_without_a_look_at_all_of_them() {
        const WORLD: u32 = 1000;
        let (looks, answered) = (Cell::new(0), Cell::new(0));
        let mut known = None;
        for asked in 0..10 * WORLD {
            answered.set((asked + 1).min(WORLD - 1));
            known = first_from(known, WORLD, |rank| {
                looks.set(looks.get() + 1);
                rank.0 >= answered.get()
            });
            assert_eq!(known, Some(Rank(answered.get())));
        }
        assert!(looks.get() <= 11 * WORLD, "{} looks", looks.get());
        assert_eq!(first_from(known, WORLD, |_| false), None);
    }

    #[test]
    fn whose_ring_is_missing_is_remembered_until_the_choice() {
        let mut pulse = Pulse::default();
        for rank in [0, 2] {
            pulse.note(Rank(rank), &beat(1, 1.0, false), 0).unwrap();
            pulse.hold(Rank(rank), RingReport { trigger: 1, steps: vec![Step(1)] });
        }
        assert_eq!(pulse.ring_choice(&trigger(1), 3, 0), None);
        assert_eq!(pulse.missing.get(&1), Some(&Rank(1)));
        assert!(!pulse.all_leaving(3, 0));
        assert_eq!(pulse.stays, Some(Rank(0)));
        pulse.hold(Rank(1), RingReport { trigger: 1, steps: vec![Step(1)] });
        assert_eq!(pulse.ring_choice(&trigger(1), 3, 0), Some(vec![Step(1)]));
        pulse.forget(1);
        assert!(pulse.missing.is_empty());
    }

    #[test]
    fn ranks_leave_together_or_without_those_that_are_gone() {
        let mut pulse = Pulse::default();
        pulse.note(Rank(0), &beat(1, 1.0, true), 0).unwrap();
        assert!(!pulse.all_leaving(2, 0), "rank 1 may still come");
        pulse.note(Rank(1), &beat(1, 1.0, false), 0).unwrap();
        assert!(!pulse.all_leaving(2, 100));
        assert!(pulse.all_leaving(2, millis(RANK_SILENCE)));
        pulse.note(Rank(1), &beat(1, 1.0, true), 200).unwrap();
        assert!(pulse.all_leaving(2, 300));
    }
}
