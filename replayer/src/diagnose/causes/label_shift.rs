//! `label-shift`: the loss was taken against the labels of other positions.
//!
//! Detectors: the token fit of dq leaves a residual near 1, the dense parts are right.
//! Emulation: the recorded labels, rolled inside each sequence or over the whole batch.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::{Evidence, FORWARD, GRADIENTS};
use crate::head::{HeadStep, MicrobatchInputs};
use crate::kernels::matrix::IGNORED;
use crate::replay::world::World;

/// The catalogue's entry.
pub struct LabelShift;

/// Positions that labels are commonly off by.
const SHIFTS: [isize; 5] = [1, -1, 2, -2, 3];

impl Cause for LabelShift {
    fn id(&self) -> &'static str {
        "label-shift"
    }

    fn about(&self) -> &'static str {
        "the loss was taken against labels of other positions than the recorded ones"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["transformers 37830"]
    }

    fn advice(&self) -> &'static str {
        "shift labels exactly once, inside each sequence: either in the data or in the loss"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if !evidence.fails_any(&GRADIENTS) && !evidence.fails_any(&FORWARD) {
            return Vec::new();
        }
        let several = evidence.inputs.iter().any(|one| one.sequence < one.tokens());
        let mut found = Vec::new();
        for by in SHIFTS {
            for across in [false, true] {
                for wraps in [false, true] {
                    if across && !several {
                        continue;
                    }
                    let over = if across { "the whole batch" } else { "each sequence" };
                    let end = if wraps { "wrapped around" } else { "ignored" };
                    let parameters = vec![
                        ("shift", by.to_string()),
                        ("over", over.to_string()),
                        ("ends", end.to_string()),
                    ];
                    found.push(Hypothesis::new(Shifted { by, across, wraps }, parameters));
                }
            }
        }
        found
    }
}

struct Shifted {
    by: isize,
    across: bool,
    wraps: bool,
}

impl World for Shifted {
    fn inputs(&self, _step: &HeadStep<'_>, inputs: &mut MicrobatchInputs) {
        let length = if self.across { inputs.tokens() } else { inputs.sequence };
        let old = inputs.labels.clone();
        let length = length.max(1);
        for (start, sequence) in inputs.labels.chunks_mut(length).enumerate() {
            let (start, n) = (start * length, sequence.len() as isize);
            for (t, label) in sequence.iter_mut().enumerate() {
                let from = t as isize + self.by;
                *label = match self.wraps || (0..n).contains(&from) {
                    true => old[start + from.rem_euclid(n) as usize],
                    false => IGNORED,
                };
            }
        }
    }
}
