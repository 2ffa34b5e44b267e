//! `replay --engine`: tasks through bytes give the report of one process, byte for byte.
//!
//! The workers here are real (they open the dump and read their shards) and share this process:
//! what a cluster adds, processes that die and machines that vanish, is tested where there is one,
//! in `python/tests_ray`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use backtape::role::Role;
use backtape::store::Backend;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem;
use backtape_replayer::replay::tasks::perform::{Dumps, perform};
use backtape_replayer::replay::tasks::{Cut, Handle, Workers};

use crate::support::job::{Fault, Job};
use crate::support::{dump, program};

/// What happens to a dump.
type Before = fn(&Path);

/// Workers that compute a task when it is started.
#[derive(Default)]
struct Here {
    dumps: Dumps,
    sums: Mutex<BTreeMap<u64, Vec<u8>>>,
    next: AtomicUsize,
    names: AtomicU64,
    /// Called before the first task, with the dump.
    before: Option<Before>,
    dump: PathBuf,
}

impl Workers for Here {
    fn start(
        &self,
        task: Vec<u8>,
        from: Vec<Option<Handle>>,
        gives: usize,
    ) -> Result<Vec<Handle>, String> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(before) = self.before.filter(|_| number == 0) {
            before(&self.dump);
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

/// Every role that a dump holds.
const ALL: &[Role] = &[];

/// The report of a run, as JSON.
fn local(path: &Path) -> String {
    let report = postmortem::replay_report(path, &Selection::default(), ALL, None).unwrap();
    serde_json::to_string(&report).unwrap()
}

/// The same by tasks, and how many there were.
fn by_tasks(path: &Path, cut: Cut) -> (String, usize) {
    let workers = Here::default();
    let (selection, all) = (Selection::default(), ALL);
    let report = postmortem::report_on_cluster(path, &selection, all, (&workers, cut)).unwrap();
    (serde_json::to_string(&report).unwrap(), workers.next.into_inner())
}

/// Several blocks and parts of the vocabulary, of one tile each.
const SMALL: Cut = Cut { tokens: Some(1), classes: Some(1) };

/// Several tiles at the tiles' own sizes.
fn large(job: Job) -> Job {
    Job { tokens: 300, vocab: 4500, valid: 4491, ..job }
}

fn dumped(directory: &Path, name: &str, job: &Job) -> PathBuf {
    let path = directory.join(name);
    dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
    path
}

/// Goal: several blocks, several parts of the vocabulary, several ranks and microbatches, random
/// options: the report of tasks is that of one process, byte for byte, however they are cut.
#[test]
fn the_report_of_tasks_is_byte_for_byte_that_of_one_process() {
    let directory = tempfile::tempdir().unwrap();
    let jobs = [
        large(Job { seed: 3, ..Job::default() }),
        large(Job { seed: 4, fused: false, microbatches: 1, ..Job::default() }),
    ];
    let random = (0..10).map(Job::random);
    for (number, job) in jobs.into_iter().chain(random).enumerate() {
        let path = dumped(directory.path(), &format!("run-{number}"), &job);
        let local = local(&path);
        let (report, tasks) = by_tasks(&path, SMALL);
        assert_eq!(report, local, "{job:?}");
        assert!(tasks > if number < 2 { 40 } else { 0 }, "{tasks} tasks of {job:?}");
        if number == 0 {
            assert_eq!(by_tasks(&path, Cut::default()).0, local);
        }
    }
}

/// Goal: a fault is found by tasks as by one process.
#[test]
fn wrong_gradients_get_the_same_verdict_and_cause_by_tasks() {
    let directory = tempfile::tempdir().unwrap();
    for (fault, word) in [
        (Fault::LabelScatterBf16, "label-scatter-low-precision"),
        (Fault::RankScaled(1.01), "\"diverged\""),
    ] {
        let job = Job { fault, tokens: 400, ..Job::default() };
        let path = dumped(directory.path(), &format!("run-{}", word.len()), &job);
        let local = local(&path);
        assert!(local.contains(word), "{local}");
        assert_eq!(by_tasks(&path, SMALL).0, local, "{fault:?}");
    }
}

/// Goal: a shard that changes under the workers, and a dump that they do not see, end the replay
/// with one sentence that says which, and no report.
#[test]
fn a_shard_that_a_worker_cannot_prove_ends_the_replay() {
    let directory = tempfile::tempdir().unwrap();
    let job = Job::default();
    let torn = |path: &Path| {
        for file in std::fs::read_dir(path.join("step-00000000")).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|of| of == "safetensors") {
                // Another file at the name: what the driver has mapped stays what it was.
                let mut bytes = std::fs::read(&path).unwrap();
                let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                bytes[header..].iter_mut().for_each(|byte| *byte ^= 1);
                std::fs::remove_file(&path).unwrap();
                std::fs::write(&path, bytes).unwrap();
            }
        }
    };
    let gone = |path: &Path| std::fs::remove_dir_all(path).unwrap();
    let cases: [(Before, &str); 2] =
        [(torn, "do not hash to what the job hashed"), (gone, "same path")];
    for (number, (before, words)) in cases.into_iter().enumerate() {
        let path = dumped(directory.path(), &format!("run-{number}"), &job);
        let workers = Here { before: Some(before), dump: path.clone(), ..Here::default() };
        let (selection, all) = (Selection::default(), ALL);
        let ended = postmortem::report_on_cluster(&path, &selection, all, (&workers, SMALL));
        let said = format!("{:#}", anyhow::Error::new(ended.unwrap_err()));
        assert!(said.contains(words) && said.lines().count() == 1, "{said}");
    }
}

/// Goal: of a bucket a worker fetches the files that its tasks read and no others, and the report
/// is the same.
#[test]
fn of_a_bucket_workers_fetch_what_their_tasks_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = dumped(directory.path(), "run-a", &Job { ranks: 3, ..Job::default() });
    let bucket = Path::new("memory://tasks/run-a");
    copy(&path, bucket);
    let report = local(&path).replace(path.to_str().unwrap(), bucket.to_str().unwrap());
    assert_eq!(by_tasks(bucket, SMALL).0, report);
}

fn copy(from: &Path, to: &Path) {
    let backend = Backend::of(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(backend.create(&target, &std::fs::read(entry.path()).unwrap()).unwrap()),
        }
    }
}

/// Goal: what cannot be is said before anything is read, in one sentence.
#[test]
fn options_of_tasks_are_refused_where_there_are_none() {
    for (options, words) in [
        (&["--engine", "local", "--address", "127.0.0.1:1"][..], "--address is for a replay on"),
        (&["--engine", "local", "--task-tokens", "5"], "--task-tokens is for a replay on"),
        (&["--address", "127.0.0.1:1"], "--engine"),
        (&["--engine", "ray", "--tokens", "5"], "cannot be used with"),
        (&["--engine", "ray", "--against", "x"], "cannot be used with"),
        (&["--engine", "ray", "--task-cpus", "0"], "0 is not in 1.."),
        (&["--engine", "spark"], "local, ray"),
        (&["--engine", "ray"], "pip install 'backtape[ray]'"),
    ] {
        let given: Vec<&str> = ["--dump", "x"].iter().chain(options).copied().collect();
        let ended = program::replay(&given);
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{options:?}");
        assert!(ended.stderr.contains(words), "{options:?}: {}", ended.stderr);
    }
}
