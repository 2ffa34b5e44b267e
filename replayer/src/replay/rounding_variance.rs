//! The variance that the declared precision explains, per element of a stage.
//!
//! Rounding to nearest errs uniformly within half a spacing: at most `u|x|`, so
//! its variance is at most `u²x²/3`. `kernels::policy::summed` has that of a sum.

use crate::compare::allowance::FLUSH;
use crate::dump::TensorInfo;
use crate::head::roundings::F32;
use crate::head::{HeadStep, Roundings};
use crate::kernels::policy::{Order, Path, Sum};
use crate::kernels::round::Precision;

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

/// Variance of an operation on `x` of unit roundoff `u`.
pub(super) fn relative(u: f64, x: f64) -> f64 {
    u * u * x * x / 3.0 + FLUSH * FLUSH
}

/// The variance of a sum as factors of `total²` and of `squares`, in which it is linear.
pub(super) fn summed_by(sum: Sum, n: f64) -> (f64, f64) {
    (sum.variance(n, 1.0, 0.0), sum.variance(n, 0.0, 1.0))
}

/// Variance of carrying `carried` (a square) through the partial sums of `n` addends:
/// what a large addend that comes first adds to every rounding after it.
pub(super) fn carried(sum: Sum, n: f64, carried: f64) -> f64 {
    let u = sum.unit();
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
                let sum: f32 = addends.iter().sum();
                squared += (f64::from(sum) - exact).powi(2);
                modelled += Sum::NATIVE.variance(n as f64, exact, squares);
            }
            let share = squared / modelled;
            assert!(share < 1.2, "shift {shift}: {share} of the modelled variance");
            assert!(share > 0.1, "shift {shift}: the model is too wide, {share}");
        }
    }
}
