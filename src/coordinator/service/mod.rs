//! The gRPC service: converts each call from wire types, sends one request to the actor and
//! converts its answer to wire types.

mod files;
mod known;

use std::sync::Arc;

use backtape_proto as proto;
use proto::coordinator_server::Coordinator as Rpc;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Request, Response, Status, Streaming};

use super::actor::Handle;
use super::looks::Looks;
use super::metrics::Metrics;
use super::quotas::{OpenUploads, Rates};
use super::refusal::Refusal;
use super::request::{self, Member};
use super::scalars::Scalars;
use super::strangers::Standing;
use super::wire;
use super::wire::channel::{AUTHORIZATION, BEARER, BUILD, VERSION};
use crate::credentials::Tokens;
use crate::identity::{Name, Rank};
use crate::store::Backend;

pub(super) use known::Marking;

type Answer<T> = Result<Response<T>, Status>;

/// Serves one store.
pub(super) struct Service {
    handle: Handle,
    backend: Backend,
    of_ranks: OpenUploads,
    looks: Looks,
    rates: Rates,
    scalars: Arc<Scalars>,
    tokens: Tokens,
    metrics: Metrics,
}

/// A caller's token, if it sent one, and its connection.
struct Shown {
    token: Option<String>,
    on: Option<Standing>,
}

fn shown<T>(request: &Request<T>) -> Option<&str> {
    let header = request.metadata().get(AUTHORIZATION);
    header.and_then(|value| value.to_str().ok()?.strip_prefix(BEARER))
}

/// Splits a request into the caller's credentials and its message.
fn open<T>(request: Request<T>) -> (Shown, T) {
    let token = shown(&request).map(str::to_string);
    let on = known::standing(request.extensions()).cloned();
    (Shown { token, on }, request.into_inner())
}

/// Refuses callers whose token is not that of any run, before their message is read, which may have
/// 8 MiB. Whether the token is that of the call's run is checked after that.
///
/// Its refusals are counted under the method `door`, because the called method is not known here.
pub(super) fn door(
    tokens: Tokens,
    metrics: Metrics,
) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone {
    move |request| match tokens.admit_some(shown(&request)) {
        true => {
            // Without tokens a connection is marked only once its call was accepted.
            if let Some(standing) = known::standing(request.extensions())
                && tokens.guard()
            {
                standing.set_known();
            }
            Ok(request)
        }
        false => {
            let mut status = refuse(Refusal::NoToken);
            metrics.answered("door", status.code());
            sign(status.metadata_mut());
            Err(status)
        }
    }
}

/// Adds the coordinator's version and build to an answer.
fn sign(metadata: &mut MetadataMap) {
    metadata.insert(VERSION, crate::VERSION.parse().expect("digits and dots"));
    // The name of a build may contain characters that a header cannot.
    let build = crate::BUILD.parse().unwrap_or(MetadataValue::from_static("unreadable"));
    metadata.insert(BUILD, build);
}

impl Service {
    pub(super) fn new(
        handle: Handle,
        backend: Backend,
        tokens: Tokens,
        metrics: Metrics,
    ) -> Service {
        let looks = Looks::new();
        let (of_ranks, rates) = (OpenUploads::default(), Rates::default());
        let scalars = Arc::new(Scalars::new(backend.clone()));
        Service { handle, backend, of_ranks, looks, rates, scalars, tokens, metrics }
    }

    /// Refuses callers without the token of the run.
    fn check(&self, shown: &Shown, run: &Name) -> Result<(), Refusal> {
        match self.tokens.admit(run, shown.token.as_deref()) {
            true => Ok(()),
            false => Err(Refusal::Token { run: run.clone() }),
        }
    }

    /// The same for a rank's request, which also counts towards its limit.
    fn check_member(&self, shown: &Shown, member: &Member) -> Result<(), Refusal> {
        self.check(shown, &member.run)?;
        self.rates.count(member)
    }

    /// Converts an answer to wire types, counts it and adds the coordinator's version.
    fn answer<T>(&self, method: &'static str, answer: Result<T, Refusal>) -> Answer<T> {
        let mut answer = answer.map(Response::new).map_err(refuse);
        let code = answer.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.metrics.answered(method, code);
        sign(match &mut answer {
            Ok(response) => response.metadata_mut(),
            Err(status) => status.metadata_mut(),
        });
        answer
    }
}

#[tonic::async_trait]
impl Rpc for Service {
    async fn join(&self, request: Request<proto::JoinRequest>) -> Answer<proto::JoinResponse> {
        let entry = async {
            let (shown, wire) = open(request);
            let join = wire::join(wire)?;
            self.check(&shown, &join.run)?;
            self.handle.ask(|reply| request::Request::Join(join, reply)).await
        };
        self.answer("join", entry.await.map(wire::answered))
    }

    async fn report_file(
        &self,
        request: Request<proto::ReportFileRequest>,
    ) -> Answer<proto::ReportFileResponse> {
        let shards = self.report(request).await;
        self.answer("report_file", shards.map(|shards| proto::ReportFileResponse { shards }))
    }

    async fn report_files(
        &self,
        request: Request<proto::ReportFilesRequest>,
    ) -> Answer<proto::ReportFilesResponse> {
        let outcomes = self.report_all(request).await.map(|outcomes| {
            let outcomes = outcomes.into_iter().map(|outcome| match outcome {
                Ok(shards) => proto::FileOutcome { shards, ..Default::default() },
                Err(refusal) => {
                    let status = refuse(refusal);
                    let (code, refusal) = (status.code() as u32, status.message().to_string());
                    proto::FileOutcome { shards: 0, code, refusal }
                }
            });
            proto::ReportFilesResponse { outcomes: outcomes.collect() }
        });
        self.answer("report_files", outcomes)
    }

    async fn upload_file(
        &self,
        request: Request<Streaming<proto::UploadFileRequest>>,
    ) -> Answer<proto::ReportFileResponse> {
        let shards = self.upload(request).await;
        self.answer("upload_file", shards.map(|shards| proto::ReportFileResponse { shards }))
    }

    async fn close_step(
        &self,
        request: Request<proto::CloseStepRequest>,
    ) -> Answer<proto::CloseStepResponse> {
        let committed = async {
            let (shown, wire) = open(request);
            let (member, step, closing) = wire::close(wire)?;
            self.check_member(&shown, &member)?;
            let close = |reply| request::Request::Close(member, step, closing, reply);
            self.handle.ask(close).await
        };
        let committed = committed.await;
        self.answer("close_step", committed.map(|committed| proto::CloseStepResponse { committed }))
    }

    async fn step_status(
        &self,
        request: Request<proto::StepStatusRequest>,
    ) -> Answer<proto::StepStatusResponse> {
        let status = async {
            let (shown, wire) = open(request);
            let (run, attempt, ask) = wire::status(wire)?;
            self.check(&shown, &run)?;
            self.handle.ask(|reply| request::Request::Status(run, attempt, ask, reply)).await
        };
        let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|rank| rank.0).collect();
        let response = status.await.map(|status| proto::StepStatusResponse {
            committed: status.committed,
            world_size: status.world_size,
            closed_ranks: numbers(status.closed_ranks),
            missing_ranks: numbers(status.missing_ranks),
            shards: status.shards,
            bytes: status.bytes,
            reason: status.reason,
            trouble: status.trouble,
        });
        self.answer("step_status", response)
    }

    async fn run_status(
        &self,
        request: Request<proto::RunStatusRequest>,
    ) -> Answer<proto::RunStatusResponse> {
        let overview = async {
            let (shown, wire) = open(request);
            let run = wire::run(wire.run)?;
            self.check(&shown, &run)?;
            self.handle.ask(|reply| request::Request::Overview(run, reply)).await
        };
        let overview = overview.await.map(wire::overview);
        self.answer("run_status", overview)
    }

    async fn record_scalars(
        &self,
        request: Request<proto::RecordScalarsRequest>,
    ) -> Answer<proto::RecordScalarsResponse> {
        let rows = self.scalars(request).await;
        self.answer("record_scalars", rows.map(|rows| proto::RecordScalarsResponse { rows }))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Answer<proto::HeartbeatResponse> {
        let orders = async {
            let (shown, wire) = open(request);
            let (member, beat) = wire::steering::heartbeat(wire)?;
            self.check(&shown, &member.run)?;
            let beat = |reply| request::Request::Heartbeat(member, beat, reply);
            wire::steering::orders(self.handle.ask(beat).await?)
        };
        let orders = orders.await;
        self.answer("heartbeat", orders)
    }

    async fn set_plan(
        &self,
        request: Request<proto::SetPlanRequest>,
    ) -> Answer<proto::SetPlanResponse> {
        let plan = async {
            let (shown, wire) = open(request);
            let (run, ask) = wire::steering::plan(wire)?;
            self.check(&shown, &run)?;
            let plan = |reply| request::Request::Plan(run, ask, reply);
            wire::steering::planned(self.handle.ask(plan).await?)
        };
        let plan = plan.await;
        self.answer("set_plan", plan.map(|plan| proto::SetPlanResponse { plan: Some(plan) }))
    }

    async fn trigger(
        &self,
        request: Request<proto::TriggerRequest>,
    ) -> Answer<proto::TriggerResponse> {
        let trigger = async {
            let (shown, wire) = open(request);
            let (run, ask) = wire::steering::trigger(wire)?;
            self.check(&shown, &run)?;
            let trigger = |reply| request::Request::Trigger(run, ask, reply);
            Ok(wire::steering::order(self.handle.ask(trigger).await?))
        };
        let trigger = trigger.await.map(|order| proto::TriggerResponse { trigger: Some(order) });
        self.answer("trigger", trigger)
    }
}

/// Converts a refusal: the code tells the client whether to try again, the sentence is for people.
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
        | Refusal::OldLaunch { .. }
        | Refusal::LeftOver { .. }
        | Refusal::OtherLaunch { .. }
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
        Refusal::Token { .. } | Refusal::NoToken => Code::Unauthenticated,
        Refusal::FileAbsent { .. } => Code::NotFound,
        Refusal::BadFile { .. } => Code::DataLoss,
        Refusal::Busy(_)
        | Refusal::SentAgain
        | Refusal::TooOften(..)
        | Refusal::TooMany(..)
        | Refusal::UploadsOfRank(..) => Code::ResourceExhausted,
        // A repeated request would exceed the limit again.
        Refusal::Quota(_) => Code::OutOfRange,
        Refusal::Storage(_) | Refusal::Stopping => Code::Unavailable,
        Refusal::Deadline(_) => Code::DeadlineExceeded,
    };
    Status::new(code, refusal.to_string())
}
