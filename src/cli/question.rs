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
    /// Sets what the ranks of a running job record from now on.
    Plan(PlanArguments),
    /// Makes every rank record the next step and write the steps that its ring buffer holds.
    Trigger(TriggerArguments),
    /// Prints which ranks joined a run, the progress of its steps, and what is missing and why.
    Status(Target),
    /// Makes credentials: a private certificate authority, certificates and tokens.
    Certs(CertsArguments),
}

/// Which coordinator, and which run.
#[derive(Args)]
pub(super) struct Target {
    /// The address of the coordinator.
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "dir")]
    coordinator: Option<String>,
    /// The folder with a rank's credentials, if the coordinator requires credentials.
    #[arg(long, value_name = "DIR", env = "BACKTAPE_CREDENTIALS", conflicts_with = "dir")]
    credentials: Option<PathBuf>,
    /// The name of the run, by default the last component of --dir.
    #[arg(long, required_unless_present = "dir")]
    run: Option<String>,
    /// The run's directory, if the coordinator is embedded in rank 0.
    #[arg(long, conflicts_with = "coordinator")]
    dir: Option<PathBuf>,
}

#[derive(Args)]
pub(super) struct PlanArguments {
    #[command(flatten)]
    target: Target,
    /// The steps to record, for example 500-510 or every:1000; next:10 means ten steps from the
    /// first that every rank can still be told of.
    #[arg(long)]
    steps: Option<String>,
    /// Glob patterns of the tensors to record, for example q,k,dq*,!d*_label.
    #[arg(long)]
    tensors: Option<String>,
    /// The ranks that record, for example 0-3,7.
    #[arg(long)]
    ranks: Option<String>,
    /// The microbatches to record, for example 0.
    #[arg(long)]
    microbatches: Option<String>,
    /// Leaves out tensors that are larger than this, for example 512MiB.
    #[arg(long)]
    max_tensor_bytes: Option<String>,
    /// Leaves out further tensors once a step holds this many bytes, for example 2GiB.
    #[arg(long)]
    max_step_bytes: Option<String>,
}

#[derive(Args)]
pub(super) struct TriggerArguments {
    #[command(flatten)]
    target: Target,
    /// The step to record, by default the next one that every rank can still be told of.
    #[arg(long)]
    step: Option<u64>,
    /// The reason, which the manifest and the report show.
    #[arg(long, default_value = "asked for by hand")]
    reason: String,
}

#[derive(Args)]
pub(super) struct CertsArguments {
    /// The folder in which DIR/coordinator and DIR/rank, or DIR/rank-RUN, are made.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// A host name or address by which ranks call the coordinator. It may be given several times.
    #[arg(long = "host", required = true)]
    hosts: Vec<String>,
    /// A run that gets a token of its own. It may be given several times.
    #[arg(long = "run")]
    runs: Vec<String>,
    /// The number of days for which the certificates are valid.
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
