//! Flags a gradient norm that stays the same while the loss changes.
//!
//! Two norms count as equal if they differ by rounding at most. A stretch of r equal norms among n
//! occurs by chance with probability n p^(r-1), where p is the share of equal neighbours in the
//! rest of the series. So a coarse format, and a norm that is reported again for each microbatch,
//! are not flagged.

use super::View;
use super::chance::{FALSE_ALARM, NORM_ROUNDING};
use super::finding::{FlagResults, Place};
use super::series::Series;
use crate::number::short;

/// Smallest ratio of distinct losses to the length of the stretch: the loss must have changed.
const MOVED: f64 = 0.5;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "whether gradient norms stand still";
    let Some(loss) = &view.loss else {
        return results.skip(what, "no loss was recorded to hold them against");
    };
    let names: Vec<&str> = view.names().into_iter().filter(|name| is_norm(name)).collect();
    if names.is_empty() {
        return results.skip(what, "no grad_norm was recorded");
    }
    let (mut still, mut zero) = (Vec::new(), Vec::new());
    for name in &names {
        results.looked();
        let Some(series) = view.of(name) else { continue };
        let Some((start, length)) = stretch(series, loss) else { continue };
        let layer_at_zero = name.contains('/') && series.values()[start] == 0.0;
        if layer_at_zero { zero.push((*name, start)) } else { still.push((*name, start, length)) }
    }
    if let Some((name, start)) = zero.first() {
        let evidence = format!(
            "{} of {} layers have a gradient norm of exactly 0, {name} for one: frozen on \
             purpose, or cut off",
            zero.len(),
            names.iter().filter(|name| name.contains('/')).count(),
        );
        let step = view.of(name).map_or(0, |series| series.steps()[*start]);
        results.note(Place::at(name, step), evidence, "exactly 0 while the loss moves".into());
    }
    let Some((name, start, length)) = still.first() else { return };
    let Some(series) = view.of(name) else { return };
    let value = series.values()[*start];
    let bits =
        series.values()[*start..start + length].iter().all(|v| v.to_bits() == value.to_bits());
    let how = if bits { "bit for bit" } else { "within rounding" };
    let more = match still.len() - 1 {
        0 => String::new(),
        more => format!("; so do {more} more norms"),
    };
    let evidence = format!(
        "{name} stands at {} {how} for {length} values from step {} on while loss moves{more}: \
         a gradient that is not computed anew, or a norm taken after clipping",
        short(value),
        series.steps()[*start],
    );
    let threshold = format!(
        "one in {:.0} by chance, from how often neighbours are equal in the rest of the series; \
         equal is within {NORM_ROUNDING:.1e} (64 roundings of f32)",
        1.0 / FALSE_ALARM
    );
    results.raise(Place::at(name, series.steps()[*start]), evidence, threshold);
}

/// Whether a scalar is a gradient norm before clipping; after clipping norms may all equal the
/// threshold.
fn is_norm(name: &str) -> bool {
    name == "grad_norm" || name.starts_with("grad_norm/")
}

/// The start and length of the longest stretch of equal norms, if chance does not explain it and
/// the loss changed.
fn stretch(series: &Series, loss: &Series) -> Option<(usize, usize)> {
    let values = series.values();
    let equal = |i: usize| {
        let (a, b) = (values[i], values[i + 1]);
        (a - b).abs() <= NORM_ROUNDING * a.abs().max(b.abs())
    };
    let (mut best, mut from, mut pairs) = ((0, 0), 0, 0usize);
    for i in 0..values.len().saturating_sub(1) {
        if equal(i) {
            pairs += 1;
        } else {
            from = i + 1;
        }
        if i + 2 - from > best.1 {
            best = (from, i + 2 - from);
        }
    }
    let (start, length) = best;
    if length < 2 {
        return None;
    }
    let (inside, all) = (length - 1, values.len() - 1);
    // By Laplace's rule of succession: without other pairs, p is one half.
    let chance = (pairs - inside + 1) as f64 / (all - inside + 2) as f64;
    if values.len() as f64 * chance.powf(inside as f64) > FALSE_ALARM {
        return None;
    }
    let steps = &series.steps()[start..start + length];
    let mut losses: Vec<u64> = steps.iter().filter_map(|&s| loss.at(s)).map(f64::to_bits).collect();
    losses.sort_unstable();
    losses.dedup();
    (losses.len() as f64 >= MOVED * length as f64).then_some(best)
}
