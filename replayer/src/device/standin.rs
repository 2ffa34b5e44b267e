//! The list of tests again, in a process that has the stand-in of `tests/standin` in the place of
//! NVIDIA's libraries: `cuda`, `links`, `measure` and `user_kernel` run as they would on a GPU.

#[path = "../../../tests/standin/child.rs"]
mod child;

use std::path::Path;

use cudarc::driver::{CudaContext, result, sys};

use super::DeviceError;
use super::cuda::Cuda;
use super::machine::Machine;
use super::room::Room;
use super::tests::{NOISE, on};
use super::user_kernel::launch::{Code, Launch, Launches, Passed};
use crate::kernels::NoProgress;
use crate::kernels::fixture::Fixture;
use crate::kernels::policy::Policy;

/// What the child runs: all that `cuda()` is asked for in, one after the other, as the stand-in has
/// one lock for all that it does.
const LIST: [&str; 8] = [
    "--test-threads=1",
    "device::tests::on_cuda::",
    "device::policy::tests::on_cuda::",
    "device::compare::tests::on_cuda::",
    "device::plane::tests::on_cuda::",
    "device::user_kernel::tests::",
    "device::measure::tests::",
    "device::several::tests::gpus_joined_by_nccl",
];

/// The calls that a replay may fail at.
const CALLS: [&str; 41] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuDeviceGetMemPool",
    "cuMemPoolGetAttribute",
    "cuMemGetInfo",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuLaunchKernel",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventDestroy",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetSupportedArchs",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
    "cublasCreate",
    "cublasSetStream",
    "cublasSetMathMode",
    "cublasDgemm",
    "cublasGemmEx",
    "cublasDestroy",
    "ncclCommInitAll",
    "ncclGroupEnd",
    "ncclRecv",
];

#[test]
fn the_list_of_a_gpu_runs_on_the_stand_in_whenever_its_work_is_done() {
    let late: &[(&str, &str)] = &[("ORDER", "needed"), ("LATE", "1"), ("OLD", "1")];
    for set in [late, &[("ORDER", "early"), ("POOLS", "0")]] {
        let ran = child::run(&LIST, set);
        assert!(ran >= 30, "{ran} tests ran");
    }
}

#[test]
fn gpus_share_a_head_on_the_stand_in_whenever_its_work_is_done() {
    for order in ["needed", "others", "early"] {
        let set = [("DEVICES", "3"), ("ORDER", order), ("LATE", "1")];
        assert_eq!(child::run(&["device::several::tests::gpus_joined_by_nccl"], &set), 1);
    }
}

#[test]
fn what_is_said_of_the_driver_is_so_on_the_stand_in() {
    // One after the other: a call that is to fail fails for whoever calls it.
    let tests = ["device::standin::on_it::", "--test-threads=1"];
    assert_eq!(child::run(&tests, &[("DEVICES", "2")]), 5);
}

/// What the child runs; without the stand-in in the libraries' place it passes at once.
mod on_it {
    use super::*;

    fn current() -> usize {
        result::ctx::get_current().unwrap().map_or(0, |context| context as usize)
    }

    /// A thread of torch's or jax's has a context of its own, maybe of another GPU.
    #[test]
    fn a_thread_has_its_own_context_back() {
        if !child::is_here() {
            return;
        }
        let fixture = Fixture::usual();
        let use_it = |before: usize| {
            for ordinals in [&[0][..], &[0, 1]] {
                let device = super::super::open(ordinals).unwrap();
                assert_eq!(current(), before);
                on(&*device, &fixture, &NOISE, None);
                assert_eq!(current(), before);
                drop(device);
                assert_eq!(current(), before);
            }
        };
        Cuda::count().unwrap();
        use_it(0);
        let own_context = CudaContext::new(1).unwrap();
        assert_eq!(current(), own_context.cu_ctx() as usize);
        use_it(own_context.cu_ctx() as usize);
        // SAFETY: none is current from here on.
        unsafe { result::ctx::set_current(std::ptr::null_mut()) }.unwrap();
    }

    /// A plan hangs on it: how far the device has come must not decide about bits.
    #[test]
    fn memory_is_free_as_soon_as_it_was_given_back() {
        if !child::is_here() {
            return;
        }
        let cuda = Cuda::open(0).unwrap();
        let all = cuda.free().unwrap();
        let some = cuda.zeros(100 << 20).unwrap();
        assert_eq!(cuda.free().unwrap(), all - (100 << 20));
        drop(some);
        assert_eq!(cuda.free().unwrap(), all);
        let refused = cuda.zeros(all + 1).err().unwrap().to_string();
        assert!(refused.contains("allocating") && refused.contains("out of memory"), "{refused}");
    }

    const SOURCE: &str = r#"extern "C" __global__ void mine(float *to, int n, float x) {
        if (blockIdx.x * blockDim.x + threadIdx.x < n) to[blockIdx.x * blockDim.x + threadIdx.x] = x;
    }"#;

    fn started(cuda: &Cuda, code: &Code, shared: u32, offset: u64) -> Result<Vec<u8>, DeviceError> {
        let kernel = cuda.load(code, "mine")?;
        let buffer = cuda.zeros(16)?;
        let launch = Launch { grid: [2, 1, 1], block: [2, 1, 1], shared };
        let address = Passed::Address(cuda.address(&buffer) + offset);
        // SAFETY: that it strays is what some of these are for, on the stand-in.
        unsafe { cuda.start(&kernel, launch, &[address, Passed::I32(3), Passed::F32(1.0)])? };
        let mut bytes = vec![0; 16];
        cuda.download(&buffer, &mut bytes)?;
        Ok(bytes)
    }

    /// By a bare name, with much shared memory, as PTX of a folder with any name.
    #[test]
    fn a_users_kernel_starts_however_it_comes() {
        if !child::is_here() {
            return;
        }
        let cuda = Cuda::open(0).unwrap();
        let code = Code::Cuda { file: "mine.cu".into(), source: SOURCE.into() };
        let expected: &[u8] = bytemuck::cast_slice(&[1.0f32, 1.0, 1.0, 0.0]);
        for shared in [0, 100 << 10] {
            assert_eq!(started(&cuda, &code, shared, 0).unwrap(), expected);
        }
        let refused = started(&cuda, &code, 300 << 10, 0).unwrap_err().to_string();
        assert!(refused.contains("a kernel of yours"), "{refused}");
        let folder = tempfile::tempdir().unwrap();
        let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"mine\xff.ptx");
        let file = folder.path().join(name);
        let missing = started(&cuda, &Code::Module(file.clone()), 0, 0).unwrap_err().to_string();
        assert!(missing.contains("reading"), "{missing}");
        let ptx =
            super::super::compile::user_source(Path::new("mine.cu"), SOURCE, "compute_90").unwrap();
        // As a file has it, without the zero byte.
        std::fs::write(&file, ptx.bytes().strip_suffix(&[0]).unwrap()).unwrap();
        assert_eq!(started(&cuda, &Code::Module(file), 0, 0).unwrap(), expected);
        let zero = Code::Cuda { file: "mine.cu".into(), source: format!("{SOURCE}\0") };
        let refused = started(&cuda, &zero, 0, 0).unwrap_err().to_string();
        assert!(refused.contains("a zero byte"), "{refused}");
        let other = Code::Cuda { file: "mine.cu".into(), source: SOURCE.replace("mine", "yours") };
        let refused = started(&cuda, &other, 0, 0).unwrap_err().to_string();
        assert!(refused.contains("loading the kernel mine"), "{refused}");
    }

    /// Goal: whichever call fails, the sums are right or one sentence says what failed, and nothing
    /// panics, also not where things are given back. Method: every call in turn, on two GPUs.
    #[test]
    fn whatever_call_fails_is_told_and_no_wrong_sum_comes() {
        let Some(standin) = child::Calls::here() else { return };
        let fixture = Fixture::usual().with_bias();
        let (inputs, policy) = (fixture.inputs(), Policy::fused_bf16());
        let tiles = || (crate::kernels::Tiles { tokens: 64, vocab: 64 }, &NoProgress as &_);
        let all = || -> Result<_, DeviceError> {
            let device = super::super::open(&[0, 1])?;
            let forward = device.forward(&inputs, &NoProgress)?;
            let policy = device.policy_forward(&policy, &inputs, tiles())?;
            let mut dq = crate::kernels::reference::Backward::zeros(&inputs, &NOISE);
            let upstream = [fixture.g_lse_f64(), fixture.g_label_f64(), fixture.smooth_f64()];
            let [lse, label, smooth] = &upstream;
            let cotangents = crate::kernels::Cotangents { lse, label, smooth };
            let logits = vec![3.0; fixture.tokens];
            let upstream =
                crate::kernels::reference::Upstream::new(&inputs, &logits, cotangents, &NOISE);
            let mut walk = device.backward(&inputs, inputs.k.rows, &NOISE)?;
            let sums = walk.slab(&inputs, upstream, tiles(), &mut dq)?;
            walk.finish(&mut dq)?;
            let values = super::super::tests::flat(&dq, sums, &inputs, &NOISE);
            Ok((values, forward.sum, policy.lse))
        };
        let bits = |(of, sums, lse): (super::super::tests::Named, Vec<f64>, Vec<f64>)| {
            let all_values = of.into_iter().map(|(_, values)| values).chain([sums, lse]);
            all_values.flatten().map(f64::to_bits).collect::<Vec<_>>()
        };
        let right = bits(all().unwrap());
        let mut tried = 0;
        for call in CALLS {
            let mut nth = 1;
            loop {
                standin.fail(call, nth);
                let got = all();
                let reached = standin.calls(call) >= nth;
                standin.fail(call, 0);
                match got {
                    Ok(got) => assert!(bits(got) == right, "{call} {nth}"),
                    Err(error) => {
                        let said = error.to_string();
                        assert!(!said.contains('\n') && said.len() > 20, "{call} {nth}: {said}");
                        assert!(!said.contains("lacks"), "{call} {nth} panicked: {said}");
                    }
                }
                if !reached {
                    break;
                }
                tried += 1;
                // The first ones each, then ever fewer: they are alike.
                nth += 1 + nth / 4;
            }
        }
        assert!(tried > 200, "{tried} calls were failed");
    }

    /// An address that is nobody's ends the context, for everybody on that GPU.
    #[test]
    fn a_kernel_that_strays_is_told_and_what_was_made_is_given_back() {
        if !child::is_here() {
            return;
        }
        let cuda = Cuda::open(1).unwrap();
        let code = Code::Cuda { file: "mine.cu".into(), source: SOURCE.into() };
        let strays = Code::Cuda {
            file: "mine.cu".into(),
            source: SOURCE.replace("to[blockIdx", "(to + (1 << 24))[blockIdx"),
        };
        assert!(started(&cuda, &code, 0, 0).is_ok());
        let refused = started(&cuda, &strays, 0, 0).unwrap_err().to_string();
        assert!(refused.contains("a kernel of yours") && refused.contains("illegal"), "{refused}");
        let mut room = Room::<Cuda>::default();
        assert!(room.of(&cuda, 8).unwrap_err().to_string().contains("allocating"));
        let after: Option<sys::CUcontext> = result::ctx::get_current().unwrap();
        assert!(after.is_none());
    }
}
