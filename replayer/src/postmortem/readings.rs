//! What a dump tells without a replay: its checks, its scalars, what finite precision does to its
//! numbers, and what a user's own functions are called with.

use std::path::Path;

use backtape::head::KLayout;
use backtape::role::Role;
use backtape::scalars;
use backtape::shard::TensorKey;
use backtape::store::AttemptDir;
use backtape::store::layout::MANIFEST;

use super::error::RunError;
use super::settings::{Settings, Watch, proved};
use super::summary::Opened;
use crate::checks::{Subject, check};
use crate::dump::{self, Place, Selection, StepDump};
use crate::head::HeadStep;
use crate::kernels::NoProgress;
use crate::precision::{self, Precision};
use crate::replay::unit_inputs::{UnitInputs, unit_inputs};
use crate::report::checked::ChecksReport;
use crate::report::trajectory::TrajectoryReport;
use crate::trajectory::{Declared, ReadError, judge, read};
use crate::verify::{Verification, verify};

/// What `replay checks` finds in one step, or in every step of the run where the
/// selection names none.
pub fn checks_report(path: &Path, selection: &Selection) -> Result<ChecksReport, RunError> {
    checks_report_watched(path, selection, &NoProgress)
}

/// The same while somebody watches.
pub fn checks_report_watched(
    path: &Path,
    selection: &Selection,
    watch: &dyn Watch,
) -> Result<ChecksReport, RunError> {
    let steps = match selection.step {
        Some(step) => vec![step],
        None => dump::steps(path, selection)?.iter().map(|step| step.0).collect(),
    };
    let open = |step: u64| dump::open(path, &Selection { step: Some(step), ..selection.clone() });
    let dumps: Vec<StepDump> = steps.into_iter().map(open).collect::<Result<_, _>>()?;
    let proofs: Vec<Verification> = dumps.iter().map(|dump| proved(dump, watch)).collect();
    let subjects = dumps.iter().zip(&proofs).map(|(dump, proof)| Subject { dump, proof });
    let subjects: Vec<Subject<'_>> = subjects.collect();
    let checked = check(&subjects);
    Ok(ChecksReport::new(path.display().to_string(), &subjects, checked))
}

/// What finite precision does on the data of a step.
pub fn precision_report(
    path: &Path,
    selection: &Selection,
    options: &precision::Options,
) -> Result<Precision, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = verify(&dump, &|_| {});
    let wrong = |source| RunError::Precision { path: path.into(), source: Box::new(source) };
    let unusable = |key: &TensorKey| proof.unusable(key).map(str::to_string);
    let step = HeadStep::new(&dump, None, unusable).map_err(|source| wrong(source.into()))?;
    precision::precision(&step, options).map_err(wrong)
}

/// What a user's own functions are called with, unit by unit.
pub fn variant_inputs(path: &Path, selection: &Selection) -> Result<Vec<UnitInputs>, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = verify(&dump, &|_| {});
    let opened = Opened { path, dump: &dump, proof: &proof };
    let step = opened.head(&Settings::default())?;
    unit_inputs(&step).map_err(|source| opened.wrong(source))
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
    let attempts_with_scalars: Vec<&AttemptDir> = attempts.iter().filter(holds).collect();
    let attempt = match attempts_with_scalars.as_slice() {
        [attempt] => *attempt,
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
