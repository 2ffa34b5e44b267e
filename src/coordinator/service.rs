//! The gRPC adapter: wire types in, one question to the actor, wire types out.

use std::sync::Arc;
use std::time::Duration;

use backtape_proto as proto;
use proto::coordinator_server::Coordinator as Rpc;
use proto::upload_file_request::Part;
use tokio::sync::Semaphore;
use tonic::{Code, Request, Response, Status, Streaming};

use super::actor::Handle;
use super::intake::{Arrival, Claimed};
use super::limits::{MAX_UPLOADS, REQUEST_DEADLINE, UPLOAD_IDLE};
use super::refusal::Refusal;
use super::request::{self, Admission, FileClaim, Member};
use super::scalars::Scalars;
use super::wire;
use super::wire::channel::{AUTHORIZATION, BEARER};
use crate::credentials::Tokens;
use crate::identity::{Name, Rank, Step};
use crate::manifest::FileRecord;

type Answer<T> = Result<Response<T>, Status>;

/// Serves one store.
pub(super) struct Service {
    handle: Handle,
    uploads: Arc<Semaphore>,
    scalars: Arc<Scalars>,
    tokens: Tokens,
}

/// What a caller shows: its token, if it has one.
struct Shown(Option<String>);

/// What a caller shows, and its message.
fn open<T>(request: Request<T>) -> (Shown, T) {
    let header = request.metadata().get(AUTHORIZATION);
    let token = header.and_then(|value| value.to_str().ok()?.strip_prefix(BEARER));
    let shown = Shown(token.map(str::to_string));
    (shown, request.into_inner())
}

impl Service {
    pub(super) fn new(handle: Handle, tokens: Tokens) -> Service {
        let uploads = Arc::new(Semaphore::new(MAX_UPLOADS));
        Service { handle, uploads, scalars: Arc::default(), tokens }
    }

    /// Refuses whoever does not show the token of the run.
    fn check(&self, shown: &Shown, run: &Name) -> Result<(), Refusal> {
        match self.tokens.admit(run, shown.0.as_deref()) {
            true => Ok(()),
            false => Err(Refusal::Token { run: run.clone() }),
        }
    }

    async fn admit(
        &self,
        member: &Member,
        step: Step,
        claim: &FileClaim,
    ) -> Result<Admission, Refusal> {
        let (member, claim) = (member.clone(), claim.clone());
        self.handle.ask(|reply| request::Request::Admit(member, step, claim, reply)).await
    }

    async fn record(&self, member: Member, step: Step, file: FileRecord) -> Result<u64, Refusal> {
        self.handle.ask(|reply| request::Request::Report(member, step, file, reply)).await
    }

    async fn report(&self, request: Request<proto::ReportFileRequest>) -> Result<u64, Refusal> {
        let (shown, wire) = open(request);
        let (member, step, claim) = wire::report(wire)?;
        self.check(&shown, &member.run)?;
        let claimed = match self.admit(&member, step, &claim).await? {
            Admission::Known(shards) => return Ok(shards),
            Admission::Wanted(attempt, world_size) => {
                Claimed { member: member.clone(), step, claim, attempt, world_size }
            }
        };
        let look = blocking(REQUEST_DEADLINE, move || claimed.look());
        self.record(member, step, look.await?).await
    }

    async fn upload(
        &self,
        request: Request<Streaming<proto::UploadFileRequest>>,
    ) -> Result<u64, Refusal> {
        let (shown, mut parts) = open(request);
        // Refused at once, not queued: a waiting upload would hold its window.
        let permit = self.uploads.try_acquire();
        let _permit = permit.map_err(|_| Refusal::Busy(MAX_UPLOADS))?;
        let Some(Part::Header(header)) = next_part(&mut parts).await? else {
            return Err(Refusal::Malformed("an upload begins with its header".into()));
        };
        let (member, step, claim) = wire::report(header)?;
        self.check(&shown, &member.run)?;
        let claimed = match self.admit(&member, step, &claim).await? {
            Admission::Known(shards) => return Ok(shards),
            Admission::Wanted(attempt, world_size) => {
                Claimed { member: member.clone(), step, claim, attempt, world_size }
            }
        };
        let mut arrival = blocking(REQUEST_DEADLINE, move || Arrival::begin(claimed)).await?;
        while let Some(part) = next_part(&mut parts).await? {
            let Part::Chunk(chunk) = part else {
                return Err(Refusal::Malformed("an upload has one header".into()));
            };
            arrival = blocking(REQUEST_DEADLINE, move || {
                arrival.write(&chunk)?;
                Ok(arrival)
            })
            .await?;
        }
        // A terabyte takes a while to hash: the rank's own deadline bounds it.
        let finish = blocking(Duration::MAX, move || arrival.finish());
        self.record(member, step, finish.await?).await
    }

    async fn scalars(&self, request: Request<proto::RecordScalarsRequest>) -> Result<u64, Refusal> {
        let (shown, wire) = open(request);
        let rows = wire::scalars(wire)?;
        self.check(&shown, &rows.member.run)?;
        let member = rows.member.clone();
        let place = self.handle.ask(|reply| request::Request::Place(member, reply));
        let (attempt, world_size) = place.await?;
        let scalars = self.scalars.clone();
        blocking(REQUEST_DEADLINE, move || scalars.append(rows, &attempt, world_size)).await
    }
}

/// Runs disk work off the runtime's threads, and does not wait for a hung disk.
async fn blocking<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let task = tokio::task::spawn_blocking(work);
    match tokio::time::timeout(limit, task).await {
        Ok(Ok(done)) => done,
        Ok(Err(_)) => Err(Refusal::Storage("looking at the file failed".into())),
        Err(_) => Err(Refusal::Deadline(limit.as_secs())),
    }
}

async fn next_part(
    parts: &mut Streaming<proto::UploadFileRequest>,
) -> Result<Option<Part>, Refusal> {
    let message = tokio::time::timeout(UPLOAD_IDLE, parts.message()).await;
    let message = message.map_err(|_| Refusal::Deadline(UPLOAD_IDLE.as_secs()))?;
    let message = message.map_err(|status| Refusal::Malformed(status.message().into()))?;
    match message.map(|message| message.part) {
        None => Ok(None),
        Some(Some(part)) => Ok(Some(part)),
        Some(None) => Err(Refusal::Malformed("an upload message is empty".into())),
    }
}

#[tonic::async_trait]
impl Rpc for Service {
    async fn join(&self, request: Request<proto::JoinRequest>) -> Answer<proto::JoinResponse> {
        let (shown, wire) = open(request);
        let join = wire::join(wire).map_err(refuse)?;
        self.check(&shown, &join.run).map_err(refuse)?;
        let entry = self.handle.ask(|reply| request::Request::Join(join, reply));
        let entry = entry.await.map_err(refuse)?;
        Ok(Response::new(proto::JoinResponse {
            attempt: entry.attempt.0,
            directory: entry.directory.to_string_lossy().into_owned(),
            version: crate::VERSION.into(),
            run_record: entry.run_record.0.to_vec().into(),
        }))
    }

    async fn report_file(
        &self,
        request: Request<proto::ReportFileRequest>,
    ) -> Answer<proto::ReportFileResponse> {
        let shards = self.report(request).await.map_err(refuse)?;
        Ok(Response::new(proto::ReportFileResponse { shards }))
    }

    async fn upload_file(
        &self,
        request: Request<Streaming<proto::UploadFileRequest>>,
    ) -> Answer<proto::ReportFileResponse> {
        let shards = self.upload(request).await.map_err(refuse)?;
        Ok(Response::new(proto::ReportFileResponse { shards }))
    }

    async fn close_step(
        &self,
        request: Request<proto::CloseStepRequest>,
    ) -> Answer<proto::CloseStepResponse> {
        let (shown, wire) = open(request);
        let (member, step, closing) = wire::close(wire).map_err(refuse)?;
        self.check(&shown, &member.run).map_err(refuse)?;
        let close = |reply| request::Request::Close(member, step, closing, reply);
        let committed = self.handle.ask(close).await.map_err(refuse)?;
        Ok(Response::new(proto::CloseStepResponse { committed }))
    }

    async fn step_status(
        &self,
        request: Request<proto::StepStatusRequest>,
    ) -> Answer<proto::StepStatusResponse> {
        let (shown, wire) = open(request);
        let (run, attempt, step) = wire::status(wire).map_err(refuse)?;
        self.check(&shown, &run).map_err(refuse)?;
        let ask = |reply| request::Request::Status(run, attempt, step, reply);
        let status = self.handle.ask(ask).await.map_err(refuse)?;
        let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|rank| rank.0).collect();
        Ok(Response::new(proto::StepStatusResponse {
            committed: status.committed,
            world_size: status.world_size,
            closed_ranks: numbers(status.closed_ranks),
            missing_ranks: numbers(status.missing_ranks),
            shards: status.shards,
            bytes: status.bytes,
            reason: status.reason,
        }))
    }

    async fn run_status(
        &self,
        request: Request<proto::RunStatusRequest>,
    ) -> Answer<proto::RunStatusResponse> {
        let (shown, wire) = open(request);
        let run = wire::run(wire.run).map_err(refuse)?;
        self.check(&shown, &run).map_err(refuse)?;
        let ask = |reply| request::Request::Overview(run, reply);
        Ok(Response::new(wire::overview(self.handle.ask(ask).await.map_err(refuse)?)))
    }

    async fn record_scalars(
        &self,
        request: Request<proto::RecordScalarsRequest>,
    ) -> Answer<proto::RecordScalarsResponse> {
        let rows = self.scalars(request).await.map_err(refuse)?;
        Ok(Response::new(proto::RecordScalarsResponse { rows }))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Answer<proto::HeartbeatResponse> {
        let (shown, wire) = open(request);
        let (member, beat) = wire::steering::heartbeat(wire).map_err(refuse)?;
        self.check(&shown, &member.run).map_err(refuse)?;
        let beat = |reply| request::Request::Heartbeat(member, beat, reply);
        let orders = self.handle.ask(beat).await.map_err(refuse)?;
        Ok(Response::new(wire::steering::orders(orders).map_err(refuse)?))
    }

    async fn set_plan(
        &self,
        request: Request<proto::SetPlanRequest>,
    ) -> Answer<proto::SetPlanResponse> {
        let (shown, wire) = open(request);
        let (run, ask) = wire::steering::plan(wire).map_err(refuse)?;
        self.check(&shown, &run).map_err(refuse)?;
        let plan = |reply| request::Request::Plan(run, ask, reply);
        let plan = self.handle.ask(plan).await.map_err(refuse)?;
        let plan = Some(wire::steering::planned(plan).map_err(refuse)?);
        Ok(Response::new(proto::SetPlanResponse { plan }))
    }

    async fn trigger(
        &self,
        request: Request<proto::TriggerRequest>,
    ) -> Answer<proto::TriggerResponse> {
        let (shown, wire) = open(request);
        let (run, ask) = wire::steering::trigger(wire).map_err(refuse)?;
        self.check(&shown, &run).map_err(refuse)?;
        let trigger = |reply| request::Request::Trigger(run, ask, reply);
        let trigger = self.handle.ask(trigger).await.map_err(refuse)?;
        let trigger = Some(wire::steering::order(trigger));
        Ok(Response::new(proto::TriggerResponse { trigger }))
    }
}

/// The code says to the client whether to try again; the sentence is for people.
fn refuse(refusal: Refusal) -> Status {
    let code = match &refusal {
        Refusal::WorldSize { .. }
        | Refusal::RankOutside { .. }
        | Refusal::FormatVersion { .. }
        | Refusal::Mesh { .. }
        | Refusal::ForeignFile { .. }
        | Refusal::Record { .. }
        | Refusal::Malformed(_) => Code::InvalidArgument,
        Refusal::UnknownRun { .. }
        | Refusal::OtherRun { .. }
        | Refusal::OldAttempt { .. }
        | Refusal::AttemptTaken { .. }
        | Refusal::NotJoined { .. }
        | Refusal::StepClosed { .. }
        | Refusal::CountShort { .. }
        | Refusal::NotTriggered(_)
        | Refusal::NotPlanned(_)
        | Refusal::Poisoned { .. } => Code::FailedPrecondition,
        Refusal::FileConflict { .. }
        | Refusal::ShardConflict { .. }
        | Refusal::CloseConflict { .. } => Code::AlreadyExists,
        Refusal::Token { .. } => Code::Unauthenticated,
        Refusal::FileAbsent { .. } => Code::NotFound,
        Refusal::BadFile { .. } => Code::DataLoss,
        Refusal::Busy(_) | Refusal::TooOften(..) => Code::ResourceExhausted,
        Refusal::Storage(_) | Refusal::Stopping => Code::Unavailable,
        Refusal::Deadline(_) => Code::DeadlineExceeded,
    };
    Status::new(code, refusal.to_string())
}
