//! Arguments as typed, before anything is looked at.

use std::path::PathBuf;
use std::str::FromStr;

use backtape::shard::When;
use clap::{Args, Parser, Subcommand};

use super::cluster::ClusterArguments;
use super::device::DeviceArguments;
use super::kernel::KernelArguments;
use crate::diagnose::Causes;

/// Replays a recorded step and reports where, by how much and why its gradients diverge.
///
/// Exit codes: 0 if the step agrees with the reference, 1 if it diverges or its head is declared
/// wrongly, 2 for a wrong command line or environment, 3 if the dump is incomplete or corrupt, 4 if
/// two runs differ and nothing that was recorded says by how much they may.
#[derive(Debug, Parser)]
#[command(name = "replay", version, args_conflicts_with_subcommands = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    #[command(flatten)]
    pub(super) replay: ReplayArguments,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Verifies that a step was stored as it was recorded: hashes, fingerprints, coverage and
    /// replicas.
    Verify(DumpArguments),
    /// Lists the runs of a store: their attempts and steps, which of them are committed, and their
    /// sizes in bytes.
    Ls(ListArguments),
    /// Lists the tensors of a step: their shapes, dtypes, microbatches and ranks.
    Inspect(DumpArguments),
    /// Prints a part of a tensor, reassembled from the shards that overlap it.
    Show(ShowArguments),
    /// Writes reassembled tensors to a .safetensors or .npy file, or writes one microbatch of the
    /// loss head as a script that runs without backtape.
    Export(ExportArguments),
    /// Compares the same step of two runs. It is short for --dump A --against B.
    Diff(DiffArguments),
    /// Runs the checks that need no declared head and no replay: of the data, of single bits, of
    /// replicas and of counts. It checks all dumped steps and compares them with each other, unless
    /// --step names one.
    Checks(DumpArguments),
    /// Checks the scalars of every step: loss, learning rate, gradient norms and Adam's moments.
    /// The exit code is 0 if no flag is raised, 1 if one is, 3 if a part could not be read.
    Trajectory(TrajectoryArguments),
    /// Lists the catalogue of causes: what each one is, where it has occurred and how to fix it.
    Causes(CausesArguments),
    /// Measures the effect of finite precision on the dump's own data: on sums of exponentials, and
    /// on finite differences with steps of many sizes.
    Precision(PrecisionArguments),
    /// Prints the completions for a shell, as in
    /// replay completions bash > ~/.local/share/bash-completion/completions/replay
    Completions {
        /// The shell that the completions are for.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page, as in replay man | man -l -
    Man,
}

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// A store of runs, the directory of one run, or RUN@ATTEMPT:STEP.
    #[arg(value_name = "DIR")]
    pub(super) place: PathBuf,
    /// The run to list, where the store holds several. All runs are listed by default.
    #[arg(long)]
    pub(super) run: Option<String>,
    /// Writes the result as JSON to this file; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

/// Which tensor of a step.
#[derive(Debug, Args)]
pub(super) struct TensorArguments {
    /// The microbatch, of a tensor that was captured once for each microbatch.
    #[arg(long, value_name = "M")]
    pub(super) microbatch: Option<u32>,
    /// The moment of capture, of a tensor that was captured at several moments: before_op,
    /// after_op, pre_reduce, post_reduce or recompute.
    #[arg(long, value_name = "MOMENT", value_parser = moment)]
    pub(super) when: Option<When>,
    /// The rank whose addend is meant, of a tensor whose ranks recorded addends of a sum.
    #[arg(long, value_name = "RANK")]
    pub(super) rank: Option<u32>,
}

#[derive(Debug, Args)]
pub(super) struct ShowArguments {
    /// The tensor's name.
    #[arg(value_name = "TENSOR")]
    pub(super) name: String,
    #[command(flatten)]
    pub(super) tensor: TensorArguments,
    /// The part to print: a range for each dimension, as in 0:4,0:8, where `:` is the whole
    /// dimension. By default it prints the first elements of each dimension.
    #[arg(long = "box", value_name = "RANGES")]
    pub(super) place: Option<String>,
    /// Prints the bits in hexadecimal instead of the values.
    #[arg(long)]
    pub(super) bits: bool,
    /// The run, or a store that holds it. RUN@ATTEMPT:STEP also chooses the attempt and the step.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
}

#[derive(Debug, Args)]
pub(super) struct ExportArguments {
    /// Names of the tensors. Several tensors need a .safetensors file.
    #[arg(value_name = "TENSOR", required_unless_present = "repro")]
    pub(super) names: Vec<String>,
    #[command(flatten)]
    pub(super) tensor: TensorArguments,
    /// The file to write, whose name ends in .safetensors or .npy.
    #[arg(long, value_name = "FILE", required_unless_present = "repro")]
    pub(super) to: Option<PathBuf>,
    /// Writes one microbatch of the loss head, as a script with its data, to this new directory
    /// instead of tensors.
    #[arg(long, value_name = "DIR",
          conflicts_with_all = ["names", "to", "widen", "when", "rank"])]
    pub(super) repro: Option<PathBuf>,
    /// The framework that the script uses.
    #[arg(long, value_enum, default_value_t = FrameworkArgument::Jax, requires = "repro")]
    pub(super) framework: FrameworkArgument,
    /// Writes narrow floats (bf16, f16, f8) as f32, which is exact.
    #[arg(long)]
    pub(super) widen: bool,
    /// Shows no progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
    /// The run, or a store that holds it. RUN@ATTEMPT:STEP also chooses the attempt and the step.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(super) enum FrameworkArgument {
    Jax,
    Torch,
}

#[derive(Debug, Args)]
pub(super) struct DiffArguments {
    /// The run, or a store that holds it. RUN@ATTEMPT:STEP also chooses the attempt and the step.
    #[arg(value_name = "A")]
    pub(super) dump: PathBuf,
    /// The other run, of which the same step is compared, or RUN@ATTEMPT:STEP.
    #[arg(value_name = "B")]
    pub(super) against: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Compares only these roles, or tensors whose names match these patterns, as in 'layers.*'.
    /// All are compared by default.
    #[arg(long, value_name = "ROLES", value_delimiter = ',')]
    pub(super) compare: Vec<String>,
    /// A file that says which parameters of two steps are the same where their names differ, a
    /// line each: NAME = OTHER.NAME, with *, NAME.T and cat(A, B; dim 0).
    #[arg(long, value_name = "FILE")]
    pub(super) map: Option<PathBuf>,
    /// Writes the report as JSON to this file; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Writes the report with drawings as one HTML page to this file.
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    /// Shows no progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
}

impl DiffArguments {
    /// The replay that it is short for.
    pub(super) fn replay(&self) -> ReplayArguments {
        ReplayArguments {
            dump: Some(self.dump.clone()),
            which: self.which.clone(),
            compare: self.compare.clone(),
            against: Some(self.against.clone()),
            map: self.map.clone(),
            policy: None,
            json: self.json.clone(),
            report: self.report.clone(),
            tokens: None,
            freivalds: None,
            threads: None,
            spill: None,
            cluster: ClusterArguments::default(),
            device: DeviceArguments::default(),
            kernel: KernelArguments::default(),
            causes: Causes::default(),
            quiet: self.quiet,
        }
    }
}

fn moment(word: &str) -> Result<When, String> {
    serde_json::from_value(word.into()).map_err(|error| error.to_string())
}

#[derive(Debug, Args)]
pub(super) struct CausesArguments {
    /// The id of one cause. All causes are listed by default.
    pub(super) id: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct ReplayArguments {
    /// The run to replay, or a store that holds it. RUN@ATTEMPT:STEP also chooses the attempt and
    /// the step.
    #[arg(long, value_name = "DIR", required = true)]
    pub(super) dump: Option<PathBuf>,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Compares only these roles and every stage that leads to them; the word step asks for what
    /// became of the gradients after the backward. With --against, patterns of tensor names are
    /// accepted too, as in 'layers.*,dq'. All are compared by default.
    #[arg(long, value_name = "ROLES", value_delimiter = ',')]
    pub(super) compare: Vec<String>,
    /// Compares with another run, which may be sharded in another way: with the same step of it, or
    /// with RUN@ATTEMPT:STEP.
    #[arg(long, value_name = "DIR")]
    pub(super) against: Option<PathBuf>,
    /// A file that says which parameters of two steps are the same where their names differ, a
    /// line each: NAME = OTHER.NAME, with *, NAME.T and cat(A, B; dim 0).
    #[arg(long, value_name = "FILE", requires = "against")]
    pub(super) map: Option<PathBuf>,
    /// A precision policy in a TOML file: the rounding points, sums and tiles that replace those
    /// that the job declared.
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    /// Writes the report as JSON to this file; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Writes the report with drawings as one HTML page to this file. The page needs no network.
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    /// Judges dq on a stratified sample of N tokens of each microbatch, and estimates dk from the
    /// same tokens without a verdict.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) tokens: Option<u64>,
    /// Checks dk and dq with K random probes (Freivalds' algorithm) instead of recomputing them,
    /// which takes one GEMM instead of seven.
    #[arg(long, value_name = "K", num_args = 0..=1, default_missing_value = "40",
          value_parser = clap::value_parser!(u64).range(1..=1024), conflicts_with = "tokens")]
    pub(super) freivalds: Option<u64>,
    /// The effort of the search for causes. A quick search does at most twice the work of the
    /// replay, a thorough one at most fifty times. The report lists what could not be tried.
    #[arg(long, value_name = "none|quick|thorough", default_value = "quick",
          hide_default_value = true, value_parser = Causes::from_str)]
    pub(super) causes: Causes,
    /// The number of threads, by default that of the cores. The results do not depend on it.
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<usize>,
    /// Keeps large arrays in unnamed files of this directory, for a step that needs more memory
    /// than this machine has. The results do not depend on it.
    #[arg(long, value_name = "DIR")]
    pub(super) spill: Option<PathBuf>,
    #[command(flatten)]
    pub(super) cluster: ClusterArguments,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
    #[command(flatten)]
    pub(super) kernel: KernelArguments,
    /// Shows no progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
}

#[derive(Debug, Args)]
pub(super) struct DumpArguments {
    /// The run, or a store that holds it. RUN@ATTEMPT:STEP also chooses the attempt and the step.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Writes the result as JSON to this file; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Shows no progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
}

#[derive(Debug, Args)]
pub(super) struct TrajectoryArguments {
    /// The run, or a store that holds it. RUN@ATTEMPT:STEP also chooses the attempt and the step.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    /// The run, where the store holds several.
    #[arg(long)]
    pub(super) run: Option<String>,
    /// The attempt (launch) of the run, where several recorded scalars.
    #[arg(long)]
    pub(super) attempt: Option<u32>,
    /// The number of classes of the loss head, where neither a scalar nor a dumped step records it.
    #[arg(long, value_name = "V", value_parser = clap::value_parser!(u64).range(2..))]
    pub(super) vocabulary: Option<u64>,
    /// Names of scalars that may differ between ranks.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) local: Vec<String>,
    /// Names of scalars that must be equal on all ranks.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) shared: Vec<String>,
    /// Writes the report as JSON to this file; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct PrecisionArguments {
    #[command(flatten)]
    pub(super) dump: DumpArguments,
    /// The microbatch, by default the first.
    #[arg(long, value_name = "M")]
    pub(super) microbatch: Option<u32>,
    /// The number of tokens to measure, by default as many as take a few seconds.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) tokens: Option<u64>,
}

#[derive(Clone, Debug, Args)]
pub(super) struct WhichArguments {
    /// The run, where the store holds several.
    #[arg(long)]
    pub(super) run: Option<String>,
    /// The attempt (launch) of the run, where several dumped the step.
    #[arg(long)]
    pub(super) attempt: Option<u32>,
    /// The step. It may be omitted if only one was dumped.
    #[arg(long)]
    pub(super) step: Option<u64>,
}
