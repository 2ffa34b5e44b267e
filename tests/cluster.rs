//! `replay --engine`: tasks through bytes give the report of one process, byte for byte.
//!
//! The workers here are real (they open the dump and read their shards) and share this process:
//! what a cluster adds, processes that die and machines that vanish, is tested where there is one,
//! in `python/tests_ray`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use backtape_replayer::cli::{self, AskedCluster};
use backtape_replayer::replay::tasks::{Dumps, Handle, Workers, perform};

use crate::support::dump;
use crate::support::job::{Fault, Job};

/// Workers that compute a task when it is started.
#[derive(Default)]
struct Here {
    dumps: Dumps,
    sums: Mutex<BTreeMap<u64, Vec<u8>>>,
    next: AtomicUsize,
    names: AtomicU64,
    /// Called before each task with its number.
    before: Option<fn(usize, &Path)>,
    dump: PathBuf,
}

/// Tasks that all workers of the process have computed.
static TASKS: AtomicUsize = AtomicUsize::new(0);

impl Workers for Here {
    fn start(
        &self,
        task: Vec<u8>,
        from: Vec<Option<Handle>>,
        gives: usize,
    ) -> Result<Vec<Handle>, String> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        TASKS.fetch_add(1, Ordering::Relaxed);
        if let Some(before) = self.before {
            before(number, &self.dump);
        }
        let mut held = self.sums.lock().unwrap();
        let from =
            from.into_iter().map(|of| of.map_or(Vec::new(), |of| held.remove(&of.0).unwrap()));
        let from: Vec<Vec<u8>> = from.collect();
        let from: Vec<&[u8]> = from.iter().map(Vec::as_slice).collect();
        let found = perform(&self.dumps, &task, &from).map_err(|error| error.to_string())?;
        assert_eq!(found.len(), gives);
        let keep = |sums: Vec<u8>| {
            let name = self.names.fetch_add(1, Ordering::Relaxed);
            held.insert(name, sums);
            Handle(name)
        };
        Ok(found.into_iter().map(keep).collect())
    }

    fn fetch(&self, sums: Handle) -> Result<Vec<u8>, String> {
        Ok(self.sums.lock().unwrap().remove(&sums.0).expect("each is fetched once"))
    }
}

/// The exit code and the JSON of a replay.
fn run(path: &Path, options: &[&str], before: Option<fn(usize, &Path)>) -> (i32, String) {
    let json = path.with_extension("json");
    let _ = std::fs::remove_file(&json);
    let mut arguments = vec!["replay", "--quiet", "--dump", path.to_str().unwrap(), "--json"];
    arguments.push(json.to_str().unwrap());
    arguments.extend(options);
    let connect = |_: &AskedCluster| {
        Ok(Box::new(Here { before, dump: path.into(), ..Here::default() }) as Box<dyn Workers>)
    };
    let code = cli::main_with(arguments.into_iter().map(Into::into), Some(&connect));
    (code, std::fs::read_to_string(json).unwrap_or_default())
}

/// Several blocks and parts of the vocabulary at the tiles' own sizes.
fn large(job: Job) -> Job {
    Job { tokens: 300, vocab: 4500, valid: 4491, ..job }
}

/// Goal: several blocks, several slabs, several ranks and microbatches, every option that a
/// head may declare: the report of tasks is that of one process, byte for byte.
#[test]
fn the_report_of_tasks_is_byte_for_byte_that_of_one_process() {
    let directory = tempfile::tempdir().unwrap();
    let jobs = [
        large(Job { seed: 3, ..Job::default() }),
        large(Job { seed: 4, fused: false, microbatches: 1, ..Job::default() }),
        large(Job { seed: 5, fault: Fault::LabelScatterBf16, ..Job::default() }),
        large(Job { seed: 6, fault: Fault::RankScaled(1.01), ..Job::default() }),
    ];
    let drawn = (0..12).map(Job::random);
    for (number, job) in jobs.into_iter().chain(drawn).enumerate() {
        let path = directory.path().join(format!("run-{number}"));
        dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
        let local = run(&path, &[], None);
        let before = TASKS.load(Ordering::Relaxed);
        let cuts = ["--engine", "ray", "--task-tokens", "256", "--task-classes", "2048"];
        assert_eq!(run(&path, &cuts, None), local, "{job:?}");
        assert!(TASKS.load(Ordering::Relaxed) > before, "{job:?}");
        if number == 0 {
            assert_eq!(run(&path, &["--engine", "ray", "--threads", "3"], None), local);
        }
        assert!(!local.1.is_empty(), "{job:?}");
    }
}

/// Goal: a shard that vanishes or changes under the workers ends the replay with a sentence that
/// names it, and no report.
#[test]
fn a_shard_that_a_worker_cannot_prove_ends_the_replay() {
    let directory = tempfile::tempdir().unwrap();
    let job = large(Job { ranks: 2, ..Job::default() });
    let path = directory.path().join("run-a");
    dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
    let gone = |number: usize, path: &Path| {
        if number == 0 {
            std::fs::remove_dir_all(path).unwrap();
        }
    };
    assert_eq!(run(&path, &["--engine", "ray"], Some(gone)), (2, String::new()));
}

/// Goal: what cannot be is said before anything is read.
#[test]
fn options_of_tasks_are_refused_where_there_are_none() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none");
    for options in [
        &["--engine", "local", "--address", "127.0.0.1:1"][..],
        &["--address", "127.0.0.1:1"],
        &["--engine", "ray", "--tokens", "5"],
        &["--engine", "ray", "--against", "x"],
        &["--engine", "ray", "--task-cpus", "0"],
        &["--engine", "spark"],
    ] {
        assert_eq!(run(&path, options, None).0, 2, "{options:?}");
    }
    let program = crate::support::program::replay(&["--dump", "x", "--engine", "ray"]);
    assert_eq!((program.code, program.stderr.lines().count()), (2, 1), "{}", program.stderr);
    assert!(program.stderr.contains("pip install 'backtape[ray]'"), "{}", program.stderr);
}
