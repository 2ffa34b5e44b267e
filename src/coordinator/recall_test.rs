//! Goal: a step that was let go of is still judged as if it were known. Method: more steps are
//! committed than are kept, then everything is said again, to the coordinator that committed them
//! and to one that loads its journal.

use std::path::Path;

use super::attempt_log::AttemptLog;
use super::event::{Closing, Event, Joined, Opened};
use super::limits::KEPT_FILES;
use super::metrics::Totals;
use super::refusal::Refusal;
use super::request::StepAsk;
use crate::hash::TrustHash;
use crate::identity::{Attempt, Name, Rank, Step};
use crate::manifest::FileRecord;
use crate::placement::Mesh;
use crate::store::{AttemptDir, Backend, layout};

const WORLD: u32 = 2;
/// More than are kept, with a file of each rank.
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
    }
}

/// A rank's file of a step.
fn report(step: u64, rank: u32, version: u8) -> Event {
    let file = FileRecord {
        name: layout::file_name(Rank(rank), None),
        rank: Rank(rank),
        length: 0,
        header_hash: TrustHash::of(&[version]),
        shards: Vec::new(),
    };
    Event::Reported { step: Step(step), file }
}

fn close(step: u64, rank: u32, files: u32) -> Event {
    let closing = Closing { files, ..Closing::default() };
    Event::Closed { step: Step(step), rank: Rank(rank), closing }
}

fn directory(store: &Path) -> AttemptDir {
    AttemptDir::of(store, Attempt(0))
}

fn manifest(store: &Path, step: u64) -> std::path::PathBuf {
    directory(store).step(Step(step)).manifest()
}

/// A coordinator's attempt after all its steps.
fn job(store: &Path) -> AttemptLog {
    let mut log = AttemptLog::open(Backend::Directory, directory(store), opened());
    for rank in 0..WORLD {
        let host = Name::new("h").unwrap();
        let joined = Joined { rank: Rank(rank), incarnation: 0, host, mesh: Mesh::default() };
        log.submit(Event::Joined(joined), 0).unwrap();
    }
    for step in 0..STEPS {
        for rank in 0..WORLD {
            log.submit(report(step, rank, 0), 0).unwrap();
            log.submit(close(step, rank, 1), 0).unwrap();
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
