//! The loss head in f64: the reference that policies and captured tensors are compared with.
//!
//! Plain code, meant to be read: f64 GEMMs, log from libm, an exp that vectorises, no rounding
//! points. It shares no arithmetic with `policy` (own panel conversion, own GEMM wrapper, own exp),
//! so that a bug in one shows as a difference from the other.

mod backward;
mod block;
mod dense;
mod exp;
mod forward;
mod gemm;
mod logit;
mod panel;
mod plane;
pub mod policy_loss;
mod probe;
mod products;
mod squares;
#[cfg(test)]
mod tests;
mod tile;

use super::matrix::HeadInputs;
use forward::sum_in_lanes;
use logit::Chain;
use panel::load;
use rayon::prelude::*;

pub use backward::{
    Backward, DkBlock, GEMMS, Keep, TermNoise, Walking, backward, backward_onto, backward_work,
};
pub use block::DkSums;
pub use dense::{DenseSums, LabelTerms};
pub use forward::{Forward, ForwardSums, forward, forward_keeping};
pub use plane::{PlaneTile, plane};
pub use probe::{Probed, Probing, probe, probe_work};
pub use products::{DkProducts, DqProducts, from_dlogits, from_dlogits_work};
pub use squares::WIDE;
pub use tile::Upstream;

/// Multiply-adds that `forward` will report: one GEMM over the valid plane, with D
/// counted as 1 where the logits were given.
pub fn forward_work(inputs: &HeadInputs) -> u64 {
    work(inputs, inputs.q.rows, inputs.valid_vocab)
}

fn work(inputs: &HeadInputs, tokens: usize, cols: usize) -> u64 {
    (tokens * cols * inputs.q.cols.max(1)) as u64
}

/// Panics unless the shapes agree, those of the options included.
pub(crate) fn check(inputs: &HeadInputs) {
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

/// The logit of each token's label, `[T]`, as `forward` gives it, in T·D multiply-adds.
pub fn label_logits(inputs: &HeadInputs) -> Vec<f64> {
    check(inputs);
    let (chain, v) = (Chain::of(inputs), inputs.k.rows);
    let (of_q, of_k) = inputs.scored();
    let label_logit = |(q, k): &mut (Vec<f64>, Vec<f64>), t: usize| {
        let Some(row) = inputs.label(t) else { return 0.0 };
        let scores = inputs.reads.and_then(|reads| reads.scores);
        let scores = scores.map(|(scores, first)| scores.get_f64(t * scores.cols + first + row));
        let given = inputs.given.map(|given| given.get_f64(t * v + row)).or(scores);
        let product = given.unwrap_or_else(|| {
            load(of_q, t..t + 1, q);
            load(of_k, row..row + 1, k);
            q.iter_mut().zip(k).for_each(|(q, k)| *q *= *k);
            sum_in_lanes(q, |x| x)
        });
        let mut logit = [product];
        chain.apply(&mut logit, row);
        logit[0]
    };
    (0..inputs.q.rows)
        .into_par_iter()
        .with_min_len(64)
        .map_init(Default::default, label_logit)
        .collect()
}
