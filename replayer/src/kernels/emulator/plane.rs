//! Tiles of logits and dlogits, and the pass that hands out all of them.

use super::rounded::Rounded;
use super::sum::{Running, operation};
use crate::kernels::formula::{log_probability, probability};
use crate::kernels::matrix::{HeadInputs, Matrix, TokenCotangents};
use crate::kernels::number::Number;
use crate::kernels::policy::internal::{PlaneBuffers, Upstream, columns};
use crate::kernels::policy::{Path, PlaneTile, Policy};
use crate::kernels::round::Precision;
use crate::kernels::tiles::{Progress, Tiles, spans};
use crate::kernels::transform::Transform;
use rayon::prelude::*;
use std::ops::Range;

/// Columns whose sums run side by side: three such rows of f64 stay in a first-level
/// cache.
const SIDE_BY_SIDE: usize = 512;

/// The policy's arithmetic of the head, element by element.
pub(super) struct Elements<'a> {
    pub(super) policy: &'a Policy,
    pub(super) inputs: &'a HeadInputs<'a>,
    /// The precision of every operation outside the GEMMs: f64 where lse is summed in f64, else
    /// f32.
    pub(super) register: Precision,
    bias: Vec<f64>,
    transform: Transform,
}

impl<'a> Elements<'a> {
    pub(super) fn new(policy: &'a Policy, inputs: &'a HeadInputs<'a>) -> Self {
        let register = match policy.sums.lse.precision {
            Precision::F64 => Precision::F64,
            _ => Precision::F32,
        };
        let bias = inputs.bias.unwrap_or(&[]).iter().map(|&bias| register.round64(bias)).collect();
        let transform = Transform { uncapped: false, ..inputs.transform.rounded_to(register) };
        Elements { policy, inputs, register, bias, transform }
    }

    /// Rounds the exact result of one operation.
    pub(super) fn operation(&self, exact: f64) -> f64 {
        operation(self.register, exact)
    }

    /// Rows of q or k `[rows, D]`, rounded to the policy's input precision.
    pub(super) fn panel(&self, matrix: &Matrix, rows: Range<usize>) -> Vec<f64> {
        let mut panel = vec![0.0; rows.len() * matrix.cols];
        matrix.panel_f64(rows, &mut panel);
        self.register.round_slice64(&mut panel);
        self.policy.input.round_slice64(&mut panel);
        panel
    }

    /// The logit of the columns beyond the valid vocabulary; `None` where it is absent or -inf, so
    /// that these columns add nothing to lse.
    pub(super) fn mask(&self) -> Option<f64> {
        let mask = self.policy.logits.round64(self.operation(self.inputs.mask?));
        Some(mask).filter(|&mask| mask != f64::NEG_INFINITY)
    }

    /// Logits `[tokens, cols]` of a tile: q panel `[tokens, D]` against a transposed k
    /// panel `[D, cols]`, summed over D.
    pub(super) fn logits(
        &self,
        q: &[f64],
        keys: &[f64],
        (span, cols): (Range<usize>, Range<usize>),
        tile: &mut [f64],
    ) {
        let (depth, width) = (self.inputs.q.cols, cols.len());
        let Policy { sums, product, .. } = *self.policy;
        tile.par_chunks_mut(width).enumerate().for_each(|(index, row)| {
            if let Some(given) = &self.inputs.given {
                columns(given, span.start + index, cols.clone()).panel_f64(0..1, row);
                self.register.round_slice64(row);
            } else {
                let q = &q[index * depth..(index + 1) * depth];
                for (block, out) in row.chunks_mut(SIDE_BY_SIDE).enumerate() {
                    let (first, mut scratch) = (block * SIDE_BY_SIDE, vec![0.0; out.len()]);
                    let mut running = Running::new(sums.logits, product, out.len());
                    for (d, &factor) in q.iter().enumerate() {
                        let from = d * width + first;
                        running.add_products(factor, &keys[from..from + out.len()], &mut scratch);
                    }
                    running.finish(out);
                }
            }
            self.finish(row, cols.clone());
        });
    }

    /// A row of raw logits becomes logits, rounded when the policy says.
    fn finish(&self, row: &mut [f64], cols: Range<usize>) {
        let [leaving, between, end] = self.policy.logit_steps();
        leaving.round_slice64(row);
        if !self.bias.is_empty() {
            let bias = &self.bias[cols];
            let biased = row.iter_mut().zip(bias);
            biased.for_each(|(x, bias)| *x = between.round64(self.operation(*x + bias)));
        }
        if !self.transform.is_identity() {
            let rounded = |value: f64| Rounded { value, register: self.register, between };
            row.iter_mut().for_each(|x| *x = self.transform.value(rounded(*x)).value);
        }
        end.round_slice64(row);
    }

    /// Derivative of the transform at a logit.
    pub(super) fn slope(&self, logit: f64) -> f64 {
        let (register, between) = (self.register, self.register);
        self.transform.slope_at(Rounded { value: logit, register, between }).value
    }

    /// Turns a tile of logits `[tokens, cols]` into dlogits in place, the label part
    /// included where `adds_label`. `label_g [tokens]` becomes `g_label` times the slope at the
    /// label, where that lies in `cols`.
    pub(super) fn dlogits(
        &self,
        adds_label: bool,
        tile: &mut [f64],
        (span, cols): (Range<usize>, Range<usize>),
        upstream: Upstream<f64>,
        label_g: &mut [f64],
    ) {
        let register = self.register;
        let rows = (tile.par_chunks_mut(cols.len()), span, label_g).into_par_iter();
        rows.enumerate().for_each(|(index, (row, token, label_g))| {
            let label = self.inputs.label(token).filter(|label| cols.contains(label));
            let label = label.map(|label| label - cols.start);
            let value = |values: &[f64]| self.register.round64(values[index]);
            let (lse, declared) = (value(upstream.lse), upstream.cotangents);
            let cotangents = TokenCotangents {
                lse: value(declared.lse),
                label: value(declared.label),
                smooth: value(declared.smooth),
            };
            if let Some(col) = label {
                *label_g = self.operation(cotangents.label * self.slope(row[col]));
            }
            for (col, x) in row.iter_mut().enumerate() {
                let slope = self.slope(*x);
                let logit = Rounded { value: *x, register, between: self.policy.p };
                let log_p = log_probability(logit, logit.constant(lse));
                let kept = log_p.constant(self.policy.log_p.round64(log_p.value));
                let p = probability(kept, kept.constant(0.0));
                let by_logit = cotangents.entry(p, adds_label && label == Some(col));
                *x = self.policy.dlogits.round64(by_logit.times(slope).value);
            }
        });
    }
}

/// A panel `[rows, D]` as `[D, rows]`.
pub(super) fn transposed(panel: &[f64], depth: usize) -> Vec<f64> {
    let rows = panel.len().checked_div(depth).unwrap_or(0);
    let mut turned = vec![0.0; panel.len()];
    turned.par_chunks_mut(rows.max(1)).enumerate().for_each(|(d, row)| {
        row.iter_mut().enumerate().for_each(|(index, x)| *x = panel[index * depth + d]);
    });
    turned
}

/// See `policy::plane`.
pub(in crate::kernels) fn plane(
    policy: &Policy,
    inputs: &HeadInputs,
    upstream: Upstream<f64>,
    tiles: Tiles,
    progress: &dyn Progress,
    on_tile: &mut dyn FnMut(PlaneTile),
) {
    let elements = Elements::new(policy, inputs);
    let mut out = PlaneBuffers::default();
    for span in spans(inputs.q.rows, tiles.tokens) {
        let q = elements.panel(&inputs.q, span.clone());
        let mut label_g = vec![0.0; span.len()];
        for cols in spans(inputs.valid_vocab, tiles.vocab) {
            let keys = transposed(&elements.panel(&inputs.k, cols.clone()), inputs.k.cols);
            out.logits.clear();
            out.logits.resize(span.len() * cols.len(), 0.0);
            let place = (span.clone(), cols.clone());
            elements.logits(&q, &keys, place.clone(), &mut out.logits);
            out.dlogits.clone_from(&out.logits);
            elements.dlogits(
                true,
                &mut out.dlogits,
                place,
                upstream.of(span.clone()),
                &mut label_g,
            );
            progress.advance((span.len() * cols.len() * inputs.q.cols) as u64);
            out.emit(span.clone(), cols, on_tile);
        }
        let mask = elements.mask().unwrap_or(f64::NEG_INFINITY);
        out.emit_masked(inputs, span, tiles, mask, on_tile);
    }
}

/// Whether the policy adds the label part to dlogits; the fused path adds it to dq and dk.
pub(super) fn adds_label(policy: &Policy) -> bool {
    policy.path != Path::Fused
}
