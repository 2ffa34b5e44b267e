//! `coordinator --listen 127.0.0.1:7447 --store DIR|s3://… --world-size N`
//! `coordinator plan|trigger --coordinator HOST:PORT --run R ...`
//! `coordinator status --coordinator HOST:PORT --run R`
//! `coordinator certs --out DIR --host NAME ...`
//!
//! Commits the steps of a job that runs on several hosts. A job on one host
//! needs no such process: its rank 0 carries the coordinator inside.
//!
//! ```text
//! [backtape][Hnode-0][coordinator] INFO listening on 127.0.0.1:7447, store /dumps, world size 8
//! [backtape][Hnode-0][coordinator] INFO run fused attempt 0 step 0: committed
//! ```
//!
//! The binary and the Python package's command both call [`main`].
//!
//! `plan` and `trigger` ask a running coordinator, embedded in rank 0 or not, to have the ranks of
//! a running job record. `certs` makes the credentials with which a coordinator and ranks on other
//! hosts authenticate to each other.

mod log;
mod question;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::coordinator::{Config, Coordinator, Rules, limits};
use crate::credentials::Guard;
use question::Question;

/// Exit code: done.
const DONE: i32 = 0;
/// Exit code: wrong usage or environment.
const USAGE: i32 = 2;

/// The version with the build.
static LONG_VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} build {}", crate::VERSION, crate::BUILD));

/// Commits the steps that the ranks of a training job record.
#[derive(Parser)]
#[command(
    name = "coordinator",
    version = crate::VERSION,
    long_version = LONG_VERSION.as_str(),
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct Arguments {
    #[command(subcommand)]
    question: Option<Question>,
    /// The address to listen on. Port 0 chooses a free port.
    #[arg(long, default_value = "127.0.0.1:7447")]
    listen: SocketAddr,
    /// The store of the runs: a directory, or a bucket such as s3://bucket/prefix.
    #[arg(long, required = true, value_name = "DIR|URL")]
    store: Option<PathBuf>,
    /// The number of processes in the job.
    #[arg(long, required = true)]
    world_size: Option<u32>,
    /// The folder with the coordinator's credentials (see `coordinator certs`). With it, every call
    /// must be encrypted, come from a holder of one of its certificates and carry its run's token.
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
    /// Serves /metrics (Prometheus) and /healthz at this address, in plain HTTP.
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<SocketAddr>,
    /// Allows listening on an address that other hosts can reach without encryption or
    /// authentication.
    #[arg(long)]
    insecure: bool,
    /// The time in seconds after a step's first event at which an incomplete step is reported as
    /// partial.
    #[arg(long, default_value_t = limits::STEP_DEADLINE.as_secs())]
    step_deadline: u64,
    /// The largest number of triggered recordings of a run.
    #[arg(long, default_value_t = limits::MAX_TRIGGERS)]
    max_triggers: u32,
    /// The time in seconds after a triggered recording in which ranks cannot trigger another.
    #[arg(long, default_value_t = limits::TRIGGER_COOLDOWN.as_secs())]
    trigger_cooldown: u64,
}

/// Runs the command with these arguments, the program's name first, and returns its exit code. The
/// binary and the Python package both call it. While it serves, SIGINT and SIGTERM end it.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> i32 {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and the version go to stdout, errors to stderr. Whoever closed the pipe does not
            // need the rest.
            let _ = error.print();
            return error.exit_code();
        }
    };
    log::start();
    let done = match &arguments.question {
        Some(question) => question.ask(),
        None => serve(&arguments),
    };
    match done {
        Ok(()) => DONE,
        Err(error) => {
            tracing::error!("{error:#}");
            USAGE
        }
    }
}

/// How many malloc arenas the threads of this process share.
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;

/// Limits the number of glibc's malloc arenas. By default each thread has its own and keeps there
/// what it freed: after large files that arrived one after the other, each on another thread, the
/// process held three times the memory that one of them needs (`soak hostile`). Only the
/// coordinator's own process calls this; a coordinator embedded in a job leaves the job's allocator
/// alone.
fn share_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` sets a parameter of the allocator, before this process has other threads.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

fn serve(arguments: &Arguments) -> anyhow::Result<()> {
    share_arenas();
    let Arguments { listen, .. } = arguments;
    let missing = "give --store and --world-size";
    let store = arguments.store.as_ref().context(missing)?;
    let world_size = arguments.world_size.context(missing)?;
    if !listen.ip().is_loopback() && !arguments.insecure && arguments.credentials.is_none() {
        bail!(
            "{listen} is reachable from other hosts, and the dumps would cross the network \
             unencrypted to whoever asks: give --credentials (see coordinator certs), listen on \
             127.0.0.1, or accept that with --insecure"
        );
    }
    let guard = match &arguments.credentials {
        Some(folder) => Guard::read(folder)?,
        None => Guard::default(),
    };
    let config = Config {
        guard,
        metrics: arguments.metrics,
        step_deadline: Duration::from_secs(arguments.step_deadline),
        rules: Rules {
            max_triggers: arguments.max_triggers,
            trigger_cooldown: Duration::from_secs(arguments.trigger_cooldown),
        },
        ..Config::new(store, world_size)
    };
    open_files(world_size);
    let runtime = tokio::runtime::Runtime::new().context("the runtime cannot be started")?;
    let served = runtime.block_on(async {
        let listener = TcpListener::bind(listen).await.with_context(|| {
            format!(
                "{listen} cannot be listened on: stop what runs there or choose another --listen"
            )
        })?;
        let coordinator = Coordinator::open(&config)?;
        let address = listener.local_addr()?;
        let store = store.display();
        let (version, build) = (crate::VERSION, crate::BUILD);
        tracing::info!("listening on {address}, store {store}, world size {world_size}");
        tracing::info!("backtape {version} build {build}");
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let shutdown = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            tracing::info!("stopping: what was acknowledged is in the journal");
        };
        Ok(coordinator.serve(listener, shutdown).await?)
    });
    // Does not wait for tasks that are blocked on a disk that hangs: nothing of theirs was
    // acknowledged.
    runtime.shutdown_background();
    served
}

/// Raises the limit of open files to the hard limit, because each connection is an open file and a
/// shell's default is about a thousand. Logs a warning if that is too few for the world size.
fn open_files(world_size: u32) {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, most);
    let may = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let wanted = limits::connections(world_size) as u64;
    if may < wanted {
        tracing::warn!(
            "this process may have {may} files open, and {world_size} ranks up to {wanted} \
             connections: raise its limit (ulimit -n)"
        );
    }
}
