//! The kernels compiled by a C compiler and run one thread after the other, for the tests of
//! machines without a GPU.

use std::cell::Cell;
use std::ffi::c_void;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::Library;

use super::Description;
use super::error::DeviceError;
use super::machine::{Arguments, Compute, Machine, Product};
use super::user_kernel::launch::{Code, Launch, Launches, Passed};

/// This process as a device.
pub(super) struct Host {
    description: Description,
    kernels: Library,
    _folder: tempfile::TempDir,
}

/// Sources as a library of plain functions.
fn compiled(sources: &[&Path], options: &[&str]) -> (Library, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = folder.path().join("kernels.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-x", "c", "-std=gnu11", "-shared", "-fPIC"]).args(options);
    let status = compiler.args(sources).arg("-lm").arg("-o").arg(&library).status();
    assert!(status.expect("cc runs").success(), "cc compiles the kernels");
    // SAFETY: a library of plain functions, without initialisers.
    (unsafe { Library::new(&library) }.expect("the kernels load"), folder)
}

impl Host {
    /// Compiles the kernels with `cc`.
    pub(super) fn new() -> Host {
        let path_of = |file: &str| {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("src/device/kernels").join(file)
        };
        let options = ["-DHOST", "-O2", "-ffp-contract=off", "-Wall", "-Werror"];
        let mut formulas = tempfile::NamedTempFile::new().expect("a temporary file");
        formulas.write_all(super::formulas::source().as_bytes()).expect("it is written");
        let before = [path_of("prelude.cuh"), formulas.path().to_owned()];
        let before = before.each_ref().map(|path| path.to_str().expect("its path is UTF-8"));
        let included = before.iter().flat_map(|&path| ["-include", path]);
        let included: Vec<&str> = included.collect();
        let sources = ["reference.cu", "policy.cu", "compare.cu"].map(path_of);
        let all = [&included[..], &options].concat();
        let (kernels, folder) = compiled(&sources.each_ref().map(PathBuf::as_path), &all);
        let description = Description {
            name: "this process".into(),
            compiler: format!("cc {}", options.join(" ")),
            products: "loops in f64".into(),
        };
        Host { description, kernels, _folder: folder }
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
        Ok(1 << 30)
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
        // SAFETY: the caller's.
        unsafe {
            match product.compute {
                Compute::F64 => multiply(product, |x: f64| x),
                Compute::F32 | Compute::Tf32 => multiply(product, |x: f32| x),
                Compute::Bf16 => multiply(product, |bits| half::bf16::from_bits(bits).to_f32()),
                Compute::F16 => multiply(product, |bits| half::f16::from_bits(bits).to_f32()),
            }
        }
        Ok(())
    }
}

/// # Safety
///
/// As for [`Machine::multiply`]: operands of type `E`, the result of type `F`.
unsafe fn multiply<E: Copy, F>(product: &Product, value: impl Fn(E) -> F)
where
    F: Copy + std::ops::Mul<Output = F> + std::ops::Add<Output = F> + std::iter::Sum,
{
    let Product { rows, cols, depth, .. } = *product;
    let offset = |transposed: bool, (row, col), (height, width)| {
        if transposed { col * height + row } else { row * width + col }
    };
    for row in 0..rows {
        for col in 0..cols {
            let term = |i: usize| {
                let lhs = offset(product.lhs_transposed, (row, i), (rows, depth));
                let rhs = offset(product.rhs_transposed, (i, col), (depth, cols));
                // SAFETY: the caller says that the addresses hold those matrices.
                unsafe {
                    value(*(product.lhs as *const E).add(lhs))
                        * value(*(product.rhs as *const E).add(rhs))
                }
            };
            let sum: F = (0..depth).map(term).sum();
            // SAFETY: as above.
            let target = unsafe { &mut *(product.target as *mut F).add(row * cols + col) };
            *target = if product.add { *target + sum } else { sum };
        }
    }
}

/// What CUDA gives a kernel, for one thread after the other; behind it comes the kernel's source,
/// then a function that calls it for each.
const CUDA_IN_C: &str = "
#define __global__
#define __device__
typedef struct { int x, y, z; } backtape_dim;
static backtape_dim blockIdx, threadIdx, blockDim, gridDim;
";

impl Launches for Host {
    type Kernel = (Library, tempfile::TempDir);

    /// Arguments come as the words that hold them: the kernel's own signature says their types.
    fn load(&self, code: &Code, entry: &str) -> Result<Self::Kernel, DeviceError> {
        let Code::Cuda { source, .. } = code else { panic!("a C compiler takes source") };
        let signature = source.split(&format!("void {entry}(")).nth(1).expect("the kernel");
        let signature = &signature[..signature.find(')').expect("its arguments end")];
        let arguments = signature.split(',').enumerate().map(|(index, argument)| {
            let pointee = argument.trim().rsplit_once([' ', '*']).expect("a type and a name").0;
            match argument.contains('*') {
                true => format!("*(void **)a[{index}]"),
                false => format!("*({pointee} *)a[{index}]"),
            }
        });
        let arguments = arguments.collect::<Vec<_>>().join(", ");
        let call = format!(
            "void backtape_start(void **a, const unsigned *g, const unsigned *b) {{
                 blockDim.x = b[0], blockDim.y = b[1], blockDim.z = b[2];
                 gridDim.x = g[0], gridDim.y = g[1], gridDim.z = g[2];
                 for (unsigned i = 0; i < g[0] * g[1] * g[2]; i++)
                     for (unsigned j = 0; j < b[0] * b[1] * b[2]; j++) {{
                         blockIdx.x = i % g[0], blockIdx.y = i / g[0] % g[1];
                         blockIdx.z = i / g[0] / g[1];
                         threadIdx.x = j % b[0], threadIdx.y = j / b[0] % b[1];
                         threadIdx.z = j / b[0] / b[1];
                         {entry}({arguments});
                     }}
             }}"
        );
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("own.c");
        std::fs::write(&file, [CUDA_IN_C, source, &call].concat()).expect("a temporary file");
        Ok(compiled(&[&file], &["-O1"]))
    }

    unsafe fn start(
        &self,
        kernel: &Self::Kernel,
        launch: Launch,
        arguments: &[Passed],
    ) -> Result<(), DeviceError> {
        type Start = unsafe extern "C" fn(*const *const c_void, *const u32, *const u32);
        let words: Vec<[u8; 8]> = arguments.iter().map(word).collect();
        let words: Vec<*const c_void> = words.iter().map(|word| word.as_ptr().cast()).collect();
        // SAFETY: the caller's.
        unsafe {
            let start = kernel.0.get::<Start>("backtape_start").expect("it was compiled");
            start(words.as_ptr(), launch.grid.as_ptr(), launch.block.as_ptr());
        }
        Ok(())
    }
}

fn word(passed: &Passed) -> [u8; 8] {
    let four = |bytes: [u8; 4]| u64::from(u32::from_le_bytes(bytes)).to_le_bytes();
    match passed {
        Passed::Address(address) => address.to_le_bytes(),
        Passed::I64(number) => number.to_le_bytes(),
        Passed::F64(number) => number.to_le_bytes(),
        Passed::I32(number) => four(number.to_le_bytes()),
        Passed::F32(number) => four(number.to_le_bytes()),
    }
}
