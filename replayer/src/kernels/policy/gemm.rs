//! f32 matrix products for the policies. The raw pointers of the policies are all in this file.
//!
//! The result is cut into a grid of blocks that depends on its shape alone, and each
//! block is computed by one thread with the single-threaded gemm crate. So the bits do
//! not depend on the thread count; they may differ between machines, whose cache sizes
//! decide where gemm splits a long sum.

use rayon::prelude::*;

/// Block shapes to choose from, best for the GEMM first.
const BLOCKS: [(usize, usize); 4] = [(512, 1024), (256, 512), (128, 512), (128, 256)];

/// Fewer blocks than this leave cores idle, so that a smaller block shape is chosen.
const ENOUGH_BLOCKS: usize = 4;

/// A matrix read in place, by strides.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    values: &'a [f32],
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Operand<'a> {
    /// Row-major with `cols` columns.
    pub(super) fn rows(values: &'a [f32], cols: usize) -> Self {
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

/// A block of the result, row-major with a stride.
#[derive(Clone, Copy)]
struct Block {
    start: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
}

/// The start of the result, shared by the threads that write its disjoint blocks.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: only `multiply` makes one, from an exclusive borrow that outlives its
// threads, and they write disjoint blocks of it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// A method, so that closures capture the Sync wrapper and not the raw pointer.
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// `target [rows, cols] (+)= lhs [rows, depth] rhs [depth, cols]`, target row-major.
///
/// Each element is summed over `depth` in f32, in the order of the gemm crate.
pub(super) fn multiply(
    target: &mut [f32],
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
    let rows = target.len() / cols;
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    let (height, width) = block_shape(rows, cols);
    let across = cols.div_ceil(width);
    let shared = Shared(target.as_mut_ptr());
    (0..rows.div_ceil(height) * across).into_par_iter().for_each(|index| {
        let (row, col) = (index / across * height, index % across * width);
        let block = Block {
            // SAFETY: row < rows and col < cols, so the element lies in the target.
            start: unsafe { shared.get().add(row * cols + col) },
            rows: height.min(rows - row),
            cols: width.min(cols - col),
            stride: cols,
        };
        // SAFETY: blocks of the grid are disjoint parts of the exclusively borrowed
        // target.
        unsafe { multiply_block(block, add, lhs.from(row, 0), rhs.from(0, col), depth) };
    });
}

fn block_shape(rows: usize, cols: usize) -> (usize, usize) {
    let enough = |&&(height, width): &&(usize, usize)| {
        rows.div_ceil(height) * cols.div_ceil(width) >= ENOUGH_BLOCKS
    };
    *BLOCKS.iter().find(enough).unwrap_or(&BLOCKS[BLOCKS.len() - 1])
}

/// # Safety
/// The caller owns the block's elements, and nobody else reads or writes them.
unsafe fn multiply_block(block: Block, add: bool, lhs: Operand, rhs: Operand, depth: usize) {
    let Block { start, rows, cols, stride } = block;
    if rows > 1 && cols > 1 {
        // SAFETY: the caller owns the block.
        return unsafe { run(block, add, lhs, rhs, depth) };
    }
    // gemm sums a lone row or column in another order; as one of two equal ones it gets the bits
    // that it has in any larger block.
    let (tall, wide) = (rows.max(2), cols.max(2));
    let lhs = if rows == 1 { Operand { row_stride: 0, ..lhs } } else { lhs };
    let rhs = if cols == 1 { Operand { col_stride: 0, ..rhs } } else { rhs };
    let mut padded = vec![0.0f32; tall * wide];
    let place = |i: usize, j: usize| i.min(rows - 1) * stride + j.min(cols - 1);
    if add {
        for (index, value) in padded.iter_mut().enumerate() {
            // SAFETY: the place is one of the block's elements.
            *value = unsafe { *start.add(place(index / wide, index % wide)) };
        }
    }
    let whole = Block { start: padded.as_mut_ptr(), rows: tall, cols: wide, stride: wide };
    // SAFETY: `padded` holds the whole block and is borrowed by nobody else.
    unsafe { run(whole, add, lhs, rhs, depth) };
    for (index, &value) in padded.iter().enumerate() {
        // SAFETY: the place is one of the block's elements.
        unsafe { *start.add(place(index / wide, index % wide)) = value };
    }
}

/// # Safety
/// The caller owns the block's elements, and nobody else reads or writes them.
unsafe fn run(block: Block, add: bool, lhs: Operand, rhs: Operand, depth: usize) {
    let Block { start, rows, cols, stride } = block;
    lhs.check(rows, depth);
    rhs.check(depth, cols);
    // SAFETY: the caller owns the block; both operands were just checked to hold every
    // element addressed.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            depth,
            start,
            1,
            stride as isize,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 9) as f32 / (1 << 22) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// Shapes with one row, one column, no depth, and several uneven blocks; the bound
    /// is gamma of the depth on the sum of magnitudes.
    #[test]
    fn products_match_a_triple_loop_for_every_kind_of_shape() {
        let shapes = [(1, 1, 1), (1, 7, 1500), (7, 1, 1500), (3, 4, 0), (5, 9, 2), (300, 530, 33)];
        for (rows, cols, depth) in shapes {
            let (a, b) = (numbers(rows * depth, 1), numbers(cols * depth, 2));
            for add in [false, true] {
                let before = numbers(rows * cols, 3);
                let mut got = before.clone();
                let rhs = Operand::rows(&b, depth).transposed();
                multiply(&mut got, cols, add, Operand::rows(&a, depth), rhs, depth);
                for (index, &got) in got.iter().enumerate() {
                    let (i, j) = (index / cols, index % cols);
                    let start = if add { f64::from(before[index]) } else { 0.0 };
                    let (mut wanted, mut magnitude) = (start, start.abs());
                    for d in 0..depth {
                        let term = f64::from(a[i * depth + d]) * f64::from(b[j * depth + d]);
                        wanted += term;
                        magnitude += term.abs();
                    }
                    let bound = (depth + 1) as f64 * f64::powi(2.0, -24) * magnitude;
                    let error = (f64::from(got) - wanted).abs();
                    assert!(error <= bound, "{rows}x{cols}x{depth} at {i},{j}: {error} > {bound}");
                }
            }
        }
    }

    /// From a depth of 1024 on gemm sums a lone row differently: without padding this
    /// fails.
    #[test]
    fn a_row_has_the_same_bits_alone_as_among_others() {
        let (depth, cols) = (2048, 300);
        let (a, b) = (numbers(3 * depth, 4), numbers(cols * depth, 5));
        let product = |rows: &[f32]| {
            let mut target = vec![0.0; rows.len() / depth * cols];
            let rhs = Operand::rows(&b, depth).transposed();
            multiply(&mut target, cols, false, Operand::rows(rows, depth), rhs, depth);
            target
        };
        assert_eq!(product(&a)[..cols], product(&a[..depth]));
    }
}
