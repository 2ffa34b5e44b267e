//! A user's own kernel for a stage of the head: `--kernel dk=my_kernel.cu:entry`.
//!
//! It is compiled or loaded as it is, launched on the dumped inputs, and watched while it runs
//! (`guarded`). What it gives is judged as a user's function is (`replay::variant`).

mod declared;
mod guarded;
pub(super) mod launch;
#[cfg(test)]
mod tests;
mod values;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::error::DeviceError;
use crate::head::Stage;
use declared::Declared;
use launch::{Code, Launches};

pub use guarded::Given;
pub use values::Unit;

/// Why a file holds no kernel that can be launched.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// It cannot be read.
    #[error("the kernel {file} cannot be read")]
    Read {
        /// Which file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no code that a device takes.
    #[error("the kernel {0} is neither .cu, .ptx, .cubin nor .fatbin")]
    Kind(PathBuf),
    /// How it is called is not told, or not understood.
    #[error("the kernel {entry} of {file} cannot be called: {why}")]
    Declared {
        /// Which file, that of the declaration.
        file: PathBuf,
        /// The kernel.
        entry: String,
        /// Why.
        why: String,
    },
}

/// A kernel and how it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// What it computes.
    pub stage: Stage,
    /// As it was asked for, `dk=my_kernel.cu:entry`.
    pub name: String,
    entry: String,
    code: Code,
    declared: Declared,
}

impl Kernel {
    /// Reads a kernel and its declaration.
    pub fn read(stage: Stage, file: &Path, entry: &str) -> Result<Kernel, KernelError> {
        let text = |file: &Path| {
            std::fs::read_to_string(file)
                .map_err(|source| KernelError::Read { file: file.into(), source })
        };
        let (code, declaration, told) = match file.extension().and_then(OsStr::to_str) {
            Some("cu") => {
                let source = text(file)?;
                (Code::Cuda { file: file.into(), source: source.clone() }, source, file.into())
            }
            Some("ptx") => (Code::Module(file.into()), text(file)?, file.to_path_buf()),
            Some(kind @ ("cubin" | "fatbin")) => {
                let beside = file.with_extension(format!("{kind}.args"));
                (Code::Module(file.into()), text(&beside)?, beside)
            }
            _ => return Err(KernelError::Kind(file.into())),
        };
        let declared = Declared::read(&declaration, entry, stage);
        let declared = declared.map_err(|why| {
            let entry = entry.into();
            KernelError::Declared { file: told, entry, why }
        })?;
        let name = format!("{stage}={}:{entry}", file.display());
        Ok(Kernel { stage, name, entry: entry.into(), code, declared })
    }
}

/// Runs a kernel on a unit's head, between guards.
pub(super) fn run<M: Launches>(
    machine: &M,
    kernel: &Kernel,
    unit: &Unit<'_>,
) -> Result<Given, DeviceError> {
    assert_eq!(unit.stage, kernel.stage, "a kernel gives its own stage");
    let code = (&kernel.code, &kernel.entry[..]);
    // SAFETY: it is the user's code, run because the user asked for it, in a process of theirs;
    // its arguments are those that its source declares.
    unsafe { guarded::run(machine, code, &kernel.declared, unit) }
}
