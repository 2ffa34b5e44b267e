//! Looking at a dump from a terminal: what lies there, a part of a tensor, a file for another tool.

use std::path::{Path, PathBuf};

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape::shard::When;
use backtape_dumper::Recorder;
use backtape_replayer::{assemble, dump};

use crate::support::dump as writing;
use crate::support::dump::Shard;
use crate::support::job::Job;
use crate::support::program::{Ended, replay};
use crate::support::ranks::{capture, settings};

/// `w` [4, 6] in f32 by columns over two ranks, `x` [4, 2] in bf16 of two microbatches, `dk` as two
/// addends: element (i, j) of `w` is 10 i + j.
fn shards() -> Vec<Shard> {
    let shard = |rank, name, dtype, shape: &[u64], place: IndexBox, bytes| Shard {
        rank,
        name,
        microbatch: None,
        when: None,
        partial: false,
        dtype,
        shape: shape.to_vec(),
        place,
        bytes,
    };
    let mut shards = Vec::new();
    for rank in 0..2u32 {
        let columns = (u64::from(rank) * 3, u64::from(rank) * 3 + 3);
        let values =
            (0..4u64).flat_map(|i| (columns.0..columns.1).map(move |j| (10 * i + j) as f32));
        let bytes = values.flat_map(f32::to_le_bytes).collect();
        shards.push(shard(rank, "w", Dtype::F32, &[4, 6], IndexBox(vec![(0, 4), columns]), bytes));
        let addend = Shard {
            partial: true,
            when: Some(When::PreReduce),
            ..shard(rank, "dk", Dtype::I32, &[2], IndexBox::whole(&[2]), vec![rank as u8 + 1; 8])
        };
        shards.push(addend);
    }
    for microbatch in 0..2u32 {
        let bytes =
            [0x3f80u16, 0x3dcd, 0xc000, 0x7fc0, 0, 0x8000, 0x4049, 0x0001 + microbatch as u16];
        let bytes = bytes.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let whole = IndexBox::whole(&[4, 2]);
        let x = shard(0, "x", Dtype::Bf16, &[4, 2], whole, bytes);
        shards.push(Shard { microbatch: Some(microbatch), ..x });
    }
    shards
}

fn dumped(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    writing::write_with(&path, 2, None, &shards());
    path
}

fn run(arguments: &[&str], dump: &Path) -> Ended {
    let mut all = arguments.to_vec();
    let dump = dump.display().to_string();
    all.extend(["--dump", &dump]);
    replay(&all)
}

fn said(ended: &Ended) -> String {
    format!("{}{}", ended.stdout, ended.stderr)
}

#[test]
fn ls_names_every_run_attempt_and_step_of_a_store_with_its_state() {
    let dir = tempfile::tempdir().unwrap();
    let (_, b) = (dumped(dir.path(), "run-a"), dumped(dir.path(), "run-b"));
    std::fs::remove_file(b.join("step-00000000/manifest.json")).unwrap();
    let place = dir.path().display().to_string();
    let listed = replay(&["ls", &place]);
    let (a, b) = listed.stdout.split_once("run-b  2 ranks").unwrap();
    assert!(a.contains("run-a  2 ranks") && a.contains("committed"), "{}", listed.stdout);
    assert!(b.contains("--step 0") && b.contains("partial") && b.contains("4 files"), "{b}");
    let json = replay(&["ls", &place, "--run", "run-a", "--json", "-"]);
    let found: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!((&found[0]["steps"][0]["step"], &found[0]["world_size"]), (&0.into(), &2.into()));
    let none = replay(&["ls", &dir.path().join("nowhere").display().to_string()]);
    assert!(none.code == 2 && none.stderr.contains("nothing is there"), "{none:?}");
}

/// One launch of a job of one rank that records q in step 0, or ends before it comes to that.
fn launch(run: &Path, ends: bool) {
    let mut recorder = Recorder::start(settings(run, 0, 1)).unwrap();
    let tape = recorder.step(0).unwrap();
    match ends {
        true => tape.omit("*", None, "its body raised".into()),
        false => tape.record(capture("q", Some(0), 0, 1)).unwrap(),
    }
    tape.close().unwrap();
    recorder.close().unwrap();
}

/// Goal: a launch that came to nothing stands in nobody's way, and every place that names a run
/// takes an attempt and a step of it. Method: launches of real recorders, the first of which ends
/// before it has recorded anything, and the real commands.
#[test]
fn a_launch_without_shards_is_passed_over_and_a_run_is_named_with_attempt_and_step() {
    let dir = tempfile::tempdir().unwrap();
    let (run, other) = (dir.path().join("run-a"), dir.path().join("run-b"));
    for (path, ends) in [(&run, true), (&run, false), (&other, false)] {
        launch(path, ends);
    }
    let named = |ending: &str| format!("{}{ending}", run.display());
    let passed = "attempt 0 was passed over: it holds no shard of step 0";
    for words in [&["verify"][..], &["inspect"], &["checks"], &["show", "q", "--microbatch", "0"]] {
        let ended = replay(&[words, &["--dump", &named("")]].concat());
        let told = ended.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(ended.code == 0 && told.contains(passed), "{words:?}: {}", said(&ended));
    }
    let two = replay(&["--dump", &other.display().to_string(), "--against", &named("")]);
    assert!(two.code == 0 && two.stdout.contains("AGREED"), "{}", said(&two));
    // From now on two attempts hold the step, and it is said which is meant.
    launch(&run, false);
    let ended = replay(&["verify", "--dump", &named("")]);
    assert!(ended.code == 2 && said(&ended).contains("1"), "{}", said(&ended));
    for ending in ["@1", "@2:0"] {
        for words in [&["verify"][..], &["inspect"], &["checks"], &["show", "q"]] {
            let ended = replay(&[words, &["--dump", &named(ending)]].concat());
            assert_eq!(ended.code, 0, "{words:?} {ending}: {}", said(&ended));
        }
        let file = dir.path().join("q.safetensors").display().to_string();
        let ended = replay(&["export", "q", "--to", &file, "--dump", &named(ending)]);
        assert_eq!(ended.code, 0, "{}", said(&ended));
        let _ = std::fs::remove_file(&file);
        let ended = replay(&["ls", &named(ending)]);
        assert!(ended.code == 0 && ended.stdout.matches("--step").count() == 1, "{ended:?}");
    }
    let store = dir.path().display().to_string();
    for words in [
        &["--dump", &named("@1"), "--against", &named("@2:0")][..],
        &["diff", &named("@1:0"), &named("@2")],
        &["verify", "--dump", &store, "--run", "run-a@2:0"],
        &["ls", &store, "--run", "run-a@1"],
    ] {
        let ended = replay(words);
        assert_eq!(ended.code, 0, "{words:?}: {}", said(&ended));
    }
    for (words, wanted) in [
        (&["verify", "--dump", &named("@9")][..], "attempt 9"),
        (&["verify", "--dump", &named("@1:7")], "step 7"),
        (&["ls", &named(":7")], "step 7"),
        (&["verify", "--dump", &named("@1"), "--attempt", "2"], "say one of them"),
    ] {
        let ended = replay(words);
        assert!(ended.code == 2 && said(&ended).contains(wanted), "{words:?}: {}", said(&ended));
    }
}

#[test]
fn show_prints_a_box_across_shards_with_global_indices() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run");
    let shown = run(&["show", "w", "--box", "1:3,2:5"], &path);
    let rows: Vec<Vec<&str>> =
        shown.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows[1..],
        [vec!["2", "3", "4"], vec!["[1,:]", "12", "13", "14"], vec!["[2,:]", "22", "23", "24"]]
    );
    let bits = run(&["show", "x", "--microbatch", "1", "--bits"], &path).stdout;
    assert!(bits.contains("3dcd") && bits.contains("0002"), "{bits}");
    let values = run(&["show", "x", "--microbatch", "0"], &path).stdout;
    assert!(["0.1", "-2", "NaN", "-0"].iter().all(|value| values.contains(value)), "{values}");
    let addend = run(&["show", "dk", "--rank", "1", "--box", "0"], &path).stdout;
    assert!(addend.contains(&0x0202_0202.to_string()), "{addend}");
}

#[test]
fn what_cannot_be_shown_is_told_with_what_to_type() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run");
    for (arguments, code, words) in [
        (&["show", "x"][..], 2, "microbatches 0, 1: choose one"),
        (&["show", "nothing"], 2, "the step holds: dk before the reduction, w"),
        (&["show", "w", "--box", "0:9,0"], 2, "does not fit"),
        (&["show", "w", "--box", "0:1"], 2, "1 ranges for 2 dimensions"),
        (&["show", "dk"], 2, "ask for one rank's addend"),
        (&["show", "dk", "--rank", "1", "--box", "0:2,0"], 2, "ranges for 1 dimensions"),
        (&["show", "dk", "--rank", "7"], 2, "rank 7 holds no addend"),
        (&["export", "w", "--to", "w.txt"], 2, "ends in .safetensors or .npy"),
        (&["export", "x", "--microbatch", "0", "--to", "x.npy"], 2, "--widen"),
        (&["export", "x", "w", "--microbatch", "0", "--to", "x.npy"], 2, "one tensor, not 2"),
    ] {
        let ended = run(arguments, &path);
        assert!(ended.code == code && said(&ended).contains(words), "{arguments:?}: {ended:?}");
    }
    std::fs::remove_file(path.join("step-00000000/rank-00001.safetensors")).unwrap();
    let lost = run(&["show", "w", "--box", "0:1,:"], &path);
    assert!(lost.code == 3 && lost.stderr.contains("rank-00001.safetensors"), "{lost:?}");
    let held = run(&["show", "w", "--box", "0:1,0:3"], &path);
    assert_eq!(held.code, 0, "what is asked for is there: {held:?}");
}

/// Goal: what is exported is what was assembled. Method: the safetensors crate reads it back.
#[test]
fn an_exported_safetensors_file_holds_the_bits_that_were_dumped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run");
    let target = dir.path().join("out.safetensors");
    let to = target.display().to_string();
    let arguments = ["export", "x", "w", "--microbatch", "1", "--to", &to];
    let ended = run(&arguments, &path);
    assert_eq!(ended.code, 0, "{ended:?}");
    let bytes = std::fs::read(&target).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let opened = dump::open(&path, &dump::Selection::default()).unwrap();
    for (name, microbatch) in [("w", None), ("x", Some(1))] {
        let key = opened.find(name, microbatch, None).unwrap();
        let wanted = assemble::assemble(&opened, &key).unwrap();
        let found = read.tensor(name).unwrap();
        assert_eq!(found.data(), wanted.bytes());
        let shape: Vec<u64> = found.shape().iter().map(|&size| size as u64).collect();
        assert_eq!(shape, wanted.shape);
    }
    let again = run(&arguments, &path);
    assert!(again.code == 2 && again.stderr.contains("is there already"), "{again:?}");
    let inside = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(inside, 2, "nothing but the run and the file is left behind");
}

/// What the script finds is tested where JAX and torch are: python/tests/test_repro.py.
#[test]
fn a_repro_of_a_microbatch_is_a_script_with_its_data_or_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job { tokens: 40, vocab: 60, valid: 57, width: 8, ..Job::default() };
    let path = dir.path().join("run");
    writing::write(&path, job.ranks as u32, &job.head(), &job.shards());
    let target = dir.path().join("repro");
    let to = target.display().to_string();
    let several = run(&["export", "--repro", &to], &path);
    assert!(several.code == 2 && several.stderr.contains("microbatches 0, 1"), "{several:?}");
    assert!(!target.exists());
    let made = run(&["export", "--repro", &to, "--microbatch", "1"], &path);
    assert!(made.code == 0 && made.stdout.contains("repro.py"), "{made:?}");
    let bytes = std::fs::read(target.join("data.safetensors")).unwrap();
    let data = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(data.tensor("q").unwrap().dtype(), safetensors::Dtype::BF16);
    assert_eq!(data.tensor("share").unwrap().shape(), data.tensor("labels").unwrap().shape());
    assert!(data.tensor("captured.dk").is_ok(), "{:?}", data.names());
    let script = std::fs::read_to_string(target.join("repro.py")).unwrap();
    assert!(script.contains("microbatch 1") && script.contains("import jax"), "{script}");
    let mixed = run(&["export", "q", "--to", "q.npy", "--repro", &to], &path);
    assert!(mixed.code == 2 && mixed.stderr.contains("cannot be used with"), "{mixed:?}");
    let inside = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(inside, 2, "nothing but the run and the script is left behind");
}

#[test]
fn diff_is_a_replay_against_another_dump() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job { tokens: 40, vocab: 60, valid: 57, width: 8, ..Job::default() };
    for name in ["a", "b"] {
        let path = dir.path().join(name);
        writing::write(&path, job.ranks as u32, &job.head(), &job.shards());
    }
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let (a, b) = (a.display().to_string(), b.display().to_string());
    let (short, long) = (replay(&["diff", &a, &b]), replay(&["--dump", &a, "--against", &b]));
    assert_eq!((short.code, &short.stdout), (long.code, &long.stdout));
    assert!(short.code == 0 && short.stdout.contains("AGREED"), "{short:?}");
}

#[test]
fn completions_and_the_manual_name_every_subcommand() {
    let named = ["verify", "ls", "inspect", "show", "export", "diff", "checks", "trajectory"];
    let shells = ["bash", "zsh", "fish"].map(|shell| replay(&["completions", shell]).stdout);
    for text in shells.iter().chain([&replay(&["man"]).stdout]) {
        assert!(named.iter().all(|name| text.contains(name)), "{text}");
    }
}

#[test]
fn inspect_puts_the_microbatches_of_a_tensor_together_and_says_who_holds_it() {
    let dir = tempfile::tempdir().unwrap();
    let said = run(&["inspect"], &dumped(dir.path(), "run")).stdout;
    let rows: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    let row = |name: &str| rows.iter().position(|row| row.first() == Some(&name)).unwrap();
    assert_eq!(rows[row("x")][1..], ["bf16", "[4,", "2]", "-", "0-1", "2", "32", "B"], "{said}");
    assert_eq!(rows[row("w") + 1].join(" "), "held by ranks 0 and 1");
    assert_eq!(rows[row("dk") + 1].join(" "), "addends of a sum; held by ranks 0 and 1");
}
