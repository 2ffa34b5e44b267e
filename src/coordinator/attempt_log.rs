//! One attempt with its journal: its state in memory, and the events that lead to it on disk.
//!
//! The events of a batch are checked and applied one after the other, so that each is checked
//! against the state after the ones before it. They become durable together and are then answered.
//! If the journal cannot be written, the state in memory is ahead of it, and nothing is answered
//! from it: a failed file poisons the attempt for good; a batch that a bucket refused is put again
//! with the same bytes before any other request is served.

use std::io;

use super::event::{Event, Opened};
use super::journal::{self, AppendError, Batch, Journal, JournalError};
use super::pulse::Pulse;
use super::recent::Recent;
use super::refusal::Refusal;
use super::state::{AttemptState, Outcome};
use crate::faults;
use crate::hash::TrustHash;
use crate::identity::{Attempt, Name, Step};
use crate::manifest::{Manifest, RunRecord};
use crate::store::layout::RUN_RECORD;
use crate::store::{AttemptDir, Backend};

/// An attempt that accepts events.
pub(crate) struct AttemptLog {
    pub(crate) directory: AttemptDir,
    pub(crate) state: AttemptState,
    /// How far its ranks are, from heartbeats; not journalled and therefore not part of the state.
    pub(crate) pulse: Pulse,
    backend: Backend,
    journal: Journal,
    recent: Recent,
    staged: Vec<Event>,
    stalled: Option<Stalled>,
    poisoned: Option<String>,
    run_record: Option<TrustHash>,
}

/// A batch that a bucket refused.
struct Stalled {
    batch: Batch,
    reason: String,
    tried_ms: u64,
}

/// Pause between two tries of a refused batch, because each try blocks all runs of this
/// coordinator.
const PAUSE_MS: u64 = 1000;

impl AttemptLog {
    /// A new attempt; nothing is on disk before the first flush.
    pub(crate) fn open(backend: Backend, directory: AttemptDir, opened: Opened) -> AttemptLog {
        let journal = Journal::begin(&backend, &directory.path);
        let staged = vec![Event::Opened(opened.clone())];
        AttemptLog { staged, ..AttemptLog::of(backend, directory, opened, journal) }
    }

    fn of(backend: Backend, directory: AttemptDir, opened: Opened, journal: Journal) -> AttemptLog {
        AttemptLog {
            state: AttemptState::new(opened),
            pulse: Pulse::default(),
            journal,
            recent: Recent::default(),
            backend,
            staged: Vec::new(),
            directory,
            stalled: None,
            poisoned: None,
            run_record: None,
        }
    }

    /// Loads an attempt; `None` if its launch died before any event was durable.
    pub(crate) fn load(
        backend: Backend,
        directory: AttemptDir,
    ) -> Result<Option<AttemptLog>, JournalError> {
        let path = directory.path.clone();
        let mut log: Option<AttemptLog> = None;
        let (torn_bytes, journal) = journal::load(&backend, &path, |batch| {
            let Batch { at_ms, events } = batch;
            events.into_iter().try_for_each(|event| match &mut log {
                Some(log) => log.apply_loaded(event, at_ms),
                None => {
                    let (opened, unread) = (opening(event)?, Journal::begin(&backend, &path));
                    log = Some(AttemptLog::of(backend.clone(), directory.clone(), opened, unread));
                    Ok(())
                }
            })
        })?;
        if torn_bytes > 0 {
            tracing::warn!(
                "the journal in {} ended in {torn_bytes} bytes that a crash cut off: they were never acknowledged and are dropped",
                path.display(),
            );
        }
        Ok(log.map(|log| AttemptLog { journal, ..log }))
    }

    /// Applies an event of the journal. If it completes a step whose manifest exists, marks that
    /// step as committed at once, so that its details can be released: the details of all steps of
    /// a long run do not fit into memory.
    fn apply_loaded(&mut self, event: Event, at_ms: u64) -> Result<(), String> {
        let step = event.step();
        self.apply_again(event, at_ms)?;
        step.into_iter().for_each(|step| self.take_up_committed(step));
        Ok(())
    }

    /// Applies one event of the journal. It passed the check before it was written: if it fails
    /// now, the journal was altered.
    fn apply_again(&mut self, event: Event, at_ms: u64) -> Result<(), String> {
        let outcome = self.state.check(&event).map_err(|refusal| refusal.to_string())?;
        if outcome == Outcome::New {
            self.state.apply(&event, at_ms);
        }
        Ok(())
    }

    /// Marks a complete step as committed if its manifest exists. If the store cannot say,
    /// [`Self::commit`] asks again.
    fn take_up_committed(&mut self, step: Step) {
        if !self.state.is_ready(step) || faults::seeded("commit-forgotten") {
            return;
        }
        let directory = self.directory.step(step);
        if self.backend.settled(&directory.manifest()).unwrap_or(false) {
            self.take_up(step);
        } else if self.state.files_of(step) > 0
            && self.backend.is_gone(&directory.path).unwrap_or(false)
        {
            // Its files were in the store when they were acknowledged, so that somebody has deleted
            // the step. Writing a manifest without them would make `replay` report a damaged step.
            let path = directory.path.display();
            tracing::info!("step {step} was deleted with all its files: {path} is not made again");
            self.state.set_committed(step);
            self.state.release(step);
        }
    }

    /// Marks a step as committed: its manifest exists.
    fn take_up(&mut self, step: Step) {
        self.state.set_committed(step);
        self.keep(step);
    }

    fn keep(&mut self, step: Step) {
        for old in self.recent.push(step, self.state.taken_by(step)) {
            self.state.release(old);
        }
    }

    /// Reads the details of a released step from its manifest, before an event or a question about
    /// it: a rank that missed an answer may repeat a request late.
    pub(crate) fn recall(&mut self, step: Step) -> Result<(), Refusal> {
        if !self.state.is_released(step) {
            return Ok(());
        }
        let path = self.directory.step(step).manifest();
        let refused = |why: String| {
            let path = path.display();
            Refusal::Storage(format!(
                "step {step} is committed, and what is said of it again cannot be held against \
                 {path}: {why}"
            ))
        };
        let bytes = self.backend.read(&path).map_err(|error| refused(error.to_string()))?;
        let manifest = Manifest::from_bytes(&bytes).map_err(|error| refused(error.to_string()))?;
        self.state.recall(step, &manifest).map_err(refused)?;
        self.keep(step);
        Ok(())
    }

    pub(crate) fn run(&self) -> &Name {
        &self.state.opened().run
    }

    pub(crate) fn attempt(&self) -> Attempt {
        self.directory.attempt
    }

    /// Refuses if the attempt cannot accept events for now or for good.
    pub(crate) fn usable(&self) -> Result<(), Refusal> {
        if let Some(reason) = &self.poisoned {
            return Err(Refusal::Poisoned {
                run: self.run().clone(),
                attempt: self.attempt(),
                reason: reason.clone(),
            });
        }
        match &self.stalled {
            None => Ok(()),
            Some(stalled) => Err(Refusal::Storage(stalled.reason.clone())),
        }
    }

    /// True while a refused batch waits to be put again.
    pub(crate) fn stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// Checks an event; if it is new, applies it and stages it for the next flush.
    pub(crate) fn submit(&mut self, event: Event, now_ms: u64) -> Result<(), Refusal> {
        self.usable()?;
        event.step().map_or(Ok(()), |step| self.recall(step))?;
        if self.state.check(&event)? == Outcome::New {
            self.state.check_quota(&event)?;
            self.state.apply(&event, now_ms);
            self.staged.push(event);
        }
        Ok(())
    }

    /// Writes the staged events durably, or tries a refused batch again.
    pub(crate) fn flush(&mut self, now_ms: u64) {
        if self.poisoned.is_some() {
            return;
        }
        let batch = match self.stalled.take() {
            Some(stalled) if now_ms < stalled.tried_ms.saturating_add(PAUSE_MS) => {
                self.stalled = Some(stalled);
                return;
            }
            // Nothing else is staged, because events are refused while a batch is stalled.
            Some(stalled) => stalled.batch,
            None if self.staged.is_empty() => return,
            None => Batch { at_ms: now_ms, events: std::mem::take(&mut self.staged) },
        };
        let path = self.directory.path.display();
        let state = &self.state;
        match self.journal.append_with(&batch, |event| state.text(event)) {
            Ok(()) => {}
            Err(AppendError::Again(error)) => {
                let reason = format!("the journal in {path} is not taken: {error}");
                tracing::warn!("{reason}; nothing is acknowledged until it is; trying again");
                self.stalled = Some(Stalled { batch, reason, tried_ms: now_ms });
            }
            Err(AppendError::Final(error)) => {
                let reason = format!("the journal in {path} could not be written: {error}");
                tracing::error!("{reason}; restart the coordinator once the store is well");
                self.poisoned = Some(reason);
            }
        }
    }

    /// Writes `run.json` if it does not exist, and returns the hash of the file.
    pub(crate) fn run_record(&mut self) -> Result<TrustHash, Refusal> {
        if let Some(hash) = self.run_record {
            return Ok(hash);
        }
        let path = self.directory.path.join(RUN_RECORD);
        let opened = self.state.opened();
        let record = RunRecord {
            format_version: opened.format_version,
            version: crate::VERSION.into(),
            run: opened.run.clone(),
            attempt: opened.attempt,
            world_size: opened.world_size,
            mesh: opened.mesh.clone(),
            started: opened.started_ms / 1000,
            versions: opened.versions.clone(),
        };
        let written = || -> io::Result<Vec<u8>> {
            self.backend.create(&path, &record.to_bytes())?;
            faults::point("run-record.read")?;
            self.backend.read(&path)
        };
        let bytes = written()
            .map_err(|error| Refusal::Storage(format!("{} of {}", error, path.display())))?;
        Ok(*self.run_record.insert(TrustHash::of(&bytes)))
    }

    /// Writes the manifests of complete steps. One that fails is tried again later.
    pub(crate) fn commit(&mut self) {
        // A manifest must not contain events that are not durable in the journal: staged ones may
        // still be lost.
        if self.usable().is_err() || !self.staged.is_empty() {
            return;
        }
        for step in self.state.uncommitted() {
            match self.write_manifest(step) {
                Ok(()) => {
                    self.take_up(step);
                    self.state.trouble.clear();
                    let (run, attempt) = (self.run(), self.attempt());
                    tracing::info!("run {run} attempt {attempt} step {step}: committed");
                }
                Err(error) => {
                    let path = self.directory.step(step).manifest();
                    let trouble = format!("{} could not be written: {error}", path.display());
                    tracing::error!("{trouble}; will try again");
                    self.state.trouble = trouble;
                }
            }
        }
    }

    fn write_manifest(&self, step: Step) -> io::Result<()> {
        let directory = self.directory.step(step);
        // After a restart most manifests exist: creating each only to find its name taken would
        // delay the ranks of a long run. `settled` also syncs the directory, in case the
        // coordinator was killed before that.
        if self.backend.settled(&directory.manifest())? {
            return Ok(());
        }
        let Some(manifest) = self.state.manifest(step) else {
            return Ok(());
        };
        faults::point("commit.manifest")?;
        self.backend.create(&directory.manifest(), &manifest)?;
        faults::pass("commit.done");
        Ok(())
    }
}

/// The first event of a journal, which must be `Opened`.
fn opening(event: Event) -> Result<Opened, String> {
    match event {
        Event::Opened(opened) if opened.format_version > crate::FORMAT_VERSION => Err(format!(
            "it has format version {}, this backtape reads up to {}",
            opened.format_version,
            crate::FORMAT_VERSION
        )),
        Event::Opened(opened) => Ok(opened),
        _ => Err("it does not begin with the opening of its attempt".into()),
    }
}
