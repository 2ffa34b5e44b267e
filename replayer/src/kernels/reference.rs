//! The loss head in f64: the oracle that policies and captured tensors are judged
//! against.
//!
//! Plain code, meant to be read: f64 GEMMs, exp and log from libm, no rounding
//! points, no tricks. It shares no arithmetic with `policy` (own panel conversion,
//! own GEMM wrapper, own exp), so a bug in one cannot hide in the other.

mod backward;
mod block;
mod gemm;
mod logit;
mod panel;
mod plane;
pub mod policy_loss;
mod probe;
mod products;
#[cfg(test)]
mod tests;
mod tile;

use super::matrix::HeadInputs;
use super::tiles::{Progress, Tiles, spans};
use logit::Chain;
use panel::load;
use rayon::prelude::*;
use tile::{label_column, products};

pub use backward::{Backward, DkBlock, TermNoise, backward, backward_work};
pub use plane::{PlaneTile, plane};
pub use probe::{Probed, Probing, probe, probe_work};
pub use products::{DkProducts, DqProducts, from_dlogits, from_dlogits_work};

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

/// Running max of a row of logits, and the sum of `exp(logit - shift(max))`.
#[derive(Debug, Clone, Copy)]
struct RunningSum {
    max: f64,
    sum: f64,
}

/// Multiply-adds that `forward` will report: one GEMM over the valid plane, with D
/// counted as 1 where the logits were given.
pub fn forward_work(inputs: &HeadInputs) -> u64 {
    work(inputs, inputs.q.rows, inputs.valid_vocab)
}

fn work(inputs: &HeadInputs, tokens: usize, cols: usize) -> u64 {
    (tokens * cols * inputs.q.cols.max(1)) as u64
}

/// Panics unless the shapes agree, those of the options included.
fn check(inputs: &HeadInputs) {
    inputs.check();
    let (tokens, vocab) = (inputs.q.rows, inputs.k.rows);
    if let Some(bias) = inputs.bias {
        assert_eq!(bias.len(), vocab, "one bias a row of k");
    }
    if let Some(given) = &inputs.given {
        assert_eq!((given.rows, given.cols), (tokens, vocab), "given logits are [T, V]");
        assert_eq!(given.len(), tokens * vocab, "given holds rows * cols values");
        assert_eq!(inputs.q.cols, 0, "given logits take the place of q and k");
    }
}

/// lse, label logits, row max and sum of logits of q `[T, D]` against k `[V, D]`, or of
/// given logits `[T, V]`, row-major.
///
/// Vocabulary tiles are the outer loop. A row's exponentials are summed left to
/// right inside a tile, and tiles are merged in vocabulary order; masked columns come
/// last, all at once.
pub fn forward(inputs: &HeadInputs, tiles: Tiles, progress: &dyn Progress) -> Forward {
    check(inputs);
    let tokens = inputs.q.rows;
    let mut running = vec![RunningSum { max: f64::NEG_INFINITY, sum: 0.0 }; tokens];
    let zeros = || vec![0.0; tokens];
    let (mut label_logits, mut logit_sum, mut logit_squares) = (zeros(), zeros(), zeros());
    let (mut q, mut k, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    let chain = Chain::of(inputs);
    let (of_q, of_k) = inputs.scored();
    for cols in spans(inputs.valid_vocab, tiles.vocab) {
        load(of_k, cols.clone(), &mut k);
        for span in spans(tokens, tiles.tokens) {
            load(of_q, span.clone(), &mut q);
            products(inputs, (span.clone(), &q), (cols.clone(), &k), &mut logits);
            (
                logits.par_chunks_mut(cols.len()),
                &inputs.labels[span.clone()],
                &mut running[span.clone()],
                &mut label_logits[span.clone()],
                &mut logit_sum[span.clone()],
                &mut logit_squares[span.clone()],
            )
                .into_par_iter()
                .for_each(|(row, &label, running, label_logit, sum, squares)| {
                    chain.apply(row, cols.start);
                    running.absorb(row);
                    *sum += sum_in_lanes(row, |x| x);
                    *squares += sum_in_lanes(row, |x| x * x);
                    if let Some(column) = label_column(label, &cols) {
                        *label_logit = row[column];
                    }
                });
            progress.advance(work(inputs, span.len(), cols.len()));
        }
    }
    if let Some(mask) = inputs.mask {
        let masked = inputs.k.rows - inputs.valid_vocab;
        running.iter_mut().for_each(|running| running.absorb_copies(mask, masked));
    }
    Forward {
        lse: running.iter().map(RunningSum::lse).collect(),
        label_logits,
        row_max: running.iter().map(|running| running.max).collect(),
        logit_sum,
        logit_squares,
    }
}

/// Logits of the labels alone, `[T]`, as `forward` gives them: T·D multiply-adds.
pub fn label_logits(inputs: &HeadInputs) -> Vec<f64> {
    check(inputs);
    let (chain, d, v) = (Chain::of(inputs), inputs.q.cols, inputs.k.rows);
    let (q, k) = inputs.scored();
    let of = |t: usize| {
        let Some(row) = inputs.label(t) else { return 0.0 };
        let term = |i: usize| q.get_f64(t * d + i) * k.get_f64(row * d + i);
        let scores = inputs.reads.and_then(|reads| reads.scores);
        let scores = scores.map(|(of, first)| of.get_f64(t * of.cols + first + row));
        let given = inputs.given.map(|given| given.get_f64(t * v + row)).or(scores);
        let mut logit = [given.unwrap_or_else(|| (0..d).map(term).sum())];
        chain.apply(&mut logit, row);
        logit[0]
    };
    (0..inputs.q.rows).into_par_iter().map(of).collect()
}

impl RunningSum {
    fn absorb(&mut self, row: &[f64]) {
        let shift = self.raise(row.iter().fold(self.max, |max, &logit| max.max(logit)));
        self.sum += row.iter().map(|&logit| libm::exp(logit - shift)).sum::<f64>();
    }

    /// Takes in one logit that stands in `count` columns.
    fn absorb_copies(&mut self, logit: f64, count: usize) {
        if count > 0 {
            let shift = self.raise(self.max.max(logit));
            self.sum += count as f64 * libm::exp(logit - shift);
        }
    }

    /// Makes the sum one of a larger max, and returns its shift.
    fn raise(&mut self, max: f64) -> f64 {
        let (old, new) = (shift(self.max), shift(max));
        // Nothing but masked logits so far: the sum is 0 (or NaN) and stays so.
        if self.max > f64::NEG_INFINITY {
            self.sum *= libm::exp(old - new);
        }
        self.max = max;
        new
    }

    fn lse(&self) -> f64 {
        shift(self.max) + libm::log(self.sum)
    }
}

/// Sum of a row's values, or of what is made of each, in eight lanes, the order fixed: in one
/// chain each addition would wait for the one before.
fn sum_in_lanes(row: &[f64], of: impl Fn(f64) -> f64) -> f64 {
    let (chunks, rest) = row.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += of(x));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&x| of(x)).sum::<f64>()
}

/// What is subtracted before exp. An infinite max would turn inf - inf into NaN,
/// where lse is plainly that inf: so nothing is subtracted then.
fn shift(max: f64) -> f64 {
    if max.is_finite() { max } else { 0.0 }
}
