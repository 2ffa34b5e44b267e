//! `replay checks`, `precision` and `trajectory`: from parsed arguments to text and an exit code.

use super::args::{DumpArguments, PrecisionArguments, TrajectoryArguments};
use super::error::CommandError;
use super::exit;
use super::progress::Bar;
use super::run::selection;
use super::written::Json;
use crate::dump::Selection;
use crate::postmortem::{checks_report_watched, precision_report, trajectory_report};
use crate::precision::{self, Gradients};
use crate::report::checked::ChecksVerdict;
use crate::report::trajectory::TrajectoryVerdict;
use crate::report::{checked, precision as shown, trajectory as judged};
use crate::trajectory::Declared;

pub(super) fn checks(arguments: &DumpArguments) -> Result<(String, i32), CommandError> {
    let written = Json::asked(arguments.json.as_deref())?;
    let bar = Bar::new(arguments.quiet);
    let report = checks_report_watched(&arguments.dump, &selection(&arguments.which), &bar)?;
    bar.finish();
    let code = match report.verdict {
        ChecksVerdict::Passed => exit::AGREED,
        ChecksVerdict::Failed => exit::DIVERGED,
        ChecksVerdict::Incomplete => exit::INCOMPLETE,
    };
    let json = || serde_json::to_string_pretty(&report).expect("plain data");
    Ok((written.output(json, || checked::render(&report))?, code))
}

pub(super) fn precision(arguments: &PrecisionArguments) -> Result<(String, i32), CommandError> {
    let written = Json::asked(arguments.dump.json.as_deref())?;
    let path = &arguments.dump.dump;
    let tokens = arguments.tokens.map(|n| n as usize);
    let options = precision::Options { microbatch: arguments.microbatch, tokens };
    let report = precision_report(path, &selection(&arguments.dump.which), &options)?;
    let code = match report.gradients {
        Gradients::Diverge(_) => exit::DIVERGED,
        _ if report.nonfinite > 0 || report.check.is_none() => exit::INCOMPLETE,
        _ => exit::AGREED,
    };
    let json = || serde_json::to_string_pretty(&report).expect("plain data");
    Ok((written.output(json, || shown::render(&report))?, code))
}

pub(super) fn trajectory(arguments: &TrajectoryArguments) -> Result<(String, i32), CommandError> {
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
    Ok((written.output(json, || judged::render(&report))?, code))
}
