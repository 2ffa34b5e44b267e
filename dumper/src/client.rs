//! The gRPC adapter of a rank: domain types in, one call, domain types out.
//! Every call has a deadline; one that may succeed later is repeated after growing pauses.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::Duration;

use backtape::coordinator::channel::{CONNECT_DEADLINE, Rpc, connect};
use backtape::coordinator::limits::REQUEST_DEADLINE;
use backtape::coordinator::sending;
use backtape::credentials::Access;
use backtape::faults;
use backtape::hash::TrustHash;
use backtape::manifest::FileRecord;
use backtape::store::Moved;
use backtape_proto as proto;
use bytes::Bytes;
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::patience::{Deadline, LEAST};
use crate::queue::Ending;
use crate::settings::Plan;

pub(crate) mod steering;

/// Pauses between tries: short enough for a coordinator that restarts, long
/// enough that 10,000 ranks do not keep it from restarting.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Why a call gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// Nobody answered in time; the same call may succeed later.
    #[error("{0}")]
    Unreachable(String),
    /// The coordinator's store is not the one this rank wrote to.
    #[error("{0}")]
    NotThere(String),
    /// Too soon or too late for this launch: another coordinator may take it.
    #[error("{0}")]
    NotNow(String),
    /// The answer is no, and will stay so.
    #[error("{0}")]
    Refused(String),
}

/// The coordinator's answer to a rank that asks to enter the run.
pub(crate) enum Answered {
    /// The rank has entered.
    Inside(Entered),
    /// The rank's launch is not known yet, for this reason: it is to ask again.
    Waits(String),
}

/// What a rank learns when it enters.
#[derive(Clone, Debug)]
pub(crate) struct Entered {
    pub(crate) attempt: u32,
    pub(crate) directory: PathBuf,
    pub(crate) run_record: Option<TrustHash>,
    /// This rank has opened the attempt, and other ranks of its launch have yet to enter: it is to
    /// show that it lives (`vouch`).
    pub(crate) vouch: bool,
}

/// One connection to a coordinator; reconnects by itself.
#[derive(Clone)]
pub(crate) struct Client {
    address: String,
    access: Access,
    rpc: Rpc,
    member: proto::Member,
    /// The number of the newest arrival that the coordinator has named, which the next question
    /// repeats.
    heard: u64,
}

impl Client {
    pub(crate) fn new(
        address: &str,
        access: Access,
        plan: &Plan,
        incarnation: u64,
    ) -> Result<Client, CallError> {
        Ok(Client {
            address: address.into(),
            rpc: connection(address, &access)?,
            access,
            member: proto::Member {
                run: plan.run.to_string(),
                attempt: 0,
                rank: plan.settings.rank,
                incarnation,
            },
            heard: 0,
        })
    }

    /// The same member on a connection of its own: one is driven by the runtime
    /// that it was opened on, and must not wait for what that one blocks on.
    pub(crate) fn reopened(&self) -> Result<Client, CallError> {
        Ok(Client { rpc: connection(&self.address, &self.access)?, ..self.clone() })
    }

    /// Asks once to enter the run.
    pub(crate) async fn join(&mut self, plan: &Plan) -> Result<Answered, CallError> {
        let settings = &plan.settings;
        let mesh = match settings.mesh.0.is_empty() {
            true => String::new(),
            false => serde_json::to_string(&settings.mesh).unwrap_or_default(),
        };
        let request = proto::JoinRequest {
            run: plan.run.to_string(),
            rank: settings.rank,
            world_size: settings.world_size,
            incarnation: self.member.incarnation,
            host: plan.host.to_string(),
            attempt: settings.attempt,
            format_version: backtape::FORMAT_VERSION,
            mesh,
            transport: proto::Transport::Unspecified.into(),
            versions: settings.versions.clone().into_iter().collect(),
            launch: plan.launch.as_ref().map(ToString::to_string).unwrap_or_default(),
            heard: Some(self.heard),
        };
        faults::pass("client.before-join");
        let answer = within(REQUEST_DEADLINE, self.rpc.join(request)).await?;
        faults::pass("client.after-join");
        self.heard = answer.arrivals;
        if !answer.waits.is_empty() {
            return Ok(Answered::Waits(answer.waits));
        }
        self.member.attempt = answer.attempt;
        let hash = <[u8; 32]>::try_from(answer.run_record.as_ref());
        Ok(Answered::Inside(Entered {
            attempt: answer.attempt,
            directory: PathBuf::from(answer.directory),
            run_record: hash.ok().map(TrustHash),
            vouch: answer.vouch,
        }))
    }

    fn report(&self, step: u64, file: &FileRecord) -> proto::ReportFileRequest {
        let member = Some(self.member.clone());
        proto::ReportFileRequest { member, step, file: Some(claim(file)) }
    }

    /// Reports files that lie in the store; the outcome of each, in order.
    pub(crate) async fn report_files(
        &self,
        step: u64,
        files: &[&FileRecord],
        deadline: &Deadline,
    ) -> Vec<Result<u64, CallError>> {
        let request = proto::ReportFilesRequest {
            member: Some(self.member.clone()),
            step,
            files: files.iter().map(|file| claim(file)).collect(),
        };
        let answer = retry(deadline, || async {
            let mut rpc = self.rpc.clone();
            let called = async {
                match rpc.report_files(request.clone()).await {
                    Err(status) if status.code() == Code::Unimplemented => {
                        Ok(tonic::Response::new(None))
                    }
                    answer => answer.map(|answer| answer.map(Some)),
                }
            };
            within(limit(deadline), called).await
        });
        match answer.await {
            Ok(Some(answer)) if answer.outcomes.len() == files.len() => {
                answer.outcomes.into_iter().map(outcome).collect()
            }
            Ok(Some(_)) => {
                let why = "the coordinator answered for another number of files";
                files.iter().map(|_| Err(CallError::Unreachable(why.into()))).collect()
            }
            // An older coordinator takes them one by one.
            Ok(None) => {
                let mut outcomes = Vec::new();
                for file in files {
                    outcomes.push(self.report_file(step, file, deadline).await);
                }
                outcomes
            }
            Err(error) => files.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Reports a file that lies in the store.
    pub(crate) async fn report_file(
        &self,
        step: u64,
        file: &FileRecord,
        deadline: &Deadline,
    ) -> Result<u64, CallError> {
        let answer = retry(deadline, || async {
            let request = self.report(step, file);
            faults::pass("client.before-report");
            let answer = within(limit(deadline), self.rpc.clone().report_file(request)).await;
            faults::pass("client.after-report");
            answer
        });
        Ok(answer.await?.shards)
    }

    /// Sends a file from `path` and counts the bytes that are sent. It may take any time while they
    /// move.
    pub(crate) async fn upload_file(
        &self,
        step: u64,
        file: &FileRecord,
        (path, moved): (&Path, &Moved),
        deadline: &Deadline,
    ) -> Result<u64, CallError> {
        let answer = retry(deadline, || async {
            let (parts, reading) = sending::parts(self.report(step, file), path, moved);
            let mut rpc = self.rpc.clone();
            let sending = rpc.upload_file(parts);
            let call = async { tokio::join!(sending, reading) };
            let begin = Instant::now();
            let done = deadline.moving().bound(call).await;
            let (answer, read) = done.ok_or_else(|| late(begin.elapsed()))?;
            // A file that cannot be read ends its stream early, and the
            // coordinator's refusal of the rest would hide why.
            read.map_err(|error| CallError::Refused(format!("{}: {error}", path.display())))?;
            answer.map(tonic::Response::into_inner).map_err(judge)
        });
        Ok(answer.await?.shards)
    }

    /// Closes this rank's part of a step; true when that committed it.
    pub(crate) async fn close_step(
        &self,
        step: u64,
        files: u32,
        ending: &Ending,
        deadline: &Deadline,
    ) -> Result<bool, CallError> {
        let json = |value: serde_json::Result<Vec<u8>>| {
            value.map(Bytes::from).map_err(|error| CallError::Refused(error.to_string()))
        };
        let head = match &ending.head {
            Some(head) => json(serde_json::to_vec(head))?,
            None => Bytes::new(),
        };
        let selection = match ending.selection.is_whole() {
            true => Bytes::new(),
            false => json(serde_json::to_vec(&*ending.selection))?,
        };
        let omissions = ending.omissions.records(self.member.rank);
        let omissions = omissions.into_iter().map(|omission| proto::Omission {
            tensor: omission.tensor,
            microbatch: omission.microbatch.map(|mb| mb.0),
            reason: omission.reason,
        });
        let request = proto::CloseStepRequest {
            member: Some(self.member.clone()),
            step,
            files,
            head,
            omissions: omissions.collect(),
            selection,
        };
        let answer = retry(deadline, || async {
            faults::pass("client.before-close");
            let answer =
                within(limit(deadline), self.rpc.clone().close_step(request.clone())).await;
            faults::pass("client.after-close");
            answer
        });
        Ok(answer.await?.committed)
    }

    /// Sends rows of scalars as JSON lines; how many rows of this process are written.
    pub(crate) async fn record_scalars(
        &self,
        host: &str,
        first: u64,
        lines: Vec<u8>,
        deadline: &Deadline,
    ) -> Result<u64, CallError> {
        let request = proto::RecordScalarsRequest {
            member: Some(self.member.clone()),
            host: host.into(),
            first,
            lines: lines.into(),
        };
        let answer = retry(deadline, || async {
            within(limit(deadline), self.rpc.clone().record_scalars(request.clone())).await
        });
        Ok(answer.await?.rows)
    }

    /// Which process of which launch this client speaks for.
    pub(crate) fn incarnation(&self) -> u64 {
        self.member.incarnation
    }

    /// Asks once how far a step is.
    pub(crate) async fn step_status(
        &self,
        step: u64,
    ) -> Result<proto::StepStatusResponse, CallError> {
        let request = proto::StepStatusRequest {
            run: self.member.run.clone(),
            attempt: self.member.attempt,
            step,
            brief: true,
        };
        within(CONNECT_DEADLINE, self.rpc.clone().step_status(request)).await
    }
}

fn claim(file: &FileRecord) -> proto::FileReport {
    proto::FileReport {
        name: file.name.to_string(),
        length: file.length,
        header_hash: Bytes::copy_from_slice(&file.header_hash.0),
    }
}

fn outcome(outcome: proto::FileOutcome) -> Result<u64, CallError> {
    match Code::from_i32(i32::try_from(outcome.code).unwrap_or(i32::MAX)) {
        Code::Ok => Ok(outcome.shards),
        code => Err(judge(Status::new(code, outcome.refusal))),
    }
}

fn connection(address: &str, access: &Access) -> Result<Rpc, CallError> {
    connect(address, access).map_err(|error| CallError::Refused(error.to_string()))
}

/// How long one request may take: what is left of the deadline, at most the coordinator's own limit
/// for a request, and at least the time for one answer, as a slow disk may have used up the rest.
fn limit(deadline: &Deadline) -> Duration {
    deadline.left().clamp(LEAST, REQUEST_DEADLINE)
}

fn late(limit: Duration) -> CallError {
    CallError::Unreachable(format!(
        "the coordinator did not answer within {:.1} s",
        limit.as_secs_f64()
    ))
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, CallError> {
    let answer = tokio::time::timeout(limit, call).await.map_err(|_| late(limit))?;
    answer.map(tonic::Response::into_inner).map_err(judge)
}

/// Repeats a call while nobody answers and time is left. Any answer, also a refusal, is progress.
async fn retry<T, F>(deadline: &Deadline, mut call: impl FnMut() -> F) -> Result<T, CallError>
where
    F: Future<Output = Result<T, CallError>>,
{
    let mut pause = FIRST_PAUSE;
    loop {
        if let Some(why) = deadline.given_up() {
            return Err(CallError::Unreachable(why));
        }
        match call().await {
            Err(CallError::Unreachable(why)) => {
                deadline.unanswered(&why);
                let pause_now = jittered(pause);
                if pause_now >= deadline.left() {
                    return Err(CallError::Unreachable(deadline.give_up(&why)));
                }
                deadline.pause(pause_now).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            answered => {
                deadline.progressed();
                return answered;
            }
        }
    }
}

/// A random time between half of a pause and all of it, so that the ranks of a job do not all call
/// at once.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let share = RandomState::new().hash_one(0) % 512;
    pause.mul_f64(0.5 + share as f64 / 1024.0)
}

/// What a failed call means for the caller.
fn judge(status: Status) -> CallError {
    let said = status.message().to_string();
    match status.code() {
        Code::NotFound => CallError::NotThere(said),
        Code::FailedPrecondition => CallError::NotNow(said),
        Code::InvalidArgument | Code::AlreadyExists | Code::PermissionDenied => {
            CallError::Refused(said)
        }
        Code::Unauthenticated | Code::OutOfRange => CallError::Refused(said),
        // A file that is not what was reported; sent again it may arrive whole,
        // but one that lies in the store stays what it is.
        Code::DataLoss => CallError::Refused(said),
        Code::Unimplemented => {
            CallError::Refused(format!("no backtape coordinator answers there ({said})"))
        }
        // The transport's own words name the socket error only in the source.
        code => {
            let source = std::error::Error::source(&status).map(deepest);
            let said = source.unwrap_or(said);
            CallError::Unreachable(format!("no answer from the coordinator: {said} ({code:?})"))
        }
    }
}

fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    match error.source() {
        Some(source) => deepest(source),
        None => error.to_string(),
    }
}
