//! Numbers of which a policy rounds every operation.

use std::ops::{Add, Div, Mul, Sub};

use super::sum::operation;
use crate::kernels::number::Number;
use crate::kernels::round::Precision;

/// A number of which each operation is rounded to the register, and the result of a whole step to
/// what a job keeps in between. Constants are taken as they are: the caller rounded them.
#[derive(Clone, Copy)]
pub(super) struct Rounded {
    pub(super) value: f64,
    /// What arithmetic is done in.
    pub(super) register: Precision,
    /// What the result of a whole step is kept in.
    pub(super) between: Precision,
}

impl Rounded {
    fn result(self, exact: f64) -> Rounded {
        Rounded { value: operation(self.register, exact), ..self }
    }
}

macro_rules! rounded {
    ($($trait:ident $method:ident $operator:tt),*) => { $(
        impl $trait for Rounded {
            type Output = Rounded;
            #[inline(always)]
            fn $method(self, other: Rounded) -> Rounded {
                self.result(self.value $operator other.value)
            }
        }
    )* };
}

rounded!(Add add +, Sub sub -, Mul mul *, Div div /);

impl Number for Rounded {
    #[inline(always)]
    fn constant(&self, x: f64) -> Rounded {
        Rounded { value: x, ..*self }
    }

    #[inline(always)]
    fn exp(self) -> Rounded {
        self.result(libm::exp(self.value))
    }

    #[inline(always)]
    fn ln(self) -> Rounded {
        self.result(libm::log(self.value))
    }

    #[inline(always)]
    fn tanh(self) -> Rounded {
        self.result(libm::tanh(self.value))
    }

    #[inline(always)]
    fn sqrt(self) -> Rounded {
        self.result(libm::sqrt(self.value))
    }

    #[inline(always)]
    fn abs(self) -> Rounded {
        Rounded { value: self.value.abs(), ..self }
    }

    #[inline(always)]
    fn sign(self) -> Rounded {
        Rounded { value: self.value.sign(), ..self }
    }

    #[inline(always)]
    fn larger(self, other: Rounded) -> Rounded {
        Rounded { value: self.value.larger(other.value), ..self }
    }

    fn step(self) -> Rounded {
        Rounded { value: self.between.round64(self.value), ..self }
    }

    /// By subtraction, as jobs have it.
    fn one_minus_square(self) -> Rounded {
        self.constant(1.0) - self * self
    }
}
