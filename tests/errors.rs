//! What a user meets when something is wrong: one clear sentence that says what,
//! where and what to do, and an exit code that tells the kinds apart.

use std::fs;
use std::path::{Path, PathBuf};

use backtape::manifest::Manifest;

use crate::support::dump;
use crate::support::job::Job;
use crate::support::program::{Ended, replay};

fn small() -> Job {
    Job { tokens: 40, vocab: 60, valid: 57, width: 8, ..Job::default() }
}

fn dumped(directory: &Path, name: &str, job: &Job) -> PathBuf {
    let path = directory.join(name);
    dump::write(&path, job.ranks as u32, &job.head(), &job.shards());
    path
}

fn run(path: &Path, more: &[&str]) -> Ended {
    let mut arguments = vec!["--dump".to_string(), path.display().to_string()];
    arguments.extend(more.iter().map(ToString::to_string));
    replay(&arguments)
}

/// Asserts the exit code and that the sentence holds every word.
#[track_caller]
fn expect(ended: &Ended, code: i32, words: &[&str]) {
    let said = format!("{}{}", ended.stdout, ended.stderr);
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(ended.code, code, "{ended:#?}");
    for word in words {
        assert!(said.contains(word), "{word:?} is not in:\n{said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

#[test]
fn a_step_that_was_not_dumped_lists_those_that_were() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &small());
    expect(&run(&path, &["--step", "7"]), 2, &["step 7 was not dumped", "--step 0"]);
}

#[test]
fn a_store_with_several_runs_lists_them_and_does_not_guess() {
    let dir = tempfile::tempdir().unwrap();
    dumped(dir.path(), "run-a", &small());
    dumped(dir.path(), "run-b", &small());
    expect(&run(dir.path(), &[]), 2, &["--run run-a", "--run run-b"]);
    expect(&run(dir.path(), &["--run", "run-b"]), 0, &["AGREED"]);
}

#[test]
fn a_role_that_was_not_recorded_is_named_with_those_that_were() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "plain", &Job { fused: false, ..small() });
    let ended = run(&path, &["--compare", "dq,dk_label"]);
    expect(
        &ended,
        2,
        &["holds no dk_label", "tape.record(\"dk_label\"", "recorded:", "label_logits"],
    );
}

#[test]
fn a_word_that_is_no_role_is_refused_with_the_known_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &small());
    expect(&run(&path, &["--compare", "dkk"]), 2, &["\"dkk\" is not a role", "label_logits"]);
}

#[test]
fn a_slip_of_the_fingers_is_answered_with_the_name_that_was_meant() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-alpha", &small());
    let meant = |name: &str| format!("did you mean {name}?");
    let show = |name| replay(&["show", name, "--dump", path.to_str().unwrap()]);
    expect(&show("label_logit"), 2, &["no label_logit (", &meant("label_logits")]);
    let nothing_near = show("optimizer");
    expect(&nothing_near, 2, &["no optimizer; the step holds:"]);
    let which = replay(&["show", "q", "--microbatch", "7", "--dump", path.to_str().unwrap()]);
    expect(&which, 2, &["no q of microbatch 7; the step holds:"]);
    expect(&run(&path, &["--compare", "dq,dk_lable"]), 2, &[&meant("dk_label")]);
    expect(&run(dir.path(), &["--run", "run-alhpa"]), 2, &[&meant("run-alpha")]);
    let cause = replay(&["causes", "label-shfit"]);
    expect(&cause, 2, &[&meant("label-shift")]);
}

/// A replay takes minutes or hours: what it cannot write at its end is said at its beginning.
#[test]
fn a_report_that_cannot_be_written_is_said_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("absent/out.json");
    let of = |words: &[&str]| {
        let mut all = words.to_vec();
        all.extend(["--json", file.to_str().unwrap(), "--dump", "nowhere"]);
        replay(&all)
    };
    for words in [&[][..], &["verify"], &["checks"], &["trajectory"], &["precision"]] {
        expect(&of(words), 2, &["cannot be written to", "choose another file for --json"]);
    }
}

#[test]
fn a_truncated_shard_file_is_named_and_what_depends_on_it_gets_no_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &small());
    let file = path.join("step-00000000/rank-00001-mb-0000.safetensors");
    let length = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 1000).unwrap();
    let ended = run(&path, &["--compare", "dq,dk,label_logits"]);
    expect(&ended, 3, &["rank-00001-mb-0000.safetensors"]);
    let verified = replay(&["verify", "--dump", path.to_str().unwrap()]);
    expect(&verified, 3, &["rank-00001-mb-0000.safetensors", "NOT PROVED", "NO: dk microbatch 0"]);
    let named = path.to_str().unwrap();
    for line in verified.stdout.lines().filter(|line| !line.contains(named)) {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn one_flipped_bit_in_a_gradient_is_found_and_the_gradient_is_not_judged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &small());
    let file = path.join("step-00000000/rank-00002-mb-0001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 5; // dk, the last shard of the file
    bytes[last] ^= 0x10;
    fs::write(&file, bytes).unwrap();
    expect(&run(&path, &["--compare", "dq,dk"]), 3, &["dk microbatch 1", "rank 2", "INCOMPLETE"]);
}

#[test]
fn a_missing_rank_leaves_the_step_partial_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &small());
    let step = path.join("step-00000000");
    fs::remove_file(step.join("manifest.json")).unwrap();
    for name in ["rank-00001-mb-0000", "rank-00001-mb-0001", "rank-00001"] {
        fs::remove_file(step.join(format!("{name}.safetensors"))).unwrap();
    }
    let verified = replay(&["verify", "--dump", path.to_str().unwrap()]);
    expect(&verified, 3, &["PARTIAL", "rank 1"]);
}

#[test]
fn a_dump_of_a_newer_format_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dumped(dir.path(), "run-a", &small());
    let file = path.join("step-00000000/manifest.json");
    let mut manifest = Manifest::from_bytes(&fs::read(&file).unwrap()).unwrap();
    manifest.format_version = 99;
    fs::write(&file, manifest.to_bytes()).unwrap();
    expect(&run(&path, &[]), 2, &["format version 99", "install a newer one"]);
}

#[test]
fn a_shape_that_does_not_fit_the_head_is_named_with_what_would_fit() {
    let dir = tempfile::tempdir().unwrap();
    let job = small();
    let mut shards = job.shards();
    for shard in shards.iter_mut().filter(|shard| shard.name == "k") {
        shard.shape = vec![30, 16];
        shard.place = backtape::index_box::IndexBox::whole(&shard.shape);
    }
    let path = dir.path().join("run-a");
    dump::write(&path, job.ranks as u32, &job.head(), &shards);
    expect(&run(&path, &[]), 2, &["k microbatch 0 is bf16 [30, 16]", "[V, D] with D = 8"]);
}

#[test]
fn options_that_cannot_both_hold_give_no_verdict_and_are_both_named() {
    let dir = tempfile::tempdir().unwrap();
    let job = small();
    let mut head = job.head();
    (head.temperature, head.logit_scale) = (0.7, 2.0);
    let path = dir.path().join("run-a");
    dump::write(&path, job.ranks as u32, &head, &job.shards());
    expect(&run(&path, &[]), 2, &["temperature=0.7", "logit_scale=2", "no verdict"]);
}

#[test]
fn a_directory_that_is_no_dump_says_what_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    expect(&run(dir.path(), &[]), 2, &["is not a dump", "run.json"]);
    expect(&run(&dir.path().join("absent"), &[]), 2, &["absent"]);
}

#[test]
fn labels_outside_the_vocabulary_are_named_with_their_token() {
    let dir = tempfile::tempdir().unwrap();
    let job = small();
    let mut shards = job.shards();
    let labels = shards.iter_mut().find(|s| s.name == "labels" && s.rank == 1).unwrap();
    labels.bytes[8..12].copy_from_slice(&(-100i32).to_le_bytes());
    let path = dir.path().join("run-a");
    dump::write(&path, job.ranks as u32, &job.head(), &shards);
    expect(&run(&path, &[]), 2, &["token 42 has -100", "ignore_label=-100"]);
}
