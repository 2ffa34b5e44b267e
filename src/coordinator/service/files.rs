//! What ranks bring: files that they report or send, and rows of scalars.

use std::collections::VecDeque;
use std::pin::pin;
use std::time::Duration;

use backtape_proto as proto;
use bytes::Bytes;
use proto::upload_file_request::Part;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Streaming};

use super::{Service, open};
use crate::coordinator::intake::{Arrival, Claimed};
use crate::coordinator::limits::{MAX_ONLINE_HEADER, REQUEST_DEADLINE, UPLOAD_IDLE};
use crate::coordinator::refusal::Refusal;
use crate::coordinator::request::{self, Admission, FileClaim, Member};
use crate::coordinator::strangers::Standing;
use crate::coordinator::wire;
use crate::identity::Step;
use crate::manifest::FileRecord;
use crate::store::Backend;

impl Service {
    async fn admit(
        &self,
        member: &Member,
        step: Step,
        claims: Vec<FileClaim>,
    ) -> Result<Vec<Result<Admission, Refusal>>, Refusal> {
        let member = member.clone();
        self.handle.ask(|reply| request::Request::Admit(member, step, claims, reply)).await
    }

    async fn record(
        &self,
        member: Member,
        step: Step,
        files: Vec<FileRecord>,
    ) -> Result<Vec<Result<u64, Refusal>>, Refusal> {
        self.handle.ask(|reply| request::Request::Report(member, step, files, reply)).await
    }

    pub(super) async fn report(
        &self,
        request: Request<proto::ReportFileRequest>,
    ) -> Result<u64, Refusal> {
        let (shown, wire) = open(request);
        let (member, step, claim) = wire::report(wire)?;
        self.check_member(&shown, &member)?;
        one(self.look_and_record(member, step, vec![claim]).await?)
    }

    pub(super) async fn report_all(
        &self,
        request: Request<proto::ReportFilesRequest>,
    ) -> Result<Vec<Result<u64, Refusal>>, Refusal> {
        let (shown, wire) = open(request);
        let (member, step, claims) = wire::reports(wire)?;
        self.check_member(&shown, &member)?;
        self.look_and_record(member, step, claims).await
    }

    /// Looks at files that lie in the store, and records those that are what they are said
    /// to be: one outcome for each, in order.
    async fn look_and_record(
        &self,
        member: Member,
        step: Step,
        claims: Vec<FileClaim>,
    ) -> Result<Vec<Result<u64, Refusal>>, Refusal> {
        let admissions = self.admit(&member, step, claims.clone()).await?;
        let (whose, backend) = (member.clone(), self.backend.clone());
        let asks = claims.iter().any(FileClaim::is_asked);
        let weighed = move || Ok(weighed(claims, admissions, &backend, &whose, step));
        // Most files are small, and the way to another thread costs more than all of this.
        let mut left = if asks { blocking(REQUEST_DEADLINE, weighed).await? } else { weighed()? };
        let mut outcomes = Vec::new();
        while !left.is_empty() {
            let (some, bytes) = some_of(&mut left);
            // Until they are journalled, as they take memory until then.
            let _seat = self.looks.seat(bytes).await?;
            let look = move || Ok(some.into_iter().map(look).collect::<Vec<_>>());
            let looked = blocking(REQUEST_DEADLINE, look).await?;
            let mut files = Vec::new();
            let mut known = |looked: Looked| match looked {
                Looked::Known(shards) => Some(shards),
                Looked::New(file) => {
                    files.push(file);
                    None
                }
            };
            let looked: Vec<_> = looked.into_iter().map(|one| one.map(&mut known)).collect();
            let recorded = match files.is_empty() {
                true => Vec::new(),
                false => self.record(member.clone(), step, files).await?,
            };
            let mut recorded = recorded.into_iter();
            outcomes.extend(looked.into_iter().map(|outcome| match outcome {
                Ok(Some(shards)) => Ok(shards),
                Ok(None) => recorded.next().unwrap_or(Err(Refusal::Stopping)),
                Err(refusal) => Err(refusal),
            }));
        }
        Ok(outcomes)
    }

    pub(super) async fn upload(
        &self,
        request: Request<Streaming<proto::UploadFileRequest>>,
    ) -> Result<u64, Refusal> {
        let (shown, mut parts) = open(request);
        let Some(Part::Header(header)) = next_part(&mut parts).await? else {
            return Err(Refusal::Malformed("an upload begins with its header".into()));
        };
        let (member, step, claim) = wire::report(header)?;
        self.check_member(&shown, &member)?;
        let claimed = match one(self.admit(&member, step, vec![claim.clone()]).await?)? {
            Admission::Known(shards) => return Ok(shards),
            Admission::Wanted(attempt, world_size) => {
                // Before the answer: all of the file is read first.
                shown.on.iter().for_each(Standing::set_known);
                let (backend, member) = (self.backend.clone(), member.clone());
                Claimed { backend, member, step, claim, attempt, world_size }
            }
        };
        // After the check: strangers must not take the places, nor end what others send.
        let file = (step, claimed.claim.name.clone());
        let open = &self.of_ranks.open(&claimed.member, file)?;
        let looks = self.looks.clone();
        let (chunks, mut queue) = mpsc::channel::<Bytes>(CHUNKS_BEHIND);
        let (whole, arrived) = oneshot::channel();
        // One task for all of it: the next chunk arrives while this one is hashed and written.
        let writing = blocking(Duration::MAX, move || {
            let mut arrival = Arrival::begin(claimed, looks)?;
            while let Some(chunk) = queue.blocking_recv() {
                arrival.write(&chunk)?;
            }
            match arrived.blocking_recv() {
                Ok(()) => arrival.finish(),
                // The call broke off: what is here goes with it.
                Err(_) => Err(Refusal::Stopping),
            }
        });
        let receiving = async move {
            loop {
                let next = tokio::select! {
                    next = next_part(&mut parts) => next?,
                    again = open.replaced() => return Err(again),
                };
                let Some(part) = next else { break };
                let Part::Chunk(chunk) = part else {
                    return Err(Refusal::Malformed("an upload has one header".into()));
                };
                self.metrics.received(chunk.len());
                let taken = tokio::time::timeout(REQUEST_DEADLINE, chunks.send(chunk)).await;
                let taken = taken.map_err(|_| Refusal::Deadline(REQUEST_DEADLINE.as_secs()))?;
                if taken.is_err() {
                    // The writing has ended, and says itself why.
                    return Ok(());
                }
            }
            let _ = whole.send(());
            Ok(())
        };
        let (file, _seat) = receive(receiving, writing).await?;
        one(self.record(member, step, vec![file]).await?)
    }

    pub(super) async fn scalars(
        &self,
        request: Request<proto::RecordScalarsRequest>,
    ) -> Result<u64, Refusal> {
        let (shown, wire) = open(request);
        let rows = wire::scalars(wire)?;
        self.check_member(&shown, &rows.member)?;
        let member = rows.member.clone();
        let place = self.handle.ask(|reply| request::Request::Place(member, reply));
        let (attempt, world_size) = place.await?;
        let scalars = self.scalars.clone();
        blocking(REQUEST_DEADLINE, move || scalars.append(rows, &attempt, world_size)).await
    }
}

/// Chunks of an upload that wait for the disk.
const CHUNKS_BEHIND: usize = 2;

/// The file that was written; at once an error of what comes in, as the writing may hang.
async fn receive<T>(
    receiving: impl Future<Output = Result<(), Refusal>>,
    writing: impl Future<Output = Result<T, Refusal>>,
) -> Result<T, Refusal> {
    let (mut receiving, mut writing) = (pin!(receiving), pin!(writing));
    tokio::select! {
        biased;
        received = &mut receiving => received?,
        // It ends before all has come only by an error.
        written = &mut writing => return written,
    }
    // A terabyte takes a while: the rank's own deadline bounds it.
    writing.await
}

/// What is to be done about a file: nothing, where it is known or refused, or a look at it.
type Task = Result<Result<Claimed, u64>, Refusal>;

/// Files that are to be looked at, in order, each with the bytes of its header.
fn weighed(
    claims: Vec<FileClaim>,
    admissions: Vec<Result<Admission, Refusal>>,
    backend: &Backend,
    member: &Member,
    step: Step,
) -> VecDeque<(Task, u64)> {
    let one = |(claim, admission): (FileClaim, Result<Admission, Refusal>)| match admission {
        Err(refusal) => (Err(refusal), 0),
        Ok(Admission::Known(shards)) => (Ok(Err(shards)), 0),
        Ok(Admission::Wanted(attempt, world_size)) => {
            let (backend, member) = (backend.clone(), member.clone());
            let claimed = Claimed { backend, member, step, claim, attempt, world_size };
            let weight = claimed.weight();
            (Ok(Ok(claimed)), weight)
        }
    };
    claims.into_iter().zip(admissions).map(one).collect()
}

/// The first of them whose headers fit into a seat together, and what those weigh.
fn some_of(left: &mut VecDeque<(Task, u64)>) -> (Vec<Task>, u64) {
    let (mut some, mut bytes) = (Vec::new(), 0u64);
    while let Some((_, weight)) = left.front()
        && (some.is_empty() || bytes.saturating_add(*weight) <= MAX_ONLINE_HEADER)
    {
        bytes = bytes.saturating_add(*weight);
        some.extend(left.pop_front().map(|(task, _)| task));
    }
    (some, bytes)
}

fn look(task: Task) -> Result<Looked, Refusal> {
    match task? {
        Ok(claimed) => claimed.look().map(Looked::New),
        Err(shards) => Ok(Looked::Known(shards)),
    }
}

/// A file that was looked at.
enum Looked {
    /// It was reported before.
    Known(u64),
    New(FileRecord),
}

/// The only outcome.
fn one<T>(mut outcomes: Vec<Result<T, Refusal>>) -> Result<T, Refusal> {
    outcomes.pop().unwrap_or(Err(Refusal::Stopping))
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
