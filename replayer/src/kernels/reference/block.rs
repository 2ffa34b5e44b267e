//! The sums over the tokens that the backward pass keeps for a block of rows of k until the block
//! is complete.
//!
//! Their dense part is a product of matrices; the label part is added token by token.

use super::backward::{Backward, DkBlock, TermNoise};
use super::dense::{DenseSums, LabelTerms};
use super::gemm::{Operand, multiply};
use super::panel::load;
use super::tile::{Terms, Upstream};
use crate::kernels::matrix::{HeadInputs, Matrix};
use crate::kernels::tiles::{Tiles, spans};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Sums over the tokens for a slab of k's rows, one block for each vocabulary tile. A walk over
/// more tokens continues them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DkSums {
    pub(super) blocks: Vec<Block>,
}

/// The sums that become a `DkBlock`, and what is kept of each token of the label part. A token
/// whose label is a row of the block is a hit of that row.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Block {
    #[serde(deserialize_with = "crate::parcel::range")]
    pub(super) rows: Range<usize>,
    depth: usize,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) lse: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    label: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) lse_var: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) lse_sq: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    label_sq: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    label_var: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    label_alike: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) dropped: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    pub(super) confident: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    label_whole: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    hits: Vec<u32>,
    #[serde(with = "crate::parcel::numbers")]
    bias_lse: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    bias_label: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    bias_var: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    bias_sq: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    bias_label_var: Vec<f64>,
    #[serde(with = "crate::parcel::numbers")]
    bias_label_sq: Vec<f64>,
    /// Of every hit, in the order in which hits were added: its row within the block, its token,
    /// and the value of dlogits at its label that the job rounds.
    #[serde(with = "crate::parcel::numbers")]
    hit_rows: Vec<u32>,
    #[serde(with = "crate::parcel::numbers")]
    hit_tokens: Vec<u32>,
    #[serde(with = "crate::parcel::numbers")]
    hit_entries: Vec<f64>,
}

/// The labels of the tokens of a walk, and what the tiles told about the column of each label.
pub(super) struct Labels {
    /// (label, token) of every token that is not ignored, by label, then by token.
    labelled: Vec<(u32, usize)>,
    terms: LabelTerms,
    /// Index of the first of these tokens among all tokens of the sums.
    first: usize,
}

impl Labels {
    pub(super) fn new(inputs: &HeadInputs, first: usize) -> Self {
        let pair = |token| inputs.label(token).map(|label| (label as u32, token));
        let mut labelled: Vec<_> = (0..inputs.labels.len()).filter_map(pair).collect();
        labelled.sort_unstable();
        let tokens = inputs.labels.len();
        let terms = LabelTerms { slopes: vec![(0.0, 0.0); tokens], entries: vec![0.0; tokens] };
        Labels { labelled, terms, first }
    }

    /// Keeps the transform's derivative F and the rounded entry of the labels whose column lies in
    /// the tile; `first` is the tile's first token.
    pub(super) fn keep_slopes(&mut self, terms: &Terms, first: usize) {
        let LabelTerms { slopes, entries } = &mut self.terms;
        for (slope, seen) in slopes[first..].iter_mut().zip(&terms.label_slopes) {
            *slope = seen.unwrap_or(*slope);
        }
        for (entry, seen) in entries[first..].iter_mut().zip(&terms.label_entries) {
            *entry = seen.unwrap_or(*entry);
        }
    }

    /// The (label, token) pairs whose label lies in some rows of k.
    fn inside(&self, rows: &Range<usize>) -> &[(u32, usize)] {
        let before =
            |end: usize| self.labelled.partition_point(|&(label, _)| (label as usize) < end);
        &self.labelled[before(rows.start)..before(rows.end)]
    }
}

impl DkSums {
    /// The sums of a slab before any token was added.
    pub fn zeros(inputs: &HeadInputs, noise: &TermNoise, tiles: Tiles) -> Self {
        let block = |rows| Block::zeros(rows, inputs.q.cols, noise);
        DkSums { blocks: spans(inputs.k.rows, tiles.vocab).map(block).collect() }
    }

    /// The sums of a slab whose dense part was computed elsewhere (on a GPU), over all tokens. This
    /// adds the label part, also to `dq`.
    pub fn with_labels(
        inputs: &HeadInputs,
        upstream: Upstream,
        tiles: Tiles,
        (dense, labels): (&DenseSums, LabelTerms),
        dq: &mut Backward,
    ) -> Self {
        let mut sums = DkSums::zeros(inputs, upstream.noise, tiles);
        let labels = Labels { terms: labels, ..Labels::new(inputs, 0) };
        for block in &mut sums.blocks {
            block.take(dense);
            let label_upstream = (upstream.cotangents.label, upstream.noise.whole);
            block.add_labels(inputs, &labels, label_upstream, dq);
        }
        sums
    }

    /// Passes the blocks to `on_dk` in the order of their rows, once all tokens were added; `q`
    /// holds all tokens, `[T, D]`.
    pub fn finish(self, q: &Matrix, noise: &TermNoise, on_dk: &mut dyn FnMut(DkBlock)) {
        for mut block in self.blocks {
            block.cluster_labels(q, noise.label_step);
            on_dk(block.emit());
        }
    }

    /// Appends the sums of the next rows of k; their row 0 is row `first` of this slab.
    pub fn append(&mut self, first: usize, more: DkSums) {
        let moved = |block: Block| {
            let rows = block.rows.start + first..block.rows.end + first;
            Block { rows, ..block }
        };
        self.blocks.extend(more.blocks.into_iter().map(moved));
    }
}

/// How many of a block's sums are `[rows, D]` and always present.
const SUMS: usize = 7;

impl Block {
    pub(super) fn zeros(rows: Range<usize>, depth: usize, noise: &TermNoise) -> Self {
        let size = rows.len() * depth;
        let when = |there: bool| vec![0.0; if there { size } else { 0 }];
        // In parallel: writing the zeros takes as long as a matrix product with few tokens.
        let mut zeros: Vec<Vec<f64>> = (0..SUMS).into_par_iter().map(|_| vec![0.0; size]).collect();
        let mut zeros = || zeros.pop().unwrap_or_default();
        let column = || vec![0.0; rows.len()];
        Block {
            depth,
            lse: zeros(),
            label: zeros(),
            lse_var: zeros(),
            lse_sq: zeros(),
            label_sq: zeros(),
            label_var: zeros(),
            label_alike: Vec::new(),
            dropped: when(noise.filter > 0.0),
            confident: when(noise.confident > 0.0),
            label_whole: zeros(),
            hits: vec![0; rows.len()],
            bias_lse: column(),
            bias_label: column(),
            bias_var: column(),
            bias_sq: column(),
            bias_label_var: column(),
            bias_label_sq: column(),
            hit_rows: Vec::new(),
            hit_tokens: Vec::new(),
            hit_entries: Vec::new(),
            rows,
        }
    }

    /// Copies this block's rows of sums that were computed elsewhere; sums that were not brought
    /// here are left empty.
    fn take(&mut self, dense: &DenseSums) {
        let (rows, depth) = (self.rows.clone(), self.depth);
        for (rows_of_block, all, width) in [
            (&mut self.lse, &dense.lse, depth),
            (&mut self.lse_sq, &dense.lse_sq, depth),
            (&mut self.lse_var, &dense.lse_var, depth),
            (&mut self.dropped, &dense.dropped, depth),
            (&mut self.confident, &dense.confident, depth),
            (&mut self.bias_lse, &dense.bias_lse, 1),
            (&mut self.bias_var, &dense.bias_var, 1),
            (&mut self.bias_sq, &dense.bias_sq, 1),
        ] {
            let here = if all.is_empty() { 0..0 } else { rows.start * width..rows.end * width };
            rows_of_block.clear();
            rows_of_block.extend_from_slice(&all[here]);
        }
    }

    /// Adds the column sums of one tile of `height` tokens and `width` columns to the sums of the
    /// bias.
    pub(super) fn add_biases(
        &mut self,
        inputs: &HeadInputs,
        terms: &Terms,
        (height, width): (usize, usize),
    ) {
        if inputs.bias.is_none() {
            return;
        }
        let ones = vec![1.0; height];
        for (target, values) in [
            (&mut self.bias_lse, &terms.dense),
            (&mut self.bias_var, &terms.noisy),
            (&mut self.bias_sq, &terms.squared),
        ] {
            let columns = Operand::rows(values, width).transposed();
            multiply(&mut target[..width], 1, true, columns, Operand::rows(&ones, 1), height);
        }
    }

    /// Adds the label part of every token whose label lies in the rows, in the order of labels,
    /// then of tokens.
    pub(super) fn add_labels(
        &mut self,
        inputs: &HeadInputs,
        labels: &Labels,
        (c_label, whole): (&[f64], bool),
        dq: &mut Backward,
    ) {
        let depth = self.depth;
        let (mut q, mut k) = (Vec::new(), Vec::new());
        for &(label, token) in labels.inside(&self.rows) {
            let row = label as usize - self.rows.start;
            let ((slope, slope_var), c) = (labels.terms.slopes[token], c_label[token]);
            let copies = inputs.copies.map_or(1.0, |copies| copies[token]);
            let (entry, entry_var) = (slope * c, copies * c * c * slope_var);
            let rounded = labels.terms.entries[token];
            if whole {
                dq.dq_label_share[token] = share(rounded, entry);
            }
            self.hits[row] += 1;
            self.hit_rows.push(row as u32);
            self.hit_tokens.push((labels.first + token) as u32);
            self.hit_entries.push(rounded);
            if inputs.bias.is_some() {
                self.bias_label[row] += entry;
                self.bias_label_sq[row] += copies * entry * entry;
                self.bias_label_var[row] += entry_var;
            }
            load(&inputs.q, token..token + 1, &mut q);
            load(&inputs.k, label as usize..label as usize + 1, &mut k);
            for d in 0..depth {
                let (element, addend) = (row * depth + d, entry * q[d]);
                self.label[element] += addend;
                self.label_whole[element] += rounded * q[d];
                self.label_sq[element] += addend * addend;
                self.label_var[element] += entry_var * q[d] * q[d];
                dq.dq_label[token * depth + d] = entry * k[d];
            }
            if slope_var > 0.0 {
                dq.dq_label_rel_var[token] = (slope_var / (slope * slope)).min(f64::MAX);
                let variance = entry_var / copies;
                let target = &mut dq.dq_label_var[token * depth..(token + 1) * depth];
                target.iter_mut().zip(&k).for_each(|(var, k)| *var = variance * k * k);
            }
        }
    }

    /// Computes `label_alike`: for each element of dk, label addends that lie within a quarter step
    /// of their format are added first and squared then, since they round alike and their errors
    /// add up as one error. Exact copies are such addends. This needs all tokens at once: if a
    /// cluster were cut in two, its parts would be squared apart.
    pub(super) fn cluster_labels(&mut self, all_q: &Matrix, step: f64) {
        let depth = self.depth;
        self.label_alike = vec![0.0; self.label.len()];
        let mut hits: Vec<usize> = (0..self.hit_rows.len()).collect();
        hits.sort_by_key(|&at| self.hit_rows[at]);
        let of_row = |hits: &[usize]| -> (usize, Vec<f64>) {
            let (mut q, mut addends, mut token_q) = (Vec::new(), Vec::new(), Vec::new());
            for &hit in hits {
                let token = self.hit_tokens[hit] as usize;
                load(all_q, token..token + 1, &mut token_q);
                q.extend_from_slice(&token_q);
            }
            let column = |d: usize| {
                addends.clear();
                let addend =
                    |(at, &hit): (usize, &usize)| self.hit_entries[hit] * q[at * depth + d];
                addends.extend(hits.iter().enumerate().map(addend));
                addends.sort_unstable_by(f64::total_cmp);
                clustered(&addends, step / 4.0)
            };
            (self.hit_rows[hits[0]] as usize, (0..depth).map(column).collect())
        };
        let by_row: Vec<&[usize]> =
            hits.chunk_by(|&a, &b| self.hit_rows[a] == self.hit_rows[b]).collect();
        let clusters: Vec<(usize, Vec<f64>)> = by_row.into_par_iter().map(of_row).collect();
        for (row, alike) in clusters {
            self.label_alike[row * depth..(row + 1) * depth].copy_from_slice(&alike);
        }
        // The label part of the bias is summed separately and added here, at the end, so that the
        // order of additions does not depend on how the tokens were cut into walks.
        for (sum, part) in
            [(&mut self.bias_sq, &self.bias_label_sq), (&mut self.bias_var, &self.bias_label_var)]
        {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
    }

    pub(super) fn emit(self) -> DkBlock {
        DkBlock {
            rows: self.rows,
            dk_lse: self.lse,
            dk_label: self.label,
            dk_lse_var: self.lse_var,
            dk_lse_sq: self.lse_sq,
            dk_label_sq: self.label_sq,
            dk_label_var: self.label_var,
            dk_label_alike: self.label_alike,
            dk_dropped: self.dropped,
            dk_confident: self.confident,
            dk_label_whole: self.label_whole,
            hits: self.hits,
            dbias_lse: self.bias_lse,
            dbias_label: self.bias_label,
            dbias_var: self.bias_var,
            dbias_sq: self.bias_sq,
        }
    }
}

/// Square of a whole entry of dlogits over the square of its label part; 0 where the label part is
/// 0.
fn share(whole: f64, label: f64) -> f64 {
    if label == 0.0 { 0.0 } else { (whole / label).powi(2) }
}

/// Cuts ascending values into clusters, each within a relative distance `width` of its first value,
/// and returns the sum of the squares of the clusters' sums.
fn clustered(values: &[f64], width: f64) -> f64 {
    let (mut total, mut sum, mut first) = (0.0, 0.0, f64::NAN);
    for &x in values {
        if !((x - first).abs() <= width * x.abs().max(first.abs())) {
            total += sum * sum;
            (sum, first) = (0.0, x);
        }
        sum += x;
    }
    total + sum * sum
}

#[cfg(test)]
mod tests {
    use super::clustered;

    #[test]
    fn equal_addends_square_together_and_others_apart() {
        assert_eq!(clustered(&[1.0, 1.0, 1.0], 0.0), 9.0);
        assert_eq!(clustered(&[-2.0, 1.0, 1.001, 3.0], 0.01), 4.0 + 2.001 * 2.001 + 9.0);
        assert_eq!(clustered(&[1.0, 1.009, 1.018], 0.01), 2.009 * 2.009 + 1.018 * 1.018);
        assert_eq!(clustered(&[], 0.1), 0.0);
    }
}
