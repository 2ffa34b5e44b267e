//! The report as one screen of plain text, at most 100 columns wide.

use std::fmt::Write;

use super::against;
use super::algebra;
use super::causes;
use super::measured;
use super::schema::{ComparisonReport, KernelReport, Report, StageReport, Verdict};
use super::seen;
use super::step_against;
use super::step_checks;
use crate::head::sources::by_source;
use crate::number::{bytes, count, error, plural, ratio, scale, short};
use crate::replay::coverage::Coverage;
use crate::replay::outcome::{NotChecked, Status};

/// Most columns of a line.
pub const WIDTH: usize = 100;

/// A row of k counts as a frequent label if this many tokens have it as label.
const FREQUENT: u32 = 16;

/// The first lines of the report up to the table of stages, which are known before the search for
/// causes.
pub fn first(report: &Report) -> String {
    let mut out = String::new();
    head(&mut out, report);
    if !report.stages.is_empty() {
        stages(&mut out, &report.stages);
    }
    out
}

/// The whole report.
pub fn render(report: &Report) -> String {
    let mut out = first(report);
    if let Some(step) = &report.algebra {
        algebra::render(&mut out, step, "step      ");
    }
    if let Some(against) = &report.against {
        if let Some(step) = &against.algebra {
            algebra::render(&mut out, step, "other step ");
        }
        if let Some(apart) = &against.step {
            step_against::render(&mut out, apart);
        }
    }
    if report.dump.head.starts_with("xent_logits") {
        measured::gradcheck(&mut out, &report.stages);
    }
    if let Some(against) = &report.against {
        against::render(&mut out, against);
    }
    kernels(&mut out, &report.kernels);
    seen::render(&mut out, &report.stages);
    grad_norm(&mut out, report);
    for finding in &report.findings {
        wrap(&mut out, "found     ", finding);
    }
    step_checks::render(&mut out, &report.checks, "");
    if let Some(against) = &report.against {
        step_checks::render(&mut out, &against.checks, "other run: ");
    }
    unchecked(&mut out, &report.not_checked);
    out.push('\n');
    causes::variants(&mut out, &report.variants);
    causes::contradictions(&mut out, &report.contradictions);
    causes::declaration(&mut out, report.other_declaration.as_ref());
    causes::render(&mut out, &report.causes);
    wrap(&mut out, "", &verdict(report));
    out
}

/// Writes what the user's kernels do that they must not do.
fn kernels(out: &mut String, kernels: &[KernelReport]) {
    for kernel in kernels {
        let said = match kernel.findings.is_empty() {
            true => "in four runs between guards nothing that it must not do".into(),
            false => kernel.findings.join("; "),
        };
        wrap(out, "kernel    ", &format!("{}: {said}", kernel.name));
    }
}

/// Writes what was not checked, grouped by reason.
fn unchecked(out: &mut String, items: &[NotChecked]) {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for item in items {
        match reasons.iter_mut().find(|(why, _)| *why == item.why) {
            Some((_, what)) => what.push(&item.what),
            None => reasons.push((&item.why, vec![&item.what])),
        }
    }
    for (why, what) in reasons {
        wrap(out, "unchecked ", &format!("{}: {why}", what.join(", ")));
    }
}

fn head(out: &mut String, report: &Report) {
    let dump = &report.dump;
    let run =
        format!("{}, attempt {}, step {} ({})", dump.run, dump.attempt, dump.step, dump.ranks);
    wrap(out, "run       ", &run);
    let size = format!("{}, {}", plural(dump.shards, "shard"), bytes(dump.bytes));
    wrap(out, "dump      ", &format!("{}; {size}; {}", dump.state, dump.proof()));
    if let Some(trigger) = &dump.trigger {
        wrap(out, "trigger   ", trigger);
    }
    if let Some(selection) = &dump.selection {
        wrap(out, "selection ", selection);
    }
    wrap(out, "head      ", &dump.head);
    let sources = by_source(&dump.head_items);
    if !sources.is_empty() && !report.stages.is_empty() {
        wrap(out, "          ", &sources);
    }
    if let Some(device) = &report.device {
        wrap(out, "device    ", &device.sentence());
    }
    if let Some(against) = &report.against {
        let other = &against.dump;
        let run = format!(
            "{}, attempt {}, step {} ({})",
            other.run, other.attempt, other.step, other.ranks
        );
        wrap(out, "against   ", &run);
    }
    out.push('\n');
}

fn stages(out: &mut String, stages: &[StageReport]) {
    let _ = writeln!(
        out,
        "{:<13}{:<6}{:>8} {:>8} {:>6}  {:<17}{:>10} {:>10}  where",
        "stage", "status", "error", "floor", "ratio", "worst element", "captured", "reference"
    );
    let first = stages.iter().position(|stage| stage.status == Status::Fail);
    for (at, stage) in stages.iter().enumerate() {
        match &stage.worst {
            Some(worst) => {
                compared(out, stage, worst);
                if first == Some(at) {
                    measured::render(out, worst);
                }
            }
            None if stage.status == Status::Skip => {}
            None => {
                let _ = writeln!(
                    out,
                    "{:<13}{:<6} input: {}",
                    stage.name,
                    word(stage.status),
                    stage.reason
                );
            }
        }
    }
    let skipped: Vec<&str> =
        stages.iter().filter(|s| s.status == Status::Skip).map(|s| s.name).collect();
    wrap(out, "skipped   ", &skipped.join(" "));
    out.push('\n');
}

fn compared(out: &mut String, stage: &StageReport, worst: &ComparisonReport) {
    let value = |x: Option<f64>| x.map(short).unwrap_or_default();
    let index = worst.worst_index.map(|(row, column)| format!("[{row}, {column}]"));
    let _ = writeln!(
        out,
        "{:<13}{:<6}{:>8} {:>8} {:>6}  {:<17}{:>10} {:>10}  {}",
        stage.name,
        word(stage.status),
        error(worst.error),
        error(worst.floor),
        ratio(worst.ratio),
        index.unwrap_or_default(),
        value(worst.worst_captured),
        value(worst.worst_reference),
        place(worst.microbatch, worst.rank),
    );
    if stage.status == Status::Fail {
        evidence(out, stage, worst);
    }
}

/// Writes why a stage fails, and in which comparisons and rows.
fn evidence(out: &mut String, stage: &StageReport, worst: &ComparisonReport) {
    let indent = "             ";
    wrap(out, indent, &stage.reason);
    let failing = stage.failing.len();
    if stage.comparisons > 1 {
        wrap(
            out,
            indent,
            &format!(
                "in {failing} of {} comparisons over microbatches and ranks",
                stage.comparisons
            ),
        );
    }
    if !worst.worst_rows.is_empty() {
        let rows: Vec<String> = worst
            .worst_rows
            .iter()
            .take(6)
            .map(|(row, _, x)| format!("{row} ({}x)", ratio(*x)))
            .collect();
        wrap(out, indent, &format!("worst rows, error over floor: {}", rows.join(", ")));
    }
    let sum = |from: u32, to: u32| {
        let classes = worst.by_hits.iter().filter(|c| (from..to).contains(&c.hits_from));
        classes.fold((0u64, 0.0, 0.0), |(n, e, x), c| {
            (n + c.rows, e + c.error_energy, x + c.expected_energy)
        })
    };
    let (rare, frequent) = (sum(1, FREQUENT), sum(FREQUENT, u32::MAX));
    if frequent.1 > 0.0 {
        let all = rare.1 + frequent.1 + sum(0, 1).1;
        let over = |(_, e, x): (u64, f64, f64)| {
            if x > 0.0 { ratio((e / x).sqrt()) } else { "-".into() }
        };
        let text = format!(
            "rows that are a label {FREQUENT} times or more: {} rows, {:.1} % of the error, {}x the floor; rows with fewer hits {}x",
            count(frequent.0),
            100.0 * frequent.1 / all,
            over(frequent),
            over(rare),
        );
        wrap(out, indent, &text);
    }
    if worst.slope.abs() > 1e-3 {
        wrap(out, indent, &format!("scale off by {}", scale(worst.slope)));
    }
}

fn grad_norm(out: &mut String, report: &Report) {
    let other = report.against.as_ref().and_then(|against| against.grad_norm.captured);
    for line in super::norm::lines(&report.grad_norm, other) {
        wrap(out, "grad_norm ", &line);
    }
    let gap = report.against.as_ref().and_then(|against| against.norm_gap.as_ref());
    for line in gap.map(super::norm::pair).unwrap_or_default() {
        wrap(out, "grad_norm ", &line);
    }
}

/// The verdict, in one sentence.
pub fn verdict(report: &Report) -> String {
    match (&report.verdict, &report.first_divergence) {
        (Verdict::Misdeclared, _) => {
            let why = report.reasons.iter().find(|reason| reason.verdict == Verdict::Misdeclared);
            let what =
                why.map_or("the declaration does not describe the job", |why| why.what.as_str());
            format!("MISDECLARED: {what}.")
        }
        (Verdict::Diverged, Some(first)) => {
            let place = match place(first.microbatch, first.rank) {
                text if text.is_empty() => String::new(),
                text => format!(" ({text})"),
            };
            let run = if report.against.is_some() {
                format!(" in run {}", first.run)
            } else {
                String::new()
            };
            format!(
                "DIVERGED at {}{}{run}{place}: {}.",
                first.stage,
                meaning(&first.stage),
                first.reason
            )
        }
        (verdict, _) if report.against.is_some() && report.first_divergence.is_none() => {
            against::verdict(report, *verdict)
        }
        (Verdict::Agreed, _) => {
            let loose = report.stages.iter().filter(|stage| stage.status == Status::Warn);
            let loose: Vec<&str> = loose.map(|stage| stage.name).collect();
            let only = match &loose[..] {
                [] => String::new(),
                names => format!(
                    ", {} less closely than is possible (unchecked, above)",
                    names.join(" and ")
                ),
            };
            let (head, mut but) = report.coverage.as_ref().map(covered).unwrap_or_default();
            if report.not_checked.iter().any(|item| item.what == algebra::NO_HEAD) {
                but += &format!("; {} was not judged (unchecked, above)", algebra::NO_HEAD);
            }
            if !report.contradictions.is_empty() {
                but += "; what is declared by hand contradicts the job (declared, above)";
            }
            let step = report.algebra.as_ref().map(algebra::covered).unwrap_or_default();
            let both = [head, step].into_iter().filter(|much| !much.is_empty());
            let much = both.collect::<Vec<_>>().join(" and on ");
            format!(
                "AGREED on {much}: what was compared is what the declared precision must give{only}{but}."
            )
        }
        _ => {
            // Reasons about unusable tensors are left out: the report already names these tensors
            // above.
            let said =
                report.reasons.iter().filter(|reason| !reason.what.starts_with("what depends on"));
            let said: Vec<&str> = said.map(|reason| &reason.what[..]).collect();
            if !said.is_empty() {
                return format!("INCOMPLETE: {}.", said.join("; "));
            }
            "INCOMPLETE: no verdict is given on what depends on the missing or altered parts above."
                .into()
        }
    }
}

/// How many stages the verdict covers, and which ones it does not cover, or only in part.
fn covered(coverage: &Coverage) -> (String, String) {
    let much = format!("{} of {}", coverage.judged, plural(coverage.of as u64, "stage"));
    let mut left: Vec<&str> = coverage.left_out.iter().map(|left| left.stage.name()).collect();
    left.extend(coverage.narrowed.iter().map(|stage| stage.name()));
    left.dedup();
    let but = match left.is_empty() {
        true => String::new(),
        false => format!("; {} not, or not all of it (unchecked, above)", left.join(", ")),
    };
    (much, but)
}

fn meaning(stage: &str) -> &'static str {
    match stage {
        "dk_label" => ", the label part of dk",
        "dk_lse" => ", the log-sum-exp part of dk",
        "dq_label" => ", the label part of dq",
        "dq_lse" => ", the log-sum-exp part of dq",
        "accumulate" => ", the sum over microbatches",
        "reduce" => ", the sum over ranks",
        _ => "",
    }
}

pub(super) fn place(microbatch: Option<u32>, rank: Option<u32>) -> String {
    let microbatch = microbatch.map(|mb| format!("mb {mb}"));
    let rank = rank.map(|rank| format!("rank {rank}"));
    [microbatch, rank].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

pub(super) fn word(status: Status) -> &'static str {
    match status {
        Status::Pass => "pass",
        Status::Warn => "warn",
        Status::Fail => "FAIL",
        Status::Skip => "skip",
    }
}

/// Writes text after a label; lines break at spaces and are indented by the width of the label.
pub(super) fn wrap(out: &mut String, label: &str, text: &str) {
    let room = WIDTH - label.len();
    let mut lead = label.to_string();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > room {
            let _ = writeln!(out, "{lead}{line}");
            lead = " ".repeat(label.len());
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(out, "{lead}{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_continued_under_itself_and_no_line_is_wider_than_the_screen() {
        let mut out = String::new();
        wrap(&mut out, "unchecked ", &"word ".repeat(60));
        assert!(out.lines().count() > 2);
        assert!(out.lines().all(|line| line.len() <= WIDTH));
        assert!(out.lines().skip(1).all(|line| line.starts_with("          ")));
    }
}
