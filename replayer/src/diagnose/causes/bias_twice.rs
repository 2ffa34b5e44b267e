//! `bias-twice`: the bias of the logits is added twice, or not at all, in the forward or
//! in the backward; or its gradient is.
//!
//! Detectors: there is a bias, and lse, label logits, gradients or dbias fail.
//! Emulation: logits with 0 or 2 of it; dbias of 0 or 2, or without the label's part.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::uniform::stages_times;
use crate::diagnose::evidence::{Evidence, FORWARD, GRADIENTS, Key};
use crate::diagnose::worlds::{DeclaredLse, Scaled, declared_lse};
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::replay::world::{Pass, UnitTokens, World};

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
        let biased = evidence.inputs.iter().any(|one| one.bias.is_some());
        let gradients = evidence.fails_any(&GRADIENTS);
        if !biased || !(gradients || evidence.fails_any(&FORWARD)) {
            return Vec::new();
        }
        let lse = declared_lse(evidence);
        let mut found = Vec::new();
        for times in [0.0, 2.0] {
            let of = |lse: &DeclaredLse, place: &str| {
                let parameters = vec![("times", times.to_string()), ("in", place.to_string())];
                Hypothesis::new(Biased { times, lse: lse.clone() }, parameters)
            };
            found.push(of(&DeclaredLse::new(), "all that fails"));
            if gradients && !lse.is_empty() {
                found.push(of(&lse, "the backward alone"));
            }
            let stages = stages_times(evidence, times, &[Stage::Dbias]);
            if !stages.is_empty() || (times == 0.0 && zero(evidence, Stage::Dbias)) {
                let stages = [Stage::Dbias].into();
                let parameters =
                    vec![("times", times.to_string()), ("in", "its gradient".to_string())];
                found.push(Hypothesis::new(Scaled { factor: times, stages }, parameters));
            }
        }
        // The gradients of q and k have a label's part of their own.
        let others = |key: &Key| GRADIENTS.contains(&key.stage) && key.stage != Stage::Dbias;
        if evidence.fails(Stage::Dbias) && !evidence.failing.iter().any(others) {
            let parameters = vec![("left out of its gradient", "the label's part".to_string())];
            found.push(Hypothesis::new(Unlabelled, parameters));
        }
        found
    }
}

/// Whether a stage fails because all of it is zero.
fn zero(evidence: &Evidence<'_>, stage: Stage) -> bool {
    evidence.fails(stage)
        && evidence.residuals.iter().all(|(key, one)| key.stage != stage || one.captured == 0.0)
}

struct Biased {
    times: f64,
    lse: DeclaredLse,
}

impl World for Biased {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        inputs.bias.iter_mut().flatten().for_each(|b| *b *= self.times);
    }

    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if let (Pass::Backward, Some(declared)) = (pass, self.lse.get(&inputs.microbatch)) {
            lse.copy_from_slice(declared);
        }
    }
}

/// The label's part is left out of the sum over tokens.
struct Unlabelled;

impl World for Unlabelled {
    fn cotangents(&self, _tokens: &UnitTokens<'_>, [_, label, _]: [&mut [f64]; 3]) {
        label.fill(0.0);
    }
}
