//! `smoothing-mismatch`: labels are not smoothed as declared: not at all, with another ε, by the
//! other formula, or only in a part of the gradient.
//!
//! Real, too: tensor-parallel ranks that smooth over their own classes (Megatron-LM 737): ε is
//! spread over K/n classes, and the loss has the mean of one rank's logits.
//!
//! Detectors: gradients and loss are linear in ε, which is fitted to everything that fails, as are
//! the factors of its two parts (the label's factor 1 - ε, and the spread ε/K); the axes of the
//! mesh give how many ranks may have cut the vocabulary. Emulation: the other smoothing; forward
//! and backward are judged separately. Also ε spread over the padding's columns, with or without
//! the entries that these then have; and solved factors of the parts, compared with those that
//! another number of classes gives.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backtape::head::SmoothingFormula;
use backtape::identity::Microbatch;

use super::{over_padding, smoothing_parts};
use crate::assemble::Row;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::fitted_numbers::{Wanted, linear, shown};
use crate::diagnose::detectors::single_tokens::{Direct, WORK};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{ChangedOptions, DeclaredLse};
use crate::head::{HeadOptions, MicrobatchInputs, Stage};
use crate::replay::world::{Read, UnitTokens, World};

/// The catalogue's entry.
pub struct SmoothingMismatch;

/// A usual ε, as the step of a fit.
const USUAL: f64 = 0.1;
/// How near, relatively, a fitted factor must be to a number of ranks to stand for it.
const NEAR: f64 = 0.03;
/// A fitted factor below this counts as 0: the part is left out.
const NONE: f64 = 0.05;

impl Cause for SmoothingMismatch {
    fn id(&self) -> &'static str {
        "smoothing-mismatch"
    }

    fn options(&self) -> &'static [&'static str] {
        &["label_smoothing"]
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
        let stages = [&Stage::GRADIENTS[..], &[Stage::Loss]].concat();
        if evidence.step.is_policy_loss() || !evidence.fails_any(&stages) {
            return Vec::new();
        }
        let declared = &evidence.step.options.declared;
        let (epsilon, formula) = (declared.label_smoothing, declared.smoothing_formula);
        let mut hypotheses = Vec::new();
        if epsilon > 0.0 {
            let other = match formula {
                SmoothingFormula::Uniform => SmoothingFormula::Megatron,
                SmoothingFormula::Megatron => SmoothingFormula::Uniform,
            };
            hypotheses.push(hypothesis(evidence, 0.0, formula, 0));
            hypotheses.push(hypothesis(evidence, epsilon, other, 0));
            for part in [Part::Label, Part::Spread] {
                hypotheses.extend(part.hypotheses(evidence));
            }
            hypotheses.extend(over_one_ranks_classes(evidence));
            hypotheses.extend(smoothing_parts::hypotheses(evidence));
            hypotheses.extend(over_padding::hypotheses(evidence));
        }
        let world = |x: f64| -> Box<dyn World> { Box::new(smoothed(x, formula)) };
        let from = (epsilon, if epsilon > 0.0 { epsilon / 2.0 } else { USUAL });
        let fitted = linear(evidence, (&stages, Wanted::Part), from, &world).unwrap_or_default();
        let sound = fitted.into_iter().filter(|x| (0.0..1.0).contains(x));
        hypotheses.extend(sound.map(|x| hypothesis(evidence, x, formula, 1)));
        hypotheses
    }
}

fn smoothed(
    epsilon: f64,
    formula: SmoothingFormula,
) -> ChangedOptions<impl Fn(&mut HeadOptions) + Send + Sync + 'static> {
    let change = move |options: &mut HeadOptions| {
        (options.declared.label_smoothing, options.declared.smoothing_formula) = (epsilon, formula);
    };
    ChangedOptions { change, lse: DeclaredLse::new(), factor: 1.0 }
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

/// Hypotheses of smoothing over the classes of one of several ranks that cut the vocabulary.
fn over_one_ranks_classes(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut hypotheses = Vec::new();
    for ranks in cuts(evidence) {
        let whose = if evidence.fails(Stage::Loss) { ranks.min(SHOWN) } else { 1 };
        for rank in 0..whose {
            let Some(world) = Local::new(evidence, ranks, rank) else { break };
            let mut parameters = vec![
                ("smoothed over", format!("the classes of one of {ranks} ranks")),
                ("the loss is that of", format!("part {rank} of the vocabulary")),
            ];
            if evidence.agrees(Stage::Dq) {
                parameters.push(("in", "the loss; gradients have the declared smoothing".into()));
                let spread = [world.spread[0]; 2];
                let world = Local { spread, in_loss_alone: true, ..world.clone() };
                hypotheses.push(Hypothesis::new(world, parameters.clone()));
            }
            let world = Local { in_loss_alone: evidence.agrees(Stage::Dq), ..world };
            hypotheses.push(Hypothesis::new(world, parameters));
        }
    }
    hypotheses
}

/// The numbers of ranks that may have cut the vocabulary.
pub(super) fn cuts(evidence: &Evidence<'_>) -> BTreeSet<usize> {
    let manifest = &evidence.step.dump.manifest;
    let sizes = manifest.mesh.0.iter().map(|(_, size)| *size).chain([manifest.world_size]);
    sizes.map(|size| size as usize).filter(|&n| n > 1).collect()
}

/// The loss of at most this many ranks is tried for the recorded one.
const SHOWN: usize = 4;

#[derive(Clone)]
struct Local {
    classes: usize,
    in_loss_alone: bool,
    /// Declared and other share of the target that is spread.
    spread: [f64; 2],
    /// Mean of all logits and of the rank's own, of each token.
    means: Means,
}

impl Local {
    fn new(evidence: &Evidence<'_>, ranks: usize, rank: usize) -> Option<Local> {
        let options = &evidence.step.options;
        let first = evidence.inputs.first()?.head(evidence.step)?;
        let (rows, valid) = (first.k.rows, first.valid_vocab);
        if !rows.is_multiple_of(ranks) || rows / ranks < 2 {
            return None;
        }
        let classes = rows / ranks;
        let own_classes = rank * classes..valid.min((rank + 1) * classes);
        let means =
            if own_classes.is_empty() { Means::new() } else { means(evidence, own_classes)? };
        let spread = [options.smoothing(valid), options.smoothing(classes)];
        Some(Local { classes, in_loss_alone: false, spread, means })
    }
}

/// Mean of all logits and of those of some classes, of each token, by microbatch.
pub(super) type Means = BTreeMap<Option<Microbatch>, Vec<[f64; 2]>>;

/// Computes them where the loss fails; `None` where that takes too much work.
pub(super) fn means(evidence: &Evidence<'_>, own_classes: Range<usize>) -> Option<Means> {
    let mut means = Means::new();
    for inputs in evidence.inputs.iter().filter(|_| evidence.fails(Stage::Loss)) {
        let direct = Direct::new(evidence, inputs)?;
        if direct.work().saturating_mul(inputs.tokens()) > WORK {
            return None;
        }
        let means_of = |t: usize| {
            let z = direct.against(&direct.q(Row::From(t)), &Row::From).logits;
            let mean = |z: &[f64]| z.iter().sum::<f64>() / z.len() as f64;
            [mean(&z), mean(&z[own_classes.clone()])]
        };
        means.insert(inputs.microbatch, (0..inputs.tokens()).map(means_of).collect());
    }
    Some(means)
}

impl World for Local {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, smooth]: [&mut [f64]; 3]) {
        if self.in_loss_alone {
            return;
        }
        let s = self.spread[1];
        for ((label, smooth), g) in label.iter_mut().zip(smooth).zip(tokens.g) {
            (*label, *smooth) = (-g * (1.0 - s), -g * s / self.classes as f64);
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        let [s, other] = self.spread;
        if let Some(means) = self.means.get(&inputs.microbatch) {
            for ((nll, [all, own_mean]), label) in nll.iter_mut().zip(means).zip(read.label.0) {
                *nll += (other - s) * label + s * all - other * own_mean;
            }
        }
        Vec::new()
    }
}

/// One of the two changes that smoothing makes to dlogits.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// The label's entry `-g (1 - s)`, which is `-g` without smoothing.
    Label,
    /// The entry `-g s / K` of every class.
    Spread,
}

/// A part is multiplied by a factor.
struct Times {
    part: Part,
    times: f64,
    /// Declared share of the target that is spread.
    spread: f64,
}

impl Part {
    fn words(self) -> &'static str {
        match self {
            Part::Label => "the factor 1 - ε of the label's term",
            Part::Spread => "the term ε/K of every class",
        }
    }

    /// The hypotheses that this part is left out, or multiplied by a fitted factor: by a number of
    /// ranks that may have cut the vocabulary, where the factor is near one.
    fn hypotheses(self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let options = &evidence.step.options;
        let valid = evidence.inputs.iter().find_map(|inputs| inputs.head(evidence.step));
        let spread = valid.map_or(0.0, |head| options.smoothing(head.valid_vocab));
        let epsilon = ("ε", options.declared.label_smoothing.to_string());
        let multiplied = move |times: f64| Times { part: self, times, spread };
        let left_out = ("left out", self.words().to_string());
        let mut hypotheses =
            vec![Hypothesis::new(multiplied(0.0), vec![epsilon.clone(), left_out])];
        let world = |times: f64| -> Box<dyn World> { Box::new(multiplied(times)) };
        let fitted = linear(evidence, (&Stage::GRADIENTS, Wanted::Part), (1.0, 1.0), &world)
            .unwrap_or_default();
        for times in fitted.into_iter().filter(|x| x.abs() > NONE) {
            let ranks = cuts(evidence).into_iter().map(|n| n as f64);
            let counted = ranks.into_iter().find(|n| (times - n).abs() <= NEAR * n);
            let words = format!("{} times {}", shown(counted.unwrap_or(times)), self.words());
            let parameters = vec![epsilon.clone(), ("instead", words)];
            let hypothesis = Hypothesis::new(multiplied(counted.unwrap_or(times)), parameters);
            hypotheses.push(if counted.is_some() { hypothesis } else { hypothesis.fitted(1) });
        }
        hypotheses
    }
}

impl World for Times {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, smooth]: [&mut [f64]; 3]) {
        match self.part {
            Part::Label => {
                let less = self.times * self.spread;
                label.iter_mut().zip(tokens.g).for_each(|(to, g)| *to = -g * (1.0 - less));
            }
            Part::Spread => smooth.iter_mut().for_each(|to| *to *= self.times),
        }
    }
}
