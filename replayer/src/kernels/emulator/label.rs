//! The label part of the gradients of fused policies: gather for dq, scatter-add for dk and the
//! bias, and its sum with the softmax part.

use super::plane::Elements;
use super::sum::Running;
use crate::kernels::policy::Sum;
use crate::kernels::policy::internal::Hits;
use rayon::prelude::*;
use std::ops::Range;

/// What the label part is computed from.
pub(super) struct LabelPath<'a> {
    pub(super) elements: &'a Elements<'a>,
    /// `[T]`: cotangent of the label's logit times the derivative of the transform at that logit.
    pub(super) label_g: &'a [f64],
}

/// A gradient `[rows, D]` with its two parts.
pub(super) struct Parted<'a> {
    /// On entry the softmax part, on return the sum of both parts.
    pub(super) sum: &'a mut [f64],
    pub(super) lse: &'a mut [f64],
    pub(super) label: &'a mut [f64],
}

impl LabelPath<'_> {
    /// Adds to each row of dk the products `g q` of the tokens that hit it, in token order.
    pub(super) fn finish_dk(&self, hits: &Hits, rows: Range<usize>, dk: Parted) {
        let Elements { policy, inputs, .. } = *self.elements;
        let depth = inputs.q.cols;
        self.each_row(depth, dk, |index, label| {
            let hits = hits.of(rows.start + index);
            let scatter = policy.sums.label_scatter;
            let zeros = |sum| Running::new(sum, policy.product, depth);
            let shards = policy.scattered(hits, inputs.q.rows);
            let mut sums = zeros(Sum { precision: policy.scatter_join, ..scatter });
            for shard in &shards {
                let mut running = zeros(scatter);
                for &token in shard {
                    let mut addend = self.elements.panel(&inputs.q, token..token + 1);
                    self.scale(token, &mut addend);
                    running.add(&mut addend);
                }
                running.finish(label);
                if shards.len() > 1 {
                    sums.add(label);
                    sums.finish(label);
                }
            }
            !hits.is_empty()
        });
    }

    /// Adds to dq of every token `g` times its label's row of k.
    pub(super) fn finish_dq(&self, dq: Parted) {
        let inputs = self.elements.inputs;
        self.each_row(inputs.k.cols, dq, |token, label| {
            let Some(row) = inputs.label(token) else {
                return false;
            };
            label.copy_from_slice(&self.elements.panel(&inputs.k, row..row + 1));
            self.scale(token, label);
            true
        });
    }

    /// Adds to each element of the bias gradient `[rows]` the label cotangents of the tokens that
    /// hit its row.
    pub(super) fn finish_dbias(&self, hits: &Hits, rows: Range<usize>, dbias: &mut [f64]) {
        let policy = self.elements.policy;
        for (row, dbias) in rows.zip(dbias) {
            let mut running = Running::new(policy.sums.label_scatter, policy.product, 1);
            for &(_, token) in hits.of(row) {
                running.push(policy.label_grad.round64(self.label_g[token as usize]));
            }
            if !hits.of(row).is_empty() {
                *dbias = self.elements.operation(*dbias + running.value());
            }
        }
    }

    fn scale(&self, token: usize, row: &mut [f64]) {
        let g = self.label_g[token];
        row.iter_mut().for_each(|x| *x = self.elements.operation(g * *x));
        self.elements.policy.label_grad.round_slice64(row);
    }

    /// `sum = round(round(sum) + round(label))` row by row. `fill` computes the label part of a
    /// row, and returns false where there is none: nothing is added then, so that -0 stays -0.
    fn each_row(&self, depth: usize, all: Parted, fill: impl Fn(usize, &mut [f64]) -> bool + Sync) {
        if all.sum.is_empty() {
            return;
        }
        let policy = self.elements.policy;
        let rows = (
            all.sum.par_chunks_mut(depth),
            all.lse.par_chunks_mut(depth),
            all.label.par_chunks_mut(depth),
        );
        rows.into_par_iter().enumerate().for_each(|(index, (sum, lse, label))| {
            label.fill(0.0);
            let hit = fill(index, label);
            policy.parts.round_slice64(sum);
            policy.parts.round_slice64(label);
            lse.copy_from_slice(sum);
            if hit {
                sum.iter_mut()
                    .zip(label)
                    .for_each(|(sum, x)| *sum = self.elements.operation(*sum + *x));
            }
            policy.output.round_slice64(sum);
        });
    }
}
