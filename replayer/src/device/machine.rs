//! What a device can do: hold bytes, run a kernel on so many threads, multiply matrices.
//!
//! The walks over tiles are written against this, and run on CUDA (`cuda`) and, in the tests of
//! machines without a GPU, on the same kernels compiled by a C compiler (`host`).

use super::Description;
use super::error::DeviceError;

/// A device.
pub(super) trait Machine: Sync {
    /// Bytes of the device.
    type Buffer: Send;

    /// What it is.
    fn description(&self) -> &Description;

    /// Bytes that are free on it.
    fn free(&self) -> Result<usize, DeviceError>;

    /// So many bytes, all 0.
    fn zeros(&self, bytes: usize) -> Result<Self::Buffer, DeviceError>;

    /// Puts bytes at the begin of a buffer.
    fn upload(&self, bytes: &[u8], to: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// Fetches bytes from the begin of a buffer, once all that was launched is done.
    fn download(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Where it lies, as a kernel addresses it.
    fn address(&self, buffer: &Self::Buffer) -> u64;

    /// Runs a kernel, one thread for each of [`Arguments::threads`].
    ///
    /// # Safety
    ///
    /// Every address in the arguments must lie in a live buffer of this machine that holds what
    /// the kernel reads and writes there, or be 0 where the kernel allows it.
    unsafe fn launch<A: Arguments>(&self, arguments: &A) -> Result<(), DeviceError>;

    /// `target (+)= lhs rhs`, each element summed in an order that the shapes decide.
    /// Without columns or rows nothing is done.
    ///
    /// # Safety
    ///
    /// As for [`Machine::launch`]: the addresses must hold the matrices that [`Product`] says.
    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError>;
}

/// What a kernel takes, as it lies in memory: fields of 8 bytes, in the kernel's order.
///
/// # Safety
///
/// The type is `repr(C)`, has no padding, and is the struct of that name in the kernels' source.
pub(super) unsafe trait Arguments: Copy {
    /// Name of the kernel.
    const KERNEL: &'static str;

    /// How many threads it takes.
    fn threads(&self) -> usize;
}

/// How operands lie and in what their products are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compute {
    /// f64 operands, sums and result.
    F64,
    /// f32 operands, sums and result.
    F32,
    /// f32 operands that tf32 holds, multiplied as such; sums and result in f32.
    Tf32,
    /// bf16 operands; sums and result in f32.
    Bf16,
    /// f16 operands; sums and result in f32.
    F16,
}

/// `target [rows, cols] (+)= lhs [rows, depth] rhs [depth, cols]`, row-major; an operand that is
/// transposed lies in memory as its transpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// Address of the result.
    pub(super) target: u64,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Address of the left operand, and whether it lies as `[depth, rows]`.
    pub(super) lhs: u64,
    pub(super) lhs_transposed: bool,
    /// Address of the right operand, and whether it lies as `[cols, depth]`.
    pub(super) rhs: u64,
    pub(super) rhs_transposed: bool,
    /// Terms of a sum.
    pub(super) depth: usize,
    /// Whether the result is added to what is there.
    pub(super) add: bool,
    /// In which types.
    pub(super) compute: Compute,
}
