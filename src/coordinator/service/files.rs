//! What ranks bring: files that they report or send, and rows of scalars.

use std::time::Duration;

use backtape_proto as proto;
use proto::upload_file_request::Part;
use tonic::{Request, Streaming};

use super::{Service, open};
use crate::coordinator::intake::{Arrival, Claimed};
use crate::coordinator::limits::{MAX_UPLOADS, REQUEST_DEADLINE, UPLOAD_IDLE};
use crate::coordinator::refusal::Refusal;
use crate::coordinator::request::{self, Admission, FileClaim, Member};
use crate::coordinator::wire;
use crate::identity::Step;
use crate::manifest::FileRecord;

impl Service {
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

    pub(super) async fn report(
        &self,
        request: Request<proto::ReportFileRequest>,
    ) -> Result<u64, Refusal> {
        let (shown, wire) = open(request);
        let (member, step, claim) = wire::report(wire)?;
        self.check(&shown, &member.run)?;
        let claimed = match self.admit(&member, step, &claim).await? {
            Admission::Known(shards) => return Ok(shards),
            Admission::Wanted(attempt, world_size) => {
                let (backend, member) = (self.backend.clone(), member.clone());
                Claimed { backend, member, step, claim, attempt, world_size }
            }
        };
        let look = blocking(REQUEST_DEADLINE, move || claimed.look());
        self.record(member, step, look.await?).await
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
        self.check(&shown, &member.run)?;
        // Refused at once, not queued: a waiting upload would hold its window. After the check:
        // strangers must not take the places.
        let permit = self.uploads.try_acquire();
        let _permit = permit.map_err(|_| Refusal::Busy(MAX_UPLOADS))?;
        let claimed = match self.admit(&member, step, &claim).await? {
            Admission::Known(shards) => return Ok(shards),
            Admission::Wanted(attempt, world_size) => {
                let (backend, member) = (self.backend.clone(), member.clone());
                Claimed { backend, member, step, claim, attempt, world_size }
            }
        };
        let mut arrival = blocking(REQUEST_DEADLINE, move || Arrival::begin(claimed)).await?;
        while let Some(part) = next_part(&mut parts).await? {
            let Part::Chunk(chunk) = part else {
                return Err(Refusal::Malformed("an upload has one header".into()));
            };
            self.metrics.received(chunk.len());
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

    pub(super) async fn scalars(
        &self,
        request: Request<proto::RecordScalarsRequest>,
    ) -> Result<u64, Refusal> {
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
