//! The kernels compiled by a C compiler and run one thread after the other, for the tests of
//! machines without a GPU.

use std::cell::Cell;
use std::ffi::c_void;
use std::path::Path;
use std::process::Command;

use libloading::Library;

use super::Description;
use super::error::DeviceError;
use super::machine::{Arguments, Machine, Product};

/// This process as a device.
pub(super) struct Host {
    description: Description,
    kernels: Library,
    /// What it says is free.
    pub(super) free: usize,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Compiles the kernels with `cc`.
    pub(super) fn new() -> Host {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let library = folder.path().join("reference.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/device/kernels/reference.cu");
        let options = ["-x", "c", "-std=c11", "-DHOST", "-O2", "-ffp-contract=off", "-Wall"];
        let mut compiler = Command::new("cc");
        compiler.args(options).args(["-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]);
        let status = compiler.arg(source).arg("-lm").arg("-o").arg(&library).status();
        assert!(status.expect("cc runs").success(), "cc compiles the kernels");
        // SAFETY: a library of plain functions, without initialisers.
        let kernels = unsafe { Library::new(&library) }.expect("the kernels load");
        let description = Description {
            name: "this process".into(),
            compiler: format!("cc {}", options.join(" ")),
            products: "loops in f64".into(),
        };
        Host { description, kernels, free: 1 << 30, _folder: folder }
    }
}

impl Machine for Host {
    /// Words, as what a kernel reads as f64 must be aligned; cells, as kernels write them by
    /// their address.
    type Buffer = Box<[Cell<u64>]>;

    fn description(&self) -> &Description {
        &self.description
    }

    fn free(&self) -> Result<usize, DeviceError> {
        Ok(self.free)
    }

    fn zeros(&self, bytes: usize) -> Result<Self::Buffer, DeviceError> {
        Ok(vec![Cell::new(0); bytes.div_ceil(size_of::<u64>())].into())
    }

    fn upload(&self, bytes: &[u8], to: &mut Self::Buffer) -> Result<(), DeviceError> {
        assert!(bytes.len() <= size_of_val(&**to), "the buffer has room");
        // SAFETY: it has, and nothing else refers to cells.
        unsafe { bytes.as_ptr().copy_to(to.as_ptr() as *mut u8, bytes.len()) };
        Ok(())
    }

    fn download(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<(), DeviceError> {
        assert!(to.len() <= size_of_val(&**from), "the buffer holds as much");
        // SAFETY: it does.
        unsafe { from.as_ptr().cast::<u8>().copy_to(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn address(&self, buffer: &Self::Buffer) -> u64 {
        buffer.as_ptr() as u64
    }

    unsafe fn launch<A: Arguments>(&self, arguments: &A) -> Result<(), DeviceError> {
        type Kernel = unsafe extern "C" fn(*const c_void, i64);
        // SAFETY: the caller vouches for what the arguments point to, `Arguments` for their shape.
        unsafe {
            let kernel = self.kernels.get::<Kernel>(A::KERNEL).expect("the kernel is there");
            for thread in 0..arguments.threads() {
                kernel((&raw const *arguments).cast(), thread as i64);
            }
        }
        Ok(())
    }

    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        let Product { rows, cols, depth, .. } = *product;
        let at = |transposed: bool, (row, col), (height, width)| {
            if transposed { col * height + row } else { row * width + col }
        };
        for row in 0..rows {
            for col in 0..cols {
                let term = |i: usize| {
                    let lhs = at(product.lhs_transposed, (row, i), (rows, depth));
                    let rhs = at(product.rhs_transposed, (i, col), (depth, cols));
                    // SAFETY: the caller says that the addresses hold those matrices.
                    unsafe {
                        *(product.lhs as *const f64).add(lhs)
                            * *(product.rhs as *const f64).add(rhs)
                    }
                };
                let sum: f64 = (0..depth).map(term).sum();
                // SAFETY: as above.
                let target = unsafe { &mut *(product.target as *mut f64).add(row * cols + col) };
                *target = if product.add { *target + sum } else { sum };
            }
        }
        Ok(())
    }
}
