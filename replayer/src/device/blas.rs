//! cuBLAS: a handle on a stream, and the two products that are asked of it.
//!
//! Not cudarc's own type, whose drop panics where the handle cannot be given back, as after an
//! error that ended the context.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::cublas::result::{self, CublasError};
use cudarc::cublas::sys;
use cudarc::driver::{CudaContext, CudaStream};

use super::current::Current;
use super::machine::{Compute, Product};

/// A handle of cuBLAS. Its context must be current wherever it is used.
pub(super) struct Blas {
    handle: sys::cublasHandle_t,
    context: Arc<CudaContext>,
}

// SAFETY: a handle may be used by any thread; that its settings stay as they are is what NVIDIA
// asks for, and nothing changes them once it is made.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Drop for Blas {
    fn drop(&mut self) {
        let current = Current::of(&self.context);
        // SAFETY: the handle is this one's own. Where it cannot be given back it stays.
        let _ = unsafe { result::destroy_handle(self.handle) };
        drop(current);
    }
}

/// A product as cuBLAS is told it: m, n and k, what is done to its operands, their strides.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) sizes: [c_int; 3],
    pub(super) ops: [sys::cublasOperation_t; 2],
    pub(super) leads: [c_int; 3],
}

impl Blas {
    /// On a stream whose context is current.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        mode: sys::cublasMath_t,
    ) -> Result<Blas, CublasError> {
        let blas = Blas { handle: result::create_handle()?, context: stream.context().clone() };
        // SAFETY: the handle was just made, and `Cuda` keeps the stream as long.
        unsafe {
            result::set_stream(blas.handle, stream.cu_stream().cast())?;
            sys::cublasSetMathMode(blas.handle, mode).result()?;
        }
        Ok(blas)
    }

    /// A product in f64.
    ///
    /// # Safety
    ///
    /// The addresses must hold the matrices that the product and its shape say.
    pub(super) unsafe fn double(&self, product: &Product, shape: Shape) -> Result<(), CublasError> {
        let Shape { sizes: [m, n, k], ops, leads } = shape;
        let beta = if product.add { 1.0 } else { 0.0 };
        // SAFETY: the caller's; the scalars outlive the call, which reads them before it returns.
        unsafe {
            result::dgemm(
                self.handle,
                ops[0],
                ops[1],
                m,
                n,
                k,
                &1.0,
                product.rhs as *const f64,
                leads[0],
                product.lhs as *const f64,
                leads[1],
                &beta,
                product.target as *mut f64,
                leads[2],
            )
        }
    }

    /// A product with sums and a result in f32.
    ///
    /// # Safety
    ///
    /// As for [`Blas::double`].
    pub(super) unsafe fn single(&self, product: &Product, shape: Shape) -> Result<(), CublasError> {
        use sys::cublasComputeType_t::{
            CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_PEDANTIC,
        };
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let (datatype, sums) = match product.compute {
            Compute::Bf16 => (CUDA_R_16BF, CUBLAS_COMPUTE_32F),
            Compute::F16 => (CUDA_R_16F, CUBLAS_COMPUTE_32F),
            Compute::Tf32 => (CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32),
            Compute::F32 | Compute::F64 => (CUDA_R_32F, CUBLAS_COMPUTE_32F_PEDANTIC),
        };
        let Shape { sizes: [m, n, k], ops, leads } = shape;
        let (alpha, beta) = (1.0f32, if product.add { 1.0f32 } else { 0.0 });
        // SAFETY: as above.
        unsafe {
            result::gemm_ex(
                self.handle,
                ops[0],
                ops[1],
                m,
                n,
                k,
                (&raw const alpha).cast(),
                product.rhs as *const c_void,
                datatype,
                leads[0],
                product.lhs as *const c_void,
                datatype,
                leads[1],
                (&raw const beta).cast(),
                product.target as *mut c_void,
                CUDA_R_32F,
                leads[2],
                sums,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
    }
}
