//! The forward pass: per token sums over the vocabulary, tile by tile.
//!
//! The sums over some classes are the start of the sums over the next classes, so the classes may
//! be split among processes without changing a bit.

use super::exp::exp_row;
use super::logit::Chain;
use super::panel::load;
use super::tile::{label_column, products};
use super::{check, work};
use crate::kernels::formula::RunningSum;
use crate::kernels::matrix::HeadInputs;
use crate::kernels::tiles::{Progress, Tiles, spans};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Per token results of the forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[T]`: row max plus log of the sum of exponentials, masked columns included
    /// where the mask is finite; -inf where there is nothing to sum.
    pub lse: Vec<f64>,
    /// `[T]`: logit of the label, 0 for an ignored token.
    pub label_logits: Vec<f64>,
    /// `[T]`: largest logit, a finite mask included; NaN logits are passed over here,
    /// lse carries them.
    pub row_max: Vec<f64>,
    /// `[T]`: sum of the logits of the valid vocabulary, for label smoothing.
    pub logit_sum: Vec<f64>,
    /// `[T]`: sum of their squares, which says how large the partial sums of that sum are.
    pub logit_squares: Vec<f64>,
}

/// What the tiles before left of each token, all `[T]`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ForwardSums {
    /// Largest logit so far.
    #[serde(with = "crate::parcel::numbers")]
    pub max: Vec<f64>,
    /// Sum of `exp(logit - shift(max))`.
    #[serde(with = "crate::parcel::numbers")]
    pub sum: Vec<f64>,
    /// Logit of the label, once its tile was seen.
    #[serde(with = "crate::parcel::numbers")]
    pub label_logits: Vec<f64>,
    /// Sum of the logits.
    #[serde(with = "crate::parcel::numbers")]
    pub logit_sum: Vec<f64>,
    /// Sum of their squares.
    #[serde(with = "crate::parcel::numbers")]
    pub logit_squares: Vec<f64>,
}

/// lse, label logits, row max and sum of logits of q `[T, D]` against k `[V, D]`, or of
/// given logits `[T, V]`, row-major.
///
/// Vocabulary tiles are the outer loop. A row's exponentials are summed in eight lanes
/// inside a tile, and tiles are merged in vocabulary order; masked columns come last,
/// all at once.
pub fn forward(inputs: &HeadInputs, tiles: Tiles, progress: &dyn Progress) -> Forward {
    forward_keeping(inputs, (tiles, progress), None)
}

/// As `forward`; also writes the products `q kᵀ` of the valid classes to `products`, `[T, valid]`.
/// A backward pass that reads them gives the same bits as one that multiplies again.
pub fn forward_keeping(
    inputs: &HeadInputs,
    (tiles, progress): (Tiles, &dyn Progress),
    products: Option<&mut [f64]>,
) -> Forward {
    let mut sums = ForwardSums::zeros(inputs.q.rows);
    sums.take(inputs, (tiles, progress), products);
    sums.finish(inputs.mask, inputs.k.rows - inputs.valid_vocab)
}

impl ForwardSums {
    /// The sums of `tokens` tokens before any class was added.
    pub fn zeros(tokens: usize) -> Self {
        let zeros = || vec![0.0; tokens];
        ForwardSums {
            max: vec![f64::NEG_INFINITY; tokens],
            sum: zeros(),
            label_logits: zeros(),
            logit_sum: zeros(),
            logit_squares: zeros(),
        }
    }

    /// Adds the valid classes of `inputs`, whose k may be some rows of the whole k; callers add
    /// classes in ascending order. The products `q kᵀ` are written to `kept`.
    pub fn take(
        &mut self,
        inputs: &HeadInputs,
        (tiles, progress): (Tiles, &dyn Progress),
        mut kept: Option<&mut [f64]>,
    ) {
        check(inputs);
        let (mut q, mut k, mut logits) = (Vec::new(), Vec::new(), Vec::new());
        let chain = Chain::of(inputs);
        let (of_q, of_k) = inputs.scored();
        for cols in spans(inputs.valid_vocab, tiles.vocab) {
            load(of_k, cols.clone(), &mut k);
            for span in spans(inputs.q.rows, tiles.tokens) {
                load(of_q, span.clone(), &mut q);
                products(inputs, (span.clone(), &q), (cols.clone(), &k), &mut logits);
                if let Some(kept) = kept.as_deref_mut() {
                    keep(kept, (inputs.valid_vocab, &span, &cols), &logits);
                }
                let ForwardSums { max, sum, label_logits, logit_sum, logit_squares } = self;
                (
                    logits.par_chunks_mut(cols.len()),
                    &inputs.labels[span.clone()],
                    (&mut max[span.clone()], &mut sum[span.clone()]),
                    &mut label_logits[span.clone()],
                    &mut logit_sum[span.clone()],
                    &mut logit_squares[span.clone()],
                )
                    .into_par_iter()
                    .for_each(
                        |(row, &label, (max, total), label_logit, sum, squares)| {
                            chain.apply(row, cols.start);
                            *sum += sum_in_lanes(row, |x| x);
                            *squares += sum_in_lanes(row, |x| x * x);
                            if let Some(column) = label_column(label, &cols) {
                                *label_logit = row[column];
                            }
                            let mut running = RunningSum { max: *max, sum: *total };
                            absorb(&mut running, row);
                            (*max, *total) = (running.max, running.sum);
                        },
                    );
                progress.advance(work(inputs, span.len(), cols.len()));
            }
        }
    }

    /// The results, once all valid classes were added; `masked` further columns have the logit
    /// `mask`.
    pub fn finish(self, mask: Option<f64>, masked: usize) -> Forward {
        let ForwardSums { max, sum, label_logits, logit_sum, logit_squares } = self;
        let running = max.into_iter().zip(sum).map(|(max, sum)| {
            let mut running = RunningSum { max, sum };
            if let Some(mask) = mask {
                running.absorb_copies(mask, masked);
            }
            running
        });
        let (lse, row_max) = running.map(|running| (running.lse(), running.max)).unzip();
        Forward { lse, label_logits, row_max, logit_sum, logit_squares }
    }
}

/// Copies a tile of products to its place in `kept`, whose rows are `width` wide.
fn keep(
    kept: &mut [f64],
    (width, tokens, cols): (usize, &Range<usize>, &Range<usize>),
    tile: &[f64],
) {
    let rows = kept[tokens.start * width..tokens.end * width].par_chunks_mut(width);
    let rows = rows.zip(tile.par_chunks(cols.len()));
    rows.for_each(|(row, products)| row[cols.clone()].copy_from_slice(products));
}

/// Takes in a row of logits, and leaves their exponentials in their place.
fn absorb(running: &mut RunningSum<f64>, row: &mut [f64]) {
    let shift = running.raise(row.iter().fold(running.max, |max, &logit| max.max(logit)));
    exp_row(row, shift);
    running.sum += sum_in_lanes(row, |x| x);
}

/// Sum of `of(x)` over a row, in eight lanes and in a fixed order. In a single chain each addition
/// would wait for the one before.
pub(super) fn sum_in_lanes(row: &[f64], term: impl Fn(f64) -> f64) -> f64 {
    let (chunks, rest) = row.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += term(x));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&x| term(x)).sum::<f64>()
}
