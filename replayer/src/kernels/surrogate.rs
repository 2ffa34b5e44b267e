//! What a token adds to a policy loss before its factor, over numbers of any kind: the clipped
//! surrogate and the KL term. `reference::policy_loss` has their sources.

use std::ops::{Add, Div, Mul, Sub};

use backtape::head::{GrpoDeclaration, KlEstimator};

use super::number::Number;

/// The operations of a policy loss beside those of arithmetic.
pub trait Choices: Number {
    /// `e^x - 1`.
    fn exp_m1(self) -> Self;
    /// The smaller of two; NaN where one is.
    fn smaller(self, other: Self) -> Self;
    /// Within two bounds.
    fn clipped(self, low: f64, high: f64) -> Self;
    /// One of two: the first where this number is negative.
    fn if_negative(&self, then: Self, otherwise: Self) -> Self;
}

/// The loss of the clipped surrogate at one ratio: `-min(r A, clip(r, 1 - lo, 1 + hi) A)`, and for
/// negative advantages at most `-dual A`.
pub fn surrogate<N: Choices>(options: &GrpoDeclaration, ratio: N, advantage: N) -> N {
    let clipped = ratio.clone().clipped(1.0 - options.clip_low, 1.0 + options.clip_high);
    let mut gain = (ratio * advantage.clone()).smaller(clipped * advantage.clone()).step();
    if let Some(dual) = options.dual_clip {
        let least = gain.clone().larger(advantage.clone().times(dual));
        gain = advantage.if_negative(least, gain).step();
    }
    gain.times(-1.0)
}

/// The KL estimate of a token, from `d = reference - logp`.
pub fn kl<N: Choices>(estimator: KlEstimator, d: N) -> N {
    match estimator {
        KlEstimator::K1 => d.times(-1.0),
        KlEstimator::K2 => (d.clone() * d).over(2.0),
        KlEstimator::K3 => d.clone().exp_m1() - d,
    }
}

/// A number with its derivative. Where a choice is tied its derivative is torch's: a bound passes
/// it, and the smaller or larger of two equal numbers has the mean of theirs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Differentiated {
    /// The number.
    pub value: f64,
    /// Its derivative.
    pub slope: f64,
}

impl Differentiated {
    /// What is differentiated by.
    pub fn variable(value: f64) -> Differentiated {
        Differentiated { value, slope: 1.0 }
    }

    fn of(self, value: f64, slope: f64) -> Differentiated {
        // A value that does not move has no derivative by what its own slope is infinite of.
        Differentiated { value, slope: if self.slope == 0.0 { 0.0 } else { self.slope * slope } }
    }

    fn mean(self, other: Differentiated) -> Differentiated {
        Differentiated { slope: (self.slope + other.slope) / 2.0, ..self }
    }
}

macro_rules! differentiated {
    ($($trait:ident $method:ident |$a:ident, $b:ident| $value:expr, $slope:expr;)*) => { $(
        impl $trait for Differentiated {
            type Output = Differentiated;
            fn $method(self, other: Differentiated) -> Differentiated {
                let ($a, $b) = (self, other);
                Differentiated { value: $value, slope: $slope }
            }
        }
    )* };
}

/// A slope times a factor; what does not move stays where it is, whatever the factor.
fn scaled(slope: f64, factor: f64) -> f64 {
    if slope == 0.0 { 0.0 } else { slope * factor }
}

differentiated! {
    Add add |a, b| a.value + b.value, a.slope + b.slope;
    Sub sub |a, b| a.value - b.value, a.slope - b.slope;
    Mul mul |a, b| a.value * b.value, scaled(a.slope, b.value) + scaled(b.slope, a.value);
    Div div |a, b| a.value / b.value,
        (a.slope - scaled(b.slope, a.value / b.value)) / b.value;
}

impl Number for Differentiated {
    fn constant(&self, x: f64) -> Differentiated {
        Differentiated { value: x, slope: 0.0 }
    }

    fn exp(self) -> Differentiated {
        let value = libm::exp(self.value);
        self.of(value, value)
    }

    fn ln(self) -> Differentiated {
        self.of(libm::log(self.value), 1.0 / self.value)
    }

    fn tanh(self) -> Differentiated {
        let value = libm::tanh(self.value);
        self.of(value, value.one_minus_square())
    }

    fn sqrt(self) -> Differentiated {
        let value = libm::sqrt(self.value);
        self.of(value, 0.5 / value)
    }

    fn abs(self) -> Differentiated {
        self.of(self.value.abs(), self.value.signum())
    }

    fn sign(self) -> Differentiated {
        self.of(self.value.sign(), 0.0)
    }

    fn larger(self, other: Differentiated) -> Differentiated {
        self.times(-1.0).smaller(other.times(-1.0)).times(-1.0)
    }
}

impl Choices for Differentiated {
    fn exp_m1(self) -> Differentiated {
        self.of(libm::expm1(self.value), libm::exp(self.value))
    }

    fn smaller(self, other: Differentiated) -> Differentiated {
        match self.value.partial_cmp(&other.value) {
            Some(std::cmp::Ordering::Less) => self,
            Some(std::cmp::Ordering::Greater) => other,
            Some(std::cmp::Ordering::Equal) => self.mean(other),
            None => Differentiated { value: f64::NAN, slope: f64::NAN },
        }
    }

    fn clipped(self, low: f64, high: f64) -> Differentiated {
        let bounded = |bound: f64| Differentiated { value: bound, slope: 0.0 };
        match self.value {
            x if x < low => bounded(low),
            x if x > high => bounded(high),
            _ => self,
        }
    }

    fn if_negative(&self, then: Differentiated, otherwise: Differentiated) -> Differentiated {
        if self.value < 0.0 { then } else { otherwise }
    }
}
