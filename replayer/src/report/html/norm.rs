//! The gap of grad_norm as a waterfall: from the norm with the reference to the norm that the
//! job reported, one step for each part. The parts of one kind add up to the gap.

use askama::Template;

use super::bars::{Bar, Widths, draw};
use super::{Markup, Page, markup};
use crate::replay::outcome::{GradNorm, Share};
use crate::report::norm;

/// Parts of one kind that are steps of their own.
const STEPS: usize = 9;
/// The kinds of shares, in the order of the text report.
const KINDS: [(&str, &str); 6] = [
    ("tensor", "by tensor"),
    ("rank", "by rank"),
    ("microbatch", "by microbatch"),
    ("rows", "by label hits of the rows"),
    ("row", "by row of the vocabulary"),
    ("vocabulary", "by tile of the vocabulary"),
];

#[derive(Template)]
#[template(path = "norm.html")]
struct Norm<'a> {
    id: &'a str,
    facts: Vec<String>,
    own: Option<Gap>,
    /// What the declared precision explains of it.
    explained: f64,
    other: Option<Gap>,
}

/// A gap, and how it comes about: a drawing for each kind of parts.
struct Gap {
    gap: f64,
    drawings: Vec<(&'static str, Markup)>,
}

impl Page<'_> {
    pub(super) fn norm(&self) -> Markup {
        let own_norm = &self.report.grad_norm;
        let against = self.report.against.as_ref();
        let names = match own_norm.captured {
            Some(_) => ("with reference dk", "as reported"),
            None => ("reference dk", "captured dk"),
        };
        let end = end(own_norm);
        let gap_of = |gap, shares, names| end.map(|end| waterfalls(gap, shares, end, names));
        let of_own = own_norm.gap.filter(|_| !own_norm.shares.is_empty());
        let of_other = against.and_then(|against| against.norm_gap.as_ref());
        markup(&Norm {
            id: &self.id,
            facts: norm::facts(own_norm, against.and_then(|against| against.grad_norm.captured)),
            own: of_own.and_then(|gap| gap_of(gap, &own_norm.shares, names)),
            explained: own_norm.floor.unwrap_or(f64::NAN),
            other: of_other
                .and_then(|gap| gap_of(gap.gap, &gap.shares, ("the other run", "this run"))),
        })
    }
}

/// The norm that the gap ends at.
fn end(norm: &GradNorm) -> Option<f64> {
    norm.captured.or(norm.dk_captured)
}

/// The gap that ends at a norm, by the kinds of its parts.
fn waterfalls(gap: f64, shares: &[Share], end: f64, names: (&str, &str)) -> Gap {
    let drawing = |(kind, words): (&str, &'static str)| {
        let parts: Vec<&Share> = shares.iter().filter(|share| share.kind == kind).collect();
        let about = format!("waterfall of the gap of grad_norm {words}");
        let bars = || draw(about, steps(&parts, (end - gap, end), names), &Widths(168, 190, 168));
        (!parts.is_empty()).then(|| (words, bars().bars))
    };
    Gap { gap, drawings: KINDS.into_iter().filter_map(drawing).collect() }
}

/// What a part is called: a number alone says nothing.
fn name(part: &Share) -> String {
    match part.of.bytes().all(|byte| byte.is_ascii_digit()) {
        true => format!("{} {}", part.kind, part.of),
        false => part.of.clone(),
    }
}

/// The bars of one kind: both norms, and between them a step for each part, the largest first.
fn steps(parts: &[&Share], (start, end): (f64, f64), (from, to): (&str, &str)) -> Vec<Bar> {
    let mut parts: Vec<(String, f64, f64)> =
        parts.iter().map(|part| (name(part), part.gap, part.share)).collect();
    parts.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    if parts.len() > STEPS + 1 {
        let rest = parts.split_off(STEPS);
        let sum = |of: fn(&(String, f64, f64)) -> f64| rest.iter().map(of).sum::<f64>();
        parts.push((format!("{} others", rest.len()), sum(|part| part.1), sum(|part| part.2)));
    }
    let mut levels = vec![start];
    // The shares of dk alone may be less than the whole gap: the line ends where they do.
    parts.iter().for_each(|part| levels.push(levels[levels.len() - 1] + part.1));
    let all = || levels.iter().chain([&end]).copied().filter(|x| x.is_finite());
    let (least, most) =
        (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
    let span = (most - least).max(f64::MIN_POSITIVE);
    // A tenth of the width stands for all that lies below the smallest level.
    let x = |level: f64| if level.is_finite() { 0.1 + 0.9 * (level - least) / span } else { 1.0 };
    let total = |label: &str, level: f64| Bar {
        label: label.into(),
        from: 0.0,
        to: x(level),
        class: "bt-total",
        mark: None,
        value: format!("{level:.7}"),
    };
    let mut bars = vec![total(from, start)];
    for ((name, gap, share), pair) in parts.iter().zip(levels.windows(2)) {
        bars.push(Bar {
            label: name.clone(),
            from: x(pair[0]),
            to: x(pair[1]),
            class: if *gap < 0.0 { "bt-down" } else { "bt-up" },
            mark: None,
            value: format!("{gap:+.3e} ({} %)", norm::percent(*share)),
        });
    }
    bars.push(total(to, end));
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the steps lead from one norm to the other. Method: each begins where the one
    /// before it ended, and the last ends where the last bar does.
    #[test]
    fn the_steps_lead_from_one_norm_to_the_other_however_many_there_are() {
        let share = |gap: f64| Share { kind: "row", of: "row 1".into(), gap, share: gap / 3.0 };
        let shares: Vec<Share> =
            (0..40).map(|i| share(if i % 2 == 0 { 0.4 } else { -0.25 })).collect();
        let parts: Vec<&Share> = shares.iter().collect();
        let bars = steps(&parts, (10.0, 13.0), ("a", "b"));
        assert_eq!(bars.len(), STEPS + 3);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        near(bars[0].to, bars[1].from);
        for pair in bars[1..bars.len() - 1].windows(2) {
            near(pair[0].to, pair[1].from);
        }
        near(bars[bars.len() - 2].to, bars[bars.len() - 1].to);
        assert!(bars.iter().all(|bar| (0.0..=1.0).contains(&bar.from) && bar.to <= 1.0 + 1e-9));
    }

    #[test]
    fn a_gap_that_is_no_number_is_drawn_without_a_panic() {
        let share = Share { kind: "row", of: "row 1".into(), gap: f64::NAN, share: f64::NAN };
        let bars = steps(&[&share], (f64::NAN, 1.0), ("a", "b"));
        assert!(bars.iter().all(|bar| bar.from.is_finite() && bar.to.is_finite()));
    }
}
