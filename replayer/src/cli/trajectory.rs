//! `replay trajectory`: from parsed arguments to flags and an exit code.

use std::path::Path;

use backtape::head::KLayout;
use backtape::role::Role;
use backtape::scalars;
use backtape::store::AttemptDir;
use backtape::store::layout::MANIFEST;

use super::args::TrajectoryArguments;
use super::error::RunError;
use super::exit;
use super::written::Json;
use crate::dump::{self, Place, Selection};
use crate::report::trajectory::{TrajectoryReport, TrajectoryVerdict, render};
use crate::trajectory::{Declared, ReadError, judge, read};

pub(super) fn run(arguments: &TrajectoryArguments) -> Result<(String, i32), RunError> {
    let written = Json::asked(arguments.json.as_deref())?;
    let TrajectoryArguments { run, attempt, vocabulary, local, shared, .. } = arguments;
    let selection = Selection { run: run.clone(), attempt: *attempt, step: None };
    let declared =
        Declared { vocabulary: *vocabulary, local: local.clone(), shared: shared.clone() };
    let report = trajectory_report(&arguments.dump, &selection, &declared)?;
    let code = match report.verdict {
        TrajectoryVerdict::Clear => exit::AGREED,
        TrajectoryVerdict::Flagged => exit::DIVERGED,
        TrajectoryVerdict::Incomplete => exit::INCOMPLETE,
    };
    let json = || serde_json::to_string_pretty(&report).expect("plain data");
    Ok((written.output(json, || render(&report))?, code))
}

/// What the scalars of one attempt say of its trajectory.
pub fn trajectory_report(
    path: &Path,
    selection: &Selection,
    declared: &Declared,
) -> Result<TrajectoryReport, RunError> {
    let place = Place::of(path)?;
    let (run, attempts) = dump::attempts(&place, selection)?;
    for attempt in &attempts {
        place.bring_scalars(attempt)?;
    }
    let holds = |attempt: &&AttemptDir| attempt.path.join(scalars::DIRECTORY).is_dir();
    let held: Vec<&AttemptDir> = attempts.iter().filter(holds).collect();
    let attempt = match held.as_slice() {
        [one] => *one,
        [] => return Err(ReadError::None { path: place.given(&run) }.into()),
        several => {
            let numbers: Vec<String> = several.iter().map(|a| a.attempt.to_string()).collect();
            let path = place.given(&run);
            return Err(RunError::SeveralAttempts { path, attempts: numbers.join(", ") });
        }
    };
    let mut trajectory = read(&attempt.path)?;
    trajectory.vocabulary = dumped_vocabulary(&place, &run, attempt);
    let judged = judge(&trajectory, declared);
    let name = run.canonicalize().unwrap_or(run.clone());
    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let given = place.given(&run).display().to_string();
    Ok(TrajectoryReport::new(given, name, attempt.attempt, &trajectory, judged))
}

/// Classes of the head, as the first dumped step that has one says.
fn dumped_vocabulary(place: &Place, run: &Path, attempt: &AttemptDir) -> Option<u64> {
    let first = attempt.steps().ok()?.into_iter().next()?;
    place.bring(&first, |name| name == MANIFEST).ok()?;
    let number = Some(attempt.attempt.0);
    let selection = Selection { run: None, attempt: number, step: Some(first.step.0) };
    let dump = dump::open(run, &selection).ok()?;
    let head = dump.manifest.head.as_ref()?;
    let of_k = || {
        let k = dump.tensors().values().find(|info| info.role == Some(Role::K))?;
        k.shape.get(usize::from(head.k_layout == KLayout::Dv)).copied()
    };
    head.valid_vocab.or_else(of_k)
}
