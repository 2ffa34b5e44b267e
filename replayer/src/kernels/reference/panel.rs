//! Rows of a dumped matrix as f64, for the reference alone.
//!
//! The same job as `Matrix::panel_f64`, written again on purpose: policies read
//! through that one, and the oracle must not share its faults.

use crate::kernels::matrix::{Matrix, Values};
use half::{bf16, f16};
use std::ops::Range;

/// Fills `panel` with rows of a matrix, row-major, exactly.
pub(super) fn load(matrix: &Matrix, rows: Range<usize>, panel: &mut Vec<f64>) {
    panel.clear();
    extend(matrix, rows.start * matrix.cols..rows.end * matrix.cols, panel);
}

fn extend(matrix: &Matrix, range: Range<usize>, panel: &mut Vec<f64>) {
    match matrix.values {
        Values::Bf16(bits) => {
            panel.extend(bits[range].iter().map(|&bits| bf16::from_bits(bits).to_f64()));
        }
        Values::F16(bits) => {
            panel.extend(bits[range].iter().map(|&bits| f16::from_bits(bits).to_f64()));
        }
        Values::F32(values) => panel.extend(values[range].iter().map(|&value| f64::from(value))),
        Values::F64(values) => panel.extend_from_slice(&values[range]),
    }
}

/// Fills `tile` `[rows, cols]` with a part of a matrix, row-major, exactly.
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
    squared.extend(values.iter().map(|value| value * value));
}
