//! The loss head in f64: the oracle that policies and captured tensors are judged
//! against.
//!
//! Plain code, meant to be read: f64 GEMMs, exp and log from libm, no rounding
//! points, no tricks. It shares no arithmetic with `policy` (own panel conversion,
//! own GEMM wrapper, own exp), so a bug in one cannot hide in the other.

mod backward;
mod gemm;
mod panel;
mod probe;
#[cfg(test)]
mod tests;

use super::matrix::HeadInputs;
use super::tiles::{Progress, Tiles, spans};
use gemm::{Operand, multiply};
use panel::load;
use rayon::prelude::*;

pub use backward::{Backward, DkBlock, TermNoise, backward, backward_work};
pub use probe::{Probed, probe, probe_work};

/// Per token results of the forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[T]`: row max plus log of the sum of exponentials; -inf where the valid
    /// vocabulary is empty.
    pub lse: Vec<f64>,
    /// `[T]`: logit of the label, 0 for an ignored token.
    pub label_logits: Vec<f64>,
    /// `[T]`: largest logit; NaN logits are passed over here, lse carries them.
    pub row_max: Vec<f64>,
}

/// Running max of a row of logits, and the sum of `exp(logit - shift(max))`.
#[derive(Debug, Clone, Copy)]
struct RunningSum {
    max: f64,
    sum: f64,
}

/// Multiply-adds that `forward` will report.
pub fn forward_work(inputs: &HeadInputs) -> u64 {
    inputs.gemm_work()
}

/// lse, label logits and row max of q `[T, D]` against k `[V, D]`, row-major.
///
/// Vocabulary tiles are the outer loop. A row's exponentials are summed left to
/// right inside a tile, and tiles are merged in vocabulary order.
pub fn forward(inputs: &HeadInputs, tiles: Tiles, progress: &dyn Progress) -> Forward {
    inputs.check();
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let mut running = vec![RunningSum { max: f64::NEG_INFINITY, sum: 0.0 }; tokens];
    let mut label_logits = vec![0.0; tokens];
    let (mut q, mut k, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    for rows in spans(inputs.valid_vocab, tiles.vocab) {
        load(&inputs.k, rows.clone(), &mut k);
        for span in spans(tokens, tiles.tokens) {
            load(&inputs.q, span.clone(), &mut q);
            let width = rows.len();
            logits.resize(span.len() * width, 0.0);
            let keys = Operand::rows(&k, depth).transposed();
            multiply(&mut logits, width, false, Operand::rows(&q, depth), keys, depth);
            let labels = &inputs.labels[span.clone()];
            (logits.par_chunks(width), labels, &mut running[span.clone()])
                .into_par_iter()
                .zip(&mut label_logits[span.clone()])
                .for_each(|((row, &label, running), label_logit)| {
                    running.absorb(row);
                    if rows.contains(&(label as usize)) {
                        *label_logit = row[label as usize - rows.start];
                    }
                });
            progress.advance((span.len() * width * depth) as u64);
        }
    }
    Forward {
        lse: running.iter().map(RunningSum::lse).collect(),
        label_logits,
        row_max: running.iter().map(|running| running.max).collect(),
    }
}

impl RunningSum {
    fn absorb(&mut self, row: &[f64]) {
        let max = row.iter().fold(self.max, |max, &logit| max.max(logit));
        let (old, new) = (shift(self.max), shift(max));
        // Nothing but masked logits so far: the sum is 0 (or NaN) and stays so.
        if self.max > f64::NEG_INFINITY {
            self.sum *= libm::exp(old - new);
        }
        self.sum += row.iter().map(|&logit| libm::exp(logit - new)).sum::<f64>();
        self.max = max;
    }

    fn lse(&self) -> f64 {
        shift(self.max) + libm::log(self.sum)
    }
}

/// What is subtracted before exp. An infinite max would turn inf - inf into NaN,
/// where lse is plainly that inf: so nothing is subtracted then.
fn shift(max: f64) -> f64 {
    if max.is_finite() { max } else { 0.0 }
}
