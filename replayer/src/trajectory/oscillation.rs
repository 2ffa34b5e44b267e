//! Flags a loss that oscillates around a constant level with a regular period.
//!
//! In the second half of the run the loss must make no progress (its median falls by less than the
//! swing from the first to the last third), swing by more than a fiftieth of its level, and do so
//! regularly: negative correlation half a period apart, positive correlation a period apart.
//! Independent noise around a level, and noise that wanders, have neither.

use super::View;
use super::finding::{FlagResults, Place};
use super::series::{Series, median};
use crate::number::short;

/// Fewest values of the second half.
const LEAST: usize = 48;

/// Fewest periods in it.
const PERIODS: usize = 6;

/// Largest correlation half a period apart; below, smallest one a period apart.
const OPPOSITE: f64 = -0.5;
const ALIKE: f64 = 0.4;

/// Smallest ratio of the swing to the level that matters.
const SWING: f64 = 0.02;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "whether the loss swings in place";
    let Some(loss) = view.loss.as_ref().map(Series::regular) else {
        return results.skip(what, "no loss was recorded");
    };
    let half = loss.len() / 2;
    let values = &loss.values()[half..];
    if values.len() < LEAST {
        let why = format!("fewer than {} losses at even distances", 2 * LEAST);
        return results.skip(what, why);
    }
    results.looked();
    let n = values.len();
    let (first, last) = (median(&values[..n / 3]), median(&values[n - n / 3..]));
    let level = values.iter().sum::<f64>() / n as f64;
    let apart: Vec<f64> = values.iter().map(|value| value - level).collect();
    let variance = apart.iter().map(|x| x * x).sum::<f64>() / n as f64;
    let swing = variance.sqrt();
    // Written with `!(>)`, so that NaN returns here too.
    if !(swing > SWING * level.abs()) || first - last > swing {
        return;
    }
    let correlation_at = |lag: usize| {
        let pairs = apart.iter().zip(&apart[lag..]);
        pairs.map(|(a, b)| a * b).sum::<f64>() / (n - lag) as f64 / variance
    };
    let opposite = (1..=n / (2 * PERIODS)).find(|&lag| correlation_at(lag) <= OPPOSITE);
    let Some(lag) = opposite else { return };
    // The lowest correlation of the first trough is at half a period.
    let trough = (lag..=n / (2 * PERIODS))
        .take_while(|&l| l == lag || correlation_at(l) <= correlation_at(l - 1))
        .last();
    let period = 2 * trough.unwrap_or(lag);
    if correlation_at(period) < ALIKE {
        return;
    }
    let (steps, stride) = (loss.steps(), loss.steps()[1] - loss.steps()[0]);
    let evidence = format!(
        "loss swings by {} around {} with a period of {} steps from step {} to {} and does not \
         fall (median {} in the first third, {} in the last)",
        short(swing),
        short(level),
        period as u64 * stride,
        steps[half],
        steps[steps.len() - 1],
        short(first),
        short(last),
    );
    let threshold = format!(
        "a swing of {SWING} of the level; correlations of {OPPOSITE} half a period and {ALIKE} a \
         period apart ({:.2} and {:.2} here), which independent noise has at about {:.2}",
        correlation_at(period / 2),
        correlation_at(period),
        1.0 / (n as f64).sqrt(),
    );
    results.raise(Place::at("loss", steps[half]), evidence, threshold);
}
