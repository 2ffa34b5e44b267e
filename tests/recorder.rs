//! The recorder inside a rank, from capture to committed step, and what it does
//! when the disk, the coordinator or the job misbehaves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use backtape::dtype::Dtype;
use backtape::manifest::Manifest;
use backtape::store::ShardFile;
use backtape_dumper::{Recorder, RecorderError, Settings, TransportChoice};

use crate::support::ranks::{Process, bits, capture, eventually, record_step, run_ranks, settings};

fn manifest(run: &Path) -> Manifest {
    let bytes = std::fs::read(run.join("step-00000000/manifest.json")).expect("committed");
    Manifest::from_bytes(&bytes).unwrap()
}

/// Opens every file with the safetensors crate alone and compares the bits.
fn check_bits(run: &Path, world_size: u32) {
    let manifest = manifest(run);
    assert_eq!(manifest.files.len(), 3 * world_size as usize);
    assert_eq!(manifest.omissions, []);
    assert!(manifest.head.is_some());
    assert!(manifest.files.is_sorted_by_key(|file| (file.rank, file.name.clone())));
    for file in &manifest.files {
        let path = run.join("step-00000000").join(file.name.as_str());
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, file.length);
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in tensors.tensors() {
            assert!(name == "q" || name == "k");
            assert_eq!(view.dtype(), safetensors::Dtype::BF16);
            assert_eq!(view.shape(), [2, 3]);
            assert_eq!(view.data(), bits(file.rank.0));
        }
        assert_eq!(ShardFile::open(&path).unwrap().header_hash(), file.header_hash);
    }
}

fn tree(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        } else {
            found.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    found
}

#[test]
fn four_ranks_of_one_host_commit_a_step_without_any_other_process() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let summaries = run_ranks((0..4).map(|rank| settings(&run, rank, 4)).collect());
    for summary in summaries {
        assert_eq!(summary.faults, Vec::<String>::new());
        assert_eq!(summary.steps_committed, [0]);
        assert_eq!((summary.shards, summary.bytes), (3, 36));
        assert!(!summary.streamed);
    }
    check_bits(&run, 4);
    assert!(!run.join("coordinator.json").exists(), "rank 0 takes it away");
}

#[test]
fn four_ranks_that_share_no_store_with_the_coordinator_send_their_files() {
    let (store, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 4);
    let one = |rank| {
        let mut settings = settings(&elsewhere.path().join("run-a"), rank, 4);
        settings.coordinator = Some(coordinator.address.clone());
        settings.transport = TransportChoice::Stream;
        settings
    };
    for summary in run_ranks((0..4).map(one).collect()) {
        assert_eq!(summary.faults, Vec::<String>::new());
        assert_eq!(summary.steps_committed, [0]);
        assert!(summary.streamed);
    }
    check_bits(&store.path().join("run-a"), 4);
    assert!(!elsewhere.path().join("run-a").exists());
}

#[test]
fn a_rank_that_sees_the_coordinators_store_writes_into_it_and_sends_otherwise() {
    let store = tempfile::tempdir().unwrap();
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 1);
    let mut settings = settings(&store.path().join("run-a"), 0, 1);
    settings.coordinator = Some(coordinator.address.clone());
    let summary = run_ranks(vec![settings]).remove(0);
    assert!(!summary.streamed);
    assert_eq!(summary.steps_committed, [0]);
    check_bits(&store.path().join("run-a"), 1);
}

#[test]
fn a_second_launch_in_the_same_directory_is_attempt_1_and_leaves_attempt_0_alone() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    run_ranks((0..2).map(|rank| settings(&run, rank, 2)).collect());
    let before = tree(&run);
    let second = run_ranks((0..2).map(|rank| settings(&run, rank, 2)).collect());
    assert!(second.iter().all(|summary| summary.attempt == Some(1)), "{second:?}");
    assert!(second.iter().all(|summary| summary.steps_committed == [0]), "{second:?}");
    check_bits(&run.join("attempt-0001"), 2);
    let after = tree(&run);
    assert!(before.iter().all(|(path, bytes)| after.get(path) == Some(bytes)));
}

#[test]
fn a_coordinator_killed_in_the_middle_of_a_step_goes_on_after_its_restart() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let first = Process::start(store.path(), "127.0.0.1:0", 4);
    let address = first.address.clone();
    let mut recorders: Vec<Recorder> = (0..4)
        .map(|rank| {
            let mut settings = settings(&run, rank, 4);
            settings.coordinator = Some(address.clone());
            settings.transport =
                [TransportChoice::Direct, TransportChoice::Stream][rank as usize % 2];
            Recorder::start(settings).unwrap()
        })
        .collect();
    for recorder in &recorders {
        eventually("the rank has joined", || recorder.summary().attempt.is_some());
    }
    for rank in 0..2 {
        record_step(&recorders[rank as usize], rank, 4);
        let recorder = &recorders[rank as usize];
        eventually("its shards are acknowledged", || recorder.summary().shards == 3);
    }
    let acknowledged = std::fs::read(run.join("journal.jsonl")).unwrap();
    first.kill();
    for rank in 2..4 {
        record_step(&recorders[rank as usize], rank, 4);
    }
    let _second = Process::start(store.path(), &address, 4);
    for recorder in &mut recorders {
        let summary = recorder.close().unwrap();
        assert_eq!(summary.faults, Vec::<String>::new());
        assert_eq!(summary.attempt, Some(0));
        assert_eq!(summary.steps_committed, [0]);
    }
    check_bits(&run, 4);
    let journal = std::fs::read(run.join("journal.jsonl")).unwrap();
    assert!(journal.starts_with(&acknowledged), "nothing acknowledged was rewritten");
}

/// Found by `soak kill`: the directory of attempt 0 then has no record of its own.
#[test]
fn a_job_whose_launcher_counts_from_1_is_known_after_a_restart() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let first = Process::start(store.path(), "127.0.0.1:0", 2);
    let address = first.address.clone();
    let recorders = [0, 1].map(|rank| {
        let mut settings = settings(&run, rank, 2);
        (settings.coordinator, settings.attempt) = (Some(address.clone()), Some(1));
        Recorder::start(settings).unwrap()
    });
    record_step(&recorders[0], 0, 2);
    eventually("its shards are acknowledged", || recorders[0].summary().shards == 3);
    first.kill();
    let _second = Process::start(store.path(), &address, 2);
    record_step(&recorders[1], 1, 2);
    for mut recorder in recorders {
        let summary = recorder.close().unwrap();
        assert_eq!(summary.faults, Vec::<String>::new());
        assert_eq!(summary.attempt, Some(1));
        assert_eq!(summary.steps_committed, [0]);
    }
}

#[test]
fn a_rank_that_never_joins_leaves_the_step_partial_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut settings = settings(&run, 0, 2);
    settings.join_deadline = Duration::from_millis(200);
    let summary = run_ranks(vec![settings]).remove(0);
    assert_eq!(summary.steps_committed, Vec::<u64>::new());
    assert_eq!(summary.steps_partial, [0]);
    assert_eq!(summary.shards, 3, "what was recorded is durable all the same");
    assert!(summary.faults[0].contains("rank 1 never joined"), "{:?}", summary.faults);
    assert!(!run.join("step-00000000/manifest.json").exists());
}

#[test]
fn ranks_on_another_host_are_told_to_start_a_coordinator() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut first = settings(&run, 0, 2);
    first.host = Some("node-0".into());
    let _first = Recorder::start(first).unwrap();
    eventually("rank 0 can be found", || run.join("coordinator.json").exists());
    let mut second = settings(&run, 1, 2);
    second.host = Some("node-1".into());
    second.join_deadline = Duration::from_millis(300);
    let summary = Recorder::start(second).unwrap().close().unwrap();
    assert!(summary.faults[0].contains("set BACKTAPE_COORDINATOR"), "{:?}", summary.faults);
    assert!(summary.faults[0].contains("node-0"), "{:?}", summary.faults);
}

#[test]
fn a_wrong_world_size_is_refused_with_both_sizes() {
    let store = tempfile::tempdir().unwrap();
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 4);
    let refused = |rank, world_size| {
        let mut settings = settings(&store.path().join("run-a"), rank, world_size);
        settings.coordinator = Some(coordinator.address.clone());
        Recorder::start(settings).unwrap().close().unwrap().faults.remove(0)
    };
    let fault = refused(5, 8);
    assert!(
        fault.contains(
            "rank 5 joined a run of world size 4: start the coordinator with --world-size"
        ),
        "{fault}"
    );
    let fault = refused(1, 2);
    assert!(fault.contains("world size 4 with world size 2"), "{fault}");
}

#[test]
fn a_store_that_cannot_be_written_is_an_error_in_strict_mode_and_a_fault_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let run = dir.path().join("file/run-a");
    let mut open = Recorder::start(settings(&run, 0, 1)).unwrap();
    let tape = open.step(0).unwrap();
    let _ = tape.record(capture("q", Some(0), 0, 1));
    let _ = tape.close();
    let summary = open.close().unwrap();
    assert!(summary.faults[0].contains("cannot be used as the store"), "{:?}", summary.faults);
    assert_eq!(summary.shards, 0);
    assert_eq!(summary.omissions.len(), 1, "{:?}", summary.omissions);
    let mut strict = settings(&run, 0, 1);
    strict.strict = true;
    let error = Recorder::start(strict).unwrap().close().unwrap_err();
    assert!(matches!(error, RecorderError::Faulty { rank: 0, .. }), "{error}");
}

#[test]
fn what_does_not_fit_the_queue_is_omitted_with_its_reason_in_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut settings = settings(&run, 0, 1);
    settings.queue_bytes = 8192;
    let mut recorder = Recorder::start(settings).unwrap();
    let tape = recorder.step(0).unwrap();
    let mut large = capture("logits", Some(0), 0, 1);
    let place = backtape::index_box::IndexBox(vec![(0, 4096)]);
    large.shard = backtape::shard::Shard::new(Dtype::F32, vec![4096], place);
    large.payload = Box::new(vec![0u8; 4096 * 4]);
    let error = tape.record(large).unwrap_err().to_string();
    assert!(error.contains("queue of 8192 bytes"), "{error}");
    tape.record(capture("q", Some(0), 0, 1)).unwrap();
    tape.close().unwrap();
    let summary = recorder.close().unwrap();
    assert_eq!((summary.shards, summary.omissions.len()), (1, 1));
    let omissions = manifest(&run).omissions;
    assert_eq!(omissions[0].tensor, "logits");
    assert!(omissions[0].reason.contains("raise queue_bytes"), "{omissions:?}");
}

#[test]
fn a_coordinator_that_never_answers_costs_one_call_cap_and_a_bounded_close() {
    // Accepts connections in its backlog and says nothing.
    let hole = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings(&dir.path().join("run-a"), 0, 1);
    settings.coordinator = Some(hole.local_addr().unwrap().to_string());
    settings.queue_bytes = 4096;
    settings.call_cap = Duration::from_millis(100);
    settings.join_deadline = Duration::from_millis(1500);
    let started = Instant::now();
    let mut recorder = Recorder::start(settings).unwrap();
    let tape = recorder.step(0).unwrap();
    let mut omitted = 0;
    for microbatch in 0..50 {
        let call = Instant::now();
        omitted += usize::from(tape.record(capture("q", Some(microbatch), 0, 1)).is_err());
        assert!(call.elapsed() < Duration::from_millis(200), "{:?}", call.elapsed());
    }
    assert_eq!(omitted, 47, "three captures of 1036 bytes fit 4096");
    assert!(started.elapsed() < Duration::from_secs(1), "only the first one waited");
    tape.close().unwrap();
    let summary = recorder.close().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(summary.omissions.len(), 50);
    let gap =
        summary.omissions.iter().filter(|one| one.contains("the rest of the step is left out"));
    assert_eq!(
        gap.count(),
        46,
        "the first that finds no room ends the step: {:?}",
        summary.omissions
    );
    assert!(summary.faults[0].contains("no coordinator was found"), "{:?}", summary.faults);
}

/// Goal: a coordinator that is gone costs the end of the job some seconds, and is said. Method: it
/// is killed once the rank has entered, and everything but the patience has its default.
#[test]
fn a_coordinator_that_was_killed_is_waited_for_no_longer_than_the_patience() {
    let store = tempfile::tempdir().unwrap();
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 2);
    let mut settings = Settings::new(store.path().join("run-a"), 0, 2);
    settings.coordinator = Some(coordinator.address.clone());
    settings.selection.steps = "0-3".parse().unwrap();
    settings.close_patience = Duration::from_secs(2);
    let mut recorder = Recorder::start(settings).unwrap();
    record_step(&recorder, 0, 2);
    eventually("the first step is acknowledged", || recorder.summary().shards == 3);
    coordinator.kill();
    for step in 1..4 {
        let tape = recorder.step(step).unwrap();
        tape.record(capture("q", None, 0, 2)).unwrap();
        tape.close().unwrap();
    }
    let begin = Instant::now();
    let summary = recorder.close().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
    assert_eq!(summary.steps_partial, [0, 1, 2, 3]);
    let said = summary.faults.join("\n");
    for step in 0..4 {
        assert!(said.contains(&format!("step {step} of rank 0 stays partial")), "{said}");
    }
    assert!(said.contains("close waits 2 s after the last progress"), "{said}");
    assert!(said.contains("refused"), "{said}");
}

struct Panics(std::sync::atomic::AtomicBool);

impl AsRef<[u8]> for Panics {
    fn as_ref(&self) -> &[u8] {
        assert!(!self.0.swap(true, std::sync::atomic::Ordering::Relaxed), "read twice");
        &[0; 12]
    }
}

#[test]
fn a_payload_that_panics_in_the_background_costs_its_own_shard_only() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut recorder = Recorder::start(settings(&run, 0, 1)).unwrap();
    let tape = recorder.step(0).unwrap();
    let mut bad = capture("dq", Some(0), 0, 1);
    bad.payload = Box::new(Panics(false.into()));
    tape.record(bad).unwrap();
    tape.record(capture("q", Some(0), 0, 1)).unwrap();
    tape.close().unwrap();
    let summary = recorder.close().unwrap();
    assert_eq!(summary.shards, 1);
    assert_eq!(summary.steps_committed, [0]);
    assert!(manifest(&run).omissions[0].reason.contains("panicked"));
}

#[test]
fn the_same_shard_twice_is_one_and_other_values_are_a_named_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut recorder = Recorder::start(settings(&run, 0, 1)).unwrap();
    let tape = recorder.step(0).unwrap();
    let mut other = capture("q", Some(0), 0, 1);
    other.payload = Box::new(vec![7u8; 12]);
    for q in [capture("q", Some(0), 0, 1), capture("q", Some(0), 0, 1), other] {
        tape.record(q).unwrap();
    }
    tape.close().unwrap();
    recorder.close().unwrap();
    let manifest = manifest(&run);
    assert_eq!(manifest.shards().count(), 1);
    assert!(manifest.omissions[0].reason.contains("the first is kept"));
}

#[test]
fn a_dropped_tape_leaves_its_step_partial() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut settings = settings(&run, 0, 1);
    settings.step_deadline = Duration::from_millis(500);
    let mut recorder = Recorder::start(settings).unwrap();
    recorder.step(0).unwrap().record(capture("q", Some(0), 0, 1)).unwrap();
    let summary = recorder.close().unwrap();
    assert_eq!(summary.steps_partial, [0]);
    assert!(summary.faults[0].contains("dropped"), "{:?}", summary.faults);
    assert!(!recorder.wants(0));
    assert!(matches!(recorder.step(0), Err(RecorderError::Closed { .. })));
}
