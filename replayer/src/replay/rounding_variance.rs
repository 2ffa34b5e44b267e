//! The variance that the declared precision explains, per element of a stage.
//!
//! Rounding to nearest errs uniformly within half a spacing: at most `u|x|`, so
//! its variance is at most `u²x²/3`. A sum of `n` addends in an accumulator of
//! unit roundoff `u` rounds every partial sum `s_k` once; for addends in an
//! order that does not know them, `E s_k² = (k/n)² r² + k/n (1 - k/n) S` with
//! `r` the total and `S` the sum of squares, so `Σ_k s_k² ≤ n/3 r² + n/6 S`
//! and the variance is `u²/3` of that (Higham and Mary 2019 derive the √n law).
//! Sequential summation is the worst order in use; blocked ones do better.

use crate::compare::allowance::Rounding;
use crate::dump::TensorInfo;
use crate::head::roundings::F32;
use crate::head::{HeadStep, Roundings};
use crate::kernels::policy::{Order, Path, Sum};
use crate::kernels::round::Precision;

/// Below the smallest normal f32 (and bf16) hardware may flush to zero.
pub(super) const FLUSH: f64 = 1.175_494_350_822_287_5e-38;

/// Variance of rounding `x` once to a precision, in whose smallest numbers the
/// error is no longer relative.
pub(super) fn rounded(precision: Precision, x: f64) -> f64 {
    let tiny = precision.smallest_subnormal() / 2.0;
    relative(precision.unit_roundoff(), x) + tiny * tiny
}

/// Variance of rounding `x` once to a stored dtype; `None` rounds nothing.
pub(super) fn stored(precision: Option<Precision>, x: f64) -> f64 {
    precision.map_or(0.0, |precision| rounded(precision, x))
}

/// One rounding to a precision, in numbers.
pub(super) fn rounding(precision: Precision) -> Rounding {
    let (unit, half) = (precision.unit_roundoff(), precision.smallest_subnormal() / 2.0);
    Rounding { square: unit * unit / 3.0, constant: FLUSH * FLUSH + half * half, unit, half }
}

/// Variance of an operation on `x` of unit roundoff `u`.
pub(super) fn relative(u: f64, x: f64) -> f64 {
    u * u * x * x / 3.0 + FLUSH * FLUSH
}

/// Unit roundoff of a sum. Where the job sums in f64 the reference errs as much as it
/// does, so both count.
pub(super) fn unit(precision: Precision) -> f64 {
    match precision {
        Precision::F64 => 2.0 * Precision::F64.unit_roundoff(),
        other => other.unit_roundoff(),
    }
}

/// Variance of summing `n` addends of total `total` and squares `squares`.
///
/// Blocked sums are sequential twice; of a pairwise one every level holds partial
/// sums of squares `2^l/n r² + S`; a compensated one errs by `2u|r|` (Higham 2002,
/// chapter 4). An order that is not known is taken for the worst, sequential.
pub(super) fn summed(sum: Sum, n: f64, total: f64, squares: f64) -> f64 {
    let u = unit(sum.precision);
    let sequential = |n: f64, of_total: f64, of_squares: f64| {
        n / 3.0 * of_total * total * total + n / 6.0 * of_squares * squares
    };
    let partial_sums = match sum.order {
        Order::Native | Order::Sequential => sequential(n, 1.0, 1.0),
        Order::Blocked(block) if (block as f64) < n => {
            let b = block.max(1) as f64;
            // Inside the blocks, then over the n/b sums of blocks.
            let inside = b * b / (3.0 * n) * total * total + b / 2.0 * squares;
            inside + sequential(n / b, 1.0, 1.0) + total * total / 6.0
        }
        Order::Blocked(_) => sequential(n, 1.0, 1.0),
        Order::Pairwise => 2.0 * total * total + n.max(2.0).log2().ceil() * squares,
        Order::Kahan | Order::Neumaier => 4.0 * total * total + (n * u).powi(2) * n * squares,
    };
    u * u / 3.0 * partial_sums
}

/// The same as factors of `total²` and of `squares`, in which it is linear.
pub(super) fn summed_by(sum: Sum, n: f64) -> (f64, f64) {
    (summed(sum, n, 1.0, 0.0), summed(sum, n, 0.0, 1.0))
}

/// Variance of carrying `carried` (a square) through the partial sums of `n` addends:
/// what a large addend that comes first adds to every rounding after it.
pub(super) fn carried(sum: Sum, n: f64, carried: f64) -> f64 {
    let u = unit(sum.precision);
    let additions = match sum.order {
        Order::Native | Order::Sequential => n,
        Order::Blocked(block) => (block as f64).min(n) + n / block.max(1) as f64,
        Order::Pairwise => n.max(2.0).log2().ceil(),
        Order::Kahan | Order::Neumaier => 4.0,
    };
    u * u / 3.0 * additions * carried
}

/// Whether the label's part is added to an entry of dlogits before that is rounded:
/// wherever dlogits are whole, where p is declared not to be rounded by itself. A job that
/// recorded the parts has them.
pub(super) fn rounds_whole_entries(step: &HeadStep<'_>, roundings: &Roundings) -> bool {
    use backtape::role::Role::{DkLabel, DkLse, DqLabel, DqLse};
    let parts = [DqLse, DqLabel, DkLse, DkLabel];
    let part = |info: &TensorInfo| info.role.is_some_and(|role| parts.contains(&role));
    roundings.widest.path != Path::Fused
        && roundings.widest.p.unit_roundoff() <= F32
        && !step.tensors.values().any(part)
}

/// From here on `g p` lies within two spacings of bf16's exponent of g, so that
/// tokens of one g may round alike.
pub(super) const CONFIDENT: f64 = 0.25;

/// Share of the roundings that are one, of numbers that spread over σ steps of a grid:
/// they have so few errors, not one each. The squares of the steps' shares sum to
/// 1/(2√π σ) for a normal spread.
pub(super) fn share_of_equal_roundings(steps: f64) -> f64 {
    (1.0 / (2.0 * std::f64::consts::PI.sqrt() * steps)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the variance of sequential summation is not underestimated.
    /// Method: the sums themselves, in f32, over many random orders.
    #[test]
    fn sequential_summation_errs_within_the_modelled_variance() {
        let mut state = 0x1234_5678_9abc_def0u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        for shift in [0.0, 0.5, 3.0] {
            let (n, trials) = (1000, 300);
            let (mut squared, mut modelled) = (0.0, 0.0);
            for _ in 0..trials {
                let addends: Vec<f32> = (0..n).map(|_| (uniform() - 0.5 + shift) as f32).collect();
                let exact: f64 = addends.iter().map(|&x| f64::from(x)).sum();
                let squares: f64 = addends.iter().map(|&x| f64::from(x).powi(2)).sum();
                let found: f32 = addends.iter().sum();
                squared += (f64::from(found) - exact).powi(2);
                modelled += summed(Sum::NATIVE, n as f64, exact, squares);
            }
            let share = squared / modelled;
            assert!(share < 1.2, "shift {shift}: {share} of the modelled variance");
            assert!(share > 0.1, "shift {shift}: the model is too wide, {share}");
        }
    }
}
