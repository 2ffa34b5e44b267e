//! `cotangent-dropped`: the backward starts from 1 in place of the upstream gradient, or
//! leaves the tokens' weights out; often in only one of dq and dk.
//!
//! Detectors: D6 for a cotangent of the whole loss, D3 for those of tokens.
//! Emulation: cotangents of 1, weights of 1, or both; the denominator as it was or
//! counted with the weights of 1.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::head::{HeadOptions, HeadStep, MicrobatchInputs, Stage, Unit};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct CotangentDropped;

impl Cause for CotangentDropped {
    fn id(&self) -> &'static str {
        "cotangent-dropped"
    }

    fn about(&self) -> &'static str {
        "the backward leaves out the upstream gradient of the loss, or the weights of the tokens"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[
            "Liger-Kernel 1298",
            "TransformerEngine 2139",
            "TransformerEngine 2402",
            "MaxText d60bb24",
        ]
    }

    fn advice(&self) -> &'static str {
        "multiply every gradient that the backward returns by the incoming cotangent and by the token's weight"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let stages = [&GRADIENTS[..], &[Stage::Loss, Stage::Dlogprobs]].concat();
        if !evidence.fails_any(&stages) {
            return Vec::new();
        }
        let not_one = |values: &[f64], labels: &[u32]| {
            values.iter().zip(labels).any(|(&x, &label)| label != IGNORED && x != 1.0)
        };
        let any = |of: fn(&MicrobatchInputs) -> &[f64]| {
            evidence.inputs.iter().any(|one| not_one(of(one), &one.labels))
        };
        let cotangent = evidence.step.options.cotangent != 1.0 || any(|one| &one.cotangent);
        // The weights of a policy loss are its mask: without it other tokens count.
        let weights = any(|one| &one.weights);
        let mut found = Vec::new();
        if cotangent {
            found.push(Dropped::hypothesis(evidence, true, Weights::Kept, false));
        }
        // Tokens of no weight stay out, or without their weight they count as well.
        let zero = |one: &MicrobatchInputs| one.weights.contains(&0.0);
        let masked = evidence.inputs.iter().any(zero);
        for both in [false, true].into_iter().filter(|&both| weights && (!both || cotangent)) {
            for counted in [false, true] {
                found.push(Dropped::hypothesis(evidence, both, Weights::Dropped, counted));
                if masked {
                    found.push(Dropped::hypothesis(evidence, both, Weights::Mask, counted));
                }
            }
        }
        found
    }
}

/// What the backward takes of the tokens' weights.
#[derive(Clone, Copy, PartialEq)]
enum Weights {
    /// As declared.
    Kept,
    /// Only which of them are 0.
    Mask,
    /// Nothing.
    Dropped,
}

struct Dropped {
    cotangent: bool,
    weights: Weights,
    /// The declared denominators of each microbatch, where they are kept.
    kept: BTreeMap<Option<Microbatch>, Vec<f64>>,
}

impl Dropped {
    fn hypothesis(
        evidence: &Evidence<'_>,
        cotangent: bool,
        weights: Weights,
        counted: bool,
    ) -> Hypothesis {
        let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
        let declared = |one: &MicrobatchInputs| {
            let found = evidence.step.denominators(&all, one).ok()?;
            Some((one.microbatch, found.into_iter().map(|(_, n)| n).collect()))
        };
        let kept = match counted {
            true => BTreeMap::new(),
            false => evidence.inputs.iter().filter_map(declared).collect(),
        };
        let words = match (cotangent, weights) {
            (true, Weights::Kept) => "the cotangent",
            (false, _) => "the weights",
            (true, _) => "the cotangent and the weights",
        };
        let mut parameters = vec![("left out", words.to_string())];
        if weights == Weights::Mask {
            parameters.push(("kept", "which tokens have no weight".to_string()));
        }
        if weights != Weights::Kept {
            let from = if counted { "counted without weights" } else { "as declared" };
            parameters.push(("denominator", from.to_string()));
        }
        Hypothesis::new(Dropped { cotangent, weights, kept }, parameters)
    }
}

impl World for Dropped {
    fn options(&self, options: &mut HeadOptions) {
        if self.cotangent {
            options.cotangent = 1.0;
        }
    }

    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if self.cotangent {
            inputs.cotangent.fill(1.0);
        }
        let taken = |weight: f64| match self.weights {
            Weights::Kept => weight,
            Weights::Mask => f64::from(u8::from(weight != 0.0)),
            Weights::Dropped => 1.0,
        };
        inputs.weights.iter_mut().for_each(|weight| *weight = taken(*weight));
    }

    fn denominators(
        &self,
        _step: &HeadStep<'_>,
        _all: &[&MicrobatchInputs],
        own: &MicrobatchInputs,
        of: &mut Vec<(Unit, f64)>,
    ) {
        if let Some(kept) = self.kept.get(&own.microbatch) {
            of.iter_mut().zip(kept).for_each(|((_, n), &declared)| *n = declared);
        }
    }
}
