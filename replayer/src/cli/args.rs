//! Arguments as typed, before anything is looked at.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Says where, by how much and why the gradients of a dumped step diverge.
///
/// Exit codes: 0 agreed, 1 diverged, 2 wrong usage or environment, 3 the dump is
/// incomplete or corrupt.
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
    /// Lists what a step holds: tensors, shapes, dtypes, microbatches, ranks.
    Inspect(DumpArguments),
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
}

#[derive(Debug, Args)]
pub(super) struct CausesArguments {
    /// One cause; all by default.
    pub(super) id: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct ReplayArguments {
    /// The run to replay, or a store that holds it.
    #[arg(long, value_name = "DIR", required = true)]
    pub(super) dump: Option<PathBuf>,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Roles to compare, with every stage that leads to them; with --against
    /// also patterns of tensor names, as in 'layers.*,dq'. All by default.
    #[arg(long, value_name = "ROLES", value_delimiter = ',')]
    pub(super) compare: Vec<String>,
    /// Another run of the same step to compare with, sharded in any way.
    #[arg(long, value_name = "DIR")]
    pub(super) against: Option<PathBuf>,
    /// A policy of your own, in TOML: rounding points, sums and tiles that stand in
    /// for what the job declared.
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    /// Writes the report as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Judges dq on a stratified sample of N tokens of each microbatch, and estimates dk
    /// from them without a verdict.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) tokens: Option<u64>,
    /// Checks dk and dq with K random probes instead of recomputing them: one GEMM in
    /// place of seven.
    #[arg(long, value_name = "K", num_args = 0..=1, default_missing_value = "40",
          value_parser = clap::value_parser!(u64).range(1..=1024), conflicts_with = "tokens")]
    pub(super) freivalds: Option<u64>,
    /// Threads to use; all cores by default. Results do not depend on it.
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<usize>,
    /// No progress bar.
    #[arg(long)]
    pub(super) quiet: bool,
}

#[derive(Debug, Args)]
pub(super) struct DumpArguments {
    /// The run, or a store that holds it.
    #[arg(long, value_name = "DIR")]
    pub(super) dump: PathBuf,
    #[command(flatten)]
    pub(super) which: WhichArguments,
    /// Writes the result as JSON; `-` for standard output.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct TrajectoryArguments {
    /// The run, or a store that holds it.
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
