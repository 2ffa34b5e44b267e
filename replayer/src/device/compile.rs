//! NVRTC: kernels become PTX at run time, so a build needs no CUDA.

use std::path::{Path, PathBuf};

use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use super::error::DeviceError;
use super::presence;

/// Lines are counted from the file's own first.
macro_rules! behind_the_prelude {
    ($file:literal) => {
        concat!(
            include_str!("kernels/prelude.cuh"),
            "#line 1 \"",
            $file,
            "\"\n",
            include_str!(concat!("kernels/", $file))
        )
    };
}

/// Sources of the kernels, each behind what all of them have in common.
const REFERENCE: &str = behind_the_prelude!("reference.cu");
const POLICY: &str = behind_the_prelude!("policy.cu");

/// Virtual architectures, oldest first. PTX of an older one runs on every newer device.
pub(super) const TARGETS: [((i32, i32), &str); 6] = [
    ((7, 5), "compute_75"),
    ((8, 0), "compute_80"),
    ((8, 9), "compute_89"),
    ((9, 0), "compute_90"),
    ((10, 0), "compute_100"),
    ((12, 0), "compute_120"),
];

/// IEEE arithmetic, in the order that is written: no subnormal is flushed, no quotient or root
/// approximated, no product and sum contracted. NVRTC's own default contracts.
pub(super) const FLAGS: &str = "--ftz=false --prec-div=true --prec-sqrt=true --fmad=false";

/// PTX of the reference's kernels for one of [`TARGETS`].
pub(super) fn reference(target: &'static str) -> Result<Ptx, DeviceError> {
    compile("reference.cu", REFERENCE, target)
}

/// PTX of the policies' kernels, likewise.
pub(super) fn policy(target: &'static str) -> Result<Ptx, DeviceError> {
    compile("policy.cu", POLICY, target)
}

/// PTX of a user's kernel, with NVRTC's own defaults as nvcc would give it; headers are looked for
/// beside it and in a CUDA toolkit.
pub(super) fn own(file: &Path, source: &str, target: &'static str) -> Result<Ptx, DeviceError> {
    let mut include_paths = vec![file.parent().unwrap_or(Path::new(".")).display().to_string()];
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    let toolkits = toolkits.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    include_paths.extend(toolkits.map(|home| home.join("include").display().to_string()));
    let options = CompileOptions { include_paths, ..CompileOptions::default() };
    with(options, (&file.display().to_string(), source), target)
}

fn compile(file: &str, source: &str, target: &'static str) -> Result<Ptx, DeviceError> {
    let options = CompileOptions {
        ftz: Some(false),
        prec_div: Some(true),
        prec_sqrt: Some(true),
        fmad: Some(false),
        ..CompileOptions::default()
    };
    with(options, (file, source), target)
}

fn with(
    options: CompileOptions,
    (file, source): (&str, &str),
    target: &'static str,
) -> Result<Ptx, DeviceError> {
    presence::need(presence::nvrtc)?;
    let options = CompileOptions { arch: Some(target), name: Some(file.into()), ..options };
    compile_ptx_with_opts(source, options).map_err(|error| DeviceError::Compile {
        file: file.into(),
        target: target.into(),
        log: match error {
            CompileError::CompileError { log, .. } => log.to_string_lossy().trim().to_owned(),
            other => other.to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::policy::KERNELS as POLICY_KERNELS;

    /// Where `make test-gpu` says that the compiler is there, it must be.
    fn compiler_is_there() -> bool {
        let there = presence::nvrtc().is_ok();
        assert!(there || std::env::var_os("BACKTAPE_TEST_NVRTC").is_none(), "no libnvrtc.so");
        there
    }

    /// Without the library its absence is what is told.
    #[test]
    fn every_kernel_compiles_for_every_target_or_the_missing_library_is_named() {
        for (_, target) in TARGETS {
            let sources = [(reference as fn(_) -> _, &crate::device::KERNELS[..])];
            let sources = sources.into_iter().chain([(policy as fn(_) -> _, &POLICY_KERNELS[..])]);
            for (compiled, kernels) in sources {
                let compiled: Result<Ptx, DeviceError> = compiled(target);
                match compiled {
                    Ok(ptx) => {
                        let ptx = ptx.to_src();
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
        let ptx = compile("probe.cu", source, "compute_80").unwrap().to_src();
        for wanted in ["mul.rn.f64", "add.rn.f64", "div.rn.f32", "mul.rn.f32", "add.rn.f32"] {
            assert!(ptx.contains(wanted), "no {wanted} in {ptx}");
        }
        assert!(!ptx.contains("fma") && !ptx.contains(".ftz"), "{ptx}");
    }

    #[test]
    fn what_the_compiler_refuses_is_said_with_its_file_and_line() {
        if compiler_is_there() {
            let refused = compile("probe.cu", "int f() { return x; }", "compute_80").unwrap_err();
            let said = refused.to_string();
            assert!(said.contains("probe.cu(1)") && said.contains("\"x\" is undefined"), "{said}");
        }
    }
}
