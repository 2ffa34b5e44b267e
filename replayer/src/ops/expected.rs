//! What a stage of an op should be, with the error that rounding may have brought to it.

use std::ops::Range;

use rayon::prelude::*;

use super::table::{Op, Reduction, Stage};
use crate::kernels::matrix::Matrix;
use crate::kernels::number::Number;
use crate::kernels::policy::Sum;
use crate::kernels::round::Precision;
use crate::kernels::uncertain::{Roundings, Uncertain};

/// Columns that one worker sums over all rows.
const CHUNK: usize = 256;

/// Values and variances, `[rows, columns]` each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// In exact arithmetic.
    pub values: Vec<f64>,
    /// Variance of the error that is each element's own.
    pub own: Vec<f64>,
    /// Variance of the error that the elements of a row share.
    pub row: Vec<f64>,
    /// Variance of the error that all elements share; empty for none.
    pub shared: Vec<f64>,
}

/// Where the elements of an input of a stage come from.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// Recorded, and nothing was computed to have it.
    Given(Matrix<'a>),
    /// A recorded stage: the job may have gone on with what it had before it stored this.
    Recorded(Matrix<'a>, Option<Precision>),
    /// A stage that was not recorded.
    Computed(&'a Expected),
}

/// An input of a stage: its elements, and how far apart those of the next row and column are.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Where they come from.
    pub source: Source<'a>,
    /// 0 where all rows have the same.
    pub row_stride: usize,
    /// 0 where all columns have the same.
    pub column_stride: usize,
}

/// What arithmetic rounds.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    /// What single operations are done in.
    pub compute: Precision,
    /// What the result of a whole step may be kept in.
    pub between: Option<Precision>,
    /// How sums are taken.
    pub sum: Sum,
}

impl Arithmetic {
    /// What numbers round that are computed so.
    pub(super) fn roundings(&self) -> Roundings {
        // In an f64 job the reference errs as much as the job does, so both count.
        let unit = Sum { precision: self.compute, ..self.sum }.unit();
        Roundings::new(unit, self.between).above(self.compute.smallest_subnormal())
    }
}

impl Input<'_> {
    /// An element, with the error that it may have.
    pub(super) fn number<'r>(&self, at: usize, roundings: &'r Roundings) -> Uncertain<'r> {
        match self.source {
            Source::Given(matrix) => roundings.exact(matrix.get_f64(at)),
            Source::Recorded(matrix, stored) => {
                let value = matrix.get_f64(at);
                let deviation = stored.map_or(0.0, |precision| precision.deviation(value));
                roundings.with_variance(value, deviation * deviation)
            }
            Source::Computed(of) => {
                let shared = of.shared.get(at).copied().unwrap_or(0.0);
                let (value, own, row) = (of.values[at], of.own[at] + shared, of.row[at]);
                match self.row_stride > 0 && self.column_stride > 0 {
                    true => roundings.with_errors(value, own, row),
                    false => roundings.with_variance(value, own + row),
                }
            }
        }
    }
}

/// One stage of an op on its inputs.
pub struct Evaluation<'a, O> {
    /// The op with its options.
    pub op: &'a O,
    /// Which of its stages.
    pub stage: usize,
    /// In the order of the stage's row in the table.
    pub inputs: &'a [Input<'a>],
    /// What its arithmetic rounds.
    pub arithmetic: Arithmetic,
}

impl<O: Op> Evaluation<'_, O> {
    /// The stage's elements over a plane of `rows` x `columns`; both are those of the stage itself
    /// where its elements are made one by one.
    pub fn expected(&self, rows: usize, columns: usize) -> Expected {
        let stage: &Stage = &self.op.stages()[self.stage];
        match stage.reduction {
            Reduction::Each => self.each(rows, columns),
            Reduction::OverColumns => self.over_columns(rows, columns),
            Reduction::OverRows => self.over_rows(rows, columns),
        }
    }

    /// Calls `element` with each element of a row, its errors told apart from those that the row
    /// shares: those of the inputs that have one element a row.
    fn row<'r>(
        &self,
        row: usize,
        columns: Range<usize>,
        roundings: &'r Roundings,
        element: &mut dyn FnMut(usize, Uncertain<'r>),
    ) {
        roundings.begin_row();
        let at = |input: &Input<'_>, column: usize| {
            row * input.row_stride + column * input.column_stride
        };
        let is_of_row = |input: &&Input<'_>| input.column_stride == 0 && columns.len() > 1;
        let mut numbers: Vec<Uncertain<'r>> = self
            .inputs
            .iter()
            .map(|input| roundings.exact(input.values_at(at(input, 0))))
            .collect();
        for (number, input) in numbers.iter_mut().zip(self.inputs) {
            if is_of_row(&input) {
                *number = input.number(at(input, 0), roundings);
            }
        }
        roundings.reserve();
        roundings.share();
        for column in columns.clone() {
            roundings.begin_element();
            for (number, input) in numbers.iter_mut().zip(self.inputs) {
                if !is_of_row(&input) {
                    *number = input.number(at(input, column), roundings);
                }
            }
            element(column, self.op.element(self.stage, &numbers));
        }
    }

    fn each(&self, rows: usize, columns: usize) -> Expected {
        let size = rows * columns;
        let zeros = || vec![0.0; size];
        let mut expected =
            Expected { values: zeros(), own: zeros(), row: zeros(), shared: Vec::new() };
        let Expected { values, own, row, .. } = &mut expected;
        let width = columns.max(1);
        (values.par_chunks_mut(width), own.par_chunks_mut(width), row.par_chunks_mut(width))
            .into_par_iter()
            .enumerate()
            .for_each(|(at, (values, own, shared))| {
                let counts = self.op.shared_roundings(self.stage);
                let roundings = self.arithmetic.roundings().sharing(counts);
                self.row(at, 0..columns, &roundings, &mut |column, number| {
                    values[column] = number.value;
                    (own[column], shared[column]) = number.variances();
                    // The errors that a single row shares are one error of the whole stage, which
                    // has no tail: all of its sources at their largest are the largest there is.
                    if rows == 1 {
                        let most: f64 = number.shared().iter().map(|c| c.abs()).sum();
                        shared[column] = most * most;
                    }
                });
            });
        expected
    }

    fn over_columns(&self, rows: usize, columns: usize) -> Expected {
        let one = |row: usize| {
            let roundings = self.arithmetic.roundings();
            let mut sum = Summed::default();
            let mut shared: Vec<f64> = Vec::new();
            self.row(row, 0..columns, &roundings, &mut |_, addend| {
                sum.add(addend.value, addend.variances().0, self.arithmetic.sum.precision);
                shared.resize(addend.shared().len(), 0.0);
                shared.iter_mut().zip(addend.shared()).for_each(|(sum, c)| *sum += c);
            });
            roundings.begin_element();
            let mut total = roundings.with_variance(sum.total(), sum.variance(&self.arithmetic));
            total.add_shared(&shared);
            let [number, emulated] = self.finished(total, &sum);
            let (own, row) = number.variances();
            let own = own + row + lost_near_zero(sum.count, 1.0, &self.arithmetic);
            Finished { value: number.value, own, row: 0.0, emulated: emulated.value }
        };
        Expected::of_sums(&(0..rows).into_par_iter().map(one).collect::<Vec<_>>())
    }

    fn over_rows(&self, rows: usize, columns: usize) -> Expected {
        let chunks: Vec<Range<usize>> =
            (0..columns).step_by(CHUNK).map(|from| from..(from + CHUNK).min(columns)).collect();
        let chunk = |columns: Range<usize>| {
            let roundings = self.arithmetic.roundings();
            let mut sums = vec![(Summed::default(), 0.0); columns.len()];
            let mut addends = vec![Vec::new(); columns.len()];
            for row in 0..rows {
                self.row(row, columns.clone(), &roundings, &mut |column, addend| {
                    let (own, shared) = addend.variances();
                    let (sum, of_rows) = &mut sums[column - columns.start];
                    sum.add(addend.value, own, self.arithmetic.sum.precision);
                    *of_rows += shared;
                    if rows <= FEW {
                        addends[column - columns.start].push(addend.value);
                    }
                });
            }
            for ((sum, _), addends) in sums.iter_mut().zip(&mut addends) {
                let ways = self.op.groupings().iter().filter(|way| way.len() == addends.len());
                let ways = ways.map(|way| in_groups(addends, way, self.arithmetic.sum));
                sum.grouped = ways.fold(0.0, f64::max);
                sum.copies = copies(addends);
                sum.vanishing = vanishing(addends, self.arithmetic.sum.precision);
            }
            sums.iter().map(|(sum, of_rows)| self.of_rows(sum, *of_rows)).collect::<Vec<_>>()
        };
        let all: Vec<Vec<Finished>> = chunks.into_par_iter().map(chunk).collect();
        Expected::of_sums(&all.concat())
    }

    /// A sum over rows; the errors of numbers that rows share, of this variance in the sum, reach
    /// all columns.
    fn of_rows(&self, sum: &Summed, of_rows: f64) -> Finished {
        let roundings = self.arithmetic.roundings();
        let mut total = roundings.with_variance(sum.total(), of_rows);
        roundings.reserve();
        roundings.share();
        total = total + roundings.with_variance(0.0, sum.variance(&self.arithmetic));
        let [number, emulated] = self.finished(total, sum);
        let (own, row) = number.variances();
        let own = own + lost_near_zero(sum.count, sum.copies, &self.arithmetic);
        Finished { value: number.value, own, row, emulated: emulated.value }
    }

    /// What becomes of a sum, and of the same as a job's accumulator has it.
    fn finished<'r>(&self, total: Uncertain<'r>, sum: &Summed) -> [Uncertain<'r>; 2] {
        let emulated = total.constant(sum.emulated);
        [total, emulated].map(|of| self.op.finish(self.stage, of, sum.count))
    }
}

/// An element that a sum became.
#[derive(Clone, Copy)]
struct Finished {
    value: f64,
    own: f64,
    row: f64,
    /// What a job makes of it that adds one after the other.
    emulated: f64,
}

impl Expected {
    /// Sums of many addends of few bits may all err to one side: the low bits of squares are more
    /// often small than large. How far is seen on the data, from an emulated sum: the factor that
    /// the elements have in common there may be in those of the job.
    fn of_sums(all: &[Finished]) -> Expected {
        let of = |each: fn(&Finished) -> f64| all.iter().map(each).collect::<Vec<f64>>();
        let finite = || all.iter().filter(|x| x.value.is_finite() && x.emulated.is_finite());
        let along: f64 = finite().map(|x| (x.emulated - x.value) * x.value).sum();
        let energy: f64 = finite().map(|x| x.value * x.value).sum();
        let factor = if energy > 0.0 { along / energy } else { 0.0 };
        let shared = all.iter().map(|x| (factor * x.value).powi(2)).collect();
        Expected { values: of(|x| x.value), own: of(|x| x.own), row: of(|x| x.row), shared }
    }
}

impl Input<'_> {
    fn values_at(&self, at: usize) -> f64 {
        match self.source {
            Source::Given(matrix) | Source::Recorded(matrix, _) => matrix.get_f64(at),
            Source::Computed(of) => of.values[at],
        }
    }
}

/// A sum that grows evenly to r has the share `2^k / r` of its additions in the binade from `2^k` on, in
/// which each errs by `u 2^k` at most. Where those of one binade err by one error their squares are
/// `Σ (2^k / r)² (u 2^k)² ≤ u² r² / 14.7` an addition, instead of `u² r² / 3`.
const EVENLY: f64 = 4.9;

/// Addends up to which copies are looked for: more than a job has ranks that could have the same.
const FEW: usize = 4096;

/// How many copies the addends of a sum have, each weighed by its square. Equal addends are rounded by
/// one error, and adding them within one binade errs by one error each time: `m` equal errors of
/// variance `v` sum to a variance of `m² v`, and not `m v`.
fn copies(addends: &mut [f64]) -> f64 {
    addends.sort_by(f64::total_cmp);
    let alike: f64 = addends.chunk_by(|a, b| a == b).map(|of| of.iter().sum::<f64>().powi(2)).sum();
    let squares: f64 = addends.iter().map(|x| x * x).sum();
    // Where all are 0, or one is no number, there is nothing to tell.
    (alike / squares).max(1.0)
}

/// What those addends come to that are less than half the smallest number of the accumulator. Where a
/// job divides each of them before it adds them up they are nothing, to one side if they have one sign.
fn vanishing(addends: &[f64], accumulator: Precision) -> f64 {
    let half = accumulator.smallest_subnormal() / 2.0;
    addends.iter().filter(|x| x.abs() <= half).sum()
}

/// Variance of additions that sum groups of addends, and then these sums. Where the groups cancel, what
/// each was rounded by is larger than what a sum in another order is.
fn in_groups(addends: &[f64], groups: &[usize], sum: Sum) -> f64 {
    let count = groups.iter().max().map_or(0, |last| last + 1);
    let mut of = vec![[0.0; 3]; count];
    for (x, group) in addends.iter().zip(groups) {
        let [count, total, squares] = &mut of[*group];
        (*count, *total, *squares) = (*count + 1.0, *total + x, *squares + x * x);
    }
    let inside = of.iter().map(|[count, total, squares]| sum.variance(*count, *total, *squares));
    let totals = || of.iter().map(|[_, total, _]| total);
    let squares = totals().map(|total| total * total).sum();
    inside.sum::<f64>() + sum.variance(count as f64, totals().sum(), squares)
}

/// A sum of some addends.
#[derive(Clone, Copy, Default)]
struct Summed {
    sum: f64,
    /// What the additions rounded off (Neumaier 1974).
    lost: f64,
    count: f64,
    squares: f64,
    /// Variance of the addends' own errors.
    own: f64,
    /// The sum in a job's accumulator, one addend after the other.
    emulated: f64,
    /// How many copies an addend has, itself included, where that is more than 1.
    copies: f64,
    /// What of it vanishes in the accumulator, addend by addend.
    vanishing: f64,
    /// Variance of its additions where groups of addends are added first; 0 where there are none.
    grouped: f64,
}

/// Variance of what so many additions lose near 0, where an addition, and the division of an
/// addend before it, may be off by half the smallest number of the accumulator. Addends of which
/// there are so many copies are brought to its format by one error; adding them errs by none there.
pub(super) fn lost_near_zero(count: f64, copies: f64, arithmetic: &Arithmetic) -> f64 {
    let half = arithmetic.sum.precision.smallest_subnormal() / 2.0;
    count * copies.max(2.0) * half * half
}

impl Summed {
    fn add(&mut self, x: f64, own: f64, accumulator: Precision) {
        let sum = self.sum + x;
        let (large, small) = if self.sum.abs() >= x.abs() { (self.sum, x) } else { (x, self.sum) };
        // Where the sum is infinite what was lost is NaN, and so is the total.
        self.lost += (large - sum) + small;
        self.sum = sum;
        self.count += 1.0;
        self.squares += x * x;
        self.own += own;
        self.emulated = accumulator.round64(self.emulated + x);
    }

    fn total(&self) -> f64 {
        self.sum + self.lost
    }

    /// Of the addends' errors and of their addition.
    fn variance(&self, arithmetic: &Arithmetic) -> f64 {
        let adding = |total: f64| arithmetic.sum.variance(self.count, total, self.squares);
        let copies = self.copies.max(1.0);
        let alike = copies * adding(self.total() / EVENLY.sqrt());
        let vanishing = self.vanishing * self.vanishing;
        self.own * copies + adding(self.total()).max(alike).max(self.grouped) + vanishing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use crate::kernels::policy::Order;

    /// Goal: the same small number many times, as of microbatches that are one, is brought to f16 by
    /// one error each time, which the sum has as often. Method: sums of copies among the smallest
    /// numbers of f16.
    #[test]
    fn copies_among_the_smallest_numbers_err_by_one_error() {
        let (mut draw, f16) = (Draw::new(67), Precision::F16);
        let sum = Sum { precision: f16, order: Order::Sequential };
        let arithmetic = Arithmetic { compute: Precision::F32, between: None, sum };
        for copies in [1.0, 4.0, 16.0] {
            let errors = (0..4000).map(|_| {
                let x = 4e-6 * draw.normal();
                (copies * (f16.round64(x) - x)).powi(2)
            });
            let found = errors.sum::<f64>() / 4000.0;
            let allowed = lost_near_zero(copies, copies, &arithmetic);
            assert!(found < 1.1 * allowed, "{copies} copies: {found} of {allowed}");
            assert!(found > 0.05 * allowed, "{copies} copies: too wide, {found} of {allowed}");
        }
    }

    /// Goal: the small gradients of many ranks and microbatches, each divided by the number of ranks
    /// before they are added up in f16, vanish one by one. Method: addends about a third of the
    /// smallest number, all positive.
    #[test]
    fn addends_that_vanish_one_by_one_are_no_finding() {
        let (mut draw, f16) = (Draw::new(71), Precision::F16);
        let third = f16.smallest_subnormal() / 3.0;
        let addends: Vec<f64> = (0..48).map(|_| third * (1.0 + 0.3 * draw.normal())).collect();
        let (sum, kept): (f64, f64) =
            addends.iter().fold((0.0, 0.0), |(sum, kept), x| (sum + x, kept + f16.round64(*x)));
        let allowed = vanishing(&addends, f16);
        assert!((sum - kept).abs() <= 1.3 * allowed.abs(), "{} of {allowed}", sum - kept);
        assert_eq!(vanishing(&[third, -third, 5.0 * third], f16), 0.0);
    }
}
