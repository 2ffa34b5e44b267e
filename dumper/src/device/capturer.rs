//! Puts a capture on its way: everything is enqueued, nothing is waited for.
//!
//! ```text
//! the job's stream   ... kernels ─ snapshot ─●ready ─ the job goes on, may overwrite the tensor
//! the side stream                            └─▶ fingerprint ─ copy to pinned memory ─●done
//! the recorder's thread                                            waits for done, reads
//! ```
//!
//! Without room for a snapshot the job's stream waits for `done`, on the device: the thread that
//! launches goes on either way. What a device reads stays held until `done` has happened.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;

use super::flight::{Cargo, Flight, Landing, Tally};
use super::machine::{Arguments, DeviceError, Machine, Sizes, Stream};
use crate::ranges::{Range, Ranges};

/// Ranges of both memories start at multiples of this.
const ALIGNMENT: usize = 256;

/// Bytes of the two sums of a capture, on the device and behind its bytes in pinned memory.
pub(super) const TALLY_BYTES: usize = 8;

/// Captures in flight at most: each has its two sums on the device.
const MOST_FLIGHTS: usize = 4096;

/// Bytes of a device that a framework hands over.
pub struct Source {
    /// Where they begin.
    pub address: u64,
    /// How many.
    pub bytes: usize,
    /// What the side stream has to wait for, and the job's stream for it.
    pub order: Order,
    /// Where the fingerprint comes from.
    pub sums: Sums,
    /// What keeps the memory; dropped once the device has read it, on any thread.
    pub hold: Box<dyn Send>,
}

/// How a source lies in the order of the job's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The side stream waits for its producer already, and nobody writes to it any more.
    Settled,
    /// What the stream holds up to now makes it, and nothing changes it afterwards.
    Made(Stream),
    /// The same, and what is put on the stream later may change it.
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
    /// Earlier captures have not landed, or their bytes are not yet written.
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

/// One device and the memory that its captures travel through.
pub(super) struct Capturer<M: Machine> {
    pub(super) machine: M,
    sizes: Sizes,
    pinned: Arc<Ranges>,
    snapshots: Arc<Ranges>,
    tallies: Arc<Ranges>,
    in_flight: Mutex<VecDeque<Arc<Flight<M>>>>,
    broken: AtomicBool,
}

/// Bytes of the pattern that a device is tried with.
pub(super) const PROBE_BYTES: usize = 4096;

/// Bytes of the device's own memory for these sizes: snapshots, tallies, the pattern.
pub(super) fn device_bytes(sizes: Sizes) -> usize {
    whole(sizes.snapshots) + MOST_FLIGHTS * TALLY_BYTES + PROBE_BYTES
}

fn whole(bytes: usize) -> usize {
    bytes / ALIGNMENT * ALIGNMENT
}

impl<M: Machine> Capturer<M> {
    /// On a machine whose memories are as large as `sizes` and [`device_bytes`] say.
    pub(super) fn new(machine: M, sizes: Sizes) -> Arc<Capturer<M>> {
        Arc::new(Capturer {
            machine,
            sizes,
            pinned: Ranges::new(sizes.pinned, ALIGNMENT),
            snapshots: Ranges::new(whole(sizes.snapshots), ALIGNMENT),
            tallies: Ranges::new(MOST_FLIGHTS * TALLY_BYTES, TALLY_BYTES),
            in_flight: Mutex::default(),
            broken: AtomicBool::new(false),
        })
    }

    /// Puts a capture on its way; waits for nothing. Where it is not taken, the device reads
    /// nothing of the source and the job's stream is as it was.
    ///
    /// # Safety
    ///
    /// The source's addresses are memory of this device that lives as long as its `hold`.
    pub(super) unsafe fn capture(self: &Arc<Self>, source: Source) -> Result<Landing<M>, NotTaken> {
        self.reap();
        if self.broken() {
            let why = "it failed before, and captures from it have ended".into();
            return Err(DeviceError::Absent(why).into());
        }
        let full = NotTaken::Full { bytes: source.bytes, total: self.sizes.pinned };
        let room = source.bytes.checked_next_multiple_of(TALLY_BYTES);
        let pinned = room.and_then(|room| self.pinned.take(room.checked_add(TALLY_BYTES)?));
        let (Some(pinned), Some(tally)) = (pinned, self.tallies.take(TALLY_BYTES)) else {
            return Err(full);
        };
        let (ready, done) = (self.machine.event()?, self.machine.event()?);
        let snapshot = match source.order {
            Order::Changing(_) => self.snapshots.take(source.bytes),
            _ => None,
        };
        let Source { address, bytes, order, sums, hold } = source;
        let cargo = Cargo { hold, snapshot, tally, ready };
        let flight = Arc::new(Flight::new(done, pinned, bytes, Tally::of(&sums), cargo));
        // SAFETY: the caller vouches for the source, which the flight's cargo holds.
        if let Err(error) = unsafe { self.depart(&flight, address, order, &sums) } {
            // How far the device came is not known, so nothing that it may touch is used again.
            self.give_up();
            std::mem::forget(flight);
            return Err(error.into());
        }
        self.flights().push_back(flight.clone());
        Ok(Landing::new(self.clone(), flight))
    }

    /// Enqueues all of a capture.
    ///
    /// # Safety
    ///
    /// As [`Capturer::capture`], and the flight is dropped only after its `done`.
    unsafe fn depart(
        &self,
        flight: &Flight<M>,
        address: u64,
        order: Order,
        sums: &Sums,
    ) -> Result<(), DeviceError> {
        let (machine, side) = (&self.machine, self.machine.side());
        let cargo = flight.cargo();
        let Some(cargo) = cargo.as_ref() else { return Ok(()) };
        let mut from = address;
        if let Order::Made(stream) | Order::Changing(stream) = order {
            if let Some(range) = &cargo.snapshot {
                from = machine.memory() + range.start() as u64;
                // SAFETY: the caller's source, and a range that nobody else has.
                unsafe { machine.copy(address, from, flight.bytes(), stream) }?;
            }
            machine.record(&cargo.ready, stream)?;
            machine.wait(side, &cargo.ready)?;
        }
        let tally = self.tally(&cargo.tally);
        // SAFETY: as above; the kernel reads the box that the bytes are, which `arguments_of`
        // holds against their length.
        unsafe {
            machine.fetch(from, self.landing(flight, 0), flight.bytes(), side)?;
            let sums = match sums {
                Sums::Recorder => None,
                Sums::Framework(address) => Some(*address),
                Sums::Device(dtype, place) => {
                    match arguments_of(*dtype, place, from, tally, flight.bytes()) {
                        Some(arguments) => {
                            machine.fill(tally, 0, TALLY_BYTES, side)?;
                            machine.fingerprint(&arguments, side)?;
                            Some(tally)
                        }
                        None => None,
                    }
                }
            };
            if let Some(sums) = sums {
                let at = self.landing(flight, flight.tally_offset());
                machine.fetch(sums, at, TALLY_BYTES, side)?;
                flight.expect_sums();
            }
        }
        machine.record(&flight.done, side)?;
        match (order, &cargo.snapshot) {
            (Order::Changing(stream), None) => machine.wait(stream, &flight.done),
            _ => Ok(()),
        }
    }

    fn tally(&self, range: &Range) -> u64 {
        self.machine.memory() + (whole(self.sizes.snapshots) + range.start()) as u64
    }

    /// Where the pattern lies that the device is tried with.
    pub(super) fn pattern(&self) -> u64 {
        self.machine.memory() + (device_bytes(self.sizes) - PROBE_BYTES) as u64
    }

    /// Where the byte `offset` of a capture lands.
    pub(super) fn landing(&self, flight: &Flight<M>, offset: usize) -> *mut u8 {
        self.machine.pinned().wrapping_add(flight.start() + offset)
    }

    /// Lets go of what captures that have landed held on the device; waits for nothing.
    pub(super) fn reap(&self) {
        let mut landed = Vec::new();
        {
            // They land in their order, so the first that has not is where to stop.
            let mut flights = self.flights();
            while let Some(first) = flights.front() {
                match first.has_landed(&self.machine) {
                    Ok(false) => break,
                    Ok(true) => {}
                    Err(_) => self.give_up(),
                }
                landed.extend(flights.pop_front());
            }
        }
        // Outside the lock: what a hold's drop does is the caller's code.
        for flight in landed {
            flight.unload();
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

    fn flights(&self) -> MutexGuard<'_, VecDeque<Arc<Flight<M>>>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of captures may land in all of it again, and none holds memory of the device.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.flights().is_empty()
            && [&self.pinned, &self.snapshots, &self.tallies].iter().all(|of| of.is_free())
    }
}

/// The kernel's arguments for a box that is exactly the bytes.
fn arguments_of(
    dtype: Dtype,
    place: &IndexBox,
    from: u64,
    tally: u64,
    bytes: usize,
) -> Option<Arguments> {
    let wanted = place.elements()?.checked_mul(dtype.width() as u64)?;
    if wanted != bytes as u64 {
        return None;
    }
    Arguments::new(dtype, place, from, tally)
}

impl Tally {
    /// What of the fingerprint the source promises.
    pub(super) fn of(sums: &Sums) -> Tally {
        match sums {
            Sums::Recorder => Tally::None,
            Sums::Framework(_) => Tally::Framework,
            Sums::Device(dtype, place) => Tally::Device(*dtype, place.clone()),
        }
    }
}
