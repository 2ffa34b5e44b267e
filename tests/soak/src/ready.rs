//! `soak ready`: how long a coordinator that was killed takes until it answers again, with
//! 10,000 shards on record: as many files of one step, and as many steps of one file a rank.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;

use crate::job::Job;
use crate::oracle::Oracle;
use crate::processes::{Yard, memory};

/// Longest that may take.
const READY: Duration = Duration::from_secs(1);
/// Longest that the making of the store may take.
const LIMIT: Duration = Duration::from_secs(500);

#[derive(Args, Clone, Debug)]
pub(crate) struct ReadyArguments {
    /// Restarts of each shape
    #[arg(long, default_value_t = 10)]
    pub trials: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Shards on record
    #[arg(long, default_value_t = 10_000)]
    pub shards: u32,
    /// Where the store is measured; it is made in memory
    #[arg(long)]
    pub scratch: Option<PathBuf>,
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    pub coordinator: Option<PathBuf>,
}

/// Measures both shapes; an error when one restart took too long.
pub(crate) fn run(arguments: &ReadyArguments) -> anyhow::Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let (seed, world) = (arguments.seed, 8);
    let each = arguments.shards / world;
    let job = |steps, files| Job { seed, world, steps, files, shards: 1, bytes: 64 };
    for job in [job(1, each), job(u64::from(each), 1)] {
        let took = measure(arguments, &job)
            .with_context(|| format!("ready: seed {seed}: FAILED: {job:?}"))?;
        let ((median, on_the_wall), slowest) = (took[took.len() / 2], took[took.len() - 1].0);
        println!(
            "ready: seed {seed}, {} shards in {} steps of {} files a rank, {} restarts: \
             {} ms in the median ({} ms with what other work had), {} ms at most",
            arguments.shards,
            job.steps,
            job.files,
            arguments.trials,
            median.as_millis(),
            on_the_wall.as_millis(),
            slowest.as_millis()
        );
        ensure!(slowest <= READY, "it answered after {slowest:?}, the bound is {READY:?}");
    }
    Ok(())
}

/// Each restart, shortest first: without and with the time in which others had the processors.
fn measure(arguments: &ReadyArguments, job: &Job) -> anyhow::Result<Vec<(Duration, Duration)>> {
    let mut yard = Yard::new(&memory())?;
    let (mut coordinator, _) = yard.coordinator(job.world)?;
    let options = ["--heedless", "--join-ms", "60000", "--step-ms", "400000"];
    let mut ranks = yard.ranks(job, (0, job.world), 0, &options, "")?;
    let status = ranks.wait(LIMIT)?.context("the store is not made in time")?;
    ensure!(status.success(), "the ranks ({status}): {}", ranks.log()?);
    coordinator.kill()?;
    let mut oracle = Oracle::new(job, &yard.store);
    oracle.check(&yard.ledgers()?, true)?;
    ensure!(oracle.committed() == job.steps, "{} steps are committed", oracle.committed());
    let scratch = arguments.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let disk = tempfile::Builder::new().prefix("backtape-soak-").tempdir_in(scratch)?;
    yard.move_store(disk.path())?;
    let mut took = Vec::new();
    for _ in 0..arguments.trials {
        let (mut coordinator, after) = yard.coordinator(job.world)?;
        // On a machine that does other work too the clock on the wall measures that work.
        took.push((after.saturating_sub(coordinator.waited()?), after));
        let (committed, shards) = yard.status(0, job.steps - 1)?;
        let wanted = u64::from(job.world * job.files * job.shards);
        ensure!(committed && shards == wanted, "it says {committed}, {shards} shards");
        coordinator.kill()?;
    }
    took.sort();
    Ok(took)
}
