//! R3: a power cut loses nothing that was acknowledged and leaves no step half-committed.
//!
//! Method: real writers, a real coordinator and real recorders on a file system in an image; the
//! power goes at a random moment; mounted again, the store is loaded by a new coordinator and
//! held against a ledger that lies outside of the image. One image sees many cuts, so that what
//! was committed before the first of them must have survived all.

mod check;
mod disk;
mod ledger;
mod work;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use backtape::coordinator::channel::{Rpc, connect};
use backtape::coordinator::{Config, Coordinator, ServeError};
use backtape::credentials::Access;
use clap::Args;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use self::check::{Check, Scope};
use self::disk::{Cut, Disk, FileSystem, enter_namespace};
use self::ledger::{Ledger, Totals};
use self::work::{Cycle, Place, RANKS};
use crate::random::Random;

/// Exit code when the machine cannot do this at all: no verdict, and not a pass.
pub(crate) const UNAVAILABLE: i32 = 4;
/// Cuts that one image sees.
const CYCLES_PER_IMAGE: u64 = 32;
/// The power goes after so many acknowledgements, drawn uniformly, and a moment more: at none it
/// meets directories and journals that are being made, later on commits. Counted and not timed,
/// so that a busy machine is cut in the midst of as much work as an idle one.
const ACKNOWLEDGED: u64 = 40;
const MOMENT: Duration = Duration::from_millis(4);
/// And after this time in any case.
const LONGEST: Duration = Duration::from_millis(500);
/// One cycle in so many is worked by recorders.
const RECORDERS_IN: u64 = 16;
/// Violations after which nothing more is learnt.
const ENOUGH: usize = 5;

#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Cuts
    #[arg(long, default_value_t = 10_000)]
    pub(crate) trials: u64,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    #[arg(long, value_enum, default_value = "ext4")]
    pub(crate) fs: FileSystem,
    /// What loses its power: the file system, or the disk below it with its write cache
    #[arg(long, value_enum, default_value = "fs")]
    pub(crate) cut: Cut,
    /// Where the image lies: memory, or a disk with room for it
    #[arg(long, default_value = "/dev/shm")]
    pub(crate) images: PathBuf,
}

/// Runs the campaign; a machine that cannot do it ends the process with [`UNAVAILABLE`].
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let Err(why) = available(arguments) {
        eprintln!("powercut: NOT RUN on {}: {why:#}", arguments.fs.name());
        std::process::exit(UNAVAILABLE);
    }
    campaign(arguments).map(|line| println!("{line}"))
}

/// Whether images can be made, mounted and cut here; enters the namespace for it.
pub(crate) fn available(arguments: &Arguments) -> Result<()> {
    enter_namespace()?;
    let directory = tempfile::tempdir_in(&arguments.images)?;
    let mut disk = Disk::make(directory.path(), arguments.fs, arguments.cut)?;
    disk.mount()?;
    disk.cut().with_context(|| match arguments.cut {
        Cut::Fs => format!("{} cannot be cut by itself: use --cut disk", arguments.fs.name()),
        Cut::Disk => "the ext4 below cannot be cut".into(),
    })?;
    disk.unmount()
}

/// The closing line, or what failed.
pub(crate) fn campaign(arguments: &Arguments) -> Result<String> {
    let (begun, mut done, mut totals) = (Instant::now(), 0, Totals::default());
    while done < arguments.trials {
        let directory = tempfile::tempdir_in(&arguments.images)?;
        let cycles = CYCLES_PER_IMAGE.min(arguments.trials - done);
        let image = Image::new(arguments, directory.path(), done)?;
        let (ledger, found) = image.run(cycles)?;
        if let Some((cycle, found)) = found {
            let (seed, named) = (arguments.seed, found.join("\n  "));
            bail!(
                "powercut: seed {seed}, {} with --cut {:?}: after cut {cycle}:\n  {named}",
                arguments.fs.name(),
                arguments.cut
            );
        }
        totals.add(ledger.totals());
        done += cycles;
    }
    let Totals { files, shards, closes, commits } = totals;
    let each = begun.elapsed().as_secs_f64() * 1e3 / done.max(1) as f64;
    Ok(format!(
        "powercut: seed {}, {}, {done} cuts of the {}, {each:.1} ms each; acknowledged {files} files, {shards} shards, {closes} closes, {commits} commits: 0 lost, 0 half-committed",
        arguments.seed,
        arguments.fs.name(),
        match arguments.cut {
            Cut::Fs => "file system",
            Cut::Disk => "disk",
        },
    ))
}

/// One image and everything that was acknowledged on it.
struct Image {
    seed: u64,
    first: u64,
    disk: Disk,
    spool: PathBuf,
    ledger: Mutex<Ledger>,
    places: [Place; RANKS as usize],
    runtime: Runtime,
}

/// A coordinator in this process, as another boot would start it.
struct Served {
    rpc: Rpc,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Served {
    fn start(store: &Path, runtime: &Runtime) -> Result<Served> {
        let coordinator = Coordinator::open(&Config::new(store, RANKS))?;
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let rpc = connect(&listener.local_addr()?.to_string(), &Access::default())?;
            let (stop, stopped) = oneshot::channel();
            let task = tokio::spawn(coordinator.serve(listener, async {
                let _ = stopped.await;
            }));
            Ok(Served { rpc, stop, task })
        })
    }

    fn stop(self, runtime: &Runtime) -> Result<()> {
        drop(self.rpc);
        let _ = self.stop.send(());
        Ok(runtime.block_on(self.task)??)
    }
}

/// After which cut, and what was found then.
type Found = Option<(u64, Vec<String>)>;

impl Image {
    fn new(arguments: &Arguments, directory: &Path, first: u64) -> Result<Image> {
        let spool = directory.join("spool");
        let runtime = tokio::runtime::Builder::new_multi_thread();
        Ok(Image {
            seed: arguments.seed,
            first,
            disk: Disk::make(directory, arguments.fs, arguments.cut)?,
            spool,
            ledger: Mutex::default(),
            places: Default::default(),
            runtime: { runtime }.worker_threads(2).enable_all().build()?,
        })
    }

    /// Cuts so often; checks before each, and everything after the last.
    fn run(mut self, cycles: u64) -> Result<(Ledger, Found)> {
        let last = self.first + cycles;
        for number in self.first..=last {
            let mount = self.disk.mount().with_context(|| format!("after cut {number}"))?;
            let served = Served::start(&mount, &self.runtime);
            let mut served = served.with_context(|| format!("after cut {number}"))?;
            let scope = if number == last { Scope::Everything } else { Scope::Touched };
            let found = self.check(&mount, &mut served.rpc, scope, number)?;
            if !found.is_empty() || number == last {
                served.stop(&self.runtime)?;
                self.disk.unmount()?;
                let ledger = self.ledger.into_inner().unwrap_or_else(PoisonError::into_inner);
                return Ok((ledger, (!found.is_empty()).then_some((number, found))));
            }
            self.cycle(&mount, &served.rpc, number)?;
            served.stop(&self.runtime)?;
            self.disk.unmount()?;
        }
        bail!("an image ends with its last cycle")
    }

    fn check(&self, mount: &Path, rpc: &mut Rpc, scope: Scope, number: u64) -> Result<Vec<String>> {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let mut check =
            Check { mount, seed: self.seed, found: std::mem::take(&mut ledger.refused) };
        let asked: Vec<_> = match scope {
            Scope::Touched => ledger.touched.iter().copied().collect(),
            Scope::Everything => ledger.steps.keys().copied().collect(),
        };
        check.disk(&mut ledger, scope, number)?;
        check.answers(&ledger, &asked, rpc, self.runtime.handle());
        check.found.truncate(ENOUGH);
        Ok(check.found)
    }

    /// Works until the power goes.
    fn cycle(&mut self, mount: &Path, rpc: &Rpc, number: u64) -> Result<()> {
        let mut random = Random::of(self.seed, number);
        if random.below(4) == 0 {
            // The job was restarted too: other processes, another attempt.
            self.places.iter_mut().for_each(|place| place.incarnation = 1 + random.below(u64::MAX));
        }
        let recorders = random.below(RECORDERS_IN) == 0;
        let wanted = random.below(if recorders { 12 } else { ACKNOWLEDGED });
        let moment = Duration::from_nanos(random.below(MOMENT.as_nanos() as u64));
        let (cut, acknowledged) = (AtomicBool::new(false), AtomicU64::new(0));
        let work = Cycle {
            seed: self.seed,
            number,
            mount,
            spool: &self.spool,
            ledger: &self.ledger,
            cut: &cut,
            acknowledged: &acknowledged,
        };
        let (work, handle) = (&work, self.runtime.handle());
        std::thread::scope(|scope| {
            if recorders {
                scope.spawn(|| work.recorders());
            } else {
                scope.spawn(|| work.files());
                for (rank, place) in (0..).zip(&mut self.places) {
                    let rpc = rpc.clone();
                    scope.spawn(move || work.rank(rank, place, rpc, handle));
                }
            }
            let end = Instant::now() + LONGEST;
            while acknowledged.load(Ordering::SeqCst) < wanted && Instant::now() < end {
                std::thread::park_timeout(Duration::from_micros(50));
            }
            std::thread::park_timeout(moment);
            cut.store(true, Ordering::SeqCst);
            self.disk.cut()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Goal: the share of R3 that fits into the tests. Method: 200 cuts of ext4. Where there is
    /// no root it says so past the capture of the test harness: it is no silent pass.
    #[test]
    fn no_power_cut_loses_what_was_acknowledged() {
        let arguments = Arguments {
            trials: 200,
            seed: 3,
            fs: FileSystem::Ext4,
            cut: Cut::Fs,
            images: std::env::temp_dir(),
        };
        match available(&arguments) {
            Ok(()) => println!("{}", campaign(&arguments).unwrap()),
            Err(why) => {
                let said = format!("powercut: NOT RUN on this machine: {why:#}\n");
                std::io::stderr().write_all(said.as_bytes()).unwrap();
            }
        }
    }
}
