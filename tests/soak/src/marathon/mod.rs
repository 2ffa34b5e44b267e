//! R15, `soak marathon --minutes N`: a job of 8 ranks for as long as it is given, with a fault in
//! 1 % of its steps: kills of ranks and of the coordinator, connections that are reset or stall,
//! writes that fail. Nothing that was acknowledged is lost, and memory does not grow.
//!
//! A kill ends the life in which growth would show, so the time is cut into three: in the first
//! all kinds of faults come, in the second no rank is killed, in the third no coordinator. Ranks
//! live through the second, under coordinators that are killed, and a coordinator through the
//! third, under jobs that are launched anew.

mod lives;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use backtape::faults;
use clap::Args;

use crate::job::{Job, step_directory};
use crate::ledger::{self, Told};
use crate::marathon::lives::{Growth, Life};
use crate::network::proxy::{Mode, Proxy};
use crate::oracle::Oracle;
use crate::processes::{Yard, pause, was_killed};
use crate::random::Random;

const RANKS: u32 = 8;
/// Faults in a thousand steps.
const FAULTS_PER_MILLE: u64 = 10;
/// How often memory is looked at.
const SAMPLE: Duration = Duration::from_secs(1);
/// The cap of one call of the recorder, with what it takes to come back from a wait.
const CALL_CAP: Duration = Duration::from_millis(250 + 50);
/// Longest that connections stall.
const STALL_MS: u64 = 3000;
/// How long the last launch may take to end.
const END: Duration = Duration::from_secs(120);

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    #[arg(long, default_value_t = 120.0)]
    minutes: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Time of one step
    #[arg(long, default_value_t = 500)]
    pace_ms: u64,
    /// What the memory of a process may grow by in an hour
    #[arg(long, default_value_t = 1.0)]
    slope_mib: f64,
    /// Where it lies: each step takes about half a MiB
    #[arg(long)]
    scratch: Option<PathBuf>,
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    coordinator: Option<PathBuf>,
}

/// Runs it; an error names the seed.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    if !faults::ACTIVE {
        println!("marathon: FAILING WRITES ARE NOT TRIED: build with --features faults");
    }
    let mut marathon = Marathon::begin(arguments)?;
    let done = marathon.all();
    if done.is_err() {
        println!("marathon: what is left lies in {}", marathon.yard.keep().display());
    }
    done.with_context(|| format!("marathon: seed {}: FAILED", arguments.seed))
}

struct Marathon<'a> {
    arguments: &'a Arguments,
    random: Random,
    job: Job,
    yard: Yard,
    oracle: Oracle,
    proxy: Proxy,
    /// Where ranks call.
    called: String,
    coordinator: Life,
    ranks: Vec<Life>,
    launch: u32,
    events: Events,
    of_coordinators: Growth,
    of_ranks: Growth,
}

/// Whom the faults of a third of the time spare.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spared {
    Nobody,
    Ranks,
    Coordinator,
}

/// What was done to it.
#[derive(Default)]
struct Events {
    killed_ranks: u64,
    killed_coordinators: u64,
    resets: u64,
    stalls: u64,
    failing_writes: u64,
}

impl<'a> Marathon<'a> {
    fn begin(arguments: &'a Arguments) -> Result<Marathon<'a>> {
        let mut random = Random::of(arguments.seed, 0);
        let job = Job {
            seed: random.next(),
            world: RANKS,
            steps: 1_000_000,
            files: 1,
            shards: 2,
            bytes: 1024,
        };
        let scratch = arguments.scratch.clone().unwrap_or_else(std::env::temp_dir);
        let mut yard = Yard::new(&scratch)?;
        let mut oracle = Oracle::new(&job, &yard.store);
        // Writes that fail leave omissions in steps that are committed.
        oracle.lossy = true;
        let coordinator = Life::new(yard.coordinator(RANKS)?.0);
        let (host, port) = yard.address.rsplit_once(':').context("no port")?;
        let called = format!("{host}:{}", port.parse::<u16>()? + 30_000);
        let proxy = Proxy::start(&called, &yard.address)?;
        let mut marathon = Marathon {
            arguments,
            random,
            job,
            yard,
            oracle,
            proxy,
            called,
            coordinator,
            ranks: Vec::new(),
            launch: 0,
            events: Events::default(),
            of_coordinators: Growth::default(),
            of_ranks: Growth::default(),
        };
        marathon.launch()?;
        Ok(marathon)
    }

    fn all(&mut self) -> Result<()> {
        let (begin, third) = (Instant::now(), self.arguments.minutes * 20.0);
        let end = begin + Duration::from_secs_f64(third * 3.0);
        let pace = Duration::from_millis(self.arguments.pace_ms);
        let mut sampled = Instant::now();
        while Instant::now() < end {
            pause(pace);
            if self.random.below(1000) < FAULTS_PER_MILLE {
                let spared = match begin.elapsed().as_secs_f64() {
                    at if at < third => Spared::Nobody,
                    at if at < 2.0 * third => Spared::Ranks,
                    _ => Spared::Coordinator,
                };
                self.disturb(spared)?;
            }
            self.alive()?;
            if sampled.elapsed() >= SAMPLE {
                sampled = Instant::now();
                self.coordinator.sample()?;
                self.ranks.iter_mut().try_for_each(Life::sample)?;
            }
        }
        self.end()?;
        self.say()
    }

    fn launch(&mut self) -> Result<()> {
        let mut options: Vec<OsString> = vec!["--coordinator".into(), self.called.clone().into()];
        options.extend(["--store".into(), self.yard.store.clone().into()]);
        options.extend(["--pace-ms".into(), self.arguments.pace_ms.to_string().into()]);
        for rank in 0..RANKS {
            // One of two writes into the store, the other sends.
            let sends = (rank % 2 == 1).then(|| "--stream".into());
            let options: Vec<OsString> = options.iter().cloned().chain(sends).collect();
            let process = self.yard.trainee(&self.job, (self.launch, rank), &options, "")?;
            self.ranks.push(Life::new(process));
        }
        Ok(())
    }

    /// Nobody ends by himself.
    fn alive(&mut self) -> Result<()> {
        for life in self.ranks.iter_mut().chain([&mut self.coordinator]) {
            let ended = life.process.ended()?;
            ensure!(ended.is_none(), "a process ended ({ended:?}): {}", life.process.log()?);
        }
        Ok(())
    }

    fn disturb(&mut self, spared: Spared) -> Result<()> {
        match (self.random.below(20), spared) {
            (0..10, _) => {
                self.events.resets += 1;
                self.proxy.set(Mode::Reset);
                let later = self.random.below(100);
                self.proxy_heals(later);
            }
            (10..15, _) => {
                self.events.stalls += 1;
                self.proxy.set(Mode::Stall);
                let later = self.random.below(STALL_MS);
                self.proxy_heals(later);
            }
            (15..17, Spared::Nobody) | (_, Spared::Coordinator) => self.kill_a_rank()?,
            (19, _) if faults::ACTIVE => {
                // From its n-th I/O call on, some fail; the next coordinator is sound again.
                self.events.failing_writes += 1;
                let error = ["EIO", "ENOSPC"][self.random.below(2) as usize];
                let at = 200 + self.random.below(2000);
                let fault = format!("intake.write={error}@{at},intake.sync={error}@{at}");
                self.kill_the_coordinator(&fault)?;
            }
            _ => self.kill_the_coordinator("")?,
        }
        Ok(())
    }

    fn proxy_heals(&self, later_ms: u64) {
        pause(Duration::from_millis(later_ms));
        self.proxy.set(Mode::Pass);
    }

    /// The launcher starts the whole job anew, as launchers do.
    fn kill_a_rank(&mut self) -> Result<()> {
        self.events.killed_ranks += 1;
        let first = self.random.below(u64::from(RANKS)) as usize;
        self.ranks[first].process.kill()?;
        for mut life in std::mem::take(&mut self.ranks) {
            life.process.kill()?;
            self.of_ranks.add(&life);
        }
        self.oracle.check(&self.yard.ledgers()?, false)?;
        self.launch += 1;
        self.launch()
    }

    fn kill_the_coordinator(&mut self, fault: &str) -> Result<()> {
        self.events.killed_coordinators += 1;
        self.coordinator.process.kill()?;
        self.of_coordinators.add(&self.coordinator);
        let status = self.coordinator.process.ended()?;
        ensure!(status.is_some_and(was_killed), "it ended by itself: {status:?}");
        self.oracle.check(&self.yard.ledgers()?, false)?;
        let mut process = self.yard.spawn_coordinator(RANKS, fault)?;
        self.yard.until_it_answers(&mut process)?;
        self.coordinator = Life::new(process);
        Ok(())
    }

    /// Lets the last launch end by itself, and looks at everything.
    fn end(&mut self) -> Result<()> {
        let told = ledger::read_all(&self.yard.ledgers()?)?;
        let newest = told.iter().filter_map(|line| match line {
            Told::Began { launch, step, .. } if *launch == self.launch => Some(*step),
            _ => None,
        });
        let last = newest.max().unwrap_or(0) + 3;
        let path = self.yard.last_step();
        std::fs::write(path.with_extension("new"), last.to_string())?;
        std::fs::rename(path.with_extension("new"), path)?;
        for mut life in std::mem::take(&mut self.ranks) {
            let status = life.process.wait(END)?.context("a rank does not end")?;
            let log = life.process.log()?;
            ensure!(status.success() && !log.contains("panicked"), "{status}: {log}");
            self.of_ranks.add(&life);
        }
        self.of_coordinators.add(&self.coordinator);
        self.oracle.check(&self.yard.ledgers()?, true)?;
        let told = ledger::read_all(&self.yard.ledgers()?)?;
        for line in &told {
            if let Told::Trained { rank, worst_us, .. } = line {
                let worst = Duration::from_micros(*worst_us);
                ensure!(worst <= CALL_CAP, "a call of rank {rank} took {worst:?}");
            }
        }
        for step in 0..=last {
            let manifest = step_directory(&self.yard.store, self.launch, step);
            let committed = manifest.join("manifest.json").exists();
            let labelled = committed || ledger::labelled(&told, step);
            ensure!(labelled, "step {step} of the last launch is partial, and no rank says why");
        }
        Ok(())
    }

    fn say(&self) -> Result<()> {
        let events = &self.events;
        println!(
            "marathon: seed {}, {:.1} minutes of {RANKS} ranks; {} ranks killed (the job then launched anew), \
             {} coordinators killed, {} resets, {} stalls, {} coordinators whose writes fail; {} shards \
             acknowledged, {} steps committed, 0 violations",
            self.arguments.seed,
            self.arguments.minutes,
            events.killed_ranks,
            events.killed_coordinators,
            events.resets,
            events.stalls,
            events.failing_writes,
            self.oracle.shards(),
            self.oracle.committed(),
        );
        let mut grown = Vec::new();
        for (whose, growth) in [("coordinators", &self.of_coordinators), ("ranks", &self.of_ranks)]
        {
            let steps_per_hour = 3.6e6 / self.arguments.pace_ms as f64;
            println!("marathon: memory of {whose}: {}", growth.told(steps_per_hour));
            if growth.is_judged() && !(growth.mib_per_hour() <= self.arguments.slope_mib) {
                grown.push(whose);
            }
        }
        ensure!(grown.is_empty(), "the memory of {grown:?} grows");
        Ok(())
    }
}
