//! CUDA through cudarc: the driver, kernels by NVRTC, products by cuBLAS, all loaded at run time.
//!
//! One stream, so what is launched runs in order, and cuBLAS gives the same bits on the same
//! device every time; its pedantic mode takes no faster type than f64 in the place of f64.

use std::collections::HashMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::cublas::sys;
use cudarc::driver::result::{device, mem_pool};
use cudarc::driver::sys::{CUevent_flags, CUfunction_attribute, CUmemPool_attribute, CUmemoryPool};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DevicePtr, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg,
};

use super::blas::{Blas, Shape};
use super::compile::{self, FLAGS, Image, OLDEST};
use super::current::{Before, Bytes, Current, InContext};
use super::error::DeviceError;
use super::machine::{Arguments, Compute, Machine, Product};
use super::user_kernel::launch::{Code, Launch, Launches, Passed};
use super::{Description, KERNELS, compare, policy, presence};

/// Threads of a block.
const BLOCK: usize = 256;
/// The same of a launch of few threads, each of which walks a row: in large blocks they would lie
/// on few of the multiprocessors.
const SMALL_BLOCK: usize = 32;
/// Threads from which on large blocks reach every multiprocessor of the GPUs in use: some 150.
const MANY: usize = 150 * BLOCK;

/// Bytes of dynamic shared memory that a kernel has without asking for more.
const SHARED: u32 = 48 << 10;

/// An NVIDIA GPU.
pub(super) struct Cuda {
    description: Description,
    /// What kernels are compiled for.
    architecture: String,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    blas: Blas,
    /// For products of policies, in the types that they say.
    tensor: Blas,
    kernels: HashMap<&'static str, CudaFunction>,
    /// Bytes that its pool kept while nobody had them, before this was opened.
    released_above: Option<u64>,
    /// Dropped last: cudarc leaves its own context current where it gives things back.
    before: Option<Before>,
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.before = Before::now().ok();
        // Others in this process may want the memory that the pool kept for the next slab.
        let _ = self.within("giving its memory back", || {
            if let (Some(bytes), Some(pool)) = (self.released_above, self.pool()?) {
                set(pool, Counter::RELEASED_ABOVE, bytes)?;
            }
            self.stream.synchronize()
        });
    }
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
        // Dropped when all of this is made: cudarc makes its own context current, and leaves it so.
        let _before = Before::now().map_err(absent)?;
        let context = CudaContext::new(ordinal).map_err(absent)?;
        let capability = context.compute_capability().map_err(absent)?;
        let name = context.name().map_err(absent)?;
        let (major, minor) = capability;
        if capability < OLDEST {
            let why = format!("{name} has compute capability {major}.{minor}, 7.5 is the oldest");
            return Err(DeviceError::Absent(why));
        }
        let architecture = compile::architecture(capability)?;
        let mut kernels = HashMap::new();
        for (image, names) in [
            (compile::reference(&architecture)?, &KERNELS[..]),
            (compile::policy(&architecture)?, &policy::KERNELS[..]),
            (compile::compare(&architecture)?, &compare::KERNELS[..]),
        ] {
            load(&context, image, names, &mut kernels)?;
        }
        let stream = context.default_stream();
        let refused = |why| DeviceError::call("opening cuBLAS", why);
        let blas = Blas::new(&stream, sys::cublasMath_t::CUBLAS_PEDANTIC_MATH).map_err(refused)?;
        // Pedantic mode may leave the tensor cores out, which are what a job computes on.
        let tensor = Blas::new(&stream, sys::cublasMath_t::CUBLAS_DEFAULT_MATH).map_err(refused)?;
        let description = Description {
            name: format!("{name}, compute capability {major}.{minor}"),
            compiler: format!("NVRTC, {architecture} {FLAGS}"),
            products: "cuBLAS dgemm, f64, pedantic".into(),
        };
        let mut cuda = Cuda {
            description,
            architecture,
            context,
            stream,
            blas,
            tensor,
            kernels,
            released_above: None,
            before: None,
        };
        cuda.keep_memory().map_err(absent)?;
        Ok(cuda)
    }

    /// Has the pool keep what is freed: each slab asks for as much as the one before, and by
    /// default the driver gives all of it back whenever a copy is waited for.
    fn keep_memory(&mut self) -> Result<(), DriverError> {
        let Some(pool) = self.pool()? else { return Ok(()) };
        let before = counted(pool, Counter::RELEASED_ABOVE)?;
        set(pool, Counter::RELEASED_ABOVE, u64::MAX)?;
        self.released_above = Some(before);
        Ok(())
    }

    /// Runs calls with our context current, and gives the thread its own back.
    fn within<T>(
        &self,
        what: &str,
        calls: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        let failed = |why| DeviceError::call(what, why);
        let _current = Current::of(&self.context).map_err(failed)?;
        calls().map_err(failed)
    }

    /// An error of an earlier asynchronous call, if there was one.
    fn settled(&self, what: &str) -> Result<(), DeviceError> {
        self.context.check_err().map_err(|why| DeviceError::call(what, why))
    }
}

fn load(
    context: &Arc<CudaContext>,
    image: Image,
    names: &[&'static str],
    kernels: &mut HashMap<&'static str, CudaFunction>,
) -> Result<(), DeviceError> {
    let module = context.load_module(image.loadable());
    let module = module.map_err(|why| DeviceError::call("loading its kernels", why))?;
    for kernel in names {
        let failed = |why| DeviceError::call(&format!("loading the kernel {kernel}"), why);
        kernels.insert(kernel, module.load_function(kernel).map_err(failed)?);
    }
    Ok(())
}

/// A kernel's arguments, which travel by value.
#[repr(transparent)]
struct ByValue<A>(A);

// SAFETY: `Arguments` are plain fields of 8 bytes, laid out as the kernel's struct.
unsafe impl<A: Arguments> DeviceRepr for ByValue<A> {}

impl Machine for Cuda {
    type Buffer = Bytes;

    fn description(&self) -> &Description {
        &self.description
    }

    /// What was freed is the pool's until its stream has come there, and the driver counts that as
    /// taken: a plan would then hang on how fast the device was.
    fn free(&self) -> Result<usize, DeviceError> {
        self.within("asking for its free memory", || {
            self.stream.synchronize()?;
            let (free, _) = self.context.mem_get_info()?;
            Ok(free + self.pooled()?)
        })
    }

    fn zeros(&self, bytes: usize) -> Result<Bytes, DeviceError> {
        let what = format!("allocating {bytes} bytes of its memory");
        self.within(&what, || {
            self.stream.alloc_zeros(bytes).map(|bytes| InContext::new(bytes, &self.context))
        })
    }

    fn upload(&self, bytes: &[u8], to: &mut Bytes) -> Result<(), DeviceError> {
        self.within("copying to it", || self.stream.memcpy_htod(bytes, &mut **to))?;
        self.settled("copying to it")
    }

    fn download(&self, from: &Bytes, to: &mut [u8]) -> Result<(), DeviceError> {
        if to.is_empty() {
            return Ok(());
        }
        let what = "copying from it, or in a kernel before";
        self.within(what, || {
            self.stream.memcpy_dtoh(&from.slice(..to.len()), to)?;
            // cudarc does not wait for a copy to memory that is not pinned.
            self.stream.synchronize()
        })?;
        self.settled(what)
    }

    fn address(&self, buffer: &Bytes) -> u64 {
        buffer.device_ptr(&self.stream).0
    }

    unsafe fn launch<A: Arguments>(&self, arguments: &A) -> Result<(), DeviceError> {
        let block = if arguments.threads() < MANY { SMALL_BLOCK } else { BLOCK };
        let blocks = arguments.threads().div_ceil(block);
        if blocks == 0 {
            return Ok(());
        }
        let failed = |why: String| DeviceError::call(&format!("launching {}", A::KERNEL), why);
        let config = LaunchConfig {
            grid_dim: (u32::try_from(blocks).map_err(|why| failed(why.to_string()))?, 1, 1),
            block_dim: (block as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        let arguments = ByValue(*arguments);
        let mut launch = self.stream.launch_builder(&self.kernels[A::KERNEL]);
        self.within(&format!("launching {}", A::KERNEL), || {
            // SAFETY: the caller vouches for the addresses, `Arguments` for the layout.
            unsafe { launch.arg(&arguments).launch(config) }.map(|_| ())
        })
    }

    /// Row-major, so cuBLAS, which is column-major, is told the transposed product.
    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        use sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};
        let Product { rows, cols, lhs_transposed, rhs_transposed, depth, compute, .. } = *product;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let failed = |why: &dyn std::fmt::Display| {
            DeviceError::call(&format!("a product of {rows} x {depth} x {cols}"), why)
        };
        let size = |n: usize| c_int::try_from(n).map_err(|why| failed(&why));
        let op = |transposed| if transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
        let (m, n, k) = (size(cols)?, size(rows)?, size(depth)?);
        // Of an operand as it lies, which is its transpose to cuBLAS.
        let [rhs_lead, lhs_lead] =
            [if rhs_transposed { k } else { m }, if lhs_transposed { n } else { k }];
        let leads = [rhs_lead, lhs_lead, m].map(|n| n.max(1));
        let shape =
            Shape { sizes: [m, n, k], ops: [op(rhs_transposed), op(lhs_transposed)], leads };
        let _current = Current::of(&self.context).map_err(|why| failed(&why))?;
        // SAFETY: the caller says that the addresses hold those matrices.
        let multiplied = unsafe {
            match compute {
                Compute::F64 => self.blas.double(product, shape),
                _ => self.tensor.single(product, shape),
            }
        };
        multiplied.map_err(|why| failed(&why))
    }
}

impl Launches for Cuda {
    type Kernel = InContext<CudaFunction>;

    fn load(&self, code: &Code, entry: &str) -> Result<InContext<CudaFunction>, DeviceError> {
        let image = match code {
            Code::Cuda { file, source } => compile::user_source(file, source, &self.architecture)?,
            Code::Module(file) => compile::module(file)?,
        };
        self.within(&format!("loading the kernel {entry}"), || {
            let kernel = self.context.load_module(image.loadable())?.load_function(entry)?;
            Ok(InContext::new(kernel, &self.context))
        })
    }

    unsafe fn start(
        &self,
        kernel: &InContext<CudaFunction>,
        launch: Launch,
        arguments: &[Passed],
    ) -> Result<(), DeviceError> {
        let dimensions = |[x, y, z]: [u32; 3]| (x, y, z);
        let config = LaunchConfig {
            grid_dim: dimensions(launch.grid),
            block_dim: dimensions(launch.block),
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
        self.within("a kernel of yours", || {
            if launch.shared > SHARED {
                let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                kernel.set_attribute(most, i32::try_from(launch.shared).unwrap_or(i32::MAX))?;
            }
            // SAFETY: the caller's.
            unsafe { builder.launch(config) }?;
            // Its errors are told here, not in what is called next.
            self.stream.synchronize()
        })
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
        let _current = Current::of(&self.context).map_err(failed)?;
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
        self.within("counting its memory anew", || {
            let Some(pool) = self.pool()? else { return Ok(()) };
            set(pool, Counter::PEAK, 0)
        })
    }

    /// The most bytes that were held since, where the driver counts them.
    pub(super) fn peak(&self) -> Result<Option<u64>, DeviceError> {
        self.within("asking what it held", || {
            self.pool()?.map(|pool| counted(pool, Counter::PEAK)).transpose()
        })
    }

    /// Bytes that the pool keeps and nobody has: it has them for who asks next.
    fn pooled(&self) -> Result<usize, DriverError> {
        let Some(pool) = self.pool()? else { return Ok(0) };
        let (kept, used) = (counted(pool, Counter::KEPT)?, counted(pool, Counter::USED)?);
        Ok(usize::try_from(kept.saturating_sub(used)).unwrap_or(0))
    }

    /// The pool that buffers come from; none where they are allocated one by one.
    fn pool(&self) -> Result<Option<CUmemoryPool>, DriverError> {
        if !self.context.has_async_alloc() {
            return Ok(None);
        }
        // SAFETY: the context's own device.
        unsafe { device::get_mem_pool(self.context.cu_device()) }.map(Some)
    }
}

/// What a pool counts, in bytes.
struct Counter;

impl Counter {
    /// The most that were handed out at a time.
    const PEAK: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    const USED: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
    /// What is kept beyond this goes back to the driver when something is waited for.
    const RELEASED_ABOVE: CUmemPool_attribute =
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    const KEPT: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
}

fn set(
    pool: CUmemoryPool,
    counter: CUmemPool_attribute,
    mut bytes: u64,
) -> Result<(), DriverError> {
    // SAFETY: these attributes are a u64 of a live pool.
    unsafe { mem_pool::set_attribute(pool, counter, (&raw mut bytes).cast()) }
}

fn counted(pool: CUmemoryPool, counter: CUmemPool_attribute) -> Result<u64, DriverError> {
    let mut bytes = 0u64;
    // SAFETY: these attributes are a u64 of a live pool.
    unsafe { mem_pool::get_attribute(pool, counter, (&raw mut bytes).cast()) }?;
    Ok(bytes)
}
