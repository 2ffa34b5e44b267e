//! R5, `soak network`: 8 ranks and a coordinator on hosts whose network fails.
//!
//! Each host is a network namespace, joined to the others by a bridge; links go down, packets
//! are dropped one way, lost or slowed down, and a proxy on the path resets, stalls, forgets and
//! cuts connections. The ranks train on at their pace. After each scenario: nothing that was
//! acknowledged is lost, no call of a recorder took longer than its cap, the next step that
//! began after the network was whole again was committed within 10 s, and each step that is
//! partial is labelled with its reason.

mod hosts;
pub(crate) mod proxy;
mod scenario;

use std::ffi::OsString;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use backtape::credentials::{Access, issue};
use backtape::identity::Name;
use clap::Args;

use self::hosts::{COORDINATOR, Hosts};
use self::proxy::Proxy;
use self::scenario::{PATIENT_MS, RANKS, Scenario};
use crate::job::{Job, RUN, step_directory};
use crate::ledger::{self, Told};
use crate::oracle::Oracle;
use crate::processes::{Process, Yard, memory, pause};
use crate::random::Random;

/// Time of one step of the job.
const PACE: Duration = Duration::from_millis(150);
/// Within which the next step is committed when the network is whole again.
const HEALED: Duration = Duration::from_secs(10);
/// The cap of one call of the recorder, with what it takes to come back from a wait.
const CALL_CAP: Duration = Duration::from_millis(250 + 50);
/// Longest wait for what should happen at once on a network that is whole.
const PATIENCE: Duration = Duration::from_secs(90);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Scenarios
    #[arg(long, default_value_t = 500)]
    trials: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The first of them, to see one again
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Networks at a time
    #[arg(long, default_value_t = 4)]
    jobs: u64,
    /// The coordinator's program; by default the one beside this program
    #[arg(long)]
    coordinator: Option<std::path::PathBuf>,
    /// A fault that is seeded into every process, to see whether it is found
    #[arg(long, default_value = "")]
    seeded: String,
}

/// What a campaign did.
#[derive(Default)]
struct Tally {
    scenarios: u64,
    shards: u64,
    committed: u64,
    partial: u64,
    /// Longest time until the next step was committed, and longest call of a recorder.
    healed: Duration,
    call: Duration,
}

/// Runs the campaign; an error names the seed and the trial.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    crate::processes::choose_coordinator(arguments.coordinator.clone())?;
    let unavailable = hosts::available().err();
    if let Some(why) = &unavailable {
        println!("network: LINKS, LOSS, PARTITIONS AND SLOW LINKS ARE NOT TRIED: {why:#}");
    }
    let (next, total) = (AtomicU64::new(arguments.first), Mutex::new(Tally::default()));
    let failed = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        let hosts = match &unavailable {
            None => Some(Hosts::new(RANKS)?),
            Some(_) => None,
        };
        loop {
            let number = next.fetch_add(1, Ordering::SeqCst);
            if number >= arguments.first + arguments.trials {
                return Ok(());
            }
            let done = trial(arguments, number, hosts.as_ref(), &total);
            if let Err(error) = done {
                let why = format!("network: seed {}, trial {number}: {error:#}", arguments.seed);
                println!("{why}");
                lock(&failed).push(number);
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.jobs).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => done,
            Err(_) => bail!("a network's thread panicked"),
        })
    })?;
    let (total, failed) = (lock(&total), lock(&failed));
    println!(
        "network: seed {}, {} scenarios of {RANKS} ranks, {} failed {failed:?}; {} shards acknowledged, \
         {} steps committed, {} partial with their reasons; committed again within {:.1} s, longest call {} ms",
        arguments.seed,
        total.scenarios,
        failed.len(),
        total.shards,
        total.committed,
        total.partial,
        total.healed.as_secs_f64(),
        total.call.as_millis()
    );
    ensure!(failed.is_empty(), "network: FAILED");
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn trial(
    arguments: &Arguments,
    number: u64,
    hosts: Option<&Hosts>,
    total: &Mutex<Tally>,
) -> Result<()> {
    let mut random = Random::of(arguments.seed, number);
    let scenario = Scenario::draw(&mut random, hosts.is_some());
    let mut trial = Trial::begin(scenario, &mut random, hosts, &arguments.seeded)?;
    let done = trial.all();
    // Whatever happened: the next scenario begins on a network that is whole.
    trial.scenario.heal(hosts, trial.proxy.as_ref())?;
    let told = trial.told();
    let tally = done.with_context(|| format!("{:?}", trial.scenario)).inspect_err(|_| {
        if arguments.seeded.is_empty() {
            println!("network: what is left lies in {}", trial.yard.keep().display());
        }
    })?;
    let mut total = lock(total);
    total.scenarios += 1;
    total.shards += trial.oracle.shards();
    total.committed += trial.oracle.committed();
    let partial = |line: &&Told| matches!(line, Told::Partial { .. });
    total.partial += told?.iter().filter(partial).count() as u64;
    total.healed = total.healed.max(tally.healed);
    total.call = total.call.max(tally.call);
    Ok(())
}

struct Trial<'a> {
    scenario: Scenario,
    hosts: Option<&'a Hosts>,
    job: Job,
    yard: Yard,
    oracle: Oracle,
    proxy: Option<Proxy>,
    /// Where ranks call.
    called: String,
    seeded: String,
    _coordinator: Process,
    ranks: Vec<Process>,
}

impl<'a> Trial<'a> {
    fn begin(
        scenario: Scenario,
        random: &mut Random,
        hosts: Option<&'a Hosts>,
        seeded: &str,
    ) -> Result<Trial<'a>> {
        let (files, bytes) = (scenario.files, scenario.bytes);
        let job =
            Job { seed: random.next(), world: RANKS, steps: 100_000, files, shards: 2, bytes };
        let mut yard = Yard::new(&memory())?;
        if hosts.is_some() {
            yard.address = format!("{COORDINATOR}:7447");
        }
        let (host, port) = yard.address.rsplit_once(':').context("no port")?;
        let called = match scenario.proxied {
            true => format!("{host}:{}", port.parse::<u16>()? + 30_000),
            false => yard.address.clone(),
        };
        if scenario.credentials {
            let issued = issue(&yard.path().join("made"), &[host.into()], &[], 1)?;
            yard.coordinator_options = vec!["--credentials".into(), issued.coordinator.into()];
            yard.access = Access::read(&issued.ranks[0], &Name::new(RUN)?)?;
        } else {
            yard.coordinator_options = vec!["--insecure".into()];
        }
        let seeded = match seeded {
            "" => String::new(),
            name => format!("seeded:{name}"),
        };
        let mut oracle = Oracle::new(&job, &yard.store);
        oracle.lossy = scenario.queue_kib.is_some();
        let (coordinator, proxy) = on(hosts.map(|hosts| &hosts.coordinator), || {
            let mut process = yard.spawn_coordinator(RANKS, &seeded)?;
            yard.until_it_answers(&mut process)?;
            let proxy = match scenario.proxied {
                true => Some(Proxy::start(&called, &yard.address)?),
                false => None,
            };
            Ok((process, proxy))
        })?;
        Ok(Trial {
            scenario,
            hosts,
            job,
            yard,
            oracle,
            proxy,
            called,
            seeded,
            _coordinator: coordinator,
            ranks: Vec::new(),
        })
    }

    fn all(&mut self) -> Result<Tally> {
        match self.scenario.begins {
            None => {
                self.scenario.apply(self.hosts, self.proxy.as_ref())?;
                self.start_ranks()?;
            }
            Some(later) => {
                self.start_ranks()?;
                self.until(PATIENCE, "the first step is not committed", |trial| {
                    Ok(trial.manifest(0).exists())
                })?;
                pause(later);
                self.scenario.apply(self.hosts, self.proxy.as_ref())?;
            }
        }
        pause(self.scenario.lasts);
        self.scenario.heal(self.hosts, self.proxy.as_ref())?;
        let healed = Instant::now();
        let next = self.newest()?.map_or(0, |step| step + 1);
        let what = format!("step {next} is not committed {HEALED:?} after the network was whole");
        // It begins within a step's time, and is committed at its end. Ranks that wait less for a
        // step than it takes to find out that a connection is dead may give the next up, with its
        // reason: then it is the first that they do not.
        let patient = self.scenario.step_ms >= PATIENT_MS;
        self.until(HEALED + 2 * PACE, &what, |trial| {
            let last = if patient { next } else { trial.newest()?.unwrap_or(next) };
            Ok((next..=last).any(|step| trial.manifest(step).exists()))
        })?;
        let healed = healed.elapsed();
        let last = self.newest()?.unwrap_or(0) + 2;
        let path = self.yard.last_step();
        std::fs::write(path.with_extension("new"), last.to_string())?;
        std::fs::rename(path.with_extension("new"), path)?;
        for rank in &mut self.ranks {
            let status = rank.wait(PATIENCE)?.context("a rank does not end")?;
            ensure!(status.success(), "the training side was disturbed: {}", rank.log()?);
        }
        let call = self.check(last)?;
        Ok(Tally { healed, call, ..Tally::default() })
    }

    fn start_ranks(&mut self) -> Result<()> {
        let mut options: Vec<OsString> = vec!["--coordinator".into(), self.called.clone().into()];
        options.extend(["--store".into(), self.yard.store.clone().into()]);
        let pace = PACE.as_millis().to_string();
        options.extend(["--pace-ms".into(), pace.into()]);
        options.extend(["--step-ms".into(), self.scenario.step_ms.to_string().into()]);
        options.extend(self.scenario.stream.then(|| "--stream".into()));
        if self.scenario.credentials {
            let folder = self.yard.path().join("made").join("rank");
            options.extend(["--credentials".into(), folder.into()]);
        }
        if let Some(kibibytes) = self.scenario.queue_kib {
            options.extend(["--queue-kib".into(), kibibytes.to_string().into()]);
        }
        for rank in 0..RANKS {
            let host = self.hosts.map(|hosts| &hosts.ranks[rank as usize]);
            let (yard, job, seeded) = (&mut self.yard, &self.job, &self.seeded);
            let process = on(host, || yard.trainee(job, (0, rank), &options, seeded))?;
            self.ranks.push(process);
        }
        Ok(())
    }

    fn until(
        &mut self,
        limit: Duration,
        what: &str,
        mut so: impl FnMut(&mut Trial<'a>) -> Result<bool>,
    ) -> Result<()> {
        let begin = Instant::now();
        while !so(self)? {
            for rank in &mut self.ranks {
                let ended = rank.ended()?;
                ensure!(ended.is_none(), "a rank ended ({ended:?}): {}", rank.log()?);
            }
            ensure!(begin.elapsed() < limit, "{what}");
            std::thread::park_timeout(LOOK);
        }
        Ok(())
    }

    fn manifest(&self, step: u64) -> std::path::PathBuf {
        step_directory(&self.yard.store, 0, step).join("manifest.json")
    }

    fn told(&self) -> Result<Vec<Told>> {
        ledger::read_all(&self.yard.ledgers()?)
    }

    /// The newest step that any rank has begun.
    fn newest(&self) -> Result<Option<u64>> {
        let began = |line: &Told| match line {
            Told::Began { step, .. } => Some(*step),
            _ => None,
        };
        Ok(self.told()?.iter().filter_map(began).max())
    }

    /// Holds the store against the ledgers; the longest call of a recorder.
    fn check(&mut self, last: u64) -> Result<Duration> {
        let ledgers = self.yard.ledgers()?;
        self.oracle.check(&ledgers, true)?;
        let told = self.told()?;
        let mut longest = Duration::ZERO;
        for of in 0..RANKS {
            let worst = told.iter().find_map(|line| match line {
                Told::Trained { rank, worst_us, .. } if *rank == of => Some(*worst_us),
                _ => None,
            });
            let worst = Duration::from_micros(worst.context("a rank did not train to its end")?);
            ensure!(worst <= CALL_CAP, "a call of rank {of} took {worst:?}");
            longest = longest.max(worst);
        }
        for step in 0..=last {
            if !self.manifest(step).exists() {
                self.labelled(step, &told)?;
            }
        }
        Ok(longest)
    }

    /// A step that is not committed: some rank says so, and why; and only where ranks did not
    /// wait for the network.
    fn labelled(&self, step: u64, told: &[Told]) -> Result<()> {
        ensure!(
            self.scenario.step_ms < PATIENT_MS,
            "step {step} is partial, and nobody gave it up"
        );
        ensure!(ledger::labelled(told, step), "step {step} is partial, and no rank says why");
        Ok(())
    }
}

/// Runs on a host, where there are hosts.
fn on<T: Send>(host: Option<&hosts::Host>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    match host {
        Some(host) => host.inside(work),
        None => work(),
    }
}
