//! Rows of a dumped matrix as f64, for the reference alone.
//!
//! It does what `Matrix::panel_f64` does, written a second time on purpose: policies read through
//! that function, and the reference must not share its mistakes.

use crate::kernels::matrix::{Matrix, Values};
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

/// Fills `panel` with rows of a matrix, row-major; every value is converted exactly.
pub(super) fn load(matrix: &Matrix, rows: Range<usize>, panel: &mut Vec<f64>) {
    panel.clear();
    extend(matrix, rows.start * matrix.cols..rows.end * matrix.cols, panel);
}

/// With this many elements, several threads convert them.
const MANY: usize = 1 << 15;

fn extend(matrix: &Matrix, range: Range<usize>, panel: &mut Vec<f64>) {
    match matrix.values {
        Values::Bf16(bits) => widen(&bits[range], |bits| bf16::from_bits(bits).to_f64(), panel),
        Values::F16(bits) => widen(&bits[range], |bits| f16::from_bits(bits).to_f64(), panel),
        Values::F32(values) => widen(&values[range], f64::from, panel),
        Values::F64(values) => panel.extend_from_slice(&values[range]),
    }
}

fn widen<T: Copy + Sync>(from: &[T], exactly: impl Fn(T) -> f64 + Sync, panel: &mut Vec<f64>) {
    match from.len() < MANY {
        true => panel.extend(from.iter().map(|&x| exactly(x))),
        false => panel.par_extend(from.par_iter().with_min_len(MANY / 4).map(|&x| exactly(x))),
    }
}

/// Fills `tile` `[rows, cols]` with a part of a matrix, row-major; every value is converted
/// exactly.
pub(super) fn load_columns(
    matrix: &Matrix,
    rows: Range<usize>,
    cols: Range<usize>,
    tile: &mut Vec<f64>,
) {
    tile.clear();
    for row in rows {
        let range = row * matrix.cols + cols.start..row * matrix.cols + cols.end;
        extend(matrix, range, tile);
    }
}

/// Element-wise squares.
pub(super) fn squares(values: &[f64], squared: &mut Vec<f64>) {
    squared.clear();
    widen(values, |value| value * value, squared);
}
