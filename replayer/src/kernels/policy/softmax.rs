//! Per-row softmax over tiles of logits: the online log-sum-exp, and dlogits in place.
//!
//! Rows are independent and run in parallel; within a row the order is fixed.

use super::exp::{row_max, softmax_gradient, sum_exp};
use super::{Path, Policy};
use rayon::prelude::*;
use std::ops::Range;

/// Running max of a row of logits, and the sum of `exp(logit - shift(max))`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Online {
    max: f32,
    sum: f32,
    label_logit: f32,
}

impl Online {
    /// A row of which no tile was seen.
    pub(super) const EMPTY: Online = Online { max: f32::NEG_INFINITY, sum: 0.0, label_logit: 0.0 };

    /// Takes in one tile of a row: its sum in the lanes of `sum_exp`, then one merge.
    fn absorb(&mut self, row: &[f32]) {
        let max = row_max(row);
        let max = if max > self.max { max } else { self.max };
        let (old, new) = (shift(self.max), shift(max));
        // Nothing but masked logits so far: the sum is 0 (or NaN) and stays so.
        if self.max > f32::NEG_INFINITY && old != new {
            self.sum *= super::exp::exp(old - new);
        }
        self.sum += sum_exp(row, new);
        self.max = max;
    }

    /// The log-sum-exp of what was absorbed. The log is taken in f64, once a token.
    pub(super) fn lse(&self) -> f32 {
        shift(self.max) + libm::log(f64::from(self.sum)) as f32
    }

    /// Logit of the label, 0 for an ignored token.
    pub(super) fn label_logit(&self) -> f32 {
        self.label_logit
    }
}

/// What is subtracted before exp. An infinite max would turn inf - inf into NaN,
/// where lse is plainly that inf: so nothing is subtracted then.
fn shift(max: f32) -> f32 {
    if max.is_finite() { max } else { 0.0 }
}

/// Rounds a tile of logits `[tokens, cols]` as the policy says, and takes it into the
/// running sums of its tokens. `cols` are the vocabulary rows the tile is about.
pub(super) fn absorb(
    policy: &Policy,
    tile: &mut [f32],
    cols: Range<usize>,
    labels: &[u32],
    online: &mut [Online],
) {
    (tile.par_chunks_mut(cols.len()), labels, online).into_par_iter().for_each(
        |(row, &label, online)| {
            policy.logits.round_slice(row);
            online.absorb(row);
            if let Some(col) = label_column(label, &cols) {
                online.label_logit = row[col];
            }
        },
    );
}

/// lse and cotangents of the tokens of a tile.
#[derive(Clone, Copy)]
pub(super) struct Cotangents<'a> {
    pub(super) lse: &'a [f32],
    pub(super) g_lse: &'a [f32],
    pub(super) g_label: &'a [f32],
}

impl<'a> Cotangents<'a> {
    /// Those of some of the tokens.
    pub(super) fn of(&self, tokens: Range<usize>) -> Cotangents<'a> {
        Cotangents {
            lse: &self.lse[tokens.clone()],
            g_lse: &self.g_lse[tokens.clone()],
            g_label: &self.g_label[tokens],
        }
    }
}

/// Turns a tile of logits `[tokens, cols]` into dlogits in place: `g_lse p` rounded,
/// and on the plain path `g_label` added at the label before that rounding.
///
/// Logits are rounded first: of no effect on those that `absorb` has rounded.
pub(super) fn dlogits(
    policy: &Policy,
    tile: &mut [f32],
    cols: Range<usize>,
    labels: &[u32],
    cotangents: Cotangents,
) {
    let Cotangents { lse, g_lse, g_label } = cotangents;
    (tile.par_chunks_mut(cols.len()), labels, lse, g_lse, g_label).into_par_iter().for_each(
        |(row, &label, &lse, &g_lse, &g_label)| {
            policy.logits.round_slice(row);
            softmax_gradient(row, lse, g_lse);
            if policy.path == Path::Plain
                && let Some(col) = label_column(label, &cols)
            {
                row[col] += g_label;
            }
            policy.dlogits.round_slice(row);
        },
    );
}

/// Where a label lies among some columns; `IGNORED` is beyond all of them.
fn label_column(label: u32, cols: &Range<usize>) -> Option<usize> {
    cols.contains(&(label as usize)).then(|| label as usize - cols.start)
}
