//! f64 matrix products for the reference: the one place here that is unsafe.
//!
//! Rows of the result are split into fixed blocks, each computed by one thread, so
//! the bits do not depend on how many threads there are.

use rayon::prelude::*;

/// Rows of the result that one thread computes at a time. Fixed, never derived from
/// the thread count.
const BLOCK_ROWS: usize = 128;

/// A matrix read in place, by strides.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    values: &'a [f64],
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Operand<'a> {
    /// Row-major with `cols` columns.
    pub(super) fn rows(values: &'a [f64], cols: usize) -> Self {
        Operand { values, row_stride: cols, col_stride: 1 }
    }

    /// The same elements read as the transposed matrix.
    pub(super) fn transposed(self) -> Self {
        Operand { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Panics unless a `rows x cols` matrix lies inside the values.
    fn check(&self, rows: usize, cols: usize) {
        if rows > 0 && cols > 0 {
            let last = (rows - 1) * self.row_stride + (cols - 1) * self.col_stride;
            assert!(last < self.values.len(), "the operand holds its rows and columns");
        }
    }
}

/// `target [rows, cols] (+)= lhs [rows, depth] rhs [depth, cols]`, target row-major.
///
/// Each element is summed over `depth` in the order of the gemm crate.
pub(super) fn multiply(
    target: &mut [f64],
    cols: usize,
    add: bool,
    lhs: Operand,
    rhs: Operand,
    depth: usize,
) {
    if target.is_empty() {
        return;
    }
    assert_eq!(target.len() % cols, 0, "the target is whole rows");
    if depth == 0 {
        // An empty sum; gemm is not asked to read operands that hold nothing.
        return if !add {
            target.fill(0.0)
        };
    }
    lhs.check(target.len() / cols, depth);
    rhs.check(depth, cols);
    target.par_chunks_mut(BLOCK_ROWS * cols).enumerate().for_each(|(block, target)| {
        let first = (block * BLOCK_ROWS * lhs.row_stride).min(lhs.values.len());
        let lhs = Operand { values: &lhs.values[first..], ..lhs };
        if target.len() > cols {
            return multiply_block(target, cols, add, lhs, rhs, depth);
        }
        // gemm sums a lone row in another order; computed as one of two equal rows,
        // its bits are those it has in any larger block.
        let mut pair = [&*target, &*target].concat();
        let lhs = Operand { row_stride: 0, ..lhs };
        multiply_block(&mut pair, cols, add, lhs, rhs, depth);
        target.copy_from_slice(&pair[..cols]);
    });
}

fn multiply_block(
    target: &mut [f64],
    cols: usize,
    add: bool,
    lhs: Operand,
    rhs: Operand,
    depth: usize,
) {
    let rows = target.len() / cols;
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    // SAFETY: target holds rows * cols elements, row-major, and is exclusively
    // borrowed; both operands were just checked to hold every element addressed.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            depth,
            target.as_mut_ptr(),
            1,
            cols as isize,
            add,
            lhs.values.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.values.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
