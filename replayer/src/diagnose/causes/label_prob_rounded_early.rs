//! `label-prob-rounded-early`: p is rounded to few bits before 1 is taken off it.
//!
//! Real: Liger 1268 and 1329, TransformerEngine 3193. `p - 1` of a confident token is the
//! difference of two nearly equal numbers: rounded before, it errs by u, not by u (1 - p).
//! The gradient of confident tokens is off by `1/(1 - p_y)` and more, while norms hide it.
//!
//! Detectors: dq or dk fails, the forward is right.
//! Emulation: `g (round(p) - onehot)`, whole dlogits.

use super::emulated::{Emulated, bases, has_labels, likely_formats, whole};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::kernels::policy::Policy;

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
        if !evidence.fails_any(&GRADIENTS) || !has_labels(evidence) {
            return Vec::new();
        }
        let mut found = Vec::new();
        for p in likely_formats(&roundings) {
            for base in bases(&roundings) {
                let policy = Policy { path: whole(base.path), p, ..base };
                let parameters = vec![
                    ("p rounded to", p.name().to_string()),
                    ("dlogits rounded to", base.dlogits.name().to_string()),
                ];
                let world = Emulated::backward(policy, roundings.tiles);
                found.push(Hypothesis::new(world, parameters));
            }
        }
        found
    }
}
