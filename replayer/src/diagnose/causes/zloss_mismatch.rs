//! `zloss-mismatch`: the z-loss `λ lse²` is not as declared in the loss or in the gradient: left
//! out, with another λ, or there although none was declared.
//!
//! Detectors: a token's softmax part is `1 + c lse` times what it should be; c is fitted to
//! everything that fails. Also tried: that the term has the largest logit, or lse minus that, in
//! the place of lse; that it is divided by another count of tokens; and that tokens that take no
//! part have it too. Emulation: `g_lse = g (1 + c lse)` with c in {0, λ, 2λ, 4λ} or the fitted one,
//! and the loss with or without its term.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;
use backtape::nan::larger;

use super::zloss_counts;
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::fitted_numbers::{Wanted, linear, shown};
use crate::diagnose::evidence::Evidence;
use crate::head::{HeadOptions, Stage};
use crate::replay::world::{UnitTokens, World};

/// The catalogue's entry.
pub struct ZLossMismatch;

/// A usual λ, to start a fit with.
const USUAL: f64 = 1e-4;

impl Cause for ZLossMismatch {
    fn id(&self) -> &str {
        "zloss-mismatch"
    }

    fn options(&self) -> &'static [&'static str] {
        &["z_loss"]
    }

    fn about(&self) -> &'static str {
        "the z-loss is left out of the loss or of the gradient, or counted with another factor than the declared one"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["OLMo-core 702", "ml-cross-entropy 43"]
    }

    fn advice(&self) -> &'static str {
        "declare the z-loss that the job has, and multiply the softmax part by 1 + 2 λ lse with the λ of the loss"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let gradients = evidence.fails_any(&Stage::GRADIENTS);
        if evidence.step.is_policy_loss() || !(gradients || evidence.fails(Stage::Loss)) {
            return Vec::new();
        }
        let declared = &evidence.step.options.declared;
        let (lambda, in_loss) =
            (declared.z_loss, declared.z_loss_in_loss && declared.z_loss != 0.0);
        let mut hypotheses = Vec::new();
        // The factors c of lse in the gradient that are tried, each with how many numbers were
        // fitted for it.
        let mut slopes = vec![(2.0 * lambda, 0)];
        if gradients && lambda != 0.0 {
            slopes.extend([0.0, lambda, 4.0 * lambda].map(|slope| (slope, 0)));
            // Divided once too often, or not at all, by the number of microbatches or ranks.
            let counts = [evidence.microbatches(), evidence.ranks()];
            let several = counts.into_iter().filter(|&n| n > 2).map(|n| n as f64);
            slopes
                .extend(several.flat_map(|n| [2.0 * lambda / n, 2.0 * lambda * n]).map(|x| (x, 0)));
        }
        if gradients {
            let world = |slope: f64| -> Box<dyn World> { Box::new(ZLoss { loss: None, slope }) };
            let from = (2.0 * lambda, 2.0 * lambda.max(USUAL));
            let fitted = linear(evidence, (&Stage::GRADIENTS, Wanted::Part), from, &world)
                .unwrap_or_default();
            slopes.extend(fitted.into_iter().map(|slope| (slope, 1)));
        }
        if gradients && evidence.fails(Stage::Loss) {
            // Where loss and gradients have the same λ, the loss gives it more exactly.
            let stages = [&Stage::GRADIENTS[..], &[Stage::Loss]].concat();
            let world = |loss: f64| -> Box<dyn World> {
                Box::new(ZLoss { loss: Some(loss), slope: 2.0 * loss })
            };
            let from = (lambda, lambda.max(USUAL));
            let fitted =
                linear(evidence, (&stages, Wanted::Part), from, &world).unwrap_or_default();
            slopes.extend(fitted.into_iter().map(|loss| (2.0 * loss, 1)));
        }
        hypotheses.extend(of_largest(evidence, 2.0 * lambda));
        hypotheses.extend(zloss_counts::hypotheses(evidence));
        hypotheses.extend(zloss_counts::of_all_tokens(evidence));
        for (slope, fitted) in slopes {
            let mut losses = vec![None];
            if evidence.fails(Stage::Loss) {
                losses = vec![Some(slope / 2.0)];
                losses.extend(if in_loss { [Some(0.0)] } else { [Some(lambda)] });
            }
            for loss in losses {
                if slope != 2.0 * lambda || loss.is_some() {
                    hypotheses.push(ZLoss { loss, slope }.hypothesis(lambda, fitted));
                }
            }
        }
        if evidence.fails(Stage::Loss) {
            let slope = 2.0 * lambda;
            let world =
                |loss: f64| -> Box<dyn World> { Box::new(ZLoss { loss: Some(loss), slope }) };
            let from = (if in_loss { lambda } else { 0.0 }, lambda.max(USUAL));
            let fitted =
                linear(evidence, (&[Stage::Loss], Wanted::Part), from, &world).unwrap_or_default();
            let of_loss = |loss: f64| ZLoss { loss: Some(loss), slope }.hypothesis(lambda, 1);
            hypotheses.extend(fitted.into_iter().map(of_loss));
        }
        hypotheses
    }
}

/// λ of the loss, if not as declared, and the factor `c` of lse in the gradient.
struct ZLoss {
    loss: Option<f64>,
    slope: f64,
}

impl ZLoss {
    fn hypothesis(self, lambda: f64, fitted: usize) -> Hypothesis {
        let in_words = |x: f64| if x == 0.0 { "left out".into() } else { shown(x) };
        let mut parameters = vec![
            ("declared λ", lambda.to_string()),
            ("λ of the gradient", in_words(self.slope / 2.0)),
        ];
        parameters.extend(self.loss.map(|loss| ("λ of the loss", in_words(loss))));
        Hypothesis::new(self, parameters).fitted(fitted)
    }
}

impl World for ZLoss {
    fn options(&self, options: &mut HeadOptions) {
        if let Some(loss) = self.loss {
            (options.declared.z_loss, options.declared.z_loss_in_loss) = (loss, loss != 0.0);
        }
    }

    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, ..]: [&mut [f64]; 3]) {
        for ((to, l), &g) in lse.iter_mut().zip(tokens.lse).zip(tokens.g) {
            *to = if g == 0.0 { 0.0 } else { g * (1.0 + self.slope * l) };
        }
    }
}

/// Hypotheses that the term has the largest logit of each token in the place of lse, or lse minus
/// that: the logarithm of the sum of `exp(z - max)`, to which a kernel forgot to add the maximum.
fn of_largest(evidence: &Evidence<'_>, slope: f64) -> Vec<Hypothesis> {
    let gradients: Vec<_> = evidence.failing_of(&[Stage::Dq, Stage::Dk]).collect();
    let (mut largest, mut rest) = (Terms::new(), Terms::new());
    for (key, _) in gradients.iter().filter(|_| slope != 0.0) {
        let Some(plane) = evidence.plane(*key) else { return Vec::new() };
        for (index, &token) in plane.rows.iter().enumerate() {
            // p is `exp(z - lse)`.
            let less = plane.p.row(index).iter().copied().fold(f64::MIN_POSITIVE, larger).ln();
            largest.entry(key.microbatch).or_default().insert(token, plane.lse[index] + less);
            rest.entry(key.microbatch).or_default().insert(token, -less);
        }
    }
    let hypothesis_of = |(terms, words): (Terms, &str)| {
        let parameters = vec![("the term of the gradient multiplies", words.to_string())];
        Hypothesis::new(OfLargest { terms, slope }, parameters)
    };
    let all = [(rest, "lse less the largest logit"), (largest, "the largest logit")];
    all.into_iter().filter(|(terms, _)| !terms.is_empty()).map(hypothesis_of).collect()
}

/// The number that replaces lse, for each token, by microbatch.
type Terms = BTreeMap<Option<Microbatch>, BTreeMap<usize, f64>>;

struct OfLargest {
    terms: Terms,
    slope: f64,
}

impl World for OfLargest {
    fn cotangents(&self, tokens: &UnitTokens<'_>, [lse, ..]: [&mut [f64]; 3]) {
        let Some(terms) = self.terms.get(&tokens.inputs.microbatch) else { return };
        for ((to, row), &g) in lse.iter_mut().zip(tokens.rows).zip(tokens.g) {
            if let Some(term) = terms.get(row).filter(|_| g != 0.0) {
                *to = g * (1.0 + self.slope * term);
            }
        }
    }
}
