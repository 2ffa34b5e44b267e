//! Forward pass, backward pass and plane of logits of any policy: the types of their results, all
//! f64 whatever the policy computes in, and the choice between `emulate` and `emulator`.
//!
//! f64 is only a container here: a value of a bf16 policy is a bf16 number stored in an f64.

use super::{Policy, cut, emulate};
use crate::kernels::emulator;
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::tiles::{Progress, Tiles};
use std::ops::Range;

/// Per token results of the forward pass, all `[T]`.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyForward {
    /// Log-sum-exp, including the masked columns where the mask is finite; -inf where nothing is
    /// summed.
    pub lse: Vec<f64>,
    /// Logit of the label, 0 for an ignored token.
    pub label_logits: Vec<f64>,
    /// Sum of the valid logits, for label smoothing; summed in the same way as lse.
    pub logit_sum: Vec<f64>,
}

/// Gradients with respect to q, all `[T, D]`. The two parts are empty on the plain and the chunked
/// path, which compute their sum only.
#[derive(Debug, Clone, PartialEq)]
pub struct DqParts {
    /// Softmax part (label smoothing included), rounded to the precision of the parts.
    pub dq_lse: Vec<f64>,
    /// Label part, rounded to the precision of the parts.
    pub dq_label: Vec<f64>,
    /// Sum of the parts, or the product of whole dlogits, rounded to the output precision.
    pub dq: Vec<f64>,
}

/// Gradients with respect to a block of rows of k, `[rows, D]`, parts as in `DqParts`,
/// and with respect to their bias.
#[derive(Debug, Clone)]
pub struct DkParts<'a> {
    /// Rows of k this block is about.
    pub rows: Range<usize>,
    /// Softmax part.
    pub dk_lse: &'a [f64],
    /// Label part.
    pub dk_label: &'a [f64],
    /// Sum of the parts, or the product of whole dlogits.
    pub dk: &'a [f64],
    /// `[rows]`: dlogits summed over the tokens in the same way as dk, the label part included,
    /// rounded to the output precision; computed whether or not the head has a bias.
    pub dbias: &'a [f64],
}

/// A tile of the token x vocabulary plane, `[tokens, cols]` each, row-major.
#[derive(Debug, Clone)]
pub struct PlaneTile<'a> {
    /// Rows of q.
    pub tokens: Range<usize>,
    /// Rows of k, either all valid or all beyond the valid vocabulary.
    pub cols: Range<usize>,
    /// Final logits, rounded; beyond the valid vocabulary the mask, or -inf where there is none.
    pub logits: &'a [f64],
    /// Gradient of the loss with respect to the raw logits, before bias and transform, the label
    /// part included on every path; 0 beyond the valid vocabulary.
    pub dlogits: &'a [f64],
}

/// Multiply-adds that `forward` will report.
pub fn forward_work(inputs: &HeadInputs) -> u64 {
    inputs.gemm_work()
}

/// Multiply-adds that `backward` will report: for the logits, which it computes again, for dq and
/// for dk.
pub fn backward_work(inputs: &HeadInputs) -> u64 {
    3 * inputs.gemm_work()
}

/// Multiply-adds that `plane` will report.
pub fn plane_work(inputs: &HeadInputs) -> u64 {
    inputs.gemm_work()
}

/// lse, label logits and sums of logits of q `[T, D]` against k `[V, D]`, row-major.
///
/// Fast policies and the fused path sum lse online over the vocabulary tiles. A fast policy sums a
/// row of a tile in 32 lanes, and then the lanes pairwise.
pub fn forward(
    policy: &Policy,
    inputs: &HeadInputs,
    tiles: Tiles,
    progress: &dyn Progress,
) -> PolicyForward {
    check(inputs);
    if !policy.is_fast() {
        return emulator::forward(policy, inputs, tiles, progress);
    }
    emulate::forward(policy, inputs, tiles, progress)
}

/// Gradients of q `[T, D]`, k `[V, D]` and the bias `[V]` at a given lse `[T]` and
/// cotangents `[T]`.
///
/// `on_dk` gets every row of k once, in blocks: the valid ones in the order of the
/// policy's vocabulary tiles, then those beyond the valid vocabulary as zeros.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    policy: &Policy,
    inputs: &HeadInputs,
    lse: &[f64],
    cotangents: &Cotangents<f64>,
    tiles: Tiles,
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkParts),
) -> DqParts {
    check_backward(inputs, lse, cotangents);
    if !policy.is_fast() {
        let upstream = Upstream { lse, cotangents: *cotangents };
        return emulator::backward(policy, inputs, upstream, tiles, progress, on_dk);
    }
    let order = policy.cut.order(inputs.q.rows).filter(|_| inputs.given.is_none());
    if let Some(order) = order {
        return cut::in_order(&order, (policy, inputs, tiles), (lse, cotangents), progress, on_dk);
    }
    let narrow = Narrow::new(lse, cotangents);
    emulate::backward(policy, inputs, narrow.upstream(), tiles, progress, on_dk)
}

/// Logits and dlogits of every token and every row of k, padding included. Tiles come by tokens,
/// then by vocabulary, both ascending whatever order the policy declares.
#[allow(clippy::too_many_arguments)]
pub fn plane(
    policy: &Policy,
    inputs: &HeadInputs,
    lse: &[f64],
    cotangents: &Cotangents<f64>,
    tiles: Tiles,
    progress: &dyn Progress,
    on_tile: &mut dyn FnMut(PlaneTile),
) {
    check_backward(inputs, lse, cotangents);
    if !policy.is_fast() {
        let upstream = Upstream { lse, cotangents: *cotangents };
        return emulator::plane(policy, inputs, upstream, tiles, progress, on_tile);
    }
    let narrow = Narrow::new(lse, cotangents);
    emulate::plane(policy, inputs, narrow.upstream(), tiles, progress, on_tile);
}

/// Panics unless the shapes agree, as `HeadInputs::check` does.
pub(crate) fn check(inputs: &HeadInputs) {
    inputs.check();
    if let Some(bias) = inputs.bias {
        assert!(bias.len() >= inputs.valid_vocab, "one bias a row of k");
    }
    if let Some(given) = inputs.given {
        assert_eq!(given.rows, inputs.q.rows, "one row of given logits a token");
        assert_eq!(given.len(), given.rows * given.cols, "given holds rows * cols values");
        assert!(given.cols >= inputs.valid_vocab, "one given logit a row of k");
    }
}

/// Panics unless the shapes agree, those of the upstream too.
pub(crate) fn check_backward(inputs: &HeadInputs, lse: &[f64], cotangents: &Cotangents<f64>) {
    check(inputs);
    for given in [lse, cotangents.lse, cotangents.label, cotangents.smooth] {
        assert_eq!(given.len(), inputs.q.rows, "one lse and one cotangent a token");
    }
}

/// lse and cotangents of some tokens, in the type that the policy computes in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Upstream<'a, F> {
    pub(crate) lse: &'a [F],
    pub(crate) cotangents: Cotangents<'a, F>,
}

impl<'a, F> Upstream<'a, F> {
    /// lse and cotangents of a range of the tokens.
    pub(crate) fn of(&self, tokens: Range<usize>) -> Upstream<'a, F> {
        Upstream { lse: &self.lse[tokens.clone()], cotangents: self.cotangents.of(tokens) }
    }
}

/// lse and cotangents rounded to f32.
pub(crate) struct Narrow {
    lse: Vec<f32>,
    cotangents: [Vec<f32>; 3],
}

impl Narrow {
    pub(crate) fn new(lse: &[f64], cotangents: &Cotangents<f64>) -> Self {
        let narrow = |values: &[f64]| values.iter().map(|&value| value as f32).collect();
        let Cotangents { lse: g_lse, label, smooth } = cotangents;
        Narrow { lse: narrow(lse), cotangents: [narrow(g_lse), narrow(label), narrow(smooth)] }
    }

    pub(crate) fn upstream(&self) -> Upstream<'_, f32> {
        let [lse, label, smooth] = &self.cotangents;
        Upstream { lse: &self.lse, cotangents: Cotangents { lse, label, smooth } }
    }
}
