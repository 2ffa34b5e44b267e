//! Forward and backward pass at full speed, into buffers of the caller.
//!
//! Token chunks are the outer loop, so that the logits of one chunk can be kept from
//! its forward to its backward pass: three GEMMs. Where they do not fit the workspace
//! they are computed again, tile by tile: four GEMMs, and the same bits.

use super::dispatch::{Upstream, check};
use super::label::{Hits, LabelPath};
use super::logits::{Finish, raw};
use super::softmax::{Dlogits, Online, absorb};
use super::tile::{Panels, panel, panel_len, round_all};
use super::{Path, Policy};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::tiles::{Progress, Tiles};
use std::ops::Range;

/// Buffers of a step, kept between steps: touching fresh memory pages takes as long as a softmax
/// pass.
#[derive(Debug)]
pub struct Workspace {
    /// Most bytes that a fused step may use beside its inputs and outputs. The plain path keeps all
    /// logits whatever this limit is.
    pub limit_bytes: usize,
    logits: Vec<f32>,
    q_panel: Vec<f32>,
    k_panel: Vec<f32>,
    online: Vec<Online>,
    label_g: Vec<f32>,
}

impl Default for Workspace {
    fn default() -> Self {
        Workspace::new(64 << 20)
    }
}

impl Workspace {
    /// An empty workspace; buffers grow as steps need them.
    pub fn new(limit_bytes: usize) -> Self {
        Workspace {
            limit_bytes,
            logits: Vec::new(),
            q_panel: Vec::new(),
            k_panel: Vec::new(),
            online: Vec::new(),
            label_g: Vec::new(),
        }
    }

    /// Whether the logits of a whole chunk of tokens fit into the limit beside the panels and the
    /// packing buffers of the GEMMs.
    fn keeps_chunk(&self, policy: &Policy, inputs: &HeadInputs, tiles: Tiles) -> bool {
        let chunk = tiles.tokens.min(inputs.q.rows) * inputs.valid_vocab;
        let panels =
            panel_len(policy, &inputs.q, tiles.tokens) + panel_len(policy, &inputs.k, tiles.vocab);
        let bytes = (chunk + panels) * size_of::<f32>();
        bytes + GEMM_PACKING_BYTES <= self.limit_bytes
    }
}

/// Size of gemm's packing buffers, for all threads of a small machine together.
const GEMM_PACKING_BYTES: usize = 8 << 20;

/// Where a step writes; every element is overwritten.
#[derive(Debug)]
pub struct StepOutputs<'a> {
    /// `[T]`.
    pub lse: &'a mut [f32],
    /// `[T]`.
    pub label_logits: &'a mut [f32],
    /// `[T, D]`.
    pub dq: &'a mut [f32],
    /// `[V, D]`; rows beyond the valid vocabulary become 0.
    pub dk: &'a mut [f32],
}

/// Multiply-adds that a step will report. Logits that are computed a second time are not counted.
pub fn step_work(inputs: &HeadInputs) -> u64 {
    3 * inputs.gemm_work()
}

/// One step on the plain path: logits `[T, V]` in the workspace, dlogits in their
/// place, then one GEMM each for dq (summed over V) and dk (summed over T).
pub fn plain_step(
    policy: &Policy,
    inputs: &HeadInputs,
    cotangents: &Cotangents<f32>,
    workspace: &mut Workspace,
    progress: &dyn Progress,
    outputs: StepOutputs,
) {
    assert_eq!(policy.path, Path::Plain, "plain_step runs the plain path");
    assert!(policy.is_fast(), "steps run on f32 GEMMs");
    let whole = Tiles { tokens: inputs.q.rows.max(1), vocab: inputs.valid_vocab.max(1) };
    let step = Step { policy, inputs, cotangents, tiles: whole, keep: true };
    step.run(workspace, progress, outputs);
}

/// One step on the fused path, in at most `workspace.limit_bytes` of scratch where the
/// tiles allow it.
///
/// lse is taken online over vocabulary tiles; dq sums over them in order, dk over the
/// token chunks in order.
pub fn fused_step(
    policy: &Policy,
    inputs: &HeadInputs,
    cotangents: &Cotangents<f32>,
    tiles: Tiles,
    workspace: &mut Workspace,
    progress: &dyn Progress,
    outputs: StepOutputs,
) {
    assert_eq!(policy.path, Path::Fused, "fused_step runs the fused path");
    assert!(policy.is_fast(), "steps run on f32 GEMMs");
    let keep = workspace.keeps_chunk(policy, inputs, tiles);
    Step { policy, inputs, cotangents, tiles, keep }.run(workspace, progress, outputs);
}

struct Step<'a> {
    policy: &'a Policy,
    inputs: &'a HeadInputs<'a>,
    cotangents: &'a Cotangents<'a, f32>,
    tiles: Tiles,
    keep: bool,
}

impl Step<'_> {
    fn run(&self, workspace: &mut Workspace, progress: &dyn Progress, outputs: StepOutputs) {
        check(self.inputs);
        let StepOutputs { lse, label_logits, dq, dk } = outputs;
        let (tokens, depth) = (self.inputs.q.rows, self.inputs.q.cols);
        let Cotangents { lse: g_lse, label, smooth } = *self.cotangents;
        let per_token = [lse.len(), label_logits.len(), g_lse.len(), label.len(), smooth.len()];
        assert_eq!(per_token, [tokens; 5], "one value a token");
        assert_eq!(dq.len(), tokens * depth, "dq has the shape of q");
        assert_eq!(dk.len(), self.inputs.k.rows * depth, "dk has the shape of k");
        workspace.label_g.clear();
        workspace.label_g.extend_from_slice(label);
        let chunks = self.policy.token_spans(tokens, self.tiles.tokens);
        for (nth, span) in chunks.into_iter().enumerate() {
            self.forward_chunk(workspace, span.clone());
            for (token, online) in span.clone().zip(&workspace.online) {
                lse[token] = online.lse(self.policy);
                label_logits[token] = online.label_logit();
            }
            let dq = &mut dq[span.start * depth..span.end * depth];
            self.backward_chunk(workspace, (nth, span.clone()), lse, dq, dk);
            progress.advance(3 * (span.len() * self.inputs.valid_vocab * depth) as u64);
        }
        self.finish(&workspace.label_g, dq, dk);
    }

    /// Where the logits of a tile lie in the workspace: one tile after the other when the logits of
    /// a chunk are kept, else all in the same place.
    fn place(&self, span: &Range<usize>, cols: &Range<usize>) -> Range<usize> {
        let start = if self.keep { span.len() * cols.start } else { 0 };
        start..start + span.len() * cols.len()
    }

    fn forward_chunk(&self, workspace: &mut Workspace, span: Range<usize>) {
        let (policy, inputs) = (self.policy, self.inputs);
        let Workspace { logits, q_panel, k_panel, online, .. } = workspace;
        online.clear();
        online.resize(span.len(), Online::EMPTY);
        let q = panel(policy, &inputs.q, span.clone(), q_panel);
        for cols in policy.vocab_spans(inputs.valid_vocab, self.tiles.vocab) {
            let k = panel(policy, &inputs.k, cols.clone(), k_panel);
            let place = self.place(&span, &cols);
            if logits.len() < place.end {
                let chunk = span.len() * inputs.valid_vocab;
                logits.resize(if self.keep { chunk } else { place.end }, 0.0);
            }
            let tile = &mut logits[place];
            raw(inputs, (q, k), span.clone(), cols.clone(), tile);
            let finish = Finish::new(policy, inputs, cols.clone());
            absorb(&finish, tile, cols, &inputs.labels[span.clone()], online, false);
        }
        online.iter_mut().for_each(|online| online.absorb_mask(policy, inputs));
    }

    fn backward_chunk(
        &self,
        workspace: &mut Workspace,
        (chunk, span): (usize, Range<usize>),
        lse: &[f32],
        dq: &mut [f32],
        dk: &mut [f32],
    ) {
        let (policy, inputs, depth) = (self.policy, self.inputs, self.inputs.q.cols);
        let Workspace { logits, q_panel, k_panel, label_g, .. } = workspace;
        let upstream = Upstream { lse, cotangents: *self.cotangents }.of(span.clone());
        let (labels, label_g) = (&inputs.labels[span.clone()], &mut label_g[span.clone()]);
        let dlogits = Dlogits::new(policy, inputs);
        let q = panel(policy, &inputs.q, span.clone(), q_panel);
        let tiles = policy.vocab_spans(inputs.valid_vocab, self.tiles.vocab);
        for (nth, cols) in tiles.into_iter().enumerate() {
            let k = panel(policy, &inputs.k, cols.clone(), k_panel);
            let tile = &mut logits[self.place(&span, &cols)];
            if !self.keep {
                raw(inputs, (q, k), span.clone(), cols.clone(), tile);
            }
            let finish = (!self.keep).then(|| Finish::new(policy, inputs, cols.clone()));
            dlogits.tile(finish.as_ref(), tile, cols.clone(), labels, upstream, label_g);
            let dk = &mut dk[cols.start * depth..cols.end * depth];
            let (to_dq, to_dk) = ((&mut *dq, nth > 0), (&mut *dk, chunk > 0));
            let shape = (span.len(), cols.len());
            Panels { q, k, depth }.accumulate(policy, tile, to_dq, to_dk, shape);
        }
    }

    fn finish(&self, label_g: &[f32], dq: &mut [f32], dk: &mut [f32]) {
        let (policy, inputs) = (self.policy, self.inputs);
        let valid = inputs.valid_vocab;
        if valid == 0 {
            dq.fill(0.0);
        }
        let written = if inputs.q.rows == 0 { 0 } else { valid };
        dk[written * inputs.q.cols..].fill(0.0);
        if policy.path == Path::Plain {
            round_all(policy.output, dq);
            round_all(policy.output, dk);
            return;
        }
        let label_path = LabelPath { policy, inputs, g_label: label_g };
        label_path.finish_dq(dq, 0, None);
        label_path.finish_dk(&Hits::new(inputs.labels), 0..inputs.k.rows, dk, None);
    }
}
