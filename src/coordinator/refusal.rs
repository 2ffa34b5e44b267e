//! Why the coordinator refuses: one sentence each, with what to do.

use std::path::PathBuf;

use crate::FORMAT_VERSION;
use crate::hash::TrustHash;
use crate::identity::{Attempt, LaunchName, Name, Rank, Step};

/// An event that was not accepted. Nothing was recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Each sentence says what its fields are.
pub enum Refusal {
    #[error(
        "rank {rank} joined a run of world size {expected} with world size {claimed}: start the coordinator with --world-size {claimed} or fix the job's"
    )]
    WorldSize { rank: Rank, claimed: u32, expected: u32 },
    #[error(
        "rank {rank} joined a run of world size {world_size}: start the coordinator with --world-size or fix the job's"
    )]
    RankOutside { rank: Rank, world_size: u32 },
    #[error(
        "rank {rank} writes format version {found} and this coordinator reads {FORMAT_VERSION}: install the same backtape on both"
    )]
    FormatVersion { rank: Rank, found: u32 },
    #[error("rank {rank} says the mesh is {found}, the run has {first}: give every rank the same")]
    Mesh { rank: Rank, found: String, first: String },
    #[error("this coordinator serves run {serves} only, not {run}: one run shares a directory")]
    OtherRun { run: Name, serves: Name },
    #[error(
        "the token of run {run} was not shown: give the rank the credentials that were made for this run (BACKTAPE_CREDENTIALS)"
    )]
    Token { run: Name },
    #[error(
        "no token of this coordinator's runs was shown: give the rank the credentials that were made for its run (BACKTAPE_CREDENTIALS)"
    )]
    NoToken,
    #[error("run {run} is not known here: check its name, or start its ranks first")]
    UnknownRun { run: Name },
    #[error(
        "attempt {attempt} of run {run} was superseded by attempt {latest}: restart rank {rank}"
    )]
    OldAttempt { run: Name, rank: Rank, attempt: Attempt, latest: Attempt },
    #[error(
        "rank {rank} is of launch {own}, which came before launch {latest} of run {run}: end this process, it was left over"
    )]
    OldLaunch { run: Name, rank: Rank, own: LaunchName, latest: LaunchName },
    #[error(
        "another process came after this one as rank {rank} of run {run}: end this one, it was left over"
    )]
    LeftOver { run: Name, rank: Rank },
    #[error(
        "rank {rank} is of launch {own}, attempt {attempt} of run {run} is launch {others}: give all ranks of a launch the same BACKTAPE_LAUNCH"
    )]
    OtherLaunch { run: Name, rank: Rank, attempt: Attempt, own: String, others: String },
    #[error(
        "rank {rank} joined attempt {attempt} of run {run} from another process before: count the restart in the attempt, or leave it out"
    )]
    AttemptTaken { run: Name, rank: Rank, attempt: Attempt },
    #[error("rank {rank} is not a member of attempt {attempt} of run {run}: join first")]
    NotJoined { run: Name, rank: Rank, attempt: Attempt },
    #[error("{file} is not a file that rank {rank} may report: {detail}")]
    ForeignFile { file: Name, rank: Rank, detail: String },
    #[error("{file} of step {step} contradicts itself: {detail}")]
    Record { file: Name, step: Step, detail: String },
    #[error(
        "{file} of step {step} was reported with header {first}, now with {second}: the first is kept"
    )]
    FileConflict { file: Name, step: Step, first: TrustHash, second: TrustHash },
    #[error("{file} of step {step} holds {shard} of rank {rank} twice with different bytes")]
    ShardConflict { file: Name, step: Step, rank: Rank, shard: String },
    #[error("rank {rank} closed step {step} with {files} files and reports another one, {file}")]
    StepClosed { rank: Rank, step: Step, files: u32, file: Name },
    #[error("rank {rank} closes step {step} with {counted} files after it reported {reported}")]
    CountShort { rank: Rank, step: Step, counted: u32, reported: u32 },
    #[error("rank {rank} closed step {step} before, and differently: the first close is kept")]
    CloseConflict { rank: Rank, step: Step },
    #[error("{path} is not in the store as the coordinator sees it: send the file instead", path = path.display())]
    FileAbsent { path: PathBuf },
    #[error("{path} cannot be accepted: {detail}", path = path.display())]
    BadFile { path: PathBuf, detail: String },
    #[error("the request cannot be read: {0}")]
    Malformed(String),
    #[error("{0} uploads are running, as many as this coordinator allows: try again")]
    Busy(usize),
    #[error("rank {0} sends more heartbeats than {1} a second")]
    TooOften(Rank, u32),
    #[error("rank {0} sends more than {1} requests in a second: try again")]
    TooMany(Rank, u32),
    #[error("{1} uploads of rank {0} are open, as many as one rank may have: try again")]
    UploadsOfRank(Rank, usize),
    #[error("the same file is being sent again: this try of it ends")]
    SentAgain,
    #[error("{0}")]
    Quota(String),
    #[error("nothing is triggered: {0}")]
    NotTriggered(String),
    #[error("the plan is not taken: {0}")]
    NotPlanned(String),
    #[error("the store failed: {0}")]
    Storage(String),
    #[error("attempt {attempt} of run {run} takes nothing more: {reason}")]
    Poisoned { run: Name, attempt: Attempt, reason: String },
    #[error("the coordinator is stopping: try again when it is back")]
    Stopping,
    #[error("no answer within {0} s: the coordinator's store may hang")]
    Deadline(u64),
}
