//! The lse that captured tensors imply, token by token: the captured lse itself, or the one that
//! explains by which factor the softmax part of a token's row of dq is off.

use super::reference::Reference;
use super::single_tokens::{Direct, dot, energy, tokens};
use crate::assemble::Row;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;

/// How many tokens of a microbatch are fitted at most.
const FITTED: usize = 24;

/// The lse with which a token's captured values would be right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImpliedLse {
    /// The token.
    pub token: usize,
    /// lse of the declared head.
    pub lse: f64,
    /// lse as the captured values imply it.
    pub implied: f64,
}

/// The lse that the failing tensors of a microbatch imply, token by token: the captured lse where
/// it fails, else the lse that explains the factor of the softmax part of dq.
pub fn implied_lse(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Vec<ImpliedLse> {
    let mut failing = evidence.failing.iter();
    let of_lse = Key { stage: Stage::Lse, microbatch: inputs.microbatch, rank: None };
    let reference = evidence.reference();
    if failing.any(|key| *key == of_lse) {
        let (Some(captured), Some(lse)) =
            (evidence.captured(of_lse), reference.forward_lse.get(&inputs.microbatch))
        else {
            return Vec::new();
        };
        let implied_of =
            |(token, (&implied, &lse)): (usize, (&f64, &f64))| ImpliedLse { token, lse, implied };
        return captured.values.iter().zip(lse).enumerate().map(implied_of).collect();
    }
    implied_by_dq(evidence, inputs, reference).unwrap_or_default()
}

/// The lse that rows of dq imply: `dq = e^{lse - implied} softmax part + label part`.
fn implied_by_dq(
    evidence: &Evidence<'_>,
    inputs: &MicrobatchInputs,
    reference: &Reference,
) -> Option<Vec<ImpliedLse>> {
    let direct = Direct::new(evidence, inputs)?;
    let mut keys = evidence.failing.iter();
    let key = *keys.find(|key| {
        matches!(key.stage, Stage::Dq | Stage::DqLse) && key.microbatch == inputs.microbatch
    })?;
    let captured = evidence.captured(key)?;
    let (table, lse) = (reference.stages.get(&key)?, reference.lse.get(&inputs.microbatch)?);
    let cotangents = reference.cotangents.get(&inputs.microbatch)?;
    let all = tokens(evidence, inputs);
    let step = all.len().div_ceil(FITTED).max(1);
    let of_token = |&token: &usize| {
        let (row, token_cotangents) = (table.get(&token)?, cotangents.get(&token)?);
        if token_cotangents.smooth != 0.0 || inputs.labels[token] == IGNORED {
            return None; // smoothing is a dense part of its own
        }
        let class = inputs.labels[token] as usize;
        let slope = direct.logit_of(&direct.q(Row::From(token)), class).1;
        let of_class = direct.k(Row::From(class));
        let of_label = |i: usize| {
            if key.stage == Stage::Dq { token_cotangents.label * slope * of_class[i] } else { 0.0 }
        };
        let less = |values: &[f64]| -> Vec<f64> {
            values.iter().enumerate().map(|(i, x)| x - of_label(i)).collect()
        };
        let (dense, seen) = (less(row), less(captured.row(token)));
        let factor = dot(&seen, &dense) / energy(&dense);
        let implied = lse[token] - factor.ln();
        implied.is_finite().then_some(ImpliedLse { token, lse: lse[token], implied })
    };
    Some(all.iter().step_by(step).filter_map(of_token).collect())
}

/// The median (the upper one of an even number); NaN for no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
