//! NVRTC: the kernel becomes machine code at run time, so a build needs no CUDA.
//!
//! Code for the GPU that is there, not PTX: a driver makes nothing of the PTX of an NVRTC that is
//! newer than itself, as torch's wheels often bring it ("CUDA Compatibility", minor versions).

use std::ffi::{CString, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::nvrtc::result::{self as nvrtc, NvrtcError};
use cudarc::nvrtc::sys;

use super::machine::DeviceError;

/// Source of the kernel.
const KERNEL: &str = include_str!("kernels/fingerprint.cu");

const WHAT: &str = "compiling its kernel";

/// A program of NVRTC's.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in `compiled`, and destroyed here alone.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

/// cudarc panics where a library is missing that nobody asked for first.
pub(super) fn present(loads: fn() -> bool, why: &str) -> Result<(), DeviceError> {
    match catch_unwind(AssertUnwindSafe(loads)).unwrap_or(false) {
        true => Ok(()),
        false => Err(DeviceError::Absent(why.into())),
    }
}

fn nvrtc_loads() -> bool {
    // SAFETY: loads a library whose initialisers do nothing but set it up.
    unsafe { sys::is_culib_present() }
}

/// The kernel for a GPU of this compute capability: its code, or where this NVRTC does not know it
/// yet, PTX of the newest before it.
pub(super) fn fingerprint((major, minor): (c_int, c_int)) -> Result<Vec<u8>, DeviceError> {
    present(nvrtc_loads, "the compiler's library, libnvrtc.so, is not found")?;
    let wanted = major * 10 + minor;
    let known = known().map_err(|why| DeviceError::call(WHAT, why))?;
    match known.into_iter().filter(|&one| one <= wanted).max() {
        Some(newest) if newest == wanted => compiled(&format!("sm_{wanted}")),
        Some(newest) => compiled(&format!("compute_{newest}")),
        None => {
            let why = format!("NVRTC compiles for no compute capability {major}.{minor}");
            Err(DeviceError::Absent(why))
        }
    }
}

/// Numbers of the generations that NVRTC knows.
fn known() -> Result<Vec<c_int>, NvrtcError> {
    let mut count = 0;
    // SAFETY: NVRTC writes a number.
    unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result()?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many numbers as it said.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result()?;
    Ok(known)
}

/// Code for `sm_90`, PTX and its zero byte for `compute_90`.
fn compiled(architecture: &str) -> Result<Vec<u8>, DeviceError> {
    let failed = |why: NvrtcError| DeviceError::call(WHAT, why);
    let source = CString::new(KERNEL).map_err(|why| DeviceError::call(WHAT, why))?;
    let created = nvrtc::create_program(&source, Some(c"fingerprint.cu"));
    let program = Program(created.map_err(failed)?);
    let options = [format!("--gpu-architecture={architecture}")];
    // SAFETY: the program was just made, from a text that lives as long.
    unsafe {
        if let Err(why) = nvrtc::compile_program(program.0, &options) {
            let log = nvrtc::get_program_log(program.0).unwrap_or_default();
            let log: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|&c| c != 0).collect();
            let log = format!("{:?}: {}", why.0, String::from_utf8_lossy(&log).trim());
            return Err(DeviceError::call(WHAT, log));
        }
        if !architecture.starts_with("sm_") {
            let ptx = nvrtc::get_ptx(program.0).map_err(failed)?;
            return Ok(ptx.into_iter().map(|c| c as u8).collect());
        }
        let mut size = 0;
        sys::nvrtcGetCUBINSize(program.0, &raw mut size).result().map_err(failed)?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result().map_err(failed)?;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without the library its absence is what is told.
    #[test]
    fn the_kernel_compiles_or_the_missing_library_is_named() {
        let compiled = |architecture| {
            present(nvrtc_loads, "no libnvrtc.so")?;
            compiled(architecture).map(|code| String::from_utf8_lossy(&code).into_owned())
        };
        match compiled("compute_75") {
            Ok(ptx) => {
                assert!(ptx.contains(".target sm_75") && ptx.contains(".entry fingerprint("));
                assert!(ptx.contains("red.global.add.u32") || ptx.contains("atom.global.add.u32"));
                let code = compiled("sm_90").unwrap();
                assert!(code.starts_with("\x7fELF") && code.contains(".text.fingerprint\0"));
            }
            Err(error) => {
                assert!(std::env::var_os("BACKTAPE_TEST_NVRTC").is_none(), "{error}");
                assert!(error.to_string().contains("libnvrtc"), "{error}");
            }
        }
    }
}
