//! How much rounding can produce, at a stated false-alarm probability.
//!
//! The error of an element has three parts: one of its own (variance `v`), one that is the same
//! relative error along its row (variance `ρ`: a rounded scalar that multiplies the whole row), and
//! one that is the same in the whole stage (variance `c`: a constant such as 1/N that rounds the
//! same for every token). These statistics are bounded, each to be exceeded with probability
//! `exp(-x)`:
//!
//! - energy: `Σ a Z²` of independent normal `Z` stays below
//!   `Σa + 2√(x Σa²) + 2x max a` (Laurent and Massart 2000, lemma 1). In a row
//!   the `a` are its `v` and, as one, the sum of its `ρ`; in a stage the rows'
//!   sums of `ρ` are independent of each other;
//! - one element: `√(2x (v + ρ))`, the normal tail;
//! - slope `⟨e, ref⟩/⟨ref, ref⟩`: a normal whose variance is `Σ v ref²` and,
//!   for each row, `(Σ √ρ |ref|)²`, over `⟨ref, ref⟩²`.
//!
//! A fourth part of the error is *certain*: an amount that the job is known to leave out, or to
//! lose always with the same sign (by a gradient filter, or in an accumulator of few bits). It is
//! added to every bound as it is. The bound of the slope also gets the slope that storing the
//! reference itself in few bits has: values that lie near each other are rounded by the same error.
//!
//! A single rounding error is never larger than half a spacing, which a normal tail does not know.
//! Where a few roundings make up most of `v`, their largest possible sum, `most`, is less than the
//! tail: so each statistic is bounded twice, by the tail of all of `v`, and by the tail of the rest
//! of `v` plus `most`, and the smaller bound is taken.
//!
//! `c` is the variance of rounding one number, whose error is at most half a spacing, or √3
//! standard deviations: it adds `√(3c)` and has no tail.
//!
//! Rounding errors are bounded, so their tails are lighter than those of a normal distribution: the
//! bounds hold with a margin, which is not a tuned constant.

use serde::{Deserialize, Serialize};

use super::row::AllowedSums;

/// Probability that a clean run is called diverged, for a whole report.
pub const FALSE_ALARM: f64 = 1e-4;

/// The square of the largest error of one rounding, divided by its variance: half a spacing is √3
/// standard deviations of a uniform error.
pub const ONE_ROUNDING: f64 = 3.0;

/// A sum of products below this may lack some that f64 has not: the smallest normal f64 for each of a
/// thousand million billion of them.
pub(super) const VANISHING: f64 = 1e-284;

/// The exponents that share one false-alarm probability out over every test of
/// a report (union bound).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// For statistics of a whole stage.
    pub stage: f64,
    /// For statistics of one row.
    pub row: f64,
    /// For one element.
    pub element: f64,
    /// Whether a reference that is not finite predicts a captured value that is not finite either.
    /// Only so when the reference is that of a hypothesis.
    pub nan_is_meant: bool,
    /// Whether scores and [`super::measures`] are computed too: reports show them, and no verdict
    /// needs them.
    pub measured: bool,
}

impl Bound {
    /// For a report that compares `comparisons` stages; the largest has this many rows and
    /// elements. Four statistics (the energies of stage and row, element, slope) share the
    /// probability, and normal tails have two sides.
    pub fn new(comparisons: usize, rows: usize, elements: usize) -> Bound {
        let share = |tests: usize| {
            (8.0 * comparisons.max(1) as f64 * tests.max(1) as f64 / FALSE_ALARM).ln()
        };
        let (stage, row, element) = (share(1), share(rows), share(elements));
        Bound { stage, row, element, nan_is_meant: false, measured: true }
    }
}

/// The error that rounding may make in one element, as variances but for `most` and `certain`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Allowed {
    /// Variance of the errors that are independent of those of other elements.
    pub own: f64,
    /// The part of `own` that comes from few roundings, whose sum has a largest value.
    pub few: f64,
    /// Largest error, not variance, of those few.
    pub most: f64,
    /// Variance of the relative error that its row shares.
    pub row: f64,
    /// Variance of the relative error that the whole stage shares.
    pub shared: f64,
    /// Largest error, not variance, from what the job is known to leave out or lose; it has no
    /// tail.
    pub certain: f64,
}

impl Allowed {
    /// The variance of the element's error.
    pub fn total(&self) -> f64 {
        self.own + self.row + self.shared + self.certain * self.certain
    }

    /// The error allowed in the element times a factor.
    pub fn times(self, factor: f64) -> Allowed {
        let square = factor * factor;
        Allowed {
            own: self.own * square,
            few: self.few * square,
            most: self.most * factor.abs(),
            row: self.row * square,
            shared: self.shared * square,
            certain: self.certain * factor.abs(),
        }
    }

    /// Adds the rounding of storing, of this variance. `again`: the job stored the element,
    /// multiplied it by a factor and stored the product, and the factor was rounded too, with the
    /// same error in the whole stage.
    pub fn stored(self, storage: f64, again: bool) -> Allowed {
        match again {
            false => Allowed { own: self.own + storage, ..self },
            true => {
                Allowed { own: self.own + 2.0 * storage, shared: self.shared + storage, ..self }
            }
        }
    }

    /// Adds few roundings of this total variance, whose errors sum to `most` at most.
    pub fn with_few(self, variance: f64, most: f64) -> Allowed {
        let (own, few) = (self.own + variance, self.few + variance);
        Allowed { own, few, most: self.most + most, ..self }
    }

    /// The absolute error that is exceeded with probability `exp(-x)` at most.
    pub fn reach(&self, x: f64) -> f64 {
        let many = (self.own - self.few).max(0.0);
        let apart = (2.0 * x * (many + self.row)).sqrt() + self.most;
        (2.0 * x * (self.own + self.row)).sqrt().min(apart)
            + (ONE_ROUNDING * self.shared).sqrt()
            + self.certain
    }
}

impl std::ops::Add for Allowed {
    type Output = Allowed;
    fn add(self, other: Allowed) -> Allowed {
        Allowed {
            own: self.own + other.own,
            few: self.few + other.few,
            most: self.most + other.most,
            row: self.row + other.row,
            shared: self.shared + other.shared,
            certain: self.certain + other.certain,
        }
    }
}

/// Variances of independent errors: their sum, the sum of their squares and the largest, as the
/// energy bound needs them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Independent {
    sum: f64,
    squares: f64,
    largest: f64,
}

impl Independent {
    fn of([sum, squares, largest]: [f64; 3]) -> Independent {
        Independent { sum, squares, largest }
    }

    /// Adds errors of which each is one of `repeats` equal ones: the energy of `m` equal errors of
    /// variance `a` is that of one error of variance `m a`, so each `a²` counts `m` times.
    fn merge(&mut self, other: &Independent, repeats: f64) {
        self.sum += other.sum;
        self.squares += repeats * other.squares;
        self.largest = self.largest.max(repeats * other.largest);
    }

    fn energy(&self, x: f64) -> f64 {
        // Squares of small variances are no numbers of f64, and their sum is no more than the largest
        // of them times all.
        let squares = match self.squares < VANISHING {
            true => self.sum.max(0.0).sqrt() * self.largest.max(0.0).sqrt(),
            false => self.squares.sqrt(),
        };
        self.sum + 2.0 * x.sqrt() * squares + 2.0 * x * self.largest
    }
}

/// The sums of allowed variances of a group of rows, from which their energy is bounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    own: Independent,
    /// `own` without the few roundings, and the largest energy of these.
    many: Independent,
    most: f64,
    rows: Independent,
    shared: f64,
    certain: f64,
}

impl Budget {
    /// The budget of one row, from the sums over its elements.
    pub fn of_sums(sums: &AllowedSums) -> Budget {
        let AllowedSums { own, many, most, row, shared, certain } = *sums;
        let (own, many) = (Independent::of(own), Independent::of(many));
        // An error that the elements of a row share counts as one.
        let rows = Independent::of([row, row * row, row.max(0.0)]);
        Budget { own, many, most, rows, shared, certain }
    }

    /// The budget of one row.
    #[cfg(test)]
    fn of_row(elements: impl Iterator<Item = Allowed>) -> Budget {
        Budget::of_sums(&AllowedSums::of(elements))
    }

    /// Adds other rows.
    pub fn merge(&mut self, other: &Budget) {
        self.merge_repeated(other, 1.0);
    }

    /// Adds a row that is one of `repeats` rows with equal errors, such as copies of a token.
    pub fn merge_repeated(&mut self, other: &Budget, repeats: f64) {
        self.own.merge(&other.own, repeats);
        self.many.merge(&other.many, repeats);
        self.most += other.most;
        self.rows.merge(&other.rows, repeats);
        self.shared += other.shared;
        self.certain += other.certain;
    }

    /// The expected energy, which is shown as the floor where none was emulated.
    pub fn expected(&self) -> f64 {
        self.own.sum + self.rows.sum + self.shared + self.certain
    }

    /// The largest variance of an element's own error, times the number of elements that have it.
    pub(super) fn largest(&self) -> f64 {
        self.own.largest
    }

    /// The energy that is exceeded with probability `exp(-x)` at most. Errors of different kinds
    /// may have the same sign, so their amplitudes are added, not their energies.
    pub fn energy(&self, x: f64) -> f64 {
        let amplitude = |energy: f64| energy.max(0.0).sqrt();
        let (shared, certain) = (ONE_ROUNDING * self.shared, self.certain);
        let apart = amplitude(self.many.energy(x)) + amplitude(self.most);
        let own = amplitude(self.own.energy(x)).min(apart);
        let random = own + amplitude(self.rows.energy(x));
        (random + amplitude(shared) + amplitude(certain)).powi(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed_variance(variance: f64) -> Allowed {
        Allowed { own: variance, ..Allowed::default() }
    }

    #[test]
    fn the_bound_tightens_to_the_expectation_for_many_equal_elements() {
        let budget = Budget::of_row((0..1_000_000).map(|_| allowed_variance(1.0)));
        let excess = budget.energy(20.0) / budget.expected();
        assert!((1.0..1.02).contains(&excess), "{excess}");
    }

    #[test]
    fn one_element_may_err_by_several_standard_deviations() {
        assert!(Budget::of_row([allowed_variance(1.0)].into_iter()).energy(16.0) > 32.0);
    }

    #[test]
    fn a_row_that_errs_as_one_may_err_more_and_many_such_rows_may_not() {
        let alike = Allowed { row: 1.0, ..Allowed::default() };
        let row = || Budget::of_row((0..100).map(|_| alike));
        assert!(row().energy(16.0) > 40.0 * row().expected());
        let mut many = Budget::default();
        (0..100_000).for_each(|_| many.merge(&row()));
        assert!(many.energy(16.0) < 1.1 * many.expected());
    }

    /// Goal: rows that are copies of each other do not count as independent errors.
    #[test]
    fn a_hundred_equal_rows_may_err_as_much_as_one_a_hundred_times_as_large() {
        let row = |variance| Budget::of_row([allowed_variance(variance)].into_iter());
        let mut copies = Budget::default();
        (0..100).for_each(|_| copies.merge_repeated(&row(1.0), 100.0));
        let (energy, wanted) = (copies.energy(16.0), row(100.0).energy(16.0));
        assert!((energy / wanted - 1.0).abs() < 1e-9, "{energy} {wanted}");
    }

    /// Goal: two rounded parts that nearly cancel do not explain an error beyond half a spacing of
    /// each. Method: two roundings to bf16, at the exponent of a very long report.
    #[test]
    fn few_roundings_are_never_further_off_than_half_a_spacing_of_each() {
        let u = f64::powi(2.0, -8);
        let parts = Allowed::default().with_few(2.0 * u * u / 3.0, 2.0 * u);
        assert_eq!(parts.reach(22.0), 2.0 * u);
        let beside = parts + allowed_variance(1e-2 * u * u);
        assert!(beside.reach(22.0) < 2.7 * u && beside.reach(1.0) < beside.reach(22.0));
        assert!(parts.reach(0.1) < u, "where the tail is shorter it is the bound");
        let row = Budget::of_row((0..2).map(|_| parts));
        assert!(row.energy(16.0) <= 2.0 * (2.0 * u).powi(2) * (1.0 + 1e-12));
    }

    #[test]
    fn the_more_is_tested_the_more_a_single_test_must_exceed() {
        let (few, many) = (Bound::new(1, 10, 10), Bound::new(50, 10_000, 10_000));
        assert!(many.element > few.element && many.stage > few.stage);
    }
}
