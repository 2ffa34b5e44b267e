//! What the adapters ask of the actor, in domain types.

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

/// Which process of which launch a request speaks for.
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
    /// The newest arrival that it was told of; absent from ranks that know of none.
    pub heard: Option<u64>,
}

/// What a rank that asked to enter is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    /// The newest arrival of a process.
    pub arrivals: u64,
    /// Inside, or why not yet.
    pub entry: Result<Entry, String>,
}

/// What a rank that entered is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its attempt.
    pub attempt: Attempt,
    /// Where the attempt lies, as the coordinator sees it.
    pub directory: PathBuf,
    /// Hash of the `run.json` there.
    pub run_record: TrustHash,
    /// It opened the attempt, and ranks have yet to enter: it goes on saying that it lives.
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

/// What an adapter may do about a claimed file.
pub(crate) enum Admission {
    /// It was reported before, with this many shards.
    Known(u64),
    /// It may be looked at, or received, in this attempt of this world size.
    Wanted(AttemptDir, u32),
}

/// What a heartbeat is answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orders {
    /// A plan that the rank did not know.
    pub plan: Option<Planned>,
    /// Triggers that are not settled for it.
    pub triggers: Vec<Trigger>,
    /// Why its report triggered nothing.
    pub report_refused: Option<String>,
    /// Every rank that is there is being closed.
    pub all_leaving: bool,
}

/// A person's plan for a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlanAsk {
    /// What it replaces.
    pub changes: Changes,
    /// This many steps from the first that every rank can hear of.
    pub next: Option<u64>,
}

/// A wish to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TriggerAsk {
    /// Who saw something; `None`: a person.
    pub rank: Option<Rank>,
    /// What, in words.
    pub reason: String,
    /// Where it was seen; `None`: wherever the job is.
    pub seen: Option<Step>,
    /// Which step to record; `None`: the next that every rank can hear of.
    pub record: Option<Step>,
}

/// A question about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepAsk {
    /// Which.
    pub step: Step,
    /// Without the lists of ranks.
    pub brief: bool,
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

pub(crate) enum Request {
    Join(Join, Reply<Answered>),
    /// May these files be looked at? One answer for each.
    Admit(Member, Step, Vec<FileClaim>, Reply<Vec<Result<Admission, Refusal>>>),
    /// These files are durable; the shards of each.
    Report(Member, Step, Vec<FileRecord>, Reply<Vec<Result<u64, Refusal>>>),
    Close(Member, Step, Closing, Reply<bool>),
    Status(Name, Attempt, StepAsk, Reply<StepStatus>),
    Overview(Name, Reply<Overview>),
    Heartbeat(Member, Beat, Reply<Orders>),
    Plan(Name, PlanAsk, Reply<Planned>),
    Trigger(Name, TriggerAsk, Reply<Trigger>),
    Unsettled(Reply<Vec<Unsettled>>),
    Totals(Reply<Totals>),
    /// Where a member's attempt lies, and of how many ranks it is.
    Place(Member, Reply<(AttemptDir, u32)>),
    Tick,
}
