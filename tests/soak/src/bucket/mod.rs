//! R6, `soak bucket`: a training loop that records into a bucket which fails.
//!
//! Each trial is a job of two ranks of their own processes, a coordinator, and an S3 server with
//! weather drawn from the seed: requests answered with 500, 403 and 503, or never, and
//! connections that are cut, and after a while all is well again. The job must not notice: its
//! losses are those of a job that records nothing, bit for bit, no call takes longer than its
//! cap, memory stays within its own. Each step is committed, or partial with its reason; and what
//! was acknowledged is in the bucket.

mod server;

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;

use self::server::{BUCKET, FAILURES, Server, Weather};
use crate::job::{Job, step_directory};
use crate::ledger::{self, Told};
use crate::oracle::Oracle;
use crate::processes::{Process, Yard, memory};
use crate::random::Random;

/// Ranks of the job.
const RANKS: u32 = 2;
/// The cap of one call of the recorder, with what it takes to come back from a wait.
const CALL_CAP: Duration = Duration::from_millis(250 + 50);
/// The recorder's queue, and what a rank takes beside: code, stacks, connections, one answer.
const QUEUE_KIB: u64 = 2 << 10;
const SLACK_KIB: u64 = 32 << 10;
/// What a rank is told.
const JOIN_MS: u64 = 6000;
const STEP_MS: u64 = 6000;
/// How long the weather changes. A recorder is closed for as long as it gets something done, so
/// that a bucket which fails now and then for ever would hold it up for ever.
const STORM: Duration = Duration::from_secs(40);
/// Within which a rank must end once all is well: the recorder's patience (30 s), one step that is
/// given up (`STEP_MS`) and the time of a slow machine.
const LIMIT: Duration = Duration::from_secs(90);
/// Between two weathers, and between two looks.
const WEATHER_MS: u64 = 1500;
const LOOK: Duration = Duration::from_millis(2);

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Jobs
    #[arg(long, default_value_t = 50)]
    trials: u64,
    /// Steps of each
    #[arg(long, default_value_t = 1000)]
    steps: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The first of them, to see one again
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    coordinator: Option<std::path::PathBuf>,
    /// A fault that is seeded into every process, to see whether it is found
    #[arg(long, default_value = "")]
    seeded: String,
}

#[derive(Default)]
struct Tally {
    failed: u64,
    shards: u64,
    committed: u64,
    partial: u64,
    call: Duration,
    held_kib: u64,
}

/// Runs the campaign; an error names the seed and the trial.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let (seed, mut total) = (arguments.seed, Tally::default());
    for number in arguments.first..arguments.first + arguments.trials {
        let one = trial(arguments, number)
            .with_context(|| format!("bucket: seed {seed}, trial {number}: FAILED"))?;
        total.failed += one.failed;
        total.shards += one.shards;
        total.committed += one.committed;
        total.partial += one.partial;
        total.call = total.call.max(one.call);
        total.held_kib = total.held_kib.max(one.held_kib);
    }
    println!(
        "bucket: seed {seed}, {} jobs of {} steps, {} requests failed, 0 exceptions, 0 hangs, losses \
         bit-identical; {} shards acknowledged, 0 lost, {} steps committed, {} partial with their reasons; \
         longest call {:.1} ms, most memory {:.1} MiB beside a queue of {} MiB",
        arguments.trials,
        arguments.steps,
        total.failed,
        total.shards,
        total.committed,
        total.partial,
        total.call.as_secs_f64() * 1e3,
        total.held_kib as f64 / 1024.0,
        QUEUE_KIB >> 10
    );
    ensure!(total.failed > 0, "bucket: no request was failed, so nothing was tried");
    Ok(())
}

fn trial(arguments: &Arguments, number: u64) -> Result<Tally> {
    let mut random = Random::of(arguments.seed, number);
    let job = Job {
        seed: random.next(),
        world: RANKS,
        steps: arguments.steps,
        files: 1,
        shards: 2,
        bytes: 1 << (10 + random.below(6)),
    };
    let mut yard = Yard::new(&memory())?;
    let server = Server::start(&yard.path().join("s3"), Random::of(random.next(), 0))?;
    yard.environment = server.environment();
    // What it is for the coordinator, and what is in it for whoever looks from outside.
    yard.store = format!("s3://{BUCKET}/team").into();
    let mut oracle = Oracle::new(&job, &server.objects().join("team"));
    oracle.lossy = true;
    let seeded = match arguments.seeded.as_str() {
        "" => String::new(),
        name => format!("seeded:{name}"),
    };
    let (_coordinator, _) = yard.coordinator(RANKS)?;
    let pace = 2 + random.below(10);
    let mut options: Vec<OsString> = vec!["--pace-ms".into(), pace.to_string().into()];
    let silent = of_job(&mut yard, &job, &[&options[..], &["--off".into()]].concat(), 1, "")?;
    options.extend(["--coordinator".into(), yard.address.clone().into()]);
    options.extend(["--store".into(), yard.store.clone().into()]);
    for (name, value) in
        [("--queue-kib", QUEUE_KIB), ("--join-ms", JOIN_MS), ("--step-ms", STEP_MS)]
    {
        options.extend([name.into(), value.to_string().into()]);
    }
    options.extend((random.below(4) == 0).then(|| "--stream".into()));
    let mut ranks = of_job(&mut yard, &job, &options, 0, &seeded)?;
    ranks.extend(silent);
    train(&mut ranks, &server, &mut random)?;
    server.set(Weather::default());
    let checked = check(&yard, &job, &mut oracle, &server);
    checked.inspect_err(|_| {
        if seeded.is_empty() {
            println!("bucket: what is left lies in {}", yard.keep().display());
        }
    })
}

/// Ranks that train on the same data: launch 0 records, launch 1 does not.
fn of_job(
    yard: &mut Yard,
    job: &Job,
    options: &[OsString],
    launch: u32,
    faults: &str,
) -> Result<Vec<Process>> {
    (0..RANKS).map(|rank| yard.trainee(job, (launch, rank), options, faults)).collect()
}

/// Lets the weather change until all ranks have ended by themselves.
fn train(ranks: &mut [Process], server: &Server, random: &mut Random) -> Result<()> {
    let begin = Instant::now();
    let mut changes = Duration::from_millis(random.below(WEATHER_MS));
    loop {
        let mut running = Vec::new();
        for rank in &mut *ranks {
            match rank.ended()? {
                None => running.push(rank.log()?),
                Some(status) => {
                    ensure!(status.success(), "the training side was disturbed: {}", rank.log()?);
                }
            }
        }
        if running.is_empty() {
            return Ok(());
        }
        ensure!(
            begin.elapsed() < STORM + LIMIT,
            "{} ranks do not end within {} s of clear weather; their logs: {running:?}",
            running.len(),
            LIMIT.as_secs()
        );
        if begin.elapsed() >= STORM {
            server.set(Weather::default());
        } else if begin.elapsed() >= changes {
            changes += Duration::from_millis(100 + random.below(WEATHER_MS));
            let some = random.below(1 << FAILURES.len());
            let failures = FAILURES.iter().enumerate().filter(|(bit, _)| some & (1 << bit) != 0);
            let percent = [0, 5, 30, 100][random.below(4) as usize];
            let failures = failures.map(|(_, failure)| *failure).collect();
            server.set(Weather { failures, percent });
        }
        std::thread::park_timeout(LOOK);
    }
}

fn check(yard: &Yard, job: &Job, oracle: &mut Oracle, server: &Server) -> Result<Tally> {
    let (off, on): (Vec<_>, Vec<_>) =
        yard.ledgers()?.into_iter().partition(|path| path.to_string_lossy().ends_with("-1.ledger"));
    oracle.check(&on, true)?;
    let told = ledger::read_all(&on)?;
    let mut tally = Tally { failed: server.failed(), ..Tally::default() };
    for of in 0..RANKS {
        let (steps, worst, held, losses) = trained(&told, of)?;
        let (_, _, _, silent) = trained(&ledger::read_all(&off)?, of)?;
        ensure!(steps == job.steps, "rank {of} trained {steps} steps");
        ensure!(losses == silent, "rank {of} has other losses with recording on");
        ensure!(worst <= CALL_CAP, "a call of rank {of} took {worst:?}");
        ensure!(held <= QUEUE_KIB + SLACK_KIB, "rank {of} took {held} KiB more than before");
        tally.call = tally.call.max(worst);
        tally.held_kib = tally.held_kib.max(held);
    }
    for step in 0..job.steps {
        let manifest = step_directory(&server.objects().join("team"), 0, step);
        if !manifest.join("manifest.json").exists() {
            tally.partial += 1;
            ensure!(ledger::labelled(&told, step), "step {step} is partial, and no rank says why");
        }
    }
    tally.shards = oracle.shards();
    tally.committed = oracle.committed();
    Ok(tally)
}

/// What a rank said at its end: steps, longest call, memory in KiB, losses.
fn trained(told: &[Told], of: u32) -> Result<(u64, Duration, u64, String)> {
    let found = told.iter().find_map(|line| match line {
        Told::Trained { rank, steps, worst_us, held_kib, losses, .. } if *rank == of => {
            Some((*steps, Duration::from_micros(*worst_us), *held_kib, losses.clone()))
        }
        _ => None,
    });
    found.context("a rank did not train to its end")
}
