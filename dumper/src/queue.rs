//! The queue between the training thread and the recorder's own: bounded in
//! bytes, and bounded in how long it holds anyone up.
//!
//! What comes close together is worked off after it: hashing and writing take the memory's
//! bandwidth, and a core, from the copies that the training thread is making at that moment.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backtape::faults;
use backtape::head::HeadDeclaration;
use backtape::selection::Selection;
use tokio::sync::Notify;

use crate::capture::Queued;
use crate::omissions::Omissions;

/// Charged for each capture beside its payload, so that a million scalars
/// cannot grow the queue without bound.
pub(crate) const CAPTURE_OVERHEAD_BYTES: u64 = 1024;

/// The training thread has made its captures, for now, when none came for so long.
const PAUSE: Duration = Duration::from_millis(20);

/// How often a thread that waits for the end looks whether that has moved.
const LOOK: Duration = Duration::from_millis(200);

/// So many captures that wait are small ones. Copying them takes the interpreter's time and not
/// the memory's, so they are worked off beside it; left to the end they would take longer.
const MANY: usize = 256;

/// What the training thread asks of the background.
pub(crate) enum Command {
    /// Write this shard.
    Capture(u64, Box<Queued>),
    /// Nothing more comes for the step: report and close it.
    Close(u64, Box<Ending>),
    /// Write what the ring holds of a step, and close it.
    Ring(u64),
    /// The tape was dropped: keep what is there, but do not close the step.
    Abandon(u64),
}

/// What is said of a step when it is closed.
pub(crate) struct Ending {
    pub(crate) head: Option<Box<HeadDeclaration>>,
    pub(crate) omissions: Omissions,
    /// What this rank was asked for.
    pub(crate) selection: Arc<Selection>,
    /// True where this rank heard of the step too late to begin it.
    pub(crate) late: bool,
}

/// Why a capture did not enter the queue.
pub(crate) enum Refused {
    /// There is no room now, or the background takes nothing more.
    Full(String),
    /// It could never be taken.
    Unfit(String),
    Closed,
}

pub(crate) struct Queue {
    limit_bytes: u64,
    state: Mutex<State>,
    /// Signalled when bytes are released or the background ends.
    changed: Condvar,
    /// Signalled when a command arrives or no more will.
    ready: Notify,
}

#[derive(Default)]
struct State {
    commands: VecDeque<Command>,
    /// Bytes queued or being written.
    bytes: u64,
    /// Commands that are no captures, and when the last capture came.
    ends: usize,
    last: Option<Instant>,
    /// The training thread waits for room.
    waits: bool,
    /// A wait for room ran out; nobody waits again before some is made, so
    /// that a hung disk costs one call cap and not one for every capture.
    stalled: bool,
    closing: bool,
    /// Why the background takes nothing more.
    dead: Option<String>,
    ended: bool,
}

impl Queue {
    pub(crate) fn new(limit_bytes: u64) -> Queue {
        Queue {
            limit_bytes,
            state: Mutex::default(),
            changed: Condvar::new(),
            ready: Notify::new(),
        }
    }

    /// A panic while the lock was held left plain data behind: go on with it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a capture; waits for room, but never longer than `patience`.
    pub(crate) fn push_capture(
        &self,
        step: u64,
        capture: Queued,
        patience: Duration,
    ) -> Result<(), Refused> {
        let cost = capture.length.saturating_add(CAPTURE_OVERHEAD_BYTES);
        let (limit, length) = (self.limit_bytes, capture.length);
        if cost > limit {
            return Err(Refused::Unfit(format!(
                "its {length} bytes do not fit the queue of {limit} bytes: raise queue_bytes"
            )));
        }
        let unbounded = faults::seeded("unbounded-queue");
        let full = |state: &State| !unbounded && state.bytes.saturating_add(cost) > limit;
        let mut state = self.lock();
        if full(&state) && !state.stalled && !state.closing && state.dead.is_none() {
            let wait = |state: &mut State| full(state) && !state.closing && state.dead.is_none();
            state.waits = true;
            self.ready.notify_one();
            let waited = self.changed.wait_timeout_while(state, patience, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.stalled = full(&state);
            state.waits = false;
        }
        if state.closing {
            return Err(Refused::Closed);
        }
        if let Some(reason) = &state.dead {
            return Err(Refused::Full(reason.clone()));
        }
        if full(&state) {
            let held = state.bytes;
            return Err(Refused::Full(format!(
                "the queue holds {held} of {limit} bytes and its {length} bytes did not fit \
                 within {} ms: raise queue_bytes, or record fewer tensors",
                patience.as_millis()
            )));
        }
        state.bytes += cost;
        state.commands.push_back(Command::Capture(step, Box::new(capture)));
        state.last = Some(Instant::now());
        // Else the background looks by itself, after the pause.
        if state.commands.len() == 1 || state.pause(limit).is_none() {
            self.ready.notify_one();
        }
        Ok(())
    }

    /// Queues the end of a step. Never waits: there is at most one for each step.
    pub(crate) fn push_end(&self, command: Command) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.closing {
            return Err(Refused::Closed);
        }
        if let Some(reason) = &state.dead {
            return Err(Refused::Full(reason.clone()));
        }
        state.push_end(command);
        self.ready.notify_one();
        Ok(())
    }

    /// Queues what the coordinator asked for, also while the recorder is being
    /// closed: a step that went wrong is often the last. At most as many come
    /// as the ring has steps and a late rank is told of.
    pub(crate) fn push_order(&self, command: Command) {
        let mut state = self.lock();
        if state.dead.is_none() {
            state.push_end(command);
            self.ready.notify_one();
        }
    }

    /// The next command; `None` once closed and empty. Cancel-safe: a command
    /// is taken only in the poll that returns it.
    pub(crate) async fn next(&self) -> Option<Command> {
        loop {
            let pause = {
                let mut state = self.lock();
                let pause = state.pause(self.limit_bytes);
                if pause.is_none() {
                    if let Some(command) = state.pop() {
                        return Some(command);
                    }
                    if state.closing {
                        return None;
                    }
                }
                pause
            };
            match pause {
                None => self.ready.notified().await,
                // Whether it ran out or something came: looked at again.
                Some(pause) => {
                    let _ = tokio::time::timeout(pause, self.ready.notified()).await;
                }
            }
        }
    }

    /// Returns a capture's share of the budget, once its payload is dropped.
    pub(crate) fn release(&self, length: u64) {
        let mut state = self.lock();
        state.bytes = state.bytes.saturating_sub(length.saturating_add(CAPTURE_OVERHEAD_BYTES));
        state.stalled = false;
        drop(state);
        self.changed.notify_all();
    }

    /// No more commands will come from the training thread.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
        self.ready.notify_one();
    }

    /// Recording is given up: later captures are refused at once with this
    /// reason. What is still queued comes back to be named.
    pub(crate) fn kill(&self, reason: &str) -> VecDeque<Command> {
        let mut state = self.lock();
        state.dead.get_or_insert_with(|| reason.to_string());
        state.bytes = 0;
        let rest = std::mem::take(&mut state.commands);
        state.ends = 0;
        drop(state);
        self.changed.notify_all();
        rest
    }

    /// The background has done all it will do.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits until the background has ended; false when it has not in time. Until when is asked
    /// for again and again: it may move.
    pub(crate) fn wait_end(&self, end: impl Fn() -> Option<tokio::time::Instant>) -> bool {
        let left =
            || end().map_or(LOOK, |end| end.saturating_duration_since(Instant::now().into()));
        let mut state = self.lock();
        while !state.ended {
            let left = left();
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl State {
    fn push_end(&mut self, command: Command) {
        self.ends += 1;
        self.commands.push_back(command);
    }

    fn pop(&mut self) -> Option<Command> {
        let command = self.commands.pop_front()?;
        self.ends -= usize::from(!matches!(command, Command::Capture(..)));
        Some(command)
    }

    /// How long the background still leaves the training thread to its captures; `None` where
    /// there are none, their step has ended, they fill half of the queue, there are many, or it
    /// waits for room.
    fn pause(&self, limit_bytes: u64) -> Option<Duration> {
        let filling = self.bytes > limit_bytes / 2 || self.commands.len() > MANY;
        let now = self.ends > 0 || self.closing || self.waits || filling;
        let last = self.last.filter(|_| !now && !self.commands.is_empty())?;
        PAUSE.checked_sub(last.elapsed()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::{Capture, Located};
    use backtape::dtype::Dtype;
    use backtape::index_box::IndexBox;
    use backtape::placement::Placements;

    fn capture(bytes: usize) -> Queued {
        let capture = Capture {
            tensor: "x".into(),
            role: None,
            microbatch: None,
            when: None,
            dtype: Dtype::U8,
            shape: vec![bytes as u64],
            place: IndexBox::whole(&[bytes as u64]),
            placement: Placements::default(),
            partial: None,
            replica: 0,
            located: Located::ByBox,
            compiled: false,
            payload: Box::new(vec![0u8; bytes]),
        };
        capture.check().expect("a capture that can be read")
    }

    fn push(queue: &Queue, bytes: usize) {
        assert!(queue.push_capture(0, capture(bytes), PAUSE).is_ok());
    }

    /// Whether the background would take something now.
    fn takes(queue: &Queue) -> bool {
        queue.lock().pause(queue.limit_bytes).is_none()
    }

    #[test]
    fn captures_wait_for_the_end_of_their_step_or_half_of_the_queue() {
        let queue = Queue::new(1 << 20);
        push(&queue, 1000);
        // Never later than the pause, so this holds however slow the machine is.
        queue.lock().last = Some(Instant::now() + PAUSE);
        assert!(!takes(&queue), "while captures come they are left alone");
        push(&queue, 1 << 19);
        assert!(takes(&queue), "a queue that fills up is worked off");
        let queue = Queue::new(1 << 30);
        queue.lock().last = Some(Instant::now() + PAUSE);
        for _ in 0..=MANY {
            push(&queue, 10);
        }
        assert!(takes(&queue), "many small captures are worked off beside the interpreter");
        let queue = Queue::new(1 << 20);
        push(&queue, 1000);
        assert!(queue.push_end(Command::Abandon(0)).is_ok());
        assert!(takes(&queue), "nothing more comes for the step");
    }

    /// Goal: a step that records and then computes for an hour is written meanwhile.
    #[tokio::test]
    async fn captures_are_taken_once_none_has_come_for_a_while() {
        let queue = Queue::new(1 << 20);
        let begin = Instant::now();
        push(&queue, 1000);
        assert!(matches!(queue.next().await, Some(Command::Capture(0, _))));
        assert!(begin.elapsed() >= PAUSE);
        queue.close();
        assert!(queue.next().await.is_none());
    }
}
