//! Gradients of the loss head in f64, split into softmax and label parts, with the
//! sums of squares that a rounding floor is made of.
//!
//! It judges nothing: which rounding the squares are weighted with is the caller's.

use super::gemm::{Operand, multiply};
use super::panel::{load, squares};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::tiles::{Progress, Tiles, spans};
use rayon::prelude::*;
use std::ops::Range;

/// Relative variance of one softmax term g_lse p, as rounding makes it:
/// `noise(t, v) = p_rel_var + logit_rel_var x^2 + dot_rel_var |q_t|^2 |k_v|^2`, x the
/// logit.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TermNoise {
    /// From rounding p (or g p) itself.
    pub p_rel_var: f64,
    /// From rounding the logit: an error of the logit is a relative error of p.
    pub logit_rel_var: f64,
    /// From accumulating the dot product q k.
    pub dot_rel_var: f64,
}

/// Gradients with respect to q, all `[T, D]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// `(g_lse p) k`.
    pub dq_lse: Vec<f64>,
    /// `g_label k[label]`, 0 for an ignored token.
    pub dq_label: Vec<f64>,
    /// `sum over v of (g_lse p)^2 noise(t, v) k^2`.
    pub dq_lse_var: Vec<f64>,
    /// `sum over v of (g_lse p)^2 k^2`.
    pub dq_lse_sq: Vec<f64>,
}

/// Gradients with respect to a block of rows of k, all `[rows, D]` but `hits`.
#[derive(Debug, Clone)]
pub struct DkBlock<'a> {
    /// Rows of k this block is about.
    pub rows: Range<usize>,
    /// `(g_lse p)^T q`.
    pub dk_lse: &'a [f64],
    /// Sum of `g_label q` over the tokens whose label the row is.
    pub dk_label: &'a [f64],
    /// `sum over t of (g_lse p)^2 noise(t, v) q^2`.
    pub dk_lse_var: &'a [f64],
    /// `sum over t of (g_lse p)^2 q^2`.
    pub dk_lse_sq: &'a [f64],
    /// Sum of `(g_label q)^2` over the hits.
    pub dk_label_sq: &'a [f64],
    /// `[rows]`: tokens whose label the row is.
    pub hits: &'a [u32],
}

/// Multiply-adds that `backward` will report: the logits, and two GEMMs for each of
/// the gradient and its sums of squares.
pub fn backward_work(inputs: &HeadInputs) -> u64 {
    GEMMS * inputs.gemm_work()
}

const GEMMS: u64 = 7;

/// Gradients of q `[T, D]` and k `[V, D]` at a given lse `[T]` (the reference's, or a
/// captured one) and cotangents `g_lse`, `g_label` `[T]`.
///
/// Vocabulary tiles are the outer loop: `on_dk` gets the rows of k in order, those
/// beyond the valid vocabulary as zeros. dq sums over the vocabulary tile by tile, dk
/// over the tokens tile by tile, label rows in token order.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    inputs: &HeadInputs,
    lse: &[f64],
    g_lse: &[f64],
    g_label: &[f64],
    noise: &TermNoise,
    tiles: Tiles,
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkBlock),
) -> Backward {
    inputs.check();
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    for given in [lse, g_lse, g_label] {
        assert_eq!(given.len(), tokens, "one lse and one cotangent a token");
    }
    let zeros = || vec![0.0; tokens * depth];
    let mut dq =
        Backward { dq_lse: zeros(), dq_label: zeros(), dq_lse_var: zeros(), dq_lse_sq: zeros() };
    let mut block = Block::default();
    let mut terms = Terms::default();
    let mut key = Panel::default();
    let mut query = Panel::default();
    let hits = hits_by_row(inputs);
    for rows in spans(inputs.k.rows, tiles.vocab) {
        block.clear(rows.len(), depth);
        let valid = rows.start..rows.end.min(inputs.valid_vocab).max(rows.start);
        key.load(inputs, &inputs.k, valid.clone());
        for span in spans(if valid.is_empty() { 0 } else { tokens }, tiles.tokens) {
            query.load(inputs, &inputs.q, span.clone());
            terms.fill(&query, &key, depth, &lse[span.clone()], &g_lse[span.clone()], noise);
            accumulate(&mut dq, &mut block, &terms, &query, &key, span.clone(), depth);
            progress.advance(GEMMS * (span.len() * valid.len() * depth) as u64);
        }
        block.add_labels(inputs, &hits, rows.clone(), g_label, &mut dq.dq_label);
        on_dk(block.emit(rows));
    }
    dq
}

/// Rows of q or k with their squares, and the squared norm of each row.
#[derive(Default)]
struct Panel {
    values: Vec<f64>,
    squared: Vec<f64>,
    norms: Vec<f64>,
}

impl Panel {
    fn load(
        &mut self,
        inputs: &HeadInputs,
        matrix: &crate::kernels::matrix::Matrix,
        rows: Range<usize>,
    ) {
        let depth = inputs.q.cols;
        load(matrix, rows.clone(), &mut self.values);
        squares(&self.values, &mut self.squared);
        self.norms.clear();
        let norm = |row: usize| self.squared[row * depth..(row + 1) * depth].iter().sum::<f64>();
        self.norms.extend((0..rows.len()).map(norm));
    }
}

/// One tile of `g_lse p`, its square, and its square times the noise. Squares stay in
/// f64: a p of 1e-25 in f32 would square to 0, and its row would have no floor.
#[derive(Default)]
struct Terms {
    softmax: Vec<f64>,
    squared: Vec<f64>,
    noisy: Vec<f64>,
}

impl Terms {
    fn fill(
        &mut self,
        query: &Panel,
        key: &Panel,
        depth: usize,
        lse: &[f64],
        g_lse: &[f64],
        noise: &TermNoise,
    ) {
        let (height, width) = (query.norms.len(), key.norms.len());
        for buffer in [&mut self.softmax, &mut self.squared, &mut self.noisy] {
            buffer.resize(height * width, 0.0);
        }
        let keys = Operand::rows(&key.values, depth).transposed();
        let queries = Operand::rows(&query.values, depth);
        multiply(&mut self.softmax, width, false, queries, keys, depth);
        (
            self.softmax.par_chunks_mut(width),
            self.squared.par_chunks_mut(width),
            self.noisy.par_chunks_mut(width),
        )
            .into_par_iter()
            .enumerate()
            .for_each(|(token, (softmax, squared, noisy))| {
                for (v, key_norm) in key.norms.iter().enumerate() {
                    let logit = softmax[v];
                    let term = g_lse[token] * libm::exp(logit - lse[token]);
                    let relative = noise.p_rel_var
                        + noise.logit_rel_var * logit * logit
                        + noise.dot_rel_var * query.norms[token] * key_norm;
                    softmax[v] = term;
                    squared[v] = term * term;
                    noisy[v] = term * term * relative;
                }
            });
    }
}

/// The six GEMMs of one tile, each a sum onto what earlier tiles left.
fn accumulate(
    dq: &mut Backward,
    block: &mut Block,
    terms: &Terms,
    query: &Panel,
    key: &Panel,
    span: Range<usize>,
    depth: usize,
) {
    let (height, width) = (query.norms.len(), key.norms.len());
    let tile = |values| Operand::rows(values, width);
    let rows = |values| Operand::rows(values, depth);
    let range = span.start * depth..span.end * depth;
    let dq_targets = [
        (&mut dq.dq_lse[range.clone()], &terms.softmax, &key.values),
        (&mut dq.dq_lse_sq[range.clone()], &terms.squared, &key.squared),
        (&mut dq.dq_lse_var[range], &terms.noisy, &key.squared),
    ];
    let valid = width * depth;
    let dk_targets = [
        (&mut block.lse[..valid], &terms.softmax, &query.values),
        (&mut block.lse_sq[..valid], &terms.squared, &query.squared),
        (&mut block.lse_var[..valid], &terms.noisy, &query.squared),
    ];
    rayon::scope(|scope| {
        for (target, terms, keys) in dq_targets {
            scope.spawn(move |_| multiply(target, depth, true, tile(terms), rows(keys), width));
        }
        for (target, terms, queries) in dk_targets {
            let transposed = tile(terms).transposed();
            scope.spawn(move |_| multiply(target, depth, true, transposed, rows(queries), height));
        }
    });
}

/// What `DkBlock` lends out.
#[derive(Default)]
struct Block {
    lse: Vec<f64>,
    label: Vec<f64>,
    lse_var: Vec<f64>,
    lse_sq: Vec<f64>,
    label_sq: Vec<f64>,
    hits: Vec<u32>,
}

impl Block {
    fn clear(&mut self, rows: usize, depth: usize) {
        let Block { lse, label, lse_var, lse_sq, label_sq, hits } = self;
        for buffer in [lse, label, lse_var, lse_sq, label_sq] {
            buffer.clear();
            buffer.resize(rows * depth, 0.0);
        }
        hits.clear();
        hits.resize(rows, 0);
    }

    /// The label path of every token whose label lies in `rows`, in token order.
    fn add_labels(
        &mut self,
        inputs: &HeadInputs,
        hits: &[(u32, usize)],
        rows: Range<usize>,
        g_label: &[f64],
        dq_label: &mut [f64],
    ) {
        let depth = inputs.q.cols;
        let first = hits.partition_point(|&(label, _)| (label as usize) < rows.start);
        let (mut q, mut k) = (Vec::new(), Vec::new());
        for &(label, token) in &hits[first..] {
            let label = label as usize;
            if label >= rows.end {
                break;
            }
            let row = label - rows.start;
            self.hits[row] += 1;
            load(&inputs.q, token..token + 1, &mut q);
            load(&inputs.k, label..label + 1, &mut k);
            for d in 0..depth {
                let addend = g_label[token] * q[d];
                self.label[row * depth + d] += addend;
                self.label_sq[row * depth + d] += addend * addend;
                dq_label[token * depth + d] = g_label[token] * k[d];
            }
        }
    }

    fn emit(&self, rows: Range<usize>) -> DkBlock<'_> {
        DkBlock {
            rows,
            dk_lse: &self.lse,
            dk_label: &self.label,
            dk_lse_var: &self.lse_var,
            dk_lse_sq: &self.lse_sq,
            dk_label_sq: &self.label_sq,
            hits: &self.hits,
        }
    }
}

/// (label, token) of every token that is not ignored, by label, then by token.
fn hits_by_row(inputs: &HeadInputs) -> Vec<(u32, usize)> {
    let labelled = |token| inputs.label(token).map(|label| (label as u32, token));
    let mut hits: Vec<_> = (0..inputs.labels.len()).filter_map(labelled).collect();
    hits.sort_unstable();
    hits
}
