//! Flags a loss with a fixed period: the same batches come again in the same order, or the loss
//! drops at every start of a short epoch.
//!
//! Batches differ in difficulty, so the change of the loss from step to step is mostly noise of the
//! batch. If batch t is the same as batch t - P, that noise repeats: the rank correlation of the
//! changes is high at lag P and low beside it. For independent batches the changes are a moving
//! average of order one, whose correlation at other lags has variance 1.5 / n (Bartlett 1946); the
//! largest over all lags is bounded by the union of normal tails.

use super::View;
use super::chance::FALSE_ALARM;
use super::finding::{FlagResults, Place};
use super::series::{Series, noise};
use crate::number::short;

/// Shortest period that is looked for, since alternating data sources cause shorter ones.
const SHORTEST: usize = 8;

/// Longest lag that is looked for; the time grows with lags times steps.
const LONGEST: usize = 4096;

/// Only the last so many steps are used, for the same reason.
const LAST: usize = 1 << 16;

/// Fewest periods: two repeats.
const PERIODS: usize = 3;

/// Smallest share of the batch noise that must repeat.
const SHARE: f64 = 0.5;

/// Falls of this many times the noise are drops; [`DROPS`] equally spaced ones are a sawtooth.
const DROP: f64 = 8.0;
const DROPS: usize = 5;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "whether the data repeat";
    let Some(loss) = view.loss.as_ref().map(|loss| loss.regular().last(LAST)) else {
        return results.skip(what, "no loss was recorded");
    };
    let n = loss.len();
    if n < PERIODS * SHORTEST + 1 {
        let why = format!("fewer than {} losses at even distances", PERIODS * SHORTEST + 1);
        return results.skip(what, why);
    }
    results.looked();
    let changes: Vec<f64> = loss.values().windows(2).map(|pair| pair[1] - pair[0]).collect();
    let longest = (changes.len() / PERIODS).min(LONGEST);
    let stride = loss.steps()[1] - loss.steps()[0];
    if let Some((period, correlation, bound)) = correlated(&changes, longest) {
        let steps = period as u64 * stride;
        let evidence = format!(
            "the changes of loss repeat every {steps} steps, from step {} to {}: {:.0} % of the \
             noise of the batches comes again (correlation {correlation:.2})",
            loss.steps()[0],
            loss.steps()[n - 1],
            100.0 * correlation.min(1.0),
        );
        let threshold = format!(
            "a correlation of {bound:.2}: half of the noise, and beyond what {n} independent \
             batches reach at any lag once in {:.0} runs",
            1.0 / FALSE_ALARM
        );
        return results.raise(Place::at("loss", loss.steps()[0]), evidence, threshold);
    }
    sawtooth(view, &loss, &changes, results);
}

/// The shortest lag at which the changes are correlated, with the correlation and its bound.
fn correlated(changes: &[f64], longest: usize) -> Option<(usize, f64, f64)> {
    let scores = ranks(changes);
    let n = scores.len() as f64;
    let correlation_at = |lag: usize| {
        let pairs = scores.iter().zip(&scores[lag..]);
        // Divided by the number of pairs, as long lags have fewer.
        pairs.map(|(a, b)| a * b).sum::<f64>() / (n - lag as f64)
    };
    let tests = (longest.max(1) as f64 / FALSE_ALARM).ln();
    (SHORTEST..=longest).find_map(|lag| {
        let bound = SHARE.max((2.0 * tests * 1.5 / (n - lag as f64)).sqrt());
        let correlation = correlation_at(lag);
        // A slow trend is correlated at every lag, repeated batches only at their own.
        let alone = || correlation_at(lag - 1).max(correlation_at(lag + 1)) < correlation / 2.0;
        (correlation >= bound && alone()).then_some((lag, correlation, bound))
    })
}

/// The ranks of the values, scaled to mean 0 and variance 1, so that outliers and a shrinking
/// spread have little weight.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let n = values.len() as f64;
    let spread = ((n * n - 1.0) / 12.0).sqrt();
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    while from < order.len() {
        let same = |&&i: &&usize| values[i] == values[order[from]];
        let to = from + order[from..].iter().take_while(same).count().max(1);
        // Equal values share their mean rank.
        let mean = (from + to - 1) as f64 / 2.0;
        order[from..to].iter().for_each(|&i| ranks[i] = (mean - (n - 1.0) / 2.0) / spread);
        from = to;
    }
    ranks
}

/// Flags equally spaced drops of the loss at which the learning rate does not change.
fn sawtooth(view: &View<'_>, loss: &Series, changes: &[f64], results: &mut FlagResults) {
    let least = DROP * noise(loss.values()) * std::f64::consts::SQRT_2;
    let rate = view.of("learning_rate");
    let steered = |index: usize| {
        let rate_at = |i: usize| rate.and_then(|rate| rate.at(loss.steps()[i]));
        let moved = |(a, b): (f64, f64)| (a - b).abs() > 0.1 * a.abs().max(b.abs());
        rate_at(index).zip(rate_at(index + 1)).is_some_and(moved)
    };
    let drops: Vec<usize> =
        (0..changes.len()).filter(|&i| changes[i] < -least && !steered(i)).collect();
    let [.., before, end] = drops.as_slice() else { return };
    let period = end - before;
    // Counted from the end, since the loss of an untrained model falls steeply too, without a
    // period.
    let even = drops.windows(2).rev().take_while(|pair| pair[1] - pair[0] == period).count() + 1;
    if period < SHORTEST || even < DROPS {
        return;
    }
    let first = drops[drops.len() - even];
    let (steps, stride) = (loss.steps(), loss.steps()[1] - loss.steps()[0]);
    let evidence = format!(
        "loss drops every {} steps, {} times from step {} on, by {} the last time: an epoch \
         begins again",
        period as u64 * stride,
        even,
        steps[first + 1],
        short(-changes[*end]),
    );
    let threshold = format!(
        "{DROPS} drops of {} ({DROP} times the noise) at one distance: by chance once in n^{} runs",
        short(least),
        DROPS - 2
    );
    results.raise(Place::at("loss", steps[first + 1]), evidence, threshold);
}
