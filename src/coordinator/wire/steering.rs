//! Converts heartbeats, plans and triggers to and from wire types.

use std::str::FromStr;

use backtape_proto as proto;

use super::{malformed, member, name};
use crate::coordinator::limits::{MAX_REASON_BYTES, MAX_RING_STEPS, MAX_STEP};
use crate::coordinator::pulse::{Beat, Report, RingReport};
use crate::coordinator::refusal::Refusal;
use crate::coordinator::request::{Member, Orders, PlanAsk, TriggerAsk};
use crate::identity::{Name, Step};
use crate::selection::{Changes, Planned, Trigger};

fn step(number: u64) -> Result<Step, Refusal> {
    if number > MAX_STEP {
        return Err(malformed(format!("{number} is no step: at most 2^53 are counted")));
    }
    Ok(Step(number))
}

fn reason(text: String) -> Result<String, Refusal> {
    if text.len() > MAX_REASON_BYTES {
        return Err(malformed(format!("a reason holds more than {MAX_REASON_BYTES} bytes")));
    }
    Ok(text)
}

pub(in crate::coordinator) fn heartbeat(
    wire: proto::HeartbeatRequest,
) -> Result<(Member, Beat), Refusal> {
    let report = wire.report.map(|report| {
        Ok::<_, Refusal>(Report { step: step(report.step)?, reason: reason(report.reason)? })
    });
    let ring = wire.ring.map(|ring| {
        if ring.steps.len() > MAX_RING_STEPS {
            return Err(malformed(format!("a ring holds at most {MAX_RING_STEPS} steps")));
        }
        let steps = ring.steps.into_iter().map(step).collect::<Result<_, _>>()?;
        Ok(RingReport { trigger: ring.trigger, steps })
    });
    let beat = Beat {
        step: wire.step.map(step).transpose()?,
        steps_per_second: wire.steps_per_second,
        period_ms: u64::from(wire.period_ms),
        plan_version: wire.plan_version,
        triggers_settled: wire.triggers_settled,
        report: report.transpose()?,
        ring: ring.transpose()?,
        leaving: wire.leaving,
    };
    Ok((member(wire.member)?, beat))
}

pub(in crate::coordinator) fn orders(orders: Orders) -> Result<proto::HeartbeatResponse, Refusal> {
    Ok(proto::HeartbeatResponse {
        plan: orders.plan.map(planned).transpose()?,
        triggers: orders.triggers.into_iter().map(order).collect(),
        report_refused: orders.report_refused.unwrap_or_default(),
        all_leaving: orders.all_leaving,
    })
}

pub(in crate::coordinator) fn planned(plan: Planned) -> Result<proto::Plan, Refusal> {
    let changes = serde_json::to_vec(&plan.changes).map_err(malformed)?.into();
    Ok(proto::Plan { version: plan.version, from: plan.from.0, changes })
}

pub(in crate::coordinator) fn order(trigger: Trigger) -> proto::TriggerOrder {
    let ring = trigger.ring.as_deref().unwrap_or_default().iter().map(|step| step.0).collect();
    proto::TriggerOrder {
        number: trigger.number,
        reason: trigger.reason,
        rank: trigger.rank.map(|rank| rank.0),
        seen: trigger.seen.0,
        record: trigger.record.0,
        ring_chosen: trigger.ring.is_some(),
        ring,
    }
}

pub(in crate::coordinator) fn plan(
    wire: proto::SetPlanRequest,
) -> Result<(Name, PlanAsk), Refusal> {
    let (next, steps) = match wire.steps.as_deref().map(|text| (text, next_steps(text))) {
        Some((_, Some(count))) => (Some(count), None),
        Some((text, None)) => (None, Some(text.to_string())),
        None => (None, None),
    };
    let changes = Changes {
        steps: part(steps)?,
        tensors: part(wire.tensors)?,
        ranks: part(wire.ranks)?,
        microbatches: part(wire.microbatches)?,
        max_tensor_bytes: part(wire.max_tensor_bytes)?,
        max_step_bytes: part(wire.max_step_bytes)?,
    };
    Ok((name(wire.run)?, PlanAsk { changes, next }))
}

/// Reads `next` or `next:10`: so many steps from the first that every rank can still be told of.
fn next_steps(text: &str) -> Option<u64> {
    let rest = text.trim().strip_prefix("next")?;
    match rest.strip_prefix(':') {
        None => rest.is_empty().then_some(1),
        Some(count) => count.trim().parse().ok().filter(|&count| (1..=MAX_STEP).contains(&count)),
    }
}

fn part<T: FromStr>(text: Option<String>) -> Result<Option<T>, Refusal>
where
    T::Err: ToString,
{
    text.map(|text| text.parse().map_err(|error: T::Err| malformed(error))).transpose()
}

pub(in crate::coordinator) fn trigger(
    wire: proto::TriggerRequest,
) -> Result<(Name, TriggerAsk), Refusal> {
    let ask = TriggerAsk {
        rank: None,
        reason: reason(wire.reason)?,
        seen: None,
        record: wire.step.map(step).transpose()?,
    };
    Ok((name(wire.run)?, ask))
}
