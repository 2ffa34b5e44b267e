//! What is asked of a running coordinator, and the making of credentials.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};

use crate::coordinator::asking;
use crate::credentials::{Access, issue};
use crate::identity::Name;

/// A subcommand.
#[derive(Subcommand)]
pub(super) enum Question {
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
pub(super) struct Target {
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
pub(super) struct PlanArguments {
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
pub(super) struct TriggerArguments {
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
pub(super) struct CertsArguments {
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

impl Question {
    /// Asks the coordinator and prints its answer.
    pub(super) fn ask(&self) -> anyhow::Result<()> {
        let answer = self.answer()?;
        match self {
            // A status is the output of the command, on stdout; whoever closed the pipe does not
            // need the rest. For the others the answer goes to the log.
            Question::Status(_) => drop(writeln!(std::io::stdout(), "{answer}")),
            _ => tracing::info!("{answer}"),
        }
        Ok(())
    }

    fn answer(&self) -> anyhow::Result<String> {
        match self {
            Question::Certs(certs) => make(certs),
            Question::Status(target) => {
                let (place, run) = target.find()?;
                wait(asking::status(&place, &run))
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
                wait(asking::plan(&place, &run, text))
            }
            Question::Trigger(trigger) => {
                let (place, run) = trigger.target.find()?;
                wait(asking::trigger(&place, &run, trigger.step, &trigger.reason))
            }
        }
    }
}

fn wait(asked: impl Future<Output = Result<String, asking::AskError>>) -> anyhow::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(asked)?)
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
