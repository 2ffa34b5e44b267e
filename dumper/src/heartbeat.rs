//! The heartbeat of a rank: tells the coordinator where it is, and turns what
//! that asks for into commands for the recorder's thread.
//!
//! On a thread and a connection of its own, as the recorder's thread blocks on
//! its disk: an order that is heard after its step is an order missed.

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
use crate::recorder::Shared;
use crate::rendezvous::Rendezvous;
use crate::ring::Holds;
use crate::schedule::Asked;

/// Longest pause while a trigger is open, and while the recorder is being closed.
const OPEN_PAUSE: Duration = Duration::from_millis(100);
const LEAVING_PAUSE: Duration = Duration::from_millis(50);

/// More heartbeats than these bring the coordinator refuses.
const SHORTEST_PERIOD: Duration = Duration::from_millis(30);

/// [`jittered`] gives half to the whole of what it is given: this makes a
/// period's pauses lie around it, and never beyond what the coordinator reckons with.
const STRETCH: f64 = 1.25;

/// How long a frozen ring waits for its own rank to finish the step that a
/// trigger is about, before it says what it holds.
const FREEZE_PATIENCE: Duration = Duration::from_secs(120);

/// How long a rank that is being closed waits for what others may still have
/// seen in their last steps, and for open triggers: longer than the coordinator
/// waits for a rank that fell silent.
const LEAVING_PATIENCE: Duration = Duration::from_secs(15);

/// Different reasons why reports triggered nothing that are named.
const MAX_REFUSALS: usize = 16;

/// How long a heartbeat that was told to end is waited for.
pub(crate) const END_DEADLINE: Duration = Duration::from_secs(45);

/// A heartbeat that runs until the recorder is closed.
pub(crate) struct Heartbeat {
    thread: JoinHandle<()>,
}

/// What the heartbeat remembers between two beats.
struct Mind {
    shared: Arc<Shared>,
    plan_version: u32,
    settled: u32,
    open: Vec<Open>,
    /// Why reports triggered nothing, each reason once.
    refusals: Vec<String>,
    /// The coordinator says that every rank is being closed.
    all_leaving: bool,
}

/// A trigger whose ring is not settled.
struct Open {
    number: u32,
    seen: u64,
    since: Instant,
}

impl Heartbeat {
    pub(crate) fn start(shared: Arc<Shared>, client: Client) -> std::io::Result<Heartbeat> {
        let thread = std::thread::Builder::new().name("backtape-heartbeat".into());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = thread.spawn(move || {
            let body = AssertUnwindSafe(|| runtime.block_on(beat_on(&shared, &client)));
            if catch_unwind(body).is_err() {
                shared.fault("the heartbeat panicked, which is a bug in backtape");
            }
            shared.ring.thaw();
        })?;
        Ok(Heartbeat { thread })
    }

    /// Waits, bounded, until nothing more will be asked for.
    pub(crate) async fn finish(self, deadline: &Deadline) {
        let ended = tokio::task::spawn_blocking(move || self.thread.join());
        let _ = deadline.bound(ended).await;
    }
}

/// Of what a ring holds, ascending, as much as may be told: a frozen one grows beyond its length.
/// What led to the step that the trigger is about comes first.
fn told_of(mut steps: Vec<u64>, seen: u64) -> Vec<u64> {
    let end = steps.partition_point(|&step| step <= seen);
    steps.drain(..end.saturating_sub(MAX_RING_STEPS));
    steps.truncate(MAX_RING_STEPS);
    steps
}

async fn beat_on(shared: &Arc<Shared>, client: &Client) {
    let client = match client.reopened() {
        Ok(client) => client,
        Err(error) => return shared.fault(format!("no heartbeats are sent: {error}")),
    };
    let mut mind = Mind {
        shared: shared.clone(),
        plan_version: 0,
        settled: 0,
        open: Vec::new(),
        refusals: Vec::new(),
        all_leaving: false,
    };
    loop {
        // In this order: a rank that leaves has reported what its last step showed.
        let leaving = mind.closed_at().is_some();
        let report = shared.report();
        let answered = client.heartbeat(mind.beat(report.clone(), leaving)).await;
        match answered {
            Ok(orders) => mind.hear(report, orders),
            // Rank 0 ended its coordinator: it had heard that everyone leaves.
            Err(CallError::Unreachable(_)) if mind.orphaned() => return,
            Err(CallError::Unreachable(_)) => {}
            Err(error) => return shared.fault(format!("heartbeats ended: {error}")),
        }
        if mind.is_done() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(mind.pause()) => {}
            () = shared.wake.notified() => {}
        }
    }
}

impl Mind {
    fn beat(&self, report: Option<(u64, String)>, leaving: bool) -> Beat {
        let (step, steps_per_second) = self.shared.schedule.progress();
        let period = self.period().as_millis();
        Beat {
            step,
            steps_per_second,
            period_ms: u32::try_from(period).unwrap_or(u32::MAX),
            plan_version: self.plan_version,
            triggers_settled: self.settled,
            report,
            ring: self.held(),
            leaving,
        }
    }

    /// True when rank 0 carried the coordinator and has taken it away.
    fn orphaned(&self) -> bool {
        let plan = &self.shared.plan;
        let embedded = plan.settings.coordinator.is_none() && self.closed_at().is_some();
        embedded && Rendezvous::read(&plan.run_directory()).is_none()
    }

    fn closed_at(&self) -> Option<Instant> {
        self.shared.patience.closed_at()
    }

    /// What the ring holds for the oldest open trigger, once this rank has
    /// finished the step it is about, or will not.
    fn held(&self) -> Option<(u32, Vec<u64>)> {
        let open = self.open.first()?;
        let steps = self.shared.ring.held();
        let reached = steps.last().is_some_and(|&newest| newest >= open.seen);
        let over = self.closed_at().is_some() || open.since.elapsed() >= FREEZE_PATIENCE;
        let ready = reached || over || !self.shared.ring.is_on();
        ready.then(|| (open.number, told_of(steps, open.seen)))
    }

    fn hear(&mut self, report: Option<(u64, String)>, orders: Orders) {
        if let Some(report) = report {
            self.shared.reported(&report);
            let why = orders.report_refused;
            // A loss that comes and goes is refused for one reason, said once.
            if !why.is_empty()
                && self.refusals.len() < MAX_REFUSALS
                && !self.refusals.contains(&why)
            {
                let (step, what) = report;
                self.shared.ordered(format!("{what} at step {step} triggered nothing: {why}"));
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
        self.shared.ordered(format!("plan {version} from step {from}: {}", plan.changes));
        for step in self.shared.schedule.add_plan(plan) {
            self.late(step, &format!("plan {version}"));
        }
    }

    fn take_trigger(&mut self, trigger: &Trigger) {
        let number = trigger.number;
        if number <= self.settled {
            return;
        }
        if !self.open.iter().any(|open| open.number == number) {
            self.shared.ring.freeze();
            let (seen, since) = (trigger.seen.0, Instant::now());
            self.open.push(Open { number, seen, since });
            let who = trigger.rank.map_or("a person".into(), |rank| format!("rank {rank}"));
            self.shared.ordered(format!(
                "trigger {number} by {who} at step {seen}, for step {}: {}",
                trigger.record, trigger.reason
            ));
            if self.shared.schedule.ask(trigger.record.0) == Asked::Over {
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
            self.shared.ring.thaw();
        }
    }

    /// A step that was over when this rank heard of it: the ring may have it.
    fn late(&self, step: u64, order: &str) {
        let (current, _) = self.shared.schedule.progress();
        let current = current.unwrap_or(step);
        self.write_or_name(
            step,
            &format!("{order} was heard at step {current}, after step {step}"),
        );
    }

    /// A step of the rings that every rank writes.
    fn write(&self, step: u64, number: u32) {
        if self.shared.schedule.ask(step) != Asked::Over {
            return;
        }
        let ring = self.shared.plan.settings.ring_steps;
        self.write_or_name(
            step,
            &format!("trigger {number} asked for it and the ring of {ring} steps did not hold it"),
        );
    }

    fn write_or_name(&self, step: u64, reason: &str) {
        match self.shared.ring.claim(step) {
            Holds::Whole => self.shared.queue.push_order(Command::Ring(step)),
            // Its close queues it.
            Holds::Open => {}
            Holds::Not => {
                let mut omissions = Omissions::default();
                omissions.add(EVERYTHING, None, reason);
                self.shared.omitted(step, EVERYTHING, None, reason);
                let selection = self.shared.schedule.selection(step);
                let ending = Ending { head: None, omissions, selection, late: true };
                self.shared.queue.push_order(Command::Close(step, Box::new(ending)));
            }
        }
    }

    fn period(&self) -> Duration {
        self.shared.plan.settings.heartbeat.max(SHORTEST_PERIOD)
    }

    fn pause(&self) -> Duration {
        let period = self.period();
        match (self.closed_at(), self.open.is_empty()) {
            (Some(_), _) => LEAVING_PAUSE.min(period),
            (None, false) => OPEN_PAUSE.min(period),
            (None, true) => jittered(period.mul_f64(STRETCH)),
        }
    }

    /// True when nothing more is to be told or heard.
    fn is_done(&self) -> bool {
        let Some(closed_at) = self.closed_at() else { return false };
        if closed_at.elapsed() >= LEAVING_PATIENCE {
            for open in &self.open {
                let number = open.number;
                self.shared
                    .fault(format!("trigger {number} was not settled before the end of the job"));
            }
            return true;
        }
        let told = self.shared.report().is_none() && self.open.is_empty();
        // Without a ring there is nothing that another rank's last step could ask for.
        told && (self.all_leaving || !self.shared.ring.is_on())
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
            let told = told_of(grown.clone(), seen);
            assert!(told.iter().copied().eq(first..first + most), "{seen}: {:?}", told.first());
        }
        assert_eq!(told_of(vec![3, 4], 4), [3, 4]);
    }
}
