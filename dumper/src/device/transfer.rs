//! One capture on its way from the device to pinned memory: what it holds meanwhile, and the
//! payload of the shard that it becomes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::index_box::IndexBox;

use super::capturer::{Capturer, SUMS_BYTES};
use super::machine::{DeviceError, Machine};
use crate::capture::Payload;
use crate::ranges::Range;

/// What the device may read or write until the copy is done.
pub(super) struct Holdings<E> {
    pub(super) hold: Box<dyn Send>,
    pub(super) snapshot: Option<Range>,
    pub(super) sums: Range,
    /// Kept as long, so that no event is destroyed while a stream waits for it.
    pub(super) ready: E,
}

/// Who computes the fingerprint that arrives with the bytes.
pub(super) enum Summed {
    /// Nobody.
    None,
    /// The device, of the elements at these positions.
    Device(Dtype, IndexBox),
    /// The framework, of the elements at positions that it knows itself.
    Framework,
}

/// One capture, from when its work is enqueued until its payload is dropped.
pub(super) struct Transfer<M: Machine> {
    pub(super) done: M::Event,
    /// The range of pinned memory that the bytes are copied to; `None` only while this is dropped.
    pinned: Option<Range>,
    bytes: usize,
    summed: Summed,
    /// True where the sums are copied too.
    fetched: AtomicBool,
    holdings: Mutex<Option<Holdings<M::Event>>>,
    /// Whether the work ended well, once that is known.
    outcome: OnceLock<Result<(), DeviceError>>,
}

impl<M: Machine> Transfer<M> {
    pub(super) fn new(
        done: M::Event,
        pinned: Range,
        bytes: usize,
        summed: Summed,
        holdings: Holdings<M::Event>,
    ) -> Transfer<M> {
        Transfer {
            done,
            pinned: Some(pinned),
            bytes,
            summed,
            fetched: AtomicBool::new(false),
            holdings: Mutex::new(Some(holdings)),
            outcome: OnceLock::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where its range of pinned memory starts.
    pub(super) fn start(&self) -> usize {
        self.pinned.as_ref().map_or(0, Range::start)
    }

    /// Where in its range the two sums are.
    pub(super) fn sums_offset(&self) -> usize {
        self.bytes.next_multiple_of(SUMS_BYTES)
    }

    pub(super) fn holdings(&self) -> MutexGuard<'_, Option<Holdings<M::Event>>> {
        self.holdings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the sums are copied too.
    pub(super) fn expect_sums(&self) {
        self.fetched.store(true, Ordering::Release);
    }

    /// Whether the copy is done; waits for nothing.
    pub(super) fn is_done(&self, machine: &M) -> Result<bool, DeviceError> {
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
    fn wait(&self, machine: &M) -> Result<(), DeviceError> {
        self.outcome.get_or_init(|| machine.synchronize(&self.done)).clone()
    }

    /// Lets go of the memory that is held on the device, which has finished or failed for good.
    pub(super) fn release(&self) {
        let Some(holdings) = self.holdings().take() else { return };
        if !matches!(self.outcome.get(), Some(Ok(()))) {
            // After a failure it is not known whether the device still uses these.
            std::mem::forget((holdings.snapshot, holdings.sums));
        }
        drop(holdings.hold);
    }
}

impl<M: Machine> Drop for Transfer<M> {
    /// The last holder of a transfer is its payload, or the list of transfers that are not
    /// finished. So a range of pinned memory is given back only when the device has finished with
    /// it.
    fn drop(&mut self) {
        if !matches!(self.outcome.get(), Some(Ok(()))) {
            std::mem::forget(self.pinned.take());
        }
    }
}

/// The bytes of a capture. The recorder's thread waits for them when it first reads them.
pub(super) struct ArrivingBytes<M: Machine> {
    capturer: Arc<Capturer<M>>,
    transfer: Arc<Transfer<M>>,
}

impl<M: Machine> ArrivingBytes<M> {
    pub(super) fn new(capturer: Arc<Capturer<M>>, transfer: Arc<Transfer<M>>) -> ArrivingBytes<M> {
        ArrivingBytes { capturer, transfer }
    }

    /// True where the framework's own sums come along.
    pub(super) fn framework_sums(&self) -> bool {
        matches!(self.transfer.summed, Summed::Framework)
    }
}

impl<M: Machine> Payload for ArrivingBytes<M> {
    fn length(&self) -> usize {
        self.transfer.bytes
    }

    fn bytes(&self) -> Result<&[u8], String> {
        let done = self.transfer.wait(&self.capturer.machine);
        self.capturer.reap();
        done.map_err(|error| {
            self.capturer.give_up();
            error.to_string()
        })?;
        let start = self.capturer.pinned_address(&self.transfer, 0);
        // SAFETY: the range is inside the pinned memory, which lives as long as the machine that
        // `capturer` holds; nobody else has it before the transfer is dropped, and the copy is done.
        Ok(unsafe { std::slice::from_raw_parts(start, self.transfer.bytes) })
    }

    fn fingerprint(&self, dtype: Dtype, place: &IndexBox) -> Option<Fingerprint> {
        let theirs = match &self.transfer.summed {
            Summed::None => false,
            Summed::Device(kind, of) => *kind == dtype && of == place,
            Summed::Framework => true,
        };
        let fetched = self.transfer.fetched.load(Ordering::Acquire);
        if !(theirs && fetched && self.bytes().is_ok()) {
            return None;
        }
        let sums =
            self.capturer.pinned_address(&self.transfer, self.transfer.sums_offset()).cast::<u32>();
        // SAFETY: as in `bytes`; the two sums lie behind the bytes, at a multiple of 8.
        Some(unsafe { Fingerprint(sums.read(), sums.add(1).read()) })
    }
}
