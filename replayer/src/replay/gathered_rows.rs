//! Rows of a matrix picked out in order, in the dtype they have.

use backtape::dtype::Dtype;

use crate::kernels::matrix::{Matrix, Values};

/// Some rows of a matrix, copied together.
pub(crate) struct Gathered {
    rows: usize,
    cols: usize,
    values: Owned,
}

enum Owned {
    Bf16(Vec<u16>),
    F16(Vec<u16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Gathered {
    /// Picks rows out of a matrix.
    pub(crate) fn new(matrix: &Matrix<'_>, rows: &[usize]) -> Gathered {
        let cols = matrix.cols;
        let values = match matrix.values {
            Values::Bf16(bits) => Owned::Bf16(pick(bits, cols, rows)),
            Values::F16(bits) => Owned::F16(pick(bits, cols, rows)),
            Values::F32(values) => Owned::F32(pick(values, cols, rows)),
            Values::F64(values) => Owned::F64(pick(values, cols, rows)),
        };
        Gathered { rows: rows.len(), cols, values }
    }

    /// Rows as they lie in a dump; `None` for what are no floats of 16 bits or more.
    pub(crate) fn of_bytes(dtype: Dtype, cols: usize, bytes: &[u8]) -> Option<Gathered> {
        let values = match dtype {
            Dtype::Bf16 => Owned::Bf16(numbers(bytes, u16::from_le_bytes)),
            Dtype::F16 => Owned::F16(numbers(bytes, u16::from_le_bytes)),
            Dtype::F32 => Owned::F32(numbers(bytes, f32::from_le_bytes)),
            Dtype::F64 => Owned::F64(numbers(bytes, f64::from_le_bytes)),
            _ => return None,
        };
        let rows = (bytes.len() / dtype.width()).checked_div(cols).unwrap_or(0);
        Some(Gathered { rows, cols, values })
    }

    /// The first columns of every row.
    pub(super) fn cut(matrix: &Matrix<'_>, cols: usize) -> Gathered {
        let (rows, width) = (matrix.rows, matrix.cols.max(1));
        let values = match matrix.values {
            Values::Bf16(bits) => Owned::Bf16(first(bits, width, cols)),
            Values::F16(bits) => Owned::F16(first(bits, width, cols)),
            Values::F32(values) => Owned::F32(first(values, width, cols)),
            Values::F64(values) => Owned::F64(first(values, width, cols)),
        };
        Gathered { rows, cols, values }
    }

    /// The picked rows as a matrix.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        let values = match &self.values {
            Owned::Bf16(bits) => Values::Bf16(bits),
            Owned::F16(bits) => Values::F16(bits),
            Owned::F32(values) => Values::F32(values),
            Owned::F64(values) => Values::F64(values),
        };
        Matrix { rows: self.rows, cols: self.cols, values }
    }
}

fn numbers<T, const N: usize>(bytes: &[u8], number: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&bytes| number(bytes)).collect()
}

fn pick<T: Copy>(values: &[T], cols: usize, rows: &[usize]) -> Vec<T> {
    rows.iter().flat_map(|&row| &values[row * cols..(row + 1) * cols]).copied().collect()
}

fn first<T: Copy>(values: &[T], width: usize, cols: usize) -> Vec<T> {
    values.chunks(width).flat_map(|row| &row[..cols]).copied().collect()
}
