//! `soak rank`: a process of the job with some of its ranks, each a thread with a recorder of
//! its own. Started by the campaigns, to be killed; it notes in its ledger what it was told.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use backtape::identity::Name;
use backtape::selection::StepSelection;
use backtape_dumper::{Recorder, RecorderError, Settings, Summary, TransportChoice};
use clap::Args;

use crate::job::{Job, RUN, Shard};
use crate::ledger::{Ledger, Told};

/// Between two looks at what was acknowledged.
const LOOK: Duration = Duration::from_micros(300);
/// The cap of one call of the recorder, with what a busy machine adds.
const CALL_CAP: Duration = Duration::from_millis(250);
const SCHEDULING: Duration = Duration::from_secs(10);
/// What a rank of a small job takes beside its queue: code, stacks, connections.
const SLACK_BYTES: u64 = 24 << 20;

#[derive(Args, Clone, Debug)]
pub(crate) struct RankArguments {
    #[command(flatten)]
    job: Job,
    /// Ranks of this process, from the first to before the last
    #[arg(long)]
    first: u32,
    #[arg(long)]
    last: u32,
    /// Address of the coordinator
    #[arg(long)]
    coordinator: String,
    /// The store, as this process sees it
    #[arg(long)]
    store: PathBuf,
    /// Which launch of the job this is
    #[arg(long)]
    launch: u32,
    /// Let the coordinator count the attempts, instead of calling the launch the attempt
    #[arg(long)]
    uncounted: bool,
    /// What the launcher calls this launch
    #[arg(long)]
    name: Option<String>,
    /// Send files instead of writing them into the store
    #[arg(long)]
    stream: bool,
    /// How long it looks for the coordinator, and how long it waits for a step
    #[arg(long, default_value_t = 10_000)]
    join_ms: u64,
    #[arg(long, default_value_t = 20_000)]
    step_ms: u64,
    /// Hand over a payload that panics as well: it must be omitted, no more
    #[arg(long)]
    panics: bool,
    /// Never wait for acknowledgements
    #[arg(long)]
    heedless: bool,
    /// Cap of the recorder's queue; this process may not grow much beyond it
    #[arg(long)]
    queue_mib: Option<u64>,
    #[arg(long)]
    ledger: PathBuf,
}

/// Runs the ranks of this process. An error means that the training side was disturbed.
pub(crate) fn run(arguments: &RankArguments) -> anyhow::Result<()> {
    let before = peak_bytes()?;
    train_all(arguments)?;
    let grown = peak_bytes()?.saturating_sub(before);
    match arguments.queue_mib {
        Some(mebibytes) if grown > (mebibytes << 20) + SLACK_BYTES => {
            bail!("memory grew by {grown} bytes, the queue's cap is {mebibytes} MiB")
        }
        _ => Ok(()),
    }
}

fn train_all(arguments: &RankArguments) -> anyhow::Result<()> {
    let ledger = Ledger::open(&arguments.ledger)?;
    std::thread::scope(|scope| {
        let ranks = arguments.first..arguments.last;
        let one = |rank| {
            let ledger = &ledger;
            let told = Acknowledged::new(arguments.launch, rank);
            scope.spawn(move || Rank { arguments, rank, ledger, told }.train())
        };
        let threads: Vec<_> = ranks.map(one).collect();
        for thread in threads {
            match thread.join() {
                Ok(done) => done?,
                Err(_) => bail!("the recorder panicked into the training thread"),
            }
        }
        Ok(())
    })
}

struct Rank<'a> {
    arguments: &'a RankArguments,
    rank: u32,
    ledger: &'a Ledger,
    told: Acknowledged,
}

impl Rank<'_> {
    fn settings(&self) -> Settings {
        let arguments = self.arguments;
        let mut settings = Settings::new(arguments.store.join(RUN), self.rank, arguments.job.world);
        settings.coordinator = Some(arguments.coordinator.clone());
        settings.attempt = (!arguments.uncounted).then_some(arguments.launch);
        settings.launch = arguments.name.clone();
        settings.selection.steps = StepSelection::range(0, arguments.job.steps - 1);
        settings.transport = match arguments.stream {
            true => TransportChoice::Stream,
            false => TransportChoice::Direct,
        };
        settings.join_deadline = Duration::from_millis(arguments.join_ms);
        settings.step_deadline = Duration::from_millis(arguments.step_ms);
        settings.host = Some("node-0".into());
        if let Some(mebibytes) = arguments.queue_mib {
            settings.queue_bytes = mebibytes << 20;
        }
        settings
    }

    fn train(mut self) -> anyhow::Result<()> {
        let (launch, rank) = (self.arguments.launch, self.rank);
        let mut recorder = Recorder::start(self.settings())?;
        let mut delivered: Vec<Shard> = Vec::new();
        for step in 0..self.arguments.job.steps {
            self.wait(&recorder, &delivered, |attempt| attempt.is_some())?;
            let attempt = self.told.attempt.unwrap_or(u32::MAX);
            let at_ns = now_ns()?;
            self.ledger.note(&[Told::Began { attempt, launch, rank, step, at_ns }])?;
            self.record(&recorder, step, &mut delivered)?;
            let all = delivered.len();
            self.wait(&recorder, &delivered, |_| false).with_context(|| format!("{all} shards"))?;
        }
        let begin = Instant::now();
        let summary = recorder.close().context("close raised")?;
        let patience = self.arguments.join_ms + self.arguments.step_ms;
        if begin.elapsed() > Duration::from_millis(patience) + SCHEDULING {
            bail!("close took {} s", begin.elapsed().as_secs_f64());
        }
        self.told.note(self.ledger, &summary, &delivered)?;
        let attempt = summary.attempt.unwrap_or(u32::MAX);
        let committed = summary.steps_committed.iter();
        let mut told: Vec<Told> = committed.map(|step| Told::Committed { attempt, step }).collect();
        let partial = summary.steps_partial.iter();
        told.extend(partial.map(|step| Told::Partial { launch, rank, step }));
        told.push(Told::closed(launch, rank, &summary));
        Ok(self.ledger.note(&told)?)
    }

    /// Hands one step over. Fail-open: nothing raises but an omission, nothing takes long.
    fn record(
        &self,
        recorder: &Recorder,
        step: u64,
        delivered: &mut Vec<Shard>,
    ) -> anyhow::Result<()> {
        let job = &self.arguments.job;
        let tape = recorder.step(step).context("step raised")?;
        for shard in job.shards_of(self.arguments.launch, step, self.rank) {
            let capture = job.capture(shard);
            let begin = Instant::now();
            match tape.record(capture) {
                Ok(()) => delivered.push(shard),
                Err(RecorderError::Omitted { .. }) => {}
                Err(error) => bail!("record raised: {error}"),
            }
            if begin.elapsed() > CALL_CAP + SCHEDULING {
                bail!("record took {} s", begin.elapsed().as_secs_f64());
            }
        }
        if self.arguments.panics {
            let mut capture = job.capture(job.shards_of(0, step, self.rank)[0]);
            (capture.key.tensor, capture.payload) = (Name::new("panics")?, Box::new(Panics));
            if !matches!(tape.record(capture), Err(RecorderError::Omitted { .. })) {
                bail!("a payload that panicked was taken");
            }
        }
        // Without strict mode an error is for the log: that recording was given up, here.
        match tape.close() {
            Ok(()) | Err(RecorderError::Faulty { .. }) => Ok(()),
            Err(error) => bail!("tape.close raised: {error}"),
        }
    }

    /// Notes acknowledgements as they come, until all that was handed over is acknowledged, or
    /// `enough` of the attempt, or the recorder has found a fault.
    fn wait(
        &mut self,
        recorder: &Recorder,
        delivered: &[Shard],
        enough: impl Fn(Option<u32>) -> bool,
    ) -> anyhow::Result<()> {
        let arguments = self.arguments;
        let end = Instant::now() + Duration::from_millis(arguments.join_ms + arguments.step_ms);
        while !arguments.heedless && Instant::now() < end {
            let summary = recorder.summary();
            self.told.note(self.ledger, &summary, delivered)?;
            let all = summary.shards as usize >= delivered.len() && summary.attempt.is_some();
            if all || enough(summary.attempt) || !summary.faults.is_empty() {
                return Ok(());
            }
            std::thread::park_timeout(LOOK);
        }
        Ok(())
    }
}

/// What a rank has already noted of what it was told.
pub(crate) struct Acknowledged {
    launch: u32,
    rank: u32,
    pub(crate) shards: usize,
    pub(crate) attempt: Option<u32>,
}

impl Acknowledged {
    pub(crate) fn new(launch: u32, rank: u32) -> Acknowledged {
        Acknowledged { launch, rank, shards: 0, attempt: None }
    }

    /// The files of a rank are delivered in order, so a count names the shards. Once one was
    /// refused it does not: then what follows is not noted.
    pub(crate) fn note(
        &mut self,
        ledger: &Ledger,
        summary: &Summary,
        delivered: &[Shard],
    ) -> anyhow::Result<()> {
        self.note_from(ledger, summary, delivered, 0)
    }

    /// The same of who has forgotten the first shards that it delivered.
    pub(crate) fn note_from(
        &mut self,
        ledger: &Ledger,
        summary: &Summary,
        delivered: &[Shard],
        forgotten: usize,
    ) -> anyhow::Result<()> {
        let (launch, rank) = (self.launch, self.rank);
        let mut told = Vec::new();
        if let (Some(attempt), None) = (summary.attempt, self.attempt) {
            told.push(Told::Joined { attempt, launch, rank, at_ns: now_ns()? });
            self.attempt = Some(attempt);
        }
        let attempt = self.attempt.unwrap_or(u32::MAX);
        if summary.faults.is_empty() && summary.omissions.iter().all(|why| why.contains("panic")) {
            let known = (summary.shards as usize).saturating_sub(forgotten).min(delivered.len());
            let new = delivered[..known]
                .iter()
                .skip(self.shards.saturating_sub(forgotten))
                .map(|&shard| Told::Shard { attempt, shard });
            told.extend(new);
            self.shards = self.shards.max(summary.shards as usize);
        }
        if told.is_empty() { Ok(()) } else { Ok(ledger.note(&told)?) }
    }
}

/// A payload whose owner has a bug.
struct Panics;

impl AsRef<[u8]> for Panics {
    fn as_ref(&self) -> &[u8] {
        panic!("a payload that panics, on purpose")
    }
}

/// The clock that all processes of this machine share.
pub(crate) fn now_ns() -> anyhow::Result<u64> {
    Ok(u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())?)
}

/// The most memory that this process has held.
pub(crate) fn peak_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
    Ok(kibibytes.context("/proc/self/status has no VmHWM")?.trim().parse::<u64>()? << 10)
}
