//! The heartbeat of a rank: it tells the coordinator at which step the rank is, and turns what the
//! coordinator asks for into commands for the recorder's thread.
//!
//! It has a thread and a connection of its own, as the recorder's thread blocks on its disk, and an
//! order that is heard after its step comes too late.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use backtape::coordinator::limits::MAX_RING_STEPS;
use backtape::manifest::EVERYTHING;
use backtape::selection::{Planned, Trigger};
use tokio::time::Instant;

use crate::client::steering::{Beat, Orders};
use crate::client::{CallError, Client, jittered};
use crate::omissions::Omissions;
use crate::patience::Deadline;
use crate::queue::{Command, Ending};
use crate::recording::{Finding, Recording};
use crate::rendezvous::Rendezvous;
use crate::ring::Holds;
use crate::schedule::Asked;

/// Longest pause while a trigger is open, and while the recorder is being closed.
const OPEN_PAUSE: Duration = Duration::from_millis(100);
const LEAVING_PAUSE: Duration = Duration::from_millis(50);

/// Shortest pause between heartbeats: the coordinator refuses more frequent ones.
const SHORTEST_PERIOD: Duration = Duration::from_millis(30);

/// [`jittered`] shortens a pause to between half and all of it. Stretched by this factor first, the
/// pauses lie around the period, and none is longer than the coordinator allows for.
const STRETCH: f64 = 1.25;

/// How long a frozen ring waits for its own rank to finish the step that a
/// trigger is about, before it says what it holds.
const FREEZE_PATIENCE: Duration = Duration::from_secs(120);

/// How long a rank whose recorder is being closed waits for triggers: those that are open, and
/// those of other ranks whose last steps went wrong. Longer than the coordinator waits for a rank
/// that fell silent.
const LEAVING_PATIENCE: Duration = Duration::from_secs(15);

/// Most reasons why reports triggered nothing that the summary names.
const MAX_REFUSALS: usize = 16;

/// How long a heartbeat that was told to end is waited for.
pub(crate) const END_DEADLINE: Duration = Duration::from_secs(45);

/// A heartbeat that runs until the recorder is closed.
pub(crate) struct Heartbeat {
    thread: JoinHandle<()>,
}

/// What the heartbeat remembers from one beat to the next.
struct State {
    recording: Arc<Recording>,
    plan_version: u32,
    settled: u32,
    open: Vec<Open>,
    /// Why reports triggered nothing; each reason is said once.
    refusals: Vec<String>,
    /// The coordinator has said that the recorder of every rank is being closed.
    all_leaving: bool,
}

/// A trigger for which it is not yet settled which steps of the rings are written.
struct Open {
    number: u32,
    seen: u64,
    since: Instant,
}

impl Heartbeat {
    pub(crate) fn start(recording: Arc<Recording>, client: Client) -> std::io::Result<Heartbeat> {
        let thread = std::thread::Builder::new().name("backtape-heartbeat".into());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = thread.spawn(move || {
            let body = AssertUnwindSafe(|| runtime.block_on(beat_on(&recording, &client)));
            if catch_unwind(body).is_err() {
                recording.fault("the heartbeat panicked, which is a bug in backtape");
            }
            recording.ring.thaw();
        })?;
        Ok(Heartbeat { thread })
    }

    /// Waits until nothing more will be asked for, and no longer than the deadline.
    pub(crate) async fn finish(self, deadline: &Deadline) {
        let ended = tokio::task::spawn_blocking(move || self.thread.join());
        let _ = deadline.bound(ended).await;
    }
}

/// The steps of a ring, ascending, that one heartbeat may name: a frozen ring may hold more of
/// them. Steps up to `seen`, which the trigger is about, go before later ones.
fn nameable(mut steps: Vec<u64>, seen: u64) -> Vec<u64> {
    let end = steps.partition_point(|&step| step <= seen);
    steps.drain(..end.saturating_sub(MAX_RING_STEPS));
    steps.truncate(MAX_RING_STEPS);
    steps
}

async fn beat_on(recording: &Arc<Recording>, client: &Client) {
    let client = match client.reopened() {
        Ok(client) => client,
        Err(error) => return recording.fault(format!("no heartbeats are sent: {error}")),
    };
    let mut state = State {
        recording: recording.clone(),
        plan_version: 0,
        settled: 0,
        open: Vec::new(),
        refusals: Vec::new(),
        all_leaving: false,
    };
    loop {
        // Asked in this order, so that a rank that says it is leaving also reports what its last
        // step showed.
        let leaving = state.closed_at().is_some();
        let finding = recording.finding();
        let answered = client.heartbeat(state.beat(finding.clone(), leaving)).await;
        match answered {
            Ok(orders) => state.hear(finding, orders),
            // Rank 0 has ended its coordinator, as it had heard that every rank leaves.
            Err(CallError::Unreachable(_)) if state.orphaned() => return,
            Err(CallError::Unreachable(_)) => {}
            Err(error) => return recording.fault(format!("heartbeats ended: {error}")),
        }
        if state.is_done() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(state.pause()) => {}
            () = recording.wake.notified() => {}
        }
    }
}

impl State {
    fn beat(&self, finding: Option<Finding>, leaving: bool) -> Beat {
        let (step, steps_per_second) = self.recording.schedule.progress();
        let period = self.period().as_millis();
        Beat {
            step,
            steps_per_second,
            period_ms: u32::try_from(period).unwrap_or(u32::MAX),
            plan_version: self.plan_version,
            triggers_settled: self.settled,
            report: finding,
            ring: self.steps_in_ring(),
            leaving,
        }
    }

    /// True when the coordinator was inside rank 0, which has ended it.
    fn orphaned(&self) -> bool {
        let plan = &self.recording.plan;
        let embedded = plan.settings.coordinator.is_none() && self.closed_at().is_some();
        embedded && Rendezvous::read(&plan.run_directory()).is_none()
    }

    fn closed_at(&self) -> Option<Instant> {
        self.recording.patience.closed_at()
    }

    /// Which steps the ring holds for the oldest open trigger, once this rank has finished the step
    /// that the trigger is about, or will not finish it.
    fn steps_in_ring(&self) -> Option<(u32, Vec<u64>)> {
        let open = self.open.first()?;
        let steps = self.recording.ring.writable_steps();
        let reached = steps.last().is_some_and(|&newest| newest >= open.seen);
        let over = self.closed_at().is_some() || open.since.elapsed() >= FREEZE_PATIENCE;
        let ready = reached || over || !self.recording.ring.is_on();
        ready.then(|| (open.number, nameable(steps, open.seen)))
    }

    fn hear(&mut self, finding: Option<Finding>, orders: Orders) {
        if let Some(finding) = finding {
            self.recording.forget_finding(&finding);
            let why = orders.report_refused;
            // Reports of a loss that is wrong again and again are refused for the same reason.
            if !why.is_empty()
                && self.refusals.len() < MAX_REFUSALS
                && !self.refusals.contains(&why)
            {
                let (step, what) = finding;
                self.recording.ordered(format!("{what} at step {step} triggered nothing: {why}"));
                self.refusals.push(why);
            }
        }
        self.all_leaving = orders.all_leaving;
        if let Some(plan) = orders.plan {
            self.take_plan(&plan);
        }
        for trigger in &orders.triggers {
            self.take_trigger(trigger);
        }
    }

    fn take_plan(&mut self, plan: &Planned) {
        if plan.version <= self.plan_version {
            return;
        }
        self.plan_version = plan.version;
        let (version, from) = (plan.version, plan.from);
        self.recording.ordered(format!("plan {version} from step {from}: {}", plan.changes));
        for step in self.recording.schedule.add_plan(plan) {
            self.late(step, &format!("plan {version}"));
        }
    }

    fn take_trigger(&mut self, trigger: &Trigger) {
        let number = trigger.number;
        if number <= self.settled {
            return;
        }
        if !self.open.iter().any(|open| open.number == number) {
            self.recording.ring.freeze();
            let (seen, since) = (trigger.seen.0, Instant::now());
            self.open.push(Open { number, seen, since });
            let who = trigger.rank.map_or("a person".into(), |rank| format!("rank {rank}"));
            self.recording.ordered(format!(
                "trigger {number} by {who} at step {seen}, for step {}: {}",
                trigger.record, trigger.reason
            ));
            if self.recording.schedule.ask(trigger.record.0) == Asked::Over {
                self.late(trigger.record.0, &format!("trigger {number}"));
            }
        }
        let Some(ring) = &trigger.ring else { return };
        for step in ring {
            self.write(step.0, number);
        }
        // Triggers are settled in the order in which they were accepted.
        self.settled = number;
        self.open.retain(|open| open.number > number);
        if self.open.is_empty() {
            self.recording.ring.thaw();
        }
    }

    /// A step that was over when this rank heard that it is asked for: the ring may hold it.
    fn late(&self, step: u64, order: &str) {
        let (current, _) = self.recording.schedule.progress();
        let current = current.unwrap_or(step);
        self.write_or_name(
            step,
            &format!("{order} was heard at step {current}, after step {step}"),
        );
    }

    /// A step that every rank is to write from its ring.
    fn write(&self, step: u64, number: u32) {
        if self.recording.schedule.ask(step) != Asked::Over {
            return;
        }
        let ring = self.recording.plan.settings.ring_steps;
        self.write_or_name(
            step,
            &format!("trigger {number} asked for it and the ring of {ring} steps did not hold it"),
        );
    }

    fn write_or_name(&self, step: u64, reason: &str) {
        match self.recording.ring.claim(step) {
            Holds::Whole => self.recording.queue.push_order(Command::Ring(step)),
            // When its tape is closed it is queued.
            Holds::Open => {}
            Holds::Not => {
                let mut omissions = Omissions::default();
                omissions.add(EVERYTHING, None, reason);
                self.recording.omitted(step, EVERYTHING, None, reason);
                let selection = self.recording.schedule.selection(step);
                let ending = Ending { head: None, omissions, selection, late: true };
                self.recording.queue.push_order(Command::Close(step, Box::new(ending)));
            }
        }
    }

    fn period(&self) -> Duration {
        self.recording.plan.settings.heartbeat.max(SHORTEST_PERIOD)
    }

    fn pause(&self) -> Duration {
        let period = self.period();
        match (self.closed_at(), self.open.is_empty()) {
            (Some(_), _) => LEAVING_PAUSE.min(period),
            (None, false) => OPEN_PAUSE.min(period),
            (None, true) => jittered(period.mul_f64(STRETCH)),
        }
    }

    /// True when this rank has nothing more to say and nothing more to hear.
    fn is_done(&self) -> bool {
        let Some(closed_at) = self.closed_at() else { return false };
        if closed_at.elapsed() >= LEAVING_PATIENCE {
            for open in &self.open {
                let number = open.number;
                self.recording
                    .fault(format!("trigger {number} was not settled before the end of the job"));
            }
            return true;
        }
        let told = self.recording.finding().is_none() && self.open.is_empty();
        // Without a ring there is nothing that a trigger of another rank could ask this one for.
        told && (self.all_leaving || !self.recording.ring.is_on())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the longest ring that was frozen for a while is no message that the coordinator
    /// refuses, which would end the heartbeats.
    #[test]
    fn of_a_frozen_ring_is_told_what_led_to_the_step_that_went_wrong() {
        let most = MAX_RING_STEPS as u64;
        let grown: Vec<u64> = (0..2 * most).collect();
        for (seen, first) in [(most + 9, 10), (0, 0), (5 * most, most)] {
            let told = nameable(grown.clone(), seen);
            assert!(told.iter().copied().eq(first..first + most), "{seen}: {:?}", told.first());
        }
        assert_eq!(nameable(vec![3, 4], 4), [3, 4]);
    }
}
