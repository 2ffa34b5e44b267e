//! Per-row softmax over tiles of logits: the online log-sum-exp, and dlogits in place.
//!
//! Rows are independent and run in parallel; within a row the order is fixed.

use super::exp::{Fast, row_max, row_sum, softmax, sum_exp};
use super::logits::{Finish, Slope};
use super::{Path, Policy, dispatch::Upstream};
use crate::kernels::formula::{RunningSum, log_probability};
use crate::kernels::matrix::{Cotangents, HeadInputs, TokenCotangents};
use rayon::prelude::*;
use std::ops::Range;

/// One row of a forward pass: what its tiles left.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Online {
    exponentials: RunningSum<Fast>,
    label_logit: f32,
    logit_sum: f32,
}

impl Online {
    /// A row of which no tile was seen.
    pub(super) const EMPTY: Online = Online::of([f32::NEG_INFINITY, 0.0, 0.0, 0.0]);

    /// Of a row whose tiles were taken in elsewhere.
    pub(crate) const fn of([max, sum, label_logit, logit_sum]: [f32; 4]) -> Online {
        let exponentials = RunningSum { max: Fast(max), sum: Fast(sum) };
        Online { exponentials, label_logit, logit_sum }
    }

    /// Takes in one tile of a row: its sum in the lanes of `sum_exp`, then one merge.
    fn absorb(&mut self, row: &[f32]) {
        let running = &mut self.exponentials;
        let shift = running.raise(running.larger(Fast(row_max(row))));
        running.sum = running.sum + Fast(sum_exp(row, shift.0));
    }

    /// Takes in the columns beyond the valid vocabulary, where the head masks them with a
    /// number: all the same, so one product.
    pub(super) fn absorb_mask(&mut self, policy: &Policy, inputs: &HeadInputs) {
        let masked = inputs.k.rows - inputs.valid_vocab;
        let mask = inputs.mask.map(|mask| policy.logits.round(mask as f32));
        if let Some(mask) = mask.filter(|&mask| mask != f32::NEG_INFINITY) {
            self.exponentials.absorb_copies(Fast(mask), masked);
        }
    }

    /// The log-sum-exp of what was absorbed.
    pub(super) fn lse(&self, policy: &Policy) -> f32 {
        self.exponentials.lse_kept(|x| Fast(policy.log_p.round(x.0))).0
    }

    /// Logit of the label, 0 for an ignored token.
    pub(super) fn label_logit(&self) -> f32 {
        self.label_logit
    }

    /// Sum of the logits absorbed with `sums`.
    pub(super) fn logit_sum(&self) -> f32 {
        self.logit_sum
    }
}

/// Turns a tile of raw logits `[tokens, cols]` into logits, and takes it into the running
/// sums of its tokens; that of the logits themselves only with `sums`. `cols` are the
/// vocabulary rows the tile is about.
pub(super) fn absorb(
    finish: &Finish,
    tile: &mut [f32],
    cols: Range<usize>,
    labels: &[u32],
    online: &mut [Online],
    sums: bool,
) {
    (tile.par_chunks_mut(cols.len()), labels, online).into_par_iter().for_each(
        |(row, &label, online)| {
            finish.row(row);
            online.absorb(row);
            if sums {
                online.logit_sum += row_sum(row);
            }
            if let Some(col) = label_column(label, &cols) {
                online.label_logit = row[col];
            }
        },
    );
}

/// How a tile of logits becomes dlogits.
pub(super) struct Dlogits<'a> {
    pub(super) policy: &'a Policy,
    /// Whether the label part is added here: always but on the fused path.
    pub(super) whole: bool,
    pub(super) slope: Slope,
}

impl<'a> Dlogits<'a> {
    /// As the policy's path has them.
    pub(super) fn new(policy: &'a Policy, inputs: &HeadInputs) -> Self {
        let whole = policy.path != Path::Fused;
        Dlogits { policy, whole, slope: Slope::new(inputs.transform) }
    }

    /// Turns a tile `[tokens, cols]` into dlogits in place: `g_lse p + g_smooth`, where
    /// `whole` `g_label` at the label, times the slope, rounded. Raw logits are given with
    /// what finishes them.
    ///
    /// `label_g` is `g_label` times the slope at the label, left there for the label path
    /// where the slope is not 1 (and where the label lies in `cols`).
    pub(super) fn tile(
        &self,
        raw: Option<&Finish>,
        tile: &mut [f32],
        cols: Range<usize>,
        labels: &[u32],
        upstream: Upstream<f32>,
        label_g: &mut [f32],
    ) {
        let Upstream { lse, cotangents: Cotangents { lse: g_lse, label: g_label, smooth } } =
            upstream;
        let per_token = (lse, g_lse, g_label, smooth);
        (tile.par_chunks_mut(cols.len()), labels, per_token, label_g)
            .into_par_iter()
            .for_each_init(
                Vec::new,
                |slopes, (row, &label, (&lse, &g_lse, &g_label, &smooth), label_g)| {
                    if let Some(finish) = raw {
                        finish.row(row);
                    }
                    let at_label = label_column(label, &cols);
                    if let Some(col) = at_label.filter(|_| !self.slope.is_one()) {
                        *label_g = g_label * self.slope.at(row[col]);
                    }
                    let wide = [g_lse, g_label, smooth].map(f64::from);
                    let [lse_part, label, smooth] = wide;
                    let cotangents = TokenCotangents { lse: lse_part, label, smooth };
                    self.row(row, slopes, lse, cotangents, at_label);
                },
            );
    }

    /// Turns logits into p, by way of a log p that is kept where the policy has one.
    fn softmax(&self, row: &mut [f32], lse: f32) {
        if !self.policy.keeps_log_p() {
            return softmax(row, lse);
        }
        row.iter_mut().for_each(|x| *x = log_probability(Fast(*x), Fast(lse)).0);
        self.policy.log_p.round_slice(row);
        softmax(row, 0.0);
    }

    fn row(
        &self,
        row: &mut [f32],
        slopes: &mut Vec<f32>,
        lse: f32,
        cotangents: TokenCotangents,
        label: Option<usize>,
    ) {
        slopes.clear();
        if !self.slope.is_one() {
            slopes.extend_from_slice(row);
            self.slope.row(slopes);
        }
        self.softmax(row, lse);
        self.policy.p.round_slice(row);
        let entry = label.map(|col| cotangents.entry(Fast(row[col]), self.whole).0);
        row.iter_mut().for_each(|p| *p = cotangents.dense(Fast(*p)).0);
        if let Some((col, entry)) = label.zip(entry) {
            row[col] = entry;
        }
        row.iter_mut().zip(slopes.iter()).for_each(|(g, slope)| *g *= slope);
        self.policy.dlogits.round_slice(row);
    }
}

/// Where a label lies among some columns; `IGNORED` is beyond all of them.
fn label_column(label: u32, cols: &Range<usize>) -> Option<usize> {
    cols.contains(&(label as usize)).then(|| label as usize - cols.start)
}
