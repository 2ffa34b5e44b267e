//! Half a step gets no verdict, and every command says the same of it: a step whose body
//! raised, one that a rank never closed, one whose manifest is lost or altered.

use std::fs;
use std::path::{Path, PathBuf};

use backtape::placement::Reduction;
use backtape_dumper::{Capture, Recorder, Summary};

use crate::support::dump::Shard;
use crate::support::job::{Fault, Job};
use crate::support::program::{Ended, replay};
use crate::support::ranks::settings;

fn job() -> Job {
    Job { ranks: 2, tokens: 12, vocab: 20, valid: 19, width: 4, ..Job::default() }
}

fn capture(shard: Shard) -> Capture {
    let described = shard.described(shard.partial.then_some(Reduction::Sum));
    Capture::new(shard.key(), described, Box::new(shard.bytes))
}

/// How a rank ends its step.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Closed,
    /// As Python's `with` does where the body raised.
    Raised,
    /// The process is gone.
    Dropped,
}

/// Records a job's step, each rank to its end; what the recorders say.
fn record(run: &Path, job: &Job, ends: &[End]) -> Vec<Summary> {
    let world_size = job.ranks as u32;
    let one = |rank: u32| {
        let mut settings = settings(run, rank, world_size);
        settings.step_deadline = std::time::Duration::from_secs(3);
        let mut recorder = Recorder::start(settings).unwrap();
        let tape = recorder.step(0).unwrap();
        tape.head(job.head()).unwrap();
        let shards = job.shards().into_iter().filter(|shard| shard.rank == rank);
        shards.for_each(|shard| tape.record(capture(shard)).unwrap());
        match ends[rank as usize] {
            End::Closed => tape.close().unwrap(),
            End::Raised => {
                tape.omit("*", None, "the step's body ended early with ValueError".into());
                tape.close().unwrap();
            }
            End::Dropped => drop(tape),
        }
        recorder.close().unwrap()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn said(ended: &Ended) -> String {
    let both = format!("{}{}", ended.stdout, ended.stderr);
    both.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Runs every command that opens the step, and asserts that each ends as incomplete with these
/// words, and that none blames the job for it.
#[track_caller]
fn every_command_says(run: &Path, words: &[&str]) {
    let (dump, out) = (run.to_str().unwrap(), tempfile::tempdir().unwrap());
    let npy = out.path().join("q.safetensors");
    let (npy, repro) = (npy.to_str().unwrap(), out.path().join("repro"));
    let repro = repro.to_str().unwrap();
    for command in [
        &["--dump", dump][..],
        &["--dump", dump, "--against", dump],
        &["verify", "--dump", dump],
        &["inspect", "--dump", dump],
        &["checks", "--dump", dump],
        &["precision", "--dump", dump],
        &["show", "q", "--microbatch", "0", "--dump", dump],
        &["export", "q", "--microbatch", "0", "--to", npy, "--dump", dump],
        &["export", "--repro", repro, "--microbatch", "0", "--framework", "torch", "--dump", dump],
    ] {
        let ended = replay(command);
        let said = said(&ended);
        assert_eq!(ended.code, 3, "{command:?}\n{said}");
        for word in words {
            assert!(said.contains(word), "{command:?} does not say {word:?}\n{said}");
        }
        assert!(!said.contains("tape.head") && !said.contains("panicked"), "{command:?}\n{said}");
    }
    // It looks at manifests alone.
    let listed = said(&replay(&["ls", dump]));
    assert!(listed.contains("--step 0 partial") && listed.contains(words[0]), "{listed}");
}

fn recorded(directory: &Path, job: &Job) -> PathBuf {
    let run = directory.join("run-a");
    let summaries = record(&run, job, &[End::Closed; 2]);
    assert!(summaries.iter().all(|summary| summary.steps_committed == [0]), "{summaries:?}");
    run
}

fn manifest(run: &Path) -> PathBuf {
    run.join("step-00000000/manifest.json")
}

#[test]
fn a_step_whose_body_raised_is_partial_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    let summaries = record(&run, &job(), &[End::Closed, End::Raised]);
    assert_eq!(summaries[1].steps_committed, []);
    assert_eq!(summaries[1].steps_partial, [0]);
    every_command_says(&run, &["rank 1", "ended early with ValueError"]);
}

#[test]
fn a_step_that_a_rank_never_closed_is_partial_everywhere_and_names_the_rank() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    record(&run, &job(), &[End::Closed, End::Dropped]);
    every_command_says(&run, &["no manifest", "rank 1 did not close it"]);
}

#[test]
fn a_manifest_that_is_lost_or_altered_is_named_by_its_path_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let run = recorded(dir.path(), &job());
    fs::remove_file(run.join("journal.jsonl")).unwrap();
    let whole = fs::read(manifest(&run)).unwrap();
    let mut altered = whole.clone();
    altered[whole.len() / 2] ^= 1;
    fs::write(manifest(&run), altered).unwrap();
    every_command_says(&run, &["step-00000000/manifest.json is damaged"]);
    fs::write(manifest(&run), &whole[..whole.len() / 2]).unwrap();
    every_command_says(&run, &["step-00000000/manifest.json is damaged"]);
    fs::remove_file(manifest(&run)).unwrap();
    every_command_says(&run, &["it has no manifest"]);
}

/// Goal: what the coordinator's journal tells is judged, and agrees with nothing. Method: the
/// same damage beside the journal, of a clean job and of one whose lse is off.
#[test]
fn the_journal_stands_in_for_a_lost_manifest() {
    for (fault, code, stage) in [(Fault::None, 3, "pass"), (Fault::LseOff(0.5), 1, "FAIL")] {
        let dir = tempfile::tempdir().unwrap();
        let run = recorded(dir.path(), &Job { fault, ..job() });
        let bytes = fs::read(manifest(&run)).unwrap();
        fs::write(manifest(&run), &bytes[..bytes.len() - 9]).unwrap();
        let ended = replay(&["--dump", run.to_str().unwrap()]);
        let said = said(&ended);
        assert_eq!(ended.code, code, "{said}");
        let words = ["manifest.json is damaged", "listed by journal.jsonl", "RECOVERED"];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        let lse = ended.stdout.lines().find(|line| line.trim_start().starts_with("lse "));
        assert!(lse.is_some_and(|line| line.contains(stage)), "{said}");
    }
}
