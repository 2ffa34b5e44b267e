//! A capture between the device and the recorder: what it holds, and the payload that it lands as.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::index_box::IndexBox;

use super::capturer::{Capturer, TALLY_BYTES};
use super::machine::{DeviceError, Machine};
use crate::capture::Payload;
use crate::ranges::Range;

/// What the device may touch until the copy is done.
pub(super) struct Cargo<E> {
    pub(super) hold: Box<dyn Send>,
    pub(super) snapshot: Option<Range>,
    pub(super) tally: Range,
    /// Kept as long, so that no event is given up while a stream waits for it.
    pub(super) ready: E,
}

/// Whose fingerprint comes along.
pub(super) enum Tally {
    None,
    /// The device's, of this box.
    Device(Dtype, IndexBox),
    /// The framework's, of positions that it knows itself.
    Framework,
}

/// One capture from its departure to its landing.
pub(super) struct Flight<M: Machine> {
    pub(super) done: M::Event,
    /// None only while it is dropped.
    pinned: Option<Range>,
    bytes: usize,
    tally: Tally,
    /// Set where the sums are fetched too.
    summed: AtomicBool,
    cargo: Mutex<Option<Cargo<M::Event>>>,
    /// What `done` came to, once it is known.
    outcome: OnceLock<Result<(), DeviceError>>,
}

impl<M: Machine> Flight<M> {
    pub(super) fn new(
        done: M::Event,
        pinned: Range,
        bytes: usize,
        tally: Tally,
        cargo: Cargo<M::Event>,
    ) -> Flight<M> {
        Flight {
            done,
            pinned: Some(pinned),
            bytes,
            tally,
            summed: AtomicBool::new(false),
            cargo: Mutex::new(Some(cargo)),
            outcome: OnceLock::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it lands in pinned memory.
    pub(super) fn start(&self) -> usize {
        self.pinned.as_ref().map_or(0, Range::start)
    }

    /// Where in its range the two sums land.
    pub(super) fn tally_offset(&self) -> usize {
        self.bytes.next_multiple_of(TALLY_BYTES)
    }

    pub(super) fn cargo(&self) -> MutexGuard<'_, Option<Cargo<M::Event>>> {
        self.cargo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sums come too.
    pub(super) fn expect_sums(&self) {
        self.summed.store(true, Ordering::Release);
    }

    /// Whether the copy is done; waits for nothing.
    pub(super) fn has_landed(&self, machine: &M) -> Result<bool, DeviceError> {
        if let Some(outcome) = self.outcome.get() {
            return outcome.clone().map(|()| true);
        }
        let happened = machine.happened(&self.done);
        if let Ok(false) = happened {
            return Ok(false);
        }
        self.outcome.get_or_init(|| happened.map(drop)).clone().map(|()| true)
    }

    /// Waits until the copy is done.
    fn land(&self, machine: &M) -> Result<(), DeviceError> {
        self.outcome.get_or_init(|| machine.synchronize(&self.done)).clone()
    }

    /// Lets go of what is held on the device, which has done its part or failed for good.
    pub(super) fn unload(&self) {
        let Some(cargo) = self.cargo().take() else { return };
        if !matches!(self.outcome.get(), Some(Ok(()))) {
            // After a failure nobody knows what the device still does with these.
            std::mem::forget((cargo.snapshot, cargo.tally));
        }
        drop(cargo.hold);
    }
}

impl<M: Machine> Drop for Flight<M> {
    /// The last to hold a flight is its payload, or the list of those that have not landed: a
    /// range is given back only when the device is done with it.
    fn drop(&mut self) {
        if !matches!(self.outcome.get(), Some(Ok(()))) {
            std::mem::forget(self.pinned.take());
        }
    }
}

/// A capture's bytes, which the recorder's thread waits for when it reads them first.
pub(super) struct Landing<M: Machine> {
    of: Arc<Capturer<M>>,
    flight: Arc<Flight<M>>,
}

impl<M: Machine> Landing<M> {
    pub(super) fn new(of: Arc<Capturer<M>>, flight: Arc<Flight<M>>) -> Landing<M> {
        Landing { of, flight }
    }

    /// True where the framework's own sums come along.
    pub(super) fn framework_sums(&self) -> bool {
        matches!(self.flight.tally, Tally::Framework)
    }
}

impl<M: Machine> Payload for Landing<M> {
    fn length(&self) -> usize {
        self.flight.bytes
    }

    fn bytes(&self) -> Result<&[u8], String> {
        let landed = self.flight.land(&self.of.machine);
        self.of.reap();
        landed.map_err(|error| {
            self.of.give_up();
            error.to_string()
        })?;
        let start = self.of.landing(&self.flight, 0);
        // SAFETY: the range is inside the pinned memory, which lives as long as the machine that
        // `of` holds; nobody else has it before the flight is dropped, and the copy is done.
        Ok(unsafe { std::slice::from_raw_parts(start, self.flight.bytes) })
    }

    fn fingerprint(&self, dtype: Dtype, place: &IndexBox) -> Option<Fingerprint> {
        let theirs = match &self.flight.tally {
            Tally::None => false,
            Tally::Device(summed, of) => *summed == dtype && of == place,
            Tally::Framework => true,
        };
        let summed = self.flight.summed.load(Ordering::Acquire);
        if !(theirs && summed && self.bytes().is_ok()) {
            return None;
        }
        let at = self.of.landing(&self.flight, self.flight.tally_offset()).cast::<u32>();
        // SAFETY: as in `bytes`; the two sums lie behind the bytes, at a multiple of 8.
        Some(unsafe { Fingerprint(at.read(), at.add(1).read()) })
    }
}
