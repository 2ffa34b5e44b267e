//! CUDA through cudarc, loaded at run time: the device's primary context, which torch and jax use
//! too, a stream of our own, and the kernel by NVRTC.
//!
//! The thread that trains keeps its own context: ours is pushed around each call and popped. What
//! is allocated here stays until the process ends, as a GPU is opened once in it.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::{DriverError, result, sys};

use super::capturer::device_bytes;
use super::compile::{self, present};
use super::machine::{Arguments, DeviceError, Machine, Sizes, Stream};

/// Threads of a block.
const BLOCK: u32 = 256;

/// Pinned memory below this is no memory for captures.
const LEAST_BYTES: usize = 64 << 10;

/// An NVIDIA GPU.
pub(super) struct Cuda {
    context: sys::CUcontext,
    side: sys::CUstream,
    kernel: sys::CUfunction,
    pinned: *mut u8,
    memory: u64,
}

// SAFETY: handles of the driver, which any thread may use; the pinned memory is given out in
// ranges that have one holder each.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

/// The driver's event.
pub(super) struct Event {
    event: sys::CUevent,
    context: sys::CUcontext,
}

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event was created by `Cuda::event`; one that has not happened yet is
        // destroyed by the driver once it has.
        let _ = within(self.context, "an event", || unsafe { result::event::destroy(self.event) });
    }
}

/// While a job's thread captures a CUDA graph, in torch's "global" mode, a call of any thread that
/// may wait or allocate ends that capture, unless the thread is `RELAXED`. Nothing here has to do
/// with the job's graph.
struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    fn now() -> Result<Relaxed, DriverError> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver reads the new mode and writes the one before.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result()?;
        Ok(Relaxed(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above; the thread has its own mode back.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// Runs calls with a context current, and gives the thread its own back.
fn within<T>(
    context: sys::CUcontext,
    what: &'static str,
    calls: impl FnOnce() -> Result<T, DriverError>,
) -> Result<T, DeviceError> {
    let failed = |why: DriverError| DeviceError::call(what, why);
    let _relaxed = Relaxed::now().map_err(failed)?;
    // SAFETY: the context is retained until the process ends.
    unsafe { sys::cuCtxPushCurrent_v2(context) }.result().map_err(failed)?;
    let done = calls();
    let mut popped = std::ptr::null_mut();
    // SAFETY: pops what was pushed above.
    let given_back = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) }.result();
    done.and_then(|done| given_back.map(|()| done)).map_err(failed)
}

fn driver_loads() -> bool {
    // SAFETY: loads the driver's library, as any program on a machine with a GPU does.
    unsafe { sys::is_culib_present() }
}

fn capability(device: sys::CUdevice) -> Result<(i32, i32), DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    };
    // SAFETY: the device was just given.
    let attribute_of = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    Ok((
        attribute_of(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute_of(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

impl Cuda {
    /// Opens GPU number `ordinal` and reserves the memory.
    pub(super) fn open(ordinal: i32, sizes: Sizes) -> Result<Cuda, DeviceError> {
        let why = "the driver's library, libcuda.so, is not found";
        present(driver_loads, why)?;
        if sizes.pinned < LEAST_BYTES {
            let why = format!("{} bytes of pinned memory are too few", sizes.pinned);
            return Err(DeviceError::Absent(why));
        }
        // A library of another version may lack a symbol, which cudarc answers with a panic.
        let opened = catch_unwind(AssertUnwindSafe(|| Cuda::load(ordinal, sizes)));
        opened.unwrap_or_else(|_| {
            let why = "a library of CUDA lacks what is called; this build is for CUDA 12 and 13";
            Err(DeviceError::Absent(why.into()))
        })
    }

    fn load(ordinal: i32, sizes: Sizes) -> Result<Cuda, DeviceError> {
        let absent = |why: DriverError| DeviceError::Absent(why.to_string());
        result::init().map_err(absent)?;
        let device = result::device::get(ordinal).map_err(absent)?;
        let image = compile::fingerprint(capability(device).map_err(absent)?)?;
        // SAFETY: the device was just given.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(absent)?;
        let kernel = within(context, "loading its kernel", || {
            // SAFETY: code, or PTX that ends in a zero byte; the module stays loaded.
            unsafe {
                let module = result::module::load_data(image.as_ptr().cast())?;
                result::module::get_function(module, c"fingerprint".into())
            }
        })?;
        let kind = result::stream::StreamKind::NonBlocking;
        let side = within(context, "making a stream", || result::stream::create(kind))?;
        let pinned = within(context, "pinning memory of the host", || {
            // SAFETY: nobody is given the memory before it was reserved.
            unsafe { result::malloc_host(sizes.pinned, sys::CU_MEMHOSTALLOC_PORTABLE) }
        })?;
        let bytes = device_bytes(sizes);
        // SAFETY: as above.
        let memory =
            within(context, "reserving its memory", || unsafe { result::malloc_sync(bytes) });
        let memory = memory.inspect_err(|_| {
            // SAFETY: allocated above, and nobody was given it.
            let _ = within(context, "unpinning", || unsafe { result::free_host(pinned) });
        })?;
        Ok(Cuda { context, side, kernel, pinned: pinned.cast(), memory })
    }

    fn run<T>(
        &self,
        what: &'static str,
        calls: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        within(self.context, what, calls)
    }
}

fn handle(stream: Stream) -> sys::CUstream {
    stream as sys::CUstream
}

impl Machine for Cuda {
    type Event = Event;

    fn side(&self) -> Stream {
        self.side as Stream
    }

    fn pinned(&self) -> *mut u8 {
        self.pinned
    }

    fn memory(&self) -> u64 {
        self.memory
    }

    fn event(&self) -> Result<Event, DeviceError> {
        // BLOCKING_SYNC: the recorder's thread sleeps where it waits.
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes the handle.
        self.run("making an event", || unsafe {
            sys::cuEventCreate(&raw mut event, flags).result()
        })?;
        Ok(Event { event, context: self.context })
    }

    fn record(&self, event: &Event, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: an event of ours, and a stream of the framework's or ours.
        self.run("recording an event", || unsafe {
            result::event::record(event.event, handle(stream))
        })
    }

    fn wait(&self, stream: Stream, event: &Event) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        self.run("having a stream wait", || unsafe {
            result::stream::wait_event(handle(stream), event.event, flags)
        })
    }

    fn happened(&self, event: &Event) -> Result<bool, DeviceError> {
        // SAFETY: as above.
        self.run("the work before a copy, or the copy", || unsafe {
            match result::event::query(event.event) {
                Ok(()) => Ok(true),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
                Err(why) => Err(why),
            }
        })
    }

    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: as above.
        self.run("the work before a copy, or the copy", || unsafe {
            result::event::synchronize(event.event)
        })
    }

    unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        self.run("a snapshot", || unsafe {
            result::memcpy_dtod_async(to, from, bytes, handle(stream))
        })
    }

    unsafe fn fetch(
        &self,
        from: u64,
        to: *mut u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        self.run("a copy to the host", || unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, handle(stream)).result()
        })
    }

    unsafe fn fill(
        &self,
        address: u64,
        byte: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        self.run("setting its memory", || unsafe {
            result::memset_d8_async(address, byte, bytes, handle(stream))
        })
    }

    unsafe fn fingerprint(&self, arguments: &Arguments, stream: Stream) -> Result<(), DeviceError> {
        let blocks = arguments.threads.unsigned_abs().div_ceil(BLOCK.into());
        let blocks = u32::try_from(blocks);
        let blocks = blocks.map_err(|why| DeviceError::call("launching its kernel", why))?;
        let mut arguments = *arguments;
        let mut given = [(&raw mut arguments).cast::<c_void>()];
        // SAFETY: the caller vouches for the addresses; the struct is the kernel's one argument,
        // and the driver copies it before it returns.
        self.run("launching its kernel", || unsafe {
            let (grid, block) = ((blocks, 1, 1), (BLOCK, 1, 1));
            result::launch_kernel(self.kernel, grid, block, 0, handle(stream), &mut given)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU `make test-gpu` asks for it, and it must open then.
    #[test]
    fn a_gpu_opens_or_one_sentence_says_why_not() {
        let sizes = Sizes { pinned: 1 << 20, snapshots: 1 << 20 };
        match super::super::Gpu::open(0, sizes) {
            Ok(_) => {}
            Err(error) => {
                assert!(std::env::var_os("BACKTAPE_TEST_GPU").is_none(), "{error}");
                assert!(!error.to_string().contains('\n'), "{error}");
            }
        }
    }
}
