//! What the recorder's thread does once the rank has entered a run: it writes shards, delivers
//! files, closes steps and waits until they are committed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use backtape::identity::{Attempt, Step};
use backtape::manifest::{EVERYTHING, FileRecord};
use backtape::shard::TensorKey;
use backtape::store::{AttemptDir, Backend, FinishedFile};

use crate::capture::Capture;
use crate::client::{CallError, Client, Entered};
use crate::delivery::{Delivery, Way};
use crate::embedded::Embedded;
use crate::files::StepFiles;
use crate::omissions::Omissions;
use crate::patience::Deadline;
use crate::queue::Ending;
use crate::recording::Recording;
use crate::settings::TransportChoice;

/// Pauses between looks at a step that other ranks have yet to close.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const SLOWEST_LOOK: Duration = Duration::from_millis(500);
/// What each rank of the job adds to the slowest pause: together they ask 5,000 times a
/// second at most.
const LOOK_PER_RANK: Duration = Duration::from_micros(200);

/// A rank inside a run.
pub(crate) struct Session {
    recording: Arc<Recording>,
    client: Client,
    attempt: AttemptDir,
    way: Way,
    open: BTreeMap<u64, StepFiles>,
    /// Steps that are closed on this rank and not yet known to be committed.
    waiting: BTreeSet<u64>,
}

impl Session {
    pub(crate) async fn new(
        recording: Arc<Recording>,
        client: Client,
        entered: &Entered,
    ) -> std::io::Result<Session> {
        backtape::faults::point("session.spool")?;
        let way = Way::find(recording.clone(), entered.clone()).await?;
        let mut summary = recording.summary();
        summary.attempt = Some(entered.attempt);
        summary.directory = Some(entered.directory.clone());
        summary.streamed = matches!(way, Way::Stream(_));
        drop(summary);
        Ok(Session {
            recording,
            client,
            attempt: AttemptDir {
                attempt: Attempt(entered.attempt),
                path: entered.directory.clone(),
            },
            way,
            open: BTreeMap::new(),
            waiting: BTreeSet::new(),
        })
    }

    /// The deadline of what begins now.
    fn deadline(&self) -> Deadline {
        self.recording.patience.deadline(self.recording.plan.settings.step_deadline)
    }

    fn files(&mut self, step: u64) -> &mut StepFiles {
        self.open.entry(step).or_insert_with(|| {
            let directory = match self.way.spool() {
                Some(spool) => spool.join(format!("step-{step:08}")),
                None => self.attempt.step(Step(step)).path,
            };
            let (attempt, spooled) = (self.attempt.attempt.0, self.way.spool().is_some());
            let moved = self.recording.patience.moved.clone();
            StepFiles::new((attempt, step), directory, spooled, moved)
        })
    }

    /// Writes one capture; one that cannot be written is named.
    pub(crate) fn write(&mut self, step: u64, capture: Capture) {
        self.write_from(step, capture, false);
    }

    /// Writes what the ring held of a step, like any other step.
    pub(crate) async fn write_ring(&mut self, step: u64) {
        let recording = self.recording.clone();
        let Some(taken) = recording.ring.take(step) else { return };
        for capture in taken.captures {
            self.write_from(step, capture, true);
        }
        recording.ring.settle(taken.bytes);
        self.close(step, taken.ending).await;
    }

    fn write_from(&mut self, step: u64, capture: Capture, from_ring: bool) {
        let recording = self.recording.clone();
        let (key, length) = (capture.key.clone(), capture.length());
        let written = self.files(step).write(&recording.plan, capture);
        if !from_ring {
            recording.queue.release(length);
        }
        if written.is_ok() {
            recording.patience.progressed();
        }
        if let Err(reason) = written {
            let microbatch = key.microbatch.map(|mb| mb.0);
            self.files(step).omissions.add(key.tensor.as_str(), microbatch, &reason);
            recording.omitted(step, key.tensor.as_str(), microbatch, &reason);
            let rank = recording.rank();
            recording.fault(format!("{key} of step {step} on rank {rank}: {reason}"));
        }
    }

    /// Delivers a step's files and closes this rank's part of it.
    pub(crate) async fn close(&mut self, step: u64, mut ending: Ending) {
        let deadline = self.deadline();
        let (files, mut left_out) = self.deliver(step, &deadline).await;
        left_out.append(std::mem::take(&mut ending.omissions));
        ending.omissions = left_out;
        let Some(files) = files else {
            return;
        };
        // A step that it never began is committed by the others.
        let cut_short = ending.omissions.of_everything() && !ending.late;
        match self.client.close_step(step, files, &ending, &deadline).await {
            // It is closed, so that no rank waits for it, and it is no whole step. That is the
            // job's own doing, and named among the omissions: no fault of the recording.
            Ok(_) if cut_short => {
                self.recording.summary().steps_partial.insert(step);
            }
            Ok(true) => {
                let status = self.client.step_status(step).await;
                self.ended(step, &status.map(|status| status.reason).unwrap_or_default());
            }
            Ok(false) => {
                self.waiting.insert(step);
            }
            Err(error) => self.lost(step, &format!("its close failed: {error}")),
        }
    }

    /// All ranks closed a step. `why` says how one of them ended it early, and is empty where none
    /// did. Ending early is the job's own doing, and no fault of the recording.
    fn ended(&self, step: u64, why: &str) {
        if why.is_empty() {
            return self.recording.committed(step);
        }
        self.recording.summary().steps_partial.insert(step);
        self.recording.omitted(step, EVERYTHING, None, why);
    }

    /// Ends a step whose tape was dropped: its files are delivered, but nobody has said that the
    /// step is complete, so it stays open.
    pub(crate) async fn abandon(&mut self, step: u64) {
        let deadline = self.deadline();
        self.deliver(step, &deadline).await;
        self.lost(step, "its tape was dropped before it was closed");
    }

    fn lost(&self, step: u64, why: &str) {
        let rank = self.recording.rank();
        self.recording.summary().steps_partial.insert(step);
        self.recording.fault(format!("step {step} of rank {rank} stays partial: {why}"));
    }

    /// Delivers every file of a step. Returns how many were acknowledged, or `None` when the
    /// coordinator could not be reached; and what was left out.
    async fn deliver(&mut self, step: u64, deadline: &Deadline) -> (Option<u32>, Omissions) {
        let mut files = match self.open.remove(&step) {
            Some(files) => files,
            None => return (Some(0), Omissions::default()),
        };
        let (finished, failed) = files.finish();
        for (keys, reason) in failed {
            self.left_out(step, &mut files, &keys, &reason);
        }
        let delivery = Delivery {
            way: &self.way,
            client: &self.client,
            step,
            directory: self.attempt.step(Step(step)).path,
            may_stream: self.recording.plan.settings.transport == TransportChoice::Auto,
            deadline: deadline.clone(),
            moved: &self.recording.patience.moved,
        };
        let mut acknowledged = 0;
        let mut finished = finished.into_iter().peekable();
        while finished.peek().is_some() {
            let some: Vec<FinishedFile> = finished.by_ref().take(self.way.at_a_time()).collect();
            for (record, outcome) in delivery.deliver(some).await {
                match outcome {
                    Ok(shards) => {
                        acknowledged += 1;
                        let mut summary = self.recording.summary();
                        summary.shards += shards;
                        summary.bytes += payload_bytes(&record);
                    }
                    Err(CallError::Unreachable(why)) => {
                        let name = &record.name;
                        self.lost(step, &format!("{name} was not acknowledged: {why}"));
                        return (None, files.omissions);
                    }
                    Err(error) => {
                        let reason = format!("{} was not accepted: {error}", record.name);
                        let keys: Vec<TensorKey> =
                            record.shards.iter().map(|shard| shard.key.clone()).collect();
                        self.left_out(step, &mut files, &keys, &reason);
                    }
                }
            }
        }
        (Some(acknowledged), files.omissions)
    }

    /// Names shards that were recorded and are not in the dump: in the step's close, in the
    /// summary, and as a fault.
    fn left_out(&self, step: u64, files: &mut StepFiles, keys: &[TensorKey], reason: &str) {
        files.omit_all(keys, reason);
        for key in keys {
            let microbatch = key.microbatch.map(|mb| mb.0);
            self.recording.omitted(step, key.tensor.as_str(), microbatch, reason);
        }
        self.recording.fault(format!("step {step}: {reason}"));
    }

    /// Waits until every step that was closed here is committed or known not to be, and no longer
    /// than the deadline.
    pub(crate) async fn settle(&mut self) {
        let deadline = self.deadline();
        let mut pause = FIRST_LOOK;
        let mut seen = (0, 0);
        let slowest = SLOWEST_LOOK.max(LOOK_PER_RANK * self.recording.plan.settings.world_size);
        while let Some(&step) = self.waiting.first() {
            match self.look(step, &deadline, &mut seen).await {
                None => {
                    deadline.pause(pause).await;
                    pause = (pause * 2).min(slowest);
                    continue;
                }
                Some(Ok(cut_short)) => {
                    self.recording.patience.progressed();
                    self.ended(step, &cut_short);
                }
                Some(Err(why)) => self.lost(step, &why),
            }
            self.waiting.remove(&step);
        }
    }

    /// Asks once how a step stands: `Some(Ok(why))` when it is committed, where `why` is empty if
    /// it is whole; `Some(Err(why))` when it will not be; `None` when that is not known yet. Shards
    /// of other ranks that were acknowledged since the last look are progress.
    async fn look(
        &self,
        step: u64,
        deadline: &Deadline,
        seen: &mut (u64, u64),
    ) -> Option<Result<String, String>> {
        let answer = match deadline.given_up() {
            Some(why) => Err(CallError::Unreachable(why)),
            None => self.client.step_status(step).await,
        };
        if let Ok(status) = &answer
            && status.committed
        {
            return Some(Ok(status.reason.clone()));
        }
        if self.sees_manifest(step, answer.is_err(), deadline).await {
            return Some(Ok(String::new()));
        }
        let late = deadline.is_over();
        match answer {
            Ok(status) if !status.reason.is_empty() => Some(Err(status.reason)),
            Ok(status) if late && !status.trouble.is_empty() => Some(Err(status.trouble)),
            Ok(_) if late => Some(Err(deadline.explained("other ranks did not close it in time"))),
            Ok(status) => {
                let now = (status.shards, status.bytes);
                match std::mem::replace(seen, now) == now {
                    true => self.recording.patience.answered(),
                    false => self.recording.patience.progressed(),
                }
                None
            }
            Err(CallError::Unreachable(_)) if self.orphaned() => {
                Some(Err("rank 0 ended its coordinator before the step was committed".into()))
            }
            Err(CallError::Unreachable(why)) => {
                deadline.unanswered(&why);
                late.then(|| Err(deadline.give_up(&why)))
            }
            Err(error) => Some(Err(error.to_string())),
        }
    }

    /// True where this rank can see the manifest, which outlives the coordinator. It is made
    /// durable here first: whoever put it there may not have come to the fsync of its directory, a
    /// power cut would take it away again, and a commit is never undone. A bucket is asked only
    /// when the coordinator has not answered, as each request costs.
    async fn sees_manifest(&self, step: u64, unanswered: bool, deadline: &Deadline) -> bool {
        let manifest = self.attempt.step(Step(step)).manifest();
        let backend = match &self.way {
            Way::Bucket(_, _) if !unanswered => return false,
            Way::Bucket(backend, _) => backend.clone(),
            Way::Direct | Way::Stream(_) => Backend::Directory,
        };
        let look = tokio::task::spawn_blocking(move || backend.settled(&manifest));
        matches!(deadline.bound(look).await, Some(Ok(Ok(true))))
    }

    /// True when the coordinator was inside rank 0, which has ended it.
    fn orphaned(&self) -> bool {
        let plan = &self.recording.plan;
        let embedded = plan.settings.coordinator.is_none();
        embedded && crate::rendezvous::Rendezvous::read(&plan.run_directory()).is_none()
    }

    /// On rank 0 with the coordinator inside: waits until every rank has closed the steps that it
    /// began, and no longer than the deadline, and names the ranks that have not.
    pub(crate) async fn settle_all(&mut self, embedded: &Embedded) {
        let settings = &self.recording.plan.settings;
        let (deadline, patience) =
            (self.deadline(), self.recording.patience.deadline(settings.join_deadline));
        let mut pause = FIRST_LOOK;
        let mut seen = Vec::new();
        while let Some(Ok(unsettled)) = deadline.bound(embedded.handle.unsettled()).await {
            // Other ranks of this host may still be writing, which is progress.
            let now: Vec<(String, u64)> = unsettled
                .iter()
                .map(|unsettled| (unsettled.missing.clone(), self.written(unsettled.step)))
                .collect();
            if std::mem::replace(&mut seen, now.clone()) != now {
                self.recording.patience.progressed();
            }
            let late = deadline.is_over();
            // A rank that has not entered while the whole job ran will not enter now.
            let hopeless = late || patience.is_over();
            let waits = unsettled.iter().any(|step| {
                let absent = hopeless && !step.never_joined.is_empty();
                !step.partial && !absent && !late
            });
            if !waits {
                for step in &unsettled {
                    let ours = self.waiting.remove(&step.step.0);
                    if ours {
                        self.lost(step.step.0, &step.missing);
                    }
                }
                break;
            }
            deadline.pause(pause).await;
            pause = (pause * 2).min(SLOWEST_LOOK);
        }
        self.settle().await;
    }

    /// Bytes of the files in a step's directory, finished or not; 0 where that cannot be seen.
    fn written(&self, step: Step) -> u64 {
        let entries = std::fs::read_dir(self.attempt.step(step).path);
        let length =
            |entry: std::io::Result<std::fs::DirEntry>| Some(entry.ok()?.metadata().ok()?.len());
        entries.into_iter().flatten().filter_map(length).sum()
    }
}

fn payload_bytes(file: &FileRecord) -> u64 {
    file.shards.iter().map(|shard| shard.length).sum()
}
