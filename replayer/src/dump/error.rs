//! Why a dump cannot be opened. Each sentence ends in what to do next.
//!
//! Damage inside a step is not here: a torn file is a [`super::FileFault`].

use std::io;
use std::path::{Path, PathBuf};

use backtape::FORMAT_VERSION;
use backtape::identity::{Attempt, Step};
use backtape::store::backend::ConnectError;

use crate::spelling::hint;

/// Why [`super::open`] could not choose or read a step.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error(
        "{path} is not a dump: {found}. Looked for run.json, journal.jsonl or step-* directories in it and in its subdirectories; name a run's directory or a store that holds runs",
        path = path.display()
    )]
    NotADump { path: PathBuf, found: String },
    #[error(
        "{path} is {part} of a run: name the run, --dump {run} {flag}",
        path = path.display(), run = run.display()
    )]
    InsideARun { path: PathBuf, part: &'static str, run: PathBuf, flag: String },
    #[error("{path} holds several runs: choose one with {choices}", path = path.display(), choices = flags("--run", runs))]
    SeveralRuns { path: PathBuf, runs: Vec<String> },
    #[error("{path} holds no run {wanted:?}{meant}: choose one with {choices}", path = path.display(), meant = hint(wanted, runs.iter().map(String::as_str)), choices = flags("--run", runs))]
    NoSuchRun { path: PathBuf, wanted: String, runs: Vec<String> },
    #[error("{path} holds no attempt {wanted}: choose one with {choices}", path = path.display(), choices = flags("--attempt", attempts))]
    NoSuchAttempt { path: PathBuf, wanted: Attempt, attempts: Vec<Attempt> },
    #[error(
        "step {step} was dumped by several attempts of {path}: choose one with {choices}",
        path = path.display(),
        choices = attempts.iter().map(AttemptState::to_string).collect::<Vec<_>>().join(" or ")
    )]
    SeveralAttempts { path: PathBuf, step: Step, attempts: Vec<AttemptState> },
    #[error("step {wanted} was not dumped in {path}: {choices}", path = path.display(), choices = dumped(steps))]
    NoSuchStep { path: PathBuf, wanted: Step, steps: Vec<Step> },
    #[error("no step was dumped in {path}: look whether the job reached a step that BACKTAPE_STEPS selects", path = path.display())]
    NoSteps { path: PathBuf },
    #[error("{path} holds several steps: choose one with {choices}", path = path.display(), choices = flags("--step", steps))]
    SeveralSteps { path: PathBuf, steps: Vec<Step> },
    #[error("{path} has format version {found}, this backtape reads up to {FORMAT_VERSION}: install a newer one", path = path.display())]
    Newer { path: PathBuf, found: u64 },
    #[error(
        "{path} says {says}, but it lies where {lies} belongs: it was moved here by hand, move it back",
        path = path.display()
    )]
    Misplaced { path: PathBuf, says: String, lies: String },
    #[error(
        "{path} is a run, and so is {run}, of which it may mean a part: choose the run with --dump {store} --run {name}, or a part of the other with --dump {run} and --attempt or --step",
        path = path.display(),
        run = run.display(),
        store = path.parent().unwrap_or(Path::new(".")).display(),
        name = path.file_name().unwrap_or_default().display()
    )]
    TwoMeanings { path: PathBuf, run: PathBuf },
    #[error(
        "{path} is written with {what} {written}, and {what} {asked} is asked for: say one of them",
        path = path.display()
    )]
    SaidTwice { path: PathBuf, what: &'static str, written: u64, asked: u64 },
    #[error(transparent)]
    Bucket { source: ConnectError },
    #[error("{path} cannot be read: check that it exists and that you may read it", path = path.display())]
    Read { path: PathBuf, source: io::Error },
}

impl OpenError {
    /// The same with other paths, for a dump that was read from a copy.
    pub(super) fn with_paths(mut self, change: impl Fn(&Path) -> PathBuf) -> OpenError {
        use OpenError::*;
        let paths: Vec<&mut PathBuf> = match &mut self {
            InsideARun { path, run, .. } | TwoMeanings { path, run } => vec![path, run],
            NotADump { path, .. }
            | SeveralRuns { path, .. }
            | NoSuchRun { path, .. }
            | NoSuchAttempt { path, .. }
            | SeveralAttempts { path, .. }
            | NoSuchStep { path, .. }
            | NoSteps { path }
            | SeveralSteps { path, .. }
            | Newer { path, .. }
            | Misplaced { path, .. }
            | SaidTwice { path, .. }
            | Read { path, .. } => vec![path],
            Bucket { .. } => Vec::new(),
        };
        paths.into_iter().for_each(|path| *path = change(path));
        self
    }
}

/// An attempt that holds the step, and whether it was committed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct AttemptState {
    pub attempt: Attempt,
    pub committed: bool,
}

impl std::fmt::Display for AttemptState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = ["partial", "committed"][usize::from(self.committed)];
        write!(f, "--attempt {} ({state})", self.attempt)
    }
}

/// `--run a or --run b`, shortened where it would fill the screen.
fn flags<T: std::fmt::Display>(flag: &str, values: &[T]) -> String {
    const SHOWN: usize = 32;
    let mut all: Vec<String> =
        values.iter().take(SHOWN).map(|value| format!("{flag} {value}")).collect();
    if values.len() > SHOWN {
        all.push(format!("one of {} more", values.len() - SHOWN));
    }
    all.join(" or ")
}

fn dumped(steps: &[Step]) -> String {
    match steps {
        [] => "no step was dumped there".into(),
        _ => format!("choose one with {}", flags("--step", steps)),
    }
}
