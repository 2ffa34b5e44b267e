//! `soak io-errors`: fails the k-th I/O call of a small job, for every k, in the coordinator, in
//! a rank that writes into the store and in one that sends; once, and from then on. Three ways:
//! the product's own points (EIO, ENOSPC, EDQUOT, EINTR, and half of a write), strace on the
//! system calls, and a file system that is really full.
//!
//! After each job: no panic, the training side ended by itself and in time, what was
//! acknowledged is there, every step is committed or partial with its reason; and the next
//! launch, which nothing disturbs, commits all of its steps.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use backtape::faults;
use clap::Args;

use crate::job::Job;
use crate::ledger::{self, Told};
use crate::oracle::Oracle;
use crate::order::need_strace;
use crate::processes::{Process, Yard, memory};
use crate::random::Random;

/// How long a job may take in all.
const LIMIT: Duration = Duration::from_secs(240);
/// Deadlines of the recorders: what cannot succeed is given up soon.
const DEADLINES: [&str; 4] = ["--join-ms", "800", "--step-ms", "500"];
/// And of those that nothing disturbs: other work may have the machine for a while.
const PATIENT: [&str; 4] = ["--join-ms", "60000", "--step-ms", "120000"];
/// What a point is made to return.
const ERRORS: [&str; 4] = ["EIO", "ENOSPC", "EDQUOT", "EINTR"];
/// System calls that strace fails, with an error that they can have.
const CALLS: [(&str, &str); 9] = [
    ("fsync", "EIO"),
    ("fdatasync", "EIO"),
    ("linkat", "ENOSPC"),
    ("unlink", "EIO"),
    ("unlinkat", "EIO"),
    ("mkdir", "ENOSPC"),
    ("mkdirat", "ENOSPC"),
    ("ftruncate", "EIO"),
    ("pwrite64", "ENOSPC"),
];
/// Passes of one system call that are failed, each thread counting its own: a small job has
/// fewer.
const PASSES: u64 = 12;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct IoErrorsArguments {
    /// Trials, of those that there are, drawn by the seed; 0: every one
    #[arg(long, default_value_t = 0)]
    pub trials: usize,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Jobs at a time
    #[arg(long, default_value_t = 4)]
    pub jobs: usize,
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    pub coordinator: Option<PathBuf>,
}

/// Whose calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Coordinator,
    Writer,
    Sender,
}

const VICTIMS: [Victim; 3] = [Victim::Coordinator, Victim::Writer, Victim::Sender];

/// One job with one fault.
#[derive(Clone, Debug)]
struct Trial {
    victim: Victim,
    /// For the product's points.
    faults: String,
    /// For strace.
    inject: String,
}

/// Where strace says what it failed.
const INJECTED: &str = "strace.said";

/// What the trials came to.
#[derive(Default)]
struct Tally {
    /// Trials in which strace failed a call.
    hit: u64,
    whole: u64,
    partial: u64,
    shards: u64,
}

fn job() -> Job {
    Job { seed: 11, world: 2, steps: 2, files: 2, shards: 1, bytes: 512 }
}

/// Runs the campaign; an error names the trial that shows it again.
pub(crate) fn run(arguments: &IoErrorsArguments) -> anyhow::Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let mut trials = by_points()?;
    let points = trials.len();
    match need_strace() {
        Ok(()) => trials.extend(by_strace()),
        Err(error) => println!("io-errors: {error}"),
    }
    let calls = trials.len() - points;
    let trials = drawn(trials, arguments);
    let (next, total) = (AtomicUsize::new(0), Mutex::new(Tally::default()));
    let work = || -> anyhow::Result<()> {
        while let Some(trial) = trials.get(next.fetch_add(1, Ordering::SeqCst)) {
            let done = meet(trial).with_context(|| format!("io-errors: FAILED: {trial:?}"));
            if done.is_err() {
                next.store(trials.len(), Ordering::SeqCst);
            }
            let done = done?;
            let mut total = total.lock().map_err(|_| anyhow::anyhow!("a trial panicked"))?;
            total.hit += done.hit;
            total.whole += done.whole;
            total.partial += done.partial;
            total.shards += done.shards;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.jobs).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a trial panicked"))??;
        }
        anyhow::Ok(())
    })?;
    full_disk()?;
    let total = total.into_inner().map_err(|_| anyhow::anyhow!("a trial panicked"))?;
    println!(
        "io-errors: seed {}, {} trials of {points} at points and {calls} by strace (which hit in {}), {} shards \
         acknowledged to {} undisturbed and {} disturbed ranks, 0 lost, 0 false acknowledgements",
        arguments.seed,
        trials.len(),
        total.hit,
        total.shards,
        total.whole,
        total.partial
    );
    Ok(())
}

fn drawn(mut trials: Vec<Trial>, arguments: &IoErrorsArguments) -> Vec<Trial> {
    if arguments.trials == 0 || arguments.trials >= trials.len() {
        return trials;
    }
    let mut random = Random::of(arguments.seed, 0);
    for index in 0..arguments.trials {
        let left = (trials.len() - index) as u64;
        trials.swap(index, index + random.below(left) as usize);
    }
    trials.truncate(arguments.trials);
    trials
}

/// Every pass of every point, once and from then on, with each error.
fn by_points() -> anyhow::Result<Vec<Trial>> {
    if !faults::ACTIVE {
        println!("io-errors: THE POINTS ARE NOT TRIED: build with --features faults");
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for victim in VICTIMS {
        let passes = passes(victim)?;
        ensure!(passes > 5, "{victim:?} passes {passes} points only");
        for k in 1..=passes {
            for error in ERRORS {
                for onwards in ["", "+"] {
                    let faults = format!("*={error}@{k}{onwards}");
                    found.push(Trial { victim, faults, inject: String::new() });
                }
            }
        }
    }
    Ok(found)
}

/// How many points a victim passes in a job without faults.
fn passes(victim: Victim) -> anyhow::Result<usize> {
    let log = tempfile::NamedTempFile::new()?;
    let faults = format!("log:{}", log.path().display());
    let done = meet(&Trial { victim, faults, inject: String::new() })?;
    ensure!(done.partial == 0, "a job without faults left {} parts partial", done.partial);
    Ok(std::fs::read_to_string(log.path())?.lines().count())
}

fn by_strace() -> Vec<Trial> {
    let mut found = Vec::new();
    for victim in VICTIMS {
        // Of a rank's process only the ledger calls fdatasync, and the ledger is not on trial.
        let tried = |call: &str| victim == Victim::Coordinator || call != "fdatasync";
        for (call, error) in CALLS.into_iter().filter(|(call, _)| tried(call)) {
            for k in 1..=PASSES {
                for onwards in ["", "+"] {
                    let inject = format!("{call}:error={error}:when={k}{onwards}");
                    found.push(Trial { victim, faults: String::new(), inject });
                }
            }
        }
    }
    found
}

fn meet(trial: &Trial) -> anyhow::Result<Tally> {
    let mut yard = Yard::new(&memory())?;
    let done = meet_in(&mut yard, trial);
    if done.is_err() {
        println!("io-errors: what is left lies in {}", yard.keep().display());
    }
    done
}

/// Chooses what the next process of the yard meets.
fn arm<'a>(yard: &mut Yard, trial: &'a Trial, who: Victim) -> &'a str {
    let hit = trial.victim == who;
    yard.tracer = match hit && !trial.inject.is_empty() {
        false => Vec::new(),
        true => {
            let inject = format!("inject={}", trial.inject);
            let traced = format!("trace={}", trial.inject.split(':').next().unwrap_or_default());
            let said = yard.path().join(INJECTED).display().to_string();
            ["strace", "-D", "-f", "-qq", "-e", &traced, "-e", &inject, "-o", &said]
                .map(Into::into)
                .into()
        }
    };
    if hit { &trial.faults } else { "" }
}

fn meet_in(yard: &mut Yard, trial: &Trial) -> anyhow::Result<Tally> {
    let job = job();
    let faults = arm(yard, trial, Victim::Coordinator);
    let mut coordinator = yard.spawn_coordinator(job.world, faults)?;
    // It may refuse to start: then the ranks find none.
    let _ = yard.until_it_answers(&mut coordinator);
    let mut ranks = Vec::new();
    for (victim, first) in [(Victim::Writer, 0), (Victim::Sender, 1)] {
        let faults = arm(yard, trial, victim);
        let stream = ["--stream"].into_iter().take(usize::from(victim == Victim::Sender));
        let options: Vec<&str> = DEADLINES.into_iter().chain(stream).collect();
        ranks.push(yard.ranks(&job, (first, first + 1), 0, &options, faults)?);
    }
    yard.tracer.clear();
    for rank in &mut ranks {
        ended_well(rank)?;
    }
    let told = told(yard)?;
    let mut tally = check_told(&told, &job, 0)?;
    let said = std::fs::read_to_string(yard.path().join(INJECTED)).unwrap_or_default();
    tally.hit = u64::from(said.contains("(INJECTED)"));
    if let Some(status) = coordinator.ended()? {
        let log = coordinator.log()?;
        ensure!(status.code() == Some(2), "the coordinator ended ({status}): {log}");
    }
    quiet(&coordinator)?;
    coordinator.kill()?;
    let mut oracle = Oracle::new(&job, &yard.store);
    oracle.lossy = true;
    oracle.check(&yard.ledgers()?, true)?;
    heal(yard, &mut oracle, &job)?;
    Ok(tally)
}

/// A restarted coordinator knows what was acknowledged, and the next launch is whole.
fn heal(yard: &mut Yard, oracle: &mut Oracle, job: &Job) -> anyhow::Result<()> {
    let (mut coordinator, _) = yard.coordinator(job.world)?;
    for ((attempt, step), committed, shards) in oracle.steps() {
        let said = yard.status(attempt, step)?;
        let place = format!("attempt {attempt} step {step}");
        ensure!(said.0 || !committed, "{place} is committed, and a restart forgot it");
        ensure!(said.1 >= shards, "{place}: {shards} shards acknowledged, {} known", said.1);
    }
    let stream = [&PATIENT[..], &["--stream"]].concat();
    let mut ranks =
        [yard.ranks(job, (0, 1), 1, &PATIENT, "")?, yard.ranks(job, (1, 2), 1, &stream, "")?];
    for rank in &mut ranks {
        ended_well(rank)?;
    }
    let tally = check_told(&told(yard)?, job, 1)?;
    ensure!(tally.partial == 0, "the next launch left {} parts partial", tally.partial);
    coordinator.kill()?;
    oracle.lossy = true;
    oracle.check(&yard.ledgers()?, true)
}

fn told(yard: &Yard) -> anyhow::Result<Vec<Told>> {
    let read = |path: &PathBuf| ledger::read(path);
    Ok(yard.ledgers()?.iter().map(read).collect::<Result<Vec<_>, _>>()?.concat())
}

/// Fail-open: a rank ends by itself, in time, and without a panic.
fn ended_well(rank: &mut Process) -> anyhow::Result<()> {
    let status = rank.wait(LIMIT)?.context("a rank does not end")?;
    ensure!(status.success(), "the training side was disturbed ({status}): {}", rank.log()?);
    quiet(rank)
}

fn quiet(process: &Process) -> anyhow::Result<()> {
    let log = process.log()?;
    ensure!(!log.contains("panicked"), "a panic: {log}");
    Ok(())
}

/// Every step of every rank is committed or partial, and what is partial has a reason.
fn check_told(told: &[Told], job: &Job, launch: u32) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    for rank in 0..job.world {
        let closed = told.iter().find_map(|line| match line {
            Told::Closed { launch: l, rank: r, faults } if (*l, *r) == (launch, rank) => {
                Some(faults)
            }
            _ => None,
        });
        let faults = closed.with_context(|| format!("rank {rank} closed nothing"))?;
        let partial =
            (0..job.steps).filter(|&step| told.contains(&Told::Partial { launch, rank, step }));
        let partial = partial.count() as u64;
        let committed = (0..job.steps)
            .filter(|&step| told.contains(&Told::Committed { attempt: launch, step }));
        let committed = committed.count() as u64;
        ensure!(partial == 0 || !faults.is_empty(), "rank {rank}: partial without a reason");
        let known = partial + committed >= job.steps || !faults.is_empty();
        ensure!(known, "rank {rank}: {committed} steps committed, {partial} partial: {faults:?}");
        tally.partial += u64::from(!faults.is_empty());
        tally.whole += u64::from(faults.is_empty());
    }
    let of = |line: &&Told| matches!(line, Told::Shard { shard, .. } if shard.launch == launch);
    tally.shards = told.iter().filter(of).count() as u64;
    Ok(tally)
}

/// A file system that runs full in the middle of a job, and then gets room.
fn full_disk() -> anyhow::Result<()> {
    if !root()? {
        println!("io-errors: A FULL DISK IS NOT TRIED: mounting a small one takes root");
        return Ok(());
    }
    for kibibytes in [8, 64, 200, 400, 800] {
        let mut yard = Yard::new(&memory())?;
        std::fs::create_dir(&yard.store)?;
        let size = format!("size={kibibytes}k");
        mount(&["-t", "tmpfs", "-o", &size, "backtape-soak"], &yard.store)?;
        let done = fill(&mut yard).with_context(|| format!("io-errors: FAILED: {kibibytes} KiB"));
        let unmounted = Command::new("umount").arg(&yard.store).status();
        done?;
        ensure!(unmounted.is_ok_and(|status| status.success()), "umount failed");
    }
    println!("io-errors: 5 disks that ran full, 0 shards lost");
    Ok(())
}

fn mount(arguments: &[&str], target: &Path) -> anyhow::Result<()> {
    let status = Command::new("mount").args(arguments).arg(target).status()?;
    if status.success() { Ok(()) } else { bail!("mount {arguments:?} failed ({status})") }
}

fn fill(yard: &mut Yard) -> anyhow::Result<()> {
    let job = job();
    let mut coordinator = yard.spawn_coordinator(job.world, "")?;
    let _ = yard.until_it_answers(&mut coordinator);
    let stream = [&DEADLINES[..], &["--stream"]].concat();
    let mut ranks =
        [yard.ranks(&job, (0, 1), 0, &DEADLINES, "")?, yard.ranks(&job, (1, 2), 0, &stream, "")?];
    for rank in &mut ranks {
        ended_well(rank)?;
    }
    check_told(&told(yard)?, &job, 0)?;
    quiet(&coordinator)?;
    coordinator.kill()?;
    let mut oracle = Oracle::new(&job, &yard.store);
    oracle.lossy = true;
    oracle.check(&yard.ledgers()?, true)?;
    mount(&["-o", "remount,size=64m"], &yard.store)?;
    heal(yard, &mut oracle, &job)
}

/// Whether this program may mount.
fn root() -> anyhow::Result<bool> {
    let said = Command::new("id").arg("-u").output()?.stdout;
    Ok(said.trim_ascii() == b"0")
}
