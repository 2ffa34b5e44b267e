//! Tests opening a dump: which step is chosen, what is salvaged without a manifest, and what is
//! refused with an error that names it.

use std::path::Path;

use backtape::identity::{Attempt, Name, Rank, Step};
use backtape::manifest::Manifest;
use backtape::store::AttemptDir;

use super::fixture::{Dumped, commit, key, noise, slabs};
use super::*;
use crate::assemble::assemble;

fn dumped() -> Dumped {
    commit(slabs("q", &[8, 3], 4, &noise(1, 96)), 4)
}

fn refusal(path: &Path, selection: &Selection) -> String {
    let error = open(path, selection).err().expect("it was opened");
    let path = path.canonicalize().unwrap_or(path.into());
    error.to_string().replace(&*path.to_string_lossy(), "DUMP")
}

/// Copies the step to where another step or attempt of the run would be.
fn copy_step(dumped: &Dumped, attempt: u32, step: u64) {
    let directory = AttemptDir::of(&dumped.run, Attempt(attempt)).step(Step(step));
    std::fs::create_dir_all(&directory.path).unwrap();
    let mut manifest = dumped.manifest.clone();
    (manifest.attempt, manifest.step) = (Attempt(attempt), Step(step));
    std::fs::write(directory.manifest(), manifest.to_bytes()).unwrap();
}

#[test]
fn the_one_step_of_the_one_run_is_opened_without_being_named() {
    let dumped = dumped();
    for path in [&dumped.run, dumped.store.path()] {
        let dump = open(path, &Selection::default()).unwrap();
        assert_eq!((dump.run.as_str(), dump.attempt, dump.step), ("run-a", Attempt(0), Step(0)));
        assert_eq!((&dump.state, dump.faults()), (&StepState::Committed, &[][..]));
        assert_eq!(dump.manifest, dumped.manifest);
        assert_eq!(dump.files().count(), 4);
        let tensor = &dump.tensors()[&key("q")];
        assert_eq!((tensor.shards.len(), &tensor.shape[..]), (4, &[8, 3][..]));
        assert_eq!(dump.shard_bytes(&tensor.shards[1]), Some(&noise(1, 96)[24..48]));
    }
}

#[test]
fn several_runs_attempts_or_steps_are_listed_and_never_guessed() {
    let dumped = dumped();
    let select =
        |run: Option<&str>, attempt, step| Selection { run: run.map(Into::into), attempt, step };
    copy_step(&dumped, 0, 7);
    copy_step(&dumped, 2, 7);
    std::fs::remove_file(dumped.run.join("attempt-0002/step-00000007/manifest.json")).unwrap();
    let run = &dumped.run;
    assert_eq!(
        refusal(run, &select(None, None, None)),
        "DUMP holds several steps: choose one with --step 0 or --step 7"
    );
    assert_eq!(
        refusal(run, &select(None, None, Some(3))),
        "step 3 was not dumped in DUMP: choose one with --step 0 or --step 7"
    );
    assert_eq!(
        refusal(run, &select(None, None, Some(7))),
        "step 7 was dumped by several attempts of DUMP: choose one with --attempt 0 (committed) or --attempt 2 (partial)"
    );
    assert_eq!(
        refusal(run, &select(None, Some(1), None)),
        "DUMP holds no attempt 1: choose one with --attempt 0 or --attempt 2"
    );
    assert_eq!(open(run, &select(None, Some(2), None)).unwrap().step, Step(7));
    assert_eq!(open(run, &select(None, None, Some(0))).unwrap().step, Step(0));

    std::fs::create_dir_all(dumped.store.path().join("run-b/step-00000000")).unwrap();
    let store = dumped.store.path();
    assert_eq!(
        refusal(store, &select(None, None, None)),
        "DUMP holds several runs: choose one with --run run-a or --run run-b"
    );
    assert_eq!(
        refusal(store, &select(Some("run-c"), None, None)),
        "DUMP holds no run \"run-c\": choose one with --run run-a or --run run-b"
    );
    assert!(open(store, &select(Some("run-a"), None, Some(0))).is_ok());
    assert!(refusal(run, &select(Some("run-b"), None, Some(0))).contains("--run run-a"));
}

#[test]
fn what_is_no_dump_is_told_what_was_looked_for_and_a_part_of_one_where_to_go() {
    let dumped = dumped();
    let empty = tempfile::tempdir().unwrap();
    let any = Selection::default();
    let says = refusal(empty.path(), &any);
    assert!(
        says.starts_with("DUMP is not a dump: no run lies in it. Looked for run.json"),
        "{says}"
    );
    assert!(refusal(&empty.path().join("x"), &any).contains("nothing is there"));
    assert!(refusal(&dumped.file(0), &any).contains("it is a file"));
    let run = dumped.run.canonicalize().unwrap();
    let wanted =
        format!("DUMP is one step of a run: name the run, --dump {} --step 0", run.display());
    assert_eq!(refusal(&dumped.step.path, &any), wanted);
    std::fs::remove_dir_all(&dumped.step.path).unwrap();
    std::fs::write(run.join("run.json"), "{}").unwrap();
    assert!(refusal(&run, &any).starts_with("no step was dumped in DUMP"));
}

#[test]
fn a_newer_format_is_refused_by_name_and_a_moved_step_is_not_believed() {
    let mut dumped = dumped();
    copy_step(&dumped, 0, 7);
    let moved = dumped.run.join("step-00000009");
    std::fs::rename(dumped.run.join("step-00000007"), &moved).unwrap();
    let nine = Selection { step: Some(9), ..Selection::default() };
    let says = refusal(&dumped.run, &nine);
    assert!(
        says.contains("says attempt 0 step 7, but it lies where attempt 0 step 9 belongs"),
        "{says}"
    );
    std::fs::remove_dir_all(moved).unwrap();

    dumped.manifest.format_version = 9;
    dumped.seal();
    let says = refusal(&dumped.run, &Selection::default());
    assert!(says.contains("manifest.json has format version 9"), "{says}");
    dumped.unseal();
    for index in 0..4 {
        newer(&dumped, index);
    }
    let says = refusal(&dumped.run, &Selection::default());
    assert!(says.contains("rank-00000.safetensors has format version 9"), "{says}");
}

/// Changes the format version in a file's header to 9.
fn newer(dumped: &Dumped, index: usize) {
    dumped.damage(index, |bytes| {
        let text = br#"format_version\":"#;
        let offset = bytes.windows(text.len()).position(|w| w == text).unwrap();
        bytes[offset + text.len()] = b'9';
    });
}

#[test]
fn a_step_without_manifest_is_read_from_what_its_files_say() {
    let dumped = dumped();
    dumped.unseal();
    let whole = dumped.open();
    let why = "it has no manifest: it was never committed".to_string();
    let missing_ranks = vec![];
    assert_eq!(whole.state, StepState::Partial { why, missing_ranks });
    assert_eq!(whole.manifest.files, dumped.manifest.files);
    assert_eq!(whole.faults(), &[]);
    assert_eq!(assemble(&whole, &key("q")).unwrap().bytes(), noise(1, 96));

    std::fs::remove_file(dumped.file(3)).unwrap();
    newer(&dumped, 0);
    dumped.damage(1, |bytes| bytes.truncate(bytes.len() - 1));
    std::fs::write(dumped.step.path.join(".rank-00003.safetensors.1-0.tmp"), "").unwrap();
    std::fs::write(dumped.step.path.join("notes.txt"), "").unwrap();
    let dump = dumped.open();
    let StepState::Partial { missing_ranks, .. } = &dump.state else {
        panic!("committed without a manifest");
    };
    assert_eq!(missing_ranks, &[Rank(0), Rank(3)]);
    let kinds: Vec<_> = dump.faults().iter().map(|fault| (fault.kind, fault.rank)).collect();
    let wanted = [
        (FaultKind::Unfinished, Some(Rank(3))),
        (FaultKind::Stray, None),
        (FaultKind::AlteredHeader, Some(Rank(0))),
        (FaultKind::Truncated, Some(Rank(1))),
    ];
    assert_eq!(kinds, wanted);
    assert_eq!(dump.faults()[3].tensors, [key("q")]);
}

#[test]
fn a_damaged_manifest_is_salvaged_around_and_foreign_files_are_not_mixed_in() {
    let dumped = dumped();
    let other = commit(slabs("q", &[8, 3], 4, &noise(2, 96)), 4);
    let mut bytes = std::fs::read(dumped.step.manifest()).unwrap();
    bytes.truncate(100);
    std::fs::write(dumped.step.manifest(), bytes).unwrap();
    // A file of the same rank and step of another attempt.
    other.damage(2, |bytes| {
        let text = br#"attempt\":"#;
        let offset = bytes.windows(text.len()).position(|w| w == text).unwrap();
        bytes[offset + text.len()] = b'1';
    });
    std::fs::copy(other.file(2), dumped.file(2)).unwrap();
    std::fs::rename(dumped.file(3), dumped.step.path.join("rank-00009.safetensors")).unwrap();
    let dump = dumped.open();
    let StepState::Partial { why, missing_ranks } = &dump.state else {
        panic!("committed by half a manifest");
    };
    assert!(why.starts_with("its manifest ") && why.contains("is damaged"), "{why}");
    assert_eq!(missing_ranks, &[Rank(2)]);
    let says: Vec<_> = dump.faults().iter().map(ToString::to_string).collect();
    assert_eq!(
        says,
        [
            "rank-00002.safetensors is of run run-a attempt 1 step 0: not used",
            "rank-00009.safetensors bears the name of rank 9 and says that it is rank 3's: used as the latter",
        ]
    );
}

#[test]
fn a_manifest_that_disagrees_with_a_files_header_is_a_fault_that_names_both() {
    let mut dumped = dumped();
    dumped.manifest.files[2].shards[0].host = Name::new("elsewhere").unwrap();
    dumped.manifest.files[3].shards[0].place.0[0] = (0, u64::MAX);
    dumped.seal();
    std::fs::write(dumped.step.path.join("rank-00008.safetensors"), "x").unwrap();
    let dump = dumped.open();
    let says: Vec<_> = dump.faults().iter().map(ToString::to_string).collect();
    assert_eq!(
        says[0],
        "the manifest and the header of rank-00002.safetensors disagree on the host of q: \"elsewhere\" in the manifest, \"host\" in the header"
    );
    assert_eq!(
        says[1],
        "the record of rank-00003.safetensors contradicts itself: q of rank 3: box [0:18446744073709551615, 0:3] does not fit in a tensor of shape [8, 3]"
    );
    assert!(says[2].contains("disagree on the box of q"), "{}", says[2]);
    assert_eq!(
        says[3],
        "rank-00008.safetensors is a stray file: the manifest does not list it: not used"
    );
    // The bytes match their hash, so that they are still those of the job.
    assert_eq!(dump.faults()[0].tensors, []);
    assert_eq!(dump.tensors()[&key("q")].shards.len(), 3);
}

#[test]
fn hostile_lists_neither_panic_nor_allocate() {
    let mut dumped = dumped();
    let hostile: [fn(&mut Manifest); 5] = [
        |m| m.files[0].length = 0,
        |m| m.files[0].shards[0].length = u64::MAX,
        |m| m.files[0].shards[0].shape = vec![u64::MAX; 40],
        |m| m.world_size = u32::MAX,
        |m| m.files[1].rank = Rank(7),
    ];
    let clean = dumped.manifest.clone();
    for change in hostile {
        dumped.manifest = clean.clone();
        change(&mut dumped.manifest);
        dumped.seal();
        let verification = crate::verify::verify(&dumped.open(), &|_| ());
        assert!(!verification.findings.is_empty());
    }
}
