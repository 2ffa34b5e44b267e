//! Sums of squares and of variances over the vocabulary or over tokens: products of two matrices
//! that have no negative elements.
//!
//! They need far fewer correct digits than a gradient. So they are multiplied in f32, which takes
//! half as long as f64; a sum of n addends of one sign then has a relative error of at most `n
//! 2⁻²⁴`. Squares exceed the range of f32: a p of 1e-25 squares to 1e-50. So the columns and the
//! rows of each factor are first divided by powers of two near their largest elements, which
//! changes no digit, and the sums are multiplied by these powers again. An element that f32 still
//! cannot hold is small beside the rest of its row and beside the rest of its column.
//!
//! Where q and k have few columns the products are f64: narrowing the factors would take longer
//! than it saves.

use super::gemm::{Operand, add_scaled, multiply};
use super::panel::squares;
use rayon::prelude::*;

/// With this many columns of q and k, a product in f32 saves more time than narrowing its factors
/// takes.
pub const WIDE: usize = 256;
/// Columns whose largest elements one task looks for.
const COLUMNS: usize = 256;
/// With this many elements, several threads share the work.
const MANY: usize = 1 << 14;

/// A matrix without negative elements in f32, each row, or each column, divided by a power of two.
#[derive(Default)]
pub(super) struct Scaled {
    values: Vec<f32>,
    scales: Vec<f64>,
}

/// Squares of rows of q or k, `[rows, depth]`.
#[derive(Default)]
pub(super) struct Squares {
    exact: Vec<f64>,
    /// The same in f32, divided by the scales of columns and rows; only filled from `WIDE` columns
    /// on.
    scaled: Scaled,
    columns: Vec<f64>,
    depth: usize,
}

/// The side of a tile `[tokens, columns]` that a product sums over.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Over {
    /// Its columns: there is one sum for each token.
    Columns,
    /// Its tokens: there is one sum for each column.
    Tokens,
}

impl Squares {
    /// Squares the elements of `values` `[rows, depth]`.
    pub(super) fn load(&mut self, values: &[f64], depth: usize) {
        self.depth = depth;
        squares(values, &mut self.exact);
        if depth >= WIDE {
            let ones = vec![1.0; values.len() / depth];
            column_scales(&mut self.columns, (&self.exact, depth), &ones);
            let inverse = inverse(&self.columns);
            self.scaled.of_rows((&self.exact, depth), &inverse);
        }
    }

    /// Adds the product of a tile `[tokens, width]` with these squares to `target`; `room` is a
    /// buffer for the tile in f32.
    pub(super) fn add_to(
        &self,
        target: &mut [f64],
        (tile, width, over): (&[f64], usize, Over),
        room: &mut Scaled,
    ) {
        let Squares { exact, scaled, columns, depth } = self;
        if *depth >= WIDE {
            match over {
                Over::Columns => room.of_rows((tile, width), &scaled.scales),
                Over::Tokens => room.of_columns((tile, width), &scaled.scales),
            }
            let tile = turned(Operand::rows(&room.values, width), over);
            let squares = Operand::rows(&scaled.values, *depth);
            let scales = (&room.scales[..], &columns[..]);
            return add_scaled(target, scales, tile, squares, scaled.scales.len());
        }
        let (tile, sum) = (Operand::rows(tile, width), exact.len() / (*depth).max(1));
        multiply(target, *depth, true, turned(tile, over), Operand::rows(exact, *depth), sum);
    }
}

/// A tile as the left factor of a product that sums over columns or over tokens.
fn turned<N>(tile: Operand<'_, N>, over: Over) -> Operand<'_, N> {
    if over == Over::Tokens { tile.transposed() } else { tile }
}

impl Scaled {
    /// Narrows rows of values, each column times its own number of `times`, with one scale for each
    /// row.
    fn of_rows(&mut self, (values, width): (&[f64], usize), times: &[f64]) {
        self.values.resize(values.len(), 0.0);
        self.scales.resize(values.len() / width.max(1), 1.0);
        let to = self.values.par_chunks_mut(width.max(1)).zip(&mut self.scales);
        let each = to.zip(values.par_chunks(width.max(1)));
        each.with_min_len(MANY / width.max(1)).for_each(|((to, scale), from)| {
            *scale = power_of_two(largest(from, times));
            narrow(to, from, times, 1.0 / *scale);
        });
    }

    /// Narrows rows of values, each row times its own number of `times`, with one scale for each
    /// column.
    fn of_columns(&mut self, (values, width): (&[f64], usize), times: &[f64]) {
        self.values.resize(values.len(), 0.0);
        column_scales(&mut self.scales, (values, width), times);
        let inverse = inverse(&self.scales);
        let rows = self.values.par_chunks_mut(width.max(1)).zip(values.par_chunks(width.max(1)));
        let rows = rows.zip(times).with_min_len(MANY / width.max(1));
        rows.for_each(|((to, from), &times)| narrow(to, from, &inverse, times));
    }
}

/// For each column the largest power of two that is not above its largest element, where each row
/// of values is first multiplied by its own number of `times`.
fn column_scales(scales: &mut Vec<f64>, (values, width): (&[f64], usize), times: &[f64]) {
    scales.clear();
    scales.resize(width, 0.0);
    let least = MANY / (times.len() * COLUMNS).max(1);
    let parts = scales.par_chunks_mut(COLUMNS).enumerate().with_min_len(least);
    parts.for_each(|(nth, most)| {
        for (row, &times) in values.chunks(width.max(1)).zip(times) {
            raise(most, &row[nth * COLUMNS..][..most.len()], times);
        }
        most.iter_mut().for_each(|x| *x = power_of_two(*x));
    });
}

fn inverse(scales: &[f64]) -> Vec<f64> {
    scales.iter().map(|scale| 1.0 / scale).collect()
}

vectorised!(
    /// The largest `|row[i] * times[i]|`.
    largest, largest_body, (row: &[f64], times: &[f64]) -> f64
);

#[inline(always)]
fn largest_body(row: &[f64], times: &[f64]) -> f64 {
    let bits = row.iter().zip(times).map(|(x, times)| size_in_order(x * times));
    f64::from_bits(bits.fold(0, i64::max) as u64)
}

vectorised!(
    /// `most[i] = max(most[i], |row[i] * times|)`.
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
    /// `to[i] = row[i] * times[i] * all`, rounded to f32.
    narrow, narrow_body, (to: &mut [f32], row: &[f64], times: &[f64], all: f64) -> ()
);

#[inline(always)]
fn narrow_body(to: &mut [f32], row: &[f64], times: &[f64], all: f64) {
    for ((to, x), times) in to.iter_mut().zip(row).zip(times) {
        *to = (x * times * all) as f32;
    }
}

/// The bits of `|x|`, which as integers have the order of the magnitudes; NaN comes last, after
/// inf.
#[inline(always)]
fn size_in_order(x: f64) -> i64 {
    x.abs().to_bits() as i64
}

/// The largest power of two that is not above a number and whose inverse is a normal number too. It
/// is finite also for inf and NaN, so that inf and NaN divided by it stay what they are and reach
/// their sum.
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
    const DEPTH: usize = WIDE;

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
        squares.add_to(&mut target, tile, &mut Scaled::default());
        target
    }

    fn naive(tile: &[f64], values: &[f64], over: Over) -> Vec<f64> {
        let term = |row: usize, column: usize, d: usize| {
            let entry = tile[row * COLUMNS_OF_TILE + column];
            let other = if over == Over::Columns { column } else { row };
            entry * values[other * DEPTH + d] * values[other * DEPTH + d]
        };
        let sum_at = |d: usize, row: usize| -> f64 {
            match over {
                Over::Columns => (0..COLUMNS_OF_TILE).map(|column| term(row, column, d)).sum(),
                Over::Tokens => (0..TOKENS).map(|token| term(token, row, d)).sum(),
            }
        };
        let rows = if over == Over::Columns { TOKENS } else { COLUMNS_OF_TILE };
        (0..rows * DEPTH).map(|index| sum_at(index % DEPTH, index / DEPTH)).collect()
    }

    #[test]
    fn sums_are_those_of_f64_to_six_digits_however_small_or_large_the_squares_are() {
        for seed in 0..20 {
            let (tile, [keys, queries]) = drawn(seed);
            for (over, values) in [(Over::Columns, &keys), (Over::Tokens, &queries)] {
                let (got, exact) = (sums(&tile, values, over), naive(&tile, values, over));
                // Rows and columns differ by e^320 here: an element that is small beside those of
                // its row and of its column may be all that a sum has.
                for (row, (got, exact)) in got.chunks(DEPTH).zip(exact.chunks(DEPTH)).enumerate() {
                    let largest = exact.iter().copied().fold(0.0, f64::max);
                    for (got, exact) in got.iter().zip(exact) {
                        let off = (got - exact).abs();
                        assert!(
                            off <= 1e-6 * exact + 1e-37 * largest,
                            "seed {seed}, row {row}: {got:e} beside {exact:e}"
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
            for (row, sums_of_row) in of_tokens.chunks(DEPTH).enumerate() {
                assert!(
                    sums_of_row.iter().all(|x| x.is_finite() == (row != 1)),
                    "{bad} token {row}"
                );
            }
            for (column, sums_of_column) in of_columns.chunks(DEPTH).enumerate() {
                assert!(
                    sums_of_column.iter().all(|x| x.is_finite() == (column != 7)),
                    "{bad} {column}"
                );
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_of_the_smallest_numbers_stay_what_they_are() {
        let tiny = f64::from_bits(1);
        for x in [0.0, tiny, f64::MIN_POSITIVE] {
            let tile = vec![x; TOKENS * COLUMNS_OF_TILE];
            let keys = vec![1.0; COLUMNS_OF_TILE * DEPTH];
            let got = sums(&tile, &keys, Over::Columns);
            let wanted = x * COLUMNS_OF_TILE as f64;
            assert!(got.iter().all(|&of| (of - wanted).abs() <= 1e-6 * wanted), "{x:e}");
        }
    }

    #[test]
    fn a_column_of_q_or_k_that_is_tiny_keeps_its_sums() {
        let (tile, [mut keys, mut queries]) = drawn(2);
        let tile: Vec<f64> = tile.iter().map(|x| x.powf(0.01)).collect();
        for values in [&mut keys, &mut queries] {
            let tiny = |(at, x): (usize, &mut f64)| {
                *x = x.powf(0.01) * if at % DEPTH == 5 { 1e-30 } else { 1.0 };
            };
            values.iter_mut().enumerate().for_each(tiny);
        }
        for (over, values) in [(Over::Columns, &keys), (Over::Tokens, &queries)] {
            let (got, exact) = (sums(&tile, values, over), naive(&tile, values, over));
            for (got, exact) in got.iter().zip(&exact) {
                assert!((got - exact).abs() <= 1e-5 * exact, "{got:e} beside {exact:e}");
            }
        }
    }
}
