//! The recorder: what the training thread touches. Nothing here does I/O;
//! everything slow happens on the recorder's own thread.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backtape::scalars::Row;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::RecorderError;
use crate::omissions::{self, Omissions};
use crate::patience::Patience;
use crate::queue::{Command, Ending, Queue};
use crate::ring::{Dropped, Ring};
use crate::scalars;
use crate::schedule::{Course, Schedule};
use crate::settings::{Plan, Settings};
use crate::summary::Summary;
use crate::tape::Tape;
use crate::watch::Watch;
use crate::worker;

/// Records chosen steps of one rank.
pub struct Recorder {
    shared: Arc<Shared>,
    watch: Mutex<Watch>,
    closed: bool,
}

/// What both threads see.
pub(crate) struct Shared {
    pub(crate) plan: Plan,
    pub(crate) queue: Queue,
    pub(crate) scalars: scalars::Buffer,
    pub(crate) schedule: Schedule,
    pub(crate) ring: Ring,
    /// What went wrong here and was not yet told to the coordinator.
    report: Mutex<Option<(u64, String)>>,
    /// How long whoever closes the recorder waits for it.
    pub(crate) patience: Arc<Patience>,
    /// Signalled when the heartbeat should not wait for its time.
    pub(crate) wake: Notify,
    summary: Mutex<Summary>,
}

/// A panic while the lock was held left plain data behind: go on with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn rank(&self) -> u32 {
        self.plan.settings.rank
    }

    pub(crate) fn summary(&self) -> MutexGuard<'_, Summary> {
        lock(&self.summary)
    }

    /// A manifest stands at its final name.
    pub(crate) fn committed(&self, step: u64) {
        self.summary().steps_committed.insert(step);
    }

    /// Notes what went wrong; strict calls return it, close always names it.
    pub(crate) fn fault(&self, sentence: impl Into<String>) {
        let sentence = sentence.into();
        tracing::warn!(rank = self.rank(), "{sentence}");
        self.summary().fault(sentence);
    }

    pub(crate) fn omitted(&self, step: u64, tensor: &str, microbatch: Option<u32>, reason: &str) {
        let sentence = omissions::sentence(step, tensor, microbatch, reason);
        self.summary().omitted(sentence);
    }

    /// What the coordinator asked for, for the summary.
    pub(crate) fn ordered(&self, sentence: String) {
        tracing::info!(rank = self.rank(), "{sentence}");
        self.summary().ordered(sentence);
    }

    /// What is to be reported next; it stays until [`Shared::reported`].
    pub(crate) fn report(&self) -> Option<(u64, String)> {
        lock(&self.report).clone()
    }

    /// The report was answered.
    pub(crate) fn reported(&self, report: &(u64, String)) {
        let mut pending = lock(&self.report);
        if pending.as_ref() == Some(report) {
            *pending = None;
        }
    }

    /// No more will come from the training thread.
    fn close(&self) {
        self.patience.close();
        self.queue.close();
        self.wake.notify_one();
    }

    /// In strict mode, the first fault of the background.
    pub(crate) fn strict_check(&self) -> Result<(), RecorderError> {
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
        let settings = &plan.settings;
        let (watches, ring) = (settings.watches(), settings.ring_steps > 0);
        let watch = Mutex::new(Watch::new(settings.conditions));
        let shared = Arc::new(Shared {
            queue: Queue::new(settings.queue_bytes),
            schedule: Schedule::new(rank, settings.selection.clone(), watches, ring),
            ring: Ring::new(settings.ring_steps, settings.ring_bytes),
            patience: Patience::new(settings.close_patience),
            report: Mutex::default(),
            wake: Notify::new(),
            plan,
            scalars: scalars::Buffer::default(),
            summary: Mutex::default(),
        });
        worker::spawn(shared.clone()).map_err(|problem| RecorderError::Thread { rank, problem })?;
        Ok(Recorder { shared, watch, closed: false })
    }

    /// True when this step has something to record here and was not yet. Of a
    /// step that is recorded by other ranks alone, this rank's empty part is closed.
    pub fn wants(&self, step: u64) -> bool {
        if self.closed {
            return false;
        }
        let shared = &self.shared;
        match shared.schedule.look(step) {
            Course::Record(_) | Course::Hold(_) => true,
            Course::Pass => false,
            Course::Empty(selection) => {
                if shared.schedule.take(step) {
                    let (head, omissions) = (None, Omissions::default());
                    let ending = Ending { head, omissions, selection, late: false };
                    // Refused when recording was given up, which is said elsewhere.
                    let _ = shared.queue.push_end(Command::Close(step, Box::new(ending)));
                }
                false
            }
            Course::HoldEmpty(selection) => {
                if shared.schedule.hold(step) {
                    shared.ring.begin(step, selection, true);
                }
                false
            }
        }
    }

    /// Opens the tape of a step; one tape for each step.
    pub fn step(&self, step: u64) -> Result<Tape, RecorderError> {
        let rank = self.shared.rank();
        if self.closed {
            return Err(RecorderError::Closed { rank });
        }
        self.shared.strict_check()?;
        let schedule = &self.shared.schedule;
        match schedule.look(step) {
            Course::Record(selection) if schedule.take(step) => {
                Ok(Tape::new(self.shared.clone(), step, selection, false))
            }
            Course::Hold(selection) if schedule.hold(step) => {
                self.shared.ring.begin(step, selection.clone(), false);
                Ok(Tape::new(self.shared.clone(), step, selection, true))
            }
            Course::Pass if !schedule.is_taken(step) => Err(RecorderError::NotSelected { step }),
            Course::Empty(_) | Course::HoldEmpty(_) => Err(RecorderError::NotSelected { step }),
            _ => Err(RecorderError::AlreadyRecorded { step, rank }),
        }
    }

    /// Looks at numbers of a step that is over, or nearly so, and triggers a
    /// recording on every rank when they are not what the conditions allow.
    pub fn watch(&self, step: u64, loss: Option<f64>, grad_norm: Option<f64>) {
        if self.closed || !self.shared.plan.settings.watches() {
            return;
        }
        if let Some(reason) = lock(&self.watch).judge(loss, grad_norm) {
            // The first of several that were not told yet is where it began.
            lock(&self.shared.report).get_or_insert((step, reason));
            self.shared.wake.notify_one();
        }
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

    /// Waits until everything is durable and every step recorded here is committed or known not
    /// to be; `close_patience` at most after the last thing that got done. Closing again returns
    /// the same summary.
    pub fn close(&mut self) -> Result<Summary, RecorderError> {
        let shared = &self.shared;
        if !self.closed {
            self.closed = true;
            shared.scalars.close();
            shared.close();
            let ended = shared.queue.wait_end(|| shared.patience.end());
            self.note_ring();
            if !ended {
                let open = shared.summary().unfinished(&shared.schedule.taken());
                let hangs = "the disk or the coordinator hangs".to_string();
                shared.fault(format!(
                    "rank {} did not finish writing: nothing got done for {} s (close_patience_s): \
                     {}; {}",
                    shared.rank(),
                    shared.patience.longest().as_secs_f64(),
                    shared.patience.outage().unwrap_or(hangs),
                    open.as_deref().unwrap_or("every step had come to its end")
                ));
            }
        }
        self.shared.strict_check()?;
        Ok(self.summary())
    }

    /// What has not worked for some seconds, though it may yet, as one sentence: a coordinator
    /// that does not answer. Takes no time.
    pub fn trouble(&self) -> Option<String> {
        self.shared.patience.trouble()
    }

    /// Gives the ring's memory back and says what it could not keep.
    fn note_ring(&self) {
        if let Some(Dropped { first, last, count }) = self.shared.ring.dropped() {
            self.shared.summary().ring_dropped = count;
            self.shared.ordered(format!(
                "{count} steps, {first} to {last}, fell out of the ring of {} bytes before their time: \
                 raise ring_bytes, or select fewer tensors",
                self.shared.plan.settings.ring_bytes
            ));
        }
        self.shared.ring.clear();
    }

    /// What was done so far.
    pub fn summary(&self) -> Summary {
        self.shared.summary().clone().told()
    }
}

/// A recorder that was not closed gives the background one call cap to end.
impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.closed {
            self.shared.scalars.close();
            self.shared.close();
            let end = Instant::now() + self.shared.plan.settings.call_cap;
            self.shared.queue.wait_end(|| Some(end));
        }
    }
}
