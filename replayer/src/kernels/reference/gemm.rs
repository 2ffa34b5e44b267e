//! Matrix products for the reference: in f64, and in f32 for sums of which only the size counts.
//! The raw pointers of the reference are all in this file.
//!
//! The result is cut into blocks that depend on its shape alone, each computed by one
//! thread, so the bits do not depend on how many threads there are.

use rayon::prelude::*;
use std::ops::Range;

/// Most rows and columns of the result that one thread computes at a time. gemm packs a block's
/// columns first, and the more rows a block has, the less that costs per row.
const BLOCK: (usize, usize) = (512, 1024);
/// Longest sum that gemm is asked for in one call: it reads the columns of a longer sum more
/// slowly.
const DEPTH: usize = 256;

/// A matrix read in place, by strides.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a, N = f64> {
    values: &'a [N],
    row_stride: usize,
    col_stride: usize,
}

/// The type that products are computed in: f64 or f32.
trait Number: Copy + Default + Send + Sync + 'static {
    const ONE: Self;
}

impl Number for f64 {
    const ONE: f64 = 1.0;
}

impl Number for f32 {
    const ONE: f32 = 1.0;
}

impl<'a, N> Operand<'a, N> {
    /// Row-major with `cols` columns.
    pub(super) fn rows(values: &'a [N], cols: usize) -> Self {
        Operand { values, row_stride: cols, col_stride: 1 }
    }

    /// The same elements read as the transposed matrix.
    pub(super) fn transposed(self) -> Self {
        Operand { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// The part that starts at an element; empty when the matrix has no depth.
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
    blocks(rows, cols).for_each(|at| {
        // SAFETY: the blocks are disjoint parts of the target, which is exclusively borrowed.
        unsafe { multiply_block(start, (at, cols), add, lhs, rhs, depth) };
    });
}

/// `target [rows, cols] += row_scales [rows] * col_scales [cols] * (lhs [rows, depth] rhs [depth,
/// cols])`, the product in f32.
pub(super) fn add_scaled(
    target: &mut [f64],
    (row_scales, col_scales): (&[f64], &[f64]),
    lhs: Operand<f32>,
    rhs: Operand<f32>,
    depth: usize,
) {
    if target.is_empty() || depth == 0 {
        return;
    }
    let (rows, cols) = (row_scales.len(), col_scales.len());
    assert_eq!(target.len(), rows * cols, "each row and each column of the target has a scale");
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    let start = Start(target.as_mut_ptr());
    blocks(rows, cols).for_each_init(Vec::new, |product, (of_rows, of_cols)| {
        let (lhs, rhs) = (lhs.from(of_rows.start, 0), rhs.from(0, of_cols.start));
        let shape = (of_rows.len(), of_cols.len());
        let wide = multiply_apart(product, shape, lhs, rhs, depth);
        for (row, product) in of_rows.zip(product.chunks(wide)) {
            let first = row * cols + of_cols.start;
            // SAFETY: the blocks are disjoint parts of the target, which is exclusively borrowed.
            let target = unsafe { std::slice::from_raw_parts_mut(start.at(first), of_cols.len()) };
            add_times(target, product, &col_scales[of_cols.clone()], row_scales[row]);
        }
    });
}

vectorised!(
    /// `to[i] += all * times[i] * numbers[i]`.
    add_times, add_times_body,
    (to: &mut [f64], numbers: &[f32], times: &[f64], all: f64) -> ()
);

#[inline(always)]
fn add_times_body(to: &mut [f64], numbers: &[f32], times: &[f64], all: f64) {
    for ((to, &x), times) in to.iter_mut().zip(numbers).zip(times) {
        *to += all * times * f64::from(x);
    }
}

/// The blocks (rows, columns) that a result of that shape is cut into.
fn blocks(
    rows: usize,
    cols: usize,
) -> impl IndexedParallelIterator<Item = (Range<usize>, Range<usize>)> {
    let across = cols.div_ceil(BLOCK.1);
    (0..rows.div_ceil(BLOCK.0) * across).into_par_iter().map(move |nth| {
        let part =
            |nth: usize, size: usize, whole: usize| nth * size..((nth + 1) * size).min(whole);
        (part(nth / across, BLOCK.0, rows), part(nth % across, BLOCK.1, cols))
    })
}

/// The start of the result, shared by the threads that write its disjoint blocks.
#[derive(Clone, Copy)]
struct Start(*mut f64);

impl Start {
    /// # Safety `element` is an index of the result.
    unsafe fn at(self, element: usize) -> *mut f64 {
        // SAFETY: the caller's.
        unsafe { self.0.add(element) }
    }
}

// SAFETY: only `multiply` and `add_scaled` make one, from an exclusive borrow that outlives the
// threads.
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
    let target = unsafe { start.at(of_rows.start * stride + of_cols.start) };
    if rows > 1 && cols > 1 {
        // SAFETY: the caller owns the block; both operands hold what is addressed.
        return unsafe { run(target, (rows, cols, stride), add, lhs, rhs, depth) };
    }
    let (tall, wide) = padded((rows, cols));
    let place = |at: usize| (at / wide).min(rows - 1) * stride + (at % wide).min(cols - 1);
    let (lhs, rhs) = repeated((rows, cols), lhs, rhs);
    // SAFETY: each place is one of the block's elements.
    let mut block: Vec<f64> =
        (0..tall * wide).map(|at| unsafe { *target.add(place(at)) }).collect();
    // SAFETY: `block` holds the whole block; both operands hold what is addressed.
    unsafe { run(block.as_mut_ptr(), (tall, wide, wide), add, lhs, rhs, depth) };
    for (index, &value) in block.iter().enumerate() {
        // SAFETY: as above.
        unsafe { *target.add(place(index)) = value };
    }
}

/// Writes a block's product to `room`, a buffer of its own, and returns the width of its rows
/// there.
fn multiply_apart<N: Number>(
    room: &mut Vec<N>,
    (rows, cols): (usize, usize),
    lhs: Operand<N>,
    rhs: Operand<N>,
    depth: usize,
) -> usize {
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    let (tall, wide) = padded((rows, cols));
    room.resize(tall * wide, N::default());
    let (lhs, rhs) = repeated((rows, cols), lhs, rhs);
    // SAFETY: the room was just made that large; both operands hold what is addressed.
    unsafe { run(room.as_mut_ptr(), (tall, wide, wide), false, lhs, rhs, depth) };
    wide
}

/// The shape with at least two rows and columns. gemm sums a lone row or column in another order;
/// as one of two equal ones it gets the bits that it has in any larger block.
fn padded((rows, cols): (usize, usize)) -> (usize, usize) {
    (rows.max(2), cols.max(2))
}

/// The operands read so that a lone row or column appears twice.
fn repeated<'a, N>(
    (rows, cols): (usize, usize),
    lhs: Operand<'a, N>,
    rhs: Operand<'a, N>,
) -> (Operand<'a, N>, Operand<'a, N>) {
    let twice = |stride: usize, count: usize| if count == 1 { 0 } else { stride };
    let lhs = Operand { row_stride: twice(lhs.row_stride, rows), ..lhs };
    (lhs, Operand { col_stride: twice(rhs.col_stride, cols), ..rhs })
}

/// # Safety
/// The caller owns the elements of the block, and the operands hold theirs.
unsafe fn run<N: Number>(
    target: *mut N,
    (rows, cols, stride): (usize, usize, usize),
    add: bool,
    lhs: Operand<N>,
    rhs: Operand<N>,
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
                N::ONE,
                N::ONE,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}
