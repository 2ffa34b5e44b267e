//! `soak kill`: kill -9 of coordinators and ranks, at random moments and at each named point.
//!
//! A yard is one run: a coordinator process, two rank processes (one writes into the store, one
//! sends its files), and up to 25 kills. After each the disk is held against what the ranks were
//! told; after each restart the coordinator's own word too. In the end a launch that nobody
//! disturbs must commit all its steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use backtape::faults;
use clap::Args;

use crate::job::Job;
use crate::ledger::{self, Told};
use crate::oracle::Oracle;
use crate::processes::{Process, Yard, memory, was_killed};
use crate::random::Random;

/// Kills of one yard: enough to meet what earlier ones left behind.
const KILLS_PER_YARD: u64 = 25;
/// Longest undisturbed stretch between two kills: beyond the ranks' first pauses.
const STRETCH: u64 = 70;
/// How long the last launch may take, and what its ranks are told: other work may have the
/// machine for a while.
const FINAL: Duration = Duration::from_secs(240);
const PATIENT: [&str; 4] = ["--join-ms", "60000", "--step-ms", "120000"];
/// Within which the end of a process that was killed is seen.
const MOMENT: Duration = Duration::from_secs(5);

/// Where a coordinator can be killed.
pub(crate) const COORDINATOR_POINTS: &[&str] = &[
    "actor.before-answer",
    "actor.before-flush",
    "commit.done",
    "commit.manifest",
    "durable.create",
    "durable.link",
    "durable.make-directory",
    "durable.published",
    "durable.sync",
    "durable.sync-directory",
    "durable.unlink",
    "durable.write",
    "intake.hash",
    "intake.open",
    "intake.read",
    "intake.sync",
    "intake.write",
    "journal.open",
    "journal.read",
    "journal.sync",
    "journal.sync-truncated",
    "journal.synced",
    "journal.truncate",
    "journal.write",
    "run-record.read",
    "shard.piece",
    "store.list",
    "store.probe",
];

/// Where a rank can be killed.
pub(crate) const RANK_POINTS: &[&str] = &[
    "client.after-close",
    "client.after-join",
    "client.after-report",
    "client.before-close",
    "client.before-join",
    "client.before-report",
    "client.open-spooled",
    "client.read-spooled",
    "durable.create",
    "durable.link",
    "durable.make-directory",
    "durable.published",
    "durable.sync-directory",
    "durable.unlink",
    "recorder.thread",
    "session.spool",
    "shard.header",
    "shard.move",
    "shard.piece",
    "shard.resize",
    "shard.sync",
    "shard.write",
];

#[derive(Args, Clone, Debug)]
pub(crate) struct KillArguments {
    /// How many kills
    #[arg(long, default_value_t = 1000)]
    pub trials: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Yards at a time
    #[arg(long, default_value_t = 4)]
    pub jobs: u64,
    /// Where the yards lie; memory by default, which a kill does not reach either
    #[arg(long)]
    pub scratch: Option<PathBuf>,
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    pub coordinator: Option<PathBuf>,
    /// Dies at this named point alone, or at random moments
    #[arg(long)]
    pub point: Option<String>,
    /// A fault that is seeded into every process, to see whether it is found
    #[arg(long, default_value = "")]
    pub seeded: String,
}

/// What a campaign did.
#[derive(Default)]
struct Tally {
    kills: u64,
    points: BTreeMap<String, u64>,
    shards: u64,
    committed: u64,
    slowest: Duration,
}

/// Runs the campaign; an error names the seed and the yard that show it again.
pub(crate) fn run(arguments: &KillArguments) -> anyhow::Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let seed = arguments.seed;
    if !faults::ACTIVE {
        println!("kill: THE NAMED POINTS ARE NOT TRIED: build with --features faults");
    }
    let tally = campaign(arguments)?;
    let points = tally.points.values().sum::<u64>();
    let all: Vec<String> = named_points().collect();
    let unreached: Vec<&String> = all.iter().filter(|p| !tally.points.contains_key(*p)).collect();
    for (point, kills) in &tally.points {
        println!("kill: at {point}: {kills}");
    }
    println!(
        "kill: seed {seed}, {} kills ({points} at {} of {} named points), {} shards acknowledged, \
         {} steps committed, 0 lost, 0 conflicts, slowest restart {} ms; unreached: {unreached:?}",
        tally.kills,
        tally.points.len(),
        all.len(),
        tally.shards,
        tally.committed,
        tally.slowest.as_millis()
    );
    Ok(())
}

fn named_points() -> impl Iterator<Item = String> {
    let coordinator = COORDINATOR_POINTS.iter().map(|point| format!("coordinator {point}"));
    coordinator.chain(RANK_POINTS.iter().map(|point| format!("rank {point}")))
}

fn campaign(arguments: &KillArguments) -> anyhow::Result<Tally> {
    let scratch = arguments.scratch.clone().unwrap_or_else(memory);
    let (next, stop, total) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::default());
    let yards = arguments.trials.div_ceil(KILLS_PER_YARD);
    let work = || -> anyhow::Result<()> {
        while !stop.load(Ordering::SeqCst) {
            let yard = next.fetch_add(1, Ordering::SeqCst);
            if yard >= yards {
                return Ok(());
            }
            let kills = KILLS_PER_YARD.min(arguments.trials - yard * KILLS_PER_YARD);
            let done = trial(arguments, yard, kills, &scratch).with_context(|| {
                format!("kill: seed {}, yard {yard} of {kills} kills: FAILED", arguments.seed)
            });
            if done.is_err() {
                stop.store(true, Ordering::SeqCst);
            }
            add(&total, done?);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.jobs).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a yard panicked"))??;
        }
        anyhow::Ok(())
    })?;
    total.into_inner().map_err(|_| anyhow::anyhow!("a yard panicked"))
}

fn add(total: &Mutex<Tally>, yard: Tally) {
    let mut total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    total.kills += yard.kills;
    total.shards += yard.shards;
    total.committed += yard.committed;
    total.slowest = total.slowest.max(yard.slowest);
    for (point, kills) in yard.points {
        *total.points.entry(point).or_default() += kills;
    }
}

fn trial(
    arguments: &KillArguments,
    yard: u64,
    kills: u64,
    scratch: &Path,
) -> anyhow::Result<Tally> {
    let mut trial = Trial::begin(arguments, yard, scratch)?;
    let done = trial.all(kills);
    if done.is_err() {
        // A seeded fault is expected to be found.
        if arguments.seeded.is_empty() {
            println!("kill: what is left lies in {}", trial.yard.keep().display());
        }
    }
    done?;
    trial.tally.shards = trial.oracle.shards();
    trial.tally.committed = trial.oracle.committed();
    trial.tally.slowest = trial.yard.slowest;
    Ok(trial.tally)
}

/// A process that may have been told to die at a point.
struct Victim {
    process: Process,
    /// The point, with whose it is.
    point: Option<String>,
}

struct Trial {
    job: Job,
    random: Random,
    seeded: String,
    /// The only point to die at, if it was chosen.
    point: Option<String>,
    yard: Yard,
    oracle: Oracle,
    coordinator: Victim,
    ranks: Vec<Victim>,
    launch: u32,
    /// Whether the launcher counts the attempts.
    counted: bool,
    tally: Tally,
}

impl Trial {
    fn begin(arguments: &KillArguments, yard: u64, scratch: &Path) -> anyhow::Result<Trial> {
        let mut random = Random::of(arguments.seed, yard);
        let seed = random.next();
        // Now and then so many shards in a file that its header outgrows its room, once the first
        // piece of the file is written.
        let (files, shards, bytes, steps) = match random.below(8) {
            0 => (1, 120, 80 << 10, 4),
            _ => (2, 2, 4096, 12),
        };
        let job = Job { seed, world: 4, steps, files, shards, bytes };
        let mut yard = Yard::new(scratch)?;
        let oracle = Oracle::new(&job, &yard.store);
        let seeded = match arguments.seeded.as_str() {
            "" => String::new(),
            name => format!("seeded:{name},"),
        };
        let coordinator = Victim { process: yard.spawn_coordinator(4, &seeded)?, point: None };
        let counted = random.below(4) != 0;
        let mut trial = Trial {
            job,
            random,
            seeded,
            point: arguments.point.clone(),
            yard,
            oracle,
            coordinator,
            ranks: Vec::new(),
            launch: 0,
            counted,
            tally: Tally::default(),
        };
        trial.launch(true)?;
        Ok(trial)
    }

    fn all(&mut self, kills: u64) -> anyhow::Result<()> {
        while self.tally.kills < kills {
            self.disturb()?;
        }
        self.end()
    }

    /// Draws a point to die at, with the pass at which to do so.
    fn draw(&mut self, whose: &str, points: &[&str], share: u64) -> (String, Option<String>) {
        if !faults::ACTIVE || self.random.below(share) != 0 {
            return (self.seeded.clone(), None);
        }
        let drawn = points[self.random.below(points.len() as u64) as usize];
        let point = self.point.as_deref().unwrap_or(drawn);
        if !points.contains(&point) {
            return (self.seeded.clone(), None);
        }
        // Most points are passed often; a few once in a process.
        let at = 1 + self.random.below(8) * self.random.below(2);
        let faults = format!("{}{point}=kill@{at}", self.seeded);
        (faults, Some(format!("{whose} {point}")))
    }

    /// Starts all ranks anew: one process writes into the store, one sends.
    fn launch(&mut self, counted: bool) -> anyhow::Result<()> {
        for (index, transport) in [None, Some("--stream")].into_iter().enumerate() {
            let (faults, point) = self.draw("rank", RANK_POINTS, 2);
            let mut options: Vec<&str> = transport.into_iter().collect();
            options.extend((!counted).then_some("--uncounted"));
            let ranks = (2 * index as u32, 2 * index as u32 + 2);
            let process = self.yard.ranks(&self.job, ranks, self.launch, &options, &faults)?;
            self.ranks.push(Victim { process, point });
        }
        Ok(())
    }

    /// Lets the job run for a while, then kills someone, unless someone died at a point.
    fn disturb(&mut self) -> anyhow::Result<()> {
        let stretch = Duration::from_millis(self.random.below(STRETCH));
        let begin = Instant::now();
        while begin.elapsed() < stretch {
            if self.coordinator.process.ended()?.is_some() {
                return self.coordinator_died();
            }
            if self.ranks_ended()? {
                return self.relaunch();
            }
            std::thread::park_timeout(Duration::from_micros(300));
        }
        match self.random.below(10) {
            0..7 => {
                self.coordinator.process.kill()?;
                self.coordinator_died()
            }
            7..9 => {
                let index = self.random.below(self.ranks.len() as u64) as usize;
                self.ranks[index].process.kill()?;
                self.relaunch()
            }
            _ => {
                self.coordinator.process.kill()?;
                for victim in &mut self.ranks {
                    victim.process.kill()?;
                }
                self.coordinator_died()?;
                self.relaunch()
            }
        }
    }

    /// True when a rank process died, or all ended.
    fn ranks_ended(&mut self) -> anyhow::Result<bool> {
        let mut running = false;
        for victim in &mut self.ranks {
            match victim.process.ended()? {
                None => running = true,
                Some(status) if was_killed(status) => return Ok(true),
                Some(status) if status.success() => {}
                Some(status) => {
                    bail!("the training side was disturbed ({status}): {}", victim.process.log()?)
                }
            }
        }
        Ok(!running)
    }

    /// Counts a kill, and the point if it was there.
    fn count(tally: &mut Tally, victim: &mut Victim) -> anyhow::Result<()> {
        let log = victim.process.log()?;
        ensure!(!log.contains("panicked"), "a panic: {log}");
        tally.kills += 1;
        if let Some(point) = victim.point.take() {
            *tally.points.entry(point).or_default() += 1;
        }
        Ok(())
    }

    /// The job is started again; the processes that survived live on beside it for a while, as
    /// hosts do that a launcher has lost.
    fn relaunch(&mut self) -> anyhow::Result<()> {
        let mut old = std::mem::take(&mut self.ranks);
        self.launch += 1;
        self.launch(self.counted)?;
        std::thread::park_timeout(Duration::from_millis(self.random.below(30)));
        for victim in &mut old {
            let ended = victim.process.ended()?;
            if ended.is_some_and(|status| !was_killed(status) && !status.success()) {
                bail!("the training side was disturbed: {}", victim.process.log()?);
            }
            if ended.is_none() {
                // Killed by hand after all, not at its point.
                victim.point = None;
                victim.process.kill()?;
            }
            if victim.process.ended()?.is_some_and(was_killed) {
                Trial::count(&mut self.tally, victim)?;
            }
        }
        Ok(())
    }

    /// Looks at what the coordinator left, starts it again, and hears what it says of it.
    fn coordinator_died(&mut self) -> anyhow::Result<()> {
        loop {
            let status = self.coordinator.process.ended()?.context("it has not ended")?;
            let log = || self.coordinator.process.log();
            ensure!(was_killed(status), "the coordinator ended ({status}): {}", log()?);
            Trial::count(&mut self.tally, &mut self.coordinator)?;
            let ledgers = self.yard.ledgers()?;
            self.oracle.check(&ledgers, false)?;
            let (faults, point) = self.draw("coordinator", COORDINATOR_POINTS, 2);
            let by_hand = point.is_none() && self.seeded.is_empty();
            let process = match by_hand {
                true => self.yard.coordinator(self.job.world)?.0,
                false => self.yard.spawn_coordinator(self.job.world, &faults)?,
            };
            self.coordinator = Victim { process, point };
            if self.hear()? {
                return Ok(());
            }
        }
    }

    /// Holds the coordinator's word against the acknowledgements; false when it died meanwhile.
    fn hear(&mut self) -> anyhow::Result<bool> {
        let begin = Instant::now();
        while !self.yard.answers() {
            if self.coordinator.process.ended()?.is_some() {
                return Ok(false);
            }
            ensure!(
                begin.elapsed() < FINAL,
                "it never answered: {}",
                self.coordinator.process.log()?
            );
            std::thread::park_timeout(Duration::from_micros(500));
        }
        for ((attempt, step), committed, shards) in self.oracle.steps() {
            let said = match self.yard.status(attempt, step) {
                Ok(said) => said,
                Err(error) => {
                    // Its connections break a moment before its end can be seen.
                    let died = self.coordinator.process.wait(MOMENT)?.is_some();
                    ensure!(died, "of attempt {attempt} step {step} it says: {error}");
                    return Ok(false);
                }
            };
            let place = format!("attempt {attempt} step {step}");
            ensure!(said.0 || !committed, "{place} is committed, and a restart forgot it");
            ensure!(said.1 >= shards, "{place}: {shards} shards acknowledged, {} known", said.1);
        }
        Ok(true)
    }

    /// A launch that nobody disturbs commits everything; then all is looked at once more.
    fn end(&mut self) -> anyhow::Result<()> {
        self.coordinator.process.kill()?;
        for victim in &mut self.ranks {
            victim.process.kill()?;
        }
        self.ranks.clear();
        let faults = self.seeded.clone();
        let process = self.yard.spawn_coordinator(self.job.world, &faults)?;
        self.coordinator = Victim { process, point: None };
        ensure!(self.hear()?, "the last coordinator died: {}", self.coordinator.process.log()?);
        // Beyond what the coordinator may have counted by itself.
        self.launch += 100;
        for (ranks, transport) in [((0, 2), &[][..]), ((2, 4), &["--stream"][..])] {
            let options = [&PATIENT, transport].concat();
            let process = self.yard.ranks(&self.job, ranks, self.launch, &options, &faults)?;
            self.ranks.push(Victim { process, point: None });
        }
        for victim in &mut self.ranks {
            let status = victim.process.wait(FINAL)?.context("the last launch does not end")?;
            ensure!(status.success(), "the last launch ({status}): {}", victim.process.log()?);
        }
        let ledgers = self.yard.ledgers()?;
        self.oracle.check(&ledgers, true)?;
        let mut told = Vec::new();
        for path in &ledgers {
            told.extend(ledger::read(path)?);
        }
        for rank in 0..self.job.world {
            let launch = self.launch;
            let clean = Told::Closed { launch, rank, faults: String::new() };
            let said = |line: &&Told| match line {
                Told::Closed { launch: of, rank: by, .. } => (*of, *by) == (launch, rank),
                _ => false,
            };
            ensure!(told.contains(&clean), "the last launch: {:?}", told.iter().find(said));
        }
        for step in 0..self.job.steps {
            let committed = Told::Committed { attempt: self.launch, step };
            ensure!(told.contains(&committed), "the last launch did not commit step {step}");
        }
        Ok(())
    }
}
