//! The recorder and its tapes: what the training thread touches. Nothing here
//! does I/O; everything slow happens on the recorder's own thread.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backtape::head::HeadDeclaration;
use backtape::scalars::Row;

use crate::capture::Capture;
use crate::error::RecorderError;
use crate::omissions::{self, Omissions};
use crate::queue::{Command, Queue, Refused};
use crate::scalars;
use crate::settings::{Plan, Settings};
use crate::summary::Summary;
use crate::worker;

/// Omissions and faults that a summary names: a log line, not a database.
const MAX_SENTENCES: usize = 1000;

/// What the closing thread grants the background beyond its own deadlines, to
/// say itself what it was waiting for.
const CLOSE_MARGIN: Duration = Duration::from_secs(5);

/// Records chosen steps of one rank.
pub struct Recorder {
    shared: Arc<Shared>,
    taken: Mutex<BTreeSet<u64>>,
    closed: bool,
}

/// The recording of one step.
pub struct Tape {
    shared: Arc<Shared>,
    step: u64,
    state: Mutex<TapeState>,
}

#[derive(Default)]
struct TapeState {
    head: Option<Box<HeadDeclaration>>,
    omissions: Omissions,
    closed: bool,
}

/// What both threads see.
pub(crate) struct Shared {
    pub(crate) plan: Plan,
    pub(crate) queue: Queue,
    pub(crate) scalars: scalars::Buffer,
    summary: Mutex<Summary>,
}

/// A panic while the lock was held left plain data behind: go on with it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn rank(&self) -> u32 {
        self.plan.settings.rank
    }

    pub(crate) fn summary(&self) -> MutexGuard<'_, Summary> {
        lock(&self.summary)
    }

    /// Notes what went wrong; strict calls return it, close always names it.
    pub(crate) fn fault(&self, sentence: impl Into<String>) {
        let sentence = sentence.into();
        tracing::warn!(rank = self.rank(), "{sentence}");
        let mut summary = self.summary();
        if summary.faults.len() < MAX_SENTENCES && !summary.faults.contains(&sentence) {
            summary.faults.push(sentence);
        }
    }

    pub(crate) fn omitted(&self, step: u64, tensor: &str, microbatch: Option<u32>, reason: &str) {
        let mut summary = self.summary();
        if summary.omissions.len() < MAX_SENTENCES {
            let sentence = omissions::sentence(step, tensor, microbatch, reason);
            summary.omissions.push(sentence);
        }
    }

    /// In strict mode, the first fault of the background.
    fn strict_check(&self) -> Result<(), RecorderError> {
        if !self.plan.settings.strict {
            return Ok(());
        }
        match self.summary().faults.first() {
            None => Ok(()),
            Some(fault) => Err(RecorderError::Faulty { rank: self.rank(), detail: fault.clone() }),
        }
    }
}

impl Recorder {
    /// Checks the settings and starts the background thread. Does not wait for
    /// the coordinator: that is looked for in the background.
    pub fn start(settings: Settings) -> Result<Recorder, RecorderError> {
        let plan = settings.validate()?;
        let rank = plan.settings.rank;
        let shared = Arc::new(Shared {
            queue: Queue::new(plan.settings.queue_bytes),
            plan,
            scalars: scalars::Buffer::default(),
            summary: Mutex::default(),
        });
        worker::spawn(shared.clone()).map_err(|problem| RecorderError::Thread { rank, problem })?;
        Ok(Recorder { shared, taken: Mutex::default(), closed: false })
    }

    /// True when this step is to be recorded and was not yet.
    pub fn wants(&self, step: u64) -> bool {
        let selected = self.shared.plan.settings.steps.contains(step);
        selected && !self.closed && !lock(&self.taken).contains(&step)
    }

    /// Opens the tape of a step; one tape for each step.
    pub fn step(&self, step: u64) -> Result<Tape, RecorderError> {
        let rank = self.shared.rank();
        if self.closed {
            return Err(RecorderError::Closed { rank });
        }
        if !self.shared.plan.settings.steps.contains(step) {
            return Err(RecorderError::NotSelected { step });
        }
        self.shared.strict_check()?;
        if !lock(&self.taken).insert(step) {
            return Err(RecorderError::AlreadyRecorded { step, rank });
        }
        Ok(Tape { shared: self.shared.clone(), step, state: Mutex::default() })
    }

    /// Hands the scalars of a step to the background: any step, recorded or not. Never
    /// waits; rows beyond what the buffer holds are dropped and counted.
    pub fn scalars(&self, row: Row) -> Result<(), RecorderError> {
        if self.closed {
            return Err(RecorderError::Closed { rank: self.shared.rank() });
        }
        let (row, left_out) = row.bounded();
        if left_out > 0 {
            self.shared.fault(scalars::nameless(self.shared.rank()));
        }
        self.shared.scalars.push(row);
        self.shared.strict_check()
    }

    /// Waits, bounded by the join and step deadlines, until everything is
    /// durable and every step recorded here is committed or known not to be.
    /// Closing again returns the same summary.
    pub fn close(&mut self) -> Result<Summary, RecorderError> {
        let settings = &self.shared.plan.settings;
        if !self.closed {
            self.closed = true;
            self.shared.scalars.close();
            self.shared.queue.close();
            let patience = settings.join_deadline + settings.step_deadline + CLOSE_MARGIN;
            if !self.shared.queue.wait_end(Instant::now() + patience) {
                self.shared.fault(format!(
                    "rank {} did not finish writing within {} s: the disk or the coordinator hangs",
                    settings.rank,
                    patience.as_secs()
                ));
            }
        }
        self.shared.strict_check()?;
        Ok(self.summary())
    }

    /// What was done so far.
    pub fn summary(&self) -> Summary {
        self.shared.summary().clone()
    }
}

/// A recorder that was not closed gives the background one call cap to end.
impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.closed {
            self.shared.scalars.close();
            self.shared.queue.close();
            let patience = self.shared.plan.settings.call_cap;
            self.shared.queue.wait_end(Instant::now() + patience);
        }
    }
}

impl Tape {
    /// Which step this is.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Declares the loss head of this step. The same declaration again is fine.
    pub fn head(&self, declaration: HeadDeclaration) -> Result<(), RecorderError> {
        if !survives_json(&declaration) {
            return Err(RecorderError::HeadNotFinite { step: self.step, rank: self.shared.rank() });
        }
        let mut state = lock(&self.state);
        match &state.head {
            Some(first) if **first != declaration => {
                Err(RecorderError::HeadDisagrees { step: self.step, rank: self.shared.rank() })
            }
            _ => {
                state.head = Some(Box::new(declaration));
                Ok(())
            }
        }
    }

    /// Hands one shard to the background. An error means that the shard is not
    /// in the dump; the step's close reports it with its reason.
    pub fn record(&self, capture: Capture) -> Result<(), RecorderError> {
        let (tensor, microbatch) = (capture.tensor.clone(), capture.microbatch);
        let queue = &self.shared.queue;
        let cap = self.shared.plan.settings.call_cap;
        let queued = capture.check().map_err(Refused::Full);
        match queued.and_then(|queued| queue.push_capture(self.step, queued, cap)) {
            Ok(()) => self.shared.strict_check(),
            Err(Refused::Closed) => Err(self.closed()),
            Err(Refused::Full(reason)) => {
                self.omit(&tensor, microbatch, reason.clone());
                Err(RecorderError::Omitted {
                    tensor,
                    step: self.step,
                    rank: self.shared.rank(),
                    reason,
                })
            }
        }
    }

    /// Says that a tensor is not recorded, and why, so that it is not silently absent.
    pub fn omit(&self, tensor: &str, microbatch: Option<u32>, reason: String) {
        lock(&self.state).omissions.add(tensor, microbatch, &reason);
        self.shared.omitted(self.step, tensor, microbatch, &reason);
    }

    /// Ends the step; returns at once, the background reports and closes it.
    pub fn close(self) -> Result<(), RecorderError> {
        let command = {
            let mut state = lock(&self.state);
            state.closed = true;
            let omissions = std::mem::take(&mut state.omissions);
            Command::Close(self.step, state.head.take(), omissions)
        };
        match self.shared.queue.push_end(command) {
            Ok(()) => self.shared.strict_check(),
            Err(Refused::Closed) => Err(self.closed()),
            Err(Refused::Full(detail)) => {
                Err(RecorderError::Faulty { rank: self.shared.rank(), detail })
            }
        }
    }

    fn closed(&self) -> RecorderError {
        RecorderError::Closed { rank: self.shared.rank() }
    }
}

/// JSON has no NaN and no infinity: they would come back as absent options.
fn survives_json(declaration: &HeadDeclaration) -> bool {
    let bytes = serde_json::to_vec(declaration).ok();
    let back = bytes.and_then(|bytes| serde_json::from_slice::<HeadDeclaration>(&bytes).ok());
    back.as_ref() == Some(declaration)
}

/// A tape that was dropped (the step raised, say) leaves its step partial:
/// what was captured is kept, but nobody said that it was all.
impl Drop for Tape {
    fn drop(&mut self) {
        if !lock(&self.state).closed {
            let _ = self.shared.queue.push_end(Command::Abandon(self.step));
        }
    }
}
