//! `cotangent-dropped`: the backward starts from 1 in place of the upstream gradient, or leaves the
//! tokens' weights out; often in only one of dq and dk. Where a kernel returns the sum of the
//! losses, its upstream gradient includes the division by the number of tokens.
//!
//! Detectors: one factor of a whole stage for a cotangent of the whole loss, a factor of each token
//! for those of tokens; and which of dq and dk fails. Emulation: cotangents, divisors or weights of
//! 1, or several of these, in everything that follows from the loss, in the gradients alone, or in
//! those of one side; the divisor as declared, or counted with weights of 1.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::counterevidence::Part;
use crate::diagnose::detectors::common_factor::{informative, is_towards};
use crate::diagnose::evidence::{Evidence, Key};
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
        let stages = [&Stage::GRADIENTS[..], &[Stage::Loss, Stage::Dlogprobs]].concat();
        if !evidence.fails_any(&stages) {
            return Vec::new();
        }
        let there = LeftOut::there(evidence);
        let all = places(evidence).into_iter().flat_map(|place| {
            let there = &there;
            there.iter().map(move |&out| Dropped { out, place, kept: declared(evidence) })
        });
        let mut hypotheses = Vec::new();
        for dropped in all.filter(|dropped| dropped.is_possible(evidence)) {
            if dropped.out.weights != Weights::Kept && !dropped.out.mean {
                let counted = Dropped { kept: Denominators::new(), ..dropped.clone() };
                hypotheses.push(counted.hypothesis());
            }
            hypotheses.push(dropped.hypothesis());
        }
        hypotheses
    }
}

/// Where something is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// In the loss and in the gradients.
    Everywhere,
    Gradients,
    OfQ,
    OfK,
}

impl Place {
    fn holds(self, stage: Stage) -> bool {
        let part = Part::of(stage);
        match self {
            Place::Everywhere => true,
            Place::Gradients => stage.is_gradient(),
            Place::OfQ => part == Part::OfQ,
            Place::OfK => part == Part::OfK,
        }
    }
}

/// The places that the failing stages allow: one side alone only where the other side agrees or
/// both fail.
fn places(evidence: &Evidence<'_>) -> Vec<Place> {
    let compared_and_failing = |part: Part| {
        let here = |key: &&Key| Part::of(key.stage) == part;
        let compared = evidence.residuals.keys().any(|key| here(&key));
        (compared, evidence.failing.iter().any(|key| here(&key)))
    };
    match (compared_and_failing(Part::OfQ), compared_and_failing(Part::OfK)) {
        ((_, true), (true, false)) => vec![Place::Everywhere, Place::OfQ],
        ((true, false), (_, true)) => vec![Place::Everywhere, Place::OfK],
        ((_, true), (_, true)) => {
            vec![Place::Everywhere, Place::Gradients, Place::OfQ, Place::OfK]
        }
        _ => vec![Place::Everywhere, Place::Gradients],
    }
}

/// How the backward uses the tokens' weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weights {
    /// As declared.
    Kept,
    /// Only whether a weight is 0.
    Mask,
    /// Not at all.
    Dropped,
}

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LeftOut {
    cotangent: bool,
    /// The division of the mean by the number of tokens.
    mean: bool,
    weights: Weights,
}

impl LeftOut {
    /// Every combination that would change something for this head.
    fn there(evidence: &Evidence<'_>) -> Vec<LeftOut> {
        let any = |of: fn(&MicrobatchInputs) -> &[f64]| {
            let not_one = |(&x, &label): (&f64, &u32)| label != IGNORED && x != 1.0;
            evidence.inputs.iter().any(|inputs| of(inputs).iter().zip(&inputs.labels).any(not_one))
        };
        let cotangent = evidence.step.options.cotangent != 1.0 || any(|inputs| &inputs.cotangent);
        // The weights of a policy loss are its mask: without them other tokens count.
        let weights = any(|inputs| &inputs.weights);
        // Without weights, tokens of weight 0 may count like the others, or stay out.
        let masked = evidence.inputs.iter().any(|inputs| inputs.weights.contains(&0.0));
        let mean = declared(evidence).values().flatten().any(|&n| n != 1.0);
        let mut combinations = Vec::new();
        for cotangent in [false, true].into_iter().take(1 + usize::from(cotangent)) {
            for mean in [false, true].into_iter().take(1 + usize::from(mean)) {
                let combination = |weights| LeftOut { cotangent, mean, weights };
                combinations.extend((cotangent || mean).then(|| combination(Weights::Kept)));
                combinations.extend(weights.then(|| combination(Weights::Dropped)));
                combinations.extend((weights && masked).then(|| combination(Weights::Mask)));
            }
        }
        combinations
    }

    fn words(self) -> String {
        let named = [
            (self.cotangent, "the cotangent"),
            (self.mean, "the division of the mean"),
            (self.weights != Weights::Kept, "the weights"),
        ];
        let there: Vec<&str> =
            named.iter().filter(|(of, _)| *of).map(|(_, words)| *words).collect();
        there.join(" and ")
    }
}

/// The divisors of each microbatch's groups of tokens.
type Denominators = BTreeMap<Option<Microbatch>, Vec<f64>>;

fn declared(evidence: &Evidence<'_>) -> Denominators {
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let divisors = evidence.step.denominators(&all, inputs).ok()?;
        Some((inputs.microbatch, divisors.into_iter().map(|(_, n)| n).collect()))
    };
    evidence.inputs.iter().filter_map(of_microbatch).collect()
}

#[derive(Clone)]
struct Dropped {
    out: LeftOut,
    place: Place,
    /// The declared divisors of each microbatch; empty where they are counted anew with weights of
    /// 1.
    kept: Denominators,
}

impl Dropped {
    /// Whether the measured factors are compatible with this hypothesis.
    fn is_possible(&self, evidence: &Evidence<'_>) -> bool {
        let LeftOut { cotangent, mean, weights } = self.out;
        if self.place == Place::Everywhere {
            // A loss that is not divided has another count, which is another cause.
            return !mean;
        }
        if weights != Weights::Kept && !mean {
            return true;
        }
        // A factor can be checked before any trial.
        let options = &evidence.step.options;
        let common = if cotangent { 1.0 / options.cotangent } else { 1.0 };
        let wanted = |key: &Key| {
            let divisors = self.kept.get(&key.microbatch).filter(|_| mean);
            divisors.map_or(common, |all| common * all.iter().sum::<f64>() / all.len() as f64)
        };
        Stage::GRADIENTS.iter().filter(|&&stage| self.place.holds(stage)).any(|&stage| {
            evidence.fails(stage)
                && informative(evidence, stage).all(|(key, residual)| {
                    residual.nonfinite == 0 && is_towards(residual.factor, wanted(&key))
                })
        })
    }

    fn hypothesis(self) -> Hypothesis {
        let mut parameters = vec![("left out", self.out.words())];
        let place = match self.place {
            Place::Everywhere | Place::Gradients => None,
            Place::OfQ => Some("dq"),
            Place::OfK => Some("dk"),
        };
        parameters.extend(place.map(|of| ("of", of.to_string())));
        if self.out.weights == Weights::Mask {
            parameters.push(("kept", "which tokens have no weight".to_string()));
        }
        if self.out.weights != Weights::Kept && !self.out.mean {
            let from = if self.kept.is_empty() { "counted without weights" } else { "as declared" };
            parameters.push(("denominator", from.to_string()));
        }
        Hypothesis::new(self, parameters)
    }
}

impl World for Dropped {
    fn speaks_of(&self, stage: Stage) -> bool {
        self.place.holds(stage)
    }

    fn options(&self, options: &mut HeadOptions) {
        if self.out.cotangent {
            options.cotangent = 1.0;
        }
    }

    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        if self.out.cotangent {
            inputs.cotangent.fill(1.0);
        }
        let taken = |weight: f64| match self.out.weights {
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
        inputs: &MicrobatchInputs,
        denominators: &mut Vec<(Unit, f64)>,
    ) {
        if self.out.mean {
            denominators.iter_mut().for_each(|(_, n)| *n = 1.0);
        } else if let Some(kept) = self.kept.get(&inputs.microbatch) {
            denominators.iter_mut().zip(kept).for_each(|((_, n), &declared)| *n = declared);
        }
    }
}
