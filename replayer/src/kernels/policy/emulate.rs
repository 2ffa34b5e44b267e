//! Fast policies for verdicts: forward alone, backward at a given lse with the parts of
//! dq and dk told apart, and the plane of logits, in memory bounded by the tiles.
//!
//! Vocabulary tiles are the outer loop of backward, so that dk leaves block by block.

use super::dispatch::{DkParts, DqParts, PlaneTile, PolicyForward, Upstream};
use super::label::{Hits, LabelPath};
use super::logits::{Finish, raw};
use super::softmax::{Dlogits, Online, absorb};
use super::tile::{Panels, add_columns, joined, panel, round_all};
use super::{Path, Policy};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::tiles::{Progress, Tiles, spans};
use std::ops::Range;

/// See `dispatch::forward`.
pub(super) fn forward(
    policy: &Policy,
    inputs: &HeadInputs,
    tiles: Tiles,
    progress: &dyn Progress,
) -> PolicyForward {
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let mut online = vec![Online::EMPTY; tokens];
    let (mut q_buffer, mut k_buffer, mut tile) = (Vec::new(), Vec::new(), Vec::new());
    for cols in policy.vocab_spans(inputs.valid_vocab, tiles.vocab) {
        let k = panel(policy, &inputs.k, cols.clone(), &mut k_buffer);
        let finish = Finish::new(policy, inputs, cols.clone());
        for span in spans(tokens, tiles.tokens) {
            let q = panel(policy, &inputs.q, span.clone(), &mut q_buffer);
            tile.resize(span.len() * cols.len(), 0.0);
            raw(inputs, (q, k), span.clone(), cols.clone(), &mut tile);
            let (labels, online) = (&inputs.labels[span.clone()], &mut online[span.clone()]);
            absorb(&finish, &mut tile, cols.clone(), labels, online, true);
            progress.advance((span.len() * cols.len() * depth) as u64);
        }
    }
    online.iter_mut().for_each(|online| online.absorb_mask(policy, inputs));
    let all = |value: fn(&Online) -> f32| online.iter().map(|row| value(row).into()).collect();
    PolicyForward {
        lse: all(Online::lse),
        label_logits: all(Online::label_logit),
        logit_sum: all(Online::logit_sum),
    }
}

/// See `dispatch::backward`. dq sums over the vocabulary tile by tile, dk over the tokens
/// tile by tile.
pub(super) fn backward(
    policy: &Policy,
    inputs: &HeadInputs,
    upstream: Upstream<f32>,
    tiles: Tiles,
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkParts),
) -> DqParts {
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let hits = Hits::new(inputs.labels);
    let dlogits = Dlogits::new(policy, inputs);
    let mut label_g = upstream.cotangents.label.to_vec();
    let mut dq = vec![0.0; tokens * depth];
    let mut block = DkBuffers::default();
    let (mut q_buffer, mut k_buffer, mut tile) = (Vec::new(), Vec::new(), Vec::new());
    for (nth, cols) in policy.vocab_spans(inputs.valid_vocab, tiles.vocab).into_iter().enumerate() {
        let k = panel(policy, &inputs.k, cols.clone(), &mut k_buffer);
        let finish = Finish::new(policy, inputs, cols.clone());
        block.clear(cols.len(), depth);
        for (chunk, span) in policy.token_spans(tokens, tiles.tokens).into_iter().enumerate() {
            let q = panel(policy, &inputs.q, span.clone(), &mut q_buffer);
            tile.resize(span.len() * cols.len(), 0.0);
            raw(inputs, (q, k), span.clone(), cols.clone(), &mut tile);
            let labels = &inputs.labels[span.clone()];
            let (at, label_g) = (upstream.of(span.clone()), &mut label_g[span.clone()]);
            dlogits.tile(Some(&finish), &mut tile, cols.clone(), labels, at, label_g);
            let dq = &mut dq[span.start * depth..span.end * depth];
            let (to_dq, to_dk) = ((&mut *dq, nth > 0), (&mut block.dk[..], chunk > 0));
            let shape = (span.len(), cols.len());
            Panels { q, k, depth }.accumulate(policy, &tile, to_dq, to_dk, shape);
            let dbias = (&mut block.dbias[..], chunk > 0);
            joined(policy.between()[1], dbias, |sums, adds| add_columns(sums, adds, &tile));
            progress.advance(3 * (span.len() * cols.len() * depth) as u64);
        }
        block.finish(&LabelPath { policy, inputs, g_label: &label_g }, &hits, cols, on_dk);
    }
    let label_path = LabelPath { policy, inputs, g_label: &label_g };
    for rows in spans(inputs.k.rows - inputs.valid_vocab, tiles.vocab) {
        block.clear(rows.len(), depth);
        let first = inputs.valid_vocab;
        block.finish(&label_path, &hits, first + rows.start..first + rows.end, on_dk);
    }
    finish_dq(&label_path, dq)
}

fn finish_dq(label_path: &LabelPath, mut dq: Vec<f32>) -> DqParts {
    if label_path.policy.path != Path::Fused {
        round_all(label_path.policy.output, &mut dq);
        return DqParts { dq_lse: Vec::new(), dq_label: Vec::new(), dq: widened(&dq) };
    }
    let (mut dq_lse, mut dq_label) = (vec![0.0; dq.len()], vec![0.0; dq.len()]);
    label_path.finish_dq(&mut dq, 0, Some((&mut dq_lse, &mut dq_label)));
    let (dq_lse, dq_label) = (widened(&dq_lse), widened(&dq_label));
    DqParts { dq_lse, dq_label, dq: widened(&dq) }
}

/// See `dispatch::plane`.
pub(super) fn plane(
    policy: &Policy,
    inputs: &HeadInputs,
    upstream: Upstream<f32>,
    tiles: Tiles,
    progress: &dyn Progress,
    on_tile: &mut dyn FnMut(PlaneTile),
) {
    let dlogits = Dlogits { whole: true, ..Dlogits::new(policy, inputs) };
    let mut label_g = vec![0.0; tiles.tokens.min(inputs.q.rows)];
    let (mut q_buffer, mut k_buffer, mut tile) = (Vec::new(), Vec::new(), Vec::new());
    let mut out = PlaneBuffers::default();
    for span in spans(inputs.q.rows, tiles.tokens) {
        let q = panel(policy, &inputs.q, span.clone(), &mut q_buffer);
        for cols in spans(inputs.valid_vocab, tiles.vocab) {
            let k = panel(policy, &inputs.k, cols.clone(), &mut k_buffer);
            let finish = Finish::new(policy, inputs, cols.clone());
            tile.resize(span.len() * cols.len(), 0.0);
            raw(inputs, (q, k), span.clone(), cols.clone(), &mut tile);
            tile.chunks_mut(cols.len()).for_each(|row| finish.row(row));
            widen(&tile, &mut out.logits);
            let (labels, label_g) = (&inputs.labels[span.clone()], &mut label_g[..span.len()]);
            dlogits.tile(None, &mut tile, cols.clone(), labels, upstream.of(span.clone()), label_g);
            widen(&tile, &mut out.dlogits);
            progress.advance((span.len() * cols.len() * inputs.q.cols) as u64);
            out.emit(span.clone(), cols, on_tile);
        }
        let mask = inputs.mask.map_or(f32::NEG_INFINITY, |mask| policy.logits.round(mask as f32));
        out.emit_masked(inputs, span, tiles, mask.into(), on_tile);
    }
}

/// What `PlaneTile` lends out.
#[derive(Default)]
pub(in crate::kernels) struct PlaneBuffers {
    pub(in crate::kernels) logits: Vec<f64>,
    pub(in crate::kernels) dlogits: Vec<f64>,
}

impl PlaneBuffers {
    pub(in crate::kernels) fn emit(
        &self,
        tokens: Range<usize>,
        cols: Range<usize>,
        on_tile: &mut dyn FnMut(PlaneTile),
    ) {
        let PlaneBuffers { logits, dlogits } = self;
        on_tile(PlaneTile { tokens, cols, logits, dlogits });
    }

    /// The tiles of one span of tokens beyond the valid vocabulary.
    pub(in crate::kernels) fn emit_masked(
        &mut self,
        inputs: &HeadInputs,
        span: Range<usize>,
        tiles: Tiles,
        mask: f64,
        on_tile: &mut dyn FnMut(PlaneTile),
    ) {
        let first = inputs.valid_vocab;
        for cols in spans(inputs.k.rows - first, tiles.vocab) {
            for (buffer, value) in [(&mut self.logits, mask), (&mut self.dlogits, 0.0)] {
                buffer.clear();
                buffer.resize(span.len() * cols.len(), value);
            }
            self.emit(span.clone(), first + cols.start..first + cols.end, on_tile);
        }
    }
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

fn widen(values: &[f32], wide: &mut Vec<f64>) {
    wide.clear();
    wide.extend(values.iter().map(|&value| f64::from(value)));
}

/// What `DkParts` lends out: f32 as computed, and f64 as handed out.
#[derive(Default)]
struct DkBuffers {
    lse: Vec<f32>,
    label: Vec<f32>,
    dk: Vec<f32>,
    dbias: Vec<f32>,
    wide: [Vec<f64>; 4],
}

impl DkBuffers {
    fn clear(&mut self, rows: usize, depth: usize) {
        for (buffer, length) in [(&mut self.dk, rows * depth), (&mut self.dbias, rows)] {
            buffer.clear();
            buffer.resize(length, 0.0);
        }
    }

    fn finish(
        &mut self,
        label_path: &LabelPath,
        hits: &Hits,
        rows: Range<usize>,
        on_dk: &mut dyn FnMut(DkParts),
    ) {
        let DkBuffers { lse, label, dk, dbias, wide } = self;
        if label_path.policy.path == Path::Fused {
            lse.resize(dk.len(), 0.0);
            label.resize(dk.len(), 0.0);
            label_path.finish_dk(hits, rows.clone(), dk, Some((lse, label)));
            label_path.finish_dbias(hits, rows.clone(), dbias);
        } else {
            round_all(label_path.policy.output, dk);
        }
        round_all(label_path.policy.output, dbias);
        for (wide, narrow) in wide.iter_mut().zip([lse, label, dk, dbias]) {
            widen(narrow, wide);
        }
        let [dk_lse, dk_label, dk, dbias] = &*wide;
        on_dk(DkParts { rows, dk_lse, dk_label, dk, dbias });
    }
}
