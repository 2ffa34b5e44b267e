//! `coordinator --listen 127.0.0.1:7447 --store DIR --world-size N`
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
//! `plan` and `trigger` ask a running one, embedded or not, to have the ranks
//! of a running job record. `certs` makes what a coordinator and ranks on other hosts show
//! to each other.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use backtape::coordinator::{Config, Coordinator, Rules, asking, limits};
use backtape::credentials::{Access, Guard, issue};
use backtape::identity::Name;
use clap::{Args, Parser, Subcommand};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Commits the steps that the ranks of a training job record.
#[derive(Parser)]
#[command(
    name = "coordinator",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct Arguments {
    #[command(subcommand)]
    question: Option<Question>,
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:7447")]
    listen: SocketAddr,
    /// Directory that holds the runs
    #[arg(long, required = true)]
    store: Option<PathBuf>,
    /// Processes in the job
    #[arg(long, required = true)]
    world_size: Option<u32>,
    /// Folder of credentials (see `coordinator certs`): calls come encrypted, from its
    /// certificates, and with the token of their run
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
    /// Serve /metrics (Prometheus) and /healthz there, in plain HTTP
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<SocketAddr>,
    /// Listen beyond this host without encryption or authentication
    #[arg(long)]
    insecure: bool,
    /// Seconds from a step's first event after which it is called partial
    #[arg(long, default_value_t = limits::STEP_DEADLINE.as_secs())]
    step_deadline: u64,
    /// Most triggered recordings of a run
    #[arg(long, default_value_t = limits::MAX_TRIGGERS)]
    max_triggers: u32,
    /// Seconds after a triggered recording in which ranks cannot trigger another
    #[arg(long, default_value_t = limits::TRIGGER_COOLDOWN.as_secs())]
    trigger_cooldown: u64,
}

#[derive(Subcommand)]
enum Question {
    /// Set what the ranks of a running job record from now on
    Plan(PlanArguments),
    /// Have every rank record the next step, and write what its ring holds
    Trigger(TriggerArguments),
    /// Say who joined a run, how far its steps are, and what is missing and why
    Status(Target),
    /// Make credentials: a private authority, certificates, tokens
    Certs(CertsArguments),
}

/// Which coordinator, and which run.
#[derive(Args)]
struct Target {
    /// Address of the coordinator
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "dir")]
    coordinator: Option<String>,
    /// Folder of a rank's credentials, where the coordinator has some
    #[arg(long, value_name = "DIR", env = "BACKTAPE_CREDENTIALS", conflicts_with = "dir")]
    credentials: Option<PathBuf>,
    /// The run; by default the last component of --dir
    #[arg(long, required_unless_present = "dir")]
    run: Option<String>,
    /// The run's directory, where rank 0 carries the coordinator
    #[arg(long, conflicts_with = "coordinator")]
    dir: Option<PathBuf>,
}

#[derive(Args)]
struct PlanArguments {
    #[command(flatten)]
    target: Target,
    /// Steps, for example 500-510 or every:1000, or next:10 from the first that every rank hears of
    #[arg(long)]
    steps: Option<String>,
    /// Tensors by glob, for example q,k,dq*,!d*_label
    #[arg(long)]
    tensors: Option<String>,
    /// Ranks, for example 0-3,7
    #[arg(long)]
    ranks: Option<String>,
    /// Microbatches, for example 0
    #[arg(long)]
    microbatches: Option<String>,
    /// Leave out tensors of more bytes, for example 512MiB
    #[arg(long)]
    max_tensor_bytes: Option<String>,
    /// Leave out tensors once a step holds as many bytes, for example 2GiB
    #[arg(long)]
    max_step_bytes: Option<String>,
}

#[derive(Args)]
struct TriggerArguments {
    #[command(flatten)]
    target: Target,
    /// The step to record; by default the next that every rank can still hear of
    #[arg(long)]
    step: Option<u64>,
    /// Why, for the manifest and the report
    #[arg(long, default_value = "asked for by hand")]
    reason: String,
}

#[derive(Args)]
struct CertsArguments {
    /// Folder to make: DIR/coordinator, and DIR/rank or DIR/rank-RUN
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Name or address by which ranks call the coordinator; may be repeated
    #[arg(long = "host", required = true)]
    hosts: Vec<String>,
    /// A run that gets a token of its own; may be repeated
    #[arg(long = "run")]
    runs: Vec<String>,
    /// How long the certificates hold
    #[arg(long, default_value_t = 365)]
    days: u32,
}

impl Target {
    /// The coordinator and the run.
    fn find(&self) -> anyhow::Result<(asking::Place, String)> {
        let Some(dir) = &self.dir else {
            let missing = "give --coordinator and --run, or --dir";
            let address = self.coordinator.clone().context(missing)?;
            let run = self.run.clone().context(missing)?;
            let access = match &self.credentials {
                Some(folder) => Access::read(folder, &Name::new(run.as_str())?)?,
                None => Access::default(),
            };
            return Ok((asking::Place { address, access }, run));
        };
        let last = std::path::absolute(dir)?;
        let last = last.file_name().map(|name| name.to_string_lossy().into_owned());
        let run = self.run.clone().or(last).context("--dir names no run: give --run too")?;
        Ok((asking::embedded(dir)?, run))
    }
}

fn ask(question: &Question) -> anyhow::Result<String> {
    match question {
        Question::Certs(certs) => make(certs),
        Question::Status(target) => {
            let (place, run) = target.find()?;
            answer(asking::status(&place, &run))
        }
        Question::Plan(plan) => {
            let (place, run) = plan.target.find()?;
            let text = asking::PlanText {
                steps: plan.steps.clone(),
                tensors: plan.tensors.clone(),
                ranks: plan.ranks.clone(),
                microbatches: plan.microbatches.clone(),
                max_tensor_bytes: plan.max_tensor_bytes.clone(),
                max_step_bytes: plan.max_step_bytes.clone(),
            };
            answer(asking::plan(&place, &run, text))
        }
        Question::Trigger(trigger) => {
            let (place, run) = trigger.target.find()?;
            answer(asking::trigger(&place, &run, trigger.step, &trigger.reason))
        }
    }
}

fn answer(asked: impl Future<Output = Result<String, asking::AskError>>) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(asked)?)
}

/// What was asked for is the output; what was done is a line of the log.
fn say(question: &Question, answer: &str) {
    match question {
        // Whoever closed the pipe has read enough.
        Question::Status(_) => drop(writeln!(std::io::stdout(), "{answer}")),
        _ => tracing::info!("{answer}"),
    }
}

fn make(certs: &CertsArguments) -> anyhow::Result<String> {
    let runs = certs.runs.iter().map(|run| Name::new(run.as_str()));
    let runs: Vec<Name> = runs.collect::<Result<_, _>>()?;
    let made = issue(&certs.out, &certs.hosts, &runs, certs.days)?;
    let ranks: Vec<String> = made.ranks.iter().map(|rank| rank.display().to_string()).collect();
    Ok(format!(
        "made {} for coordinator --credentials, and {} for the ranks' BACKTAPE_CREDENTIALS: copy each to its hosts and nowhere else; they hold {} days, the authority's key was not kept",
        made.coordinator.display(),
        ranks.join(", "),
        certs.days
    ))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or(EnvFilter::new("info")))
        .with_writer(std::io::stderr)
        .event_format(Prefixed { host: host() })
        .init();
    let done = match &arguments.question {
        Some(question) => ask(question).map(|answer| say(question, &answer)),
        None => serve(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::from(2)
        }
    }
}

fn serve(arguments: &Arguments) -> anyhow::Result<()> {
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
    let runtime = tokio::runtime::Runtime::new().context("the runtime cannot be started")?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await.with_context(|| {
            format!(
                "{listen} cannot be listened on: stop what runs there or choose another --listen"
            )
        })?;
        let coordinator = Coordinator::open(&config)?;
        let address = listener.local_addr()?;
        let store = store.display();
        tracing::info!("listening on {address}, store {store}, world size {world_size}");
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
