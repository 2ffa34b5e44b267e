//! `soak launches`: four ranks and their coordinator are killed with SIGKILL at random moments and
//! started again at once, again and again. The ranks of one launch may only meet in one attempt,
//! which no other launch enters, and a launch that nobody kills commits all its steps.
//!
//! A yard is one run with up to 25 launches, the last of which is left alone. In half of the yards
//! launches have names, and some of their ranks live on beside the next launch.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;

use crate::job::{Job, step_directory};
use crate::ledger::{self, Told};
use crate::processes::{Process, Yard, memory, pause, was_killed};
use crate::random::Random;

const RANKS: u32 = 4;
/// Restarts of one yard.
const PER_YARD: u64 = 25;
/// How long the last launch may take: other work may have the machine for a while.
const FINAL: Duration = Duration::from_secs(240);
/// Ranks of a launch that is killed are not to give up before.
const PATIENT: [&str; 5] = ["--uncounted", "--join-ms", "120000", "--step-ms", "120000"];

#[derive(Args, Clone, Debug)]
pub(crate) struct LaunchesArguments {
    /// How many restarts
    #[arg(long, default_value_t = 1000)]
    pub trials: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Yards at a time
    #[arg(long, default_value_t = 2)]
    pub jobs: u64,
    /// Longest time in milliseconds that a launch is left alone before it is killed
    #[arg(long, default_value_t = 400)]
    pub stretch: u64,
}

#[derive(Default)]
struct Tally {
    restarts: u64,
    /// Launches of which some rank, and all ranks, were told their attempt.
    entered: u64,
    whole: u64,
    committed: u64,
}

/// Runs the campaign; an error names the seed and the yard that show it again.
pub(crate) fn run(arguments: &LaunchesArguments) -> anyhow::Result<()> {
    crate::processes::choose_coordinator(None)?;
    let (seed, yards) = (arguments.seed, arguments.trials.div_ceil(PER_YARD));
    let (next, total) = (AtomicU64::new(0), Mutex::new(Tally::default()));
    let work = || -> anyhow::Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::SeqCst);
            if number >= yards {
                return Ok(());
            }
            let restarts = PER_YARD.min(arguments.trials - number * PER_YARD);
            let one = trial(arguments, number, restarts).with_context(|| {
                next.store(yards, Ordering::SeqCst);
                format!("launches: seed {seed}, yard {number} of {restarts} restarts: FAILED")
            })?;
            let mut total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            total.restarts += one.restarts;
            total.entered += one.entered;
            total.whole += one.whole;
            total.committed += one.committed;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.jobs).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a yard panicked"))??;
        }
        anyhow::Ok(())
    })?;
    let all = total.into_inner().map_err(|_| anyhow::anyhow!("a yard panicked"))?;
    println!(
        "launches: seed {seed}, {} restarts of {RANKS} ranks and a coordinator; of {} launches a \
         rank entered, of {} all; 0 launches in two attempts, 0 attempts with two launches; all \
         {} steps of launches that were left alone committed",
        all.restarts, all.entered, all.whole, all.committed
    );
    Ok(())
}

fn trial(arguments: &LaunchesArguments, number: u64, restarts: u64) -> anyhow::Result<Tally> {
    let mut random = Random::of(arguments.seed, number);
    let job = Job { seed: random.next(), world: RANKS, steps: 4, files: 1, shards: 1, bytes: 1024 };
    let named = random.below(2) == 0;
    let mut yard = Yard::new(&memory())?;
    let mut coordinator = yard.spawn_coordinator(RANKS, "")?;
    let mut left_over: Vec<Process> = Vec::new();
    let mut ranks = launch(&mut yard, &job, 0, named)?;
    for restart in 1..=restarts {
        pause(Duration::from_millis(random.below(arguments.stretch)));
        // Together with the coordinator mostly, and in any order.
        let with_coordinator = random.below(8) != 0;
        let coordinator_first = random.below(2) == 0;
        if with_coordinator && coordinator_first {
            coordinator.kill()?;
        }
        left_over.clear();
        for mut rank in ranks {
            if named && random.below(4) == 0 {
                left_over.push(rank);
            } else {
                rank.kill()?;
            }
        }
        if with_coordinator && !coordinator_first {
            coordinator.kill()?;
        }
        if with_coordinator && random.below(2) == 0 {
            coordinator = yard.spawn_coordinator(RANKS, "")?;
            ranks = launch(&mut yard, &job, restart as u32, named)?;
        } else {
            ranks = launch(&mut yard, &job, restart as u32, named)?;
            if with_coordinator {
                coordinator = yard.spawn_coordinator(RANKS, "")?;
            }
        }
    }
    let done = end(&mut yard, &job, ranks, restarts as u32);
    if done.is_err() {
        println!("launches: what is left lies in {}", yard.keep().display());
    }
    Ok(Tally { restarts, ..done? })
}

fn launch(yard: &mut Yard, job: &Job, number: u32, named: bool) -> anyhow::Result<Vec<Process>> {
    let name = format!("job/{number}");
    let mut options = PATIENT.to_vec();
    if named {
        options.extend(["--name", &name]);
    }
    (0..RANKS).map(|rank| yard.ranks(job, (rank, rank + 1), number, &options, "")).collect()
}

/// Waits for the last launch, and holds all that the ranks were told against the promise.
fn end(yard: &mut Yard, job: &Job, mut ranks: Vec<Process>, last: u32) -> anyhow::Result<Tally> {
    for (rank, process) in ranks.iter_mut().enumerate() {
        let status = process.wait(FINAL)?;
        let status = status.with_context(|| format!("rank {rank} does not come to its end"))?;
        ensure!(!was_killed(status) && status.success(), "rank {rank}: {}", process.log()?);
    }
    let mut attempts: BTreeMap<u32, BTreeMap<u32, u32>> = BTreeMap::new();
    for path in yard.ledgers()? {
        for told in ledger::read(&path)? {
            if let Told::Joined { attempt, launch, rank, .. } = told {
                attempts.entry(launch).or_default().insert(rank, attempt);
            }
        }
    }
    let mut launch_of = BTreeMap::new();
    for (launch, ranks) in &attempts {
        let mut numbers: Vec<u32> = ranks.values().copied().collect();
        numbers.sort_unstable();
        numbers.dedup();
        let [attempt] = numbers[..] else {
            bail!("launch {launch} is in several attempts: {ranks:?}")
        };
        if let Some(other) = launch_of.insert(attempt, *launch) {
            bail!("attempt {attempt} holds the launches {other} and {launch}")
        }
    }
    let own = attempts.get(&last).context("the last launch did not enter")?;
    ensure!(own.len() == RANKS as usize, "of the last launch only {own:?} entered");
    for step in 0..job.steps {
        let manifest = step_directory(&yard.store, own[&0], step).join("manifest.json");
        ensure!(manifest.is_file(), "{} was never committed", manifest.display());
    }
    let whole = attempts.values().filter(|ranks| ranks.len() == RANKS as usize).count();
    Ok(Tally {
        restarts: 0,
        entered: attempts.len() as u64,
        whole: whole as u64,
        committed: job.steps,
    })
}
