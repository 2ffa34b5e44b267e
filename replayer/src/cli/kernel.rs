//! `--kernel dk=my_kernel.cu:entry`: a user's own kernel beside the catalogue.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::error::CommandError;
use crate::device::{self, Kernel};
use crate::head::Stage;
use crate::postmortem::Kernels;
use crate::replay::variant::STAGES;

/// Which kernels.
#[derive(Debug, Default, Args)]
pub(super) struct KernelArguments {
    /// Runs your own kernel for a stage on the dumped inputs and judges its output. The file is
    /// CUDA C++, PTX or a cubin, and a comment in it declares how the kernel is called. It needs a
    /// GPU and may be given several times.
    #[arg(long = "kernel", value_name = "STAGE=FILE:ENTRY",
          conflicts_with_all = ["against", "engine", "tokens", "freivalds"])]
    pub(super) kernels: Vec<AskedKernel>,
}

/// A kernel as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AskedKernel {
    stage: Stage,
    file: PathBuf,
    entry: String,
}

impl FromStr for AskedKernel {
    type Err = String;

    fn from_str(text: &str) -> Result<AskedKernel, String> {
        let parts = text.split_once('=').and_then(|(stage, rest)| {
            let (file, entry) = rest.rsplit_once(':')?;
            (!file.is_empty() && !entry.is_empty()).then_some((stage, file, entry))
        });
        let (stage, file, entry) =
            parts.ok_or("it is STAGE=FILE:ENTRY, as in dk=my_kernel.cu:dk_kernel")?;
        let known_stage = STAGES.into_iter().find(|of| of.name() == stage);
        let stage = known_stage.ok_or_else(|| {
            let known: Vec<_> = STAGES.iter().map(|stage| stage.name()).collect();
            format!("{stage:?} is no stage that a kernel may give: known are {}", known.join(", "))
        })?;
        Ok(AskedKernel { stage, file: file.into(), entry: entry.into() })
    }
}

impl KernelArguments {
    /// Reads them and opens a GPU: what cannot run is said before a long replay.
    pub(super) fn open(&self) -> Result<Kernels, CommandError> {
        let read = |asked: &AskedKernel| Kernel::read(asked.stage, &asked.file, &asked.entry);
        let kernels = self.kernels.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        if kernels.is_empty() {
            return Ok(Kernels::default());
        }
        let device = device::open(&[0]).map_err(|why| CommandError::NoKernel { why })?;
        Ok(Kernels::on(kernels, device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_asked_for_by_its_stage_file_and_entry() {
        let parsed = |text: &str| text.parse::<AskedKernel>();
        let wanted =
            |file: &str| AskedKernel { stage: Stage::Dk, file: file.into(), entry: "mine".into() };
        assert_eq!(parsed("dk=a.cu:mine"), Ok(wanted("a.cu")));
        assert_eq!(parsed("dk=/x=y/a:b.ptx:mine"), Ok(wanted("/x=y/a:b.ptx")));
        for wrong in ["", "dk", "dk=a.cu", "dk=:mine", "dk=a.cu:", "=a.cu:mine"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        assert!(parsed("q=a.cu:mine").unwrap_err().contains("known are lse, "));
    }
}
