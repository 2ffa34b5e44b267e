//! What several tests need: coordinator processes, recorders, captures, waiting.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use backtape::dtype::Dtype;
use backtape::identity::{Microbatch, Name};
use backtape::index_box::IndexBox;
use backtape::shard::{Shard, TensorKey};
use backtape_dumper::{Capture, Recorder, Settings, Summary};

/// Longest wait for a condition; reached only when the test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until the condition holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// A `coordinator` process of its own.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: String,
    log: Arc<Mutex<String>>,
}

pub(crate) fn coordinator_command(store: &Path, listen: &str, world_size: u32) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coordinator"));
    command.args(["--listen", listen, "--world-size", &world_size.to_string(), "--store"]);
    command.arg(store).env_remove("RUST_LOG").stderr(Stdio::piped());
    command
}

impl Process {
    pub(crate) fn start(store: &Path, listen: &str, world_size: u32) -> Process {
        Process::from(coordinator_command(store, listen, world_size))
    }

    pub(crate) fn from(mut command: Command) -> Process {
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, sink) = (BufReader::new(child.stderr.take().unwrap()).lines(), log.clone());
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *sink.lock().unwrap() += &(line + "\n");
            }
        });
        let mut address = None;
        eventually("the coordinator listens", || {
            let log = log.lock().unwrap();
            let found = log.split("listening on ").nth(1);
            address = found.and_then(|rest| rest.split(',').next()).map(str::to_string);
            address.is_some()
        });
        let address = address.unwrap();
        Process { child, address, log }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// SIGKILL: no destructor runs, no buffer is flushed.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Settings with deadlines that a failing test reaches soon.
pub(crate) fn settings(directory: &Path, rank: u32, world_size: u32) -> Settings {
    let mut settings = Settings::new(directory, rank, world_size);
    settings.join_deadline = Duration::from_secs(10);
    settings.step_deadline = Duration::from_secs(20);
    settings
}

/// The bits of one rank's rows of a `[ranks * 2, 3]` bf16 tensor.
pub(crate) fn bits(rank: u32) -> Vec<u8> {
    let value = |i: u32| half::bf16::from_f32(rank as f32 * 100.0 - i as f32 / 3.0);
    (0..6).flat_map(|i| value(i).to_bits().to_le_bytes()).collect()
}

pub(crate) fn capture(
    tensor: &str,
    microbatch: Option<u32>,
    rank: u32,
    world_size: u32,
) -> Capture {
    let rows = u64::from(rank) * 2;
    let place = IndexBox(vec![(rows, rows + 2), (0, 3)]);
    let key = TensorKey {
        tensor: Name::new(tensor).unwrap(),
        microbatch: microbatch.map(Microbatch),
        when: None,
    };
    let shard = Shard {
        role: key.role(None).unwrap(),
        ..Shard::new(Dtype::Bf16, vec![u64::from(world_size) * 2, 3], place)
    };
    Capture::new(key, shard, Box::new(bits(rank)))
}

/// Records `q` of two microbatches and `k` of none in step 0.
pub(crate) fn record_step(recorder: &Recorder, rank: u32, world_size: u32) {
    let tape = recorder.step(0).unwrap();
    tape.head(Default::default()).unwrap();
    for (tensor, microbatch) in [("q", Some(0)), ("q", Some(1)), ("k", None)] {
        tape.record(capture(tensor, microbatch, rank, world_size)).unwrap();
    }
    tape.close().unwrap();
}

/// One recorder for each rank, each on a thread of its own, as processes would.
pub(crate) fn run_ranks(all: Vec<Settings>) -> Vec<Summary> {
    let one = |settings: Settings| {
        let (rank, world_size) = (settings.rank, settings.world_size);
        let mut recorder = Recorder::start(settings).unwrap();
        record_step(&recorder, rank, world_size);
        recorder.close().unwrap()
    };
    let threads: Vec<_> =
        all.into_iter().map(|settings| std::thread::spawn(move || one(settings))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}
