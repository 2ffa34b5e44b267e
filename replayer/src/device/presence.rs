//! Which of NVIDIA's libraries can be loaded: asked once, as cudarc panics where one is missing
//! that nobody asked for first.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::DeviceError;

/// A library, or one sentence about where to get it.
pub(super) type Library = fn() -> Result<(), &'static str>;

/// Refuses to go on without a library.
pub(super) fn need(library: Library) -> Result<(), DeviceError> {
    library().map_err(|why| DeviceError::Absent(why.into()))
}

/// The driver.
pub(super) fn driver() -> Result<(), &'static str> {
    // SAFETY: loads the driver's library, as any program on a machine with a GPU does.
    loads(|| unsafe { cudarc::driver::sys::is_culib_present() })
        .ok_or("the driver's library, libcuda.so, is not found: this machine has no NVIDIA driver")
}

/// The compiler of kernels.
pub(super) fn nvrtc() -> Result<(), &'static str> {
    // SAFETY: loads a library whose initialisers do nothing but set it up.
    loads(|| unsafe { cudarc::nvrtc::sys::is_culib_present() }).ok_or(
        "the compiler's library, libnvrtc.so, is not found: install the CUDA toolkit, or \
         nvidia-cuda-nvrtc from the Python index with its folder in LD_LIBRARY_PATH",
    )
}

/// Matrix products.
pub(super) fn cublas() -> Result<(), &'static str> {
    // SAFETY: as above.
    loads(|| unsafe { cudarc::cublas::sys::is_culib_present() }).ok_or(
        "the library of matrix products, libcublas.so, is not found: install the CUDA toolkit, or \
         nvidia-cublas from the Python index with its folder in LD_LIBRARY_PATH",
    )
}

/// What brings sums from one GPU to another. Its wheel has no `libnccl.so`, which is the only name
/// that cudarc asks for.
pub(super) fn nccl() -> Result<(), &'static str> {
    // SAFETY: as above.
    loads(|| unsafe { cudarc::nccl::sys::is_culib_present() }).ok_or(
        "the library that joins several GPUs, libnccl.so, is not found: install libnccl-dev, or \
         nvidia-nccl-cu13 from the Python index with a link libnccl.so to its libnccl.so.2 in a \
         folder of LD_LIBRARY_PATH, or name one GPU",
    )
}

fn loads(present: impl FnOnce() -> bool) -> Option<()> {
    catch_unwind(AssertUnwindSafe(present)).unwrap_or(false).then_some(())
}
