//! `coordinator --listen 127.0.0.1:7447 --store DIR --world-size N`
//!
//! Commits the steps of a job that runs on several hosts. A job on one host
//! needs no such process: its rank 0 carries the coordinator inside.
//!
//! ```text
//! [backtape][Hnode-0][coordinator] INFO listening on 127.0.0.1:7447, store /dumps, world size 8
//! [backtape][Hnode-0][coordinator] INFO run fused attempt 0 step 0: committed
//! ```

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use backtape::coordinator::{Config, Coordinator, limits};
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Commits the steps that the ranks of a training job record.
#[derive(Parser)]
#[command(name = "coordinator", version)]
struct Arguments {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:7447")]
    listen: SocketAddr,
    /// Directory that holds the runs
    #[arg(long)]
    store: PathBuf,
    /// Processes in the job
    #[arg(long)]
    world_size: u32,
    /// Listen beyond this host without encryption or authentication
    #[arg(long)]
    insecure: bool,
    /// Seconds from a step's first event after which it is called partial
    #[arg(long, default_value_t = limits::STEP_DEADLINE.as_secs())]
    step_deadline: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or(EnvFilter::new("info")))
        .with_writer(std::io::stderr)
        .event_format(Prefixed { host: host() })
        .init();
    match serve(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::from(2)
        }
    }
}

fn serve(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { listen, store, .. } = arguments;
    if !listen.ip().is_loopback() && !arguments.insecure {
        bail!(
            "{listen} is reachable from other hosts, and the dumps would cross the network \
             unencrypted to whoever asks: listen on 127.0.0.1, or accept that with --insecure"
        );
    }
    let config = Config {
        step_deadline: Duration::from_secs(arguments.step_deadline),
        ..Config::new(store, arguments.world_size)
    };
    let runtime = tokio::runtime::Runtime::new().context("the runtime cannot be started")?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await.with_context(|| {
            format!(
                "{listen} cannot be listened on: stop what runs there or choose another --listen"
            )
        })?;
        let coordinator = Coordinator::open(&config)?;
        let address = listener.local_addr()?;
        let (store, ranks) = (store.display(), arguments.world_size);
        tracing::info!("listening on {address}, store {store}, world size {ranks}");
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
    })
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Lines that can be told apart when the logs of all hosts run together.
struct Prefixed {
    host: String,
}

impl<S, N> FormatEvent<S, N> for Prefixed
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let level = event.metadata().level();
        write!(writer, "[backtape][H{}][coordinator] {level} ", self.host)?;
        for span in context.event_scope().into_iter().flatten() {
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                write!(writer, "{fields} ")?;
            }
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
