//! One tile of the token x vocabulary plane: panels in, dq and dk addends out.
//!
//! Every walk is made of these calls, so the walks differ in order and memory only.

use super::Policy;
use super::gemm::{Operand, multiply};
use crate::kernels::matrix::{Matrix, Values};
use crate::kernels::round::Precision;
use rayon::prelude::*;
use std::ops::Range;

/// Rows that one thread converts at a time.
const PANEL_ROWS: usize = 64;

/// Rows of q or k in f32, rounded to the policy's input precision. Borrowed from the
/// matrix where that changes nothing: f32 inputs of an f32 policy are never copied.
/// (f64 values are rounded to f32 and then to the input precision.)
pub(super) fn panel<'p>(
    policy: &Policy,
    matrix: &Matrix<'p>,
    rows: Range<usize>,
    buffer: &'p mut Vec<f32>,
) -> &'p [f32] {
    if let Some(values) = borrowed(policy, matrix) {
        return &values[matrix.elements(rows)];
    }
    buffer.resize(rows.len() * matrix.cols, 0.0);
    let chunks = buffer.par_chunks_mut((PANEL_ROWS * matrix.cols).max(1));
    chunks.enumerate().for_each(|(index, chunk)| {
        let first = rows.start + index * PANEL_ROWS;
        matrix.panel_f32(first..rows.end.min(first + PANEL_ROWS), chunk);
        policy.input.round_slice(chunk);
    });
    buffer
}

/// Elements of a panel buffer for `rows` rows: none where panels are borrowed.
pub(super) fn panel_len(policy: &Policy, matrix: &Matrix, rows: usize) -> usize {
    if borrowed(policy, matrix).is_some() { 0 } else { rows.min(matrix.rows) * matrix.cols }
}

fn borrowed<'p>(policy: &Policy, matrix: &Matrix<'p>) -> Option<&'p [f32]> {
    match matrix.values {
        Values::F32(values) if policy.input.keeps_f32() => Some(values),
        _ => None,
    }
}

/// q and k panels of one tile, both with `depth` columns.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) depth: usize,
}

impl Panels<'_> {
    /// `dq += dlogits k` and `dk += dlogits^T q`, side by side; a target that is not
    /// `add`ed to is overwritten, so that nobody has to zero it.
    pub(super) fn accumulate(
        &self,
        dlogits: &[f32],
        dq: (&mut [f32], bool),
        dk: (&mut [f32], bool),
        tile: (usize, usize),
    ) {
        let Panels { q, k, depth } = *self;
        let (tokens, width) = tile;
        let by_token = Operand::rows(dlogits, width);
        rayon::join(
            || multiply(dq.0, depth, dq.1, by_token, Operand::rows(k, depth), width),
            || {
                let by_row = by_token.transposed();
                multiply(dk.0, depth, dk.1, by_row, Operand::rows(q, depth), tokens);
            },
        );
    }
}

/// Rounds a large buffer in parallel.
pub(super) fn round_all(precision: Precision, values: &mut [f32]) {
    if !precision.keeps_f32() {
        values.par_chunks_mut(1 << 14).for_each(|chunk| precision.round_slice(chunk));
    }
}

/// Columns that one thread sums at a time.
const COLUMN_CHUNK: usize = 256;

/// Adds the rows of a tile `[tokens, width]` to `sums [width]`, token after token.
pub(super) fn add_columns(sums: &mut [f32], tile: &[f32]) {
    let width = sums.len();
    sums.par_chunks_mut(COLUMN_CHUNK).enumerate().for_each(|(index, sums)| {
        let first = index * COLUMN_CHUNK;
        for row in tile.chunks(width) {
            let addends = &row[first..first + sums.len()];
            sums.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
        }
    });
}
