//! NVRTC: kernels become machine code at run time, so a build needs no CUDA.
//!
//! Code for the GPU that is there, not PTX: a driver makes nothing of the PTX of an NVRTC that is
//! newer than itself, and pip brings the newest ("CUDA Compatibility", minor versions).

use std::ffi::{CString, c_int};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{Ptx, result as nvrtc, sys};

use super::error::DeviceError;
use super::{formulas, presence};

/// What comes before the kernels of every file, but for the formulas.
const PRELUDE: &str = include_str!("kernels/prelude.cuh");
const REFERENCE: &str = include_str!("kernels/reference.cu");
const POLICY: &str = include_str!("kernels/policy.cu");
const COMPARE: &str = include_str!("kernels/compare.cu");

/// The kernels of a file behind what all of them have in common; lines are counted from the file's
/// own first.
fn behind_the_prelude(file: &str, kernels: &str) -> String {
    format!("{PRELUDE}{}#line 1 \"{file}\"\n{kernels}", formulas::source())
}

/// The oldest generation that the kernels are compiled for.
pub(super) const OLDEST: (i32, i32) = (7, 5);

/// IEEE arithmetic, in the order that is written: no subnormal is flushed, no quotient or root
/// approximated, no product and sum contracted. NVRTC's own default contracts.
pub(super) const FLAGS: &str = "--ftz=false --prec-div=true --prec-sqrt=true --fmad=false";

/// What NVRTC made: machine code, or PTX and its zero byte.
pub(super) struct Image(Vec<u8>);

impl Image {
    /// As the driver loads it.
    pub(super) fn loadable(self) -> Ptx {
        Ptx::from_binary(self.0)
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// What to compile for: the GPU itself, `sm_90`, or where this NVRTC does not know it yet, PTX of
/// the newest generation before it that it knows, `compute_90`.
pub(super) fn architecture((major, minor): (i32, i32)) -> Result<String, DeviceError> {
    presence::need(presence::nvrtc)?;
    let wanted = major * 10 + minor;
    let known = known().map_err(|why| DeviceError::call("asking what NVRTC compiles for", why))?;
    match known.into_iter().filter(|&one| one <= wanted).max() {
        Some(newest) if newest == wanted => Ok(format!("sm_{wanted}")),
        Some(newest) => Ok(format!("compute_{newest}")),
        None => {
            let why = format!("this NVRTC compiles for no compute capability {major}.{minor}");
            Err(DeviceError::Absent(why))
        }
    }
}

/// Numbers of the generations that NVRTC knows.
fn known() -> Result<Vec<c_int>, nvrtc::NvrtcError> {
    let mut count = 0;
    // SAFETY: NVRTC writes a number.
    unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result()?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many numbers as it said.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result()?;
    Ok(known)
}

/// The reference's kernels for an [`architecture`].
pub(super) fn reference(architecture: &str) -> Result<Image, DeviceError> {
    kernels("reference.cu", REFERENCE, architecture)
}

/// The policies' kernels, likewise.
pub(super) fn policy(architecture: &str) -> Result<Image, DeviceError> {
    kernels("policy.cu", POLICY, architecture)
}

/// The comparison's kernel, likewise.
pub(super) fn compare(architecture: &str) -> Result<Image, DeviceError> {
    kernels("compare.cu", COMPARE, architecture)
}

/// A user's kernel, with NVRTC's own defaults as nvcc would give it; headers are looked for beside
/// it and in a CUDA toolkit.
pub(super) fn user_source(
    file: &Path,
    source: &str,
    architecture: &str,
) -> Result<Image, DeviceError> {
    // The folder of a bare name is empty, which NVRTC refuses.
    let beside = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let toolkits = toolkits.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    let folders = [beside.unwrap_or(Path::new(".")).to_owned()].into_iter();
    let folders = folders.chain(toolkits.map(|home| home.join("include")));
    let options = folders.map(|folder| format!("--include-path={}", folder.display())).collect();
    with(options, (&file.display().to_string(), source), architecture)
}

/// A user's PTX, cubin or fatbin as it is; PTX ends in a zero byte for the driver.
pub(super) fn module(file: &Path) -> Result<Image, DeviceError> {
    let read = std::fs::read(file);
    let mut bytes =
        read.map_err(|why| DeviceError::call(&format!("reading {}", file.display()), why))?;
    bytes.push(0);
    Ok(Image(bytes))
}

fn kernels(file: &str, source: &str, architecture: &str) -> Result<Image, DeviceError> {
    compile(file, &behind_the_prelude(file, source), architecture)
}

fn compile(file: &str, source: &str, architecture: &str) -> Result<Image, DeviceError> {
    with(FLAGS.split(' ').map(String::from).collect(), (file, source), architecture)
}

/// A program of NVRTC's. Not cudarc's own type, which gives PTX alone.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in `with`, and destroyed here alone.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn with(
    mut options: Vec<String>,
    (file, source): (&str, &str),
    architecture: &str,
) -> Result<Image, DeviceError> {
    presence::need(presence::nvrtc)?;
    let refused =
        |log: String| DeviceError::Compile { file: file.into(), target: architecture.into(), log };
    options.push(format!("--gpu-architecture={architecture}"));
    let text = |text: &str| CString::new(text).map_err(|_| refused("a zero byte in it".into()));
    let (name, source) = (text(file)?, text(source)?);
    options.iter().try_for_each(|option| text(option).map(|_| ()))?;
    let failed = |why: nvrtc::NvrtcError| refused(format!("NVRTC says {:?}", why.0));
    let program = Program(nvrtc::create_program(&source, Some(&name)).map_err(failed)?);
    // SAFETY: the program was just made, from texts that live as long.
    if let Err(why) = unsafe { nvrtc::compile_program(program.0, &options) } {
        // SAFETY: as above.
        let log = unsafe { nvrtc::get_program_log(program.0) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|&c| c != 0).collect();
        return Err(match String::from_utf8_lossy(&log).trim() {
            "" => failed(why),
            log => refused(log.into()),
        });
    }
    match architecture.starts_with("sm_") {
        true => code(&program).map_err(failed),
        false => {
            // SAFETY: as above.
            let ptx = unsafe { nvrtc::get_ptx(program.0) }.map_err(failed)?;
            Ok(Image(ptx.into_iter().map(|c| c as u8).collect()))
        }
    }
}

/// The machine code of a program that was compiled for a GPU.
fn code(program: &Program) -> Result<Image, nvrtc::NvrtcError> {
    let mut size = 0;
    // SAFETY: the program was compiled; NVRTC writes a number.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }.result()?;
    let mut code = vec![0u8; size];
    // SAFETY: there is room for as many bytes as it said.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }.result()?;
    Ok(Image(code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::compare::KERNELS as COMPARE_KERNELS;
    use crate::device::policy::KERNELS as POLICY_KERNELS;

    /// Virtual architectures, whose PTX can be read, and GPUs.
    const PTX: [&str; 6] =
        ["compute_75", "compute_80", "compute_89", "compute_90", "compute_100", "compute_120"];
    const GPUS: [&str; 6] = ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"];

    /// Where `make test-gpu` says that the compiler is there, it must be.
    fn compiler_is_there() -> bool {
        let there = presence::nvrtc().is_ok();
        assert!(there || std::env::var_os("BACKTAPE_TEST_NVRTC").is_none(), "no libnvrtc.so");
        there
    }

    fn text(Image(bytes): Image) -> String {
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Without the library its absence is what is told.
    #[test]
    fn every_kernel_compiles_for_every_generation_or_the_missing_library_is_named() {
        for target in PTX.into_iter().chain(GPUS) {
            let sources = [(reference as fn(_) -> _, &crate::device::KERNELS[..])];
            let others = [
                (policy as fn(_) -> _, &POLICY_KERNELS[..]),
                (compare as fn(_) -> _, &COMPARE_KERNELS[..]),
            ];
            let sources = sources.into_iter().chain(others);
            for (compiled, kernels) in sources {
                let compiled: Result<Image, DeviceError> = compiled(target);
                match compiled.map(text) {
                    // Machine code is an ELF file, with a section `.text.` for each kernel.
                    Ok(code) if target.starts_with("sm_") => {
                        assert!(code.starts_with("\x7fELF"), "{target}");
                        for kernel in kernels {
                            assert!(code.contains(&format!(".text.{kernel}\0")), "{kernel}");
                        }
                    }
                    Ok(ptx) => {
                        assert!(ptx.contains(&format!(".target sm_{}", &target[8..])), "{target}");
                        for kernel in kernels {
                            assert!(ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
                        }
                    }
                    Err(error) => {
                        assert!(!compiler_is_there(), "{error}");
                        assert!(error.to_string().contains("libnvrtc"), "{error}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_gpu_that_the_compiler_does_not_know_yet_has_ptx_of_the_newest_before_it() {
        if compiler_is_there() {
            assert_eq!(architecture((8, 0)).unwrap(), "sm_80");
            let unknown = architecture((99, 0)).unwrap();
            assert!(unknown.starts_with("compute_"), "{unknown}");
            assert!(
                architecture((1, 0)).unwrap_err().to_string().contains("no compute capability")
            );
        }
    }

    /// Not told by the kernels: the library's own exp contracts and flushes where it may.
    #[test]
    fn products_and_sums_are_not_contracted_and_quotients_are_exact() {
        let source = r#"extern "C" __global__ void probe(double *x, float *y) {
            x[0] = x[1] * x[2] + x[3];
            y[0] = y[1] / y[2] + y[3] * y[4];
        }"#;
        if !compiler_is_there() {
            return;
        }
        let ptx = text(compile("probe.cu", source, "compute_80").unwrap());
        for wanted in ["mul.rn.f64", "add.rn.f64", "div.rn.f32", "mul.rn.f32", "add.rn.f32"] {
            assert!(ptx.contains(wanted), "no {wanted} in {ptx}");
        }
        assert!(!ptx.contains("fma") && !ptx.contains(".ftz"), "{ptx}");
    }

    #[test]
    fn what_the_compiler_refuses_is_said_with_its_file_and_line() {
        if compiler_is_there() {
            let refused = compile("probe.cu", "int f() { return x; }", "compute_80").err().unwrap();
            let said = refused.to_string();
            assert!(said.contains("probe.cu(1)") && said.contains("\"x\" is undefined"), "{said}");
        }
    }
}
