//! Compares the captured values of a stage with the reference in one pass: error, energy, slope,
//! worst element, worst rows. Values that are not finite are counted first and pass no bound: every
//! test is written `!(error <= bound)`.

use backtape::nan::{by_size, larger};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::bound::{Allowed, Bound, Budget, ONE_ROUNDING, VANISHING};
use super::lanes::Row;
use super::measures::{Measures, cosine};
use super::row::{Element, Look, RowTally};
use super::ulp::Format;
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;

/// Rows that one thread adds up at a time; fixed, so that sums do not depend on the thread count.
const CHUNK: usize = 64;
/// How many of the worst rows are kept for a report.
const KEPT: usize = 16;

/// One element that stands out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Row and column.
    pub index: (u64, u64),
    /// The value in the dump.
    pub captured: f64,
    /// The value recomputed in f64.
    pub reference: f64,
    /// |captured - reference| over the allowed standard deviation.
    pub score: f64,
}

/// One row whose error is larger than rounding can explain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowExcess {
    /// Row index in the tensor.
    pub row: u64,
    /// Relative error of the row.
    pub error: f64,
    /// Error over what is expected of the declared precision.
    pub ratio: f64,
}

/// The rows that one call compares.
pub struct Rows<'a> {
    /// Captured values.
    pub captured: Matrix<'a>,
    /// Reference values, the same shape.
    pub reference: &'a [f64],
    /// The tensor's row index of each row here.
    pub index: &'a (dyn Fn(usize) -> u64 + Sync),
    /// How many rows of the stage are copies of this one, itself included: equal
    /// inputs round alike, so their errors are one error.
    pub repeats: &'a (dyn Fn(usize) -> f64 + Sync),
}

/// `repeats` for stages whose rows are all computed from different inputs.
pub fn once(_row: usize) -> f64 {
    1.0
}

/// The smallest faults that a comparison would have found, relative to its reference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SeenFrom {
    /// An error that is independent of the rounding errors, in the Frobenius norm.
    pub noise: f64,
    /// A wrong factor of all values, as its distance from 1.
    pub factor: f64,
}

impl SeenFrom {
    /// The smallest faults that both of two comparisons would have found.
    pub fn in_both(self, other: SeenFrom) -> SeenFrom {
        let (noise, factor) = (larger(self.noise, other.noise), larger(self.factor, other.factor));
        SeenFrom { noise, factor }
    }
}

/// What is known of a stage after its values were compared.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// Elements compared.
    pub elements: u64,
    /// Rows compared.
    pub rows: u64,
    /// Captured values that are not finite, or whose reference is not.
    pub nonfinite: u64,
    /// The first of them.
    pub first_nonfinite: Option<Worst>,
    /// Sum of squared errors.
    pub error_energy: f64,
    /// Sum of the squares of the rows' error energies, where equal rows count as a single row with
    /// their total energy.
    error_squares: f64,
    /// Sum of squared reference values.
    pub reference_energy: f64,
    /// Sum of squared captured values.
    pub captured_energy: f64,
    /// Largest absolute error.
    pub max_abs: f64,
    /// The allowed variances of the whole stage, from which its energy is bounded.
    pub budget: Budget,
    /// The element of the largest score.
    pub worst: Option<Worst>,
    /// The first element above its bound.
    pub first: Option<Worst>,
    /// Elements above their bound.
    pub exceeding: u64,
    /// Rows above their bound.
    pub exceeding_rows: u64,
    /// The worst of them.
    pub worst_rows: Vec<RowExcess>,
    /// The measures that other tools have too.
    pub measures: Measures,
    /// Elements by |error| in allowed standard deviations.
    pub scores: [u64; 6],
    /// Error energy over its bound, of the element or row that is furthest beyond.
    beyond: f64,
    slope_variance: f64,
    slope_shared: f64,
    slope_certain: f64,
    /// `⟨stored(ref) - ref, ref⟩`: what storing the reference itself would add to `dot`.
    slope_stored: f64,
    dot: f64,
}

impl Tally {
    /// Compares rows; `allowed(row, column, reference)` is the error that the declared precision
    /// allows.
    pub fn of(
        rows: &Rows<'_>,
        allowed: impl Fn(usize, usize, f64) -> Allowed + Sync,
        bound: &Bound,
    ) -> Tally {
        rows.tally_by(|row| rows.look_at(row, &allowed, bound), bound)
    }

    /// Adds up rows of so many columns that were compared before; `index` and `repeats` as in
    /// [`Rows`].
    pub fn of_looked(
        (looked, columns): (&[RowTally], usize),
        index: &(dyn Fn(usize) -> u64 + Sync),
        repeats: &(dyn Fn(usize) -> f64 + Sync),
        bound: &Bound,
    ) -> Tally {
        let row = |row: usize| (looked[row], index(row), repeats(row));
        Tally::by((looked.len(), columns as u64), row, bound)
    }

    /// Adds up `count` rows of so many elements; `row` gives a row with its index and its number of
    /// copies.
    fn by(
        (count, elements): (usize, u64),
        row: impl Fn(usize) -> (RowTally, u64, f64) + Sync,
        bound: &Bound,
    ) -> Tally {
        let chunks: Vec<Tally> = (0..count.div_ceil(CHUNK))
            .into_par_iter()
            .map(|chunk| {
                let mut tally = Tally::default();
                for row_number in chunk * CHUNK..((chunk + 1) * CHUNK).min(count) {
                    let (row, index, repeats) = row(row_number);
                    tally.add(&row, (index, elements), repeats, bound);
                }
                tally
            })
            .collect();
        let mut total = Tally::default();
        chunks.into_iter().for_each(|chunk| total.merge(chunk));
        total
    }
}

impl Rows<'_> {
    /// Compares every element of every row, as [`Tally::of`] does, and returns the rows.
    pub fn looked_at(
        &self,
        allowed: impl Fn(usize, usize, f64) -> Allowed + Sync,
        bound: &Bound,
    ) -> Vec<RowTally> {
        let rows = (0..self.captured.rows).into_par_iter();
        rows.map(|row| self.look_at(row, &allowed, bound)).collect()
    }

    /// Adds up rows that were compared before, on the CPU or a GPU.
    pub fn tally(&self, looked: &[RowTally], bound: &Bound) -> Tally {
        Tally::of_looked((looked, self.captured.cols), self.index, self.repeats, bound)
    }

    /// Adds up some of the rows only; `rows` are indices into `looked`.
    pub fn tally_of(&self, rows: &[usize], looked: &[RowTally], bound: &Bound) -> Tally {
        if rows.len() == self.captured.rows {
            return self.tally(looked, bound);
        }
        let picked: Vec<RowTally> = rows.iter().map(|&row| looked[row]).collect();
        let index = |row: usize| (self.index)(rows[row]);
        let repeats = |row: usize| (self.repeats)(rows[row]);
        Tally::of_looked((&picked, self.captured.cols), &index, &repeats, bound)
    }

    fn look_at(
        &self,
        row: usize,
        allowed: &impl Fn(usize, usize, f64) -> Allowed,
        bound: &Bound,
    ) -> RowTally {
        let columns = self.captured.cols;
        let element = |column: usize| {
            let element = row * columns + column;
            let (captured, reference) = (self.captured.get_f64(element), self.reference[element]);
            Element { captured, reference, allowed: allowed(row, column, reference) }
        };
        let format = Format::of_values(&self.captured.values);
        RowTally::of((0..columns).map(element), format, &Look::of(bound))
    }

    fn tally_by(&self, of_row: impl Fn(usize) -> RowTally + Sync, bound: &Bound) -> Tally {
        let row = |row: usize| (of_row(row), (self.index)(row), (self.repeats)(row));
        Tally::by((self.captured.rows, self.captured.cols as u64), row, bound)
    }
}

impl Tally {
    /// Adds one row, which is one of `repeats` rows with equal errors.
    fn add(&mut self, row: &RowTally, (index, elements): (u64, u64), repeats: f64, bound: &Bound) {
        let budget = row.budget();
        let [first_nonfinite, first, worst] = &row.spots;
        let most = budget.energy(bound.row);
        let mut worst_rows = Vec::new();
        let (mut beyond, mut exceeding_rows) = (row.beyond, 0);
        if !(row.error <= most) {
            exceeding_rows = 1;
            beyond = larger(beyond, row.error / most);
            worst_rows.push(RowExcess {
                row: index,
                error: (row.error / row.reference).sqrt(),
                ratio: (row.error / budget.expected()).sqrt(),
            });
        }
        let mut of_row = Budget::default();
        of_row.merge_repeated(&budget, repeats);
        let [independent, alike, shared, certain] = row.slope;
        self.merge(Tally {
            elements,
            rows: 1,
            nonfinite: row.nonfinite,
            first_nonfinite: first_nonfinite.worst(index),
            error_energy: row.error,
            error_squares: repeats * row.error * row.error,
            reference_energy: row.reference,
            captured_energy: row.captured,
            max_abs: row.max_abs,
            budget: of_row,
            worst: worst.worst(index),
            first: first.worst(index),
            exceeding: row.exceeding,
            exceeding_rows,
            worst_rows,
            measures: row.measures(index, elements),
            scores: row.scores.map(u64::from),
            beyond,
            slope_variance: repeats * independent + repeats * alike * alike,
            slope_shared: shared,
            slope_certain: certain,
            slope_stored: 0.0,
            dot: row.dot,
        });
    }

    /// Adds the tally of later rows of the same stage.
    pub fn merge(&mut self, other: Tally) {
        self.elements += other.elements;
        self.rows += other.rows;
        self.nonfinite += other.nonfinite;
        self.first_nonfinite = self.first_nonfinite.take().or(other.first_nonfinite);
        self.error_energy += other.error_energy;
        self.error_squares += other.error_squares;
        self.reference_energy += other.reference_energy;
        self.captured_energy += other.captured_energy;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.budget.merge(&other.budget);
        self.dot += other.dot;
        self.slope_variance += other.slope_variance;
        self.slope_shared += other.slope_shared;
        self.slope_certain += other.slope_certain;
        self.slope_stored += other.slope_stored;
        self.measures.merge(other.measures);
        self.scores.iter_mut().zip(other.scores).for_each(|(sum, n)| *sum += n);
        self.first = self.first.take().or(other.first);
        self.exceeding += other.exceeding;
        self.exceeding_rows += other.exceeding_rows;
        self.beyond = larger(self.beyond, other.beyond);
        if let Some(theirs) = other.worst
            && self.worst.as_ref().is_none_or(|ours| theirs.score > ours.score)
        {
            self.worst = Some(theirs);
        }
        if other.worst_rows.is_empty() {
            return;
        }
        self.worst_rows.extend(other.worst_rows);
        self.worst_rows.sort_by(|a, b| by_size(&b.ratio, &a.ratio).then(a.row.cmp(&b.row)));
        self.worst_rows.truncate(KEPT);
    }

    /// Relative error in the Frobenius norm; the absolute error when the reference is zero, and NaN
    /// where a value is not finite.
    pub fn error(&self) -> f64 {
        self.of_numbers(relative(self.error_energy, self.reference_energy))
    }

    /// A statistic of the finite elements; NaN if there are elements that are not finite.
    pub fn of_numbers(&self, of_finite: f64) -> f64 {
        if self.nonfinite > 0 { f64::NAN } else { of_finite }
    }

    /// How many rows hold the error's energy, if each held the same share of it (the
    /// participation ratio): 1 where one row, or copies of one, hold all of it.
    pub fn rows_in_error(&self) -> f64 {
        if self.error_squares > 0.0 {
            self.error_energy * self.error_energy / self.error_squares
        } else {
            0.0
        }
    }

    /// Cosine of the angle between captured and reference values.
    pub fn cosine(&self) -> f64 {
        let dot = self.dot + self.reference_energy;
        self.of_numbers(cosine(dot, self.captured_energy, self.reference_energy))
    }

    /// The relative error that the declared precision is expected to have.
    pub fn expected(&self) -> f64 {
        relative(self.budget.expected(), self.reference_energy)
    }

    /// `⟨captured, ref⟩/⟨ref, ref⟩ - 1`: negative when addends were swallowed.
    pub fn slope(&self) -> f64 {
        if self.reference_energy > 0.0 { self.dot / self.reference_energy } else { 0.0 }
    }

    /// The largest slope that rounding can produce.
    pub fn allowed_slope(&self, bound: &Bound) -> f64 {
        if self.reference_energy == 0.0 {
            return 0.0;
        }
        // Products of small variances and references are no numbers of f64: their sum is no more than
        // the largest variance times the energy of the reference.
        let deviation = match self.slope_variance < VANISHING {
            true => self.budget.largest().sqrt() * self.reference_energy.sqrt(),
            false => self.slope_variance.sqrt(),
        };
        let random = (2.0 * bound.stage).sqrt() * deviation;
        let shared = ONE_ROUNDING.sqrt() * self.slope_shared;
        (random + shared + self.slope_certain) / self.reference_energy
    }

    /// The same plus the slope of storing the reference itself, where that was computed.
    fn slope_with_storing(&self, bound: &Bound) -> f64 {
        match self.reference_energy {
            0.0 => 0.0,
            norm => self.allowed_slope(bound) + self.slope_stored.abs() / norm,
        }
    }

    /// How far apart rounding may bring the squares of the norms of captured and reference:
    /// `‖c‖² - ‖r‖² = 2⟨c - r, r⟩ + ‖c - r‖²`, of which the slope bounds the first term and the
    /// energy the second. Both squares are summed in f64, which errs by one rounding an addend at most.
    pub fn squares_apart(&self, bound: &Bound) -> f64 {
        let slope = 2.0 * self.slope_with_storing(bound) * self.reference_energy;
        let summed = self.elements as f64 * f64::EPSILON / 2.0;
        let summing = summed * (self.captured_energy + self.reference_energy);
        slope + self.budget.energy(bound.stage) + summing
    }

    /// The tally of one row that was compared block by block.
    pub(crate) fn of_row(row: Row, index: u64, bound: &Bound) -> Tally {
        let (row, columns, storing) = row.done();
        let mut tally = Tally::default();
        tally.add(&row, (index, columns as u64), 1.0, bound);
        tally.slope_stored = storing;
        tally
    }

    /// Adds to `slope_stored` that these values were stored in a format. Values that are nearly
    /// equal are rounded by the same error, which does not average out. In a format of few bits the
    /// rounding errors of the reference are those of the job. In f32 they are not, as the job's own
    /// arithmetic errs by as much: there every value may be off by one rounding, all with the same
    /// sign.
    pub(crate) fn stored_in(&mut self, format: Precision, reference: &[f64]) {
        let few = !format.keeps_f32();
        let error = |x: &f64| match few {
            true => (format.round64(*x) - x) * x,
            false => format.unit_roundoff() * x * x,
        };
        let chunk = |values: &[f64]| values.iter().filter(|x| x.is_finite()).map(error).sum();
        let sums = reference.par_chunks(CHUNK).map(chunk);
        self.slope_stored += sums.collect::<Vec<f64>>().iter().sum::<f64>();
    }

    /// The smallest faults that would have been found beside the errors that are there: an
    /// independent error, by the energy of the stage, and a common factor, by the slope. Both are
    /// relative to the reference; `None` where the reference is 0 or a value is not finite.
    pub fn seen_from(&self, bound: &Bound) -> Option<SeenFrom> {
        let room = self.budget.energy(bound.stage) - self.error_energy;
        let noise = relative(room.max(0.0), self.reference_energy);
        let factor = self.slope().abs() + self.allowed_slope(bound);
        let is_share = self.nonfinite == 0 && self.reference_energy > 0.0;
        (is_share && noise.is_finite() && factor.is_finite()).then_some(SeenFrom { noise, factor })
    }

    /// The largest ratio of an error energy to its bound, of all tests: more than 1 where a test
    /// fails; infinite where a value is not finite.
    pub fn overshoot(&self, bound: &Bound) -> f64 {
        let over = |used: f64, most: f64| if used == 0.0 { 0.0 } else { used / most };
        let whole = over(self.error_energy, self.budget.energy(bound.stage));
        let slope = over(self.slope().abs(), self.slope_with_storing(bound)).powi(2);
        let most = larger(larger(self.beyond, whole), slope);
        if self.nonfinite > 0 || most.is_nan() { f64::INFINITY } else { most }
    }

    /// Why finite values cannot be judged, if so: an error whose square overflows passes no bound,
    /// and an infinite bound lets every error pass.
    pub fn unjudged(&self, bound: &Bound) -> Option<String> {
        let energies = [self.error_energy, self.reference_energy, self.captured_energy];
        let bounds = [self.budget.energy(bound.stage), self.allowed_slope(bound)];
        let numbers = energies.into_iter().chain(bounds).all(f64::is_finite);
        let seen = self.nonfinite > 0 || self.exceeding > 0;
        (!seen && !numbers).then(|| {
            "its values, or what rounding may make of them, are so large that their squares are no f64 numbers".into()
        })
    }

    /// Why the stage is more wrong than rounding can explain, if it is.
    pub fn excess(&self, bound: &Bound) -> Option<String> {
        if self.nonfinite > 0 {
            return Some(format!("{} values are not finite", self.nonfinite));
        }
        if let Some(why) = self.unjudged(bound) {
            return Some(why);
        }
        if self.exceeding > 0 {
            let (n, all) = (self.exceeding, self.elements);
            return Some(format!(
                "{n} of {all} elements are further off than rounding can bring them"
            ));
        }
        if self.exceeding_rows > 0 {
            let (n, all) = (self.exceeding_rows, self.rows);
            return Some(format!("{n} of {all} rows have more error than rounding can explain"));
        }
        if !(self.error_energy <= self.budget.energy(bound.stage)) {
            return Some("the error as a whole is larger than rounding can explain".into());
        }
        if !(self.slope().abs() <= self.slope_with_storing(bound)) {
            let (slope, allowed) = (self.slope(), self.slope_with_storing(bound));
            return Some(format!(
                "the scale is off by {slope:+.2e}, rounding allows {allowed:.1e}"
            ));
        }
        None
    }
}

/// `√(error/norm)`; the absolute error where the norm is 0, and NaN where the norm overflows f64.
pub fn relative(error_energy: f64, reference_energy: f64) -> f64 {
    match reference_energy {
        0.0 => error_energy.sqrt(),
        norm if norm.is_finite() => (error_energy / norm).sqrt(),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::matrix::Values;

    fn tally(captured: &[f64], reference: &[f64], sigma: f64) -> (Tally, Bound) {
        let bound = Bound::new(10, captured.len(), captured.len());
        let rows = Rows {
            captured: Matrix { rows: captured.len() / 4, cols: 4, values: Values::F64(captured) },
            reference,
            index: &|row| row as u64 + 100,
            repeats: &once,
        };
        let allowed = |_, _, _| Allowed { own: sigma * sigma, ..Allowed::default() };
        (Tally::of(&rows, allowed, &bound), bound)
    }

    #[test]
    fn nan_never_passes_on_either_side() {
        for (captured, reference) in
            [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, f64::INFINITY)]
        {
            let (tally_of_nan, bound) =
                tally(&[captured, 1.0, 1.0, 1.0], &[reference, 1.0, 1.0, 1.0], 1e9);
            assert!(tally_of_nan.excess(&bound).is_some(), "{captured} {reference}");
        }
    }

    #[test]
    fn any_difference_fails_where_no_rounding_is_possible() {
        let (judged, bound) = tally(&[1.0, 0.0, 0.0, 1e-30], &[1.0, 0.0, 0.0, 0.0], 0.0);
        assert_eq!(judged.exceeding, 1);
        assert!(judged.excess(&bound).is_some());
        assert_eq!(judged.worst.unwrap().index, (100, 3));
    }

    #[test]
    fn a_small_common_scale_shows_as_slope_though_every_element_passes() {
        let reference: Vec<f64> = (0..40_000).map(|i| 1.0 + f64::from(i % 7)).collect();
        let captured: Vec<f64> = reference.iter().map(|x| x * 0.9990).collect();
        let (judged, bound) = tally(&captured, &reference, 0.02);
        assert_eq!((judged.exceeding, judged.exceeding_rows), (0, 0));
        assert!(judged.excess(&bound).unwrap().contains("scale"));
    }

    /// Goal: values that lie near each other are rounded by the same error, which is allowed; a
    /// factor that is wrong by more is not.
    #[test]
    fn a_scale_that_storing_the_reference_gives_is_allowed_and_a_larger_one_is_not() {
        let reference: Vec<f64> = (0..40_000).map(|i| 1.003 + 1e-5 * f64::from(i % 7)).collect();
        let stored: Vec<f64> = reference.iter().map(|&x| Precision::Bf16.round64(x)).collect();
        for (times, agrees) in [(1.0, true), (0.99, false)] {
            let captured: Vec<f64> = stored.iter().map(|x| x * times).collect();
            let (mut judged, bound) = tally(&captured, &reference, 0.02);
            assert!(judged.excess(&bound).is_some());
            judged.stored_in(Precision::Bf16, &reference);
            assert_eq!(judged.excess(&bound).is_none(), agrees, "{:?}", judged.excess(&bound));
        }
    }

    /// Goal: a fault of the size that `seen_from` returns fails, and half of it may pass. Method: a
    /// right stage plus a fault of just that size, orthogonal to the reference or along it.
    #[test]
    fn a_fault_of_the_size_that_is_seen_fails_and_half_of_it_passes() {
        let reference: Vec<f64> =
            (0..40_000).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let (clean, bound) = tally(&reference, &reference, 0.02);
        let seen = clean.seen_from(&bound).unwrap();
        let fails = |by: &dyn Fn(usize) -> f64| {
            let captured: Vec<f64> = (0..reference.len()).map(|i| reference[i] + by(i)).collect();
            let (judged, bound) = tally(&captured, &reference, 0.02);
            judged.excess(&bound).is_some()
        };
        for (size, wanted) in [(1.01, true), (0.5, false)] {
            assert_eq!(fails(&|i| size * seen.factor * reference[i]), wanted, "factor {size}");
            assert_eq!(fails(&|_| size * seen.noise), wanted, "noise {size}");
        }
        assert!(tally(&[0.0; 4], &[0.0; 4], 0.1).0.seen_from(&bound).is_none());
    }

    #[test]
    fn the_result_does_not_depend_on_the_thread_count() {
        let reference: Vec<f64> = (0..4_000).map(|i| f64::from(i).sin()).collect();
        let captured: Vec<f64> = reference.iter().map(|x| x * 1.001 + 1e-3).collect();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| tally(&captured, &reference, 1e-4).0)
        };
        assert_eq!(run(1), run(3));
    }
}
