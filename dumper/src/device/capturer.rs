//! Starts captures: all of the device's work for one is enqueued, and nothing is waited for.
//!
//! ```text
//! the job's stream   ... kernels ─ snapshot ─●ready ─ the job goes on, may overwrite the tensor
//! the side stream                            └─▶ fingerprint ─ copy to pinned memory ─●done
//! the recorder's thread                                            waits for done, reads
//! ```
//!
//! Without room for a snapshot the job's stream waits for `done`, on the device: the thread that
//! trains goes on either way. Memory that the device reads is held until `done` has happened.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;

use super::machine::{Arguments, DeviceError, Machine, Sizes, Stream};
use super::transfer::{ArrivingBytes, Holdings, Summed, Transfer};
use crate::ranges::{Range, Ranges};

/// Ranges of both memories start at multiples of this.
const ALIGNMENT: usize = 256;

/// Bytes of the two sums that are a capture's fingerprint. They lie on the device first, and then
/// behind the capture's bytes in pinned memory.
pub(super) const SUMS_BYTES: usize = 8;

/// Most captures that may be under way: each has its two sums on the device.
const MOST_TRANSFERS: usize = 4096;

/// Bytes of a device that a framework hands over.
pub struct Source {
    /// Where they begin.
    pub address: u64,
    /// How many.
    pub bytes: usize,
    /// Which of the side stream and the job's stream has to wait for the other.
    pub order: Order,
    /// Where the fingerprint comes from.
    pub sums: Sums,
    /// What keeps the memory; dropped once the device has read it, on any thread.
    pub hold: Box<dyn Send>,
}

/// When the bytes of a source are computed, and whether they change afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The side stream already waits until they are computed, and nobody writes to them afterwards.
    Settled,
    /// The work that the stream has now computes them, and nobody writes to them afterwards.
    Made(Stream),
    /// The work that the stream has now computes them, and later work on the stream may change
    /// them.
    Changing(Stream),
}

/// Where the fingerprint of a source comes from.
pub enum Sums {
    /// The device does not compute one: the recorder does, of the copy.
    Recorder,
    /// The device computes it, of its own bytes at these positions.
    Device(Dtype, IndexBox),
    /// The framework computed it: two u32 at this address, settled like the source.
    Framework(u64),
}

/// Why a capture was not taken; the caller copies in its own way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// Earlier captures are not finished, or the recorder has not yet written their bytes.
    #[error("no room for {bytes} bytes in the {total} of pinned memory")]
    Full {
        /// Of this capture.
        bytes: usize,
        /// All there is.
        total: usize,
    },
    /// The device failed; it is not used for captures again.
    #[error(transparent)]
    Failed(#[from] DeviceError),
}

/// One device, and the memory that its captures are copied through.
pub(super) struct Capturer<M: Machine> {
    pub(super) machine: M,
    sizes: Sizes,
    pinned: Arc<Ranges>,
    snapshots: Arc<Ranges>,
    sums_memory: Arc<Ranges>,
    under_way: Mutex<VecDeque<Arc<Transfer<M>>>>,
    broken: AtomicBool,
}

/// Bytes of the pattern that a device is tried with.
pub(super) const PROBE_BYTES: usize = 4096;

/// Bytes of the device's own memory for these sizes: snapshots, sums and the known pattern.
pub(super) fn device_bytes(sizes: Sizes) -> usize {
    whole(sizes.snapshots) + MOST_TRANSFERS * SUMS_BYTES + PROBE_BYTES
}

fn whole(bytes: usize) -> usize {
    bytes / ALIGNMENT * ALIGNMENT
}

impl<M: Machine> Capturer<M> {
    /// A capturer of a machine whose memories are as large as `sizes` and [`device_bytes`] say.
    pub(super) fn new(machine: M, sizes: Sizes) -> Arc<Capturer<M>> {
        Arc::new(Capturer {
            machine,
            sizes,
            pinned: Ranges::new(sizes.pinned, ALIGNMENT),
            snapshots: Ranges::new(whole(sizes.snapshots), ALIGNMENT),
            sums_memory: Ranges::new(MOST_TRANSFERS * SUMS_BYTES, SUMS_BYTES),
            under_way: Mutex::default(),
            broken: AtomicBool::new(false),
        })
    }

    /// Starts a capture; waits for nothing. Where it is not taken, the device reads nothing of the
    /// source and the job's stream is as it was.
    ///
    /// # Safety
    ///
    /// The source's addresses are memory of this device that lives as long as its `hold`.
    pub(super) unsafe fn capture(
        self: &Arc<Self>,
        source: Source,
    ) -> Result<ArrivingBytes<M>, NotTaken> {
        self.reap();
        if self.broken() {
            let why = "it failed before, and captures from it have ended".into();
            return Err(DeviceError::Absent(why).into());
        }
        let full = NotTaken::Full { bytes: source.bytes, total: self.sizes.pinned };
        let room = source.bytes.checked_next_multiple_of(SUMS_BYTES);
        let pinned = room.and_then(|room| self.pinned.take(room.checked_add(SUMS_BYTES)?));
        let (Some(pinned), Some(sums_range)) = (pinned, self.sums_memory.take(SUMS_BYTES)) else {
            return Err(full);
        };
        let (ready, done) = (self.machine.event()?, self.machine.event()?);
        let snapshot = match source.order {
            Order::Changing(_) => self.snapshots.take(source.bytes),
            _ => None,
        };
        let Source { address, bytes, order, sums, hold } = source;
        let holdings = Holdings { hold, snapshot, sums: sums_range, ready };
        let transfer = Arc::new(Transfer::new(done, pinned, bytes, Summed::of(&sums), holdings));
        // SAFETY: the caller vouches for the source, which the transfer holds.
        if let Err(error) = unsafe { self.enqueue(&transfer, address, order, &sums) } {
            // It is not known how far the device has come, so no memory that it may touch is used
            // again.
            self.give_up();
            std::mem::forget(transfer);
            return Err(error.into());
        }
        self.transfers().push_back(transfer.clone());
        Ok(ArrivingBytes::new(self.clone(), transfer))
    }

    /// Enqueues all of the device's work for a capture.
    ///
    /// # Safety
    ///
    /// As [`Capturer::capture`], and the transfer is dropped only after its `done`.
    unsafe fn enqueue(
        &self,
        transfer: &Transfer<M>,
        address: u64,
        order: Order,
        sums: &Sums,
    ) -> Result<(), DeviceError> {
        let (machine, side) = (&self.machine, self.machine.side());
        let holdings = transfer.holdings();
        let Some(holdings) = holdings.as_ref() else { return Ok(()) };
        let mut from = address;
        if let Order::Made(stream) | Order::Changing(stream) = order {
            if let Some(range) = &holdings.snapshot {
                from = machine.memory() + range.start() as u64;
                // SAFETY: the caller's source, and a range that nobody else has.
                unsafe { machine.copy(address, from, transfer.bytes(), stream) }?;
            }
            machine.record(&holdings.ready, stream)?;
            machine.wait(side, &holdings.ready)?;
        }
        let sums_at = self.sums_address(&holdings.sums);
        // SAFETY: as above; the kernel reads the box that the bytes are, which `arguments_of`
        // holds against their length.
        unsafe {
            machine.fetch(from, self.pinned_address(transfer, 0), transfer.bytes(), side)?;
            let sums = match sums {
                Sums::Recorder => None,
                Sums::Framework(address) => Some(*address),
                Sums::Device(dtype, place) => {
                    match arguments_of(*dtype, place, from, sums_at, transfer.bytes()) {
                        Some(arguments) => {
                            machine.fill(sums_at, 0, SUMS_BYTES, side)?;
                            machine.fingerprint(&arguments, side)?;
                            Some(sums_at)
                        }
                        None => None,
                    }
                }
            };
            if let Some(sums) = sums {
                let pinned = self.pinned_address(transfer, transfer.sums_offset());
                machine.fetch(sums, pinned, SUMS_BYTES, side)?;
                transfer.expect_sums();
            }
        }
        machine.record(&transfer.done, side)?;
        match (order, &holdings.snapshot) {
            (Order::Changing(stream), None) => machine.wait(stream, &transfer.done),
            _ => Ok(()),
        }
    }

    fn sums_address(&self, range: &Range) -> u64 {
        self.machine.memory() + (whole(self.sizes.snapshots) + range.start()) as u64
    }

    /// The address of the pattern that the device is tried with.
    pub(super) fn pattern(&self) -> u64 {
        self.machine.memory() + (device_bytes(self.sizes) - PROBE_BYTES) as u64
    }

    /// The address in pinned memory of the byte `offset` of a capture.
    pub(super) fn pinned_address(&self, transfer: &Transfer<M>, offset: usize) -> *mut u8 {
        self.machine.pinned().wrapping_add(transfer.start() + offset)
    }

    /// Lets go of the memory of the device that finished captures held; waits for nothing.
    pub(super) fn reap(&self) {
        let mut done = Vec::new();
        {
            // They finish in their order, so the first that has not finished ends the search.
            let mut transfers = self.transfers();
            while let Some(first) = transfers.front() {
                match first.is_done(&self.machine) {
                    Ok(false) => break,
                    Ok(true) => {}
                    Err(_) => self.give_up(),
                }
                done.extend(transfers.pop_front());
            }
        }
        // Outside the lock, as dropping a hold runs the caller's code.
        for transfer in done {
            transfer.release();
        }
    }

    /// Ends captures from this device.
    pub(super) fn give_up(&self) {
        self.broken.store(true, Ordering::Release);
    }

    /// True once the device has failed.
    pub(super) fn broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    fn transfers(&self) -> MutexGuard<'_, VecDeque<Arc<Transfer<M>>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True where all memory is free again.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.transfers().is_empty()
            && [&self.pinned, &self.snapshots, &self.sums_memory].iter().all(|of| of.is_free())
    }
}

/// The kernel's arguments for a box that is exactly the bytes.
fn arguments_of(
    dtype: Dtype,
    place: &IndexBox,
    from: u64,
    sums_at: u64,
    bytes: usize,
) -> Option<Arguments> {
    let wanted = place.elements()?.checked_mul(dtype.width() as u64)?;
    if wanted != bytes as u64 {
        return None;
    }
    Arguments::new(dtype, place, from, sums_at)
}

impl Summed {
    /// Who computes the fingerprint of a source.
    pub(super) fn of(sums: &Sums) -> Summed {
        match sums {
            Sums::Recorder => Summed::None,
            Sums::Framework(_) => Summed::Framework,
            Sums::Device(dtype, place) => Summed::Device(*dtype, place.clone()),
        }
    }
}
