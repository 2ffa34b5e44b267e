//! The numbers that a formula is written over, so that each formula stands once.
//!
//! A formula is a function that is generic over [`Number`]. What its operations do is said by the
//! type of number that it is called with:
//!
//! | reading | number |
//! |---|---|
//! | exact, for the reference, detectors and causes | `f64` |
//! | as plain f32 code computes it | `f32` |
//! | as the vectorised f32 rows compute it | `policy::exp::Fast` |
//! | as a policy rounds each operation | `emulator::plane::Rounded` |
//! | with the error that rounding may have brought | `uncertain::Uncertain` |
//! | as the text of a program, in Python or C | `text::Text` |
//!
//! Policies and the reference share a formula, never the rounding.

use std::ops::{Add, Div, Mul, Sub};

/// A number that formulas are written over.
pub trait Number:
    Clone + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// A constant, as a number of the same kind as this one.
    fn constant(&self, x: f64) -> Self;
    /// e to it.
    fn exp(self) -> Self;
    /// Its natural logarithm.
    fn ln(self) -> Self;
    /// Its hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Its square root.
    fn sqrt(self) -> Self;
    /// Its absolute value.
    fn abs(self) -> Self;
    /// Its sign: -1, 0 or 1.
    fn sign(self) -> Self;
    /// The larger of two; NaN where one is.
    fn larger(self, other: Self) -> Self;

    /// `one` where this is above 0, or where `is_from` is at 0 too; else `other`. Numbers that
    /// cannot choose mix the two, which must be finite then.
    fn chosen(self, is_from: bool, one: Self, other: Self) -> Self {
        let zero = self.constant(0.0);
        let share = match is_from {
            true => self.constant(1.0) - self.times(-1.0).sign().larger(zero),
            false => self.sign().larger(zero),
        };
        other.clone() + share * (one - other)
    }

    /// It to the power of a positive exponent. It is not negative itself; that of 0 is 0.
    fn power(self, exponent: f64) -> Self {
        self.ln().times(exponent).exp()
    }

    /// The result of a whole step, which a job may keep in fewer bits than it computes in: a
    /// policy rounds it here, exact numbers stay as they are.
    fn step(self) -> Self {
        self
    }

    /// The same of a number that all elements share, as a hyper-parameter is: frameworks round it
    /// to the format of the tensor that it multiplies.
    fn scalar(self) -> Self {
        self
    }

    /// The result of a whole step that was taken of one tensor, and of numbers that all elements
    /// share. A tensor of few bits has few different elements, and equal ones are rounded alike.
    fn step_alike(self) -> Self {
        self.step()
    }

    /// Its product with a number that all elements share.
    fn scaled(self, scalar: Self) -> Self {
        (self * scalar.scalar()).step_alike()
    }

    /// Its square.
    fn squared(self) -> Self {
        self.clone() * self
    }

    /// This number, to which a change was added on the way to it. What it was before is in the
    /// format in which a job keeps it, so that changes of less than half a spacing are lost in
    /// all elements alike.
    fn changed(self, _change: Self) -> Self {
        self
    }

    /// This number, on the way to which `of` was multiplied by `factor`, a number that is made of
    /// settings alone. Frameworks that keep a setting as a tensor make it in f32, in whatever format
    /// the rest is.
    fn by_settings(self, _of: Self, _factor: Self) -> Self {
        self
    }

    /// This number, which a job may have kept divided by `by` on the way to it: what was too small for
    /// its format then is lost. Only numbers above 1 make anything smaller.
    fn vanishing(self, _by: Self) -> Self {
        self
    }

    /// `1 - t²`, the derivative of tanh where tanh is t. As a product, since t² is near 1 where
    /// tanh bends most.
    fn one_minus_square(self) -> Self {
        let unit = self.constant(1.0);
        (unit.clone() - self.clone()) * (unit + self)
    }

    /// Its product with a constant.
    #[inline(always)]
    fn times(self, constant: f64) -> Self {
        let constant = self.constant(constant);
        self * constant
    }

    /// Its sum with a constant; 0 is not added.
    #[inline(always)]
    fn plus(self, constant: f64) -> Self {
        if constant == 0.0 {
            return self;
        }
        let constant = self.constant(constant);
        self + constant
    }

    /// Its quotient by a constant.
    #[inline(always)]
    fn over(self, constant: f64) -> Self {
        let constant = self.constant(constant);
        self / constant
    }
}

impl Number for f64 {
    #[inline(always)]
    fn constant(&self, x: f64) -> f64 {
        x
    }

    #[inline(always)]
    fn exp(self) -> f64 {
        libm::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        libm::log(self)
    }

    #[inline(always)]
    fn tanh(self) -> f64 {
        libm::tanh(self)
    }

    #[inline(always)]
    fn sqrt(self) -> f64 {
        libm::sqrt(self)
    }

    #[inline(always)]
    fn abs(self) -> f64 {
        libm::fabs(self)
    }

    #[inline(always)]
    fn sign(self) -> f64 {
        if self == 0.0 { self } else { self.signum() }
    }

    #[inline(always)]
    fn larger(self, other: f64) -> f64 {
        if self > other || self.is_nan() { self } else { other }
    }

    #[inline(always)]
    fn chosen(self, is_from: bool, one: f64, other: f64) -> f64 {
        if self > 0.0 || (is_from && self == 0.0) { one } else { other }
    }
}

impl Number for f32 {
    #[inline(always)]
    fn constant(&self, x: f64) -> f32 {
        x as f32
    }

    #[inline(always)]
    fn exp(self) -> f32 {
        libm::expf(self)
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        libm::logf(self)
    }

    #[inline(always)]
    fn tanh(self) -> f32 {
        libm::tanhf(self)
    }

    #[inline(always)]
    fn sqrt(self) -> f32 {
        libm::sqrtf(self)
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        libm::fabsf(self)
    }

    #[inline(always)]
    fn sign(self) -> f32 {
        if self == 0.0 { self } else { self.signum() }
    }

    #[inline(always)]
    fn larger(self, other: f32) -> f32 {
        if self > other || self.is_nan() { self } else { other }
    }
}
