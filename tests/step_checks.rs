//! The checks that are part of every replay: what they find is the verdict's, with its cause.

use std::path::Path;

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape_replayer::cli::exit;
use backtape_replayer::dump::Selection;
use backtape_replayer::postmortem::replay_report;
use backtape_replayer::replay::against::Asked;
use backtape_replayer::report::text;
use serde_json::Value;

use crate::support::dump::{self, Shard};
use crate::support::job::Job;
use crate::support::program;

/// What a replay makes of a job's dump: exit code, text and JSON.
fn replayed(path: &Path) -> (i32, String, Value) {
    let report = replay_report(path, &Selection::default(), Asked::default(), None).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    (exit::of(report.verdict), text::render(&report), json)
}

/// The default job with something changed in its shards.
fn changed(change: impl Fn(&mut Vec<Shard>)) -> (i32, String, Value) {
    let job = Job::default();
    let mut shards = job.shards();
    change(&mut shards);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    dump::write_with(&path, job.ranks as u32, Some(&job.head()), &shards);
    replayed(&path)
}

fn shard<'a>(shards: &'a mut [Shard], name: &str, rank: u32, mb: Option<u32>) -> &'a mut Shard {
    let of = |s: &&mut Shard| s.name == name && s.rank == rank && s.microbatch == mb;
    shards.iter_mut().find(of).unwrap()
}

/// Ids that a rank read, 6 rows of 40.
fn tokens(rank: u32, mb: u32, seed: u32) -> Shard {
    let mut state = u64::from(seed) * 77 + 5;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as i32 % 500
    };
    let from = u64::from(rank) * 6;
    Shard {
        rank,
        name: "tokens",
        microbatch: Some(mb),
        when: None,
        partial: false,
        dtype: Dtype::I32,
        shape: vec![18, 40],
        place: IndexBox(vec![(from, from + 6), (0, 40)]),
        bytes: (0..240).flat_map(|_| next().to_le_bytes()).collect(),
    }
}

#[test]
fn a_rank_that_trained_on_another_ranks_batch_diverges_with_its_cause() {
    let with = |same: bool| {
        changed(|shards| {
            for (mb, rank) in (0..2).flat_map(|mb| (0..3).map(move |rank| (mb, rank))) {
                let twice = same && (mb, rank) == (1, 2);
                shards.push(tokens(rank, mb, 3 * mb + if twice { 0 } else { rank }));
            }
        })
    };
    let (code, shown, json) = with(false);
    assert_eq!((code, json["verdict"].as_str()), (0, Some("agreed")), "{shown}");
    assert!(shown.contains("pass: batches"), "{shown}");
    let (code, shown, json) = with(true);
    assert_eq!((code, json["verdict"].as_str()), (1, Some("diverged")), "{shown}");
    assert_eq!(json["causes"][0]["id"], "duplicate-batch", "{shown}");
    assert_eq!(json["first_divergence"]["rank"], 2);
    assert_eq!(json["reasons"][0]["verdict"], "diverged");
    assert!(shown.contains("DIVERGED at tokens (mb 1 rank 2)"), "{shown}");
}

#[test]
fn what_a_check_sees_is_the_cause_and_not_unknown() {
    let stale = changed(|shards| {
        let before = shard(shards, "dk", 2, Some(0)).bytes.clone();
        shard(shards, "dk", 2, Some(1)).bytes[..960].copy_from_slice(&before[..960]);
    });
    let unwritten = changed(|shards| {
        let dq = shard(shards, "dq", 1, Some(0));
        dq.bytes[96..240].fill(0xcd);
    });
    for (code, shown, json) in [stale, unwritten] {
        let causes: Vec<&str> = json["causes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|of| of["id"].as_str().unwrap())
            .collect();
        assert_eq!((code, &causes[..]), (1, &["uninitialised-output"][..]), "{shown}");
    }
    let (code, shown, json) = changed(|shards| {
        let labels = shard(shards, "labels", 1, Some(0));
        labels.bytes[20..24].copy_from_slice(&270i32.to_le_bytes());
    });
    let first = &json["first_divergence"]["stage"];
    assert_eq!((code, first.as_str()), (1, Some("labels")), "{shown}");
    let named = |of: &Value| of["id"] == "int-target-out-of-range";
    assert!(json["causes"].as_array().unwrap().iter().any(named), "{shown}");
    assert!(!shown.contains("cause     unknown"), "{shown}");
}

#[test]
fn replicas_that_disagree_though_their_bytes_are_proved_diverge() {
    let (code, shown, json) = changed(|shards| {
        shard(shards, "k", 2, Some(0)).bytes[1001] ^= 0x40;
    });
    assert_eq!((code, json["first_divergence"]["stage"].as_str()), (1, Some("k")), "{shown}");
    assert_eq!(json["first_divergence"]["rank"], 2, "{shown}");
    let flat = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("rank 2 differs from ranks 0 and 1"), "{shown}");
    assert!(flat.contains("place and coverage proved, copies differ"), "{shown}");
}

#[test]
fn a_dump_whose_copies_differ_is_what_the_job_held_unless_something_is_damaged_too() {
    let job = Job::default();
    let mut shards = job.shards();
    shard(&mut shards, "k", 2, Some(0)).bytes[1001] ^= 0x40;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run-a");
    dump::write_with(&path, job.ranks as u32, Some(&job.head()), &shards);
    let verified = || program::replay(&["verify", "--dump", path.to_str().unwrap()]);
    let whole = verified();
    assert_eq!(whole.code, 1, "{}", whole.stdout);
    assert!(
        whole.stdout.contains("PROVED: the dump is what the job held. But ranks"),
        "{}",
        whole.stdout
    );
    let step = std::fs::read_dir(path.join("step-00000000")).unwrap();
    let mut files: Vec<_> = step.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    let file = files.first().unwrap();
    let mut bytes = std::fs::read(file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(file, bytes).unwrap();
    let damaged = verified();
    assert_eq!(damaged.code, 3, "{}", damaged.stdout);
    assert!(damaged.stdout.contains("NOT PROVED: see what was found."), "{}", damaged.stdout);
}
