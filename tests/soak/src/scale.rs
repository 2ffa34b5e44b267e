//! `soak scale --ranks 10000 --files 1`: one step of a large job through a real coordinator.
//!
//! Every rank joins, reports its files, closes; the last close commits. The ranks are calls
//! over a few connections to a coordinator process on loopback; their files lie in its store
//! beforehand. While ranks report, somebody asks for the status all the time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use backtape::coordinator::channel::Rpc;
use backtape::credentials::Access;
use backtape::manifest::Manifest;
use backtape_proto as proto;
use clap::Args;

use crate::memory::peak_mib;
use crate::served::{Phase, Served, close, each_rank, join, member};
use crate::written;

const RUN: &str = "scale";
/// Connections of all ranks together.
const CONNECTIONS: u32 = 8;
/// Status questions while nothing else happens.
const QUESTIONS: usize = 100;
/// A person who asks how a job is getting on should not wait longer (p99, with no load).
const QUICK: Duration = Duration::from_millis(250);

/// How large the job is.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Ranks of the job
    #[arg(long, default_value_t = 10_000)]
    ranks: u32,
    /// Files that each reports
    #[arg(long, default_value_t = 1)]
    files: u32,
    /// Shards in each file
    #[arg(long, default_value_t = 4)]
    shards: u32,
    /// Directory for the store; by default a temporary one
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Runs the step and says what it took.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(step(arguments))
}

async fn step(arguments: &Arguments) -> anyhow::Result<()> {
    let &Arguments { ranks, files, shards, .. } = arguments;
    let store = match &arguments.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let run = store.path().join(RUN);
    let reports: Vec<_> = (0..ranks)
        .map(|rank| written::files(&run, (0, rank, ranks), files, shards))
        .collect::<anyhow::Result<_>>()?;
    let served = Served::start(store.path(), ranks, &[])?;
    let rpcs = served.connections(CONNECTIONS, &Access::default())?;
    println!("scale: {ranks} ranks x {files} files x {shards} shards, {CONNECTIONS} connections");
    let joined = each_rank(&rpcs, ranks, move |mut rpc, rank| async move {
        rpc.join(join(RUN, rank, ranks)).await?;
        Ok(())
    });
    println!("  join: {}", joined.await?);
    let idle = questions(&rpcs[0], &served.metrics, QUESTIONS).await?;
    println!("  status, every rank joined: {idle}");
    let asking = Asking::start(&rpcs[0], &served.metrics);
    let (reports, sent) = (Arc::new(reports), shards * files);
    let reported = each_rank(&rpcs, ranks, move |rpc, rank| {
        let files = reports[rank as usize].clone();
        report(rpc, rank, files, sent)
    });
    println!("  report: {}", reported.await?);
    println!("  status meanwhile: {}", asking.stop().await?);
    let mut rpc = rpcs[0].clone();
    let status = rpc.run_status(proto::RunStatusRequest { run: RUN.into() }).await?.into_inner();
    let all = u64::from(ranks) * u64::from(files) * u64::from(shards);
    ensure!(status.joined == ranks && status.steps[0].shards == all, "scale: {status:?}");
    commit(&rpcs, ranks, files).await?;
    let bytes = std::fs::read(run.join("step-00000000").join("manifest.json"))?;
    let manifest = Manifest::from_bytes(&bytes)?;
    let listed = manifest.shards().count() as u64;
    ensure!(listed == all, "scale: the manifest lists {listed} of {all} shards");
    let peak = peak_mib(served.pid())?;
    println!(
        "scale: {ranks} ranks committed, {all} shards in a manifest of {:.1} MiB; the \
         coordinator's peak is {peak:.0} MiB",
        bytes.len() as f64 / (1 << 20) as f64
    );
    ensure!(idle.quantile(0.99) <= QUICK, "scale: status is slow with every rank joined");
    Ok(())
}

async fn report(
    mut rpc: Rpc,
    rank: u32,
    files: Vec<proto::FileReport>,
    shards: u32,
) -> anyhow::Result<()> {
    let request = proto::ReportFilesRequest { member: Some(member(RUN, rank)), step: 0, files };
    let outcomes = rpc.report_files(request).await?.into_inner().outcomes;
    if let Some(refused) = outcomes.iter().find(|outcome| outcome.code != 0) {
        bail!("{}", refused.refusal);
    }
    let acknowledged: u64 = outcomes.iter().map(|outcome| outcome.shards).sum();
    ensure!(acknowledged == u64::from(shards), "{acknowledged} of {shards} shards acknowledged");
    Ok(())
}

/// All ranks but one close together; the last alone, and its answer is the commit.
async fn commit(rpcs: &[Rpc], ranks: u32, files: u32) -> anyhow::Result<()> {
    let closed = each_rank(rpcs, ranks - 1, move |mut rpc, rank| async move {
        rpc.close_step(close(RUN, rank, 0, files)).await?;
        Ok(())
    });
    println!("  close: {}", closed.await?);
    let began = Instant::now();
    let last = rpcs[0].clone().close_step(close(RUN, ranks - 1, 0, files)).await?;
    ensure!(last.into_inner().committed, "scale: the last close did not commit the step");
    println!(
        "  commit: {:.1} ms after the last close was sent",
        began.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}

/// Asks for the status in the three ways there are.
async fn questions(rpc: &Rpc, metrics: &str, count: usize) -> anyhow::Result<Phase> {
    let (began, mut latencies) = (Instant::now(), Vec::new());
    for _ in 0..count {
        ask(rpc, metrics, &mut latencies).await?;
    }
    Ok(Phase::of(began.elapsed(), latencies))
}

async fn ask(rpc: &Rpc, metrics: &str, latencies: &mut Vec<Duration>) -> anyhow::Result<()> {
    let mut rpc = rpc.clone();
    let began = Instant::now();
    rpc.run_status(proto::RunStatusRequest { run: RUN.into() }).await?;
    latencies.push(began.elapsed());
    let began = Instant::now();
    let request = proto::StepStatusRequest { run: RUN.into(), ..Default::default() };
    rpc.step_status(request).await?;
    latencies.push(began.elapsed());
    let address = metrics.to_string();
    let began = Instant::now();
    let text = tokio::task::spawn_blocking(move || scrape(&address)).await??;
    latencies.push(began.elapsed());
    ensure!(text.contains("backtape_ranks"), "scale: {text}");
    Ok(())
}

fn scrape(address: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text).context("no metrics")?;
    Ok(text)
}

/// Somebody who asks all the time.
struct Asking {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<anyhow::Result<Phase>>,
}

impl Asking {
    fn start(rpc: &Rpc, metrics: &str) -> Asking {
        let stop = Arc::new(AtomicBool::new(false));
        let (rpc, metrics, stopped) = (rpc.clone(), metrics.to_string(), stop.clone());
        let task = tokio::spawn(async move {
            let (began, mut latencies) = (Instant::now(), Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                ask(&rpc, &metrics, &mut latencies).await?;
            }
            Ok(Phase::of(began.elapsed(), latencies))
        });
        Asking { stop, task }
    }

    async fn stop(self) -> anyhow::Result<Phase> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await?
    }
}
