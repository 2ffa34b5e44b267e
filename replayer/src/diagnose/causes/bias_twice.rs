//! `bias-twice`: the bias of the logits is added twice, or not at all, in the forward or
//! in the backward; or its gradient is.
//!
//! Detectors: there is a bias, and lse, label logits, gradients or dbias fail. Emulation: logits
//! with 0 or 2 times the bias; dbias times 0 or 2, or without the label's part.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::common_factor::stages_times;
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::worlds::{BackwardStarts, DeclaredLse, FORWARD_ONLY, ForwardOnly, Scaled};
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::replay::world::{Pass, StagePlace, UnitTokens, World};

/// The catalogue's entry.
pub struct BiasTwice;

impl Cause for BiasTwice {
    fn id(&self) -> &'static str {
        "bias-twice"
    }

    fn about(&self) -> &'static str {
        "the bias of the logits, or its gradient, is added twice or not at all"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["ml-cross-entropy 53"]
    }

    fn advice(&self) -> &'static str {
        "add the bias to the logits once, in the forward and where the backward recomputes them"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let biased = evidence.inputs.iter().any(|inputs| inputs.bias.is_some());
        let gradients = evidence.fails_any(&Stage::GRADIENTS);
        if !biased || !(gradients || evidence.fails_any(&Stage::FORWARD)) {
            return Vec::new();
        }
        let mut hypotheses = Vec::new();
        for times in [0.0, 2.0] {
            // Automatic differentiation of a bias that is added twice gives twice its gradient.
            let gradient_factors: &[f64] =
                if evidence.fails(Stage::Dbias) { &[1.0, times] } else { &[1.0] };
            for (lse, place) in BackwardStarts::of(evidence, &|_| {}, times).each() {
                let with_gradient = |&gradient: &f64| {
                    let mut parameters =
                        vec![("times", times.to_string()), ("in", place.to_string())];
                    if gradient_factors.len() > 1 {
                        parameters.push(("its gradient times", gradient.to_string()));
                    }
                    let lse = lse.clone();
                    Hypothesis::new(Biased { times, lse, gradient }, parameters)
                };
                hypotheses.extend(gradient_factors.iter().map(with_gradient));
            }
            if let Some(world) = ForwardOnly::of(evidence, &|_| {}, times) {
                let parameters =
                    vec![("times", times.to_string()), ("in", FORWARD_ONLY.to_string())];
                hypotheses.push(Hypothesis::new(world, parameters));
            }
            let stages = stages_times(evidence, times, &[Stage::Dbias]);
            if !stages.is_empty() || (times == 0.0 && is_zero(evidence, Stage::Dbias)) {
                let stages = [Stage::Dbias].into();
                let parameters =
                    vec![("times", times.to_string()), ("in", "its gradient".to_string())];
                hypotheses.push(Hypothesis::new(Scaled { factor: times, stages }, parameters));
            }
        }
        // dq and dk compute their label's part themselves, so they agree if only dbias lacks it.
        let others = |key: &Key| key.stage.is_gradient() && key.stage != Stage::Dbias;
        if evidence.fails(Stage::Dbias) && !evidence.failing.iter().any(others) {
            let parameters = vec![("left out of its gradient", "the label's part".to_string())];
            hypotheses.push(Hypothesis::new(Unlabelled, parameters));
        }
        hypotheses
    }
}

/// Whether a stage fails because all of it is zero.
fn is_zero(evidence: &Evidence<'_>, stage: Stage) -> bool {
    evidence.fails(stage)
        && evidence
            .residuals
            .iter()
            .all(|(key, residual)| key.stage != stage || residual.captured == 0.0)
}

struct Biased {
    times: f64,
    lse: DeclaredLse,
    /// Factor of the bias's gradient.
    gradient: f64,
}

impl World for Biased {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        inputs.bias.iter_mut().flatten().for_each(|b| *b *= self.times);
    }

    fn scale(&self, place: StagePlace) -> f64 {
        if place.stage == Stage::Dbias { self.gradient } else { 1.0 }
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let (Pass::Backward, Some(declared)) = (pass, self.lse.get(&inputs.microbatch)) {
            lse.copy_from_slice(declared);
        }
    }
}

/// The sum over tokens that gives dbias lacks the label's part.
struct Unlabelled;

impl World for Unlabelled {
    fn speaks_of(&self, stage: Stage) -> bool {
        stage == Stage::Dbias
    }

    fn cotangents(&self, _tokens: &UnitTokens<'_>, [_, label, _]: [&mut [f64]; 3]) {
        label.fill(0.0);
    }
}
