//! Scalars from the recorder to the store, beside it and over the wire, and what
//! `replay trajectory` prints and returns of them.

use std::collections::BTreeMap;
use std::path::Path;

use backtape::identity::{Attempt, Name, Rank};
use backtape::scalars::files::LIMIT_BYTES;
use backtape::scalars::line::SCHEMA;
use backtape::scalars::{Header, Line, Row, ScalarFiles, json_lines};
use backtape_dumper::{Recorder, Settings, StepSelection, TransportChoice};
use backtape_replayer::report::text::WIDTH;

use crate::support::program;
use crate::support::ranks::{Process, eventually, settings};

fn row(step: u64, rank: u32) -> Row {
    let loss = 5.0 - step as f64 / 100.0 + f64::from(rank);
    let values = vec![
        ("loss".into(), loss),
        ("grad_norm".into(), 1.0 / (1.0 + step as f64)),
        ("grad_norm/layers.0".into(), f64::NEG_INFINITY),
    ];
    Row { step, time: 1.0, values }
}

fn scalars_alone(directory: &Path, rank: u32, world_size: u32) -> Settings {
    let mut settings = settings(directory, rank, world_size);
    settings.selection.steps = StepSelection::none();
    settings
}

fn rows_of(attempt: &Path, rank: u32) -> Vec<Row> {
    let text = std::fs::read_to_string(json_lines(attempt, Rank(rank))).unwrap();
    let row = |line: &str| match Line::parse(line).unwrap() {
        Line::Row(row) => Some(row),
        _ => None,
    };
    text.lines().filter_map(row).collect()
}

#[test]
fn ranks_that_share_no_store_send_their_scalars_and_each_row_arrives_once() {
    let (store, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 2);
    // Ranks of one launch are alive together: that is how they are known to be of one.
    let start = |rank| {
        let mut settings = scalars_alone(&elsewhere.path().join("run-a"), rank, 2);
        settings.coordinator = Some(coordinator.address.clone());
        settings.transport = TransportChoice::Stream;
        Recorder::start(settings).unwrap()
    };
    let both = [start(0), start(1)];
    eventually("both entered", || both.iter().all(|one| one.summary().attempt.is_some()));
    for (rank, mut recorder) in (0..).zip(both) {
        (0..100).for_each(|step| recorder.scalars(row(step, rank)).unwrap());
        let summary = recorder.close().unwrap();
        assert_eq!((summary.scalar_rows, summary.faults), (100, Vec::new()));
        let sent: Vec<Row> = (0..100).map(|step| row(step, rank)).collect();
        assert_eq!(rows_of(&store.path().join("run-a"), rank), sent);
    }
    assert!(!elsewhere.path().join("run-a").exists());
}

#[test]
fn a_coordinator_that_restarts_has_every_row_once() {
    let store = tempfile::tempdir().unwrap();
    let first = Process::start(store.path(), "127.0.0.1:0", 1);
    let address = first.address.clone();
    let mut settings = scalars_alone(&store.path().join("run-a"), 0, 1);
    settings.coordinator = Some(address.clone());
    settings.transport = TransportChoice::Stream;
    let mut recorder = Recorder::start(settings).unwrap();
    recorder.scalars(row(0, 0)).unwrap();
    eventually("the first row is there", || recorder.summary().scalar_rows == 1);
    first.kill();
    (1..50).for_each(|step| recorder.scalars(row(step, 0)).unwrap());
    let _second = Process::start(store.path(), &address, 1);
    let summary = recorder.close().unwrap();
    assert_eq!((summary.scalar_rows, summary.faults), (50, Vec::new()));
    let rows = rows_of(&store.path().join("run-a"), 0);
    assert_eq!(rows, (0..50).map(|step| row(step, 0)).collect::<Vec<_>>());
}

#[test]
fn rows_that_cannot_reach_the_store_are_kept_and_it_is_said_where() {
    let store = tempfile::tempdir().unwrap();
    let coordinator = Process::start(store.path(), "127.0.0.1:0", 1);
    let mut settings = scalars_alone(&store.path().join("run-a"), 0, 1);
    settings.coordinator = Some(coordinator.address.clone());
    settings.transport = TransportChoice::Stream;
    settings.join_deadline = std::time::Duration::from_millis(300);
    let mut recorder = Recorder::start(settings).unwrap();
    recorder.scalars(row(0, 0)).unwrap();
    eventually("the first row is there", || recorder.summary().scalar_rows == 1);
    coordinator.kill();
    recorder.scalars(row(1, 0)).unwrap();
    let summary = recorder.close().unwrap();
    let said = summary.faults.iter().find(|fault| fault.contains("they lie in")).unwrap();
    let path = said.split("they lie in ").nth(1).unwrap().split(" on ").next().unwrap();
    let kept = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    assert!(kept.starts_with("{\"step\":1,"), "{kept}");
}

/// A run of two ranks with what `values` gives for each step and rank.
fn write(run: &Path, values: impl Fn(u64, u32) -> BTreeMap<&'static str, f64>) {
    std::fs::create_dir_all(run).unwrap();
    std::fs::write(run.join("run.json"), "{}").unwrap();
    for rank in 0..2 {
        let header = Header {
            schema: SCHEMA.into(),
            run: Name::new("run-a").unwrap(),
            attempt: Attempt(0),
            rank: Rank(rank),
            world_size: 2,
            host: Name::new("host-a").unwrap(),
            incarnation: 1,
        };
        let mut files = ScalarFiles::open(run, header, LIMIT_BYTES).unwrap();
        let one = |step| {
            let values = values(step, rank).into_iter();
            Row { step, time: 1.0, values: values.map(|(name, x)| (name.into(), x)).collect() }
        };
        let rows: Vec<Row> = (0..100).map(one).collect();
        assert!(files.append(&rows).unwrap().is_none());
    }
}

fn healthy(step: u64, rank: u32) -> BTreeMap<&'static str, f64> {
    // The golden ratio's multiples: noise enough, and no draw to repeat.
    let noise = |k: u64| ((step + k) as f64 * 0.618_033_988_749).fract() - 0.5;
    BTreeMap::from([
        ("loss", 5.0 - step as f64 / 50.0 + 0.01 * noise(u64::from(rank) * 17)),
        ("grad_norm", 1.0 + 0.3 * noise(3)),
        ("learning_rate", 1e-3),
    ])
}

fn trajectory(run: &Path, more: &[&str]) -> program::Ended {
    let mut arguments = vec!["trajectory", "--dump", run.to_str().unwrap()];
    arguments.extend(more);
    let ended = program::replay(&arguments);
    let wide: Vec<&str> = ended.stdout.lines().filter(|l| l.chars().count() > WIDTH).collect();
    assert!(more.contains(&"-") || wide.is_empty(), "{wide:#?}");
    ended
}

#[test]
fn the_exit_code_says_whether_a_flag_is_raised_and_whether_all_was_read() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    write(&run, healthy);
    let clear = trajectory(&run, &[]);
    assert_eq!(clear.code, 0, "{}{}", clear.stdout, clear.stderr);
    assert!(clear.stdout.contains("CLEAR"), "{}", clear.stdout);
    for what in ["Adam's second moment", "the vocabulary is not known"] {
        assert!(clear.stdout.contains(what), "{}", clear.stdout);
    }

    let path = json_lines(&run, Rank(1));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("{\"step\":40,", "{\"stop\":40,")).unwrap();
    let damaged = trajectory(&run, &[]);
    assert_eq!(damaged.code, 3, "{}", damaged.stdout);
    assert!(damaged.stdout.contains("rank-00001.jsonl, line 42"), "{}", damaged.stdout);

    write(&dir.path().join("run-b"), |step, rank| {
        let mut values = healthy(step, rank);
        if step >= 60 && rank == 1 {
            values.insert("loss", f64::NAN);
        }
        values
    });
    let flagged = trajectory(&dir.path().join("run-b"), &["--json", "-"]);
    assert_eq!(flagged.code, 1, "{}", flagged.stdout);
    let report: serde_json::Value = serde_json::from_str(&flagged.stdout).unwrap();
    assert_eq!(report["schema"], "backtape.trajectory/1");
    assert_eq!(report["findings"][0]["step"], 60);
    assert_eq!(report["findings"][0]["ranks"], serde_json::json!([1]));
}

#[test]
fn a_run_without_scalars_and_one_of_two_attempts_are_errors_that_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run-a");
    std::fs::create_dir_all(&run).unwrap();
    std::fs::write(run.join("run.json"), "{}").unwrap();
    let none = trajectory(&run, &[]);
    assert_eq!(none.code, 2);
    assert!(none.stderr.contains("BACKTAPE_SCALARS=1"), "{}", none.stderr);
    write(&run, healthy);
    write(&run.join("attempt-0001"), healthy);
    let two = trajectory(&run, &[]);
    assert_eq!(two.code, 2);
    assert!(two.stderr.contains("0, 1 with --attempt"), "{}", two.stderr);
    assert_eq!(trajectory(&run, &["--attempt", "1"]).code, 0);
    let header = std::fs::read_to_string(json_lines(&run, Rank(0))).unwrap();
    std::fs::write(json_lines(&run, Rank(0)), header.replace("scalars/1", "scalars/2")).unwrap();
    let newer = trajectory(&run, &["--attempt", "0"]);
    assert_eq!(newer.code, 2);
    assert!(newer.stderr.contains("backtape.scalars/2"), "{}", newer.stderr);
}
