//! The queue between the training thread and the recorder's own thread. It is bounded in bytes, and
//! so is the time for which it holds the training thread up.
//!
//! Captures that come close together are written after the last of them: hashing and writing would
//! take the memory's bandwidth, and a core, from the copies that the training thread is making.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backtape::faults;
use backtape::head::HeadDeclaration;
use backtape::selection::Selection;
use tokio::sync::Notify;

use crate::capture::Capture;
use crate::omissions::Omissions;
use crate::recording::lock;

/// Bytes that each capture counts for beside its payload, so that a million scalars cannot grow the
/// queue without bound.
pub(crate) const CAPTURE_OVERHEAD_BYTES: u64 = 1024;

/// When no capture has come for this long, the training thread is taken to have made all of them
/// for now.
const PAUSE: Duration = Duration::from_millis(20);

/// How often a thread that waits for the end asks again until when it may wait.
const LOOK: Duration = Duration::from_millis(200);

/// When more captures than this wait, they are small ones. Making them takes time of the
/// interpreter and hardly any of the memory's bandwidth, so they are written meanwhile; left to the
/// end, all of it would take longer. All that wait are written then: a thread that went to sleep at
/// one below would be woken, and the training thread would wake it, for each capture.
const MANY: usize = 256;

/// What the recorder's thread is to do.
pub(crate) enum Command {
    /// Write this shard.
    Capture(u64, Box<Capture>),
    /// Nothing more comes for the step: report its files and close it.
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

impl Ending {
    /// The end of a step of which this rank records nothing.
    pub(crate) fn empty(selection: Arc<Selection>) -> Ending {
        Ending { head: None, omissions: Omissions::default(), selection, late: false }
    }
}

/// Why a capture did not enter the queue.
pub(crate) enum Refused {
    /// There is no room now, or recording was given up.
    Full(String),
    /// It could not be taken at any time.
    Unfit(String),
    /// The recorder is closed.
    Closed,
}

pub(crate) struct Queue {
    limit_bytes: u64,
    state: Mutex<State>,
    /// Signalled when bytes are released, and when the recorder's thread ends.
    changed: Condvar,
    /// Signalled when a command arrives, and when no more will.
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
    /// Many captures waited, and not all of those are taken out yet.
    many: bool,
    /// Threads of the job that wait for room.
    waiting: u32,
    /// A wait for room has run out. Nobody waits again before there is some room, so that a hung
    /// disk costs the job one call's longest wait and not one for every capture.
    stalled: bool,
    closing: bool,
    /// Why recording was given up.
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

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Queues captures and takes them out of the list, one that is refused too; waits for room for
    /// each, but never longer than `patience`.
    pub(crate) fn push_captures(
        &self,
        step: u64,
        captures: &mut VecDeque<Capture>,
        patience: Duration,
    ) -> Result<(), Refused> {
        let mut state = self.lock();
        let (is_first, mut pushed) = (state.commands.is_empty(), Ok(()));
        while let Some(capture) = captures.pop_front() {
            (state, pushed) = self.push(state, step, capture, patience);
            if pushed.is_err() {
                break;
            }
        }
        state.last = Some(Instant::now());
        // Otherwise the recorder's thread looks by itself, after the pause.
        if is_first || state.pause(self.limit_bytes).is_none() {
            self.ready.notify_one();
        }
        pushed
    }

    fn push<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        step: u64,
        capture: Capture,
        patience: Duration,
    ) -> (MutexGuard<'a, State>, Result<(), Refused>) {
        let (limit, length) = (self.limit_bytes, capture.length());
        let cost = length.saturating_add(CAPTURE_OVERHEAD_BYTES);
        if cost > limit {
            let why = "bytes do not fit the queue of";
            let why = format!("its {length} {why} {limit} bytes: raise queue_bytes");
            return (state, Err(Refused::Unfit(why)));
        }
        let unbounded = faults::seeded("unbounded-queue");
        let full = |state: &State| !unbounded && state.bytes.saturating_add(cost) > limit;
        if full(&state) && !state.stalled && !state.closing && state.dead.is_none() {
            let wait = |state: &mut State| full(state) && !state.closing && state.dead.is_none();
            state.waiting += 1;
            self.ready.notify_one();
            let waited = self.changed.wait_timeout_while(state, patience, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.stalled = full(&state);
            state.waiting -= 1;
        }
        if let Some(refused) = state.refuses() {
            return (state, Err(refused));
        }
        if full(&state) {
            let queued = state.bytes;
            let why = format!(
                "the queue holds {queued} of {limit} bytes and its {length} bytes did not fit \
                 within {} ms: raise queue_bytes, or record fewer tensors",
                patience.as_millis()
            );
            return (state, Err(Refused::Full(why)));
        }
        state.bytes += cost;
        state.commands.push_back(Command::Capture(step, Box::new(capture)));
        (state, Ok(()))
    }

    /// Queues the end of a step. Never waits: there is at most one for each step.
    pub(crate) fn push_end(&self, command: Command) -> Result<(), Refused> {
        let mut state = self.lock();
        if let Some(refused) = state.refuses() {
            return Err(refused);
        }
        state.push_end(command);
        self.ready.notify_one();
        Ok(())
    }

    /// Queues what the coordinator asked for, also while the recorder is being closed: a step that
    /// went wrong is often the last one. No more of these come than the ring has steps, and plans
    /// name steps that are over.
    pub(crate) fn push_order(&self, command: Command) {
        let mut state = self.lock();
        if state.dead.is_none() {
            state.push_end(command);
            self.ready.notify_one();
        }
    }

    /// The next command; `None` once the queue is closed and empty. Safe to cancel: a command is
    /// taken out only in the poll that returns it.
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
                // Whether the pause has run out or something has come, the queue is looked at
                // again.
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
        let waits = state.waiting > 0;
        drop(state);
        // Each call is one of the system's, and a step has thousands of captures.
        if waits {
            self.changed.notify_all();
        }
    }

    /// No more commands will come from the training thread.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
        self.ready.notify_one();
    }

    /// Gives recording up: later captures are refused at once with this reason. Returns what is
    /// still queued, so that it can be named.
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

    /// The recorder's thread has done all it will do.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits until the recorder's thread has ended; false when it has not in time. `end` says until
    /// when to wait; it is asked again and again, as that may move.
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
    /// Why nothing is taken any more; none where it is.
    fn refuses(&self) -> Option<Refused> {
        match &self.dead {
            _ if self.closing => Some(Refused::Closed),
            Some(reason) => Some(Refused::Full(reason.clone())),
            None => None,
        }
    }

    fn push_end(&mut self, command: Command) {
        self.ends += 1;
        self.commands.push_back(command);
    }

    fn has_many(&self) -> bool {
        self.many || self.commands.len() > MANY
    }

    fn pop(&mut self) -> Option<Command> {
        let many = self.has_many();
        let command = self.commands.pop_front()?;
        self.many = many && !self.commands.is_empty();
        self.ends -= usize::from(!matches!(command, Command::Capture(..)));
        Some(command)
    }

    /// How long the recorder's thread still leaves the training thread to its captures. `None`
    /// where it is to go on at once: no capture waits, a step has ended, the queue is half full,
    /// many captures wait, or the training thread waits for room.
    fn pause(&self, limit_bytes: u64) -> Option<Duration> {
        let filling = self.bytes > limit_bytes / 2 || self.has_many();
        let now = self.ends > 0 || self.closing || self.waiting > 0 || filling;
        let last = self.last.filter(|_| !now && !self.commands.is_empty())?;
        PAUSE.checked_sub(last.elapsed()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::dtype::Dtype;
    use backtape::identity::Name;
    use backtape::index_box::IndexBox;
    use backtape::shard::{Shard, TensorKey};

    fn capture(bytes: usize) -> Capture {
        let shape = vec![bytes as u64];
        let shard = Shard::new(Dtype::U8, shape.clone(), IndexBox::whole(&shape));
        let tensor = Name::new("x").expect("a letter");
        let key = TensorKey { tensor, microbatch: None, when: None };
        let capture = Capture::new(key, shard, Box::new(vec![0u8; bytes]));
        capture.checked().expect("a capture that can be read")
    }

    fn push(queue: &Queue, bytes: usize) {
        let mut captures = VecDeque::from([capture(bytes)]);
        assert!(queue.push_captures(0, &mut captures, PAUSE).is_ok());
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
        while queue.lock().pop().is_some() {
            let state = queue.lock();
            let empty = state.commands.is_empty();
            assert!(empty || state.has_many(), "and so are all that wait with them");
        }
        push(&queue, 10);
        queue.lock().last = Some(Instant::now() + PAUSE);
        assert!(!takes(&queue), "after which one more is left alone");
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
