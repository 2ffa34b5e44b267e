//! The verdict of a precision report as one sentence.
use backtape::nan::by_size;

use super::{Gradients, Precision, SumReport};
use crate::number::error;

/// Says what may explain a failed gradient check, and what cannot.
pub(super) fn verdict(report: &Precision) -> String {
    let mut parts = Vec::new();
    if report.nonfinite > 0 {
        parts.push(format!(
            "{} of {} softmax denominators are not finite: find where they come from with `replay --dump`",
            report.nonfinite, report.tokens.1
        ));
    }
    match report.sums.first() {
        Some(naive) if naive.max.is_finite() => parts.push(summation(report, naive)),
        _ => parts.push("no verdict on summation: no denominator is finite".into()),
    }
    match &report.gradients {
        Gradients::Agree(names) => parts.push(format!(
            "inputs consistent, within noise: the captured {names} are what the declared precision must give"
        )),
        Gradients::Diverge(stage) => parts.push(format!(
            "the captured gradients diverge from the f64 reference at {stage}: `replay --dump` says by how much"
        )),
        Gradients::NotRecorded => {
            parts.push("no captured gradient to compare: the dump holds neither dq nor dk".into());
        }
        Gradients::NotJudged(why) => {
            parts.push(format!("the captured gradients were not judged: {why}"));
        }
    }
    parts.join("; ") + "."
}

/// Summation may be the cause only if its error is larger than that of the gradient check itself.
fn summation(report: &Precision, naive: &SumReport) -> String {
    let size = error(naive.max);
    let moves = format!(
        "naive f32 errs by {size} at most, which moves a gradient by at most {size} of itself"
    );
    let Some(check) = &report.check else {
        return format!("{moves}; no gradient check to hold it against");
    };
    if !check.error.is_finite() {
        return format!("{moves}; the gradient check gave no number");
    }
    let step = format!("{:e}", check.step);
    let off = percent(check.error);
    let instead = match (check.best_step, check.best_error) {
        (Some(h), Some(left)) if left < check.error => {
            format!("use h = {}, which leaves {}", error(h), percent(left))
        }
        _ => "no other step does much better: check in f64".to_string(),
    };
    if naive.max <= check.error {
        format!(
            "summation is not the cause: {moves}; a gradient check with eps = {step} on an f32 loss errs by {off} by itself; {instead}"
        )
    } else {
        let better = report.sums.iter().skip(1).min_by(|a, b| by_size(&a.max, &b.max));
        let better =
            better.map_or(String::new(), |sum| format!(", {} by {}", sum.method, error(sum.max)));
        format!(
            "summation may be the cause: naive f32 errs by {size}{better}; a gradient check with eps = {step} errs by {off} by itself"
        )
    }
}

/// A share in percent with few digits: 41 %, 0.35 %, 2.1e-6 %.
pub(super) fn percent(share: f64) -> String {
    match 100.0 * share {
        x if x >= 10.0 => format!("{x:.0} %"),
        x if x >= 0.01 => format!("{x:.2} %"),
        x => format!("{x:.1e} %"),
    }
}
