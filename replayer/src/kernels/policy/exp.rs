//! exp and tanh in f32, and the head's passes over a row: max, sums, the bound by tanh and its
//! derivative, the gradient of the softmax.
//!
//! Every pass is one function body that is compiled twice (`vectorised!`). Both versions give the
//! same bits, because sums are taken in 32 fixed lanes. AVX-512 is not used: these passes take some
//! 3 % of a step, and its target feature is newer than the oldest compiler that the workspace
//! supports.

use std::ops::{Add, Div, Mul, Sub};

use crate::kernels::formula::{probability, tanh_bounded, tanh_bounded_slope};
use crate::kernels::number::Number;

/// Lanes of a row sum: element i goes to lane i mod 32, lanes are added pairwise.
/// Four vectors of eight hide the latency of the addition.
const LANES: usize = 32;

/// Largest error of `tanh`, in units in the last place.
#[cfg(test)]
const TANH_ULPS: f64 = 4.0;

/// `exp(x)` within one unit in the last place, subnormal results included; NaN stays
/// NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or inf. The comparisons are false for NaN, which stays NaN.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5 * 2^23 leaves the nearest integer to x / ln 2 in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let exponent = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let whole = shifted - MAGIC;
    // ln 2 in two pieces, so that the reduced argument keeps its last bits.
    let r = whole.mul_add(-0.693_359_4, x);
    let r = whole.mul_add(2.121_944_4e-4, r);
    let value = 1.0 + expm1_reduced(r);
    // Two factors, since no f32 power of two reaches 2^-150 or 2^128.
    let half = exponent >> 1;
    value * power_of_two(half) * power_of_two(exponent.wrapping_sub(half))
}

/// `exp(r) - 1` for r in [-ln 2 / 2, ln 2 / 2]: a minimax polynomial of
/// (exp(r) - 1 - r) / r^2 (SLEEF).
#[inline(always)]
fn expm1_reduced(r: f32) -> f32 {
    let p = 0.000_198_527_62_f32;
    let p = p.mul_add(r, 0.001_393_043_5);
    let p = p.mul_add(r, 0.008_333_361);
    let p = p.mul_add(r, 0.041_666_485);
    let p = p.mul_add(r, 0.166_666_67);
    let p = p.mul_add(r, 0.5);
    (r * r).mul_add(p, r)
}

/// `tanh(x)` within `TANH_ULPS` units in the last place, as `-m / (2 + m)` with `m = exp(-2 |x|) -
/// 1`. Nothing cancels, since m is computed directly and not by subtracting 1 from exp.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let y = -2.0 * x.abs();
    // tanh is 1 in f32 long before this. The comparison is false for NaN, which stays NaN.
    let y = if y < -40.0 { -40.0 } else { y };
    const MAGIC: f32 = 12_582_912.0;
    let shifted = y.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let exponent = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let whole = shifted - MAGIC;
    let r = whole.mul_add(-0.693_359_4, y);
    let r = whole.mul_add(2.121_944_4e-4, r);
    let power = power_of_two(exponent);
    let m = power.mul_add(expm1_reduced(r), power - 1.0);
    (-m / (2.0 + m)).copysign(x)
}

/// An f32 whose exp and tanh are those of the rows below.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub(super) struct Fast(pub(super) f32);

macro_rules! fast {
    ($($trait:ident $method:ident $operator:tt),*) => { $(
        impl $trait for Fast {
            type Output = Fast;
            #[inline(always)]
            fn $method(self, other: Fast) -> Fast {
                Fast(self.0 $operator other.0)
            }
        }
    )* };
}

fast!(Add add +, Sub sub -, Mul mul *, Div div /);

impl Number for Fast {
    #[inline(always)]
    fn constant(&self, x: f64) -> Fast {
        Fast(x as f32)
    }

    #[inline(always)]
    fn exp(self) -> Fast {
        Fast(exp(self.0))
    }

    /// Taken in f64: there is one a token.
    #[inline(always)]
    fn ln(self) -> Fast {
        Fast(libm::log(f64::from(self.0)) as f32)
    }

    #[inline(always)]
    fn tanh(self) -> Fast {
        Fast(tanh(self.0))
    }

    #[inline(always)]
    fn sqrt(self) -> Fast {
        Fast(self.0.sqrt())
    }

    #[inline(always)]
    fn abs(self) -> Fast {
        Fast(self.0.abs())
    }

    #[inline(always)]
    fn sign(self) -> Fast {
        Fast(self.0.sign())
    }

    #[inline(always)]
    fn larger(self, other: Fast) -> Fast {
        Fast(Number::larger(self.0, other.0))
    }

    /// By subtraction, as jobs have it.
    #[inline(always)]
    fn one_minus_square(self) -> Fast {
        Fast(1.0 - self.0 * self.0)
    }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

vectorised!(
    /// Largest element of a row, ignoring NaN.
    row_max, row_max_body, (row: &[f32]) -> f32
);
vectorised!(
    /// Sum of `exp(x - shift)` over a row, in 32 lanes, then pairwise.
    sum_exp, sum_exp_body, (row: &[f32], shift: f32) -> f32
);
vectorised!(
    /// Sum of a row, in 32 lanes, then pairwise.
    row_sum, row_sum_body, (row: &[f32]) -> f32
);
vectorised!(
    /// Replaces each x of a row by `cap tanh(x / cap)`.
    bounded, bounded_body, (row: &mut [f32], cap: f32) -> ()
);
vectorised!(
    /// Replaces each `x = cap tanh(..)` of a row by `scale (1 - (x / cap)^2)`.
    bounded_slope, bounded_slope_body, (row: &mut [f32], cap: f32, scale: f32) -> ()
);
vectorised!(
    /// Replaces each logit of a row by its softmax, `exp(x - lse)`.
    softmax, softmax_body, (row: &mut [f32], lse: f32) -> ()
);

#[inline(always)]
fn row_max_body(row: &[f32]) -> f32 {
    // A comparison and not f32::max, since it compiles to one instruction; a NaN is never chosen.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |max, &x| larger(max, x))
}

#[inline(always)]
fn sum_exp_body(row: &[f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += exp(x - shift);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += exp(x - shift);
    }
    pairwise(lanes)
}

#[inline(always)]
fn row_sum_body(row: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    lanes.iter_mut().zip(tail).for_each(|(lane, &x)| *lane += x);
    pairwise(lanes)
}

#[inline(always)]
fn pairwise(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn bounded_body(row: &mut [f32], cap: f32) {
    for x in row {
        *x = tanh_bounded(Fast(*x), Fast(cap)).0;
    }
}

#[inline(always)]
fn bounded_slope_body(row: &mut [f32], cap: f32, scale: f32) {
    for x in row {
        *x = (tanh_bounded_slope(Fast(*x), Fast(cap)) * Fast(scale)).0;
    }
}

#[inline(always)]
fn softmax_body(row: &mut [f32], lse: f32) {
    for x in row {
        *x = probability(Fast(*x), Fast(lse)).0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::nan::larger;

    /// Distance from the exact value in units of the last place of the f32 result.
    fn ulp_error(x: f32) -> f64 {
        let exact = libm::exp(f64::from(x));
        let got = exp(x);
        if x.is_nan() {
            assert!(got.is_nan());
            return 0.0;
        }
        if exact as f32 == got {
            return 0.0;
        }
        let magnitude = exact.max(f64::from(f32::MIN_POSITIVE));
        let spacing = libm::exp2(libm::floor(libm::log2(magnitude)) - 23.0);
        (f64::from(got) - exact).abs() / spacing
    }

    /// Every 97th of the 2^32 bit patterns, and 2^22 numbers of [-104.5, 21.4], the range in which
    /// the result is not 0, more densely.
    #[test]
    fn exp_is_within_one_ulp_of_f64_exp_over_all_magnitudes() {
        use rayon::prelude::*;
        let stratified = (0..=u32::MAX / 97).into_par_iter().map(|i| f32::from_bits(i * 97));
        let dense = (0..1 << 22).into_par_iter().map(|i| i as f32 * 3.0e-5 - 104.5);
        let worst = stratified.chain(dense).map(ulp_error).reduce(|| 0.0, larger);
        assert!(worst <= 1.0, "worst error {worst} ulp");
    }

    #[test]
    fn tanh_is_within_its_bound_over_all_magnitudes() {
        use rayon::prelude::*;
        let error = |x: f32| {
            let exact = libm::tanh(f64::from(x));
            let got = tanh(x);
            if x.is_nan() {
                assert!(got.is_nan());
                return 0.0;
            }
            let magnitude = exact.abs().max(f64::from(f32::MIN_POSITIVE));
            let spacing = libm::exp2(libm::floor(libm::log2(magnitude)) - 23.0);
            (f64::from(got) - exact).abs() / spacing
        };
        let stratified = (0..=u32::MAX / 97).into_par_iter().map(|i| f32::from_bits(i * 97));
        let dense = (0..1 << 22).into_par_iter().map(|i| i as f32 * 5.0e-6 - 10.5);
        let worst = stratified.chain(dense).map(error).reduce(|| 0.0, larger);
        assert!(worst <= TANH_ULPS, "worst error {worst} ulp");
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    }

    #[test]
    fn exp_has_its_limits() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(-1000.0), 0.0);
        assert!(exp(88.722_83).is_finite() && exp(88.722_84).is_infinite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn vector_and_scalar_passes_give_the_same_bits() {
        for length in [0, 1, 7, 31, 32, 33, 64, 95, 1000] {
            let row: Vec<f32> = (0..length).map(|i| ((i * 37 % 101) as f32 - 90.0) / 7.0).collect();
            assert_eq!(row_max(&row).to_bits(), row_max_body(&row).to_bits());
            assert_eq!(sum_exp(&row, 1.5).to_bits(), sum_exp_body(&row, 1.5).to_bits());
            let (mut vector, mut scalar) = (row.clone(), row);
            softmax(&mut vector, 0.25);
            softmax_body(&mut scalar, 0.25);
            assert_eq!(vector, scalar);
            assert_eq!(row_sum(&scalar).to_bits(), row_sum_body(&scalar).to_bits());
            bounded(&mut vector, 1.5);
            bounded_body(&mut scalar, 1.5);
            assert_eq!(vector, scalar);
            bounded_slope(&mut vector, 1.5, 0.7);
            bounded_slope_body(&mut scalar, 1.5, 0.7);
            assert_eq!(vector, scalar);
        }
    }
}
