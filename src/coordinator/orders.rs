//! What an attempt's ranks were told to record while they ran: plans and triggers, in the order of
//! the journal. Pure, like the rest of the state.

use super::limits::{MAX_PLANS, MAX_REASON_BYTES, MAX_RING_STEPS};
use super::refusal::Refusal;
use super::state::Outcome;
use crate::identity::Step;
use crate::manifest::TriggerRecord;
use crate::selection::{Planned, Trigger};

/// Plans and triggers of one attempt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Orders {
    plans: Vec<Planned>,
    triggers: Vec<Trigger>,
    /// When the newest trigger was accepted, in the coordinator's milliseconds.
    triggered_ms: u64,
}

impl Orders {
    /// The newest plan.
    pub(crate) fn plan(&self) -> Option<&Planned> {
        self.plans.last()
    }

    /// Every trigger, in the order in which they were accepted.
    pub(crate) fn triggers(&self) -> &[Trigger] {
        &self.triggers
    }

    /// When the newest trigger was accepted, if any was.
    pub(crate) fn triggered_ms(&self) -> Option<u64> {
        (!self.triggers.is_empty()).then_some(self.triggered_ms)
    }

    /// Number of the next plan.
    pub(crate) fn next_version(&self) -> u32 {
        number_after(self.plans.len())
    }

    /// Number of the next trigger.
    pub(crate) fn next_number(&self) -> u32 {
        number_after(self.triggers.len())
    }

    /// The trigger that had a step recorded, if there is one.
    pub(crate) fn trigger_of(&self, step: Step) -> Option<TriggerRecord> {
        let ring = |trigger: &Trigger| trigger.ring.as_ref().is_some_and(|r| r.contains(&step));
        let trigger = self.triggers.iter().find(|t| t.record == step || ring(t))?;
        Some(TriggerRecord {
            number: trigger.number,
            reason: trigger.reason.clone(),
            rank: trigger.rank,
            seen: trigger.seen,
            ring: ring(trigger),
        })
    }

    pub(super) fn check_plan(&self, plan: &Planned) -> Result<Outcome, Refusal> {
        if self.plan() == Some(plan) {
            return Ok(Outcome::Known);
        }
        if self.plans.len() >= MAX_PLANS {
            let why = format!("the attempt has had {MAX_PLANS} plans, the most: restart the job");
            return Err(Refusal::NotPlanned(why));
        }
        let grows = self.plan().is_none_or(|last| last.from <= plan.from);
        if plan.version != self.next_version() || !grows {
            return Err(Refusal::NotPlanned("it does not follow the plan before it".into()));
        }
        Ok(Outcome::New)
    }

    pub(super) fn add_plan(&mut self, plan: Planned) {
        self.plans.push(plan);
    }

    pub(super) fn check_trigger(&self, trigger: &Trigger) -> Result<Outcome, Refusal> {
        if self.triggers.last() == Some(trigger) {
            return Ok(Outcome::Known);
        }
        if trigger.number != self.next_number() || trigger.ring.is_some() {
            return Err(Refusal::NotTriggered("it does not follow the trigger before it".into()));
        }
        if trigger.reason.len() > MAX_REASON_BYTES {
            let why = format!("its reason is longer than {MAX_REASON_BYTES} bytes");
            return Err(Refusal::NotTriggered(why));
        }
        Ok(Outcome::New)
    }

    pub(super) fn add_trigger(&mut self, trigger: Trigger, at_ms: u64) {
        self.triggered_ms = at_ms;
        self.triggers.push(trigger);
    }

    pub(super) fn check_ring(&self, number: u32, steps: &[Step]) -> Result<Outcome, Refusal> {
        let wrong = |why: &str| Err(Refusal::Malformed(format!("a ring's choice: {why}")));
        if steps.len() > MAX_RING_STEPS || !steps.is_sorted_by(|a, b| a < b) {
            return wrong("its steps are too many or not in order");
        }
        match self.triggers.iter().find(|trigger| trigger.number == number) {
            None => wrong("there is no such trigger"),
            Some(Trigger { ring: Some(first), .. }) if first == steps => Ok(Outcome::Known),
            Some(Trigger { ring: Some(_), .. }) => wrong("it was made before, and differently"),
            Some(_) => Ok(Outcome::New),
        }
    }

    pub(super) fn choose_ring(&mut self, number: u32, steps: Vec<Step>) {
        let chosen = self.triggers.iter_mut().find(|trigger| trigger.number == number);
        if let Some(trigger) = chosen {
            trigger.ring = Some(steps);
        }
    }
}

fn number_after(count: usize) -> u32 {
    u32::try_from(count + 1).unwrap_or(u32::MAX)
}
