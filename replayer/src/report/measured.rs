//! The measures of one comparison as lines of text: what people know from other
//! tools, beside the verdict and not instead of it.

use super::schema::{ComparisonReport, ScoreClass, StageReport};
use super::text::wrap;
use crate::compare::measures::Summary;
use crate::number::{count, short};

const INDENT: &str = "             ";
/// ULP buckets named one by one.
const BUCKETS: usize = 5;

/// Three lines at most.
pub(super) fn render(out: &mut String, found: &ComparisonReport) {
    wrap(out, INDENT, &sizes(&found.measures, found.elements));
    wrap(out, INDENT, &ulps(&found.measures));
    wrap(out, INDENT, &scores(&found.scores));
}

/// What the gradient check of a cross-entropy kernel prints: for heads on materialised
/// logits it is the line that people look for.
pub(super) fn gradcheck(out: &mut String, stages: &[StageReport]) {
    let of = |name: &str| {
        let stage = stages.iter().find(|stage| stage.name == name);
        stage.and_then(|stage| stage.worst.as_ref()).map(|found| &found.measures)
    };
    let mut parts = Vec::new();
    if let Some(loss) = of("loss") {
        parts.push(format!("loss abs diff {}", short(loss.max_abs)));
    }
    if let Some(logprobs) = of("logprobs") {
        parts.push(format!("log-probabilities max abs {}", short(logprobs.max_abs)));
    }
    if let Some(dlogits) = of("dlogits") {
        let (abs, rel) = (short(dlogits.max_abs), short(dlogits.max_rel));
        parts.push(format!("dlogits max abs {abs}, max rel {rel}"));
    }
    if !parts.is_empty() {
        wrap(out, "gradcheck ", &parts.join("; "));
    }
}

fn at(index: (u64, u64)) -> String {
    format!("[{}, {}]", index.0, index.1)
}

/// Largest differences, cosine, mismatches.
pub(super) fn sizes(found: &Summary, elements: u64) -> String {
    let mut text = format!("max abs {}", short(found.max_abs));
    if let Some(worst) = found.worst {
        text += &format!(" at {}", at(worst.index));
    }
    text += &format!(", max rel {}", short(found.max_rel));
    if let Some(index) = found.max_rel_index {
        text += &format!(" at {}", at(index));
    }
    let (differ, of) = (count(found.mismatches), count(elements));
    text += &format!(", cosine {:.9}; {differ} of {of} elements differ", found.cosine);
    if let Some(first) = found.first_mismatch {
        let (x, y) = (short(first.captured), short(first.reference));
        text += &format!(", the first at {}: {x} for {y}", at(first.index));
    }
    text
}

/// Shares of the first buckets, and all beyond them.
pub(super) fn ulps(found: &Summary) -> String {
    let all: u64 = found.ulps.iter().map(|(_, n)| n).sum::<u64>() + found.sign_or_overflow;
    let share = |n: u64| format!("{:.1} %", 100.0 * n as f64 / all.max(1) as f64);
    let shown = found.ulps.iter().take(BUCKETS);
    let mut parts: Vec<String> = shown.map(|(name, n)| format!("{name}: {}", share(*n))).collect();
    let beyond: u64 = found.ulps.iter().skip(BUCKETS).map(|(_, n)| n).sum();
    if beyond > 0 {
        parts.push(format!("more: {}", share(beyond)));
    }
    parts.push(format!("sign or overflow: {}", share(found.sign_or_overflow)));
    format!("ulp {}", parts.join(", "))
}

/// Counts beside those of a normal distribution.
fn scores(classes: &[ScoreClass]) -> String {
    let one = |class: &ScoreClass| {
        let name = match class.to {
            Some(to) => format!("<{to}"),
            None => format!(">={}", class.from),
        };
        format!("{name} {} ({})", count(class.count), count(class.normal.round() as u64))
    };
    let parts: Vec<String> = classes.iter().map(one).collect();
    format!("|error|/sigma (normal): {}", parts.join(", "))
}
