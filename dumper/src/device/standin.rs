//! `cuda` on the stand-in of `tests/standin`: captures by the driver's own calls, in a process that
//! has the stand-in in the place of NVIDIA's libraries.

#[path = "../../../tests/standin/child.rs"]
mod child;

use cudarc::driver::{result, sys};

use super::*;

/// The calls of the driver and of NVRTC that a capture may fail at.
const CALLS: [&str; 24] = [
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxPushCurrent",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuStreamCreate",
    "cuStreamWaitEvent",
    "cuMemHostAlloc",
    "cuMemAlloc",
    "cuMemsetD8Async",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBIN",
];

#[test]
fn captures_run_on_the_stand_in_whenever_its_work_is_done() {
    for order in ["needed", "others", "early"] {
        let set = [("ORDER", order), ("OLD", "1")];
        // One after the other: a call that is to fail fails for whoever calls it.
        assert_eq!(child::run(&["device::standin::on_it::", "--test-threads=1"], &set), 5);
    }
}

/// While the job's thread captures a CUDA graph, what we call must not end the capture.
#[test]
fn a_gpu_is_opened_and_captured_from_while_the_job_captures_a_graph() {
    let tests = ["device::standin::on_it::the_device_counts", "--test-threads=1"];
    assert_eq!(child::run(&tests, &[("CAPTURING", "1")]), 1);
}

/// A job on the GPU: its stream and its memory.
struct Job {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

/// Memory of a job's, which its allocator gives to the next who asks once it is let go of.
struct Tensor {
    address: u64,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: handles of the driver.
unsafe impl Send for Tensor {}

impl Job {
    /// On the stream with this handle; without one on a new one.
    fn new(stream: Option<sys::CUstream>) -> Job {
        result::init().unwrap();
        // SAFETY: the stand-in's only device.
        let context = unsafe { result::primary_ctx::retain(0) }.unwrap();
        let new =
            || within(context, || result::stream::create(result::stream::StreamKind::Default));
        Job { context, stream: stream.unwrap_or_else(new) }
    }

    fn tensor(&self, bytes: usize) -> Tensor {
        let Job { context, stream } = *self;
        // SAFETY: written before it is read.
        let taken = || unsafe { result::malloc_async(stream, bytes) };
        Tensor { address: within(context, taken), context, stream }
    }

    fn fill(&self, tensor: &Tensor, byte: u8, bytes: usize) {
        let (address, stream) = (tensor.address, self.stream);
        // SAFETY: the tensor has as many bytes.
        within(self.context, || unsafe { result::memset_d8_async(address, byte, bytes, stream) });
    }

    fn order(&self) -> Order {
        Order::Changing(self.stream as Stream)
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        let (address, stream) = (self.address, self.stream);
        // SAFETY: it is freed here alone.
        within(self.context, || unsafe { result::free_async(address, stream) });
    }
}

fn within<T>(context: sys::CUcontext, calls: impl FnOnce() -> Result<T, result::DriverError>) -> T {
    let mut popped = std::ptr::null_mut();
    // SAFETY: the context was retained.
    unsafe { sys::cuCtxPushCurrent_v2(context) }.result().unwrap();
    let done = calls();
    // SAFETY: pops what was pushed.
    unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) }.result().unwrap();
    done.unwrap()
}

fn place_of(bytes: usize) -> IndexBox {
    IndexBox(vec![(5, 5 + bytes as u64)])
}

fn capture(
    gpu: &Gpu,
    address: u64,
    bytes: usize,
    order: Order,
    hold: Box<dyn Send>,
) -> Result<Arriving, NotTaken> {
    let sums = Sums::Device(Dtype::U8, place_of(bytes));
    // SAFETY: tests keep the memory, or give it as the hold.
    unsafe { gpu.capture(Source { address, bytes, order, sums, hold }) }
}

fn assert_holds(arriving: &Arriving, byte: u8, bytes: usize) {
    let expected = vec![byte; bytes];
    assert_eq!(arriving.bytes().unwrap(), expected);
    let sums = Fingerprint::of(Dtype::U8, &place_of(bytes), &expected);
    assert_eq!(arriving.fingerprint(Dtype::U8, &place_of(bytes)), Some(sums));
}

/// What the child runs; without the stand-in in the libraries' place it passes at once.
mod on_it {
    use super::*;

    fn sizes(snapshots: usize) -> Sizes {
        Sizes { pinned: 1 << 16, snapshots }
    }

    /// On a stream of the job's, and on the legacy default stream, torch's own.
    #[test]
    fn a_tensor_lands_as_it_was_when_it_was_captured() {
        if !child::is_here() {
            return;
        }
        for (snapshots, stream) in [(0, None), (512, None), (1 << 16, None), (512, Some(0))] {
            let job = Job::new(stream.map(|stream: usize| stream as sys::CUstream));
            let gpu = Gpu::open(0, sizes(snapshots)).unwrap();
            let weights = job.tensor(700);
            let mut arrived = Vec::new();
            for step in 1..12 {
                let bytes = 50 * usize::from(step);
                job.fill(&weights, step, bytes);
                let of_weights =
                    capture(&gpu, weights.address, bytes, job.order(), Box::new(())).unwrap();
                // What is freed as soon as the device has read it.
                let activation = job.tensor(bytes);
                job.fill(&activation, !step, bytes);
                let (address, order) = (activation.address, Order::Made(job.stream as Stream));
                let of_activation =
                    capture(&gpu, address, bytes, order, Box::new(activation)).unwrap();
                arrived.push((of_weights, step, bytes));
                arrived.push((of_activation, !step, bytes));
                if step % 3 == 0 {
                    gpu.reap();
                }
            }
            job.fill(&weights, 0xee, 700);
            for (arriving, byte, bytes) in &arrived {
                assert_holds(arriving, *byte, *bytes);
            }
            drop(arrived);
            gpu.reap();
            assert!(gpu.0.is_idle());
        }
    }

    /// Doubles of three dimensions, in a box that is not the whole.
    #[test]
    fn the_device_counts_words_of_every_width_at_their_places() {
        if !child::is_here() {
            return;
        }
        let (job, gpu) = (Job::new(None), Gpu::open(0, sizes(4096)).unwrap());
        let place = IndexBox(vec![(3, 5), (1 << 33, (1 << 33) + 3), (7, 9)]);
        for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64] {
            let bytes = 12 * dtype.width();
            let tensor = job.tensor(bytes);
            job.fill(&tensor, 0x3c, bytes);
            let (order, sums) = (job.order(), Sums::Device(dtype, place.clone()));
            let (address, hold) = (tensor.address, Box::new(()));
            // SAFETY: the tensor outlives the capture.
            let arriving = unsafe { gpu.capture(Source { address, bytes, order, sums, hold }) };
            let arriving = arriving.unwrap();
            assert_eq!(arriving.bytes().unwrap(), vec![0x3c; bytes]);
            let expected = Fingerprint::of(dtype, &place, &vec![0x3c; bytes]);
            assert_eq!(arriving.fingerprint(dtype, &place), Some(expected));
        }
    }

    #[test]
    fn the_thread_keeps_the_context_that_it_had() {
        if !child::is_here() {
            return;
        }
        let now = || result::ctx::get_current().unwrap().map_or(0, |context| context as usize);
        let job = Job::new(None);
        let use_it = || {
            let gpu = Gpu::open(0, sizes(4096)).unwrap();
            let tensor = job.tensor(64);
            job.fill(&tensor, 1, 64);
            let order = job.order();
            let arriving = capture(&gpu, tensor.address, 64, order, Box::new(())).unwrap();
            assert_holds(&arriving, 1, 64);
        };
        use_it();
        assert_eq!(now(), 0);
        within(job.context, || {
            use_it();
            assert_eq!(now(), job.context as usize);
            Ok(())
        });
    }

    #[test]
    fn an_address_that_is_no_memory_of_the_gpu_ends_captures_in_one_sentence() {
        if !child::is_here() {
            return;
        }
        let gpu = Gpu::open(0, sizes(4096)).unwrap();
        let here = [0u8; 64];
        let address = here.as_ptr() as u64;
        let refused = capture(&gpu, address, 64, Order::Settled, Box::new(())).err().unwrap();
        let said = refused.to_string();
        assert!(said.starts_with("the GPU failed at a copy to the host: "), "{said}");
        let refused = capture(&gpu, address, 64, Order::Settled, Box::new(())).err().unwrap();
        assert!(refused.to_string().contains("it failed before"), "{refused}");
    }

    /// Goal: whichever call fails, the bytes are right, or one sentence says what failed.
    #[test]
    fn whatever_call_fails_no_wrong_bytes_come() {
        let Some(standin) = child::Calls::here() else { return };
        let job = Job::new(None);
        let tensor = job.tensor(64);
        job.fill(&tensor, 9, 64);
        let mut tried = 0;
        for call in CALLS {
            for nth in 1.. {
                standin.fail(call, nth);
                let read = Gpu::open(0, sizes(4096)).map_err(|error| error.to_string());
                let read = read.and_then(|gpu| {
                    let taken = capture(&gpu, tensor.address, 64, job.order(), Box::new(()));
                    let arriving = taken.map_err(|refused| refused.to_string())?;
                    let bytes = arriving.bytes()?.to_vec();
                    Ok((bytes, arriving.fingerprint(Dtype::U8, &place_of(64))))
                });
                let reached = standin.calls(call) >= nth;
                standin.fail(call, 0);
                match read {
                    Ok((bytes, sums)) => {
                        assert_eq!(bytes, [9; 64], "{call} {nth}");
                        let right = Fingerprint::of(Dtype::U8, &place_of(64), &bytes);
                        assert!(sums.is_none_or(|sums| sums == right), "{call} {nth}");
                    }
                    Err(said) => {
                        assert!(!said.contains('\n') && said.len() > 20, "{call} {nth}: {said}");
                        assert!(!said.contains("lacks"), "{call} {nth} panicked: {said}");
                    }
                }
                if !reached {
                    break;
                }
                tried += 1;
            }
        }
        assert!(tried > 60, "{tried} calls were failed");
    }
}
