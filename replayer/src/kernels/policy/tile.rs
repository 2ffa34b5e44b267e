//! One tile of the token x vocabulary plane: panels in, dq and dk addends out.
//!
//! `emulate` and `step` are made of these calls, so they differ in order and memory only.

use super::Policy;
use super::gemm::{Operand, multiply};
use crate::kernels::matrix::{Matrix, Values};
use crate::kernels::round::Precision;
use rayon::prelude::*;
use std::ops::Range;

/// Rows that one thread converts at a time.
const PANEL_ROWS: usize = 64;

/// Rows of q or k in f32, rounded to the policy's input precision. f32 inputs of an f32 policy are
/// borrowed from the matrix, not copied. f64 values are rounded to f32 and then to the input
/// precision.
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
    /// `dq += dlogits k` and `dk += dlogits^T q` in parallel, rounded as the policy declares. A
    /// target whose flag is false is overwritten, so that the caller need not zero it.
    pub(super) fn accumulate(
        &self,
        policy: &Policy,
        dlogits: &[f32],
        dq: (&mut [f32], bool),
        dk: (&mut [f32], bool),
        tile: (usize, usize),
    ) {
        let (mut narrow_q, mut narrow_k) = (Vec::new(), Vec::new());
        let q = narrowed(policy.operand, self.q, &mut narrow_q);
        let k = narrowed(policy.operand, self.k, &mut narrow_k);
        let depth = self.depth;
        let (tokens, width) = tile;
        let by_token = Operand::rows(dlogits, width);
        let [of_dq, of_dk] = policy.between();
        rayon::join(
            || {
                joined(of_dq, dq, |target, add| {
                    multiply(target, depth, add, by_token, Operand::rows(k, depth), width);
                });
            },
            || {
                let by_row = by_token.transposed();
                joined(of_dk, dk, |target, add| {
                    multiply(target, depth, add, by_row, Operand::rows(q, depth), tokens);
                });
            },
        );
    }
}

/// Lets `add` add one tile's part to the sum `target`, or overwrite it unless `adds`. Where parts
/// or sums are rounded, the part is summed from 0 and rounded before it is added.
pub(super) fn joined(
    rounding: Option<(Precision, Precision)>,
    (target, adds): (&mut [f32], bool),
    add: impl Fn(&mut [f32], bool),
) {
    let narrow = |(part, total): &(Precision, Precision)| !part.keeps_f32() || !total.keeps_f32();
    let Some((part, total)) = rounding.filter(narrow) else { return add(target, adds) };
    if adds {
        let mut part_sum = vec![0.0; target.len()];
        add(&mut part_sum, false);
        round_all(part, &mut part_sum);
        target.par_iter_mut().zip(&part_sum).for_each(|(sum, own)| *sum += own);
    } else {
        add(target, false);
        round_all(part, target);
    }
    round_all(total, target);
}

/// A panel rounded to an operand's precision; borrowed where rounding changes nothing.
fn narrowed<'p>(to: Precision, panel: &'p [f32], buffer: &'p mut Vec<f32>) -> &'p [f32] {
    if to.keeps_f32() {
        return panel;
    }
    buffer.extend_from_slice(panel);
    round_all(to, buffer);
    buffer
}

/// Rounds a large buffer in parallel.
pub(super) fn round_all(precision: Precision, values: &mut [f32]) {
    if !precision.keeps_f32() {
        values.par_chunks_mut(1 << 14).for_each(|chunk| precision.round_slice(chunk));
    }
}

/// Columns that one thread sums at a time.
const COLUMN_CHUNK: usize = 256;

/// Adds the rows of a tile `[tokens, width]` to `sums [width]`, token after token; unless `adds`,
/// the sums start from 0.
pub(super) fn add_columns(sums: &mut [f32], adds: bool, tile: &[f32]) {
    let width = sums.len();
    if !adds {
        sums.fill(0.0);
    }
    sums.par_chunks_mut(COLUMN_CHUNK).enumerate().for_each(|(index, sums)| {
        let first = index * COLUMN_CHUNK;
        for row in tile.chunks(width) {
            let addends = &row[first..first + sums.len()];
            sums.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
        }
    });
}
