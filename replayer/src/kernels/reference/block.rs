//! What the backward pass gathers about one block of rows of k, before it lends it out.
//!
//! The label path is walked token by token, apart from the dense GEMMs.

use super::backward::{Backward, DkBlock, TermNoise};
use super::gemm::{Operand, multiply};
use super::panel::load;
use super::tile::Terms;
use crate::kernels::matrix::HeadInputs;
use std::ops::Range;

/// The buffers behind `DkBlock`.
#[derive(Default)]
pub(super) struct Block {
    rows: Range<usize>,
    pub(super) lse: Vec<f64>,
    label: Vec<f64>,
    pub(super) lse_var: Vec<f64>,
    pub(super) lse_sq: Vec<f64>,
    label_sq: Vec<f64>,
    label_var: Vec<f64>,
    label_alike: Vec<f64>,
    pub(super) dropped: Vec<f64>,
    pub(super) confident: Vec<f64>,
    label_whole: Vec<f64>,
    hits: Vec<u32>,
    bias_lse: Vec<f64>,
    bias_label: Vec<f64>,
    bias_var: Vec<f64>,
    bias_sq: Vec<f64>,
    depth: usize,
    /// (label, token) of every token that is not ignored, by label, then by token.
    labelled: Vec<(u32, usize)>,
    /// `[T]`: F and its variance in the label's column, once its tile was seen, and what
    /// the label's entry is rounded as.
    slopes: Vec<(f64, f64)>,
    entries: Vec<f64>,
    ones: Vec<f64>,
}

impl Block {
    pub(super) fn new(inputs: &HeadInputs) -> Self {
        let pair = |token| inputs.label(token).map(|label| (label as u32, token));
        let mut labelled: Vec<_> = (0..inputs.labels.len()).filter_map(pair).collect();
        labelled.sort_unstable();
        let slopes = vec![(0.0, 0.0); inputs.labels.len()];
        let entries = vec![0.0; inputs.labels.len()];
        Block { labelled, slopes, entries, depth: inputs.q.cols, ..Block::default() }
    }

    pub(super) fn clear(&mut self, rows: Range<usize>, noise: &TermNoise) {
        let size = rows.len() * self.depth;
        let dropped = if noise.filter > 0.0 { size } else { 0 };
        let confident = if noise.confident > 0.0 { size } else { 0 };
        for (buffer, size) in [
            (&mut self.lse, size),
            (&mut self.label, size),
            (&mut self.lse_var, size),
            (&mut self.lse_sq, size),
            (&mut self.label_sq, size),
            (&mut self.label_var, size),
            (&mut self.label_alike, size),
            (&mut self.dropped, dropped),
            (&mut self.confident, confident),
            (&mut self.label_whole, size),
            (&mut self.bias_lse, rows.len()),
            (&mut self.bias_label, rows.len()),
            (&mut self.bias_var, rows.len()),
            (&mut self.bias_sq, rows.len()),
        ] {
            buffer.clear();
            buffer.resize(size, 0.0);
        }
        self.hits.clear();
        self.hits.resize(rows.len(), 0);
        self.rows = rows;
    }

    /// Column sums of one tile of `height` tokens and `width` columns.
    pub(super) fn add_biases(
        &mut self,
        inputs: &HeadInputs,
        terms: &Terms,
        (first, height): (usize, usize),
        width: usize,
    ) {
        if inputs.bias.is_none() {
            return;
        }
        self.ones.resize(height, 1.0);
        let ones = &self.ones[..height];
        let copies = inputs.copies.map_or(ones, |copies| &copies[first..first + height]);
        for (target, values, weights) in [
            (&mut self.bias_lse, &terms.dense, ones),
            (&mut self.bias_var, &terms.noisy, ones),
            (&mut self.bias_sq, &terms.squared, copies),
        ] {
            let columns = Operand::rows(values, width).transposed();
            multiply(&mut target[..width], 1, true, columns, Operand::rows(weights, 1), height);
        }
    }

    /// Remembers F of the labels whose column the tile held; `first` is its first token.
    pub(super) fn keep_slopes(&mut self, terms: &Terms, first: usize) {
        for (slope, found) in self.slopes[first..].iter_mut().zip(&terms.label_slopes) {
            *slope = found.unwrap_or(*slope);
        }
        for (entry, found) in self.entries[first..].iter_mut().zip(&terms.label_entries) {
            *entry = found.unwrap_or(*entry);
        }
    }

    /// The label path of every token whose label lies in the rows, in token order.
    pub(super) fn add_labels(
        &mut self,
        inputs: &HeadInputs,
        c_label: &[f64],
        whole: bool,
        dq: &mut Backward,
    ) {
        let depth = self.depth;
        let first = self.labelled.partition_point(|&(label, _)| (label as usize) < self.rows.start);
        let (mut q, mut k) = (Vec::new(), Vec::new());
        for &(label, token) in &self.labelled[first..] {
            let label = label as usize;
            if label >= self.rows.end {
                break;
            }
            let row = label - self.rows.start;
            let ((slope, slope_var), c) = (self.slopes[token], c_label[token]);
            let copies = inputs.copies.map_or(1.0, |copies| copies[token]);
            let (entry, entry_var) = (slope * c, copies * c * c * slope_var);
            let rounded = self.entries[token];
            if whole {
                dq.dq_label_share[token] = share(rounded, entry);
            }
            self.hits[row] += 1;
            if inputs.bias.is_some() {
                self.bias_label[row] += entry;
                self.bias_sq[row] += copies * entry * entry;
                self.bias_var[row] += entry_var;
            }
            load(&inputs.q, token..token + 1, &mut q);
            load(&inputs.k, label..label + 1, &mut k);
            for d in 0..depth {
                let (at, addend) = (row * depth + d, entry * q[d]);
                self.label[at] += addend;
                self.label_whole[at] += rounded * q[d];
                self.label_sq[at] += addend * addend;
                self.label_var[at] += entry_var * q[d] * q[d];
                dq.dq_label[token * depth + d] = entry * k[d];
            }
            if slope_var > 0.0 {
                dq.dq_label_rel_var[token] = (slope_var / (slope * slope)).min(f64::MAX);
                let own = entry_var / copies;
                let target = &mut dq.dq_label_var[token * depth..(token + 1) * depth];
                target.iter_mut().zip(&k).for_each(|(var, k)| *var = own * k * k);
            }
        }
    }

    /// Squares of the sums of addends that lie within a quarter step of their format: they
    /// round alike, so their errors are one error. Exact copies are such addends.
    pub(super) fn cluster_labels(&mut self, inputs: &HeadInputs, step: f64) {
        let depth = self.depth;
        let first = self.labelled.partition_point(|&(label, _)| (label as usize) < self.rows.start);
        let last = self.labelled.partition_point(|&(label, _)| (label as usize) < self.rows.end);
        let (mut q, mut addends) = (Vec::new(), Vec::new());
        for hits in self.labelled[first..last].chunk_by(|a, b| a.0 == b.0) {
            let row = hits[0].0 as usize - self.rows.start;
            q.clear();
            let mut entries = Vec::with_capacity(hits.len());
            let mut one = Vec::new();
            for &(_, token) in hits {
                load(&inputs.q, token..token + 1, &mut one);
                q.extend_from_slice(&one);
                entries.push(self.entries[token]);
            }
            for d in 0..depth {
                addends.clear();
                addends.extend(entries.iter().enumerate().map(|(at, e)| e * q[at * depth + d]));
                addends.sort_unstable_by(f64::total_cmp);
                self.label_alike[row * depth + d] = clustered(&addends, step / 4.0);
            }
        }
    }

    pub(super) fn emit(&self) -> DkBlock<'_> {
        DkBlock {
            rows: self.rows.clone(),
            dk_lse: &self.lse,
            dk_label: &self.label,
            dk_lse_var: &self.lse_var,
            dk_lse_sq: &self.lse_sq,
            dk_label_sq: &self.label_sq,
            dk_label_var: &self.label_var,
            dk_label_alike: &self.label_alike,
            dk_dropped: &self.dropped,
            dk_confident: &self.confident,
            dk_label_whole: &self.label_whole,
            hits: &self.hits,
            dbias_lse: &self.bias_lse,
            dbias_label: &self.bias_label,
            dbias_var: &self.bias_var,
            dbias_sq: &self.bias_sq,
        }
    }
}

/// Square of a whole entry over that of its label part; 0 where there is no such part.
fn share(whole: f64, label: f64) -> f64 {
    if label == 0.0 { 0.0 } else { (whole / label).powi(2) }
}

/// Sum of the squared sums of ascending values that lie within `width` of the first of
/// them, relatively.
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
