//! The calls in which ranks report files, upload files and send rows of scalars.

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
        single_outcome(self.look_and_record(member, step, vec![claim]).await?)
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

    /// Checks files in the store and records those that match their claims: one outcome for each,
    /// in order.
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
        // For small files, which most are, nothing is read, and switching to another thread would
        // cost more than the work.
        let mut tasks = if asks { blocking(REQUEST_DEADLINE, weighed).await? } else { weighed()? };
        let mut outcomes = Vec::new();
        while !tasks.is_empty() {
            let (some, bytes) = some_of(&mut tasks);
            // Kept until the shards are journalled, since they take memory until then.
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
        let claimed = match single_outcome(self.admit(&member, step, vec![claim.clone()]).await?)? {
            Admission::Known(shards) => return Ok(shards),
            Admission::Wanted(attempt, world_size) => {
                // Marked before the answer, because the whole file is read before that.
                shown.on.iter().for_each(Standing::set_known);
                let (backend, member) = (self.backend.clone(), member.clone());
                Claimed { backend, member, step, claim, attempt, world_size }
            }
        };
        // After the token check: a stranger must neither occupy the places nor replace the uploads
        // of others.
        let file = (step, claimed.claim.name.clone());
        let open = &self.of_ranks.open(&claimed.member, file)?;
        let looks = self.looks.clone();
        let (chunks, mut queue) = mpsc::channel::<Bytes>(CHUNKS_BEHIND);
        let (whole, arrived) = oneshot::channel();
        // One task for the whole file: it hashes and writes a chunk while the next one arrives.
        let writing = blocking(Duration::MAX, move || {
            let mut arrival = Arrival::begin(claimed, looks)?;
            while let Some(chunk) = queue.blocking_recv() {
                arrival.write(&chunk)?;
            }
            match arrived.blocking_recv() {
                Ok(()) => arrival.finish(),
                // The call ended early: dropping `arrival` removes the file.
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
                    // The writing task has ended; its result says why.
                    return Ok(());
                }
            }
            let _ = whole.send(());
            Ok(())
        };
        let (file, _seat) = receive(receiving, writing).await?;
        single_outcome(self.record(member, step, vec![file]).await?)
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

/// Chunks of an upload that may wait for the disk.
const CHUNKS_BEHIND: usize = 2;

/// Waits for both and returns the result of writing. An error of receiving is returned at once,
/// because the writing may hang.
async fn receive<T>(
    receiving: impl Future<Output = Result<(), Refusal>>,
    writing: impl Future<Output = Result<T, Refusal>>,
) -> Result<T, Refusal> {
    let (mut receiving, mut writing) = (pin!(receiving), pin!(writing));
    tokio::select! {
        biased;
        received = &mut receiving => received?,
        // Before everything is received, writing ends only with an error.
        written = &mut writing => return written,
    }
    // No time limit, because a terabyte takes long: the rank has its own deadline.
    writing.await
}

/// What to do with a file: check it, or nothing because it is known (with its number of shards) or
/// refused.
type Task = Result<Result<Claimed, u64>, Refusal>;

/// The task for each file, in order, with the bytes of header that it will read.
fn weighed(
    claims: Vec<FileClaim>,
    admissions: Vec<Result<Admission, Refusal>>,
    backend: &Backend,
    member: &Member,
    step: Step,
) -> VecDeque<(Task, u64)> {
    let task_of = |(claim, admission): (FileClaim, Result<Admission, Refusal>)| match admission {
        Err(refusal) => (Err(refusal), 0),
        Ok(Admission::Known(shards)) => (Ok(Err(shards)), 0),
        Ok(Admission::Wanted(attempt, world_size)) => {
            let (backend, member) = (backend.clone(), member.clone());
            let claimed = Claimed { backend, member, step, claim, attempt, world_size };
            let weight = claimed.weight();
            (Ok(Ok(claimed)), weight)
        }
    };
    claims.into_iter().zip(admissions).map(task_of).collect()
}

/// Takes the first tasks whose headers together are within the limit of a reservation; returns them
/// with their bytes.
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

/// A checked file.
enum Looked {
    /// It was reported before; its number of shards.
    Known(u64),
    New(FileRecord),
}

/// The outcome of a request with one file.
fn single_outcome<T>(mut outcomes: Vec<Result<T, Refusal>>) -> Result<T, Refusal> {
    outcomes.pop().unwrap_or(Err(Refusal::Stopping))
}

/// Runs disk work on a blocking thread; does not wait longer than `limit` for a hung disk.
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
