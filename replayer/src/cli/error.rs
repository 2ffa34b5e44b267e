//! Why `replay` ended without a verdict, and the exit code for each.

use std::path::PathBuf;

use super::exit;
use crate::algebra::against::MappingError;
use crate::assemble::AssembleError;
use crate::device::{DeviceError, KernelError};
use crate::dump::{FindError, OpenError};
use crate::export::{ExportError, ReproError};
use crate::head::policy_file::PolicyError;
use crate::head::step::StepError;
use crate::postmortem::RunError;
use crate::precision::PrecisionError;
use crate::replay::against::PatternError;
use crate::replay::against::error::AgainstError;
use crate::report::catalogue;
use crate::spill::SpillError;

/// Why `replay` ended without a verdict.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    /// There is nothing to report on.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A word of `--compare` cannot be read.
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// The report could not be written.
    #[error("the report cannot be written to {path}: choose another file for --json")]
    Write {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file of `--policy` could not be read.
    #[error("the policy {path} cannot be read: name a TOML file with --policy")]
    PolicyFile {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file of `--policy` is no policy.
    #[error("the policy {path} cannot be used")]
    Policy {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: PolicyError,
    },
    /// The file of `--map` could not be read.
    #[error("the mapping {path} cannot be read: name a text file with --map")]
    MapFile {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file of `--map` is no mapping.
    #[error("the mapping {path} cannot be used")]
    Map {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: MappingError,
    },
    /// No tensor is meant by a name.
    #[error(transparent)]
    Find(#[from] FindError),
    /// A tensor could not be put together.
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    /// `--box` cannot be read.
    #[error("--box {text}: {why}; give a range for each dimension of {shape:?}, as in 0:4,0:8")]
    Box {
        /// As typed.
        text: String,
        /// What is wrong with it.
        why: String,
        /// The tensor's.
        shape: Vec<u64>,
    },
    /// Nothing was exported.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// No script was written.
    #[error(transparent)]
    Repro(#[from] ReproError),
    /// The catalogue has no such cause.
    #[error("no cause {0:?} in the catalogue{meant}: `replay causes` lists all", meant = catalogue::hint(.0))]
    NoCause(String),
    /// A binary without a cluster's client.
    #[error(
        "--engine ray is brought by the Python package: pip install 'backtape[ray]', and call the replay that it installs"
    )]
    NoRay,
    /// An option of tasks, where there are none.
    #[error("{option} is for a replay on a cluster: add --engine ray, or leave it out")]
    NoTasks {
        /// As typed.
        option: &'static str,
    },
    /// The cluster cannot be used.
    #[error("--engine ray: {why}")]
    Cluster {
        /// Why.
        why: String,
    },
    /// A file holds no kernel that can be launched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Nothing can run one.
    #[error("--kernel needs a GPU: {why}")]
    NoKernel {
        /// Why there is none.
        why: DeviceError,
    },
    /// Arrays cannot be kept where they should.
    #[error(transparent)]
    Spill(#[from] SpillError),
    /// The thread pool could not be made.
    #[error("{0} threads cannot be started: choose fewer with --threads")]
    Threads(usize),
}

impl From<OpenError> for CommandError {
    fn from(error: OpenError) -> CommandError {
        RunError::from(error).into()
    }
}

impl CommandError {
    pub(super) fn exit_code(&self) -> i32 {
        match self {
            CommandError::Run(error) => run_exit(error),
            CommandError::Assemble(AssembleError::Incomplete(_))
            | CommandError::Export(ExportError::Assemble(AssembleError::Incomplete(_))) => {
                exit::INCOMPLETE
            }
            CommandError::Repro(ReproError::Step(source)) => step_exit(source),
            _ => exit::USAGE,
        }
    }
}

fn run_exit(error: &RunError) -> i32 {
    match error {
        RunError::Open(OpenError::Misplaced { .. }) => exit::INCOMPLETE,
        RunError::Step { source, .. } => step_exit(source),
        RunError::Precision { source, .. } => match &**source {
            PrecisionError::Step(source) => step_exit(source),
            _ => exit::USAGE,
        },
        RunError::Against(AgainstError::Assemble { .. }) => exit::INCOMPLETE,
        _ => exit::USAGE,
    }
}

fn step_exit(error: &StepError) -> i32 {
    match error {
        StepError::Partial { .. } | StepError::Unusable { .. } | StepError::Assemble { .. } => {
            exit::INCOMPLETE
        }
        _ => exit::USAGE,
    }
}
