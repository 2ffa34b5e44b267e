//! Goal: events of a step whose details were released are checked as if the details were in memory.
//! Method: more steps are committed than are kept, then every request is repeated, to the
//! coordinator that committed them and to one that loads its journal.

use std::path::Path;

use super::attempt_log::AttemptLog;
use super::event::{Closing, Event, Joined, Opened};
use super::limits::{KEPT_FILES, MAX_HELD_BYTES};
use super::metrics::Totals;
use super::refusal::Refusal;
use super::request::StepAsk;
use super::state::AttemptState;
use crate::hash::TrustHash;
use crate::identity::{Attempt, Name, Rank, Step};
use crate::manifest::{EVERYTHING, FileRecord, Omission};
use crate::placement::Mesh;
use crate::selection::Selection;
use crate::store::{AttemptDir, Backend, layout};

const WORLD: u32 = 2;
/// Number of steps: with a file of each rank more files than are kept.
const STEPS: u64 = KEPT_FILES;

fn opened() -> Opened {
    Opened {
        format_version: crate::FORMAT_VERSION,
        run: Name::new("run").unwrap(),
        attempt: Attempt(0),
        world_size: WORLD,
        started_ms: 0,
        mesh: Mesh::default(),
        versions: Default::default(),
        launch: None,
    }
}

/// A rank's file of a step.
pub(super) fn report(step: u64, rank: u32, version: u8) -> Event {
    let file = FileRecord {
        name: layout::file_name(Rank(rank), None),
        rank: Rank(rank),
        length: 0,
        header_hash: TrustHash::of(&[version]),
        shards: Vec::new(),
    };
    Event::Reported { step: Step(step), file }
}

pub(super) fn close(step: u64, rank: u32, files: u32) -> Event {
    let closing = Closing { files, ..Closing::default() };
    Event::Closed { step: Step(step), rank: Rank(rank), closing }
}

pub(super) fn directory(store: &Path) -> AttemptDir {
    AttemptDir::of(store, Attempt(0))
}

fn manifest(store: &Path, step: u64) -> std::path::PathBuf {
    directory(store).step(Step(step)).manifest()
}

/// A coordinator's attempt after all its steps.
pub(super) fn job(store: &Path) -> AttemptLog {
    job_of(store, &|step, rank| close(step, rank, 1))
}

fn job_of(store: &Path, closed: &dyn Fn(u64, u32) -> Event) -> AttemptLog {
    let mut log = AttemptLog::open(Backend::Directory, directory(store), opened());
    for rank in 0..WORLD {
        let host = Name::new("h").unwrap();
        let joined = Joined { rank: Rank(rank), incarnation: 0, host, mesh: Mesh::default() };
        log.submit(Event::Joined(joined), 0).unwrap();
    }
    for step in 0..STEPS {
        for rank in 0..WORLD {
            log.submit(report(step, rank, 0), 0).unwrap();
            log.submit(closed(step, rank), 0).unwrap();
        }
        log.flush(0);
        log.commit();
    }
    log
}

fn totals(log: &AttemptLog) -> Totals {
    log.state.add_to(Totals::default())
}

#[test]
fn why_a_step_is_not_whole_is_known_when_it_was_let_go_of_and_after_a_restart() {
    let store = tempfile::tempdir().unwrap();
    let early = |step, rank| {
        let everything = Omission {
            rank: Rank(rank),
            tensor: EVERYTHING.into(),
            microbatch: None,
            reason: "the step's body ended early".into(),
        };
        let left_out = (step == 0 && rank == 1).then_some(everything);
        let closing =
            Closing { files: 1, omissions: left_out.into_iter().collect(), ..Closing::default() };
        Event::Closed { step: Step(step), rank: Rank(rank), closing }
    };
    let first = job_of(store.path(), &early);
    let loaded = AttemptLog::load(Backend::Directory, directory(store.path())).unwrap().unwrap();
    for log in [first, loaded] {
        assert!(log.state.is_released(Step(0)));
        let reason = |step| log.state.status(StepAsk { step: Step(step), brief: true }).reason;
        assert_eq!(reason(0), "rank 1 did not record all of it: the step's body ended early");
        assert_eq!((reason(1), reason(STEPS - 1)), (String::new(), String::new()));
    }
}

#[test]
fn what_is_said_again_of_a_step_long_committed_is_held_against_its_manifest() {
    let store = tempfile::tempdir().unwrap();
    let first = job(store.path());
    let (backend, place) = (Backend::Directory, directory(store.path()));
    let loaded = AttemptLog::load(backend, place).unwrap().unwrap();
    assert_eq!(totals(&first), totals(&loaded), "a restart forgot steps");
    for mut log in [first, loaded] {
        assert!(log.state.is_released(Step(0)) && !log.state.is_released(Step(STEPS - 1)));
        for step in 0..STEPS {
            assert!(log.state.is_committed(Step(step)));
            let status = log.state.status(StepAsk { step: Step(step), brief: false });
            assert_eq!((status.committed, status.closed_ranks.len()), (true, WORLD as usize));
            for rank in 0..WORLD {
                log.submit(report(step, rank, 0), 1).unwrap();
                log.submit(close(step, rank, 1), 1).unwrap();
                let other = log.submit(report(step, rank, 1), 1);
                assert!(matches!(other, Err(Refusal::FileConflict { .. })), "{other:?}");
                let other = log.submit(close(step, rank, 2), 1);
                assert!(matches!(other, Err(Refusal::CloseConflict { .. })), "{other:?}");
            }
        }
        assert_eq!(totals(&log).committed, STEPS);
        assert_eq!(log.state.overview().steps.len() as u64, STEPS);
        let journal = directory(store.path()).path.join(layout::JOURNAL);
        let before = std::fs::read(&journal).unwrap();
        log.flush(2);
        assert_eq!(std::fs::read(&journal).unwrap(), before, "it was journalled again");
    }
}

#[test]
fn a_manifest_that_is_gone_or_of_another_step_answers_nothing_and_says_so() {
    let store = tempfile::tempdir().unwrap();
    let mut log = job(store.path());
    let path = manifest(store.path(), 0);
    for put in [None, Some(manifest(store.path(), 1))] {
        match put {
            None => std::fs::remove_file(&path).unwrap(),
            Some(other) => drop(std::fs::copy(other, &path).unwrap()),
        }
        let refused = log.submit(report(0, 0, 0), 1).unwrap_err();
        let said = refused.to_string();
        assert!(matches!(refused, Refusal::Storage(_)), "{said}");
        assert!(said.contains("step 0") && said.contains(path.to_str().unwrap()), "{said}");
        assert!(log.state.is_committed(Step(0)));
    }
}

#[test]
fn a_step_that_was_deleted_is_not_made_again_by_a_restart_and_one_whose_manifest_alone_is_missing_is()
 {
    let store = tempfile::tempdir().unwrap();
    drop(job(store.path()));
    std::fs::remove_dir_all(directory(store.path()).step(Step(2)).path).unwrap();
    std::fs::remove_file(manifest(store.path(), 3)).unwrap();
    let mut log = AttemptLog::load(Backend::Directory, directory(store.path())).unwrap().unwrap();
    log.commit();
    assert!(!directory(store.path()).step(Step(2)).path.exists());
    assert!(manifest(store.path(), 3).is_file(), "a kill may have come before it");
    assert_eq!(totals(&log).committed, STEPS);
    assert!(log.submit(report(2, 0, 0), 1).unwrap_err().to_string().contains("step 2"));
}

/// Goal: memory does not grow with the steps of a job that records no files. Method: steps without
/// files, each with a reason, or without one.
#[test]
fn steps_without_files_are_let_go_of_like_others() {
    for reason in [0, 4096] {
        let store = tempfile::tempdir().unwrap();
        let mut log = AttemptLog::open(Backend::Directory, directory(store.path()), opened());
        for step in 0..100 {
            for rank in (0..WORLD).map(Rank) {
                let omission = Omission {
                    rank,
                    tensor: "q".into(),
                    microbatch: None,
                    reason: "x".repeat(reason),
                };
                let closing =
                    Closing { omissions: vec![omission; reason / 16], ..Closing::default() };
                let event = Event::Closed { step: Step(step), rank, closing };
                log.submit(event, 0).unwrap();
            }
            log.flush(0);
            log.commit();
            let kept = (0..=step).filter(|&step| !log.state.is_released(Step(step))).count() as u64;
            let most = if reason == 0 { KEPT_FILES / u64::from(WORLD) } else { 2 };
            assert!(kept <= most, "{kept} of {step} steps are kept");
        }
    }
}

/// Goal: the memory for a rank's closes of steps that other ranks never close is limited, whichever
/// part of a close is large. Method: heads and selections of the largest allowed size, until one is
/// refused.
#[test]
fn a_rank_cannot_fill_the_memory_with_what_it_declares() {
    let selection = Selection {
        tensors: (0..900)
            .map(|n| format!("tensor-{n:04}"))
            .collect::<Vec<_>>()
            .join(",")
            .parse()
            .unwrap(),
        ..Selection::default()
    };
    let dtypes = (0..1000).map(|n| (format!("stage-{n}"), "f32".into())).collect();
    let head = crate::head::HeadDeclaration { dtypes, ..Default::default() };
    let large = Closing { selection: Some(Box::new(selection)), ..Closing::default() };
    let other = Closing { head: Some(Box::new(head)), ..Closing::default() };
    for closing in [large, other] {
        let text = serde_json::to_vec(&closing).unwrap().len() as u64;
        let mut state = AttemptState::new(opened());
        let refused = (0..100_000).find(|&step| {
            let closed =
                Event::Closed { step: Step(step), rank: Rank(0), closing: closing.clone() };
            let refused = state.check_quota(&closed).is_err();
            if !refused {
                state.apply(&closed, 0);
            }
            refused || step * text > 2 * MAX_HELD_BYTES
        });
        let bytes = refused.unwrap() * text;
        assert!(bytes <= MAX_HELD_BYTES, "{bytes} bytes are kept of one rank");
    }
}
