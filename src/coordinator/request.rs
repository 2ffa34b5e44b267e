//! The requests that the gRPC service sends to the actor, in domain types.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::sync::oneshot;

use super::event::Closing;
use super::metrics::Totals;
use super::pulse::Beat;
use super::refusal::Refusal;
use super::status::{Overview, StepStatus, Unsettled};
use crate::hash::TrustHash;
use crate::identity::{Attempt, LaunchName, Name, Rank, Step};
use crate::manifest::FileRecord;
use crate::placement::Mesh;
use crate::selection::{Changes, Planned, Trigger};
use crate::store::AttemptDir;

/// The process of a launch that sends a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// The run.
    pub run: Name,
    /// The launch.
    pub attempt: Attempt,
    /// The rank.
    pub rank: Rank,
    /// The process.
    pub incarnation: u64,
}

/// A rank that wants to enter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) struct Join {
    pub run: Name,
    pub rank: Rank,
    pub world_size: u32,
    pub incarnation: u64,
    pub host: Name,
    pub attempt: Option<Attempt>,
    pub format_version: u32,
    pub mesh: Mesh,
    pub versions: BTreeMap<String, String>,
    /// What the launcher calls its launch.
    pub launch: Option<LaunchName>,
    /// The number of the newest arrival that it was told; absent in ranks of earlier versions.
    pub heard: Option<u64>,
}

/// The answer to a rank that asks to enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    /// The number of the newest arrival.
    pub arrivals: u64,
    /// The attempt that it entered, or why it must wait.
    pub entry: Result<Entry, String>,
}

/// The answer to a rank that entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its attempt.
    pub attempt: Attempt,
    /// The attempt's directory, as the coordinator sees it.
    pub directory: PathBuf,
    /// Hash of the `run.json` there.
    pub run_record: TrustHash,
    /// True if it opened the attempt and not all ranks have entered: it must repeat its request, to
    /// show that it is alive.
    pub vouch: bool,
}

/// A file as a rank describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileClaim {
    /// Name below the step's directory.
    pub name: Name,
    /// Bytes, header included.
    pub length: u64,
    /// blake3 of its header.
    pub header_hash: TrustHash,
}

/// What the service may do with a claimed file.
pub(crate) enum Admission {
    /// It was reported before, with this many shards.
    Known(u64),
    /// It may be checked in place, or received, in this attempt of this world size.
    Wanted(AttemptDir, u32),
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orders {
    /// A plan that the rank does not know yet.
    pub plan: Option<Planned>,
    /// Triggers that the rank has not settled.
    pub triggers: Vec<Trigger>,
    /// Why its report triggered nothing.
    pub report_refused: Option<String>,
    /// True when every rank that is not absent is leaving.
    pub all_leaving: bool,
}

/// A person's plan for a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlanAsk {
    /// What it replaces.
    pub changes: Changes,
    /// If set, this many steps are recorded, from the first that every rank can still be told of.
    pub next: Option<u64>,
}

/// A request to trigger a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TriggerAsk {
    /// The rank that asks; `None` if a person does.
    pub rank: Option<Rank>,
    /// The reason, in words.
    pub reason: String,
    /// The step that caused it; `None`: the newest step that a rank has begun.
    pub seen: Option<Step>,
    /// The step to record; `None`: the next that every rank can still be told of.
    pub record: Option<Step>,
}

/// A question about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepAsk {
    /// The step.
    pub step: Step,
    /// True: without the lists of ranks.
    pub brief: bool,
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

pub(crate) enum Request {
    Join(Join, Reply<Answered>),
    /// Asks whether these files may be checked or received: one answer for each.
    Admit(Member, Step, Vec<FileClaim>, Reply<Vec<Result<Admission, Refusal>>>),
    /// Reports files that are durable; the answer has the number of shards of each.
    Report(Member, Step, Vec<FileRecord>, Reply<Vec<Result<u64, Refusal>>>),
    Close(Member, Step, Closing, Reply<bool>),
    Status(Name, Attempt, StepAsk, Reply<StepStatus>),
    Overview(Name, Reply<Overview>),
    Heartbeat(Member, Beat, Reply<Orders>),
    Plan(Name, PlanAsk, Reply<Planned>),
    Trigger(Name, TriggerAsk, Reply<Trigger>),
    Unsettled(Reply<Vec<Unsettled>>),
    Totals(Reply<Totals>),
    /// The directory of a member's attempt, and its world size.
    Place(Member, Reply<(AttemptDir, u32)>),
    Tick,
}
