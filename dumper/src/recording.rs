//! One rank's recording: what the job's threads, the recorder's thread, the heartbeat and the
//! thread that shows that rank 0 lives all work on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::error::RecorderError;
use crate::omissions;
use crate::patience::Patience;
use crate::queue::Queue;
use crate::ring::Ring;
use crate::scalars;
use crate::schedule::Schedule;
use crate::settings::Plan;
use crate::summary::Summary;

/// What one rank records and how far it is. Each part has a lock of its own.
pub(crate) struct Recording {
    /// The settings, which do not change.
    pub(crate) plan: Plan,
    /// Shards and ends of steps on their way from the job to the recorder's thread.
    pub(crate) queue: Queue,
    /// Rows of scalars on the same way.
    pub(crate) scalars: scalars::Buffer,
    /// Which steps are recorded.
    pub(crate) schedule: Schedule,
    /// The last steps that nobody has selected.
    pub(crate) ring: Ring,
    /// How long whoever closes the recorder waits for it.
    pub(crate) patience: Arc<Patience>,
    /// Signalled when the heartbeat should not wait for its time.
    pub(crate) wake: Notify,
    /// What the coordinator has yet to be told that a watched number showed.
    finding: Mutex<Option<Finding>>,
    summary: Mutex<Summary>,
}

/// The step at which a watched number was wrong, and how.
pub(crate) type Finding = (u64, String);

/// Locks. A thread that panicked while it held the lock left plain data behind, which the others
/// go on with.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recording {
    /// A recording that has not begun.
    pub(crate) fn new(plan: Plan) -> Recording {
        let settings = &plan.settings;
        let (watches, ring) = (settings.watches(), settings.ring_steps > 0);
        Recording {
            queue: Queue::new(settings.queue_bytes),
            scalars: scalars::Buffer::default(),
            schedule: Schedule::new(settings.rank, settings.selection.clone(), watches, ring),
            ring: Ring::new(settings.ring_steps, settings.ring_bytes),
            patience: Patience::new(settings.close_patience),
            wake: Notify::new(),
            finding: Mutex::default(),
            summary: Mutex::default(),
            plan,
        }
    }

    /// Whose recording it is.
    pub(crate) fn rank(&self) -> u32 {
        self.plan.settings.rank
    }

    /// What was done so far.
    pub(crate) fn summary(&self) -> MutexGuard<'_, Summary> {
        lock(&self.summary)
    }

    /// Notes that a step's manifest stands at its final name.
    pub(crate) fn committed(&self, step: u64) {
        self.summary().steps_committed.insert(step);
    }

    /// Notes what went wrong: strict calls return it, and the summary always has it.
    pub(crate) fn fault(&self, sentence: impl Into<String>) {
        let sentence = sentence.into();
        tracing::warn!(rank = self.rank(), "{sentence}");
        self.summary().fault(sentence);
    }

    /// Notes what is not recorded of a step, and why.
    pub(crate) fn omitted(&self, step: u64, tensor: &str, microbatch: Option<u32>, reason: &str) {
        let sentence = omissions::sentence(step, tensor, microbatch, reason);
        self.summary().omitted(sentence);
    }

    /// Notes what the coordinator asked for, and what became of it.
    pub(crate) fn ordered(&self, sentence: String) {
        tracing::info!(rank = self.rank(), "{sentence}");
        self.summary().ordered(sentence);
    }

    /// A watched number is wrong: the heartbeat tells the coordinator at once. Of several findings
    /// that it was not told of, the first one is kept: there the trouble began.
    pub(crate) fn note_finding(&self, step: u64, reason: String) {
        lock(&self.finding).get_or_insert((step, reason));
        self.wake.notify_one();
    }

    /// The finding that the coordinator is to be told of; it stays until [`Recording::forget_finding`].
    pub(crate) fn finding(&self) -> Option<Finding> {
        lock(&self.finding).clone()
    }

    /// The coordinator has answered to this finding.
    pub(crate) fn forget_finding(&self, finding: &Finding) {
        let mut pending = lock(&self.finding);
        if pending.as_ref() == Some(finding) {
            *pending = None;
        }
    }

    /// Nothing more comes from the job.
    pub(crate) fn close(&self) {
        self.scalars.close();
        self.patience.close();
        self.queue.close();
        self.wake.notify_one();
    }

    /// In strict mode, the first fault so far.
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
