//! `lse-cancellation`: the loss is the difference of two large numbers in few bits, while
//! the gradients, which need no such difference, are right.
//!
//! Real: mlx 4188 and 4520, optax 1792. for a confident token both lse and the label's logit `z_y`
//! are large and `lse - z_y` is small: if they are rounded first, few correct bits of the
//! difference remain.
//!
//! Detectors: the loss (or lse) fails, and no gradient does.
//! Emulation: lse and the label's logit, or only lse, or only their difference rounded; the
//! largest logit and the label's;
//! `-log(round(p_y))`; a rounded lse that only the loss reads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use backtape::identity::Microbatch;
use backtape::nan::largest;

use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::detectors::single_tokens::{Direct, SCALAR, WORK};
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::formula::probability;
use crate::kernels::round::Precision;
use crate::replay::world::{Pass, Read, World};

/// The catalogue's entry.
pub struct LseCancellation;

/// A value within this many standard deviations of a rounding tie may round either way.
const REACH: f64 = 4.0;

impl Cause for LseCancellation {
    fn id(&self) -> &'static str {
        "lse-cancellation"
    }

    fn about(&self) -> &'static str {
        "the loss is a difference of large numbers taken in few bits; the gradients do not need it and are right"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["mlx 4188", "mlx 4520", "optax 1792"]
    }

    fn advice(&self) -> &'static str {
        "take lse - logit in f32, or the logits' distance from their maximum before anything is summed"
    }

    fn may_be_right(&self) -> bool {
        true
    }

    /// Tried together with `lse-logits-mismatch`, whose lse in few bits explains the loss as well.
    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let options = &evidence.step.options.declared;
        let plain = options.z_loss == 0.0 && options.label_smoothing == 0.0;
        let wrong = [Stage::Loss, Stage::Lse, Stage::Logprobs];
        if !plain || !evidence.fails_any(&wrong) || evidence.fails(Stage::LabelLogits) {
            return Vec::new();
        }
        let most = Arc::new(largest_logits(evidence));
        let mut hypotheses = Vec::new();
        for precision in [Precision::Bf16, Precision::F16] {
            let lse = evidence.fails(Stage::Lse);
            // Gradients may fail only where a rounded lse was captured that the job's backward did
            // not read.
            if evidence.fails_any(&Stage::GRADIENTS) && !lse {
                continue;
            }
            for (what, words) in WAYS {
                let known = what != What::Maximum || !most.is_empty();
                if known && lse == (what == What::KeptLse) {
                    let parameters =
                        vec![("rounded", words.to_string()), ("to", precision.name().to_string())];
                    hypotheses.push(Hypothesis::new(
                        Rounded::new(what, precision, most.clone()),
                        parameters,
                    ));
                }
            }
        }
        hypotheses
    }
}

/// Which values are rounded to few bits before the loss is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Both,
    Lse,
    Difference,
    BothAndDifference,
    Probability,
    KeptLse,
    /// The largest logit and the label's are rounded and subtracted; lse minus the largest logit is
    /// added to that.
    Maximum,
}

const WAYS: [(What, &str); 7] = [
    (What::BothAndDifference, "lse, the label's logit and their difference"),
    (What::Both, "lse and the label's logit"),
    (What::Lse, "lse, for the loss"),
    (What::Difference, "the difference of lse and the label's logit"),
    (What::Probability, "the label's probability, before the log"),
    (What::KeptLse, "lse, which only the loss reads"),
    (What::Maximum, "the largest logit and the label's, before they are subtracted"),
];

struct Rounded {
    what: What,
    precision: Precision,
    /// lse before it was rounded, by microbatch.
    exact: Mutex<BTreeMap<Option<Microbatch>, Vec<f64>>>,
    /// Each token's largest logit.
    largest: Arc<OfTokens>,
}

type OfTokens = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// Each token's largest logit, by microbatch; without microbatches where that takes too much work.
fn largest_logits(evidence: &Evidence<'_>) -> OfTokens {
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let direct = Direct::of_logits(evidence, inputs)?;
        // `Direct` counts its own products.
        let work = direct.work().saturating_mul(SCALAR * inputs.tokens());
        if work > WORK || evidence.spend(0) {
            return None;
        }
        let largest_of =
            |t: usize| direct.logits_at(t).into_iter().fold(f64::NEG_INFINITY, f64::max);
        Some((inputs.microbatch, (0..inputs.tokens()).map(largest_of).collect()))
    };
    evidence.inputs.iter().filter_map(of_microbatch).collect()
}

impl Rounded {
    fn new(what: What, precision: Precision, largest: Arc<OfTokens>) -> Rounded {
        Rounded { what, precision, exact: Mutex::new(BTreeMap::new()), largest }
    }

    /// `largest`: the token's largest logit.
    fn loss(&self, lse: f64, label: f64, largest: f64) -> f64 {
        let round = |x: f64| self.precision.round64(x);
        match self.what {
            What::Both => round(lse) - round(label),
            What::Lse => round(lse) - label,
            What::Difference => round(lse - label),
            What::BothAndDifference => round(round(lse) - round(label)),
            What::Probability => -round(probability(label, lse)).ln(),
            What::KeptLse => lse - label,
            What::Maximum => (lse - largest) + (round(largest) - round(label)),
        }
    }
}

impl World for Rounded {
    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let Ok(mut exact) = self.exact.lock() else { return };
        match pass {
            _ if self.what != What::KeptLse => {}
            Pass::Forward => {
                exact.insert(inputs.microbatch, lse.to_vec());
                self.precision.round_slice64(lse);
            }
            Pass::Backward => {
                if let Some(exact) = exact.get(&inputs.microbatch) {
                    lse.copy_from_slice(exact);
                }
            }
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        let most = self.largest.get(&inputs.microbatch);
        let ((lse, lse_var), (label, label_var)) = (read.lse, read.label);
        let mut ties = Vec::with_capacity(nll.len());
        for (t, nll) in nll.iter_mut().enumerate() {
            let most = most.map_or(label[t], |most| most[t]);
            *nll = self.loss(lse[t], label[t], most);
            let (a, b) = (REACH * lse_var[t].sqrt(), REACH * label_var[t].sqrt());
            let corners = [(-a, -b), (-a, b), (a, -b), (a, b)];
            let off =
                corners.map(|(a, b)| (self.loss(lse[t] + a, label[t] + b, most) - *nll).abs());
            ties.push(largest(off));
        }
        ties
    }
}
