//! Compares a row block by block, with sums in lanes that a processor adds at once.
//!
//! The result is that of [`RowTally::of`] but for the order of sums and for what no verdict needs:
//! a block in which something stands out is compared element by element, by the same code.

use super::allowance::{Allowance, Rounding};
use super::bound::{Allowed, Bound, ONE_ROUNDING};
use super::row::{Element, Look, RowTally};
use super::ulp::Format;
use crate::kernels::round::Precision;
use crate::kernels::vectorised;

/// Independent chains of sums.
const LANES: usize = 4;

/// Some consecutive elements of a row. What all rows share, the elements have as a standard
/// deviation.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    /// What was captured.
    pub captured: &'a [f64],
    /// What it should be.
    pub reference: &'a [f64],
    /// Variance of each element's own error.
    pub own: &'a [f64],
    /// Deviation of the error that the whole stage shares.
    pub shared: &'a [f64],
}

/// A row that is compared block by block.
pub(crate) struct Row {
    tally: RowTally,
    /// Elements so far.
    columns: usize,
    look: Look,
    /// Twice the exponent of an element's bound.
    reach: f64,
    format: Option<Precision>,
    stored: Rounding,
    /// `⟨stored(ref) - ref, ref⟩` so far.
    storing: f64,
    /// What is larger has become infinite, where values that are not finite are meant.
    largest: Option<f64>,
}

vectorised!(
    /// The sums of a block, whose length is a multiple of `LANES`.
    sums,
    sums_body,
    (block: &Block<'_>, stored: &Rounding, reach: f64, best: f64) -> Sums
);

vectorised!(
    /// What storing the values in a format of few bits would add to their products with themselves.
    few_bits,
    few_bits_body,
    (reference: &[f64], format: Precision) -> f64
);

/// Sums over a block.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    error: f64,
    reference: f64,
    captured: f64,
    dot: f64,
    max_abs: f64,
    /// Sums, sums of squares and largest, as in `AllowedSums`.
    own: [f64; 3],
    many: [f64; 3],
    most: f64,
    shared: f64,
    slope: [f64; 2],
    /// Elements beyond their bound, or with a larger score than the best before.
    standing_out: u64,
}

impl Row {
    /// A row that is stored in a format, or in none that rounds; `largest` is the largest number
    /// that the job has.
    pub(crate) fn new(format: Option<Precision>, largest: f64, bound: &Bound) -> Row {
        Row {
            tally: RowTally::NONE,
            columns: 0,
            look: Look::of(&Bound { measured: false, ..*bound }),
            reach: 2.0 * bound.element,
            format,
            stored: format.map_or(Rounding::default(), Rounding::to),
            storing: 0.0,
            largest: bound.nan_is_meant.then_some(largest),
        }
    }

    /// Adds the next elements of the row.
    pub(crate) fn add(&mut self, block: &Block<'_>) {
        let Some(largest) = self.largest else { return self.add_all(block) };
        let overflow = |x: &f64| if x.abs() > largest { x * f64::INFINITY } else { *x };
        let reference: Vec<f64> = block.reference.iter().map(overflow).collect();
        self.add_all(&Block { reference: &reference, ..*block });
    }

    fn add_all(&mut self, block: &Block<'_>) {
        let whole = block.captured.len() / LANES * LANES;
        let cut = |range: std::ops::Range<usize>| Block {
            captured: &block.captured[range.clone()],
            reference: &block.reference[range.clone()],
            own: &block.own[range.clone()],
            shared: &block.shared[range],
        };
        self.add_whole(&cut(0..whole));
        self.one_by_one(&cut(whole..block.captured.len()));
    }

    fn add_whole(&mut self, block: &Block<'_>) {
        // The first of elements with one score is kept, be it 0.
        if self.tally.spots[2].column < 0 {
            return self.one_by_one(block);
        }
        let best = self.tally.spots[2].score;
        let sums = sums(block, &self.stored, self.reach, best * best);
        let finite = [sums.error, sums.reference, sums.captured, sums.max_abs, sums.own[1]];
        if sums.standing_out > 0 || !finite.iter().all(|sum| sum.is_finite()) {
            return self.one_by_one(block);
        }
        let row = &mut self.tally;
        row.error += sums.error;
        row.reference += sums.reference;
        row.captured += sums.captured;
        row.dot += sums.dot;
        row.max_abs = row.max_abs.max(sums.max_abs);
        row.slope[0] += sums.slope[0];
        row.slope[2] += sums.slope[1];
        for (of, more) in [(&mut row.allowed.own, sums.own), (&mut row.allowed.many, sums.many)] {
            *of = [of[0] + more[0], of[1] + more[1], of[2].max(more[2])];
        }
        row.allowed.most += sums.most;
        row.allowed.shared += sums.shared;
        self.store(block.reference, sums.reference);
        self.columns += block.captured.len();
    }

    fn store(&mut self, reference: &[f64], energy: f64) {
        self.storing += match self.format {
            None => 0.0,
            Some(format) if format.keeps_f32() => format.unit_roundoff() * energy,
            Some(format) => few_bits(reference, format),
        };
    }

    #[cold]
    fn one_by_one(&mut self, block: &Block<'_>) {
        // The format counts in what is measured, and nothing is.
        let format = Format::of_values(&crate::kernels::Values::F64(&[]));
        for (at, reference) in block.reference.iter().copied().enumerate() {
            let shared = block.shared[at] * block.shared[at];
            let inner = Allowed { own: block.own[at], shared, ..Allowed::default() };
            let allowed = Allowance::storing(&self.stored, reference, 1.0, inner);
            let element = Element { captured: block.captured[at], reference, allowed };
            self.tally.look_at(self.columns + at, element, format, &self.look);
            self.tally.rank(self.columns + at, element);
        }
        let finite: Vec<f64> = block.reference.iter().copied().filter(|x| x.is_finite()).collect();
        self.store(&finite, finite.iter().map(|x| x * x).sum());
        self.columns += block.captured.len();
    }

    /// The row's sums, its number of elements, and `⟨stored(ref) - ref, ref⟩`.
    pub(crate) fn done(self) -> (RowTally, usize, f64) {
        (self.tally, self.columns, self.storing)
    }
}

#[inline(always)]
fn few_bits_body(reference: &[f64], format: Precision) -> f64 {
    let mut sum = [0.0; LANES];
    let chunks = reference.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(|x| (format.round64(*x) - x) * x).sum();
    macro_rules! with {
        ($($precision:ident)*) => {
            match format {
                $(Precision::$precision => chunks.for_each(|chunk| {
                    for lane in 0..LANES {
                        let x = chunk[lane];
                        sum[lane] += (Precision::$precision.round64(x) - x) * x;
                    }
                }),)*
                _ => chunks.for_each(|chunk| {
                    for lane in 0..LANES {
                        sum[lane] += (format.round64(chunk[lane]) - chunk[lane]) * chunk[lane];
                    }
                }),
            }
        };
    }
    // A format that is known when this is compiled is rounded to in all lanes at once.
    with!(Bf16 F16);
    sum.iter().sum::<f64>() + rest
}

#[inline(always)]
fn sums_body(block: &Block<'_>, stored: &Rounding, reach: f64, best: f64) -> Sums {
    let zero = [0.0f64; LANES];
    let (mut error, mut reference, mut captured, mut dot) = (zero, zero, zero, zero);
    let mut max_abs = zero;
    for (c, x) in block.captured.chunks_exact(LANES).zip(block.reference.chunks_exact(LANES)) {
        for lane in 0..LANES {
            let (c, x) = (c[lane], x[lane]);
            let e = c - x;
            error[lane] += e * e;
            reference[lane] += x * x;
            captured[lane] += c * c;
            dot[lane] += e * x;
            max_abs[lane] = if e.abs() > max_abs[lane] { e.abs() } else { max_abs[lane] };
        }
    }
    let (mut own_squares, mut own_largest) = (zero, zero);
    let (mut many_sum, mut many_squares, mut many_largest) = (zero, zero, zero);
    let (mut most_squares, mut shared_sum) = (zero, zero);
    let (mut slope_own, mut slope_shared, mut standing_out) = (zero, zero, [0u64; LANES]);
    let sides = block.captured.chunks_exact(LANES).zip(block.reference.chunks_exact(LANES));
    let variances = block.own.chunks_exact(LANES).zip(block.shared.chunks_exact(LANES));
    for ((c, x), (many, shared)) in sides.zip(variances) {
        for lane in 0..LANES {
            let (c, x, many, shared) = (c[lane], x[lane], many[lane], shared[lane]);
            let (square, alike) = (x * x, shared * shared);
            // As `Allowance::storing` has it, but for what the error adds to the size: see below.
            let most = stored.unit * x.abs() + stored.half;
            let own = many + (stored.square * square + stored.constant);
            own_squares[lane] += own * own;
            own_largest[lane] = if own > own_largest[lane] { own } else { own_largest[lane] };
            many_sum[lane] += many;
            many_squares[lane] += many * many;
            many_largest[lane] = if many > many_largest[lane] { many } else { many_largest[lane] };
            most_squares[lane] += most * most;
            shared_sum[lane] += alike;
            slope_own[lane] += own * square;
            slope_shared[lane] += shared * x.abs();
            // As `Allowed::reach` has it, squared.
            let e = c - x;
            let beyond = e.abs() - ONE_ROUNDING.sqrt() * shared;
            let beyond = if beyond > 0.0 { beyond } else { 0.0 };
            let apart = if beyond > most { beyond - most } else { 0.0 };
            let is_within = (beyond * beyond <= reach * own) & (apart * apart <= reach * many);
            let is_best = e * e > best * (own + alike);
            standing_out[lane] += u64::from(!is_within | is_best);
        }
    }
    let sum = |lanes: [f64; LANES]| lanes.iter().sum::<f64>();
    let storing = stored.square * sum(reference) + stored.constant * block.reference.len() as f64;
    let largest = |lanes: [f64; LANES]| lanes.into_iter().fold(0.0, f64::max);
    // The root of the sum of the squares of `most + 8 unit √total` is at most that of those of
    // `most` and of the rest (Minkowski).
    let total = sum(many_sum) + sum(shared_sum);
    let most = (sum(most_squares).sqrt() + 8.0 * stored.unit * total.sqrt()).powi(2);
    Sums {
        error: sum(error),
        reference: sum(reference),
        captured: sum(captured),
        dot: sum(dot),
        max_abs: largest(max_abs),
        own: [sum(many_sum) + storing, sum(own_squares), largest(own_largest)],
        many: [sum(many_sum), sum(many_squares), largest(many_largest)],
        most,
        shared: sum(shared_sum),
        slope: [sum(slope_own), sum(slope_shared)],
        standing_out: standing_out.iter().sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    /// Goal: a row that is compared block by block is the row that is compared element by element.
    /// Method: values that agree, that err too much, and that are no numbers, in several formats.
    #[test]
    fn blocks_find_what_elements_find() {
        let mut draw = Draw::new(41);
        let bound = Bound { measured: false, ..Bound::new(3, 1, 1000) };
        for format in [None, Some(Precision::F32), Some(Precision::Bf16)] {
            for faults in [0, 3] {
                let reference: Vec<f64> = (0..1003).map(|_| draw.normal()).collect();
                let own: Vec<f64> = reference.iter().map(|x| (1e-7 * x).powi(2)).collect();
                let shared: Vec<f64> = reference.iter().map(|x| 1e-8 * x.abs()).collect();
                let mut captured: Vec<f64> = reference
                    .iter()
                    .map(|x| format.map_or(*x, |format| format.round64(x * (1.0 + 1e-8))))
                    .collect();
                for _ in 0..faults {
                    captured[draw.below(1003)] *= 1.5;
                    captured[draw.below(1003)] = f64::NAN;
                }
                let mut row = Row::new(format, f64::MAX, &bound);
                for at in (0..1003).step_by(256) {
                    let range = at..(at + 256).min(1003);
                    row.add(&Block {
                        captured: &captured[range.clone()],
                        reference: &reference[range.clone()],
                        own: &own[range.clone()],
                        shared: &shared[range],
                    });
                }
                let (row, columns, _) = row.done();
                let stored = format.map_or(Rounding::default(), Rounding::to);
                let elements = (0..1003).map(|at| {
                    let shared = shared[at] * shared[at];
                    let inner = Allowed { own: own[at], shared, ..Allowed::default() };
                    let allowed = Allowance::storing(&stored, reference[at], 1.0, inner);
                    Element { captured: captured[at], reference: reference[at], allowed }
                });
                let values = Format::of_values(&crate::kernels::Values::F64(&[]));
                let plain = RowTally::of(elements, values, &Look::whole(bound.element));
                assert_eq!(columns, 1003);
                assert_eq!(row.nonfinite, plain.nonfinite);
                assert_eq!(row.exceeding, plain.exceeding);
                assert_eq!(row.exceeding > 0, faults > 0);
                assert_eq!(format!("{:?}", row.spots[2]), format!("{:?}", plain.spots[2]));
                assert_eq!(row.spots.map(|of| of.column), plain.spots.map(|of| of.column));
                assert_eq!((row.max_abs, row.beyond), (plain.max_abs, plain.beyond));
                let sums = |row: &RowTally| {
                    let of = &row.allowed;
                    let mut sums = vec![row.error, row.reference, row.captured, row.dot];
                    sums.extend(row.slope);
                    sums.extend(of.own.iter().chain(&of.many));
                    sums.extend([of.most, of.row, of.shared, of.certain]);
                    sums
                };
                for (at, (one, other)) in sums(&row).into_iter().zip(sums(&plain)).enumerate() {
                    let apart = (one - other).abs();
                    // What is left of the variance without storing has lost digits in one of them.
                    let near = if (11..15).contains(&at) { 1e-5 } else { 1e-10 };
                    assert!(apart <= near * other.abs() + 1e-25, "{at}: {one:e}, not {other:e}");
                }
            }
        }
    }
}
