//! `replay checks`: from parsed arguments to findings and an exit code.

use std::path::Path;

use super::args::DumpArguments;
use super::error::RunError;
use super::exit;
use super::progress::Bar;
use super::run::selection;
use super::written::Json;
use crate::checks::{Subject, check};
use crate::dump::{self, Selection, StepDump};
use crate::report::checked::{ChecksReport, ChecksVerdict, render};
use crate::verify::Verification;

pub(super) fn run(arguments: &DumpArguments) -> Result<(String, i32), RunError> {
    let written = Json::asked(arguments.json.as_deref())?;
    let bar = Bar::new(arguments.quiet);
    let report = report_with(&arguments.dump, &selection(&arguments.which), &bar)?;
    bar.finish();
    let code = match report.verdict {
        ChecksVerdict::Passed => exit::AGREED,
        ChecksVerdict::Failed => exit::DIVERGED,
        ChecksVerdict::Incomplete => exit::INCOMPLETE,
    };
    let json = || serde_json::to_string_pretty(&report).expect("plain data");
    Ok((written.output(json, || render(&report))?, code))
}

/// What `replay checks` finds in one step, or in every step of the run where the
/// selection names none.
pub fn checks_report(path: &Path, selection: &Selection) -> Result<ChecksReport, RunError> {
    report_with(path, selection, &Bar::new(true))
}

fn report_with(path: &Path, selection: &Selection, bar: &Bar) -> Result<ChecksReport, RunError> {
    let steps = match selection.step {
        Some(step) => vec![step],
        None => dump::steps(path, selection)?.iter().map(|step| step.0).collect(),
    };
    let open = |step: u64| dump::open(path, &Selection { step: Some(step), ..selection.clone() });
    let dumps: Vec<StepDump> = steps.into_iter().map(open).collect::<Result<_, _>>()?;
    let proofs: Vec<Verification> = dumps.iter().map(|dump| bar.verify(dump)).collect();
    let subjects = dumps.iter().zip(&proofs).map(|(dump, proof)| Subject { dump, proof });
    let subjects: Vec<Subject<'_>> = subjects.collect();
    let checked = check(&subjects);
    Ok(ChecksReport::new(path.display().to_string(), &subjects, checked))
}
