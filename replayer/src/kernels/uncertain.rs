//! Numbers that carry the error which rounding may have brought: forward error propagation by the
//! type of number, in place of an allowance that is derived by hand for each formula.
//!
//! A number is a value and, for every rounding on its way, the standard deviation that this
//! rounding gives it, with its sign: `x + Σ_i c_i ε_i`, the ε_i independent, of variance 1
//! (first-order affine arithmetic; Stolfi and de Figueiredo 1997). Operations are linearised, so a
//! rounding that enters a formula twice, as that of `r` in `r g - r³ m x`, is counted as it adds up
//! or cancels. A rounding to nearest of unit roundoff u errs by `u |x| / √3` in the standard
//! deviation at most.

use std::cell::Cell;
use std::ops::{Add, Div, Mul, Sub};

use super::number::Number;
use super::round::Precision;

/// Roundings that are told apart. All further ones share the last place, as if they erred
/// together and nothing of them cancelled, which overstates the error.
pub(crate) const SOURCES: usize = 32;
pub(crate) const LAST: usize = SOURCES - 1;

/// Roundings of a formula that all elements may share: those of its scalars, and in a job that
/// keeps results of few bits those of steps that round equal elements alike.
const SCALARS: usize = 8;
const ALIKE: usize = 12;
/// How many of them a formula may have that says how many they are; its scalar inputs, each of
/// which has a place too, are among these. What is left is for each element's own.
pub(crate) const MOST_SHARED: usize = SOURCES - 6;

/// Relative to the unit roundoff, the largest change that a factor makes which is one number below 1:
/// the product is then the next number below for all elements alike, whatever they are.
const ONE_SPACING: f64 = 1.5;

/// What the operations round, and the roundings so far.
#[derive(Debug)]
pub struct Roundings {
    /// Unit roundoff of arithmetic.
    unit: f64,
    /// Half the smallest number of arithmetic, which a result near 0 may be off by.
    least: f64,
    /// What the result of a whole step may be kept in.
    between: Option<Precision>,
    used: Cell<usize>,
    /// The roundings before are shared by all elements of a row.
    shared: Cell<usize>,
    /// The places of numbers that all elements share: the first of them, and the next one.
    scalars: Cell<(usize, usize)>,
    /// How many such places there are.
    alike: usize,
}

/// A number with its error.
#[derive(Clone, Debug)]
pub struct Uncertain<'a> {
    /// What it is in exact arithmetic.
    pub value: f64,
    /// By rounding: a standard deviation with its sign.
    by: [f64; SOURCES],
    roundings: &'a Roundings,
}

impl Roundings {
    /// Arithmetic of unit roundoff `unit`; the result of a whole step may be kept in `between`.
    pub fn new(unit: f64, between: Option<Precision>) -> Roundings {
        let [used, shared] = [0, 0].map(Cell::new);
        let alike = if between.is_some() { ALIKE } else { SCALARS };
        Roundings { unit, least: 0.0, between, used, shared, scalars: Cell::new((0, 0)), alike }
    }

    /// The same for a formula that has so many roundings which all elements share, where nothing is
    /// kept in between and where something is; `None`: as many as those of tables have at most.
    pub(crate) fn sharing(self, counts: Option<[usize; 2]>) -> Roundings {
        let own = counts.map(|counts| counts[usize::from(self.between.is_some())]);
        Roundings { alike: own.unwrap_or(self.alike), ..self }
    }

    /// The same where no number is smaller than this one.
    pub fn above(self, smallest: f64) -> Roundings {
        Roundings { least: smallest / 2.0, ..self }
    }

    /// Forgets all roundings: those of the row before are not those of this one.
    pub fn begin_row(&self) {
        self.used.set(0);
        self.shared.set(0);
    }

    /// Leaves places for numbers of a formula that all elements of the row share.
    pub fn reserve(&self) {
        let first = self.used.get();
        self.scalars.set((first, first));
        self.used.set(first + self.alike);
    }

    /// What was rounded since the row began is shared by all of its elements.
    pub fn share(&self) {
        self.shared.set(self.used.get());
    }

    /// Forgets the roundings of the element before.
    pub fn begin_element(&self) {
        self.used.set(self.shared.get());
        // A formula rounds the same numbers in the same order for each element.
        let (first, _) = self.scalars.get();
        self.scalars.set((first, first));
    }

    /// A number of which nothing was rounded.
    pub fn exact(&self, value: f64) -> Uncertain<'_> {
        Uncertain { value, by: [0.0; SOURCES], roundings: self }
    }

    /// A number that erred with such a variance before it came here.
    pub fn with_variance(&self, value: f64, variance: f64) -> Uncertain<'_> {
        let mut number = self.exact(value);
        number.err(variance.sqrt());
        number
    }

    /// A number that erred before it came here: with one variance by itself, and with another as
    /// all of its row do, which stays an error that they share.
    pub fn with_errors(&self, value: f64, own: f64, alike: f64) -> Uncertain<'_> {
        let mut number = self.with_variance(value, own);
        number.err_as_scalar(alike.sqrt());
        number
    }

    /// The place of a new rounding.
    pub(crate) fn next(&self) -> usize {
        let place = self.used.get().min(LAST);
        self.used.set(place + 1);
        place
    }

    /// The place of a new rounding that all elements share.
    pub(crate) fn next_scalar(&self) -> usize {
        let (first, place) = self.scalars.get();
        let most = self.alike.max(ALIKE);
        debug_assert!(place < first + most, "a formula has {most} shared roundings at most");
        self.scalars.set((first, place + 1));
        place.min(LAST)
    }

    /// How many places, the first ones, are of roundings that all elements of the row share.
    pub(crate) fn shared_places(&self) -> usize {
        self.shared.get()
    }

    /// Unit roundoff of arithmetic.
    pub(crate) fn unit(&self) -> f64 {
        self.unit
    }

    /// Half the smallest number of arithmetic, which a result near 0 may be off by.
    pub(crate) fn least(&self) -> f64 {
        self.least
    }

    /// What the result of a whole step may be kept in.
    pub(crate) fn between(&self) -> Option<Precision> {
        self.between
    }

    /// Whether only the roundings of whole steps have places: those of single operations are far
    /// smaller, and share the last one.
    pub(crate) fn are_steps_alone(&self) -> bool {
        self.between.is_some_and(|precision| self.unit < precision.unit_roundoff() / 1024.0)
    }
}

impl<'a> Uncertain<'a> {
    fn err(&mut self, deviation: f64) {
        if deviation != 0.0 {
            let place = self.roundings.next();
            self.by[place] += deviation.abs();
        }
    }

    /// The same of an error that all elements share.
    fn err_as_scalar(&mut self, deviation: f64) {
        self.by[self.roundings.next_scalar()] += deviation;
    }

    /// The standard deviations that the roundings shared by its row give it, with their signs.
    pub fn shared(&self) -> &[f64] {
        &self.by[..self.roundings.shared.get()]
    }

    /// The standard deviations that each place gives it, with their signs.
    pub(crate) fn errors(&self) -> &[f64] {
        &self.by
    }

    /// Adds errors to it that are shared by its row, as [`Uncertain::shared`] has them.
    pub fn add_shared(&mut self, errors: &[f64]) {
        self.by.iter_mut().zip(errors).for_each(|(c, error)| *c += error);
    }

    /// The variance of the error that is the element's own, and of that which its row shares.
    pub fn variances(&self) -> (f64, f64) {
        let (row, own_terms) = self.by.split_at(self.roundings.shared.get());
        let sum = |values: &[f64]| values.iter().map(|c| c * c).sum();
        (sum(own_terms), sum(row))
    }

    /// The largest error that its roundings can add up to: that of one rounding is √3 of its
    /// standard deviations.
    fn most(&self) -> f64 {
        3f64.sqrt() * self.by.iter().map(|c| c.abs()).sum::<f64>()
    }

    /// `value`, whose derivative by this number is `slope` and by another one as given.
    #[inline(always)]
    fn result(mut self, value: f64, slope: f64, other: Option<(&Uncertain<'a>, f64)>) -> Self {
        self.value = value;
        let last = self.by[LAST] * slope;
        self.by.iter_mut().for_each(|c| *c *= slope);
        self.by[LAST] = last.abs();
        if let Some((other, slope)) = other {
            self.by.iter_mut().zip(&other.by).for_each(|(c, d)| *c += d * slope);
            self.by[LAST] = last.abs() + (other.by[LAST] * slope).abs();
        }
        let mut deviation = self.roundings.unit * value.abs() / 3f64.sqrt();
        if value != 0.0 {
            deviation += self.roundings.least;
        }
        // Nothing beside the roundings of whole steps, which the places are for.
        match self.roundings.are_steps_alone() {
            true => self.by[LAST] += deviation,
            false => self.err(deviation),
        }
        self
    }
}

macro_rules! operations {
    ($($trait:ident $method:ident |$a:ident, $b:ident| $value:expr, $slope:expr, $other:expr;)*) => { $(
        impl<'a> $trait for Uncertain<'a> {
            type Output = Uncertain<'a>;
            #[inline(always)]
            fn $method(self, other: Uncertain<'a>) -> Uncertain<'a> {
                let ($a, $b) = (self.value, other.value);
                self.result($value, $slope, Some((&other, $other)))
            }
        }
    )* };
}

operations! {
    Add add |a, b| a + b, 1.0, 1.0;
    Sub sub |a, b| a - b, 1.0, -1.0;
    Mul mul |a, b| a * b, b, a;
    Div div |a, b| a / b, 1.0 / b, -a / (b * b);
}

impl Number for Uncertain<'_> {
    fn constant(&self, x: f64) -> Self {
        self.roundings.exact(x)
    }

    fn exp(self) -> Self {
        let value = libm::exp(self.value);
        self.result(value, value, None)
    }

    fn ln(self) -> Self {
        let (value, slope) = (libm::log(self.value), 1.0 / self.value);
        self.result(value, slope, None)
    }

    fn tanh(self) -> Self {
        let value = libm::tanh(self.value);
        self.result(value, value.one_minus_square(), None)
    }

    fn sqrt(self) -> Self {
        let value = libm::sqrt(self.value);
        // At 0 the root has no slope: it errs by the root of what its argument errs by.
        if value == 0.0 {
            let most: f64 = self.by.iter().map(|c| c.abs()).sum();
            let mut root = self.roundings.exact(value);
            root.err(most.sqrt());
            return root;
        }
        self.result(value, 0.5 / value, None)
    }

    fn abs(mut self) -> Self {
        if self.value < 0.0 {
            self.value = -self.value;
            self.by[..LAST].iter_mut().for_each(|c| *c = -*c);
        }
        self
    }

    /// Rounding may have brought a number near 0 to either side of it, or onto it.
    fn sign(self) -> Self {
        let is_certain = self.most() == 0.0 || self.value.abs() > self.most();
        let mut sign = self.roundings.exact(self.value.sign());
        if !is_certain {
            sign.err(1.0 + sign.value.abs());
        }
        sign
    }

    /// Of two numbers that lie nearer to each other than rounding may have moved them, the job may
    /// have taken either: the larger of them errs by what it erred by, and by at most what the
    /// other's error differs from that.
    fn larger(self, other: Self) -> Self {
        let is_other = other.value > self.value || other.value.is_nan();
        if is_other && !self.value.is_nan() {
            return other.larger(self);
        }
        let difference = Uncertain {
            value: self.value - other.value,
            by: std::array::from_fn(|at| self.by[at] - other.by[at]),
            roundings: self.roundings,
        };
        let (is_near, (own, row)) = (difference.value <= difference.most(), difference.variances());
        let mut larger = self;
        if is_near {
            larger.err((own + row).sqrt());
        }
        larger
    }

    /// Near 0 the job may have taken the other of the two, as for the larger one.
    fn chosen(self, is_from: bool, one: Self, other: Self) -> Self {
        let is_certain = self.most() == 0.0 || self.value.abs() > self.most();
        let apart = Uncertain {
            value: one.value - other.value,
            by: std::array::from_fn(|at| one.by[at] - other.by[at]),
            roundings: self.roundings,
        };
        let is_one = self.value > 0.0 || (is_from && self.value == 0.0);
        let mut chosen = if is_one { one } else { other };
        if !is_certain {
            let (own, row) = apart.variances();
            chosen.err(apart.value.abs() + (own + row).sqrt());
        }
        chosen
    }

    /// By a logarithm or not: the logarithm and its product with the exponent are rounded too. At
    /// 0 a logarithm has no slope, and the power has: 1 for the first one, 0 for higher ones, and
    /// none for a root, which errs by the same root of what its argument errs by.
    fn power(self, exponent: f64) -> Self {
        if self.value == 0.0 {
            if exponent < 1.0 {
                let most: f64 = self.by.iter().map(|c| c.abs()).sum();
                let mut root = self.roundings.exact(0.0);
                root.err(libm::pow(most, exponent));
                return root;
            }
            let slope = if exponent == 1.0 { 1.0 } else { 0.0 };
            return self.result(0.0, slope, None);
        }
        let product = exponent * libm::log(self.value);
        let (value, unit) = (libm::exp(product), self.roundings.unit);
        let slope = exponent * value / self.value;
        let mut power = self.result(value, slope, None);
        power.err(2.0 * unit * (product * value).abs() / 3f64.sqrt());
        power
    }

    fn step(mut self) -> Self {
        if let Some(precision) = self.roundings.between {
            self.err(precision.deviation(self.value));
        }
        self
    }

    /// What was rounded on the way to it is in all elements alike, and adds up at most. Its value
    /// is known, and so is what rounding changes of it, if the job rounds it.
    fn scalar(mut self) -> Self {
        let own = &mut self.by[self.roundings.shared.get()..];
        let mut deviation: f64 = own.iter().map(|c| c.abs()).sum();
        own.fill(0.0);
        if let Some(precision) = self.roundings.between {
            let error = precision.round64(self.value) - self.value;
            deviation += error.abs() / 3f64.sqrt();
        }
        self.err_as_scalar(deviation);
        self
    }

    fn step_alike(mut self) -> Self {
        if let Some(precision) = self.roundings.between {
            self.err_as_scalar(precision.deviation(self.value));
        }
        self
    }

    /// Near 0 the square of the error is more than its product with the number.
    fn squared(self) -> Self {
        let (own, row) = self.variances();
        let mut square = self.clone() * self;
        square.err(own + row);
        square
    }

    fn changed(mut self, change: Self) -> Self {
        if let Some(precision) = self.roundings.between {
            let rounding = precision.deviation(self.value);
            self.err_as_scalar(rounding.min(change.value.abs() / 3f64.sqrt()));
            self.err(rounding);
        } else {
            // The place is taken in any case, so that all elements count the same places.
            let (unit, change) = (self.roundings.unit * self.value.abs(), change.value.abs());
            let is_next = change <= ONE_SPACING * unit;
            let rounding = if is_next { unit.min(2.0 * change) / 3f64.sqrt() } else { 0.0 };
            self.err_as_scalar(rounding);
        }
        self
    }

    fn by_settings(self, of: Self, factor: Self) -> Self {
        if self.roundings.unit >= Precision::F32.unit_roundoff() {
            return self;
        }
        let mut rounding = self.roundings.exact(0.0);
        rounding.err_as_scalar(Precision::F32.deviation(factor.value));
        self + of * rounding
    }

    fn vanishing(mut self, by: Self) -> Self {
        if by.value.abs() > 1.0 {
            let smallest = self.roundings.between.map(Precision::smallest_subnormal);
            let smallest = smallest.unwrap_or(2.0 * self.roundings.least);
            self.err_as_scalar(smallest / 2.0 * by.value.abs());
        }
        self
    }

    /// A constant is rounded before it is used, which changes nothing of what the product errs by.
    #[inline(always)]
    fn times(self, constant: f64) -> Self {
        let value = self.value * constant;
        self.result(value, constant, None)
    }

    #[inline(always)]
    fn over(self, constant: f64) -> Self {
        let value = self.value / constant;
        self.result(value, 1.0 / constant, None)
    }
}

impl Precision {
    /// The standard deviation of rounding `x` once: at most `u |x| / √3`, and half the smallest
    /// number among those.
    pub fn deviation(self, x: f64) -> f64 {
        let tiny = self.smallest_subnormal() / 2.0;
        self.unit_roundoff() * x.abs() / 3f64.sqrt() + tiny
    }
}

#[cfg(test)]
mod tests;
