//! The report of `replay checks`: one JSON object, schema `backtape.checks/1`, and text of at most
//! 100 columns.

use std::fmt::Write;

use serde::Serialize;

use super::text::{place, wrap};
use crate::checks::{
    CheckSkipped, CheckSummary, Checked, Finding, GradientStatistics, Severity, Status, Subject,
    is_damage,
};
use crate::number::{plural, short};

/// Name and version of the schema.
pub const SCHEMA: &str = "backtape.checks/1";

/// Gradients shown as text.
const SHOWN: usize = 24;

/// The verdict of all checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChecksVerdict {
    /// Nothing at fail level, and all of the dump could be read.
    Passed,
    /// A finding at fail level.
    Failed,
    /// Nothing at fail level, and a part of the dump is lost or altered.
    Incomplete,
}

/// One step that was checked.
#[derive(Clone, Debug, Serialize)]
pub struct CheckedStep {
    /// The step's number.
    pub step: u64,
    /// `committed`, or why it is partial.
    pub state: String,
    /// Attempts that have the step but no shard of it, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<String>,
    /// Shards listed.
    pub shards: u64,
    /// Tensors listed.
    pub tensors: u64,
    /// What is lost or altered of the step, in the sentences of verification.
    pub damage: Vec<String>,
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct ChecksReport {
    pub schema: &'static str,
    pub version: &'static str,
    pub verdict: ChecksVerdict,
    pub path: String,
    pub run: String,
    pub attempts: Vec<u32>,
    pub steps: Vec<CheckedStep>,
    #[serde(flatten)]
    pub checked: Checked,
}

impl ChecksReport {
    /// The report of these steps and of what the checks found in them.
    pub fn new(path: String, subjects: &[Subject<'_>], checked: Checked) -> ChecksReport {
        let steps: Vec<CheckedStep> = subjects.iter().map(step).collect();
        let damaged = steps.iter().any(|step| !step.damage.is_empty());
        let verdict = match (checked.failed(), damaged) {
            (true, _) => ChecksVerdict::Failed,
            (false, true) => ChecksVerdict::Incomplete,
            (false, false) => ChecksVerdict::Passed,
        };
        let mut attempts: Vec<u32> =
            subjects.iter().map(|subject| subject.dump.attempt.0).collect();
        attempts.dedup();
        let run = subjects.first().map(|subject| subject.dump.run.to_string()).unwrap_or_default();
        let (schema, version) = (SCHEMA, backtape::VERSION);
        ChecksReport { schema, version, verdict, path, run, attempts, steps, checked }
    }
}

fn step(subject: &Subject<'_>) -> CheckedStep {
    let (dump, proof) = (subject.dump, subject.proof);
    let state = dump.state.to_string();
    let damage = proof.findings.iter().filter(|finding| is_damage(finding));
    CheckedStep {
        step: dump.step.0,
        state,
        passed_over: dump.passed_over(),
        shards: proof.shards,
        tensors: proof.tensors.len() as u64,
        damage: damage.map(|finding| finding.sentence.clone()).collect(),
    }
}

/// The report as text.
pub fn render(report: &ChecksReport) -> String {
    let mut out = String::new();
    let attempts: Vec<String> = report.attempts.iter().map(u32::to_string).collect();
    let steps = plural(report.steps.len() as u64, "step");
    let run = format!("{}, attempt {}, {steps}", report.run, attempts.join(" and "));
    wrap(&mut out, "run       ", &run);
    for step in &report.steps {
        let (shards, tensors) = (plural(step.shards, "shard"), plural(step.tensors, "tensor"));
        wrap(
            &mut out,
            "dump      ",
            &format!("step {}: {}; {shards} of {tensors}", step.step, step.state),
        );
        for sentence in &step.passed_over {
            wrap(&mut out, "note      ", sentence);
        }
    }
    out.push('\n');
    let _ = writeln!(out, "{:<14}{:<11}{:>9}  about", "check", "status", "looked at");
    report.checked.checks.iter().for_each(|check| summary(&mut out, check));
    if !report.checked.findings.is_empty() {
        out.push('\n');
    }
    report.checked.findings.iter().for_each(|one_finding| finding(&mut out, one_finding));
    statistics(&mut out, &report.checked.statistics);
    unchecked(&mut out, &report.checked.not_checked);
    out.push('\n');
    wrap(&mut out, "", &verdict(report));
    out
}

fn summary(out: &mut String, check: &CheckSummary) {
    let status = match check.status {
        Status::Pass => "pass",
        Status::Warn => "warn",
        Status::Fail => "FAIL",
        Status::NotChecked => "unchecked",
    };
    let _ = writeln!(out, "{:<14}{status:<11}{:>9}  {}", check.check, check.looked_at, check.about);
}

fn finding(out: &mut String, finding: &Finding) {
    let word = match finding.severity {
        Severity::Fail => "FAIL      ",
        Severity::Warn => "warn      ",
        Severity::Note => "note      ",
    };
    let cause = finding.cause.map(|cause| format!(" [{cause}]")).unwrap_or_default();
    let step = finding.place.step.map(|step| format!(" step {step}")).unwrap_or_default();
    let rank = match finding.place.ranks.as_slice() {
        [rank] => Some(*rank),
        _ => None,
    };
    let in_microbatch = match place(finding.place.microbatch, rank) {
        text if text.is_empty() => text,
        text => format!(" {text}"),
    };
    wrap(
        out,
        word,
        &format!("{}{cause}{step}{in_microbatch}: {}", finding.check, finding.evidence),
    );
    if finding.severity != Severity::Note {
        wrap(out, "          ", &finding.advice);
    }
}

/// Writes the statistics of the first [`SHOWN`] gradients; the JSON has all.
fn statistics(out: &mut String, all: &[GradientStatistics]) {
    if all.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "\n{:<36}{:>10} {:>10} {:>8} {:>10}  where",
        "gradient", "norm", "max", "zeros", "nonfinite"
    );
    for gradient in all.iter().take(SHOWN) {
        let when = gradient.when.map(|when| format!("{when:?}").to_lowercase()).unwrap_or_default();
        let where_recorded = place(gradient.microbatch, gradient.rank);
        let where_recorded = format!("step {} {where_recorded}", gradient.step);
        let name: String = format!("{} {when}", gradient.tensor).chars().take(35).collect();
        let line = format!(
            "{name:<36}{:>10} {:>10} {:>6.1} % {:>8.1} %  {where_recorded}",
            short(gradient.norm),
            short(gradient.max),
            100.0 * gradient.zero_share,
            100.0 * gradient.nonfinite_share,
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
    if all.len() > SHOWN {
        let _ = writeln!(out, "and {} more: --json FILE has all", all.len() - SHOWN);
    }
    out.push('\n');
}

/// Writes what was not checked, grouped by reason.
fn unchecked(out: &mut String, items: &[CheckSkipped]) {
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for skipped in items {
        let why = format!("{}: {}", skipped.check, skipped.item.why);
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, what)) => what.push(&skipped.item.what),
            None => reasons.push((why, vec![&skipped.item.what])),
        }
    }
    for (why, what) in reasons {
        wrap(out, "unchecked ", &format!("{} ({why})", what.join(", ")));
    }
}

fn verdict(report: &ChecksReport) -> String {
    let count = |severity| {
        report.checked.findings.iter().filter(|finding| finding.severity == severity).count() as u64
    };
    let (fails, warnings) = (count(Severity::Fail), count(Severity::Warn));
    let warned = plural(warnings, "warning");
    match report.verdict {
        ChecksVerdict::Failed => {
            format!("FAILED: {} that chance cannot explain, {warned}.", plural(fails, "finding"))
        }
        ChecksVerdict::Incomplete => format!(
            "INCOMPLETE: nothing failed, {warned}; what is damaged above could not be checked."
        ),
        ChecksVerdict::Passed => {
            let looked = report.checked.checks.iter().filter(|c| c.status != Status::NotChecked);
            let (looked, all) = (looked.count(), report.checked.checks.len());
            format!("PASSED: {looked} of {all} checks had something to look at; {warned}.")
        }
    }
}
