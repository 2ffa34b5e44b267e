//! `temperature-mismatch`: the logits are not multiplied by the declared factor (the
//! inverse temperature): not at all, by its inverse, twice, by another one, or not where
//! the backward passes through it.
//!
//! Detectors: one factor on all gradients, for a factor missing in the backward; another factor is
//! fitted to the captured lse and label logits, or to rows of dq. Emulation: the other factor.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::common_factor::{BACKWARD, stages_times};
use crate::diagnose::detectors::fitted_numbers::{least, readings, shown};
use crate::diagnose::detectors::raw_logits::RawLogits;
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{
    BackwardStarts, ChangedOptions, DeclaredLse, FORWARD_ONLY, ForwardOnly, Scaled,
};
use crate::head::{HeadOptions, Stage};
use crate::kernels::transform::Transform;

/// The catalogue's entry.
pub struct TemperatureMismatch;

/// How much larger or smaller than declared a fitted factor may be.
const AROUND: f64 = 30.0;

impl Cause for TemperatureMismatch {
    fn id(&self) -> &'static str {
        "temperature-mismatch"
    }

    fn options(&self) -> &'static [&'static str] {
        &["temperature", "logit_scale"]
    }

    fn about(&self) -> &'static str {
        "logits, or the gradients that pass through them, are not scaled by the declared temperature"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["logits divided by the temperature in the loss and not in its backward, or twice"]
    }

    fn advice(&self) -> &'static str {
        "divide the logits by the temperature once, and the gradient that leaves them once"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let forward = evidence.fails_any(&Stage::FORWARD);
        if !forward && !evidence.fails_any(&Stage::GRADIENTS) {
            return Vec::new();
        }
        let scale = evidence.step.options.transform.scale;
        let mut hypotheses = Vec::new();
        if scale != 1.0 {
            let inverse = 1.0 / (scale * scale);
            for (factor, words) in
                [(1.0 / scale, "left out"), (scale, "twice"), (inverse, "by its inverse")]
            {
                let stages = stages_times(evidence, factor, BACKWARD);
                if !stages.is_empty() {
                    let parameters = vec![
                        ("factor of the logits", shown(scale)),
                        ("in the backward", words.to_string()),
                    ];
                    hypotheses.push(Hypothesis::new(Scaled { factor, stages }, parameters));
                }
            }
            for other in [1.0, 1.0 / scale, scale * scale] {
                hypotheses.extend(scaled(evidence, other, 0));
            }
        }
        for other in fitted(evidence) {
            hypotheses.extend(scaled(evidence, other, 1));
        }
        hypotheses
    }
}

/// Factors of the logits that fit the captured values of some tokens much better than the declared
/// one: the fitted number, and the round one that it may stand for.
pub fn fitted(evidence: &Evidence<'_>) -> Vec<f64> {
    let transform = evidence.step.options.transform;
    let tokens = RawLogits::of(evidence);
    let (sign, size) = (transform.scale.signum(), transform.scale.abs());
    let error = |x: f64| tokens.error(Transform { scale: sign * x, ..transform });
    let range = (size / AROUND, size * AROUND);
    let factor = least(&error, range).filter(|&x| tokens.believes(x, &error));
    factor.map_or(Vec::new(), |x| readings(x, u64::MAX)).into_iter().map(|x| sign * x).collect()
}

/// Another factor of the logits: everywhere, everywhere without its derivative in dlogits, and in
/// the forward or the backward alone.
fn scaled(evidence: &Evidence<'_>, other: f64, fitted: usize) -> Vec<Hypothesis> {
    let declared = evidence.step.options.transform.scale;
    let change = move |options: &mut HeadOptions| options.transform.scale = other;
    let parameters = |place: String| {
        vec![
            ("declared factor of the logits", shown(declared)),
            ("factor", shown(other)),
            ("in", place),
        ]
    };
    let with_lse = |lse: &DeclaredLse, factor: f64, place: String| {
        let parameters = parameters(place);
        let world = ChangedOptions { change, lse: lse.clone(), factor };
        Hypothesis::new(world, parameters).fitted(fitted)
    };
    let gradients = evidence.fails_any(&Stage::GRADIENTS);
    let mut hypotheses = Vec::new();
    for (lse, place) in BackwardStarts::of(evidence, &change, 1.0).each() {
        hypotheses.push(with_lse(&lse, 1.0, place.into()));
        if gradients {
            let place = format!("{place}, but for the factor of dlogits");
            hypotheses.push(with_lse(&lse, declared / other, place));
        }
    }
    if let Some(world) = ForwardOnly::of(evidence, &change, 1.0) {
        let parameters = parameters(FORWARD_ONLY.into());
        hypotheses.push(Hypothesis::new(world, parameters).fitted(fitted));
    }
    hypotheses
}
