//! Fast policies on the CPU, in memory bounded by the tiles: the forward pass alone, the backward
//! pass at a given lse with the softmax and label parts of dq and dk kept apart, and the plane of
//! logits.
//!
//! Vocabulary tiles are the outer loop of the backward pass, so that it needs memory for one block
//! of dk only.

use super::Policy;
use super::dense::{self, BlockSums, DenseTiles};
use super::dispatch::{DkParts, DqParts, PlaneTile, PolicyForward, Upstream};
use super::logits::{Finish, raw};
use super::softmax::{Dlogits, Online, absorb};
use super::tile::{Panels, add_columns, joined, panel, round_all};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::round::Precision;
use crate::kernels::tiles::{Progress, Tiles, spans};
use std::convert::Infallible;
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
    dense::forward(policy, inputs, online)
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
    let here = Here {
        policy,
        inputs,
        upstream,
        tokens: tiles.tokens,
        progress,
        dlogits: Dlogits::new(policy, inputs),
        dq: vec![0.0; inputs.q.rows * inputs.q.cols],
        buffers: Default::default(),
    };
    let Ok(dq) = dense::backward(policy, inputs, upstream.cotangents.label, tiles, here, on_dk);
    dq
}

/// The dense part of a backward pass in this process.
struct Here<'a> {
    policy: &'a Policy,
    inputs: &'a HeadInputs<'a>,
    upstream: Upstream<'a, f32>,
    /// Token tile size.
    tokens: usize,
    progress: &'a dyn Progress,
    dlogits: Dlogits<'a>,
    dq: Vec<f32>,
    /// Buffers for panels of q and of k, and for a tile.
    buffers: [Vec<f32>; 3],
}

impl DenseTiles for Here<'_> {
    type Error = Infallible;

    fn block(
        &mut self,
        nth: usize,
        cols: Range<usize>,
        sums: BlockSums<'_>,
    ) -> Result<(), Infallible> {
        let Here { policy, inputs, upstream, dlogits, dq, .. } = self;
        let [q_buffer, k_buffer, tile] = &mut self.buffers;
        let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
        let k = panel(policy, &inputs.k, cols.clone(), k_buffer);
        let finish = Finish::new(policy, inputs, cols.clone());
        let mut shards = Shards::default();
        let shard_starts = policy.cut.shard_starts(tokens);
        for (chunk, span) in policy.token_spans(tokens, self.tokens).into_iter().enumerate() {
            let starts = shard_starts.contains(&span.start);
            if starts {
                shards.take(policy, sums.dk, sums.dbias);
            }
            let adds = chunk > 0 && !starts;
            let q = panel(policy, &inputs.q, span.clone(), q_buffer);
            tile.resize(span.len() * cols.len(), 0.0);
            raw(inputs, (q, k), span.clone(), cols.clone(), tile);
            let labels = &inputs.labels[span.clone()];
            let (upstream_of_span, label_g) =
                (upstream.of(span.clone()), &mut sums.label_g[span.clone()]);
            dlogits.tile(Some(&finish), tile, cols.clone(), labels, upstream_of_span, label_g);
            let dq = &mut dq[span.start * depth..span.end * depth];
            let (to_dq, to_dk) = ((&mut *dq, nth > 0), (&mut *sums.dk, adds));
            let shape = (span.len(), cols.len());
            Panels { q, k, depth }.accumulate(policy, tile, to_dq, to_dk, shape);
            let dbias = (&mut *sums.dbias, adds);
            joined(policy.between()[1], dbias, |sums, adds| add_columns(sums, adds, tile));
            self.progress.advance(3 * (span.len() * cols.len() * depth) as u64);
        }
        shards.join(policy, sums.dk, sums.dbias);
        Ok(())
    }

    fn dq(self) -> Result<Vec<f32>, Infallible> {
        Ok(self.dq)
    }
}

/// Sums of dk and dbias over the shards that are complete; `None` during the first one.
#[derive(Default)]
struct Shards(Option<[Vec<f32>; 2]>);

impl Shards {
    /// Adds the sums of a complete shard, and rounds the result.
    fn take(&mut self, policy: &Policy, dk: &[f32], dbias: &[f32]) {
        let to = policy.between()[1].map_or(Precision::F32, |(_, total)| total);
        let Some(before) = &mut self.0 else {
            self.0 = Some([dk.to_vec(), dbias.to_vec()]);
            return;
        };
        for (sum, sums_of_block) in before.iter_mut().zip([dk, dbias]) {
            sum.iter_mut().zip(sums_of_block).for_each(|(sum, x)| *sum += x);
            round_all(to, sum);
        }
    }

    /// Replaces dk and dbias, the sums of the last shard, by those over all shards.
    fn join(mut self, policy: &Policy, dk: &mut [f32], dbias: &mut [f32]) {
        if self.0.is_some() {
            self.take(policy, dk, dbias);
        }
        if let Some([all, bias]) = self.0 {
            dk.copy_from_slice(&all);
            dbias.copy_from_slice(&bias);
        }
    }
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
    let Ok(()) = dense::plane::<Infallible>(
        policy,
        inputs,
        tiles,
        &mut |span, cols, out| {
            let q = panel(policy, &inputs.q, span.clone(), &mut q_buffer);
            let k = panel(policy, &inputs.k, cols.clone(), &mut k_buffer);
            let finish = Finish::new(policy, inputs, cols.clone());
            tile.resize(span.len() * cols.len(), 0.0);
            raw(inputs, (q, k), span.clone(), cols.clone(), &mut tile);
            tile.chunks_mut(cols.len()).for_each(|row| finish.row(row));
            out.set_logits(&tile);
            let (labels, label_g) = (&inputs.labels[span.clone()], &mut label_g[..span.len()]);
            dlogits.tile(None, &mut tile, cols.clone(), labels, upstream.of(span.clone()), label_g);
            out.set_dlogits(&tile);
            progress.advance((span.len() * cols.len() * inputs.q.cols) as u64);
            Ok(())
        },
        on_tile,
    );
}
