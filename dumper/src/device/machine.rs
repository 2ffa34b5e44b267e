//! What a capture asks of a device: streams, events, copies between the two memories, and the
//! fingerprint's kernel. Nothing here waits but [`Machine::synchronize`].
//!
//! [`super::capturer`] is written against this, and runs on CUDA (`cuda`) and, in the tests of
//! machines without a GPU, on streams whose order a test chooses (`host`).

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape::shard::MAX_DIMENSIONS;

/// Why a device cannot be used for captures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no device, or a library that it needs is missing.
    #[error("no GPU can be captured from: {0}")]
    Absent(String),
    /// A call failed.
    #[error("the GPU failed at {what}: {why}")]
    Call {
        /// What was called.
        what: &'static str,
        /// What it said.
        why: String,
    },
}

impl DeviceError {
    pub(super) fn call(what: &'static str, why: impl std::fmt::Display) -> DeviceError {
        DeviceError::Call { what, why: why.to_string() }
    }
}

/// A stream, as the framework and the driver number it; 0 is the legacy default stream.
pub type Stream = u64;

/// Bytes of both memories that captures may take, reserved when the device is opened.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pinned memory of the host, which captures are copied to.
    pub pinned: usize,
    /// Memory of the device, for snapshots of tensors that the job may change.
    pub snapshots: usize,
}

/// A device whose memory is captured.
pub(super) trait Machine: Send + Sync + 'static {
    /// A point in the order of a stream.
    type Event: Send + Sync;

    /// The stream of the captures, which does not wait for the legacy default stream.
    fn side(&self) -> Stream;

    /// Where the pinned memory begins; it lives as long as the machine.
    fn pinned(&self) -> *mut u8;

    /// Where the device's own memory for captures begins: first the snapshots, then the sums.
    fn memory(&self) -> u64;

    /// A new event.
    fn event(&self) -> Result<Self::Event, DeviceError>;

    /// The event happens when the stream has done all work that was put on it so far.
    fn record(&self, event: &Self::Event, stream: Stream) -> Result<(), DeviceError>;

    /// Makes the stream, and not the caller, wait for an event that was recorded.
    fn wait(&self, stream: Stream, event: &Self::Event) -> Result<(), DeviceError>;

    /// Whether the event has happened.
    fn happened(&self, event: &Self::Event) -> Result<bool, DeviceError>;

    /// Waits for the event. Not called on the training thread.
    fn synchronize(&self, event: &Self::Event) -> Result<(), DeviceError>;

    /// Copies within the device's memory, in the stream's order.
    ///
    /// # Safety
    ///
    /// Both ranges lie in live memory of the device until the stream has come there.
    unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError>;

    /// Copies to pinned memory of the host, in the stream's order.
    ///
    /// # Safety
    ///
    /// Both ranges are live until the stream has come there, and nobody else has that of the host.
    unsafe fn fetch(
        &self,
        from: u64,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError>;

    /// Sets bytes of the device, in the stream's order.
    ///
    /// # Safety
    ///
    /// The range lies in live memory of the device until the stream has come there.
    unsafe fn fill(
        &self,
        address: u64,
        byte: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError>;

    /// Adds the fingerprint of what lies at an address to two sums, in the stream's order.
    ///
    /// # Safety
    ///
    /// What the arguments point to is live memory of the device until the stream has come there.
    unsafe fn fingerprint(&self, arguments: &Arguments, stream: Stream) -> Result<(), DeviceError>;
}

/// Dimensions of a record, and one for the two words of an element of 8 bytes.
const DIMENSIONS: usize = MAX_DIMENSIONS + 1;

/// Most threads of a kernel: with more, only more of them would add to the same two sums.
const MAX_THREADS: i64 = 1 << 16;

/// The kernel's argument as it lies in memory; `kernels/fingerprint.cu` has the same struct.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    pub(super) threads: i64,
    from: u64,
    words: i64,
    width: i64,
    sums: u64,
    dimensions: i64,
    first: [u64; DIMENSIONS],
    stride: [u64; DIMENSIONS],
}

impl Arguments {
    /// The argument for the box `place` at the address `from`; `None` where the kernel cannot read
    /// it: it has too many dimensions or no elements, or its address is not aligned for its words.
    pub(super) fn new(dtype: Dtype, place: &IndexBox, from: u64, sums: u64) -> Option<Arguments> {
        let width = dtype.width().min(4);
        let mut ranges = place.0.clone();
        if dtype.width() == 8 {
            ranges.push((0, 2));
        }
        if ranges.len() > DIMENSIONS || !from.is_multiple_of(width as u64) {
            return None;
        }
        let (mut first, mut stride) = ([0; DIMENSIONS], [1; DIMENSIONS]);
        let mut words = 1u64;
        for (dim, &(lo, hi)) in ranges.iter().enumerate().rev() {
            (first[dim], stride[dim]) = (lo, words);
            words = words.checked_mul(hi.checked_sub(lo)?)?;
        }
        let words = i64::try_from(words).ok().filter(|&words| words > 0)?;
        let dimensions = ranges.len() as i64;
        let (threads, width) = (words.min(MAX_THREADS), width as i64);
        Some(Arguments { threads, from, words, width, sums, dimensions, first, stride })
    }
}
