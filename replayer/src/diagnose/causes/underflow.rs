//! `underflow`: entries of dlogits fall below the range of f16 and become zero, or keep few
//! of their bits.
//!
//! Real: Liger 512; f16 training without a scaled loss. A mean over many tokens makes g
//! small, and `g p` of most classes is below 6e-8.
//!
//! Detectors: dq or dk fails, and in a sample at least one entry of dlogits in a hundred is below
//! f16's smallest normal number: the entry itself, where dlogits are not declared f16, or the entry
//! without a scale of the loss that is applied too late. Emulation: `round16(g p)`, with subnormal
//! numbers; a scale of the loss applied before the rounding, or after it.

use super::emulated::{Emulated, has_products};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::evidence::Evidence;
use crate::head::{MicrobatchInputs, Roundings, Stage};
use crate::kernels::Tiles;
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;
use crate::replay::world::{StagePlace, World};

/// The catalogue's entry.
pub struct Underflow;

/// The smallest normal number of f16.
const LEAST: f64 = 6.103_515_625e-5;
/// The cause is tried if more than this share of the entries is below that.
const SHARE: f64 = 0.01;
/// How many tokens of a unit are sampled.
const TOKENS: usize = 8;

impl Cause for Underflow {
    fn id(&self) -> &'static str {
        "underflow"
    }

    fn about(&self) -> &'static str {
        "entries of dlogits fall below the range of f16: they become zero or lose most of their bits"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["Liger-Kernel 512"]
    }

    fn advice(&self) -> &'static str {
        "keep dlogits in f32 or bf16, or scale the loss before the backward and unscale the gradients after it"
    }

    fn may_be_right(&self) -> bool {
        true
    }

    fn effort(&self) -> Effort {
        Effort::Some
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let half = Precision::F16;
        if !evidence.fails_any(&Stage::GRADIENTS) || !has_products(evidence) {
            return Vec::new();
        }
        // Where dlogits are declared f16, rounding them to f16 is no fault.
        let declared = roundings.widest.dlogits == half && roundings.narrowest.dlogits == half;
        // A scale that should multiply the loss may have multiplied the gradient after the
        // rounding.
        let cotangent = evidence.step.options.cotangent;
        let early = (!declared).then_some(1.0);
        let late = (cotangent.abs() > 1.0).then_some(cotangent);
        let mut hypotheses = Vec::new();
        for scale in early.into_iter().chain(late) {
            let share = small(evidence, &roundings.narrowest, scale).unwrap_or(0.0);
            if !(share > SHARE) {
                continue;
            }
            let format = roundings.narrowest.p;
            hypotheses.push(hypothesis(&roundings, format, (scale, share)));
            // Rounding p too is tried only if the declaration leaves that open; otherwise it would
            // be another fault.
            if half != format && half.unit_roundoff() <= roundings.widest.p.unit_roundoff() {
                hypotheses.push(hypothesis(&roundings, half, (scale, share)));
            }
        }
        hypotheses
    }
}

fn hypothesis(roundings: &Roundings, p: Precision, (scale, share): (f64, f64)) -> Hypothesis {
    let dlogits = Precision::F16;
    let mut parameters = vec![
        ("dlogits rounded to", dlogits.name().to_string()),
        ("p rounded to", p.name().to_string()),
        ("entries below the normal range", format!("{:.0} %", 100.0 * share)),
    ];
    if scale != 1.0 {
        parameters.push(("the loss's scale", format!("{scale} multiplies after the rounding")));
    }
    let mut policy = Policy { p, dlogits, ..roundings.narrowest };
    if policy.path == Path::Fused {
        policy.label_grad = dlogits;
    }
    Hypothesis::new(
        Late { emulated: Emulated::backward(policy, roundings.tiles), scale },
        parameters,
    )
}

/// dlogits are rounded before the scale of the loss multiplies them.
struct Late {
    emulated: Emulated,
    scale: f64,
}

impl World for Late {
    fn policy(&self, declared: &Roundings) -> Option<(Policy, Tiles)> {
        self.emulated.policy(declared)
    }

    fn upstream(&self, _inputs: &MicrobatchInputs, g: &mut [f64]) {
        g.iter_mut().for_each(|g| *g /= self.scale);
    }

    fn scale(&self, place: StagePlace) -> f64 {
        if place.stage.is_gradient() { self.scale } else { 1.0 }
    }
}

/// Share of the entries of dlogits of some tokens, divided by `scale`, that are nonzero and below
/// the normal range of f16.
fn small(evidence: &Evidence<'_>, policy: &Policy, scale: f64) -> Option<f64> {
    let unit = evidence.worst_unit(&Stage::GRADIENTS)?;
    let classes: Vec<usize> =
        (0..unit.inputs(evidence)?.head(evidence.step)?.valid_vocab).collect();
    let counted: Vec<usize> = (0..unit.rows.len()).filter(|&t| unit.g[t] != 0.0).collect();
    let tokens: Vec<usize> =
        (0..TOKENS.min(counted.len())).map(|i| counted[i * counted.len() / TOKENS]).collect();
    let entries = unit.part(evidence, &tokens, &classes, true)?.entries(policy);
    let below = entries.iter().filter(|x| (**x / scale).abs() < LEAST && **x != 0.0).count();
    Some(below as f64 / entries.len().max(1) as f64)
}
