//! f64 matrix products for the reference: the one place here that is unsafe.
//!
//! The result is cut into blocks that depend on its shape alone, each computed by one
//! thread, so the bits do not depend on how many threads there are.

use rayon::prelude::*;
use std::ops::Range;

/// Most rows and columns of the result that one thread computes at a time: a block packs
/// the columns that it multiplies with, which takes the longer the fewer rows share them.
const BLOCK: (usize, usize) = (256, 1024);
/// Longest sum that gemm is asked for at once: of a longer one it reads the columns more slowly.
const DEPTH: usize = 256;

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

    /// From an element on; empty when the matrix has no depth.
    fn from(self, row: usize, col: usize) -> Self {
        let first = row * self.row_stride + col * self.col_stride;
        Operand { values: &self.values[first.min(self.values.len())..], ..self }
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
    let rows = target.len() / cols;
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    let start = Start(target.as_mut_ptr());
    let across = cols.div_ceil(BLOCK.1);
    (0..rows.div_ceil(BLOCK.0) * across).into_par_iter().for_each(|nth| {
        let part = |nth: usize, size: usize, of: usize| nth * size..((nth + 1) * size).min(of);
        let at = (part(nth / across, BLOCK.0, rows), part(nth % across, BLOCK.1, cols));
        // SAFETY: the blocks are disjoint parts of the target, which is exclusively borrowed.
        unsafe { multiply_block(start, (at, cols), add, lhs, rhs, depth) };
    });
}

/// The start of the result, shared by the threads that write its disjoint blocks.
#[derive(Clone, Copy)]
struct Start(*mut f64);

// SAFETY: made by `multiply` alone, from an exclusive borrow that outlives its threads.
unsafe impl Send for Start {}
// SAFETY: as above; what is shared is the address, each block is written by one thread.
unsafe impl Sync for Start {}

/// # Safety
/// The block lies in the result, whose rows are `stride` long, and nobody else reads or
/// writes it.
unsafe fn multiply_block(
    start: Start,
    ((of_rows, of_cols), stride): ((Range<usize>, Range<usize>), usize),
    add: bool,
    lhs: Operand,
    rhs: Operand,
    depth: usize,
) {
    let (lhs, rhs) = (lhs.from(of_rows.start, 0), rhs.from(0, of_cols.start));
    let (rows, cols) = (of_rows.len(), of_cols.len());
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    // SAFETY: the caller owns the block, whose first element this is.
    let target = unsafe { start.0.add(of_rows.start * stride + of_cols.start) };
    if rows > 1 && cols > 1 {
        // SAFETY: the caller owns the block; both operands hold what is addressed.
        return unsafe { run(target, (rows, cols, stride), add, lhs, rhs, depth) };
    }
    // gemm sums a lone row or column in another order; computed as one of two equal ones, its
    // bits are those it has in any larger block.
    let (tall, wide) = (rows.max(2), cols.max(2));
    let place = |at: usize| (at / wide).min(rows - 1) * stride + (at % wide).min(cols - 1);
    let twice = |stride: usize, of: usize| if of == 1 { 0 } else { stride };
    let lhs = Operand { row_stride: twice(lhs.row_stride, rows), ..lhs };
    let rhs = Operand { col_stride: twice(rhs.col_stride, cols), ..rhs };
    // SAFETY: each place is one of the block's elements.
    let mut padded: Vec<f64> =
        (0..tall * wide).map(|at| unsafe { *target.add(place(at)) }).collect();
    // SAFETY: `padded` holds the whole block; both operands hold what is addressed.
    unsafe { run(padded.as_mut_ptr(), (tall, wide, wide), add, lhs, rhs, depth) };
    for (at, &value) in padded.iter().enumerate() {
        // SAFETY: as above.
        unsafe { *target.add(place(at)) = value };
    }
}

/// # Safety
/// The caller owns the elements of the block, and the operands hold theirs.
unsafe fn run(
    target: *mut f64,
    (rows, cols, stride): (usize, usize, usize),
    add: bool,
    lhs: Operand,
    rhs: Operand,
    depth: usize,
) {
    for first in (0..depth).step_by(DEPTH) {
        let (lhs, rhs) = (lhs.from(0, first), rhs.from(first, 0));
        // SAFETY: the caller's.
        unsafe {
            gemm::gemm(
                rows,
                cols,
                DEPTH.min(depth - first),
                target,
                1,
                stride as isize,
                add || first > 0,
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
}
