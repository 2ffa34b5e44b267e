//! `lse-logits-mismatch`: forward and backward use logits, or lse, of different precision, so that
//! the rows of p do not sum to 1.
//!
//! Real: marin 8217, ml-cross-entropy 55: lse kept in bf16 between forward and backward; a
//! backward that computes the logits again in another precision; a forward whose
//! reduction reads rounded logits.
//!
//! Detectors: a token's softmax part is `e^Δ` times what it should be; columns of dlogits do not
//! add up to zero. Emulation: lse rounded between the passes; the backward's logits rounded; lse
//! and label logits from rounded logits. Also lse rounded when the forward stores it, which the
//! backward then reads, with or without the loss.

use std::collections::BTreeMap;
use std::sync::Mutex;

use backtape::identity::Microbatch;
use backtape::role::Role;

use super::emulated::{Emulated, bases, forward, has_products};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Roundings, Stage};
use crate::kernels::policy::{LogitRounding, Path, Policy};
use crate::kernels::round::Precision;
use crate::replay::world::{Pass, Read, World};

/// The catalogue's entry.
pub struct LseLogitsMismatch;

impl Cause for LseLogitsMismatch {
    fn id(&self) -> &'static str {
        "lse-logits-mismatch"
    }

    fn about(&self) -> &'static str {
        "forward and backward see logits or lse of different precision: the rows of p do not sum to 1"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["marin 8217", "ml-cross-entropy 55"]
    }

    fn advice(&self) -> &'static str {
        "compute lse from the same logits, in the same precision, that the backward takes exp of, and keep it in f32"
    }

    fn may_be_right(&self) -> bool {
        true
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let mut hypotheses = Vec::new();
        for precision in [Precision::Bf16, Precision::F16] {
            if evidence.fails_any(&Stage::GRADIENTS) {
                hypotheses.push(kept(precision));
                hypotheses.extend(backward(evidence, &roundings, precision));
            }
            // Where lse was captured, the replay's backward starts from it, so another forward
            // would change no gradient.
            let captured = |inputs: &MicrobatchInputs| {
                evidence.step.find(Role::Lse, inputs.microbatch).is_some()
            };
            if evidence.fails(Stage::Lse) {
                hypotheses.extend([true, false].map(|loss| stored(precision, loss)));
            }
            let changes =
                evidence.fails_any(&Stage::GRADIENTS) && !evidence.inputs.iter().all(captured);
            if has_products(evidence) && (evidence.fails_any(&Stage::FORWARD) || changes) {
                hypotheses.extend(forwards(evidence, &roundings, precision));
            }
        }
        hypotheses
    }
}

/// lse kept in few bits between the passes.
fn kept(precision: Precision) -> Hypothesis {
    let parameters = vec![
        ("what", "lse between forward and backward".to_string()),
        ("rounded to", precision.name().to_string()),
    ];
    Hypothesis::new(Kept { precision }, parameters)
}

/// lse is rounded in the forward, and the backward reads the rounded one, which was captured.
/// `loss`: whether the loss reads it too.
fn stored(precision: Precision, loss: bool) -> Hypothesis {
    let readers = if loss { "the loss and the backward" } else { "the backward" };
    let parameters = vec![
        ("what", format!("lse, which {readers} read")),
        ("rounded to", precision.name().to_string()),
    ];
    let world = Stored { precision, loss, exact: Mutex::default() };
    Hypothesis::new(world, parameters)
}

struct Stored {
    precision: Precision,
    loss: bool,
    /// lse before it was rounded, by microbatch.
    exact: Mutex<BTreeMap<Option<Microbatch>, Vec<f64>>>,
}

impl World for Stored {
    fn lse(&self, pass: Pass, inputs: &MicrobatchInputs, lse: &mut [f64]) {
        let Ok(mut exact) = self.exact.lock() else { return };
        if pass == Pass::Forward {
            exact.insert(inputs.microbatch, lse.to_vec());
            self.precision.round_slice64(lse);
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        let exact = self.exact.lock().ok().filter(|_| !self.loss);
        if let Some(exact) = exact.as_ref().and_then(|exact| exact.get(&inputs.microbatch)) {
            let changes = nll.iter_mut().zip(exact).zip(read.lse.0);
            changes.for_each(|((nll, exact), rounded)| *nll += exact - rounded);
        }
        Vec::new()
    }
}

/// The hypotheses of rounded logits in the backward: rounded after the GEMM, after every option, or
/// at the end.
fn backward(
    evidence: &Evidence<'_>,
    roundings: &Roundings,
    precision: Precision,
) -> Vec<Hypothesis> {
    let finer = |base: &Policy| precision.unit_roundoff() > base.logits.unit_roundoff();
    let mut hypotheses = Vec::new();
    for base in bases(roundings).into_iter().filter(finer) {
        for logits_when in ways(evidence) {
            let parameters = vec![
                ("what", "logits of the backward".to_string()),
                ("rounded to", precision.name().to_string()),
                ("dlogits rounded to", base.dlogits.name().to_string()),
            ];
            let policy = Policy { logits: precision, logits_when, ..base };
            hypotheses
                .push(Hypothesis::new(Emulated::backward(policy, roundings.tiles), parameters));
        }
    }
    hypotheses
}

/// At which points logits may be rounded; only one where nothing follows the GEMM.
fn ways(evidence: &Evidence<'_>) -> Vec<LogitRounding> {
    let transform = evidence.step.options.transform;
    let biased = evidence.inputs.iter().any(|inputs| inputs.bias.is_some());
    match biased || !transform.is_identity() {
        true => vec![LogitRounding::Gemm, LogitRounding::Each, LogitRounding::End],
        false => vec![LogitRounding::Each],
    }
}

/// The hypotheses of rounded logits in the forward, for a fused head also without the label's
/// logit, which it may compute separately.
fn forwards(
    evidence: &Evidence<'_>,
    roundings: &Roundings,
    precision: Precision,
) -> Vec<Hypothesis> {
    let base = roundings.narrowest;
    if precision.unit_roundoff() <= base.logits.unit_roundoff() {
        return Vec::new();
    }
    let both = [true, false].into_iter();
    let labels = both.filter(|&label| label || base.path == Path::Fused);
    let ways = labels.flat_map(|label| ways(evidence).into_iter().map(move |when| (label, when)));
    let hypothesis_of = |(label, logits_when): (bool, LogitRounding)| {
        let policy = Policy { logits: precision, logits_when, ..base };
        let parameters = vec![
            ("what", "logits of the forward".to_string()),
            ("rounded to", precision.name().to_string()),
            ("the label's logit rounded", label.to_string()),
        ];
        let forward = forward(evidence, &policy, label);
        Hypothesis::new(Emulated { policy: None, forward }, parameters)
    };
    ways.map(hypothesis_of).collect()
}

struct Kept {
    precision: Precision,
}

impl World for Kept {
    fn lse(&self, pass: Pass, _inputs: &MicrobatchInputs, lse: &mut [f64]) {
        if pass == Pass::Backward {
            lse.iter_mut().for_each(|x| *x = self.precision.round64(*x));
        }
    }
}
