//! Sums of squares and of variances over the vocabulary or over tokens: products of two matrices
//! without signs.
//!
//! Only their size counts, to far fewer digits than a gradient's, so they are multiplied in f32,
//! which takes half as long as f64: a sum of n addends without signs errs by `n 2⁻²⁴` at most,
//! relatively. Squares reach further than f32 does (a p of 1e-25 squares to 1e-50), so every row of
//! a factor is first divided by a power of two near its largest element, which loses no bit. What
//! is then too small for f32 is nothing beside that element. Of few columns the squares stay f64, as
//! that takes longer than it saves.

use super::gemm::{Operand, add_scaled, multiply};
use super::panel::squares;
use rayon::prelude::*;

/// Columns of q and k from which a product in f32 saves more than narrowing its factors takes.
pub const WORTH_IT: usize = 256;
/// Columns whose largest elements are looked for together.
const COLUMNS: usize = 256;
/// Elements from which several threads look at them.
const MANY: usize = 1 << 14;

/// Numbers without signs in f32, each row, or each column, over a power of two.
#[derive(Default)]
pub(super) struct Scaled {
    values: Vec<f32>,
    scales: Vec<f64>,
    /// False where an element is no finite number: then nothing here is used.
    finite: bool,
}

/// Squares of rows of q or k, `[rows, depth]`.
#[derive(Default)]
pub(super) struct Squares {
    scaled: Scaled,
    /// In f64, where they are not scaled.
    exact: Vec<f64>,
    depth: usize,
}

/// The side of a tile `[tokens, columns]` that a product sums over.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Over {
    /// Its columns: each sum is one of a token.
    Columns,
    /// Its tokens: each sum is one of a column.
    Tokens,
}

impl Squares {
    /// Of rows of values.
    pub(super) fn load(&mut self, values: &[f64], depth: usize) {
        self.depth = depth;
        self.exact.clear();
        if depth < WORTH_IT {
            return squares(values, &mut self.exact);
        }
        let own = |row: usize| &values[row * depth..(row + 1) * depth];
        self.scaled.of_rows((values, depth), own);
    }

    /// Adds to `target` a tile's product with these squares, which are those of `values`.
    pub(super) fn add_to(
        &self,
        target: &mut [f64],
        (tile, width, over): (&[f64], usize, Over),
        values: &[f64],
        room: &mut Scaled,
    ) {
        let (depth, scales) = (self.depth, &self.scaled.scales);
        let in_f64 = |target: &mut [f64], squares: &[f64]| {
            let (tile, sum) = (Operand::rows(tile, width), squares.len() / depth.max(1));
            multiply(target, depth, true, turned(tile, over), Operand::rows(squares, depth), sum);
        };
        if depth < WORTH_IT {
            return in_f64(target, &self.exact);
        }
        match over {
            Over::Columns => room.of_rows((tile, width), |_| scales),
            Over::Tokens => room.of_columns((tile, width), scales),
        }
        if self.scaled.finite && room.finite {
            let tile = turned(Operand::rows(&room.values, width), over);
            let keys = Operand::rows(&self.scaled.values, depth);
            return add_scaled((target, depth), &room.scales, tile, keys, scales.len());
        }
        let mut exact = Vec::new();
        squares(values, &mut exact);
        in_f64(target, &exact);
    }
}

/// A tile as the left factor.
fn turned<N>(tile: Operand<'_, N>, over: Over) -> Operand<'_, N> {
    if over == Over::Tokens { tile.transposed() } else { tile }
}

impl Scaled {
    /// Rows of values, each times what is given of the row, with a scale a row.
    fn of_rows<'a>(
        &mut self,
        (values, width): (&[f64], usize),
        times: impl Fn(usize) -> &'a [f64] + Sync,
    ) {
        let rows = values.len() / width.max(1);
        self.values.resize(values.len(), 0.0);
        self.scales.resize(rows, 1.0);
        let to = self.values.par_chunks_mut(width.max(1)).zip(&mut self.scales);
        let each = to.zip(values.par_chunks(width.max(1))).enumerate();
        let finite = each.with_min_len(MANY / width.max(1)).map(|(row, ((to, scale), from))| {
            let most = largest(from, times(row));
            *scale = power_of_two(most);
            narrow(to, from, times(row), 1.0 / *scale);
            most.is_finite()
        });
        self.finite = finite.reduce(|| true, |one, other| one && other);
    }

    /// The same with a scale a column; `times` has a number a row.
    fn of_columns(&mut self, (values, width): (&[f64], usize), times: &[f64]) {
        self.values.resize(values.len(), 0.0);
        self.scales.clear();
        self.scales.resize(width, 0.0);
        let least = MANY / (times.len() * COLUMNS).max(1);
        let finite = self.scales.par_chunks_mut(COLUMNS).enumerate().with_min_len(least);
        let finite = finite.map(|(nth, most)| {
            for (row, &times) in values.chunks(width.max(1)).zip(times) {
                raise(most, &row[nth * COLUMNS..][..most.len()], times);
            }
            let finite = most.iter().all(|x| x.is_finite());
            most.iter_mut().for_each(|x| *x = power_of_two(*x));
            finite
        });
        self.finite = finite.reduce(|| true, |one, other| one && other);
        let inverse: Vec<f64> = self.scales.iter().map(|scale| 1.0 / scale).collect();
        let rows = self.values.par_chunks_mut(width.max(1)).zip(values.par_chunks(width.max(1)));
        let rows = rows.zip(times).with_min_len(MANY / width.max(1));
        rows.for_each(|((to, from), &times)| narrow(to, from, &inverse, times));
    }
}

vectorised!(
    /// The largest of a row's elements times others; not finite where one of them is not.
    largest, largest_body, (row: &[f64], times: &[f64]) -> f64
);

#[inline(always)]
fn largest_body(row: &[f64], times: &[f64]) -> f64 {
    let bits = row.iter().zip(times).map(|(x, times)| size_in_order(x * times));
    f64::from_bits(bits.fold(0, i64::max) as u64)
}

vectorised!(
    /// Raises numbers without signs to those of a row times a number; not finite stays so.
    raise, raise_body, (most: &mut [f64], row: &[f64], times: f64) -> ()
);

#[inline(always)]
fn raise_body(most: &mut [f64], row: &[f64], times: f64) {
    for (most, x) in most.iter_mut().zip(row) {
        let larger = size_in_order(x * times).max(size_in_order(*most));
        *most = f64::from_bits(larger as u64);
    }
}

vectorised!(
    /// The products of two rows, times a number, in f32.
    narrow, narrow_body, (to: &mut [f32], row: &[f64], times: &[f64], all: f64) -> ()
);

#[inline(always)]
fn narrow_body(to: &mut [f32], row: &[f64], times: &[f64], all: f64) {
    for ((to, x), times) in to.iter_mut().zip(row).zip(times) {
        *to = (x * times * all) as f32;
    }
}

/// The bits of a number's size, which are in the order of the sizes: NaN comes last, after inf.
#[inline(always)]
fn size_in_order(x: f64) -> i64 {
    x.abs().to_bits() as i64
}

/// The power of two next below a number, such that its inverse is one too.
fn power_of_two(x: f64) -> f64 {
    const EXPONENT: u64 = 0x7ff0_0000_0000_0000;
    f64::from_bits(x.to_bits() & EXPONENT).clamp(f64::MIN_POSITIVE, 1.0 / f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    const TOKENS: usize = 5;
    const COLUMNS_OF_TILE: usize = 300;
    const DEPTH: usize = WORTH_IT;

    /// A tile, and the rows of either side, of sizes that f32 does not reach.
    fn drawn(seed: u64) -> (Vec<f64>, [Vec<f64>; 2]) {
        let mut draw = Draw::new(seed);
        let mut wide = |reach: f64, n: usize| -> Vec<f64> {
            (0..n).map(|_| libm::exp(reach * (2.0 * draw.unit() - 1.0))).collect()
        };
        let tile = wide(300.0, TOKENS * COLUMNS_OF_TILE);
        (tile, [wide(80.0, COLUMNS_OF_TILE * DEPTH), wide(80.0, TOKENS * DEPTH)])
    }

    fn sums(tile: &[f64], values: &[f64], over: Over) -> Vec<f64> {
        let rows = if over == Over::Columns { TOKENS } else { COLUMNS_OF_TILE };
        let mut squares = Squares::default();
        squares.load(values, DEPTH);
        let mut target = vec![0.0; rows * DEPTH];
        let tile = (tile, COLUMNS_OF_TILE, over);
        squares.add_to(&mut target, tile, values, &mut Scaled::default());
        target
    }

    fn naive(tile: &[f64], values: &[f64], over: Over) -> Vec<f64> {
        let of = |row: usize, column: usize, d: usize| {
            let entry = tile[row * COLUMNS_OF_TILE + column];
            let other = if over == Over::Columns { column } else { row };
            entry * values[other * DEPTH + d] * values[other * DEPTH + d]
        };
        let at = |d: usize, row: usize| -> f64 {
            match over {
                Over::Columns => (0..COLUMNS_OF_TILE).map(|column| of(row, column, d)).sum(),
                Over::Tokens => (0..TOKENS).map(|token| of(token, row, d)).sum(),
            }
        };
        let rows = if over == Over::Columns { TOKENS } else { COLUMNS_OF_TILE };
        (0..rows * DEPTH).map(|index| at(index % DEPTH, index / DEPTH)).collect()
    }

    #[test]
    fn sums_are_those_of_f64_to_six_digits_however_small_or_large_the_squares_are() {
        for seed in 0..20 {
            let (tile, [keys, queries]) = drawn(seed);
            for (over, values) in [(Over::Columns, &keys), (Over::Tokens, &queries)] {
                let (found, exact) = (sums(&tile, values, over), naive(&tile, values, over));
                // An element that is small beside others of its row of squares may be lost in f32
                // where it is all that a sum has; the rows of one factor differ by e^320 here.
                for (row, (found, exact)) in
                    found.chunks(DEPTH).zip(exact.chunks(DEPTH)).enumerate()
                {
                    let largest = exact.iter().copied().fold(0.0, f64::max);
                    for (found, exact) in found.iter().zip(exact) {
                        let off = (found - exact).abs();
                        assert!(
                            off <= 1e-6 * exact + 1e-37 * largest,
                            "seed {seed}, row {row}: {found:e} beside {exact:e}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_reaches_the_sums_that_it_belongs_to_alone() {
        for bad in [f64::NAN, f64::INFINITY, -f64::NAN] {
            let (mut tile, [keys, queries]) = drawn(1);
            tile[COLUMNS_OF_TILE + 7] = bad;
            let of_tokens = sums(&tile, &keys, Over::Columns);
            let of_columns = sums(&tile, &queries, Over::Tokens);
            for (row, found) in of_tokens.chunks(DEPTH).enumerate() {
                assert!(found.iter().all(|x| x.is_finite() == (row != 1)), "{bad} token {row}");
            }
            for (column, found) in of_columns.chunks(DEPTH).enumerate() {
                assert!(found.iter().all(|x| x.is_finite() == (column != 7)), "{bad} {column}");
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_of_the_smallest_numbers_stay_what_they_are() {
        let tiny = f64::from_bits(1);
        for x in [0.0, tiny, f64::MIN_POSITIVE] {
            let tile = vec![x; TOKENS * COLUMNS_OF_TILE];
            let keys = vec![1.0; COLUMNS_OF_TILE * DEPTH];
            let found = sums(&tile, &keys, Over::Columns);
            let wanted = x * COLUMNS_OF_TILE as f64;
            assert!(found.iter().all(|&of| (of - wanted).abs() <= 1e-6 * wanted), "{x:e}");
        }
    }
}
