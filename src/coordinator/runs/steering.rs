//! Heartbeats, plans and triggers: how running ranks are told to record the same steps. It decides
//! from the durable orders and from the pulse, which is not durable.

use super::Runs;
use crate::coordinator::attempt_log::AttemptLog;
use crate::coordinator::event::Event;
use crate::coordinator::limits::{MAX_REASON_BYTES, MAX_STEP};
use crate::coordinator::pulse::Beat;
use crate::coordinator::refusal::Refusal;
use crate::coordinator::request::{Member, Orders, PlanAsk, TriggerAsk};
use crate::identity::{Attempt, Name, Step};
use crate::selection::{Planned, StepSelection, Trigger};

impl Runs {
    /// Records a rank's heartbeat and stages the events that follow from it. If the heartbeat has a
    /// report that triggered nothing, returns the reason.
    pub(crate) fn heartbeat(
        &mut self,
        member: &Member,
        beat: &Beat,
        now_ms: u64,
    ) -> Result<Option<String>, Refusal> {
        self.member(member)?.pulse.note(member.rank, beat, now_ms)?;
        let mut refused = None;
        if let Some(report) = &beat.report {
            let ask = TriggerAsk {
                rank: Some(member.rank),
                reason: report.reason.clone(),
                seen: Some(report.step),
                record: None,
            };
            refused = match self.trigger(&member.run, ask, now_ms) {
                Ok(_) => None,
                Err(Refusal::NotTriggered(why)) => Some(why),
                Err(refusal) => return Err(refusal),
            };
        }
        let log = self.member(member)?;
        if let Some(ring) = &beat.ring {
            let open = |t: &&Trigger| t.number == ring.trigger && t.ring.is_none();
            if log.state.orders().triggers().iter().any(|trigger| open(&trigger)) {
                log.pulse.hold(member.rank, ring.clone());
            }
        }
        if choose_rings(log, now_ms)? {
            self.touched.insert((member.run.clone(), member.attempt));
        }
        Ok(refused)
    }

    /// The answer to a heartbeat, once its events are durable.
    pub(crate) fn orders(
        &mut self,
        member: &Member,
        beat: &Beat,
        report_refused: Option<String>,
        now_ms: u64,
    ) -> Result<Orders, Refusal> {
        let log = self.log(&member.run, member.attempt)?;
        let world_size = log.state.opened().world_size;
        let orders = log.state.orders();
        let plan = orders.plan().filter(|plan| plan.version > beat.plan_version);
        let open = |trigger: &&Trigger| trigger.number > beat.triggers_settled;
        Ok(Orders {
            plan: plan.cloned(),
            triggers: orders.triggers().iter().filter(open).cloned().collect(),
            report_refused,
            all_leaving: log.pulse.all_leaving(world_size, now_ms),
        })
    }

    /// Sets a person's plan for the newest attempt of a run.
    pub(crate) fn plan(
        &mut self,
        run: &Name,
        ask: PlanAsk,
        now_ms: u64,
    ) -> Result<(Attempt, Planned), Refusal> {
        let log = self.newest(run)?;
        let orders = log.state.orders();
        // If no rank has begun a step, the plan can apply from the first.
        let reach = log.pulse.reach(now_ms).unwrap_or_default();
        let from = orders.plan().map_or(reach, |last| reach.max(last.from));
        let mut changes = ask.changes;
        if let Some(count) = ask.next {
            let last = from.0.saturating_add(count.saturating_sub(1));
            changes.steps = Some(StepSelection::range(from.0, last));
        }
        if changes.is_empty() {
            let why = "it changes nothing: give --steps, --tensors, --ranks or another part";
            return Err(Refusal::NotPlanned(why.into()));
        }
        let plan = Planned { version: orders.next_version(), from, changes };
        log.submit(Event::Planned(plan.clone()), now_ms)?;
        let attempt = log.attempt();
        tracing::info!("run {run} attempt {attempt}: plan {} holds from step {from}", plan.version);
        self.touched.insert((run.clone(), attempt));
        Ok((attempt, plan))
    }

    /// Triggers a recording on every rank of the newest attempt of a run.
    pub(crate) fn trigger(
        &mut self,
        run: &Name,
        ask: TriggerAsk,
        now_ms: u64,
    ) -> Result<(Attempt, Trigger), Refusal> {
        self.check_rules(run, &ask, now_ms)?;
        let log = self.newest(run)?;
        let reach = log.pulse.reach(now_ms);
        let mut earliest =
            reach.ok_or_else(|| refuse("no rank has begun a step yet: try again"))?;
        if let Some(last) = log.state.orders().triggers().last() {
            let ahead = log.pulse.newest() < Some(last.record);
            if ahead && ask.rank.is_some() {
                let (number, step) = (last.number, last.record);
                return Err(refuse(format!("trigger {number} has step {step} recorded already")));
            }
            // A step is recorded for one trigger only.
            earliest = earliest.max(Step(last.record.0.saturating_add(1)));
        }
        let record = ask.record.unwrap_or(earliest);
        if record < earliest || record.0 > MAX_STEP {
            return Err(refuse(format!(
                "step {record} may be over before every rank has heard of it: the earliest is {earliest}"
            )));
        }
        let trigger = Trigger {
            number: log.state.orders().next_number(),
            reason: clipped(ask.reason),
            rank: ask.rank,
            seen: ask.seen.or(log.pulse.newest()).unwrap_or_default(),
            record,
            ring: None,
        };
        log.submit(Event::Triggered(trigger.clone()), now_ms)?;
        let attempt = log.attempt();
        let who = trigger.rank.map_or("a person".into(), |rank| format!("rank {rank}"));
        tracing::info!(
            "run {run} attempt {attempt}: trigger {} by {who} at step {}: {}; every rank records step {record}",
            trigger.number,
            trigger.seen,
            trigger.reason
        );
        self.touched.insert((run.clone(), attempt));
        Ok((attempt, trigger))
    }

    /// Checks a request against the limits on triggered recordings of a run.
    fn check_rules(&self, run: &Name, ask: &TriggerAsk, now_ms: u64) -> Result<(), Refusal> {
        let attempts = self.runs.get(run).into_iter().flat_map(|run| run.attempts.values());
        let orders = || attempts.clone().map(|log| log.state.orders());
        let count: usize = orders().map(|orders| orders.triggers().len()).sum();
        if count >= self.rules.max_triggers as usize {
            return Err(refuse(format!(
                "run {run} had {count} triggered recordings, the most: raise max_triggers"
            )));
        }
        let last = orders().filter_map(|orders| orders.triggered_ms()).max();
        let cooldown = self.rules.trigger_cooldown;
        let since = last.map(|last| u128::from(now_ms.saturating_sub(last)));
        if ask.rank.is_some() && since.is_some_and(|since| since < cooldown.as_millis()) {
            return Err(refuse(format!(
                "another recording was triggered less than {} s ago",
                cooldown.as_secs_f64()
            )));
        }
        Ok(())
    }

    /// The newest attempt of a run that ranks have joined.
    fn newest(&mut self, run: &Name) -> Result<&mut AttemptLog, Refusal> {
        let unknown = || Refusal::UnknownRun { run: run.clone() };
        let attempt = self.runs.get(run).and_then(super::Run::newest).ok_or_else(unknown)?;
        self.log(run, attempt)
    }
}

/// Chooses the steps to write from the ring buffers, if all ranks that are waited for have reported
/// theirs.
fn choose_rings(log: &mut AttemptLog, now_ms: u64) -> Result<bool, Refusal> {
    let open = |trigger: &&Trigger| trigger.ring.is_none();
    let triggers: Vec<Trigger> =
        log.state.orders().triggers().iter().filter(open).cloned().collect();
    let mut chosen = false;
    for trigger in triggers {
        let world_size = log.state.opened().world_size;
        let Some(steps) = log.pulse.ring_choice(&trigger, world_size, now_ms) else {
            continue;
        };
        let number = trigger.number;
        tracing::info!("trigger {number}: every rank writes {} steps of its ring", steps.len());
        log.submit(Event::RingChosen { number, steps }, now_ms)?;
        log.pulse.forget(number);
        chosen = true;
    }
    Ok(chosen)
}

fn refuse(why: impl Into<String>) -> Refusal {
    Refusal::NotTriggered(why.into())
}

/// A reason as the journal keeps it: one line, bounded.
fn clipped(reason: String) -> String {
    let line: String = reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let end = (0..=line.len().min(MAX_REASON_BYTES)).rev().find(|&at| line.is_char_boundary(at));
    line[..end.unwrap_or(0)].trim().to_string()
}
