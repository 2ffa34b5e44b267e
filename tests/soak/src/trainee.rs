//! `soak trainee`: one rank that trains at a pace and never waits for what it records, as a job
//! does. It times every call of the recorder, counts what memory it takes, and hashes its losses:
//! recording changes none of them. Started by the campaigns that disturb what is around it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use backtape::selection::StepSelection;
use backtape_dumper::{Recorder, RecorderError, Settings, Summary, TransportChoice};
use clap::Args;

use crate::job::{Job, RUN, Shard};
use crate::ledger::{Ledger, Told};
use crate::rank::{Acknowledged, now_ns, peak_bytes};

/// Parameters of the model that it trains.
const WEIGHTS: usize = 64;

#[derive(Args, Clone, Debug)]
pub(crate) struct TraineeArguments {
    #[command(flatten)]
    job: Job,
    #[arg(long)]
    rank: u32,
    /// Which launch of the job this is
    #[arg(long)]
    launch: u32,
    /// Address of the coordinator
    #[arg(long, default_value = "")]
    coordinator: String,
    /// The store, as this process names it
    #[arg(long, default_value = "none")]
    store: PathBuf,
    #[arg(long)]
    credentials: Option<PathBuf>,
    /// Send files instead of writing them into the store
    #[arg(long)]
    stream: bool,
    /// Time of one step
    #[arg(long, default_value_t = 100)]
    pace_ms: u64,
    /// The number of the last step is in this file, as soon as it is known
    #[arg(long)]
    last: PathBuf,
    #[arg(long, default_value_t = 60_000)]
    join_ms: u64,
    #[arg(long, default_value_t = 60_000)]
    step_ms: u64,
    #[arg(long)]
    queue_kib: Option<u64>,
    /// Train and record nothing
    #[arg(long)]
    off: bool,
    #[arg(long)]
    ledger: PathBuf,
}

/// Trains. An error means that the training side was disturbed.
pub(crate) fn run(arguments: &TraineeArguments) -> anyhow::Result<()> {
    let before = peak_bytes()?;
    let ledger = Ledger::open(&arguments.ledger)?;
    let recorder = match arguments.off {
        true => None,
        false => Some(Recorder::start(arguments.settings())?),
    };
    let told = Acknowledged::new(arguments.launch, arguments.rank);
    let model = Model { weights: [0.5; WEIGHTS], losses: 0xcbf2_9ce4_8422_2325 };
    let mut trainee = Trainee {
        arguments,
        ledger,
        told,
        model,
        delivered: Vec::new(),
        forgotten: 0,
        worst: Duration::ZERO,
    };
    let done = trainee.all(recorder.as_ref());
    let steps = done?;
    if let Some(recorder) = recorder {
        trainee.close(recorder)?;
    }
    let held = peak_bytes()?.saturating_sub(before);
    trainee.ledger.note(&[Told::Trained {
        launch: arguments.launch,
        rank: arguments.rank,
        steps,
        worst_us: trainee.worst.as_micros() as u64,
        held_kib: held >> 10,
        losses: format!("{:016x}", trainee.model.losses),
    }])?;
    Ok(())
}

impl TraineeArguments {
    fn settings(&self) -> Settings {
        let mut settings = Settings::new(self.store.join(RUN), self.rank, self.job.world);
        settings.coordinator = (!self.coordinator.is_empty()).then(|| self.coordinator.clone());
        settings.credentials = self.credentials.clone();
        settings.attempt = Some(self.launch);
        settings.selection.steps = StepSelection::range(0, self.job.steps - 1);
        settings.transport = match self.stream {
            true => TransportChoice::Stream,
            false => TransportChoice::Direct,
        };
        settings.join_deadline = Duration::from_millis(self.join_ms);
        settings.step_deadline = Duration::from_millis(self.step_ms);
        settings.host = Some(format!("node-{}", self.rank));
        if let Some(kibibytes) = self.queue_kib {
            settings.queue_bytes = kibibytes << 10;
        }
        settings
    }
}

struct Trainee<'a> {
    arguments: &'a TraineeArguments,
    ledger: Ledger,
    told: Acknowledged,
    model: Model,
    /// What it handed over and was not told of, and how many it was told of before.
    delivered: Vec<Shard>,
    forgotten: usize,
    /// The longest call of the recorder, without the time for which others had the processor.
    worst: Duration,
}

impl Trainee<'_> {
    /// Trains up to the last step; how many steps.
    fn all(&mut self, recorder: Option<&Recorder>) -> anyhow::Result<u64> {
        let begin = Instant::now();
        let pace = Duration::from_millis(self.arguments.pace_ms);
        for step in 0..self.arguments.job.steps {
            let last = std::fs::read_to_string(&self.arguments.last).ok();
            if last.and_then(|text| text.trim().parse::<u64>().ok()).is_some_and(|n| step > n) {
                return Ok(step);
            }
            self.step(recorder, step)?;
            let next = begin + pace.saturating_mul(u32::try_from(step + 1)?);
            while let Some(left) = next.checked_duration_since(Instant::now()) {
                if let Some(recorder) = recorder {
                    self.note(&recorder.summary())?;
                }
                std::thread::park_timeout(left);
            }
        }
        Ok(self.arguments.job.steps)
    }

    fn step(&mut self, recorder: Option<&Recorder>, step: u64) -> anyhow::Result<()> {
        let (rank, launch) = (self.arguments.rank, self.arguments.launch);
        let attempt = self.told.attempt.unwrap_or(u32::MAX);
        self.ledger.note(&[Told::Began { attempt, launch, rank, step, at_ns: now_ns()? }])?;
        let tape = match recorder {
            Some(recorder) => {
                Some(self.timed(|| recorder.step(step))?.context("a tape was refused")?)
            }
            None => None,
        };
        // Who records nothing trains on what the first launch does, to be compared with it.
        let data = if self.arguments.off { 0 } else { launch };
        for shard in self.arguments.job.shards_of(data, step, rank) {
            let mut capture = self.arguments.job.capture(shard);
            // What it trains on and what is recorded are the same memory.
            let batch: Arc<[u8]> = self.arguments.job.content(shard).into();
            capture.payload = Box::new(batch.clone());
            if let Some(tape) = &tape {
                match self.timed(|| tape.record(capture))? {
                    Ok(()) => self.delivered.push(shard),
                    Err(RecorderError::Omitted { .. }) => {}
                    Err(error) => bail!("record raised: {error}"),
                }
            }
            self.model.learn(&batch);
        }
        let Some(tape) = tape else { return Ok(()) };
        // Without strict mode an error is for the log: that recording was given up, here.
        match self.timed(|| tape.close())? {
            Ok(()) | Err(RecorderError::Faulty { .. }) => Ok(()),
            Err(error) => bail!("tape.close raised: {error}"),
        }
    }

    /// Notes what was acknowledged, and forgets it: what this process holds must not grow, as
    /// the recorder's must not.
    fn note(&mut self, summary: &Summary) -> anyhow::Result<()> {
        let Trainee { told, ledger, delivered, forgotten, .. } = self;
        told.note_from(ledger, summary, delivered, *forgotten)?;
        if summary.faults.is_empty() {
            let done = told.shards.saturating_sub(*forgotten).min(delivered.len());
            delivered.drain(..done);
            *forgotten += done;
        } else {
            // A count names no shards any more.
            delivered.clear();
        }
        Ok(())
    }

    fn timed<T>(&mut self, call: impl FnOnce() -> T) -> anyhow::Result<T> {
        let (waited, begin) = (waited()?, Instant::now());
        let answer = call();
        let took = begin.elapsed();
        let others = self::waited()?.saturating_sub(waited);
        self.worst = self.worst.max(took.saturating_sub(others));
        Ok(answer)
    }

    fn close(&mut self, mut recorder: Recorder) -> anyhow::Result<()> {
        let (launch, rank) = (self.arguments.launch, self.arguments.rank);
        let summary = recorder.close().context("close raised")?;
        self.note(&summary)?;
        let attempt = summary.attempt.unwrap_or(u32::MAX);
        let mut told = Vec::new();
        let committed = summary.steps_committed.iter();
        told.extend(committed.map(|step| Told::Committed { attempt, step }));
        let partial = summary.steps_partial.iter();
        told.extend(partial.map(|step| Told::Partial { launch, rank, step }));
        told.push(Told::closed(launch, rank, &summary));
        Ok(self.ledger.note(&told)?)
    }
}

/// A linear model under gradient descent: enough that one changed bit of a batch shows in every
/// later loss.
struct Model {
    weights: [f32; WEIGHTS],
    /// A hash of all of them (FNV-1a).
    losses: u64,
}

impl Model {
    fn learn(&mut self, batch: &[u8]) {
        let mut loss = 0.0f32;
        for row in batch.chunks_exact(WEIGHTS) {
            let x = |index: usize| f32::from(row[index]) / 255.0 - 0.5;
            let error: f32 = (0..WEIGHTS).map(|i| self.weights[i] * x(i)).sum::<f32>() - 1.0;
            loss += error * error;
            for index in 0..WEIGHTS {
                self.weights[index] -= 1e-3 * error * x(index);
            }
        }
        for byte in loss.to_bits().to_le_bytes() {
            self.losses = (self.losses ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// How long this thread has waited for a processor that others had.
fn waited() -> anyhow::Result<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = text.split(' ').nth(1).context("no schedstat")?.trim().parse()?;
    Ok(Duration::from_nanos(nanoseconds))
}
