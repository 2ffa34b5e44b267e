//! The measures of one comparison as lines of text: those that people know from other tools. They
//! do not affect the verdict.

use super::schema::{ComparisonReport, ScoreClass, StageReport};
use super::text::wrap;
use crate::compare::measures::Summary;
use crate::number::{count, short};

const INDENT: &str = "             ";
/// Most buckets of ulp distances that are named one by one.
const BUCKETS: usize = 5;

/// Writes the measures in three lines, each of which may wrap.
pub(super) fn render(out: &mut String, comparison: &ComparisonReport) {
    wrap(out, INDENT, &sizes(&comparison.measures, comparison.elements));
    wrap(out, INDENT, &ulps(&comparison.measures));
    wrap(out, INDENT, &scores(&comparison.scores));
}

/// Writes the line that gradient checks of cross-entropy kernels print; for heads that start from
/// logits people look for it.
pub(super) fn gradcheck(out: &mut String, stages: &[StageReport]) {
    let measures = |name: &str| {
        let stage = stages.iter().find(|stage| stage.name == name);
        stage.and_then(|stage| stage.worst.as_ref()).map(|comparison| &comparison.measures)
    };
    let mut parts = Vec::new();
    if let Some(loss) = measures("loss") {
        parts.push(format!("loss abs diff {}", short(loss.max_abs)));
    }
    if let Some(logprobs) = measures("logprobs") {
        parts.push(format!("log-probabilities max abs {}", short(logprobs.max_abs)));
    }
    if let Some(dlogits) = measures("dlogits") {
        let (abs, rel) = (short(dlogits.max_abs), short(dlogits.max_rel));
        parts.push(format!("dlogits max abs {abs}, max rel {rel}"));
    }
    if !parts.is_empty() {
        wrap(out, "gradcheck ", &parts.join("; "));
    }
}

fn index_in_words(index: (u64, u64)) -> String {
    format!("[{}, {}]", index.0, index.1)
}

/// Largest differences, cosine, mismatches.
pub(super) fn sizes(summary: &Summary, elements: u64) -> String {
    let mut text = format!("max abs {}", short(summary.max_abs));
    if let Some(worst) = summary.worst {
        text += &format!(" at {}", index_in_words(worst.index));
    }
    text += &format!(", max rel {}", short(summary.max_rel));
    if let Some(index) = summary.max_rel_index {
        text += &format!(" at {}", index_in_words(index));
    }
    let (differ, all) = (count(summary.mismatches), count(elements));
    text += &format!(", cosine {:.9}; {differ} of {all} elements differ", summary.cosine);
    if let Some(first) = summary.first_mismatch {
        let (x, y) = (short(first.captured), short(first.reference));
        text += &format!(", the first at {}: {x} for {y}", index_in_words(first.index));
    }
    text
}

/// Shares of the first buckets one by one, and of all further ones together.
pub(super) fn ulps(summary: &Summary) -> String {
    let all: u64 = summary.ulps.iter().map(|(_, n)| n).sum::<u64>() + summary.sign_or_overflow;
    let share = |n: u64| format!("{:.1} %", 100.0 * n as f64 / all.max(1) as f64);
    let shown = summary.ulps.iter().take(BUCKETS);
    let mut parts: Vec<String> = shown.map(|(name, n)| format!("{name}: {}", share(*n))).collect();
    let beyond: u64 = summary.ulps.iter().skip(BUCKETS).map(|(_, n)| n).sum();
    if beyond > 0 {
        parts.push(format!("more: {}", share(beyond)));
    }
    parts.push(format!("sign or overflow: {}", share(summary.sign_or_overflow)));
    format!("ulp {}", parts.join(", "))
}

/// The counts of each class of scores, with those of a normal distribution in brackets.
fn scores(classes: &[ScoreClass]) -> String {
    let line_of = |class: &ScoreClass| {
        let name = match class.to {
            Some(to) => format!("<{to}"),
            None => format!(">={}", class.from),
        };
        format!("{name} {} ({})", count(class.count), count(class.normal.round() as u64))
    };
    let parts: Vec<String> = classes.iter().map(line_of).collect();
    format!("|error|/sigma (normal): {}", parts.join(", "))
}
