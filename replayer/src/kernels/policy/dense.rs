//! The order of work of a fast policy's backward pass and of its plane. The tiles are computed by
//! this process (`emulate`) or by a GPU; the label part, one row for each token, is always computed
//! by this process.

use super::dispatch::{DkParts, DqParts, PlaneTile, PolicyForward};
use super::label::{Hits, LabelPath};
use super::softmax::Online;
use super::tile::round_all;
use super::{Path, Policy};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::tiles::{Tiles, spans};
use std::ops::Range;

/// Computes the dense part of a backward pass: dlogits of a tile, and its two GEMMs.
pub(crate) trait DenseTiles {
    /// Why the tiles cannot be computed.
    type Error;

    /// Computes vocabulary tile number `nth` of the walk for all tokens: fills `sums`, and adds to
    /// dq.
    fn block(
        &mut self,
        nth: usize,
        cols: Range<usize>,
        sums: BlockSums<'_>,
    ) -> Result<(), Self::Error>;

    /// dq `[T, D]`, summed over all tiles.
    fn dq(self) -> Result<Vec<f32>, Self::Error>;
}

/// Where the sums of a block of rows of k are written. dk and dbias are all 0 before.
pub(crate) struct BlockSums<'a> {
    /// `[rows, D]`.
    pub(crate) dk: &'a mut [f32],
    /// `[rows]`.
    pub(crate) dbias: &'a mut [f32],
    /// `[T]`: `g_label`, to be multiplied by the transform's derivative at the label where the
    /// label lies in these rows and the derivative is not 1.
    pub(crate) label_g: &'a mut [f32],
}

/// See `dispatch::backward`. `g_label` `[T]` is the labels' cotangent.
pub(crate) fn backward<D: DenseTiles>(
    policy: &Policy,
    inputs: &HeadInputs,
    g_label: &[f32],
    tiles: Tiles,
    mut dense: D,
    on_dk: &mut dyn FnMut(DkParts),
) -> Result<DqParts, D::Error> {
    let depth = inputs.q.cols;
    let hits = Hits::new(inputs.labels);
    let mut label_g = g_label.to_vec();
    let mut block = DkBuffers::default();
    for (nth, cols) in policy.vocab_spans(inputs.valid_vocab, tiles.vocab).into_iter().enumerate() {
        block.clear(cols.len(), depth);
        dense.block(nth, cols.clone(), block.sums(&mut label_g))?;
        block.finish(&LabelPath { policy, inputs, g_label: &label_g }, &hits, cols, on_dk);
    }
    let label_path = LabelPath { policy, inputs, g_label: &label_g };
    for rows in spans(inputs.k.rows - inputs.valid_vocab, tiles.vocab) {
        block.clear(rows.len(), depth);
        let first = inputs.valid_vocab;
        block.finish(&label_path, &hits, first + rows.start..first + rows.end, on_dk);
    }
    Ok(finish_dq(&label_path, dense.dq()?))
}

/// See `dispatch::forward`. All valid columns were added to `online` before.
pub(crate) fn forward(
    policy: &Policy,
    inputs: &HeadInputs,
    mut online: Vec<Online>,
) -> PolicyForward {
    online.iter_mut().for_each(|online| online.absorb_mask(policy, inputs));
    let all = |value: fn(&Online) -> f32| online.iter().map(|row| value(row).into()).collect();
    PolicyForward {
        lse: online.iter().map(|row| row.lse(policy).into()).collect(),
        label_logits: all(Online::label_logit),
        logit_sum: all(Online::logit_sum),
    }
}

/// Computes the logits and the dlogits of some tokens and columns.
pub(crate) type FillTile<'a, E> =
    dyn FnMut(Range<usize>, Range<usize>, &mut PlaneBuffers) -> Result<(), E> + 'a;

/// See `dispatch::plane`. `fill` computes the logits and the dlogits of a tile, label part
/// included.
pub(crate) fn plane<E>(
    policy: &Policy,
    inputs: &HeadInputs,
    tiles: Tiles,
    fill: &mut FillTile<'_, E>,
    on_tile: &mut dyn FnMut(PlaneTile),
) -> Result<(), E> {
    let mut out = PlaneBuffers::default();
    for span in spans(inputs.q.rows, tiles.tokens) {
        for cols in spans(inputs.valid_vocab, tiles.vocab) {
            fill(span.clone(), cols.clone(), &mut out)?;
            out.emit(span.clone(), cols, on_tile);
        }
        let mask = inputs.mask.map_or(f32::NEG_INFINITY, |mask| policy.logits.round(mask as f32));
        out.emit_masked(inputs, span, tiles, mask.into(), on_tile);
    }
    Ok(())
}

/// The buffers that a `PlaneTile` borrows.
#[derive(Default)]
pub(crate) struct PlaneBuffers {
    pub(in crate::kernels) logits: Vec<f64>,
    pub(in crate::kernels) dlogits: Vec<f64>,
}

impl PlaneBuffers {
    /// Copies the tile's logits, widened to f64.
    pub(crate) fn set_logits(&mut self, values: &[f32]) {
        widen(values, &mut self.logits);
    }

    /// Copies the tile's dlogits, widened to f64.
    pub(crate) fn set_dlogits(&mut self, values: &[f32]) {
        widen(values, &mut self.dlogits);
    }

    pub(in crate::kernels) fn emit(
        &self,
        tokens: Range<usize>,
        cols: Range<usize>,
        on_tile: &mut dyn FnMut(PlaneTile),
    ) {
        let PlaneBuffers { logits, dlogits } = self;
        on_tile(PlaneTile { tokens, cols, logits, dlogits });
    }

    /// Passes on the tiles of some tokens and the columns beyond the valid vocabulary.
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

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

fn widen(values: &[f32], wide: &mut Vec<f64>) {
    wide.clear();
    wide.extend(values.iter().map(|&value| f64::from(value)));
}

/// The buffers that a `DkParts` borrows: in f32 as computed, and in f64 as passed on.
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

    fn sums<'a>(&'a mut self, label_g: &'a mut [f32]) -> BlockSums<'a> {
        BlockSums { dk: &mut self.dk, dbias: &mut self.dbias, label_g }
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
