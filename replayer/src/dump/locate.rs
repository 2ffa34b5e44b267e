//! Finds the step that a path and a selection name. It never guesses: where several fit, the error
//! lists them with the option that chooses one.
//!
//! Only names are read here, not the contents of the step.

use std::io;
use std::path::{Path, PathBuf};

use backtape::identity::{Attempt, Step};
use backtape::store::layout::{JOURNAL, RUN_RECORD};
use backtape::store::{AttemptDir, StepDir};

use super::error::{AttemptState, OpenError};
use super::{Place, Selection, run_record, uncommitted};

/// The directories that were found.
pub(super) struct Located {
    pub(super) run: PathBuf,
    pub(super) attempt: AttemptDir,
    pub(super) step: StepDir,
    /// Attempts that have the step but no shard of it.
    pub(super) passed_over: Vec<Attempt>,
}

/// An attempt and a step in it.
type StepOfAttempt = (AttemptDir, StepDir);

/// Every step of the run, in the attempts that the selection allows.
pub(super) fn steps(place: &Place, selection: &Selection) -> Result<Vec<Step>, OpenError> {
    let (run, steps_of_attempts) = steps_of_attempts(place.path(), selection)?;
    let steps_of_attempts = with_shards(place, &steps_of_attempts)?;
    let mut steps: Vec<Step> = steps_of_attempts.iter().map(|(_, dir)| dir.step).collect();
    steps.sort_unstable();
    steps.dedup();
    if steps.is_empty() { Err(OpenError::NoSteps { path: run }) } else { Ok(steps) }
}

/// The run's directory, and the attempts that the selection allows.
pub(super) fn attempts(
    path: &Path,
    selection: &Selection,
) -> Result<(PathBuf, Vec<AttemptDir>), OpenError> {
    let run = find_run(path, selection.run.as_deref())?;
    let attempts = choose_attempts(&run, selection.attempt.map(Attempt))?;
    Ok((run, attempts))
}

/// The run's directory, and the steps in the attempts that the selection allows.
fn steps_of_attempts(
    path: &Path,
    selection: &Selection,
) -> Result<(PathBuf, Vec<StepOfAttempt>), OpenError> {
    let (run, attempts) = attempts(path, selection)?;
    let mut steps_of_attempts = Vec::new();
    for attempt in attempts {
        let steps = attempt.steps().map_err(read(&attempt.path))?;
        // A directory `step-5` parses as step 5, but the directory of step 5 has leading zeros.
        let steps = steps.into_iter().filter(|step| step.path.is_dir());
        steps_of_attempts.extend(steps.map(|step| (attempt.clone(), step)));
    }
    Ok((run, steps_of_attempts))
}

/// Leaves out attempts that have no shard of these steps, as launches that ended before they
/// recorded anything, unless no attempt has any.
fn with_shards(
    place: &Place,
    steps_of_attempts: &[StepOfAttempt],
) -> Result<Vec<StepOfAttempt>, OpenError> {
    let mut kept: Vec<StepOfAttempt> = Vec::new();
    for of_attempt in steps_of_attempts.chunk_by(|a, b| a.0.attempt == b.0.attempt) {
        for (_, step) in of_attempt {
            if !place.shard_files(step).map_err(read(&step.path))?.is_empty() {
                kept.extend_from_slice(of_attempt);
                break;
            }
        }
    }
    Ok(if kept.is_empty() { steps_of_attempts.to_vec() } else { kept })
}

pub(super) fn locate(place: &Place, selection: &Selection) -> Result<Located, OpenError> {
    let (run, mut steps_of_attempts) = steps_of_attempts(place.path(), selection)?;
    let wanted = selection.step.map(Step);
    let step = match choose_step(&run, &with_shards(place, &steps_of_attempts)?, wanted) {
        // A step that was named explicitly is opened even if it holds no shards.
        Err(OpenError::NoSuchStep { .. }) => choose_step(&run, &steps_of_attempts, wanted)?,
        chosen => chosen?,
    };
    steps_of_attempts.retain(|(_, dir)| dir.step == step);
    let kept = with_shards(place, &steps_of_attempts)?;
    let is_kept = |attempt| kept.iter().any(|(kept, _)| kept.attempt == attempt);
    let passed_over = steps_of_attempts.iter().map(|(attempt, _)| attempt.attempt);
    let passed_over = passed_over.filter(|&attempt| !is_kept(attempt)).collect();
    match <[_; 1]>::try_from(kept) {
        Ok([(attempt, step)]) => Ok(Located { run, attempt, step, passed_over }),
        Err(several) => Err(OpenError::SeveralAttempts {
            path: run,
            step,
            attempts: several
                .iter()
                .map(|(attempt, step)| AttemptState {
                    attempt: attempt.attempt,
                    committed: uncommitted(place, step, attempt.attempt).is_none(),
                })
                .collect(),
        }),
    }
}

fn find_run(path: &Path, wanted: Option<&str>) -> Result<PathBuf, OpenError> {
    choose_run(path, all_runs(path)?, wanted)
}

/// Every run of a directory, or the one that is named.
pub(super) fn runs(path: &Path, wanted: Option<&str>) -> Result<Vec<PathBuf>, OpenError> {
    let runs = all_runs(path)?;
    match wanted {
        Some(_) => choose_run(path, runs, wanted).map(|run| vec![run]),
        None => Ok(runs),
    }
}

/// The runs in a store, or the run that `path` itself is; an error if there is none.
fn all_runs(path: &Path) -> Result<Vec<PathBuf>, OpenError> {
    let not_a_dump = |reason: &str| OpenError::NotADump { path: path.into(), found: reason.into() };
    if !path.exists() {
        return Err(not_a_dump("nothing is there"));
    }
    if !path.is_dir() {
        return Err(not_a_dump("it is a file"));
    }
    refuse_inside_of_a_run(path)?;
    if looks_like_run(path).map_err(read(path))? {
        return Ok(vec![path.into()]);
    }
    let mut runs = Vec::new();
    for directory in directories(path).map_err(read(path))? {
        // A directory that cannot be read must not hide the runs beside it.
        if looks_like_run(&directory).unwrap_or(false) {
            runs.push(directory);
        }
    }
    if runs.is_empty() { Err(not_a_dump("no run lies in it")) } else { Ok(runs) }
}

fn choose_run(
    path: &Path,
    mut runs: Vec<PathBuf>,
    wanted: Option<&str>,
) -> Result<PathBuf, OpenError> {
    let names: Vec<String> = runs.iter().map(|run| directory_name(run)).collect();
    if let Some(wanted) = wanted {
        let by_directory = names.iter().position(|name| name == wanted);
        let recorded = || {
            let says = |run: &PathBuf| run_record(run).is_some_and(|r| r.run.as_str() == wanted);
            let same: Vec<usize> = (0..runs.len()).filter(|&i| says(&runs[i])).collect();
            (same.len() == 1).then(|| same[0])
        };
        return match by_directory.or_else(recorded) {
            Some(index) => Ok(runs.swap_remove(index)),
            None => {
                Err(OpenError::NoSuchRun { path: path.into(), wanted: wanted.into(), runs: names })
            }
        };
    }
    match <[_; 1]>::try_from(runs) {
        Ok([run]) => Ok(run),
        Err(_) => Err(OpenError::SeveralRuns { path: path.into(), runs: names }),
    }
}

/// Refuses the directory of a step or of an attempt, which would otherwise be opened as attempt 0
/// of another run.
fn refuse_inside_of_a_run(path: &Path) -> Result<(), OpenError> {
    let Some(parent) = path.canonicalize().ok().and_then(|p| p.parent().map(PathBuf::from)) else {
        return Ok(());
    };
    let name = directory_name(path);
    for (prefix, part, flag) in
        [("step-", "one step", "--step"), ("attempt-", "one attempt", "--attempt")]
    {
        let Some(number) = name.strip_prefix(prefix).and_then(|n| n.parse::<u64>().ok()) else {
            continue;
        };
        if looks_like_run(&parent).unwrap_or(false) {
            return Err(OpenError::InsideARun {
                path: path.into(),
                part,
                run: parent,
                flag: format!("{flag} {number}"),
            });
        }
    }
    Ok(())
}

/// Whether a directory is that of a run, also without run.json: a run that was copied in part can
/// still be salvaged.
fn looks_like_run(path: &Path) -> io::Result<bool> {
    if path.join(RUN_RECORD).is_file() || path.join(JOURNAL).is_file() {
        return Ok(true);
    }
    let inside = directories(path)?;
    Ok(inside.iter().any(|directory| {
        let name = directory_name(directory);
        numbered(&name, "step-").is_some() || numbered(&name, "attempt-").is_some()
    }))
}

/// The attempts to search. Unlike [`AttemptDir::list`] this includes attempts whose run.json and
/// journal are lost, as their shards describe themselves.
fn choose_attempts(run: &Path, wanted: Option<Attempt>) -> Result<Vec<AttemptDir>, OpenError> {
    let inside = directories(run).map_err(read(run))?;
    let names: Vec<String> = inside.iter().map(|path| directory_name(path)).collect();
    let mut attempts: Vec<Attempt> = names
        .iter()
        .filter_map(|name| numbered(name, "attempt-"))
        .filter_map(|n| u32::try_from(n).ok().map(Attempt))
        .filter(|attempt| AttemptDir::of(run, *attempt).path.is_dir() && attempt.0 > 0)
        .collect();
    attempts.push(Attempt(0));
    attempts.sort_unstable();
    attempts.dedup();
    match wanted {
        Some(wanted) if !attempts.contains(&wanted) => {
            Err(OpenError::NoSuchAttempt { path: run.into(), wanted, attempts })
        }
        Some(wanted) => Ok(vec![AttemptDir::of(run, wanted)]),
        None => Ok(attempts.iter().map(|&a| AttemptDir::of(run, a)).collect()),
    }
}

fn choose_step(
    run: &Path,
    steps_of_attempts: &[(AttemptDir, StepDir)],
    wanted: Option<Step>,
) -> Result<Step, OpenError> {
    let mut steps: Vec<Step> = steps_of_attempts.iter().map(|(_, dir)| dir.step).collect();
    steps.sort_unstable();
    steps.dedup();
    let path = run.to_path_buf();
    match (wanted, steps.as_slice()) {
        (Some(wanted), steps) if steps.contains(&wanted) => Ok(wanted),
        (Some(wanted), _) => Err(OpenError::NoSuchStep { path, wanted, steps }),
        (None, []) => Err(OpenError::NoSteps { path }),
        (None, [step]) => Ok(*step),
        (None, _) => Err(OpenError::SeveralSteps { path, steps }),
    }
}

/// The number in `step-00000012`.
fn numbered(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.parse().ok()
}

/// Subdirectories sorted by name, without hidden ones.
fn directories(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        if path.is_dir() && !directory_name(&path).starts_with('.') {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The directory's own name, also of `.` and `..`.
pub(super) fn directory_name(path: &Path) -> String {
    let named = |path: &Path| path.file_name().map(|n| n.to_string_lossy().into_owned());
    named(path).or_else(|| named(&path.canonicalize().ok()?)).unwrap_or_default()
}

fn read(path: &Path) -> impl Fn(io::Error) -> OpenError {
    move |source| OpenError::Read { path: path.into(), source }
}
