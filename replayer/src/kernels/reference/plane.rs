//! The token x vocabulary plane itself: logits and dlogits, for jobs that recorded them.
//!
//! They are computed tile by tile: the whole plane is never in memory.

use super::backward::TermNoise;
use super::logit::{Chain, Logit};
use super::tile::{Panel, Token, Upstream, label_column, products};
use super::{check, work};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::tiles::{Progress, Tiles, spans};
use rayon::prelude::*;
use std::ops::Range;

/// A tile of the plane; all buffers row-major `[tokens, cols]`.
#[derive(Debug, Clone)]
pub struct PlaneTile<'a> {
    /// Rows of q this tile is about.
    pub tokens: Range<usize>,
    /// Rows of k this tile is about, those beyond the valid vocabulary included.
    pub cols: Range<usize>,
    /// Final logits; the mask (or -inf) beyond the valid vocabulary.
    pub logits: &'a [f64],
    /// Variance of the final logit; 0 beyond the valid vocabulary.
    pub logits_var: &'a [f64],
    /// Gradient of the loss with respect to the product q k, label part included; 0
    /// beyond the valid vocabulary.
    pub dlogits: &'a [f64],
    /// Variance of that gradient; the label part is taken to be rounded in the format of p.
    pub dlogits_var: &'a [f64],
}

#[derive(Default)]
struct Buffers {
    products: Vec<f64>,
    logits: Vec<f64>,
    logits_var: Vec<f64>,
    dlogits: Vec<f64>,
    dlogits_var: Vec<f64>,
}

/// Logits and dlogits of all columns `0..V` at a given lse `[T]` and cotangents `[T]`.
///
/// Vocabulary tiles are the outer loop; tiles come in order. Reports the work of
/// `forward_work`.
pub fn plane(
    inputs: &HeadInputs,
    lse: &[f64],
    cotangents: &Cotangents<f64>,
    noise: &TermNoise,
    tiles: Tiles,
    progress: &dyn Progress,
    on_tile: &mut dyn FnMut(PlaneTile),
) {
    check(inputs);
    let upstream = Upstream::new(inputs, lse, *cotangents, noise);
    let mut buffers = Buffers::default();
    let (mut key, mut query) = (Panel::default(), Panel::default());
    let (q, k) = inputs.scored();
    for cols in spans(inputs.k.rows, tiles.vocab) {
        let valid = cols.start..cols.end.min(inputs.valid_vocab).max(cols.start);
        key.load(k, valid.clone());
        for tokens in spans(inputs.q.rows, tiles.tokens) {
            query.load(q, tokens.clone());
            buffers.fill(inputs, &query, &key, cols.len(), upstream);
            on_tile(buffers.lend(tokens.clone(), cols.clone()));
            progress.advance(work(inputs, tokens.len(), valid.len()));
        }
    }
}

impl Buffers {
    /// Fills a tile that is `width` wide and whose valid columns are the rows of `key`.
    fn fill(
        &mut self,
        inputs: &HeadInputs,
        query: &Panel,
        key: &Panel,
        width: usize,
        upstream: Upstream,
    ) {
        let (first, cols) = (query.rows.start, key.rows.clone());
        let q = (query.rows.clone(), &query.values[..]);
        products(inputs, q, (cols.clone(), &key.values), &mut self.products);
        let size = query.rows.len() * width;
        let masked = inputs.mask.unwrap_or(f64::NEG_INFINITY);
        for (buffer, padding) in [
            (&mut self.logits, masked),
            (&mut self.logits_var, 0.0),
            (&mut self.dlogits, 0.0),
            (&mut self.dlogits_var, 0.0),
        ] {
            buffer.clear();
            buffer.resize(size, padding);
        }
        let (chain, valid) = (Chain::of(inputs), cols.len());
        let products = &self.products;
        (
            self.logits.par_chunks_mut(width),
            self.logits_var.par_chunks_mut(width),
            self.dlogits.par_chunks_mut(width),
            self.dlogits_var.par_chunks_mut(width),
        )
            .into_par_iter()
            .enumerate()
            .for_each(|(row, (logits, logits_var, dlogits, dlogits_var))| {
                let token = upstream.token(first + row);
                let label = label_column(inputs.labels[first + row], &cols);
                for v in 0..valid {
                    let product = products[row * valid + v];
                    let norms = query.norms[row] * key.norms[v];
                    let logit = chain.logit(product, cols.start + v, norms, token.noise);
                    (logits[v], logits_var[v]) = (logit.value, logit.var);
                    (dlogits[v], dlogits_var[v]) = entry(&token, &logit, label == Some(v));
                }
            });
    }

    fn lend(&self, tokens: Range<usize>, cols: Range<usize>) -> PlaneTile<'_> {
        PlaneTile {
            tokens,
            cols,
            logits: &self.logits,
            logits_var: &self.logits_var,
            dlogits: &self.dlogits,
            dlogits_var: &self.dlogits_var,
        }
    }
}

/// An entry of dlogits with its label part, and its variance.
fn entry(token: &Token, logit: &Logit, is_label: bool) -> (f64, f64) {
    let dense = token.dense(logit);
    let label = if is_label { token.c_label } else { 0.0 };
    let by_logit = dense.by_logit + label;
    if token.noise.whole && is_label {
        let own_variance = logit.slope * logit.slope * token.whole_var(logit);
        return (logit.slope * by_logit, own_variance + by_logit * by_logit * logit.slope_var);
    }
    let var = dense.var + label * label * token.noise.p_rel_var;
    let var = logit.slope * logit.slope * var + by_logit * by_logit * logit.slope_var;
    (logit.slope * by_logit, var)
}
