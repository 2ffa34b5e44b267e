//! Arguments as typed, before anything is looked at.

use std::path::PathBuf;
use std::str::FromStr;

use backtape::shard::When;
use clap::{Args, Parser, Subcommand};

use super::cluster::ClusterArguments;
use super::device::DeviceArguments;
use super::kernel::KernelArguments;
use crate::diagnose::Causes;

/// Says where, by how much and why the gradients of a dumped step diverge.
///
/// Exit codes: 0 agreed, 1 diverged or misdeclared, 2 wrong usage or environment, 3 the dump is
/// incomplete or corrupt, 4 two runs differ, and nothing recorded says how much they may.
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
    /// Proves the round trip: hashes, fingerprints, coverage, replicas.
    Verify(DumpArguments),
    /// Lists what a place holds: runs, their attempts and steps, which are committed, bytes.
    Ls(ListArguments),
    /// Lists what a step holds: tensors, shapes, dtypes, microbatches, ranks.
    Inspect(DumpArguments),
    /// Shows a box of a tensor, reassembled from the shards that reach into it.
    Show(ShowArguments),
    /// Writes reassembled tensors to a .safetensors or .npy file, or one microbatch of the loss
    /// head as a script that runs by itself.
    Export(ExportArguments),
    /// Compares two dumps of a step: short for --dump A --against B.
    Diff(DiffArguments),
    /// Checks that need no head and no replay: data, bits, replicas, counts. All dumped
    /// steps are checked, and compared with each other, unless --step names one.
    Checks(DumpArguments),
    /// Judges the scalars of every step: loss, learning rate, gradient norms, Adam's
    /// moments. 0: no flag is raised, 1: one is, 3: a part could not be read.
    Trajectory(TrajectoryArguments),
    /// Lists the catalogue of causes: what each is, where it happened, what cures it.
    Causes(CausesArguments),
    /// Shows what finite precision does: sums of exponentials, and finite differences at
    /// every step, on the dump's own data.
    Precision(PrecisionArguments),
    /// Prints completions for a shell: replay completions bash > ~/.local/share/bash-completion/completions/replay
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page: replay man | man -l -
    Man,
}

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// A store of runs, or one run, or RUN@ATTEMPT:STEP.
    #[arg(value_name = "DIR")]
    pub(super) place: PathBuf,
    /// Which run, where the store holds several; all by default.
    #[arg(long)]
    pub(super) run: Option<String>,
    /// Writes the result as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

/// Which tensor of a step.
#[derive(Debug, Args)]
pub(super) struct TensorArguments {
    /// Which microbatch, of a tensor that was captured for each.
    #[arg(long, value_name = "M")]
    pub(super) microbatch: Option<u32>,
    /// When it was captured, of a tensor that was captured at several moments: before_op,
    /// after_op, pre_reduce, post_reduce, recompute.
    #[arg(long, value_name = "MOMENT", value_parser = moment)]
    pub(super) when: Option<When>,
    /// Whose addend, of a tensor that is held as addends.
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
    /// Which part: a range for each dimension, as in 0:4,0:8; `:` is all of one. A corner by
    /// default.
    #[arg(long = "box", value_name = "RANGES")]
    pub(super) place: Option<String>,
    /// Bits in hexadecimal in place of values.
    #[arg(long)]
    pub(super) bits: bool,
    /// The run, or a store that holds it; RUN@ATTEMPT:STEP chooses in it.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
}

#[derive(Debug, Args)]
pub(super) struct ExportArguments {
    /// Tensors by name; several are for a .safetensors file.
    #[arg(value_name = "TENSOR", required_unless_present = "repro")]
    pub(super) names: Vec<String>,
    #[command(flatten)]
    pub(super) tensor: TensorArguments,
    /// The file, which ends in .safetensors or .npy.
    #[arg(long, value_name = "FILE", required_unless_present = "repro")]
    pub(super) to: Option<PathBuf>,
    /// In place of tensors: a new directory with one microbatch of the loss head as a script and
    /// its data.
    #[arg(long, value_name = "DIR",
          conflicts_with_all = ["names", "to", "widen", "when", "rank"])]
    pub(super) repro: Option<PathBuf>,
    /// Whose words the script is written in.
    #[arg(long, value_enum, default_value_t = FrameworkArgument::Jax, requires = "repro")]
    pub(super) framework: FrameworkArgument,
    /// Narrow floats (bf16, f16, f8) as f32, which is exact.
    #[arg(long)]
    pub(super) widen: bool,
    /// No progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
    /// The run, or a store that holds it; RUN@ATTEMPT:STEP chooses in it.
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
    /// The run, or a store that holds it; RUN@ATTEMPT:STEP chooses in it.
    #[arg(value_name = "A")]
    pub(super) dump: PathBuf,
    /// Another run: the same step of it, or RUN@ATTEMPT:STEP.
    #[arg(value_name = "B")]
    pub(super) against: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Roles, or patterns of tensor names as in 'layers.*'. All by default.
    #[arg(long, value_name = "ROLES", value_delimiter = ',')]
    pub(super) compare: Vec<String>,
    /// Writes the report as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Writes the report as one HTML page, with drawings.
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    /// No progress bar.
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
    /// One cause; all by default.
    pub(super) id: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct ReplayArguments {
    /// The run to replay, or a store that holds it; RUN@ATTEMPT:STEP chooses in it.
    #[arg(long, value_name = "DIR", required = true)]
    pub(super) dump: Option<PathBuf>,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Roles to compare, with every stage that leads to them; with --against
    /// also patterns of tensor names, as in 'layers.*,dq'. All by default.
    #[arg(long, value_name = "ROLES", value_delimiter = ',')]
    pub(super) compare: Vec<String>,
    /// Another run to compare with, sharded in any way: the same step of it, or RUN@ATTEMPT:STEP.
    #[arg(long, value_name = "DIR")]
    pub(super) against: Option<PathBuf>,
    /// A policy of your own, in TOML: rounding points, sums and tiles that stand in
    /// for what the job declared.
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    /// Writes the report as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Writes the report as one HTML page, with drawings: it opens from disk and needs no
    /// network.
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    /// Judges dq on a stratified sample of N tokens of each microbatch, and estimates dk
    /// from them without a verdict.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) tokens: Option<u64>,
    /// Checks dk and dq with K random probes instead of recomputing them: one GEMM in
    /// place of seven.
    #[arg(long, value_name = "K", num_args = 0..=1, default_missing_value = "40",
          value_parser = clap::value_parser!(u64).range(1..=1024), conflicts_with = "tokens")]
    pub(super) freivalds: Option<u64>,
    /// How closely causes are looked for: quick does at most twice the work of the replay,
    /// thorough fifty times as much; what could not be tried is said.
    #[arg(long, value_name = "none|quick|thorough", default_value = "quick",
          hide_default_value = true, value_parser = Causes::from_str)]
    pub(super) causes: Causes,
    /// Threads to use; all cores by default. Results do not depend on it.
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<usize>,
    /// Keeps large arrays in unnamed files of this directory, for a step that needs more memory
    /// than this machine has. Results do not depend on it.
    #[arg(long, value_name = "DIR")]
    pub(super) spill: Option<PathBuf>,
    #[command(flatten)]
    pub(super) cluster: ClusterArguments,
    #[command(flatten)]
    pub(super) device: DeviceArguments,
    #[command(flatten)]
    pub(super) kernel: KernelArguments,
    /// No progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
}

#[derive(Debug, Args)]
pub(super) struct DumpArguments {
    /// The run, or a store that holds it; RUN@ATTEMPT:STEP chooses in it.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Writes the result as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// No progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
}

#[derive(Debug, Args)]
pub(super) struct TrajectoryArguments {
    /// The run, or a store that holds it; RUN@ATTEMPT:STEP chooses in it.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    /// Which run, where the store holds several.
    #[arg(long)]
    pub(super) run: Option<String>,
    /// Which launch of the run, where several recorded scalars.
    #[arg(long)]
    pub(super) attempt: Option<u32>,
    /// Classes of the loss head, where neither a scalar nor a dumped step says.
    #[arg(long, value_name = "V", value_parser = clap::value_parser!(u64).range(2..))]
    pub(super) vocabulary: Option<u64>,
    /// Scalars that are each rank's own, whatever their names.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) local: Vec<String>,
    /// Scalars that every rank must agree on.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(super) shared: Vec<String>,
    /// Writes the report as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct PrecisionArguments {
    #[command(flatten)]
    pub(super) dump: DumpArguments,
    /// Which microbatch; the first by default.
    #[arg(long, value_name = "M")]
    pub(super) microbatch: Option<u32>,
    /// Tokens to look at; as many as some seconds allow by default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) tokens: Option<u64>,
}

#[derive(Clone, Debug, Args)]
pub(super) struct WhichArguments {
    /// Which run, where the store holds several.
    #[arg(long)]
    pub(super) run: Option<String>,
    /// Which launch of the run, where several dumped the step.
    #[arg(long)]
    pub(super) attempt: Option<u32>,
    /// Which step; may be left out when only one was dumped.
    #[arg(long)]
    pub(super) step: Option<u64>,
}
