//! The recorder as the job's own threads call it. Nothing here reads or writes a disk or a socket,
//! and nothing waits for one longer than its cap: that is the part of the recorder's own thread
//! (`worker`).

use std::sync::{Arc, Mutex};

use backtape::scalars::Row;
use tokio::time::Instant;

use crate::error::RecorderError;
use crate::queue::{Command, Ending};
use crate::recording::{Recording, lock};
use crate::ring::Dropped;
use crate::scalars;
use crate::schedule::Course;
use crate::settings::Settings;
use crate::summary::Summary;
use crate::tape::Tape;
use crate::watch::Watch;
use crate::worker;

/// Records chosen steps of one rank.
pub struct Recorder {
    recording: Arc<Recording>,
    watch: Mutex<Watch>,
    closed: bool,
}

impl Recorder {
    /// Checks the settings and starts the recorder's thread, which looks for the coordinator: this
    /// call does not wait for it.
    pub fn start(settings: Settings) -> Result<Recorder, RecorderError> {
        let recording = Arc::new(Recording::new(settings.validate()?));
        let rank = recording.rank();
        let watch = Mutex::new(Watch::new(recording.plan.settings.conditions));
        let started = worker::spawn(recording.clone());
        started.map_err(|problem| RecorderError::Thread { rank, problem })?;
        Ok(Recorder { recording, watch, closed: false })
    }

    /// True when this rank has something to record of a step and has not yet done so. Of a step
    /// that other ranks alone record, this rank's empty part is closed here.
    pub fn wants(&self, step: u64) -> bool {
        if self.closed {
            return false;
        }
        let Recording { schedule, queue, ring, .. } = &*self.recording;
        match schedule.look(step) {
            Course::Record(_) | Course::Hold(_) => true,
            Course::Pass => false,
            Course::Empty(selection) => {
                if schedule.take(step) {
                    let ending = Box::new(Ending::empty(selection));
                    // It is refused where recording was given up, which is said elsewhere.
                    let _ = queue.push_end(Command::Close(step, ending));
                }
                false
            }
            Course::HoldEmpty(selection) => {
                if schedule.hold(step) {
                    ring.begin(step, selection, true);
                }
                false
            }
        }
    }

    /// Opens the tape of a step; there is one tape for each step.
    pub fn step(&self, step: u64) -> Result<Tape, RecorderError> {
        let rank = self.recording.rank();
        if self.closed {
            return Err(RecorderError::Closed { rank });
        }
        self.recording.strict_check()?;
        let Recording { schedule, ring, .. } = &*self.recording;
        match schedule.look(step) {
            Course::Record(selection) if schedule.take(step) => {
                Ok(Tape::new(self.recording.clone(), step, selection, false))
            }
            Course::Hold(selection) if schedule.hold(step) => {
                ring.begin(step, selection.clone(), false);
                Ok(Tape::new(self.recording.clone(), step, selection, true))
            }
            Course::Pass if !schedule.is_taken(step) => Err(RecorderError::NotSelected { step }),
            Course::Empty(_) | Course::HoldEmpty(_) => Err(RecorderError::NotSelected { step }),
            _ => Err(RecorderError::AlreadyRecorded { step, rank }),
        }
    }

    /// Looks at numbers of a step that is over, or nearly so, and has every rank record where they
    /// are not what the conditions allow.
    pub fn watch(&self, step: u64, loss: Option<f64>, grad_norm: Option<f64>) {
        if self.closed || !self.recording.plan.settings.watches() {
            return;
        }
        let trigger = lock(&self.watch).judge(loss, grad_norm);
        if let Some(reason) = trigger {
            self.recording.note_finding(step, reason);
        }
    }

    /// Hands the scalars of a step, recorded or not, to the recorder's thread. Never waits; rows
    /// beyond what the buffer holds are dropped and counted.
    pub fn scalars(&self, row: Row) -> Result<(), RecorderError> {
        if self.closed {
            return Err(RecorderError::Closed { rank: self.recording.rank() });
        }
        let (row, left_out) = row.bounded();
        if left_out > 0 {
            self.recording.fault(scalars::nameless(self.recording.rank()));
        }
        self.recording.scalars.push(row);
        self.recording.strict_check()
    }

    /// Waits until everything is durable and every step recorded here is committed or known not
    /// to be; `close_patience` at most after the last thing that got done. Closing again returns
    /// the same summary.
    pub fn close(&mut self) -> Result<Summary, RecorderError> {
        if !self.closed {
            self.closed = true;
            self.recording.close();
            let ended = self.recording.queue.wait_end(|| self.recording.patience.end());
            self.empty_ring();
            if !ended {
                self.note_unfinished();
            }
        }
        self.recording.strict_check()?;
        Ok(self.summary())
    }

    /// What has not worked for some seconds, though it may yet, as one sentence: a coordinator
    /// that does not answer. Takes no time.
    pub fn trouble(&self) -> Option<String> {
        self.recording.patience.trouble()
    }

    /// What was done so far.
    pub fn summary(&self) -> Summary {
        self.recording.summary().clone().finished()
    }

    /// Gives the ring's memory back and says what it could not keep.
    fn empty_ring(&self) {
        let recording = &self.recording;
        if let Some(Dropped { first, last, count }) = recording.ring.dropped() {
            recording.summary().ring_dropped = count;
            recording.ordered(format!(
                "{count} steps, {first} to {last}, fell out of the ring of {} bytes before their time: \
                 raise ring_bytes, or select fewer tensors",
                recording.plan.settings.ring_bytes
            ));
        }
        recording.ring.clear();
    }

    /// Says why this call waits no longer, and which steps have not come to their end.
    fn note_unfinished(&self) {
        let recording = &self.recording;
        let open = recording.summary().unfinished(&recording.schedule.taken());
        let hangs = "the disk or the coordinator hangs".to_string();
        recording.fault(format!(
            "rank {} did not finish writing: nothing got done for {} s (close_patience_s): {}; {}",
            recording.rank(),
            recording.patience.longest().as_secs_f64(),
            recording.patience.outage().unwrap_or(hangs),
            open.as_deref().unwrap_or("every step had come to its end")
        ));
    }
}

/// A recorder that was not closed leaves its thread `call_cap` to come to its end.
impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.closed {
            self.recording.close();
            let end = Instant::now() + self.recording.plan.settings.call_cap;
            self.recording.queue.wait_end(|| Some(end));
        }
    }
}
