//! Selection, plans, triggers and the ring: several recorders on loopback, with
//! a coordinator of their own or inside rank 0.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use backtape::coordinator::Rules;
use backtape::identity::Rank;
use backtape::manifest::Manifest;
use backtape_dumper::{Recorder, Settings, Summary};

use crate::support::ranks::{Process, capture, eventually, settings};

fn manifest_of(run: &Path, step: u64) -> Option<Manifest> {
    let bytes = std::fs::read(run.join(format!("step-{step:08}/manifest.json"))).ok()?;
    Some(Manifest::from_bytes(&bytes).unwrap())
}

fn manifest(run: &Path, step: u64) -> Manifest {
    manifest_of(run, step).unwrap_or_else(|| panic!("step {step} is not committed"))
}

fn committed(run: &Path) -> Vec<u64> {
    (0..5000).filter(|&step| manifest_of(run, step).is_some()).collect()
}

/// A job of several ranks in lockstep, as collectives keep them: every rank
/// records `q` and `k` where it may, until it is told to stop.
struct Job {
    stop: Arc<AtomicBool>,
    ranks: Vec<std::thread::JoinHandle<Summary>>,
    step: Arc<Mutex<u64>>,
}

/// What a rank says of a step to the watch: `(loss, grad_norm)`.
type Numbers = fn(rank: u32, step: u64) -> (f64, f64);

fn quiet(_: u32, _: u64) -> (f64, f64) {
    (2.0, 1.0)
}

/// How long a step takes: a job that steps faster than ranks can hear is none.
const STEP: Duration = Duration::from_millis(10);

impl Job {
    fn start(all: Vec<Settings>, last: u64, numbers: Numbers) -> Job {
        let (stop, step) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(0)));
        let barrier = Arc::new(Barrier::new(all.len()));
        let one = |settings: Settings| {
            let (stop, step, barrier) = (stop.clone(), step.clone(), barrier.clone());
            std::thread::spawn(move || {
                let (rank, world) = (settings.rank, settings.world_size);
                let mut recorder = Recorder::start(settings).unwrap();
                eventually("the rank has joined", || recorder.summary().attempt.is_some());
                for now in 0..last {
                    // Decided by one rank for all, or the others would wait for it.
                    if rank == 0 {
                        *step.lock().unwrap() = now;
                    }
                    barrier.wait();
                    train(&recorder, now, rank, world);
                    let (loss, norm) = numbers(rank, now);
                    recorder.watch(now, Some(loss), Some(norm));
                    std::thread::park_timeout(STEP);
                    let stopped = stop.load(Ordering::SeqCst);
                    if barrier_agrees(&barrier, &step, rank, stopped) {
                        break;
                    }
                }
                recorder.close().unwrap()
            })
        };
        let ranks = all.into_iter().map(one).collect();
        Job { stop, ranks, step }
    }

    fn step(&self) -> u64 {
        *self.step.lock().unwrap() & !STOPPED
    }

    fn end(self) -> Vec<Summary> {
        self.stop.store(true, Ordering::SeqCst);
        self.join()
    }

    fn join(self) -> Vec<Summary> {
        self.ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }
}

/// Bit of the shared step that says that rank 0 saw the stop.
const STOPPED: u64 = 1 << 63;

/// Every rank leaves after the same step, as rank 0 decides.
fn barrier_agrees(barrier: &Barrier, step: &Mutex<u64>, rank: u32, stopped: bool) -> bool {
    if rank == 0 && stopped {
        *step.lock().unwrap() |= STOPPED;
    }
    barrier.wait();
    let agreed = *step.lock().unwrap() & STOPPED != 0;
    barrier.wait();
    agreed
}

fn train(recorder: &Recorder, step: u64, rank: u32, world: u32) {
    if !recorder.wants(step) {
        return;
    }
    let tape = recorder.step(step).unwrap();
    tape.head(Default::default()).unwrap();
    for (tensor, microbatch) in [("q", Some(0)), ("q", Some(1)), ("k", None), ("other", None)] {
        tape.record(capture(tensor, microbatch, rank, world)).unwrap();
    }
    tape.close().unwrap();
}

/// Settings of ranks that wait to be asked.
fn waiting(run: &Path, world: u32, coordinator: Option<&Process>) -> Vec<Settings> {
    let one = |rank| {
        let mut settings = settings(run, rank, world);
        settings.coordinator = coordinator.map(|process| process.address.clone());
        settings.selection.steps = "none".parse().unwrap();
        settings.watch = true;
        settings.heartbeat = Duration::from_millis(40);
        settings
    };
    (0..world).map(one).collect()
}

fn ask(address: &str, words: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coordinator"));
    command.args(&words[..1]).args(["--coordinator", address, "--run", "run-a"]).args(&words[1..]);
    let output = command.env_remove("RUST_LOG").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    if output.status.success() { Ok(said) } else { Err(said) }
}

fn tensors(manifest: &Manifest) -> Vec<String> {
    let mut names: Vec<String> =
        manifest.shards().map(|(_, shard)| shard.key.tensor.to_string()).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn a_plan_that_is_set_while_ranks_step_records_the_same_steps_on_all_of_them() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 3);
    let job = Job::start(waiting(&run, 3, Some(&coordinator)), 5000, quiet);
    eventually("the job runs", || job.step() > 5);
    let said = ask(&coordinator.address, &["plan", "--steps", "next:2", "--tensors", "q,!k"]);
    assert!(said.as_ref().unwrap().contains("plan 1 of run run-a holds from step"), "{said:?}");
    eventually("two steps are committed", || committed(&run).len() == 2);
    let said =
        ask(&coordinator.address, &["plan", "--steps", "next", "--ranks", "1", "--tensors", "all"]);
    assert!(said.unwrap().contains("ranks 1"));
    eventually("a third step is committed", || committed(&run).len() == 3);
    let summaries = job.end();
    let steps = committed(&run);
    assert_eq!(steps[1], steps[0] + 1);
    for summary in &summaries {
        assert_eq!(summary.steps_committed, steps);
        assert_eq!((&summary.faults, &summary.omissions), (&vec![], &vec![]));
    }
    let first = manifest(&run, steps[0]);
    assert_eq!(tensors(&first), ["q"]);
    assert_eq!(first.files.len(), 6, "two microbatches of three ranks");
    assert_eq!(first.selections.len(), 1);
    assert_eq!(first.selections[0].ranks.to_string(), "0-2");
    let why = first.unselected("k", None).unwrap();
    assert_eq!(why, "not recorded: selection (tensors q,!k)");
    assert!(first.omissions.is_empty() && first.unselected("q", None).is_none());
    let third = manifest(&run, steps[2]);
    assert!(third.files.iter().all(|file| file.rank == Rank(1)) && third.files.len() == 3);
}

#[test]
fn a_trigger_by_hand_records_one_common_step_with_its_reason_and_a_cluster_of_them_is_bounded() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 2);
    let job = Job::start(waiting(&run, 2, Some(&coordinator)), 5000, quiet);
    eventually("the job runs", || job.step() > 5);
    for count in 1..=3 {
        let said = ask(&coordinator.address, &["trigger", "--reason", "loss looks odd"]).unwrap();
        assert!(said.contains(&format!("trigger {count} of run run-a")), "{said}");
        eventually("the step is committed", || committed(&run).len() == count);
    }
    let refused = ask(&coordinator.address, &["trigger"]).unwrap_err();
    assert!(refused.contains("had 3 triggered recordings, the most"), "{refused}");
    let past = ask(&coordinator.address, &["trigger", "--step", "1"]).unwrap_err();
    assert!(past.contains("the most"), "{past}");
    let summaries = job.end();
    let steps = committed(&run);
    assert!(summaries.iter().all(|summary| summary.steps_committed == steps), "{summaries:?}");
    let trigger = manifest(&run, steps[0]).trigger.unwrap();
    assert_eq!(
        (trigger.reason.as_str(), trigger.rank, trigger.ring),
        ("loss looks odd", None, false)
    );
}

fn wrong_on_rank_2(rank: u32, step: u64) -> (f64, f64) {
    (if rank == 2 && step >= 30 { f64::NAN } else { 2.0 }, 1.0)
}

#[test]
fn a_loss_that_is_nan_on_one_rank_puts_the_step_that_went_wrong_on_disk_for_all() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut all = waiting(&run, 4, None);
    for settings in &mut all {
        settings.ring_steps = 64;
    }
    let job = Job::start(all, 5000, wrong_on_rank_2);
    eventually("the step that went wrong is committed", || manifest_of(&run, 30).is_some());
    let after = || {
        let steps = committed(&run);
        let next = steps
            .iter()
            .copied()
            .filter(|&step| manifest(&run, step).trigger.is_some_and(|trigger| !trigger.ring));
        next.collect::<Vec<u64>>()
    };
    eventually("a later step is committed", || after().len() == 1);
    let summaries = job.end();
    let wrong = manifest(&run, 30);
    let trigger = wrong.trigger.clone().unwrap();
    assert_eq!((trigger.rank, trigger.seen.0, trigger.ring), (Some(Rank(2)), 30, true));
    assert_eq!(trigger.reason, "the loss is NaN");
    assert_eq!(wrong.files.len(), 12, "three files of four ranks");
    assert_eq!(tensors(&wrong), ["k", "q"], "`other` plays no part in the loss head");
    assert_eq!(wrong.omissions, []);
    assert!(wrong.head.is_some());
    // Loss stays NaN: the cool-down lets no second trigger through.
    assert_eq!(after().len(), 1);
    let steps = committed(&run);
    assert!(steps.contains(&29) && after()[0] > 30, "{steps:?}");
    for summary in &summaries {
        assert_eq!(summary.faults, Vec::<String>::new());
        assert_eq!(summary.steps_committed, steps, "every rank recorded the same steps");
        assert!(
            summary.orders[0].contains("trigger 1 by rank 2 at step 30"),
            "{:?}",
            summary.orders
        );
    }
}

fn wrong_at_the_end(rank: u32, step: u64) -> (f64, f64) {
    (if rank == 1 && step == 19 { f64::INFINITY } else { 2.0 }, 1.0)
}

#[test]
fn the_last_step_of_a_job_that_ends_because_of_it_is_on_disk_too() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut all = waiting(&run, 3, None);
    for settings in &mut all {
        settings.ring_steps = 4;
    }
    let summaries = Job::start(all, 20, wrong_at_the_end).join();
    assert!(
        summaries.iter().all(|summary| summary.steps_committed == [16, 17, 18, 19]),
        "{summaries:?}"
    );
    assert_eq!(manifest(&run, 19).trigger.unwrap().reason, "the loss is inf");
    assert!(!run.join("coordinator.json").exists());
}

#[test]
fn a_ring_stays_within_its_bytes_and_says_which_steps_it_could_not_keep() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut all = waiting(&run, 1, None);
    all[0].ring_steps = 100;
    // A step holds three captures of 12 bytes, each charged 1024 more.
    all[0].ring_bytes = 5 * 3 * 1036;
    let numbers = |_, step| (if step == 19 { f64::NAN } else { 1.0 }, 1.0);
    let summary = Job::start(all, 20, numbers).join().remove(0);
    assert_eq!(committed(&run), [15, 16, 17, 18, 19]);
    assert_eq!(summary.ring_dropped, 15);
    let said = summary.orders.iter().find(|said| said.contains("fell out")).unwrap();
    assert!(said.starts_with("15 steps, 0 to 14,"), "{said}");
}

#[test]
fn a_rank_that_heard_too_late_says_so_and_the_step_has_its_manifest_all_the_same() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 2);
    let mut all = waiting(&run, 2, Some(&coordinator));
    // Rank 1 asks once at the beginning and then hardly ever.
    all[1].heartbeat = Duration::from_secs(3600);
    let mut recorders: Vec<Recorder> =
        all.into_iter().map(|settings| Recorder::start(settings).unwrap()).collect();
    let step = |recorders: &[Recorder], step| {
        for (rank, recorder) in (0..).zip(recorders) {
            train(recorder, step, rank, 2);
        }
    };
    for recorder in &recorders {
        eventually("the rank has joined", || recorder.summary().attempt.is_some());
    }
    step(&recorders, 0);
    let mut answer = None;
    eventually("the coordinator knows where rank 0 is", || {
        answer = ask(&coordinator.address, &["trigger", "--step", "1000"]).ok();
        answer.is_some()
    });
    eventually("rank 0 has heard", || !recorders[0].summary().orders.is_empty());
    for now in [999, 1000, 1001] {
        step(&recorders, now);
    }
    let late = recorders.remove(1);
    let closing = std::thread::spawn(move || {
        let mut late = late;
        late.close().unwrap()
    });
    let first = recorders[0].close().unwrap();
    let late = closing.join().unwrap();
    // As every command calls it: rank 1 recorded nothing of it.
    assert_eq!(first.steps_partial, [1000]);
    assert_eq!(late.steps_partial, [1000]);
    let manifest = manifest(&run, 1000);
    assert!(manifest.files.iter().all(|file| file.rank == Rank(0)));
    let omission = &manifest.omissions[0];
    assert_eq!(omission.rank, Rank(1));
    assert_eq!(omission.reason, "trigger 1 was heard at step 1001, after step 1000");
}

#[test]
fn a_plan_and_a_trigger_survive_the_coordinator_and_what_the_rings_write_is_one_choice() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let first = Process::start(store.path(), "127.0.0.1:0", 2);
    let address = first.address.clone();
    let mut all = waiting(&run, 2, Some(&first));
    for settings in &mut all {
        settings.ring_steps = 512;
    }
    let job = Job::start(all, 5000, quiet);
    eventually("the job runs", || job.step() > 20);
    ask(&address, &["trigger", "--reason", "before the kill"]).unwrap();
    first.kill();
    let _second = Process::start(store.path(), &address, 2);
    eventually("its step is committed", || {
        let triggers = committed(&run).into_iter().filter_map(|step| manifest(&run, step).trigger);
        let kinds: Vec<bool> = triggers.map(|trigger| trigger.ring).collect();
        kinds.contains(&true) && kinds.contains(&false)
    });
    let summaries = job.end();
    let steps = committed(&run);
    for summary in summaries {
        assert_eq!(summary.steps_committed, steps);
    }
}

#[test]
fn tensors_beyond_a_size_limit_are_left_out_whole_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut settings = settings(&run, 0, 1);
    // q is [2, 3] of bf16: 12 bytes for each of its microbatches.
    settings.selection.max_step_bytes = Some("24".parse().unwrap());
    settings.strict = true;
    let mut recorder = Recorder::start(settings).unwrap();
    train(&recorder, 0, 0, 1);
    let summary = recorder.close().unwrap();
    assert_eq!(summary.steps_committed, [0]);
    let manifest = manifest(&run, 0);
    assert_eq!(tensors(&manifest), ["q"]);
    let named: Vec<&str> = manifest.omissions.iter().map(|o| o.tensor.as_str()).collect();
    assert_eq!(named, ["k", "other"]);
    assert!(manifest.omissions[0].reason.contains("more than max_step_bytes, 24B"));
    assert_eq!(manifest.unselected("k", None), None, "it was asked for");
}

#[test]
fn hostile_heartbeats_and_plans_are_refused_and_change_nothing() {
    let store = tempfile::tempdir().unwrap();
    let run = store.path().join("run-a");
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 1);
    let job = Job::start(waiting(&run, 1, Some(&coordinator)), 5000, quiet);
    eventually("the job runs", || job.step() > 2);
    let long = "q,".repeat(20_000);
    for (words, why) in [
        (&["plan", "--steps", "x"][..], "the steps \"x\" cannot be read"),
        (&["plan"], "it changes nothing"),
        (&["plan", "--tensors", &long], "longer than"),
        (&["plan", "--max-step-bytes", "many"], "512MiB"),
        (&["trigger", "--reason", &long], "more than 500 bytes"),
    ] {
        let said = ask(&coordinator.address, words).unwrap_err();
        assert!(said.contains(why) && said.len() < 1000, "{said}");
        assert_eq!(said.trim_end().lines().count(), 1, "one clear sentence: {said}");
    }
    let nobody = ask("127.0.0.1:1", &["trigger"]).unwrap_err();
    assert!(nobody.contains("no coordinator answers at 127.0.0.1:1"), "{nobody}");
    let summaries = job.end();
    assert_eq!(summaries[0].orders, Vec::<String>::new());
    assert_eq!(committed(&run), Vec::<u64>::new());
}

#[test]
fn ranks_that_diverge_again_after_the_cool_down_trigger_again_up_to_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let mut all = waiting(&run, 2, None);
    for settings in &mut all {
        settings.rules = Rules { max_triggers: 2, trigger_cooldown: Duration::ZERO };
    }
    // Wrong at every other step, so that it is well again in between.
    let numbers = |_, step| (if step % 2 == 1 { f64::NAN } else { 1.0 }, 1.0);
    let job = Job::start(all, 5000, numbers);
    eventually("two steps are committed", || committed(&run).len() == 2);
    let from = job.step();
    eventually("the job goes on", || job.step() > from + 30);
    let summaries = job.end();
    assert_eq!(committed(&run).len(), 2, "{summaries:?}");
    let orders = &summaries[0].orders;
    let refused: Vec<_> = orders.iter().filter(|said| said.contains("triggered nothing")).collect();
    assert!(refused.iter().any(|said| said.contains("the most")), "{orders:?}");
    assert!(refused.len() <= 3, "each reason once: {orders:?}");
}
