//! `soak reports --ranks 1024 --files 8`: how many reports a coordinator takes in a second,
//! each durable before it is answered, and how soon after the last one the step is committed.
//!
//! A round is a step: every rank reports its files and closes. Files are written before the
//! clock starts, as a rank has made them durable before it reports. With `--pipe` a round
//! runs for each line that comes in (`batched` or `single`), so that peers can be measured in
//! turns with it (benches/peers/reports.py); a round answers `SECONDS COMMIT_SECONDS`.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use backtape::coordinator::channel::Rpc;
use backtape::credentials::Access;
use backtape_proto as proto;
use clap::Args;
use tokio::task::JoinSet;

use crate::memory::peak_mib;
use crate::served::{Served, close, each_rank, join, member};
use crate::written;

const RUN: &str = "reports";
/// Connections of all ranks together.
const CONNECTIONS: u32 = 8;

/// How large a round is.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Ranks of the job
    #[arg(long, default_value_t = 1024)]
    ranks: u32,
    /// Files that each reports
    #[arg(long, default_value_t = 8)]
    files: u32,
    /// Rounds of each kind
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Run a round for each line of the input
    #[arg(long)]
    pipe: bool,
    /// Directory for the store; by default a temporary one
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// One round.
struct Round {
    /// From the first report to the answer to the last one.
    reports: Duration,
    /// From there to the commit.
    commit: Duration,
}

/// How a rank says what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All its files in one call.
    Batched,
    /// A call for each, one after the other.
    Single,
}

/// Runs the rounds.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    tokio::runtime::Runtime::new()?.block_on(rounds(arguments))
}

async fn rounds(arguments: &Arguments) -> anyhow::Result<()> {
    let &Arguments { ranks, files, rounds, pipe, .. } = arguments;
    let store = match &arguments.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let served = Served::start(store.path(), ranks, &[])?;
    let rpcs = served.connections(CONNECTIONS, &Access::default())?;
    let entered = each_rank(&rpcs, ranks, move |mut rpc, rank| async move {
        rpc.join(join(RUN, rank, ranks)).await?;
        Ok(())
    });
    entered.await?;
    let run = store.path().join(RUN);
    let mut step = 0;
    let mut next = async |kind: Kind| {
        let reports = (0..ranks).map(|rank| written::files(&run, (step, rank, ranks), files, 1));
        let reports = reports.collect::<anyhow::Result<Vec<_>>>()?;
        let round = round(&rpcs, step, reports, kind).await?;
        std::fs::remove_dir_all(run.join(format!("step-{step:08}")))?;
        step += 1;
        anyhow::Ok(round)
    };
    if pipe {
        for line in std::io::stdin().lock().lines() {
            let kind = if line? == "single" { Kind::Single } else { Kind::Batched };
            let Round { reports, commit } = next(kind).await?;
            println!("{} {}", reports.as_secs_f64(), commit.as_secs_f64());
            std::io::stdout().flush()?;
        }
        return Ok(());
    }
    for kind in [Kind::Batched, Kind::Single] {
        let (mut rates, mut commits) = (Vec::new(), Vec::new());
        for _ in 0..rounds.max(1) {
            let Round { reports, commit } = next(kind).await?;
            rates.push(f64::from(ranks * files) / reports.as_secs_f64());
            commits.push(commit.as_secs_f64() * 1e3);
        }
        rates.sort_by(f64::total_cmp);
        commits.sort_by(f64::total_cmp);
        println!(
            "reports: {kind:?}: {rounds} rounds of {ranks} ranks x {files}: median {:.0} reports a \
             second; commit after the last: median {:.1} ms, worst {:.1} ms",
            rates[rates.len() / 2],
            commits[commits.len() / 2],
            commits[commits.len() - 1]
        );
    }
    println!("reports: the coordinator's peak is {:.0} MiB", peak_mib(served.pid())?);
    Ok(())
}

async fn round(
    rpcs: &[Rpc],
    step: u64,
    reports: Vec<Vec<proto::FileReport>>,
    kind: Kind,
) -> anyhow::Result<Round> {
    let reports = Arc::new(reports);
    let workers = rpcs.len() * 32;
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for worker in 0..workers {
        let (mut rpc, reports) = (rpcs[worker % rpcs.len()].clone(), reports.clone());
        tasks.spawn(async move {
            let (mut reported, mut committed) = (None, None);
            for rank in (worker..reports.len()).step_by(workers) {
                let files = reports[rank].clone();
                let (rank, count) = (rank as u32, files.len() as u32);
                report(&mut rpc, step, rank, files, kind).await?;
                reported = Some(Instant::now());
                let closed = rpc.close_step(close(RUN, rank, step, count)).await?;
                if closed.into_inner().committed {
                    committed.get_or_insert(Instant::now());
                }
            }
            anyhow::Ok((reported, committed))
        });
    }
    let (mut reported, mut committed) = (began, None);
    while let Some(done) = tasks.join_next().await {
        let (last, commit) = done??;
        reported = reported.max(last.unwrap_or(began));
        committed = committed.or(commit);
    }
    let Some(committed) = committed else { bail!("reports: step {step} was not committed") };
    Ok(Round { reports: reported - began, commit: committed.saturating_duration_since(reported) })
}

async fn report(
    rpc: &mut Rpc,
    step: u64,
    rank: u32,
    files: Vec<proto::FileReport>,
    kind: Kind,
) -> anyhow::Result<()> {
    let member = Some(member(RUN, rank));
    if kind == Kind::Batched {
        let request = proto::ReportFilesRequest { member, step, files };
        let outcomes = rpc.report_files(request).await?.into_inner().outcomes;
        let refused = outcomes.iter().find(|outcome| outcome.code != 0 || outcome.shards != 1);
        ensure!(refused.is_none(), "reports: {refused:?}");
        return Ok(());
    }
    for file in files {
        let request = proto::ReportFileRequest { member: member.clone(), step, file: Some(file) };
        ensure!(rpc.report_file(request).await?.into_inner().shards == 1, "reports: no shard");
    }
    Ok(())
}
