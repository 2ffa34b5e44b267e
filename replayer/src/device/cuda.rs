//! CUDA through cudarc: the driver, kernels by NVRTC, products by cuBLAS, all loaded at run time.
//!
//! One stream, so what is launched runs in order, and cuBLAS gives the same bits on the same
//! device every time; its pedantic mode takes no faster type than f64 in the place of f64.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::cublas::{CudaBlas, result as blas, sys};
use cudarc::driver::result::{device, mem_pool};
use cudarc::driver::sys::{CUevent_flags, CUmemPool_attribute, CUmemoryPool};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, DeviceRepr, LaunchConfig,
    PushKernelArg,
};
use cudarc::nvrtc::Ptx;

use super::compile::{self, FLAGS, TARGETS};
use super::error::DeviceError;
use super::machine::{Arguments, Compute, Machine, Product};
use super::own::launch::{Code, Launch, Launches, Passed};
use super::{Description, KERNELS, policy, presence};

/// Threads of a block.
const BLOCK: usize = 256;

/// An NVIDIA GPU.
pub(super) struct Cuda {
    description: Description,
    /// The virtual architecture that kernels are compiled for.
    target: &'static str,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    blas: CudaBlas,
    /// For products of policies, in the types that they say.
    tensor: CudaBlas,
    kernels: HashMap<&'static str, CudaFunction>,
}

impl Cuda {
    /// Opens GPU number `ordinal` and compiles the kernels for it.
    pub(super) fn open(ordinal: usize) -> Result<Cuda, DeviceError> {
        for library in [presence::driver, presence::nvrtc, presence::cublas] {
            presence::need(library)?;
        }
        // A library of another version may lack a symbol, which cudarc answers with a panic.
        let opened = catch_unwind(AssertUnwindSafe(|| Cuda::load(ordinal)));
        opened.unwrap_or_else(|_| {
            let why = "a library of CUDA lacks what is called; this build is for CUDA 12 and 13";
            Err(DeviceError::Absent(why.into()))
        })
    }

    /// How many GPUs the driver knows.
    pub(super) fn count() -> Result<usize, DeviceError> {
        presence::need(presence::driver)?;
        let counted = catch_unwind(CudaContext::device_count);
        let count = counted.map_err(|_| DeviceError::Absent("the driver is too old".into()))?;
        let count = count.map_err(|why| DeviceError::Absent(why.to_string()))?;
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(DeviceError::Absent("the driver knows no GPU".into())),
        }
    }

    /// What all that it does is ordered by.
    pub(super) fn stream(&self) -> Arc<CudaStream> {
        self.stream.clone()
    }

    fn load(ordinal: usize) -> Result<Cuda, DeviceError> {
        let absent = |error: cudarc::driver::DriverError| DeviceError::Absent(error.to_string());
        let count = CudaContext::device_count().map_err(absent)?;
        if ordinal >= usize::try_from(count).unwrap_or(0) {
            let why = format!("there is no GPU {ordinal}; the driver knows {count}");
            return Err(DeviceError::Absent(why));
        }
        let context = CudaContext::new(ordinal).map_err(absent)?;
        let capability = context.compute_capability().map_err(absent)?;
        let name = context.name().map_err(absent)?;
        let target = TARGETS.iter().rev().find(|(oldest, _)| *oldest <= capability);
        let Some(&(_, target)) = target else {
            let (major, minor) = capability;
            let why = format!("{name} has compute capability {major}.{minor}, 7.5 is the oldest");
            return Err(DeviceError::Absent(why));
        };
        let mut kernels = HashMap::new();
        for (ptx, names) in [
            (compile::reference(target)?, &KERNELS[..]),
            (compile::policy(target)?, &policy::KERNELS[..]),
        ] {
            load(&context, ptx, names, &mut kernels)?;
        }
        let stream = context.default_stream();
        let blas = blas_in(&stream, sys::cublasMath_t::CUBLAS_PEDANTIC_MATH)?;
        // Pedantic mode may leave the tensor cores out, which are what a job computes on.
        let tensor = blas_in(&stream, sys::cublasMath_t::CUBLAS_DEFAULT_MATH)?;
        let description = Description {
            name: format!("{name}, compute capability {}.{}", capability.0, capability.1),
            compiler: format!("NVRTC, {target} {FLAGS}"),
            products: "cuBLAS dgemm, f64, pedantic".into(),
        };
        Ok(Cuda { description, target, context, stream, blas, tensor, kernels })
    }

    /// An error of an earlier asynchronous call, if there was one.
    fn settled(&self, what: &str) -> Result<(), DeviceError> {
        self.context.check_err().map_err(|why| DeviceError::call(what, why))
    }
}

fn load(
    context: &Arc<CudaContext>,
    ptx: Ptx,
    names: &[&'static str],
    kernels: &mut HashMap<&'static str, CudaFunction>,
) -> Result<(), DeviceError> {
    let module = context.load_module(ptx);
    let module = module.map_err(|why| DeviceError::call("loading its kernels", why))?;
    for kernel in names {
        let failed = |why| DeviceError::call(&format!("loading the kernel {kernel}"), why);
        kernels.insert(kernel, module.load_function(kernel).map_err(failed)?);
    }
    Ok(())
}

fn blas_in(stream: &Arc<CudaStream>, mode: sys::cublasMath_t) -> Result<CudaBlas, DeviceError> {
    let refused = |why| DeviceError::call("opening cuBLAS", why);
    let blas = CudaBlas::new(stream.clone()).map_err(refused)?;
    // SAFETY: the handle was just made.
    unsafe { sys::cublasSetMathMode(*blas.handle(), mode) }.result().map_err(refused)?;
    Ok(blas)
}

/// A kernel's arguments, which travel by value.
#[repr(transparent)]
struct ByValue<A>(A);

// SAFETY: `Arguments` are plain fields of 8 bytes, laid out as the kernel's struct.
unsafe impl<A: Arguments> DeviceRepr for ByValue<A> {}

impl Machine for Cuda {
    type Buffer = CudaSlice<u8>;

    fn description(&self) -> &Description {
        &self.description
    }

    fn free(&self) -> Result<usize, DeviceError> {
        let (free, _) = self
            .context
            .mem_get_info()
            .map_err(|why| DeviceError::call("asking for its free memory", why))?;
        Ok(free)
    }

    fn zeros(&self, bytes: usize) -> Result<CudaSlice<u8>, DeviceError> {
        let what = || format!("allocating {bytes} bytes of its memory");
        self.stream.alloc_zeros(bytes).map_err(|why| DeviceError::call(&what(), why))
    }

    fn upload(&self, bytes: &[u8], to: &mut CudaSlice<u8>) -> Result<(), DeviceError> {
        self.stream
            .memcpy_htod(bytes, to)
            .map_err(|why| DeviceError::call("copying to it", why))?;
        self.settled("copying to it")
    }

    fn download(&self, from: &CudaSlice<u8>, to: &mut [u8]) -> Result<(), DeviceError> {
        if to.is_empty() {
            return Ok(());
        }
        let what = "copying from it, or in a kernel before";
        let part = from.slice(..to.len());
        let failed = |why| DeviceError::call(what, why);
        self.stream.memcpy_dtoh(&part, to).map_err(failed)?;
        // cudarc does not wait for a copy to memory that is not pinned.
        self.stream.synchronize().map_err(failed)?;
        self.settled(what)
    }

    fn address(&self, buffer: &CudaSlice<u8>) -> u64 {
        buffer.device_ptr(&self.stream).0
    }

    unsafe fn launch<A: Arguments>(&self, arguments: &A) -> Result<(), DeviceError> {
        let blocks = arguments.threads().div_ceil(BLOCK);
        if blocks == 0 {
            return Ok(());
        }
        let failed = |why: String| DeviceError::call(&format!("launching {}", A::KERNEL), why);
        let config = LaunchConfig {
            grid_dim: (u32::try_from(blocks).map_err(|why| failed(why.to_string()))?, 1, 1),
            block_dim: (BLOCK as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let arguments = ByValue(*arguments);
        let mut launch = self.stream.launch_builder(&self.kernels[A::KERNEL]);
        // SAFETY: the caller vouches for the addresses, `Arguments` for the layout.
        let launched = unsafe { launch.arg(&arguments).launch(config) };
        launched.map(|_| ()).map_err(|why| failed(why.to_string()))
    }

    /// Row-major, so cuBLAS, which is column-major, is told the transposed product.
    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        use sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
        let Product { target, rows, cols, lhs, lhs_transposed, rhs, rhs_transposed, .. } = *product;
        let Product { depth, add, compute, .. } = *product;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let failed = |why: &dyn std::fmt::Display| {
            DeviceError::call(&format!("a product of {rows} x {depth} x {cols}"), why)
        };
        let size = |n: usize| c_int::try_from(n).map_err(|why| failed(&why));
        let op = |transposed| if transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
        let (m, n, k) = (size(cols)?, size(rows)?, size(depth)?);
        let lead = |n: c_int| n.max(1);
        let (leads, ops) = (
            [if rhs_transposed { k } else { m }, if lhs_transposed { n } else { k }].map(lead),
            [op(rhs_transposed), op(lhs_transposed)],
        );
        if compute != Compute::F64 {
            let shape = Shape { sizes: [m, n, k], ops, leads };
            // SAFETY: the caller's.
            return unsafe { self.multiply_single(product, shape) }.map_err(|why| failed(&why));
        }
        let beta = if add { 1.0 } else { 0.0 };
        // SAFETY: the caller says that the addresses hold those matrices; the scalars outlive
        // the call, which reads them before it returns.
        let multiplied = unsafe {
            blas::dgemm(
                *self.blas.handle(),
                ops[0],
                ops[1],
                m,
                n,
                k,
                &1.0,
                rhs as *const f64,
                leads[0],
                lhs as *const f64,
                leads[1],
                &beta,
                target as *mut f64,
                lead(m),
            )
        };
        multiplied.map_err(|why| failed(&why))
    }
}

/// A product as cuBLAS is told it: m, n and k, what is done to its operands, their strides.
struct Shape {
    sizes: [c_int; 3],
    ops: [sys::cublasOperation_t; 2],
    leads: [c_int; 2],
}

impl Cuda {
    /// A product with sums and a result in f32.
    ///
    /// # Safety
    ///
    /// As for [`Machine::multiply`].
    unsafe fn multiply_single(
        &self,
        product: &Product,
        Shape { sizes: [m, n, k], ops, leads }: Shape,
    ) -> Result<(), cudarc::cublas::result::CublasError> {
        use sys::cublasComputeType_t::{
            CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_PEDANTIC,
        };
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let (of, sums) = match product.compute {
            Compute::Bf16 => (CUDA_R_16BF, CUBLAS_COMPUTE_32F),
            Compute::F16 => (CUDA_R_16F, CUBLAS_COMPUTE_32F),
            Compute::Tf32 => (CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32),
            Compute::F32 | Compute::F64 => (CUDA_R_32F, CUBLAS_COMPUTE_32F_PEDANTIC),
        };
        let (alpha, beta) = (1.0f32, if product.add { 1.0f32 } else { 0.0 });
        // SAFETY: the caller says that the addresses hold those matrices; the scalars outlive
        // the call, which reads them before it returns.
        unsafe {
            blas::gemm_ex(
                *self.tensor.handle(),
                ops[0],
                ops[1],
                m,
                n,
                k,
                (&raw const alpha).cast(),
                product.rhs as *const c_void,
                of,
                leads[0],
                product.lhs as *const c_void,
                of,
                leads[1],
                (&raw const beta).cast(),
                product.target as *mut c_void,
                CUDA_R_32F,
                m.max(1),
                sums,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
    }
}

impl Launches for Cuda {
    type Kernel = CudaFunction;

    fn load(&self, code: &Code, entry: &str) -> Result<CudaFunction, DeviceError> {
        let ptx = match code {
            Code::Cuda { file, source } => compile::own(file, source, self.target)?,
            Code::Module(file) => Ptx::from_file(file),
        };
        let failed = |why| DeviceError::call(&format!("loading the kernel {entry}"), why);
        self.context.load_module(ptx).map_err(failed)?.load_function(entry).map_err(failed)
    }

    unsafe fn start(
        &self,
        kernel: &CudaFunction,
        launch: Launch,
        arguments: &[Passed],
    ) -> Result<(), DeviceError> {
        let of = |[x, y, z]: [u32; 3]| (x, y, z);
        let config = LaunchConfig {
            grid_dim: of(launch.grid),
            block_dim: of(launch.block),
            shared_mem_bytes: launch.shared,
        };
        let mut builder = self.stream.launch_builder(kernel);
        for argument in arguments {
            match argument {
                Passed::Address(address) => builder.arg(address),
                Passed::I32(number) => builder.arg(number),
                Passed::I64(number) => builder.arg(number),
                Passed::F32(number) => builder.arg(number),
                Passed::F64(number) => builder.arg(number),
            };
        }
        let failed = |why| DeviceError::call("a kernel of yours", why);
        // SAFETY: the caller's.
        unsafe { builder.launch(config) }.map_err(failed)?;
        // Its errors are told here, not in what is called next.
        self.stream.synchronize().map_err(failed)
    }
}

/// For `measure`: the device's own clock, and what it held.
impl Cuda {
    /// Runs something between two events of the stream; milliseconds from one to the other.
    pub(super) fn between_events<T>(
        &self,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<(T, f64), DeviceError> {
        let failed = |why| DeviceError::call("timing what it ran", why);
        let event = || self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        // What was launched before is not part of it.
        self.stream.synchronize().map_err(failed)?;
        let begin = event().map_err(failed)?;
        let result = run()?;
        let end = event().map_err(failed)?;
        let milliseconds = begin.elapsed_ms(&end).map_err(failed)?;
        self.settled("timing what it ran")?;
        Ok((result, f64::from(milliseconds)))
    }

    /// Forgets the most that was held before.
    pub(super) fn begin_peak(&self) -> Result<(), DeviceError> {
        let Some(pool) = self.pool()? else { return Ok(()) };
        let mut none = 0u64;
        // SAFETY: the attribute is a u64 of a live pool.
        let reset = unsafe { mem_pool::set_attribute(pool, PEAK, (&raw mut none).cast()) };
        reset.map_err(|why| DeviceError::call("counting its memory anew", why))
    }

    /// The most bytes that were held since, where the driver counts them.
    pub(super) fn peak(&self) -> Result<Option<u64>, DeviceError> {
        let Some(pool) = self.pool()? else { return Ok(None) };
        let mut bytes = 0u64;
        // SAFETY: as above.
        let read = unsafe { mem_pool::get_attribute(pool, PEAK, (&raw mut bytes).cast()) };
        read.map_err(|why| DeviceError::call("asking what it held", why))?;
        Ok(Some(bytes))
    }

    /// The pool that buffers come from; none where they are allocated one by one.
    fn pool(&self) -> Result<Option<CUmemoryPool>, DeviceError> {
        if !self.context.has_async_alloc() {
            return Ok(None);
        }
        // SAFETY: the context's own device.
        let pool = unsafe { device::get_mem_pool(self.context.cu_device()) };
        pool.map(Some).map_err(|why| DeviceError::call("asking for its memory pool", why))
    }
}

/// Most bytes that a pool handed out at a time.
const PEAK: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
