//! A real coordinator in a process of its own, and calls to it from a few connections.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use backtape::coordinator::channel::{Rpc, connect};
use backtape::credentials::Access;
use backtape_proto as proto;
use tokio::task::JoinSet;

use crate::processes::coordinator_beside;

/// Longest wait for a coordinator that starts.
const START: Duration = Duration::from_secs(60);
/// Calls in flight on one connection: below what the coordinator allows.
const IN_FLIGHT: u32 = 32;

/// A `coordinator` process; killed when it is dropped.
pub(crate) struct Served {
    child: Child,
    pub(crate) address: String,
    pub(crate) metrics: String,
    log: Arc<Mutex<String>>,
}

impl Served {
    /// Starts it on a store, with numbers and health served too.
    pub(crate) fn start(store: &Path, world_size: u32, more: &[&str]) -> anyhow::Result<Served> {
        let mut command = Command::new(coordinator_beside()?);
        command.args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--world-size"]);
        command.arg(world_size.to_string()).arg("--store").arg(store).args(more);
        let mut child = command.env_remove("RUST_LOG").stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take().context("its log is not piped")?;
        let log = Arc::new(Mutex::new(String::new()));
        let (sink, (told, said)) = (log.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                sink.lock().unwrap_or_else(|broken| broken.into_inner()).push_str(&(line + "\n"));
                // Nobody waits any more once it listens.
                let _ = told.send(());
            }
        });
        let mut served = Served { child, address: String::new(), metrics: String::new(), log };
        let end = Instant::now() + START;
        while served.address.is_empty() || served.metrics.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if said.recv_timeout(left).is_err() {
                bail!("the coordinator does not start: {}", served.log());
            }
            let log = served.log();
            let found = |after: &str| {
                let rest = log.split(after).nth(1)?;
                Some(rest.split([',', '\n']).next()?.trim().to_string())
            };
            served.address = found("listening on ").unwrap_or_default();
            served.metrics = found("served on http://").unwrap_or_default();
        }
        Ok(served)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap_or_else(|broken| broken.into_inner()).clone()
    }

    /// Connections to it.
    pub(crate) fn connections(&self, count: u32, access: &Access) -> anyhow::Result<Vec<Rpc>> {
        let one = |_| connect(&self.address, access).context("no connection");
        (0..count).map(one).collect()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How the calls of one kind went.
pub(crate) struct Phase {
    pub(crate) wall: Duration,
    /// How long each took, sorted.
    latencies: Vec<Duration>,
}

impl Phase {
    pub(crate) fn of(wall: Duration, mut latencies: Vec<Duration>) -> Phase {
        latencies.sort_unstable();
        Phase { wall, latencies }
    }

    /// The latency that this share of the calls did not exceed.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let at = (self.latencies.len() as f64 * share).ceil() as usize;
        self.latencies.get(at.saturating_sub(1)).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(
            f,
            "{} calls in {:.2} s, {:.0} a second, p50 {:.1} ms, p99 {:.1} ms, worst {:.1} ms",
            self.latencies.len(),
            self.wall.as_secs_f64(),
            self.latencies.len() as f64 / self.wall.as_secs_f64(),
            ms(self.quantile(0.5)),
            ms(self.quantile(0.99)),
            ms(self.quantile(1.0))
        )
    }
}

/// Makes one call for every rank, many at a time over a few connections.
pub(crate) async fn each_rank<F, Fut>(rpcs: &[Rpc], ranks: u32, call: F) -> anyhow::Result<Phase>
where
    F: Fn(Rpc, u32) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = anyhow::Result<()>> + Send,
{
    let workers = (rpcs.len() as u32 * IN_FLIGHT).max(1);
    let began = Instant::now();
    let mut tasks = JoinSet::new();
    for worker in 0..workers {
        let rpc = rpcs[worker as usize % rpcs.len()].clone();
        let call = call.clone();
        tasks.spawn(async move {
            let mut latencies = Vec::new();
            for rank in (worker..ranks).step_by(workers as usize) {
                let began = Instant::now();
                call(rpc.clone(), rank).await.with_context(|| format!("rank {rank}"))?;
                latencies.push(began.elapsed());
            }
            anyhow::Ok(latencies)
        });
    }
    let mut all = Vec::new();
    while let Some(done) = tasks.join_next().await {
        all.extend(done??);
    }
    Ok(Phase::of(began.elapsed(), all))
}

/// Whom a rank of the campaigns speaks for: its incarnation is its number, so that the same
/// rank speaks again after it was forgotten.
pub(crate) fn member(run: &str, rank: u32) -> proto::Member {
    proto::Member { run: run.into(), attempt: 0, rank, incarnation: u64::from(rank) + 1 }
}

/// A rank's wish to enter.
pub(crate) fn join(run: &str, rank: u32, world_size: u32) -> proto::JoinRequest {
    proto::JoinRequest {
        run: run.into(),
        rank,
        world_size,
        incarnation: u64::from(rank) + 1,
        host: format!("node-{:04}", rank / 8),
        format_version: backtape::FORMAT_VERSION,
        ..Default::default()
    }
}

/// A rank's close of a step with this many files.
pub(crate) fn close(run: &str, rank: u32, step: u64, files: u32) -> proto::CloseStepRequest {
    let member = Some(member(run, rank));
    proto::CloseStepRequest { member, step, files, ..Default::default() }
}
