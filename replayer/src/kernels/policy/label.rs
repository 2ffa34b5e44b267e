//! The label part of the gradients of fused policies: gather for dq, scatter-add for dk, and its
//! sum with the softmax part.
//!
//! The scatter-add runs row by row of k, each over its tokens in token order. This gives the bits
//! of a single sequential scatter, and needs no atomics.

use super::Policy;
use crate::kernels::matrix::HeadInputs;
use crate::kernels::round::Precision;
use rayon::prelude::*;
use std::ops::Range;

/// The tokens that hit each row of k: those whose label the row is.
pub(in crate::kernels) struct Hits {
    /// (label, token) by label, then by token; ignored tokens left out.
    by_label: Vec<(u32, u32)>,
}

impl Hits {
    pub(in crate::kernels) fn new(labels: &[u32]) -> Self {
        let hit = |(token, &label): (usize, &u32)| {
            (label != crate::kernels::matrix::IGNORED).then_some((label, token as u32))
        };
        let mut by_label: Vec<_> = labels.iter().enumerate().filter_map(hit).collect();
        by_label.sort_unstable();
        Hits { by_label }
    }

    /// The hits of one row, in token order.
    pub(in crate::kernels) fn of(&self, row: usize) -> &[(u32, u32)] {
        let start = self.by_label.partition_point(|&(label, _)| (label as usize) < row);
        let length = self.by_label[start..].partition_point(|&(label, _)| label as usize == row);
        &self.by_label[start..start + length]
    }
}

/// What the label part is computed from.
pub(super) struct LabelPath<'a> {
    pub(super) policy: &'a Policy,
    pub(super) inputs: &'a HeadInputs<'a>,
    /// `[T]`: cotangent of the label's logit times the derivative of the transform at that logit.
    pub(super) g_label: &'a [f32],
}

impl LabelPath<'_> {
    /// Adds the label part to rows of dk `[rows, D]`: on entry `dk` holds the softmax part, on
    /// return the rounded sum. Where `parts` is given, the rounded softmax and label parts are
    /// written there.
    pub(super) fn finish_dk(
        &self,
        hits: &Hits,
        rows: Range<usize>,
        dk: &mut [f32],
        parts: Option<(&mut [f32], &mut [f32])>,
    ) {
        let depth = self.inputs.q.cols;
        if dk.is_empty() {
            return;
        }
        let row = |index: usize| hits.of(rows.start + index);
        match parts {
            None => dk.par_chunks_mut(depth).enumerate().for_each(|(index, dk)| {
                let hits = row(index);
                let mut label = if hits.is_empty() { Vec::new() } else { vec![0.0; depth] };
                self.scatter(hits, &mut label);
                self.join(dk, &label, |_, _| {});
            }),
            Some((lse, label)) => {
                (dk.par_chunks_mut(depth), lse.par_chunks_mut(depth), label.par_chunks_mut(depth))
                    .into_par_iter()
                    .enumerate()
                    .for_each(|(index, (dk, lse, label))| {
                        let hits = row(index);
                        label.fill(0.0);
                        self.scatter(hits, label);
                        self.policy.parts.round_slice(label);
                        let added = if hits.is_empty() { &[] } else { &*label };
                        self.join(dk, added, |d, part| lse[d] = part);
                    });
            }
        }
    }

    /// Adds the label part to the bias gradient `[rows]`: one sum a row, in token order.
    pub(super) fn finish_dbias(&self, hits: &Hits, rows: Range<usize>, dbias: &mut [f32]) {
        for (row, dbias) in rows.zip(dbias) {
            let addend = |&(_, token): &(u32, u32)| {
                self.policy.label_grad.round(self.g_label[token as usize])
            };
            // Nothing is added to a row without hits, so that its -0 stays -0.
            if let Some(label) = hits.of(row).iter().map(addend).reduce(|sum, g| sum + g) {
                *dbias += label;
            }
        }
    }

    /// Adds the label part to rows of dq `[tokens, D]`, as `finish_dk` does for dk.
    pub(super) fn finish_dq(
        &self,
        dq: &mut [f32],
        first: usize,
        parts: Option<(&mut [f32], &mut [f32])>,
    ) {
        let depth = self.inputs.q.cols;
        if dq.is_empty() {
            return;
        }
        match parts {
            None => dq.par_chunks_mut(depth).enumerate().for_each(|(index, dq)| {
                let mut label = Vec::new();
                self.gather(first + index, &mut label);
                self.join(dq, &label, |_, _| {});
            }),
            Some((lse, label)) => {
                (dq.par_chunks_mut(depth), lse.par_chunks_mut(depth), label.par_chunks_mut(depth))
                    .into_par_iter()
                    .enumerate()
                    .for_each(|(index, (dq, lse, label))| {
                        let mut gathered = Vec::new();
                        self.gather(first + index, &mut gathered);
                        self.policy.parts.round_slice(&mut gathered);
                        self.join(dq, &gathered, |d, part| lse[d] = part);
                        label.fill(0.0);
                        label[..gathered.len()].copy_from_slice(&gathered);
                    });
            }
        }
    }

    /// `acc = round(acc + round(g q))` over the hits of one row, in token order.
    fn scatter(&self, hits: &[(u32, u32)], acc: &mut [f32]) {
        let Policy { input, label_grad, scatter_join, .. } = *self.policy;
        let label_scatter = self.policy.sums.label_scatter.precision;
        let add = |acc: &mut [f32], addends: &[f32], to: Precision| {
            acc.iter_mut().zip(addends).for_each(|(acc, addend)| *acc += addend);
            to.round_slice(acc);
        };
        let mut q = vec![0.0; if hits.is_empty() { 0 } else { acc.len() }];
        let shards = self.policy.scattered(hits, self.inputs.q.rows);
        let mut shard_sum = vec![0.0; if shards.len() > 1 { acc.len() } else { 0 }];
        for shard in &shards {
            let sum = if shards.len() > 1 { &mut shard_sum[..] } else { &mut *acc };
            for &token in shard {
                self.inputs.q.panel_f32(token..token + 1, &mut q);
                input.round_slice(&mut q);
                let g = self.g_label[token];
                q.iter_mut().for_each(|q| *q *= g);
                label_grad.round_slice(&mut q);
                add(sum, &q, label_scatter);
            }
            if shards.len() > 1 {
                add(acc, &shard_sum, scatter_join);
                shard_sum.fill(0.0);
            }
        }
    }

    /// `round(g k[label])` of one token; `row` is left empty when the token is ignored.
    fn gather(&self, token: usize, row: &mut Vec<f32>) {
        let Some(label) = self.inputs.label(token) else {
            return;
        };
        row.resize(self.inputs.k.cols, 0.0);
        self.inputs.k.panel_f32(label..label + 1, row);
        self.policy.input.round_slice(row);
        let g = self.g_label[token];
        row.iter_mut().for_each(|k| *k *= g);
        self.policy.label_grad.round_slice(row);
    }

    /// `sum = round(round(sum) + round(label))`; passes the rounded softmax part to `keep`. Nothing
    /// is added to a row without a label part (`label` empty), so that its -0 stays -0.
    fn join(&self, sum: &mut [f32], label: &[f32], mut keep: impl FnMut(usize, f32)) {
        let Policy { parts, output, .. } = *self.policy;
        parts.round_slice(sum);
        sum.iter().enumerate().for_each(|(d, &part)| keep(d, part));
        for (sum, &label) in sum.iter_mut().zip(label) {
            *sum += parts.round(label);
        }
        output.round_slice(sum);
    }
}
