//! Checks Adam's second moment v: whether the recorded gradients can explain it, and whether it
//! explodes.
//!
//! v is an average of the squares of past gradients, so none of its elements is above the largest
//! squared gradient norm so far, or above v at the start of the record. A larger v comes from other
//! gradients than those that were recorded: not unscaled, not clipped, not reduced, or restored
//! from another run. A v that the gradients explain, but that is a thousand times what it was in
//! the second quarter of the run, is exploding with them.

use super::View;
use super::chance::NORM_ROUNDING;
use super::finding::{FlagResults, Place};
use super::series::{Series, median};
use crate::number::short;

/// How many values at the end the median is taken of; below, how many values a run must have.
const END: usize = 5;
const LEAST: usize = 40;

/// Growth over the median of the second quarter, which means gradients thirty times as large. The
/// bias of v from its start at zero is at most a factor of four from there on.
const GROWTH: f64 = 1000.0;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "Adam's second moment";
    let is_square = |name: &&str| name.starts_with("exp_avg_sq_");
    let names: Vec<&str> = view.names().into_iter().filter(is_square).collect();
    if names.is_empty() {
        let why = "no exp_avg_sq_* was recorded: pass on backtape.scalars.of_torch or of_jax";
        return results.skip(what, why);
    }
    let norms = view.of("grad_norm_clipped").or_else(|| view.of("grad_norm"));
    if norms.is_none() {
        results
            .skip("whether the second moment is of these gradients", "no grad_norm was recorded");
    }
    for name in names {
        for rank in &view.trajectory.ranks {
            let Some(series) = rank.series.get(name) else { continue };
            results.looked();
            let series = series.finite();
            let beyond = norms.filter(|_| is_bounded(name)).and_then(|n| beyond(&series, n));
            let (step, evidence, threshold) = match (beyond, exploding(&series)) {
                (Some((step, value, most)), _) => (
                    step,
                    format!(
                        "{name} is {} on rank {} at step {step}, above {}, the largest squared \
                         norm of any gradient so far: the moment is of other gradients",
                        short(value),
                        rank.rank,
                        short(most),
                    ),
                    "no mean of squares is above the largest sum of them".to_string(),
                ),
                (None, Some((step, value, middle))) => (
                    step,
                    format!(
                        "{name} on rank {} explodes: {} at the end, {} in the second quarter",
                        rank.rank,
                        short(value),
                        short(middle),
                    ),
                    format!("{GROWTH} times: gradients thirty times larger than then"),
                ),
                (None, None) => continue,
            };
            let place = Place { step: Some(step), ranks: vec![rank.rank], scalar: name };
            results.raise(place, evidence, threshold);
            // One rank and one statistic are enough evidence.
            return;
        }
    }
}

/// Whether a statistic of v is at most its largest element, as the maximum, the mean and the root
/// mean square are. A sum over elements is not.
fn is_bounded(name: &str) -> bool {
    let kind = name.trim_start_matches("exp_avg_sq_").split('/').next();
    matches!(kind, Some("max" | "mean" | "rms"))
}

/// The first step at which v is above the largest squared norm so far and above its own first
/// value.
fn beyond(series: &Series, norms: &Series) -> Option<(u64, f64, f64)> {
    let (mut most, mut next) = (*series.values().first()?, 0);
    for (&step, &value) in series.steps().iter().zip(series.values()) {
        // Norms of steps before the record are unknown; v at its start stands for them.
        while next < norms.len() && norms.steps()[next] <= step {
            let square = norms.values()[next].powi(2);
            // After a NaN gradient any v is possible.
            most = if square.is_nan() { f64::INFINITY } else { most.max(square) };
            next += 1;
        }
        // v and the norm may be kept in bf16, which may be off by one spacing each; the norm is
        // squared.
        let slack = (1.0 + 1.0 / 128.0f64).powi(3) + NORM_ROUNDING;
        if value > most * slack {
            // If steps between the recorded ones are missing, their gradients are unknown.
            let gap = series.steps().windows(2).chain(norms.steps().windows(2));
            let whole = gap.clone().all(|pair| pair[1] - pair[0] == 1);
            return whole.then_some((step, value, most));
        }
    }
    None
}

fn exploding(series: &Series) -> Option<(u64, f64, f64)> {
    let (n, values) = (series.len(), series.values());
    if n < LEAST {
        return None;
    }
    let (middle, end) = (median(&values[n / 4..n / 2]), median(&values[n - END..]));
    (middle > 0.0 && end > GROWTH * middle).then(|| (series.steps()[n - END], end, middle))
}
