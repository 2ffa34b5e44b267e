//! Captures from the memory of an NVIDIA GPU, without the training thread waiting for one.
//!
//! A framework hands over an address (in Python a DLPack capsule). On a stream of its own, the side
//! stream, the device computes the fingerprint of the bytes and copies them to pinned memory; the
//! recorder's thread waits for that when it reads them. Memory is reserved once: where it is full,
//! or anything is missing, the caller is told so at once and copies as it would without this.
//!
//! Whether the bytes were copied right is proved as for any other shard: the fingerprint is
//! computed of the device's own memory.

mod capturer;
mod compile;
mod cuda;
#[cfg(test)]
mod host;
mod machine;
#[cfg(test)]
mod standin;
#[cfg(test)]
mod tests;
mod transfer;

use std::sync::Arc;

use backtape::dtype::Dtype;
use backtape::fingerprint::Fingerprint;
use backtape::index_box::IndexBox;

use capturer::{Capturer, PROBE_BYTES};
use cuda::Cuda;
use machine::Machine;
use transfer::ArrivingBytes;

pub use capturer::{NotTaken, Order, Source, Sums};
pub use machine::{DeviceError, Sizes, Stream};

use crate::capture::Payload;

/// A GPU that captures come from.
#[derive(Clone)]
pub struct Gpu(Arc<Capturer<Cuda>>);

/// A capture that may still be on its way from the device; the payload of a shard.
pub struct Arriving(ArrivingBytes<Cuda>);

impl Gpu {
    /// Opens GPU number `ordinal`: compiles the kernel, reserves memory, and captures a known
    /// pattern to see that it is copied right. It takes time and may wait for the device, so the
    /// thread that trains does not call it.
    pub fn open(ordinal: i32, sizes: Sizes) -> Result<Gpu, DeviceError> {
        let capturer = Capturer::new(Cuda::open(ordinal, sizes)?, sizes);
        probe(&capturer)?;
        Ok(Gpu(capturer))
    }

    /// The side stream, which is to wait until a framework has computed what is captured.
    pub fn stream(&self) -> Stream {
        self.0.machine.side()
    }

    /// Starts a capture; waits for nothing.
    ///
    /// # Safety
    ///
    /// The source's addresses are memory of this GPU that lives as long as its `hold`.
    pub unsafe fn capture(&self, source: Source) -> Result<Arriving, NotTaken> {
        // SAFETY: the caller's.
        unsafe { self.0.capture(source) }.map(Arriving)
    }

    /// Lets go of the memory that finished captures held; waits for nothing.
    pub fn reap(&self) {
        self.0.reap();
    }
}

impl Arriving {
    /// True where the framework's own sums come along.
    pub fn framework_sums(&self) -> bool {
        self.0.framework_sums()
    }
}

impl Payload for Arriving {
    fn length(&self) -> usize {
        self.0.length()
    }

    fn bytes(&self) -> Result<&[u8], String> {
        self.0.bytes()
    }

    fn fingerprint(&self, dtype: Dtype, place: &IndexBox) -> Option<Fingerprint> {
        self.0.fingerprint(dtype, place)
    }
}

/// Captures a known pattern from the device's own memory and checks its bytes and fingerprint, so
/// that a driver that answers and copies wrong is not used.
fn probe<M: Machine>(capturer: &Arc<Capturer<M>>) -> Result<(), DeviceError> {
    let place = IndexBox(vec![(3, 3 + PROBE_BYTES as u64 / 2)]);
    let side = capturer.machine.side();
    let pattern = capturer.pattern();
    // SAFETY: the device's own memory, in a part that has no other use; it lives as long as the
    // machine.
    let captured = unsafe {
        capturer.machine.fill(pattern, 0xa5, PROBE_BYTES, side)?;
        capturer.capture(Source {
            address: pattern,
            bytes: PROBE_BYTES,
            order: Order::Settled,
            sums: Sums::Device(Dtype::U16, place.clone()),
            hold: Box::new(()),
        })
    };
    let wrong = |why: String| DeviceError::call("copying a pattern that is known", why);
    let captured = captured.map_err(|why| wrong(why.to_string()))?;
    let expected = [0xa5; PROBE_BYTES];
    if captured.bytes().map_err(wrong)? != expected {
        return Err(wrong("other bytes came over".into()));
    }
    let expected = Fingerprint::of(Dtype::U16, &place, &expected);
    if captured.fingerprint(Dtype::U16, &place) != Some(expected) {
        return Err(wrong("its fingerprint is another one".into()));
    }
    Ok(())
}
