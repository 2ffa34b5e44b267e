//! One tile of the token x vocabulary plane: the products, and the entries of dlogits.
//!
//! An entry has a dense part `F (c.lse p + c.smooth)` and, in the label's column, a
//! label part `F c.label`, `F` the derivative of the logit by the product.

use super::backward::TermNoise;
use super::exp::{exp, exp_row};
use super::gemm::{Operand, multiply};
use super::logit::{Chain, Logit};
use super::panel::{load, load_columns};
use crate::kernels::formula::log_probability;
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use rayon::prelude::*;
use std::ops::Range;

/// Rows of q or k, and the squared norm of each.
#[derive(Default)]
pub(super) struct Panel {
    pub(super) rows: Range<usize>,
    pub(super) values: Vec<f64>,
    pub(super) norms: Vec<f64>,
}

impl Panel {
    pub(super) fn load(&mut self, matrix: &Matrix, rows: Range<usize>) {
        let depth = matrix.cols;
        load(matrix, rows.clone(), &mut self.values);
        let values = &self.values;
        let norm =
            |row: usize| values[row * depth..(row + 1) * depth].iter().map(|x| x * x).sum::<f64>();
        self.norms.clear();
        self.norms.par_extend((0..rows.len()).into_par_iter().with_min_len(64).map(norm));
        self.rows = rows;
    }

    pub(super) fn magnitudes(&self) -> Vec<f64> {
        self.values.iter().map(|value| value.abs()).collect()
    }
}

/// Fills `tile` `[tokens, cols]` with the products of rows of q and k, or with the
/// logits given in their place. `q` and `k` hold those rows, D wide.
pub(super) fn products(
    inputs: &HeadInputs,
    (tokens, q): (Range<usize>, &[f64]),
    (cols, k): (Range<usize>, &[f64]),
    tile: &mut Vec<f64>,
) {
    if let Some(given) = &inputs.given {
        return load_columns(given, tokens, cols, tile);
    }
    if let Some((scores, first)) = inputs.reads.and_then(|reads| reads.scores) {
        return load_columns(&scores, tokens, cols.start + first..cols.end + first, tile);
    }
    let (depth, width) = (inputs.q.cols, cols.len());
    tile.resize(tokens.len() * width, 0.0);
    let keys = Operand::rows(k, depth).transposed();
    multiply(tile, width, false, Operand::rows(q, depth), keys, depth);
}

/// The entries of one tile, `[tokens, cols]` but where said otherwise. Squares stay in
/// f64: a p of 1e-25 in f32 would square to 0, and its row would have no floor.
#[derive(Default)]
pub(super) struct Terms {
    /// Dense entries.
    pub(super) dense: Vec<f64>,
    /// Squares of the dense entries.
    pub(super) squared: Vec<f64>,
    /// Variances of the dense entries.
    pub(super) noisy: Vec<f64>,
    /// Magnitudes of the entries that a gradient filter may have dropped; empty
    /// without one.
    pub(super) dropped: Vec<f64>,
    /// `[tokens]`: `F` and its variance in the label's column, where that lies in the
    /// tile; `None` elsewhere.
    pub(super) label_slopes: Vec<Option<(f64, f64)>>,
    /// `[tokens]`: what the entry in the label's column is rounded as: the label part, or
    /// the whole entry.
    pub(super) label_entries: Vec<Option<f64>>,
    /// `[tokens]`: columns whose p is confident, with their dense entries.
    pub(super) confident: Vec<Vec<(usize, f64)>>,
}

/// What makes entries of logits.
#[derive(Clone, Copy)]
pub struct Upstream<'a> {
    /// `[T]`, the reference's or a captured one.
    pub lse: &'a [f64],
    /// `[T]` each.
    pub cotangents: Cotangents<'a, f64>,
    /// What rounding does to an entry.
    pub noise: &'a TermNoise,
}

/// One token's part of `Upstream`.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    lse: f64,
    c_lse: f64,
    pub(super) c_label: f64,
    c_smooth: f64,
    pub(super) noise: &'a TermNoise,
}

/// A dense entry and its variance, `F` left out of both but for the noise of `F`.
#[derive(Clone, Copy)]
pub(super) struct Dense {
    p: f64,
    /// `c.lse p + c.smooth`.
    pub(super) by_logit: f64,
    /// Variance of `by_logit`.
    pub(super) var: f64,
}

impl<'a> Upstream<'a> {
    /// Panics unless there is one of each a token.
    pub fn new(
        inputs: &HeadInputs,
        lse: &'a [f64],
        cotangents: Cotangents<'a, f64>,
        noise: &'a TermNoise,
    ) -> Self {
        let Cotangents { lse: dense, label, smooth } = cotangents;
        for given in [lse, dense, label, smooth] {
            assert_eq!(given.len(), inputs.q.rows, "one lse and one of each cotangent a token");
        }
        Upstream { lse, cotangents, noise }
    }

    pub(super) fn token(&self, token: usize) -> Token<'a> {
        let Cotangents { lse, label, smooth } = self.cotangents;
        let (c_lse, c_label, c_smooth) = (lse[token], label[token], smooth[token]);
        Token { lse: self.lse[token], c_lse, c_label, c_smooth, noise: self.noise }
    }
}

impl Token<'_> {
    pub(super) fn dense(&self, logit: &Logit) -> Dense {
        self.dense_of(logit, exp(logit.value - self.lse))
    }

    /// The same of a logit whose p is known.
    #[inline(always)]
    fn dense_of(&self, logit: &Logit, p: f64) -> Dense {
        let softmax = self.c_lse * p;
        let var = softmax * softmax * (self.noise.p_rel_var + self.logit_var(logit))
            + self.c_smooth * self.c_smooth * self.noise.p_rel_var;
        Dense { p, by_logit: softmax + self.c_smooth, var }
    }

    /// Variance of the whole entry in the label's column, `F` left out.
    pub(super) fn whole_var(&self, logit: &Logit) -> f64 {
        let dense = self.dense(logit);
        let (softmax, entry) = (self.c_lse * dense.p, dense.by_logit + self.c_label);
        entry * entry * self.noise.p_rel_var
            + softmax * softmax * (self.noise.exp_rel_var + self.logit_var(logit))
    }

    /// Variance of what p is the exponential of.
    #[inline(always)]
    fn logit_var(&self, logit: &Logit) -> f64 {
        let log_p = log_probability(logit.value, self.lse);
        // A masked logit has no p, and NaN is found elsewhere.
        match self.noise.log_p_rel_var > 0.0 && log_p.is_finite() {
            true => logit.var + self.noise.log_p_rel_var * log_p * log_p,
            false => logit.var,
        }
    }

    /// What a gradient filter may have left out of an entry. It drops a tile where all
    /// of `|p - onehot|` lies below it: a confident token goes with its label.
    fn dropped(&self, dense: &Dense, slope: f64, is_label: bool) -> f64 {
        let below = |x: f64| x < self.noise.filter;
        if below(dense.p) {
            (slope * dense.by_logit).abs()
        } else if is_label && below(1.0 - dense.p) {
            (slope * (dense.by_logit + self.c_label)).abs()
        } else {
            0.0
        }
    }
}

impl Terms {
    /// The entries of the tile that `query` and `key` span.
    pub(super) fn fill(
        &mut self,
        inputs: &HeadInputs,
        query: &Panel,
        key: &Panel,
        upstream: Upstream,
    ) {
        let (tokens, cols) = (query.rows.clone(), key.rows.clone());
        let (first, width) = (tokens.start, cols.len());
        let q = (tokens.clone(), &query.values[..]);
        products(inputs, q, (cols.clone(), &key.values), &mut self.dense);
        let size = self.dense.len();
        let filters = upstream.noise.filter > 0.0;
        self.squared.resize(size, 0.0);
        self.noisy.resize(size, 0.0);
        self.dropped.resize(if filters { size } else { 0 }, 0.0);
        self.label_slopes.clear();
        self.label_slopes.resize(tokens.len(), None);
        self.label_entries.clear();
        self.label_entries.resize(tokens.len(), None);
        self.confident.iter_mut().for_each(Vec::clear);
        self.confident.resize_with(tokens.len(), Vec::new);
        let mut dropped: Vec<&mut [f64]> = self.dropped.chunks_mut(width).collect();
        dropped.resize_with(tokens.len(), Default::default);
        let chain = Chain::of(inputs);
        (
            self.dense.par_chunks_mut(width),
            self.squared.par_chunks_mut(width),
            self.noisy.par_chunks_mut(width),
            (&mut self.label_slopes, &mut self.label_entries, &mut self.confident),
            dropped,
        )
            .into_par_iter()
            .enumerate()
            .for_each(
                |(row, (dense, squared, noisy, (slope, own_variance, confident), dropped))| {
                    let token_at = first + row;
                    let token = upstream.token(token_at);
                    let label = label_column(inputs.labels[first + row], &cols);
                    let row_norm = query.norms[row];
                    let norms = |v: usize| row_norm * key.norms[v];
                    let mut row = Row {
                        dense,
                        squared,
                        noisy,
                        dropped,
                        slope,
                        own: own_variance,
                        confident,
                        label,
                    };
                    if chain.is_plain() {
                        row.fill(token, |v, x| Logit::plain(x, norms(v), token.noise));
                    } else {
                        let column = cols.start;
                        row.fill(token, |v, x| chain.logit(x, column + v, norms(v), token.noise));
                    }
                    if let Some(copies) = inputs.copies {
                        let both = row.squared.iter_mut().chain(&mut *row.noisy);
                        both.for_each(|variance| *variance *= copies[token_at]);
                    }
                },
            );
    }
}

/// Columns whose logits lie in memory together, while their p are computed as a row.
const PASS: usize = 128;

/// One token's rows of `Terms`; `dense` holds the products until it is filled.
struct Row<'a> {
    dense: &'a mut [f64],
    squared: &'a mut [f64],
    noisy: &'a mut [f64],
    dropped: &'a mut [f64],
    slope: &'a mut Option<(f64, f64)>,
    own: &'a mut Option<f64>,
    confident: &'a mut Vec<(usize, f64)>,
    label: Option<usize>,
}

impl Row<'_> {
    /// The loops over the entries hold nothing but the entries: they are what the reference
    /// spends its time in beside the GEMMs.
    #[inline(always)]
    fn fill(&mut self, token: Token, logit: impl Fn(usize, f64) -> Logit) {
        let of_label = self.label.map(|v| logit(v, self.dense[v]));
        *self.slope = of_label.as_ref().map(|logit| (logit.slope, logit.slope_var));
        let whole = token.noise.whole;
        let entry = |logit: &Logit| {
            let dense = if whole { token.dense(logit).by_logit } else { 0.0 };
            logit.slope * (dense + token.c_label)
        };
        *self.own = of_label.as_ref().map(entry);
        let (mut logits, mut p) = ([Logit::default(); PASS], [0.0; PASS]);
        for first in (0..self.dense.len()).step_by(PASS) {
            let columns = first..self.dense.len().min(first + PASS);
            for ((logit_of, p), v) in logits.iter_mut().zip(&mut p).zip(columns.clone()) {
                *logit_of = logit(v, self.dense[v]);
                *p = logit_of.value;
            }
            exp_row(&mut p[..columns.len()], token.lse);
            self.fill_columns(columns, token, (&logits, &p));
        }
        if let (Some(v), Some(logit)) = (self.label.filter(|_| whole), of_label) {
            let by_logit = token.dense(&logit).by_logit;
            self.noisy[v] = logit.slope * logit.slope * token.whole_var(&logit)
                + by_logit * by_logit * logit.slope_var;
        }
    }

    /// The entries of some columns, from their logits and p.
    #[inline(always)]
    fn fill_columns(
        &mut self,
        columns: Range<usize>,
        token: Token,
        (logits, p): (&[Logit], &[f64]),
    ) {
        let (confident, whole) = (token.noise.confident, token.noise.whole);
        let dense = self.dense[columns.clone()].iter_mut();
        let squared = self.squared[columns.clone()].iter_mut();
        let noisy = self.noisy[columns.clone()].iter_mut();
        let buffers = dense.zip(squared).zip(noisy).zip(logits.iter().zip(p));
        for ((((dense, squared), noisy), (logit, &p)), v) in buffers.zip(columns) {
            let terms = token.dense_of(logit, p);
            let entry = logit.slope * terms.by_logit;
            *dense = entry;
            *squared = entry * entry;
            *noisy = logit.slope * logit.slope * terms.var;
            // Known at compile time for a head without options.
            if logit.slope_var != 0.0 {
                *noisy += terms.by_logit * terms.by_logit * logit.slope_var;
            }
            if let Some(dropped) = self.dropped.get_mut(v) {
                *dropped = token.dropped(&terms, logit.slope, self.label == Some(v));
            }
            if confident > 0.0 && terms.p >= confident && !(whole && self.label == Some(v)) {
                self.confident.push((v, entry));
            }
        }
    }
}

/// Where a label lies among some columns; `IGNORED` is beyond all of them.
pub(super) fn label_column(label: u32, cols: &Range<usize>) -> Option<usize> {
    cols.contains(&(label as usize)).then(|| label as usize - cols.start)
}
