//! Heartbeats: a rank says where it is, and the coordinator answers what it is to record.

use backtape::coordinator::limits::REQUEST_DEADLINE;
use backtape::identity::{Rank, Step};
use backtape::selection::{Changes, Planned, Trigger};
use backtape_proto as proto;

use super::{CallError, Client, within};

/// What this rank says of itself in a heartbeat.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Beat {
    pub(crate) step: Option<u64>,
    pub(crate) steps_per_second: f64,
    pub(crate) period_ms: u32,
    pub(crate) plan_version: u32,
    pub(crate) triggers_settled: u32,
    pub(crate) report: Option<(u64, String)>,
    /// A trigger's number, and the steps that the ring holds for it.
    pub(crate) ring: Option<(u32, Vec<u64>)>,
    pub(crate) leaving: bool,
}

/// What the coordinator answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Orders {
    pub(crate) plan: Option<Planned>,
    pub(crate) triggers: Vec<Trigger>,
    /// Why the rank's report triggered nothing; empty where it did trigger.
    pub(crate) report_refused: String,
    pub(crate) all_leaving: bool,
}

impl Client {
    /// Sends one heartbeat, once: the next one follows soon.
    pub(crate) async fn heartbeat(&self, beat: Beat) -> Result<Orders, CallError> {
        let report = beat.report.map(|(step, reason)| proto::TriggerReport { step, reason });
        let ring = beat.ring.map(|(trigger, steps)| proto::RingReport { trigger, steps });
        let request = proto::HeartbeatRequest {
            member: Some(self.member.clone()),
            step: beat.step,
            steps_per_second: beat.steps_per_second,
            period_ms: beat.period_ms,
            plan_version: beat.plan_version,
            triggers_settled: beat.triggers_settled,
            report,
            ring,
            leaving: beat.leaving,
        };
        let mut rpc = self.rpc.clone();
        let answer = within(REQUEST_DEADLINE, rpc.heartbeat(request)).await?;
        Ok(Orders {
            plan: answer.plan.map(planned).transpose()?,
            triggers: answer.triggers.into_iter().map(trigger).collect(),
            report_refused: answer.report_refused,
            all_leaving: answer.all_leaving,
        })
    }
}

fn planned(wire: proto::Plan) -> Result<Planned, CallError> {
    let changes: Changes = serde_json::from_slice(&wire.changes).map_err(|error| {
        CallError::Refused(format!(
            "plan {} of the coordinator is unreadable: {error}",
            wire.version
        ))
    })?;
    Ok(Planned { version: wire.version, from: Step(wire.from), changes })
}

fn trigger(wire: proto::TriggerOrder) -> Trigger {
    Trigger {
        number: wire.number,
        reason: wire.reason,
        rank: wire.rank.map(Rank),
        seen: Step(wire.seen),
        record: Step(wire.record),
        ring: wire.ring_chosen.then(|| wire.ring.into_iter().map(Step).collect()),
    }
}
