//! The arithmetic of a job: f32 with the rounding points it chose, or f64 with
//! none at all. The same code runs on both, so that finite differences on the
//! second say whether the first computes the right thing.
//!
//! No code of the replayer is used: a mistake shared with it would go unseen.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::{bf16, f16};

/// A floating-point dtype that a job stores or rounds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    Bf16,
    F16,
    F32,
}

impl Float {
    /// The name in `tape.head(dtypes=...)`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Float::Bf16 => "bf16",
            Float::F16 => "f16",
            Float::F32 => "f32",
        }
    }

    pub(crate) fn round_f32(self, x: f32) -> f32 {
        match self {
            Float::Bf16 => bf16::from_f32(x).to_f32(),
            Float::F16 => f16::from_f32(x).to_f32(),
            Float::F32 => x,
        }
    }
}

/// What the job computes with.
pub(super) trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    fn sqrt(self) -> Self;
    /// Rounds to a dtype; nothing in exact arithmetic.
    fn round(self, to: Float) -> Self;
}

macro_rules! real {
    ($type:ty, |$x:ident, $to:ident| $round:expr) => {
        impl Real for $type {
            fn of(x: f64) -> Self {
                x as $type
            }
            fn wide(self) -> f64 {
                self as f64
            }
            fn exp(self) -> Self {
                <$type>::exp(self)
            }
            fn ln(self) -> Self {
                <$type>::ln(self)
            }
            fn tanh(self) -> Self {
                <$type>::tanh(self)
            }
            fn sqrt(self) -> Self {
                <$type>::sqrt(self)
            }
            fn round(self, to: Float) -> Self {
                let ($x, $to) = (self, to);
                $round
            }
        }
    };
}

real!(f32, |x, to| to.round_f32(x));
real!(f64, |x, _to| x);

/// Values of the dump, in the job's arithmetic: exact, they are f32 at most.
pub(super) fn all<F: Real>(values: &[f64]) -> Vec<F> {
    values.iter().map(|&x| F::of(x)).collect()
}

pub(super) fn zeros<F: Real>(n: usize) -> Vec<F> {
    vec![F::of(0.0); n]
}

/// In which order a sum is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    Sequential,
    /// Term j goes to lane j mod n; the lanes are added pairwise.
    Lanes(usize),
    Pairwise,
}

/// How a long sum is taken: partial sums of tiles, added one after another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum {
    pub(super) order: Order,
    pub(super) tile: usize,
    /// Every partial sum is rounded to it.
    pub(super) accumulator: Float,
    /// What a tile's part is rounded to before it is added, and the sum after.
    pub(super) between: Float,
}

impl Sum {
    pub(super) fn of<F: Real>(&self, terms: &[F]) -> F {
        let part = |tile: &[F]| self.tile(tile).round(self.between);
        let mut tiles = terms.chunks(self.tile.max(1)).map(part);
        let first = tiles.next().unwrap_or(F::of(0.0));
        tiles.fold(first, |sum, tile| (sum + tile).round(self.accumulator).round(self.between))
    }

    fn tile<F: Real>(&self, terms: &[F]) -> F {
        let add = |a: F, b: F| (a + b).round(self.accumulator);
        match self.order {
            Order::Sequential => terms.iter().fold(F::of(0.0), |sum, &x| add(sum, x)),
            Order::Pairwise => self.pairwise(terms),
            Order::Lanes(n) => {
                let mut lanes = zeros::<F>(n);
                for (j, &x) in terms.iter().enumerate() {
                    lanes[j % n] = add(lanes[j % n], x);
                }
                self.pairwise(&lanes)
            }
        }
    }

    fn pairwise<F: Real>(&self, terms: &[F]) -> F {
        match terms.len() {
            0 => F::of(0.0),
            1 => terms[0].round(self.accumulator),
            n => {
                let (a, b) = terms.split_at(n.div_ceil(2));
                (self.pairwise(a) + self.pairwise(b)).round(self.accumulator)
            }
        }
    }
}

/// Deterministic numbers: the seed is in every failure message through `Job`.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn unit(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 32)) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Zipf-like: low ids are frequent.
    pub(crate) fn label(&mut self, valid: usize) -> usize {
        ((valid as f64).powf(self.unit()) - 1.0) as usize
    }

    /// A whole number in `from..=to`.
    pub(crate) fn between(&mut self, from: usize, to: usize) -> usize {
        from + (self.unit() * (to - from + 1) as f64) as usize
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() - 1)]
    }
}
