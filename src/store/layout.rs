//! Names and paths below a run's directory.
//!
//! ```text
//! <run>/run.json                                   attempt 0
//! <run>/journal.jsonl                              the coordinator's record of it;
//! <run>/journal/00000000.jsonl                     in a bucket, which cannot append: one object a line
//! <run>/step-00000000/rank-00003-mb-0001.safetensors
//! <run>/step-00000000/rank-00003.safetensors
//! <run>/step-00000000/manifest.json                last, by one atomic create
//! <run>/attempt-0001/...                           the same for the first restart
//! ```
//!
//! The first launch is in the run's directory itself; every restart has its own directory, so that
//! the files of several attempts cannot mix.

use std::io;
use std::path::{Path, PathBuf};

use super::backend::{Backend, Listing};
use crate::identity::{Attempt, Microbatch, Name, Rank, Step};

/// The manifest of a step, whose existence commits it.
pub const MANIFEST: &str = "manifest.json";
/// File that describes an attempt.
pub const RUN_RECORD: &str = "run.json";
/// The coordinator's own record of an attempt.
pub const JOURNAL: &str = "journal.jsonl";
/// Prefix of the journal's objects in a bucket, one per line.
pub const JOURNAL_LINES: &str = "journal";
/// File with the address of a coordinator embedded in rank 0, from which the other ranks read it.
pub const RENDEZVOUS: &str = "coordinator.json";

/// Directory of one attempt of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptDir {
    /// Which attempt.
    pub attempt: Attempt,
    /// Its path.
    pub path: PathBuf,
}

/// Directory of one step of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepDir {
    /// Which step.
    pub step: Step,
    /// Its path.
    pub path: PathBuf,
}

impl AttemptDir {
    /// The directory of `attempt` below a run's directory.
    pub fn of(run: &Path, attempt: Attempt) -> AttemptDir {
        let path = match attempt.0 {
            0 => run.to_path_buf(),
            n => run.join(format!("attempt-{n:04}")),
        };
        AttemptDir { attempt, path }
    }

    /// Every attempt of a run that has a journal or a run record, oldest first.
    pub fn list(backend: &Backend, run: &Path) -> io::Result<Vec<AttemptDir>> {
        let inside = backend.list(run)?;
        let mut attempts = Vec::new();
        if recorded(&inside) {
            attempts.push(AttemptDir::of(run, Attempt(0)));
        }
        let mut numbers = numbered(inside.directories, "attempt-");
        numbers.retain(|&n| n > 0);
        for number in numbers.into_iter().filter_map(|n| u32::try_from(n).ok()) {
            let attempt = AttemptDir::of(run, Attempt(number));
            if recorded(&backend.list(&attempt.path)?) {
                attempts.push(attempt);
            }
        }
        Ok(attempts)
    }

    /// The directory of a step.
    pub fn step(&self, step: Step) -> StepDir {
        StepDir { step, path: self.path.join(format!("step-{:08}", step.0)) }
    }

    /// Every step with a directory, in order.
    pub fn steps(&self) -> io::Result<Vec<StepDir>> {
        let inside = Backend::Directory.list(&self.path)?;
        let numbers = numbered(inside.directories, "step-");
        Ok(numbers.into_iter().map(|n| self.step(Step(n))).collect())
    }
}

impl StepDir {
    /// The path of the manifest; it exists once the step is committed.
    pub fn manifest(&self) -> PathBuf {
        self.path.join(MANIFEST)
    }
}

/// Name of the file with one rank's shards of a microbatch, or with those that belong to no
/// microbatch.
pub fn file_name(rank: Rank, microbatch: Option<Microbatch>) -> Name {
    let text = match microbatch {
        Some(mb) => format!("rank-{:05}-mb-{:04}.safetensors", rank.0, mb.0),
        None => format!("rank-{:05}.safetensors", rank.0),
    };
    Name::new(text).expect("digits and dashes")
}

/// The paths of all runs in a store: the directories in which at least one attempt has a journal or
/// a run record. The first attempt need not be 0, if the launcher counts its restarts.
pub fn runs(backend: &Backend, store: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for name in backend.list(store)?.directories {
        let run = store.join(name);
        if !AttemptDir::list(backend, &run)?.is_empty() {
            paths.push(run);
        }
    }
    Ok(paths)
}

/// True if an attempt's directory has a journal or a run record.
fn recorded(inside: &Listing) -> bool {
    let file = |name: &str| inside.files.iter().any(|file_name| file_name == name);
    file(RUN_RECORD) || file(JOURNAL) || inside.directories.iter().any(|d| d == JOURNAL_LINES)
}

fn numbered(names: Vec<String>, prefix: &str) -> Vec<u64> {
    let digits = names.iter().filter_map(|name| name.strip_prefix(prefix));
    let mut numbers: Vec<u64> = digits.filter_map(|digits| digits.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_whose_first_launch_left_nothing_is_found_by_a_later_one() {
        let store = tempfile::tempdir().unwrap();
        let run = store.path().join("run");
        let restart = AttemptDir::of(&run, Attempt(1));
        std::fs::create_dir_all(restart.path.join("step-00000000")).unwrap();
        let runs = || runs(&Backend::Directory, store.path()).unwrap();
        assert_eq!(runs(), Vec::<PathBuf>::new());
        std::fs::write(restart.path.join(JOURNAL), b"").unwrap();
        std::fs::write(store.path().join("a file"), b"").unwrap();
        assert_eq!(runs(), [run]);
    }
}
