//! `label-prob-rounded-early`: p is rounded to few bits before 1 is subtracted from it.
//!
//! Real: Liger 1268 and 1329, TransformerEngine 3193. `p - 1` of a confident token is the
//! difference of two nearly equal numbers. If p is rounded first, its error is u (the unit
//! roundoff), not u (1 - p): relative to the gradient it is `1/(1 - p_y)` times larger, which norms
//! do not show.
//!
//! Detectors: dq or dk fails, the forward is right. Emulation: `g (round(p) - onehot)` as whole
//! entries of dlogits, with or without rounding the difference again before g multiplies it; or
//! `round(round(g p) - g onehot)`, as where the softmax part is stored first and the label's entry
//! read back.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use super::emulated::{Emulated, bases, has_labels, whole};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::detectors::single_tokens::Direct;
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Roundings, Stage};
use crate::kernels::formula::probability;
use crate::kernels::matrix::IGNORED;
use crate::kernels::policy::Policy;
use crate::kernels::round::Precision;
use crate::kernels::tiles::Tiles;
use crate::replay::world::{UnitTokens, World};

/// The catalogue's entry.
pub struct LabelProbRoundedEarly;

impl Cause for LabelProbRoundedEarly {
    fn id(&self) -> &'static str {
        "label-prob-rounded-early"
    }

    fn about(&self) -> &'static str {
        "the label's probability is rounded to few bits before 1 is taken off it, so that confident tokens lose their gradient"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["Liger-Kernel 1268", "Liger-Kernel 1329", "TransformerEngine 3193"]
    }

    fn advice(&self) -> &'static str {
        "take the label's 1 off p in f32, and round dlogits afterwards"
    }

    fn may_be_right(&self) -> bool {
        true
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        if !evidence.fails_any(&Stage::GRADIENTS) || !has_labels(evidence) {
            return Vec::new();
        }
        let logits = label_logits(evidence);
        let mut hypotheses = Vec::new();
        for base in bases(&roundings).into_iter().filter(|base| !base.dlogits.keeps_f32()) {
            let Some(label_logits) = logits.clone() else { break };
            let policy = Policy { path: whole(base.path), ..base };
            let world = Twice { policy, tiles: roundings.tiles, label_logits, rounds: Rounds::Gp };
            let parameter = ("g p rounded to", base.dlogits.name().to_string());
            hypotheses.push(Hypothesis::new(world, vec![parameter]));
        }
        // A kernel may keep p in either format, whatever format its operands have.
        for p in [Precision::Bf16, Precision::F16] {
            for base in bases(&roundings) {
                let policy = Policy { path: whole(base.path), p, ..base };
                let parameters = vec![
                    ("p rounded to", p.name().to_string()),
                    ("dlogits rounded to", base.dlogits.name().to_string()),
                ];
                if let Some(label_logits) = &logits {
                    let tiles = roundings.tiles;
                    let label_logits = label_logits.clone();
                    let world = Twice { policy, tiles, label_logits, rounds: Rounds::P };
                    let again = ("p - 1 rounded to", p.name().to_string());
                    let parameters = [&parameters[..], &[again]].concat();
                    hypotheses.push(Hypothesis::new(world, parameters));
                }
                let world = Emulated::backward(policy, roundings.tiles);
                hypotheses.push(Hypothesis::new(world, parameters));
            }
        }
        hypotheses
    }
}

type OfTokens = BTreeMap<Option<Microbatch>, Vec<f64>>;

/// Logits of the tokens' labels, `[T]` of each microbatch, 0 for ignored tokens. None with label
/// smoothing or a z-loss, where the rounded difference is not p minus 1.
fn label_logits(evidence: &Evidence<'_>) -> Option<OfTokens> {
    let declared = &evidence.step.options.declared;
    if declared.label_smoothing != 0.0 || declared.z_loss != 0.0 {
        return None;
    }
    let of_microbatch = |inputs: &MicrobatchInputs| {
        let direct = Direct::of_logits(evidence, inputs)?;
        let logit = |(t, &label): (usize, &u32)| match label {
            IGNORED => 0.0,
            label => direct.logit_at(t, label as usize).0,
        };
        let all = inputs.labels.iter().enumerate().map(logit).collect();
        Some((inputs.microbatch, all))
    };
    evidence.inputs.iter().map(of_microbatch).collect()
}

/// What is rounded before the label's part is added to it.
#[derive(Clone, Copy)]
enum Rounds {
    /// p, to the policy's format of p.
    P,
    /// The entry `g p`, to the policy's format of dlogits.
    Gp,
}

/// The softmax part is rounded, and then its sum with the label's part is rounded again.
struct Twice {
    policy: Policy,
    tiles: Tiles,
    label_logits: OfTokens,
    rounds: Rounds,
}

impl World for Twice {
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        Some((self.policy, self.tiles))
    }

    /// The policy computes `g p` plus the label's cotangent, so the cotangent is chosen such that
    /// this sum is the value rounded twice.
    fn cotangents(&self, tokens: &UnitTokens<'_>, [_, label, _]: [&mut [f64]; 3]) {
        let Some(logits) = self.label_logits.get(&tokens.inputs.microbatch) else { return };
        let format = match self.rounds {
            Rounds::P => self.policy.p,
            Rounds::Gp => self.policy.dlogits,
        };
        let rounded = |x: f64| format.round64(Precision::F32.round64(x));
        for (index, &t) in tokens.rows.iter().enumerate() {
            let (g, p) = (tokens.g[index], probability(logits[t], tokens.lse[index]));
            label[index] = match self.rounds {
                Rounds::P => g * (rounded(rounded(p) - 1.0) - rounded(p)),
                Rounds::Gp => rounded(rounded(g * p) - g) - g * p,
            };
        }
    }
}
