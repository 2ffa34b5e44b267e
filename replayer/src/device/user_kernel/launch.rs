//! What a device does with a kernel that is not ours.

use std::path::PathBuf;

use crate::device::error::DeviceError;
use crate::device::machine::Machine;

/// A kernel's code, by the end of its file's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::device) enum Code {
    /// CUDA C++, for NVRTC.
    Cuda {
        /// Its file, beside which headers are looked for.
        file: PathBuf,
        /// Its text.
        source: String,
    },
    /// PTX, a cubin or a fatbin, for the driver.
    Module(PathBuf),
}

/// An argument as it is passed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::device) enum Passed {
    /// Of device memory.
    Address(u64),
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
}

/// How many threads, in which blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::device) struct Launch {
    pub(in crate::device) grid: [u32; 3],
    pub(in crate::device) block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub(in crate::device) shared: u32,
}

/// A machine that runs a user's kernels.
pub(in crate::device) trait Launches: Machine {
    /// A kernel that was loaded.
    type Kernel;

    /// Compiles and loads a kernel.
    fn load(&self, code: &Code, entry: &str) -> Result<Self::Kernel, DeviceError>;

    /// Runs it to its end.
    ///
    /// # Safety
    ///
    /// The arguments must be what the kernel takes. What a wrong kernel does to this device's
    /// memory is found by guards or ends in the driver's error, but it is undefined.
    unsafe fn start(
        &self,
        kernel: &Self::Kernel,
        launch: Launch,
        arguments: &[Passed],
    ) -> Result<(), DeviceError>;
}
