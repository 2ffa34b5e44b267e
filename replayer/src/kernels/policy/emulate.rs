//! The policy as an emulation for verdicts: forward alone, and backward at a given
//! lse with the parts of dq and dk told apart, in memory bounded by the tiles.
//!
//! Vocabulary tiles are the outer loop of backward, so that dk leaves block by block.

use super::label::{Hits, LabelPath};
use super::softmax::{Cotangents, Online, absorb, dlogits};
use super::tile::{Panels, panel, round_all};
use super::{Path, Policy};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::tiles::{Progress, Tiles, spans};
use std::ops::Range;

/// Per token results of the forward pass, both `[T]`.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyForward {
    /// Log-sum-exp; -inf where the valid vocabulary is empty.
    pub lse: Vec<f32>,
    /// Logit of the label, 0 for an ignored token.
    pub label_logits: Vec<f32>,
}

/// Gradients with respect to q, all `[T, D]`. The parts are empty on the plain path,
/// which never tells them apart.
#[derive(Debug, Clone, PartialEq)]
pub struct DqParts {
    /// Softmax part, rounded to the precision of the parts.
    pub dq_lse: Vec<f32>,
    /// Label part, rounded to the precision of the parts.
    pub dq_label: Vec<f32>,
    /// Their sum, or the plain path's product, rounded to the output precision.
    pub dq: Vec<f32>,
}

/// Gradients with respect to a block of rows of k, all `[rows, D]`; parts as in
/// `DqParts`.
#[derive(Debug, Clone)]
pub struct DkParts<'a> {
    /// Rows of k this block is about.
    pub rows: Range<usize>,
    /// Softmax part.
    pub dk_lse: &'a [f32],
    /// Label part.
    pub dk_label: &'a [f32],
    /// Their sum, or the plain path's product.
    pub dk: &'a [f32],
}

/// Multiply-adds that `forward` will report.
pub fn forward_work(inputs: &HeadInputs) -> u64 {
    inputs.gemm_work()
}

/// Multiply-adds that `backward` will report: logits again, dq and dk.
pub fn backward_work(inputs: &HeadInputs) -> u64 {
    3 * inputs.gemm_work()
}

/// lse and label logits of q `[T, D]` against k `[V, D]`, row-major.
///
/// Online over the vocabulary tiles in order; inside a tile a row is summed in 32
/// lanes, then pairwise.
pub fn forward(
    policy: &Policy,
    inputs: &HeadInputs,
    tiles: Tiles,
    progress: &dyn Progress,
) -> PolicyForward {
    inputs.check();
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let mut online = vec![Online::EMPTY; tokens];
    let (mut q_buffer, mut k_buffer, mut tile) = (Vec::new(), Vec::new(), Vec::new());
    for cols in spans(inputs.valid_vocab, tiles.vocab) {
        let k = panel(policy, &inputs.k, cols.clone(), &mut k_buffer);
        for span in spans(tokens, tiles.tokens) {
            let q = panel(policy, &inputs.q, span.clone(), &mut q_buffer);
            tile.resize(span.len() * cols.len(), 0.0);
            Panels { q, k, depth }.logits(&mut tile, cols.len());
            let labels = &inputs.labels[span.clone()];
            absorb(policy, &mut tile, cols.clone(), labels, &mut online[span.clone()]);
            progress.advance((span.len() * cols.len() * depth) as u64);
        }
    }
    PolicyForward {
        lse: online.iter().map(Online::lse).collect(),
        label_logits: online.iter().map(Online::label_logit).collect(),
    }
}

/// Gradients of q `[T, D]` and k `[V, D]` at a given lse `[T]` and cotangents `[T]`.
///
/// `on_dk` gets the rows of k in order, those beyond the valid vocabulary as zeros. dq
/// sums over the vocabulary tile by tile, dk over the tokens tile by tile.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    policy: &Policy,
    inputs: &HeadInputs,
    lse: &[f32],
    g_lse: &[f32],
    g_label: &[f32],
    tiles: Tiles,
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkParts),
) -> DqParts {
    inputs.check();
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    for given in [lse, g_lse, g_label] {
        assert_eq!(given.len(), tokens, "one lse and one cotangent a token");
    }
    let label_path = LabelPath { policy, inputs, g_label };
    let hits = Hits::new(inputs.labels);
    let cotangents = Cotangents { lse, g_lse, g_label };
    let mut dq = vec![0.0; tokens * depth];
    let mut block = DkBuffers::default();
    let (mut q_buffer, mut k_buffer, mut tile) = (Vec::new(), Vec::new(), Vec::new());
    for cols in spans(inputs.valid_vocab, tiles.vocab) {
        let k = panel(policy, &inputs.k, cols.clone(), &mut k_buffer);
        block.clear(cols.len() * depth);
        for span in spans(tokens, tiles.tokens) {
            let q = panel(policy, &inputs.q, span.clone(), &mut q_buffer);
            let panels = Panels { q, k, depth };
            tile.resize(span.len() * cols.len(), 0.0);
            panels.logits(&mut tile, cols.len());
            let labels = &inputs.labels[span.clone()];
            dlogits(policy, &mut tile, cols.clone(), labels, cotangents.of(span.clone()));
            let dq = (&mut dq[span.start * depth..span.end * depth], cols.start > 0);
            let dk = (&mut block.dk[..], span.start > 0);
            panels.accumulate(&tile, dq, dk, (span.len(), cols.len()));
            progress.advance(3 * (span.len() * cols.len() * depth) as u64);
        }
        block.finish(&label_path, &hits, cols, on_dk);
    }
    for rows in spans(inputs.k.rows - inputs.valid_vocab, tiles.vocab) {
        block.clear(rows.len() * depth);
        let first = inputs.valid_vocab;
        block.finish(&label_path, &hits, first + rows.start..first + rows.end, on_dk);
    }
    finish_dq(&label_path, dq)
}

fn finish_dq(label_path: &LabelPath, mut dq: Vec<f32>) -> DqParts {
    if label_path.policy.path == Path::Plain {
        round_all(label_path.policy.output, &mut dq);
        return DqParts { dq_lse: Vec::new(), dq_label: Vec::new(), dq };
    }
    let (mut dq_lse, mut dq_label) = (vec![0.0; dq.len()], vec![0.0; dq.len()]);
    label_path.finish_dq(&mut dq, 0, Some((&mut dq_lse, &mut dq_label)));
    DqParts { dq_lse, dq_label, dq }
}

/// What `DkParts` lends out.
#[derive(Default)]
struct DkBuffers {
    lse: Vec<f32>,
    label: Vec<f32>,
    dk: Vec<f32>,
}

impl DkBuffers {
    fn clear(&mut self, length: usize) {
        self.dk.clear();
        self.dk.resize(length, 0.0);
    }

    fn finish(
        &mut self,
        label_path: &LabelPath,
        hits: &Hits,
        rows: Range<usize>,
        on_dk: &mut dyn FnMut(DkParts),
    ) {
        let DkBuffers { lse, label, dk } = self;
        if label_path.policy.path == Path::Plain {
            round_all(label_path.policy.output, dk);
        } else {
            lse.resize(dk.len(), 0.0);
            label.resize(dk.len(), 0.0);
            label_path.finish_dk(hits, rows.clone(), dk, Some((lse, label)));
        }
        on_dk(DkParts { rows, dk_lse: lse, dk_label: label, dk });
    }
}
