//! `smoothing-mismatch`: the labels are smoothed otherwise than declared: not at all, with
//! another ε, by the other formula, or only in a part of the gradient.
//!
//! Detectors: D3; gradients and loss are linear in ε, which is fitted to all that fails.
//! Emulation: the other smoothing; forward and backward are judged apart.

use backtape::head::SmoothingFormula;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::fit::{linear, shown};
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::diagnose::worlds::{DeclaredLse, Optioned};
use crate::head::{HeadOptions, Stage};
use crate::replay::world::{UnitTokens, World};

/// The catalogue's entry.
pub struct SmoothingMismatch;

/// A usual ε, to start a fit with.
const USUAL: f64 = 0.1;

impl Cause for SmoothingMismatch {
    fn id(&self) -> &'static str {
        "smoothing-mismatch"
    }

    fn about(&self) -> &'static str {
        "labels are smoothed by another amount or formula than the declared one"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["Megatron-LM 737", "Megatron-LM 7464"]
    }

    fn advice(&self) -> &'static str {
        "use one ε and one formula in the forward and in the backward: ε/K on every class, or Megatron-LM's ε/(K-1) on the others"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let stages = [&GRADIENTS[..], &[Stage::Loss]].concat();
        if evidence.step.is_policy_loss() || !evidence.fails_any(&stages) {
            return Vec::new();
        }
        let declared = &evidence.step.options.declared;
        let (epsilon, formula) = (declared.label_smoothing, declared.smoothing_formula);
        let mut found = Vec::new();
        if epsilon > 0.0 {
            let other = match formula {
                SmoothingFormula::Uniform => SmoothingFormula::Megatron,
                SmoothingFormula::Megatron => SmoothingFormula::Uniform,
            };
            found.push(hypothesis(evidence, 0.0, formula, 0));
            found.push(hypothesis(evidence, epsilon, other, 0));
            for part in [Part::Label, Part::Spread] {
                let parameters =
                    vec![("ε", epsilon.to_string()), ("left out", part.words().to_string())];
                found.push(Hypothesis::new(part, parameters));
            }
        }
        let world = |x: f64| -> Box<dyn World> { Box::new(smoothed(x, formula)) };
        let from = (epsilon, if epsilon > 0.0 { epsilon / 2.0 } else { USUAL });
        let fitted = linear(evidence, &stages, from, &world).unwrap_or_default();
        let sound = fitted.into_iter().filter(|x| (0.0..1.0).contains(x));
        found.extend(sound.map(|x| hypothesis(evidence, x, formula, 1)));
        found
    }
}

fn smoothed(
    epsilon: f64,
    formula: SmoothingFormula,
) -> Optioned<impl Fn(&mut HeadOptions) + Sync + 'static> {
    let change = move |options: &mut HeadOptions| {
        (options.declared.label_smoothing, options.declared.smoothing_formula) = (epsilon, formula);
    };
    Optioned { change, lse: DeclaredLse::new(), factor: 1.0 }
}

fn hypothesis(
    evidence: &Evidence<'_>,
    epsilon: f64,
    formula: SmoothingFormula,
    fitted: usize,
) -> Hypothesis {
    let declared = evidence.step.options.declared.label_smoothing;
    let parameters = vec![
        ("declared ε", declared.to_string()),
        ("ε", if epsilon == 0.0 { "none".into() } else { shown(epsilon) }),
        ("formula", format!("{formula:?}").to_lowercase()),
    ];
    Hypothesis::new(smoothed(epsilon, formula), parameters).fitted(fitted)
}

/// One of the two changes that smoothing makes to dlogits, left out.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// `-g (1 - s)` of the label is `-g`.
    Label,
    /// `-g s / K` of every class is not there.
    Spread,
}

impl Part {
    fn words(self) -> &'static str {
        match self {
            Part::Label => "the factor 1 - ε of the label's term",
            Part::Spread => "the term ε/K of every class",
        }
    }
}

impl World for Part {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, smooth]: [&mut [f64]; 3]) {
        match self {
            Part::Label => label.iter_mut().zip(tokens.g).for_each(|(to, g)| *to = -g),
            Part::Spread => smooth.fill(0.0),
        }
    }
}
