//! The processes of a trial: coordinators and ranks, started, asked, and killed with SIGKILL.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use backtape::coordinator::channel::{Rpc, connect};
use backtape::credentials::Access;
use backtape_proto as proto;

use crate::job::{Job, RUN};

/// Longest wait for a process that does what it should.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at one.
const LOOK: Duration = Duration::from_micros(500);
/// The variable of the test-only faults (src/faults.rs).
const FAULTS: &str = "BACKTAPE_FAULTS";

static COORDINATOR: OnceLock<PathBuf> = OnceLock::new();

/// The product's own main, built with the same features as this program, beside which it lies.
pub(crate) fn coordinator_beside() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("coordinator-under-test");
    ensure!(path.is_file(), "{} is absent: cargo build -p backtape-soak", path.display());
    Ok(path)
}

/// Chooses the program of the coordinator; by default the one beside.
pub(crate) fn choose_coordinator(given: Option<PathBuf>) -> anyhow::Result<()> {
    let path = match given {
        Some(path) => path,
        None => coordinator_beside()?,
    };
    ensure!(path.is_file(), "{} is absent", path.display());
    let _ = COORDINATOR.set(path);
    Ok(())
}

/// Where a trial lies: its store, its processes' logs and ledgers. Removed with it.
pub(crate) struct Yard {
    directory: tempfile::TempDir,
    /// Where the coordinator keeps the dump.
    pub(crate) store: PathBuf,
    /// Where its coordinator listens.
    pub(crate) address: String,
    /// What a coordinator of this yard is told beside that, and what its callers show.
    pub(crate) coordinator_options: Vec<OsString>,
    pub(crate) access: Access,
    /// What is in the environment of every process of this yard.
    pub(crate) environment: Vec<(&'static str, String)>,
    /// Longest that a coordinator took until it answered.
    pub(crate) slowest: Duration,
    /// Put before every command, to watch it or to fail its calls.
    pub(crate) tracer: Vec<OsString>,
    runtime: tokio::runtime::Runtime,
    processes: u64,
}

impl Yard {
    /// A yard below `scratch`. A kill does not reach the page cache, so memory will do.
    pub(crate) fn new(scratch: &Path) -> anyhow::Result<Yard> {
        let directory = tempfile::Builder::new().prefix("backtape-soak-").tempdir_in(scratch)?;
        let address = own_address();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Yard {
            store: directory.path().join("store"),
            directory,
            address,
            coordinator_options: Vec::new(),
            access: Access::default(),
            environment: Vec::new(),
            slowest: Duration::ZERO,
            tracer: Vec::new(),
            runtime,
            processes: 0,
        })
    }

    /// Leaves the yard where it is, to be looked at.
    pub(crate) fn keep(&mut self) -> &Path {
        self.directory.disable_cleanup(true);
        self.directory.path()
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Copies the store below another directory, and uses it there.
    pub(crate) fn move_store(&mut self, directory: &Path) -> anyhow::Result<()> {
        let status = Command::new("cp").arg("-r").arg(&self.store).arg(directory).status()?;
        ensure!(status.success(), "cp failed ({status})");
        self.store = directory.join("store");
        Ok(())
    }

    /// Every ledger that the ranks of this yard wrote.
    pub(crate) fn ledgers(&self) -> anyhow::Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(self.path())?;
        let paths = entries.map(|entry| entry.map(|entry| entry.path()));
        let all: Vec<PathBuf> = paths.collect::<Result<_, _>>()?;
        Ok(all.into_iter().filter(|path| path.extension().is_some_and(|e| e == "ledger")).collect())
    }

    fn command(&mut self, program: &Path, faults: &str) -> anyhow::Result<(Command, PathBuf)> {
        self.processes += 1;
        let log = self.path().join(format!("process-{}.log", self.processes));
        let mut command = match self.tracer.split_first() {
            None => Command::new(program),
            Some((tracer, arguments)) => {
                let mut command = Command::new(tracer);
                command.args(arguments).arg(program);
                command
            }
        };
        // A rank's spool goes with the trial, whenever the rank is killed.
        command.env("TMPDIR", self.path()).env_remove("RUST_LOG").env(FAULTS, faults);
        command.envs(self.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        Ok((command, log))
    }

    /// Starts a coordinator; it may not come up when faults were chosen for it.
    pub(crate) fn spawn_coordinator(
        &mut self,
        world: u32,
        faults: &str,
    ) -> anyhow::Result<Process> {
        let program = COORDINATOR.get().context("no coordinator was chosen")?;
        let (mut command, log) = self.command(program, faults)?;
        command.args(["--listen", &self.address, "--world-size", &world.to_string(), "--store"]);
        command.arg(&self.store).args(&self.coordinator_options);
        Process::spawn(command, log)
    }

    /// Starts a coordinator and waits until it answers; how long that took.
    pub(crate) fn coordinator(&mut self, world: u32) -> anyhow::Result<(Process, Duration)> {
        let begin = Instant::now();
        let mut process = self.spawn_coordinator(world, "")?;
        self.until_it_answers(&mut process)?;
        let took = begin.elapsed();
        self.slowest = self.slowest.max(took);
        Ok((process, took))
    }

    /// Waits until a coordinator that was started answers.
    pub(crate) fn until_it_answers(&self, process: &mut Process) -> anyhow::Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if self.answers() {
                return Ok(());
            }
            if let Some(status) = process.ended()? {
                bail!("the coordinator did not start ({status}): {}", process.log()?);
            }
            std::thread::park_timeout(LOOK);
        }
        bail!("the coordinator did not answer within {PATIENCE:?}: {}", process.log()?)
    }

    /// Starts ranks `first..last` of a launch.
    pub(crate) fn ranks(
        &mut self,
        job: &Job,
        (first, last): (u32, u32),
        launch: u32,
        options: &[&str],
        faults: &str,
    ) -> anyhow::Result<Process> {
        let (mut command, log) = self.command(&std::env::current_exe()?, faults)?;
        let ledger = self.path().join(format!("{first}-{launch}.ledger"));
        command.arg("rank").args(job.arguments()).args(options);
        command.args(["--first", &first.to_string(), "--last", &last.to_string()]);
        command.args(["--launch", &launch.to_string(), "--coordinator", &self.address]);
        command.arg("--store").arg(&self.store).arg("--ledger").arg(ledger);
        Process::spawn(command, log)
    }

    /// Starts a rank that trains at a pace.
    pub(crate) fn trainee(
        &mut self,
        job: &Job,
        (launch, rank): (u32, u32),
        options: &[OsString],
        faults: &str,
    ) -> anyhow::Result<Process> {
        let (mut command, log) = self.command(&std::env::current_exe()?, faults)?;
        let ledger = self.path().join(format!("{rank}-{launch}.ledger"));
        command.arg("trainee").args(job.arguments()).args(["--rank", &rank.to_string()]);
        command.args(["--launch", &launch.to_string()]).args(options);
        command.arg("--last").arg(self.last_step()).arg("--ledger").arg(ledger);
        Process::spawn(command, log)
    }

    /// Where the trainees of this yard look for the number of their last step.
    pub(crate) fn last_step(&self) -> PathBuf {
        self.path().join("last-step")
    }

    /// A connection to the coordinator of this yard.
    pub(crate) fn rpc(&self) -> anyhow::Result<Rpc> {
        // A lazy connection is tied to the runtime that is entered when it is made.
        let _entered = self.runtime.enter();
        Ok(connect(&self.address, &self.access)?)
    }

    /// Runs one call to its end.
    pub(crate) fn block_on<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(call)
    }

    /// Whether a coordinator answers, be it that it takes nothing more.
    pub(crate) fn answers(&self) -> bool {
        match self.status(0, 0) {
            Ok(_) => true,
            Err(error) => error.to_string().contains("takes nothing more"),
        }
    }

    /// What the coordinator says of a step: committed, and its shards. A run that it does not
    /// know is an answer too: (false, 0).
    pub(crate) fn status(&self, attempt: u32, step: u64) -> anyhow::Result<(bool, u64)> {
        let mut rpc = self.rpc()?;
        let request =
            proto::StepStatusRequest { run: RUN.into(), attempt, step, ..Default::default() };
        let call = async { tokio::time::timeout(PATIENCE, rpc.step_status(request)).await };
        let answer = self.block_on(call);
        match answer.context("no answer in time")? {
            Ok(status) => Ok((status.get_ref().committed, status.get_ref().shards)),
            Err(status) if status.message().contains("is not known here") => Ok((false, 0)),
            Err(status) => bail!("{status}"),
        }
    }
}

/// A child process. Dropped, it is killed.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    fn spawn(mut command: Command, log: PathBuf) -> anyhow::Result<Process> {
        let child = command.spawn().with_context(|| format!("{command:?} cannot be started"))?;
        Ok(Process { child, log, ended: None })
    }

    /// SIGKILL, unless it has ended.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.ended = Some(self.child.wait()?);
        Ok(())
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Waits for its end; `None` when it did not come in time.
    pub(crate) fn wait(&mut self, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
        let begin = Instant::now();
        while begin.elapsed() < limit {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            std::thread::park_timeout(LOOK);
        }
        Ok(None)
    }

    /// How long its main thread waited for a processor that others had.
    pub(crate) fn waited(&self) -> anyhow::Result<Duration> {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.child.id()))?;
        let nanoseconds = text.split(' ').nth(1).context("no schedstat")?.trim().parse()?;
        Ok(Duration::from_nanos(nanoseconds))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it said.
    pub(crate) fn log(&self) -> anyhow::Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned())
    }
}

/// Waits this long: a thread that parks may wake up at any time, so it looks at the clock.
pub(crate) fn pause(duration: Duration) {
    let end = Instant::now() + duration;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    {
        std::thread::park_timeout(left);
    }
}

/// Whether a process ended by SIGKILL.
pub(crate) fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(9)
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A loopback address that no other yard has, of this process or another: coordinators come
/// back to it, and a port that was merely free a moment ago may be somebody else's by then.
fn own_address() -> String {
    static YARDS: AtomicU32 = AtomicU32::new(0);
    let yard = YARDS.fetch_add(1, Ordering::SeqCst);
    let [_, a, b, c] = std::process::id().to_be_bytes();
    // 127.0 is where everybody else is.
    format!("127.{}.{b}.{c}:{}", a.wrapping_add(1), 10_000 + yard % 20_000)
}

/// Where trials lie that need no disk: memory, where there is some.
pub(crate) fn memory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}
