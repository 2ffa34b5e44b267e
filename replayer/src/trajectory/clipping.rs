//! Flags runs in which nearly every step is clipped: the clip threshold then sets the step size,
//! and the length of the gradient is lost.
//!
//! Only steps in the second half and after the warm-up (if learning_rate was recorded) count, since
//! early steps are clipped in healthy jobs. The flag is raised if a true share of nine in ten would
//! show so many clipped steps with a probability of at most 1 in 10,000 (binomial).

use backtape::scalars::CLIPPED_BEYOND;

use super::chance::{FALSE_ALARM, binomial_tail};
use super::finding::{FlagResults, Place};
use super::series::median;
use super::{Series, View};
use crate::number::short;

/// Largest share of clipped steps that is not flagged.
const SHARE: f64 = 0.9;

/// Fewest steps that can show a share above nine in ten, if all are clipped: 0.9^88 < 1e-4.
const LEAST: usize = 88;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "whether every step is clipped";
    let pair = view.of("grad_norm").zip(view.of("grad_norm_clipped"));
    let Some((before, after)) = pair else {
        return results.skip(what, "grad_norm and grad_norm_clipped were not both recorded");
    };
    let clipped_step =
        |(&step, &norm): (&u64, &f64)| after.at(step).map(|clipped| (step, norm, clipped));
    let mut all: Vec<(u64, f64, f64)> =
        before.steps().iter().zip(before.values()).filter_map(clipped_step).collect();
    all.retain(|(_, norm, clipped)| norm.is_finite() && clipped.is_finite());
    swapped(&all, results);
    let warm = view.of("learning_rate").and_then(warm_from).unwrap_or(0);
    let from = all.partition_point(|(step, ..)| *step < warm);
    let settled = &all[from.max(all.len() / 2)..];
    if settled.len() < LEAST {
        let why = format!(
            "{} steps with both norms after the warm-up in the second half, {LEAST} are needed",
            settled.len()
        );
        return results.skip(what, why);
    }
    results.looked();
    let clipped: Vec<&(u64, f64, f64)> =
        settled.iter().filter(|(_, norm, clipped)| *norm > clipped * CLIPPED_BEYOND).collect();
    let (n, k) = (settled.len() as u64, clipped.len() as u64);
    let Some((first, ..)) = clipped.first() else { return };
    if binomial_tail(n, k, SHARE) > FALSE_ALARM {
        return;
    }
    let thresholds: Vec<f64> = clipped.iter().map(|(.., clipped)| *clipped).collect();
    let ratios: Vec<f64> = clipped.iter().map(|(_, norm, clipped)| norm / clipped).collect();
    let evidence = format!(
        "{k} of {n} steps from step {} on were clipped, to {} from a norm that is {} times as \
         large (medians)",
        settled[0].0,
        short(median(&thresholds)),
        short(median(&ratios)),
    );
    let threshold = format!(
        "nine in ten: a smaller share shows {k} of {n} with probability {:.0e} at most (binomial), \
         and one in 10,000 is allowed",
        binomial_tail(n, k, SHARE)
    );
    results.raise(Place::at("grad_norm_clipped", *first), evidence, threshold);
}

/// The first step at which the learning rate has its largest value.
fn warm_from(rate: &Series) -> Option<u64> {
    let finite = rate.finite();
    let most = finite.values().iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let index = finite.values().iter().position(|&value| value >= most)?;
    Some(finite.steps()[index])
}

/// Flags steps whose clipped norm is larger than the norm before clipping.
fn swapped(all: &[(u64, f64, f64)], results: &mut FlagResults) {
    let larger = |(_, norm, clipped): &&(u64, f64, f64)| *clipped > norm * CLIPPED_BEYOND;
    let count = all.iter().filter(larger).count();
    if let Some((step, norm, clipped)) = all.iter().find(larger) {
        let evidence = format!(
            "grad_norm_clipped is larger than grad_norm on {count} of {} steps, first at step \
             {step}: {} after {}: were they swapped?",
            all.len(),
            short(*clipped),
            short(*norm),
        );
        let threshold = "one spacing of bf16: clipping cannot lengthen a gradient".into();
        results.raise(Place::at("grad_norm_clipped", *step), evidence, threshold);
    }
}
