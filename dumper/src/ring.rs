//! The last steps that nobody selected, kept in memory in case something triggers a recording, so
//! that the step that went wrong is itself in the dump.
//!
//! The ring is bounded in steps and in bytes. When bytes run out the oldest step is dropped as a
//! whole and counted, so what is held has no gap. While a trigger is open the ring is frozen: it
//! drops no step that is complete, and does not keep new steps that do not fit.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use backtape::head::HeadDeclaration;
use backtape::selection::Selection;

use crate::capture::Capture;
use crate::omissions::Omissions;
use crate::queue::{CAPTURE_OVERHEAD_BYTES, Ending};
use crate::recording::lock;

/// How many times its length a frozen ring may grow to, in steps: entries without captures take no
/// bytes, and must be bounded too.
const FROZEN_GROWTH: usize = 2;

/// A step that has left the ring to be written.
pub(crate) struct Taken {
    pub(crate) captures: Vec<Capture>,
    pub(crate) ending: Ending,
    /// These count as held until [`Ring::settle`].
    pub(crate) bytes: u64,
}

/// Whether the ring holds a step that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// It does, and the step can be written.
    Whole,
    /// The step's tape is still open: when it is closed the step is written.
    Open,
    /// It does not.
    Not,
}

pub(crate) struct Ring {
    limit_steps: usize,
    limit_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    steps: BTreeMap<u64, RingStep>,
    /// Bytes that are held, or were taken and are not yet written.
    bytes: u64,
    frozen: bool,
    dropped: Option<Dropped>,
}

struct RingStep {
    captures: Vec<Capture>,
    head: Option<Box<HeadDeclaration>>,
    omissions: Omissions,
    selection: Arc<Selection>,
    bytes: u64,
    closed: bool,
    /// It is to be written, so it may not be dropped.
    wanted: bool,
}

/// Steps that were dropped for want of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) count: u64,
}

impl State {
    /// The oldest step that may be dropped; never `keep`, which is being recorded.
    fn spare(&self, keep: u64) -> Option<u64> {
        let goes = |(step, step_held): &(&u64, &RingStep)| {
            **step != keep && !step_held.wanted && !self.frozen
        };
        self.steps.iter().find(goes).map(|(step, _)| *step)
    }

    fn remove(&mut self, step: u64) -> Option<RingStep> {
        let step_held = self.steps.remove(&step)?;
        self.bytes = self.bytes.saturating_sub(step_held.bytes);
        Some(step_held)
    }

    fn count_dropped(&mut self, step: u64) {
        let so_far = self.dropped.unwrap_or(Dropped { first: step, last: step, count: 0 });
        self.dropped = Some(Dropped {
            first: so_far.first.min(step),
            last: so_far.last.max(step),
            count: so_far.count + 1,
        });
    }
}

impl Ring {
    pub(crate) fn new(limit_steps: u32, limit_bytes: u64) -> Ring {
        Ring { limit_steps: limit_steps as usize, limit_bytes, state: Mutex::default() }
    }

    /// True when steps are kept at all.
    pub(crate) fn is_on(&self) -> bool {
        self.limit_steps > 0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Makes room for a step, whose tape is open from now on. With `closed` this rank records
    /// nothing of the step and has no tape for it: an empty entry says so when the step is written.
    pub(crate) fn begin(&self, step: u64, selection: Arc<Selection>, closed: bool) {
        // Dropped after the lock: dropping a payload runs the caller's code.
        let mut gone = Vec::new();
        let mut state = self.lock();
        while state.steps.len() >= self.limit_steps
            && let Some(oldest) = state.spare(step)
        {
            gone.extend(state.remove(oldest));
        }
        if state.steps.len() >= self.limit_steps * FROZEN_GROWTH {
            state.count_dropped(step);
            return;
        }
        let (captures, omissions) = (Vec::new(), Omissions::default());
        let step_held = RingStep {
            captures,
            head: None,
            omissions,
            selection,
            bytes: 0,
            closed,
            wanted: false,
        };
        state.steps.insert(step, step_held);
    }

    /// Keeps a capture. Never waits: where there is no room, the oldest step is dropped, and where
    /// none can be dropped, the capture's own step.
    pub(crate) fn push(&self, step: u64, capture: Capture) {
        let cost = capture.length().saturating_add(CAPTURE_OVERHEAD_BYTES);
        let mut gone = Vec::new();
        let mut state = self.lock();
        while state.bytes.saturating_add(cost) > self.limit_bytes {
            let Some(oldest) = state.spare(step) else { break };
            gone.extend(state.remove(oldest));
            state.count_dropped(oldest);
        }
        let fits = state.bytes.saturating_add(cost) <= self.limit_bytes;
        match state.steps.get_mut(&step) {
            Some(step_held) if fits => {
                step_held.captures.push(capture);
                step_held.bytes += cost;
                state.bytes += cost;
            }
            Some(_) => {
                gone.extend(state.remove(step));
                state.count_dropped(step);
            }
            // The step was dropped before, and counted then.
            None => {}
        }
        drop(state);
        drop(gone);
    }

    /// The step's tape is closed; true when the step was asked for in the meantime.
    pub(crate) fn close(
        &self,
        step: u64,
        head: Option<Box<HeadDeclaration>>,
        omissions: Omissions,
    ) -> bool {
        let mut state = self.lock();
        let Some(step_held) = state.steps.get_mut(&step) else { return false };
        (step_held.head, step_held.omissions, step_held.closed) = (head, omissions, true);
        step_held.wanted
    }

    /// The step's tape was dropped, so nobody has said that the step is complete: it is not kept.
    pub(crate) fn abandon(&self, step: u64) {
        let gone = self.lock().remove(step);
        drop(gone);
    }

    /// Keeps everything that is there, until [`Ring::thaw`].
    pub(crate) fn freeze(&self) {
        self.lock().frozen = true;
    }

    /// No trigger is open any more: the ring goes back to its own length.
    pub(crate) fn thaw(&self) {
        let mut gone = Vec::new();
        let mut state = self.lock();
        state.frozen = false;
        while state.steps.len() > self.limit_steps
            && let Some(oldest) = state.spare(u64::MAX)
        {
            gone.extend(state.remove(oldest));
        }
    }

    /// Steps that can be written, ascending.
    pub(crate) fn writable_steps(&self) -> Vec<u64> {
        let state = self.lock();
        state
            .steps
            .iter()
            .filter(|(_, step_held)| step_held.closed)
            .map(|(step, _)| *step)
            .collect()
    }

    /// Asks for a step; where the ring holds it, it is not dropped before it is taken.
    pub(crate) fn claim(&self, step: u64) -> Holds {
        let mut state = self.lock();
        let Some(step_held) = state.steps.get_mut(&step) else { return Holds::Not };
        step_held.wanted = true;
        if step_held.closed { Holds::Whole } else { Holds::Open }
    }

    /// Takes a step out to be written.
    pub(crate) fn take(&self, step: u64) -> Option<Taken> {
        let step_held = self.lock().steps.remove(&step)?;
        let (head, omissions, selection) =
            (step_held.head, step_held.omissions, step_held.selection);
        let ending = Ending { head, omissions, selection, late: false };
        Some(Taken { captures: step_held.captures, ending, bytes: step_held.bytes })
    }

    /// A step that was taken is written, and its payloads are dropped: its bytes no longer count.
    pub(crate) fn settle(&self, bytes: u64) {
        let mut state = self.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
    }

    /// The steps that were dropped for want of memory.
    pub(crate) fn dropped(&self) -> Option<Dropped> {
        self.lock().dropped
    }

    /// Bytes held, for tests of the bound.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Drops everything that is held.
    pub(crate) fn clear(&self) {
        let gone = std::mem::take(&mut *self.lock());
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use backtape::dtype::Dtype;
    use backtape::identity::Name;
    use backtape::index_box::IndexBox;
    use backtape::shard::{Shard, TensorKey};
    use proptest::prelude::*;

    use super::*;
    use crate::capture::Payload;

    static ALIVE: AtomicUsize = AtomicUsize::new(0);

    /// Bytes that count how many of them are held.
    struct Counted(Vec<u8>);

    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            ALIVE.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn counted(bytes: u64) -> Capture {
        ALIVE.fetch_add(1, Ordering::SeqCst);
        capture(bytes, Box::new(Counted(vec![0; bytes as usize])))
    }

    fn plain(bytes: u64) -> Capture {
        capture(bytes, Box::new(vec![0; bytes as usize]))
    }

    fn capture(bytes: u64, payload: Box<dyn Payload>) -> Capture {
        let shard = Shard::new(Dtype::U8, vec![bytes], IndexBox(vec![(0, bytes)]));
        let tensor = Name::new("q").unwrap();
        let key = TensorKey { tensor, microbatch: None, when: None };
        Capture::new(key, shard, payload).checked().unwrap()
    }

    #[derive(Clone, Debug)]
    enum Op {
        Step(Vec<u64>),
        Freeze,
        Thaw,
        Write,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let step = proptest::collection::vec(0..3000u64, 0..5).prop_map(Op::Step);
        let op = prop_oneof![
            8 => step, 1 => Just(Op::Freeze), 1 => Just(Op::Thaw), 2 => Just(Op::Write)
        ];
        proptest::collection::vec(op, 0..80)
    }

    proptest! {
        /// Goal: bytes and steps never pass their bounds, a frozen ring loses
        /// nothing that it held, an unfrozen one holds the newest steps without
        /// a gap, and what is dropped is dropped for good. Method: random steps,
        /// freezes and writes; the payloads count themselves.
        #[test]
        fn a_ring_is_bounded_and_loses_only_its_oldest_steps(ops in ops()) {
            const LIMIT: u64 = 10_000;
            let ring = Ring::new(6, LIMIT);
            let (mut frozen, mut written) = (false, Vec::new());
            for (step, op) in (0..).zip(ops) {
                let before = ring.writable_steps();
                match op {
                    Op::Step(sizes) => {
                        ring.begin(step, Arc::default(), false);
                        for size in sizes {
                            ring.push(step, counted(size));
                            prop_assert!(ring.bytes() <= LIMIT);
                        }
                        ring.close(step, None, Omissions::default());
                    }
                    Op::Freeze => {
                        ring.freeze();
                        frozen = true;
                    }
                    Op::Thaw => {
                        ring.thaw();
                        frozen = false;
                    }
                    Op::Write => {
                        if let Some(&oldest) = before.first() {
                            prop_assert_eq!(ring.claim(oldest), Holds::Whole);
                            let taken = ring.take(oldest).unwrap();
                            drop(taken.captures);
                            ring.settle(taken.bytes);
                            written.push(oldest);
                        }
                    }
                }
                let writable = ring.writable_steps();
                let most = if frozen { 12 } else { 6 };
                prop_assert!(writable.len() <= most);
                if frozen {
                    let kept = before.iter().filter(|step| !written.contains(step));
                    prop_assert!(kept.into_iter().all(|step| writable.contains(step)));
                }
            }
            ring.clear();
            prop_assert_eq!((ring.bytes(), ALIVE.load(Ordering::SeqCst)), (0, 0));
        }
    }

    #[test]
    fn a_step_that_alone_is_too_large_is_dropped_whole_and_the_others_stay_away() {
        let ring = Ring::new(4, 5000);
        for (step, size) in [(1, 100), (2, 9000), (3, 100)] {
            ring.begin(step, Arc::default(), false);
            ring.push(step, plain(size));
            ring.push(step, plain(size));
            ring.close(step, None, Omissions::default());
        }
        assert_eq!(ring.writable_steps(), [3]);
        assert_eq!(ring.dropped(), Some(Dropped { first: 1, last: 2, count: 2 }));
    }
}
