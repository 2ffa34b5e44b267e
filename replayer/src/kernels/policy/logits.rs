//! From raw products to logits, and the way back: bias and transform in f32, each
//! rounded as an eager job rounds it.

use super::Policy;
use super::exp::{bounded, bounded_slope};
use super::gemm::{Operand, multiply};
use crate::kernels::matrix::{HeadInputs, Matrix, Values};
use crate::kernels::transform::Transform;
use rayon::prelude::*;
use std::ops::Range;

/// What becomes of the raw logits of some columns.
pub(super) struct Finish<'a> {
    policy: &'a Policy,
    /// Of these columns; empty without one.
    bias: Vec<f32>,
    slope: Slope,
}

impl<'a> Finish<'a> {
    pub(super) fn new(policy: &'a Policy, inputs: &HeadInputs, cols: Range<usize>) -> Self {
        let bias = inputs.bias.map_or(&[][..], |bias| &bias[cols]);
        let bias = bias.iter().map(|&bias| bias as f32).collect();
        Finish { policy, bias, slope: Slope::new(inputs.transform) }
    }

    /// A row of raw logits becomes logits, rounded when the policy says.
    pub(super) fn row(&self, row: &mut [f32]) {
        let Finish { policy, bias, slope } = self;
        let [leaving, between, end] = policy.logit_steps();
        leaving.round_slice(row);
        if !bias.is_empty() {
            row.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
            between.round_slice(row);
        }
        if slope.scale != 1.0 {
            row.iter_mut().for_each(|logit| *logit *= slope.scale);
            between.round_slice(row);
        }
        if let Some(cap) = slope.cap {
            bounded(row, cap);
            between.round_slice(row);
        }
        end.round_slice(row);
    }
}

/// The transform in f32, and its derivative at a logit.
#[derive(Clone, Copy)]
pub(super) struct Slope {
    pub(super) scale: f32,
    cap: Option<f32>,
}

impl Slope {
    pub(super) fn new(transform: Transform) -> Self {
        let (scale, cap) = transform.in_f32();
        Slope { scale, cap }
    }

    /// Whether the derivative is 1 everywhere.
    pub(super) fn is_one(&self) -> bool {
        self.scale == 1.0 && self.cap.is_none()
    }

    /// `scale (1 - (logit / cap)²)`, the derivative by the raw logit.
    pub(super) fn at(&self, logit: f32) -> f32 {
        let mut element = [logit];
        self.row(&mut element);
        element[0]
    }

    /// Replaces each logit of a row by the derivative there.
    pub(super) fn row(&self, row: &mut [f32]) {
        match self.cap {
            Some(cap) => bounded_slope(row, cap, self.scale),
            None => row.fill(self.scale),
        }
    }
}

/// Raw logits `[tokens, cols]` of a tile: `q k^T`, or those that were given.
pub(super) fn raw(
    inputs: &HeadInputs,
    (q, k): (&[f32], &[f32]),
    span: Range<usize>,
    cols: Range<usize>,
    tile: &mut [f32],
) {
    let (depth, width) = (inputs.q.cols, cols.len());
    let Some(given) = &inputs.given else {
        let keys = Operand::rows(k, depth).transposed();
        return multiply(tile, width, false, Operand::rows(q, depth), keys, depth);
    };
    tile.par_chunks_mut(width).zip(span).for_each(|(row, token)| {
        columns(given, token, cols.clone()).panel_f32(0..1, row);
    });
}

/// Some columns of a row, as a matrix of one row.
pub(in crate::kernels) fn columns<'a>(
    matrix: &Matrix<'a>,
    row: usize,
    cols: Range<usize>,
) -> Matrix<'a> {
    let range = row * matrix.cols + cols.start..row * matrix.cols + cols.end;
    let values = match matrix.values {
        Values::Bf16(bits) => Values::Bf16(&bits[range]),
        Values::F16(bits) => Values::F16(&bits[range]),
        Values::F32(values) => Values::F32(&values[range]),
        Values::F64(values) => Values::F64(&values[range]),
    };
    Matrix { rows: 1, cols: cols.len(), values }
}
