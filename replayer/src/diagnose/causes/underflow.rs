//! `underflow`: entries of dlogits fall below the range of f16 and become zero, or keep few
//! of their bits.
//!
//! Real: Liger 512; f16 training without a scaled loss. A mean over many tokens makes g
//! small, and `g p` of most classes is below 6e-8.
//!
//! Detectors: dq or dk fails, dlogits were not declared f16, and at least one entry in a
//! hundred of a sample falls below f16's smallest normal number.
//! Emulation: `round16(g p)`, with subnormal numbers.

use super::emulated::{Emulated, has_products};
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;

/// The catalogue's entry.
pub struct Underflow;

/// The smallest normal number of f16.
const LEAST: f64 = 6.103_515_625e-5;
/// Share of entries below it from which this is worth trying.
const SHARE: f64 = 0.01;
/// Tokens of a unit that are looked at.
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

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let half = Precision::F16;
        if !evidence.fails_any(&GRADIENTS)
            || !has_products(evidence)
            || roundings.widest.dlogits == half && roundings.narrowest.dlogits == half
        {
            return Vec::new();
        }
        let Some(share) = small(evidence, &roundings.narrowest).filter(|&share| share > SHARE)
        else {
            return Vec::new();
        };
        let one = |(p, dlogits): (Precision, Precision)| {
            let parameters = vec![
                ("dlogits rounded to", dlogits.name().to_string()),
                ("p rounded to", p.name().to_string()),
                ("entries below the normal range", format!("{:.0} %", 100.0 * share)),
            ];
            let mut policy = Policy { p, dlogits, ..roundings.narrowest };
            if policy.path == Path::Fused {
                policy.label_grad = half;
            }
            Hypothesis::new(Emulated::backward(policy, roundings.tiles), parameters)
        };
        [(roundings.narrowest.p, half), (half, half)].into_iter().map(one).collect()
    }
}

/// Share of the entries of some tokens that are below the normal range of f16 and not zero.
fn small(evidence: &Evidence<'_>, policy: &Policy) -> Option<f64> {
    let unit = evidence.worst_unit(&GRADIENTS)?;
    let classes: Vec<usize> =
        (0..unit.inputs(evidence)?.head(evidence.step)?.valid_vocab).collect();
    let counted: Vec<usize> = (0..unit.rows.len()).filter(|&t| unit.g[t] != 0.0).collect();
    let tokens: Vec<usize> =
        (0..TOKENS.min(counted.len())).map(|i| counted[i * counted.len() / TOKENS]).collect();
    let entries = unit.part(evidence, &tokens, &classes, true)?.entries(policy);
    let below = entries.iter().filter(|x| x.abs() < LEAST && **x != 0.0).count();
    Some(below as f64 / entries.len().max(1) as f64)
}
