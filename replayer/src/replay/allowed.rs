//! The variance that the declared precision explains, per element of a stage.
//!
//! Rounding to nearest errs uniformly within half a spacing: at most `u|x|`, so
//! its variance is at most `u²x²/3`. A sum of `n` addends in an accumulator of
//! unit roundoff `u` rounds every partial sum `s_k` once; for addends in an
//! order that does not know them, `E s_k² = (k/n)² r² + k/n (1 - k/n) S` with
//! `r` the total and `S` the sum of squares, so `Σ_k s_k² ≤ n/3 r² + n/6 S`
//! and the variance is `u²/3` of that (Higham and Mary 2019 derive the √n law).
//! Sequential summation is the worst order in use; blocked ones do better.

use super::Replay;
use crate::head::roundings::F32;
use crate::kernels::reference::TermNoise;

/// Below the smallest normal f32 (and bf16) hardware may flush to zero.
const FLUSH: f64 = 1.175_494_350_822_287_5e-38;
/// Half the smallest spacing of f16.
const F16_TINY: f64 = 2.980_232_238_769_531e-8;

/// Relative error of one exp and one multiplication in f32, in units of u:
/// XLA's and libm's exp are within 2 ulp, the product within half.
const EXP_ERROR: f64 = 4.0;

/// Variance of rounding `x` once to a dtype of unit roundoff `u`.
pub(super) fn rounded(u: f64, x: f64) -> f64 {
    let tiny = if u > 2e-4 && u < 1e-3 { F16_TINY } else { FLUSH };
    u * u * x * x / 3.0 + tiny * tiny
}

/// Variance of summing `n` addends of total `total` and squares `squares`.
pub(super) fn summed(u: f64, n: f64, total: f64, squares: f64) -> f64 {
    u * u / 3.0 * (n / 3.0 * total * total + n / 6.0 * squares)
}

impl Replay<'_> {
    /// Relative variance of one softmax term `g_lse p` as the job may hold it.
    pub(super) fn term_noise(&self, d: usize) -> TermNoise {
        let r = &self.roundings;
        // p may be rounded, and the product g·p again.
        let p = 2.0 * (r.dlogits * r.dlogits) / 3.0 + (EXP_ERROR * F32).powi(2);
        // The logit's own rounding, and its accumulation over D.
        let n = d as f64;
        let logit = (r.logits * r.logits + F32 * F32) / 3.0 + summed(r.accumulate, n, 1.0, 0.0);
        // Σ q²k² is about |q|²|k|²/D.
        let dot = summed(r.accumulate, n, 0.0, 1.0 / n.max(1.0));
        TermNoise { p_rel_var: p, logit_rel_var: logit, dot_rel_var: dot, ..TermNoise::default() }
    }

    /// Variance of a token's lse before it is stored: its logits' errors, which
    /// p averages, and a sum of V exponentials.
    pub(super) fn lse_variance(
        &self,
        lse: f64,
        row_max: f64,
        norms: f64,
        d: usize,
        v: usize,
    ) -> f64 {
        let noise = self.term_noise(d);
        let x = row_max.abs() + 1.0;
        let logits = noise.logit_rel_var * x * x + noise.dot_rel_var * norms;
        let sum = summed(self.roundings.accumulate, v as f64, 1.0, 0.0);
        logits + sum + (EXP_ERROR * F32).powi(2) + (F32 * (lse.abs() + x)).powi(2)
    }

    /// Variance of a label logit before it is stored: products may be rounded
    /// where logits may.
    pub(super) fn label_logit_variance(&self, value: f64, squares: f64, d: usize) -> f64 {
        let r = &self.roundings;
        let products = r.logits * r.logits * squares / 3.0;
        rounded(r.logits, value) + products + summed(r.accumulate, d as f64, value, squares)
    }

    /// Relative variance, alike over a token's row, from the lse it used.
    pub(super) fn lse_scale(&self, lse: f64, stored: f64) -> f64 {
        (F32 * (lse.abs() + EXP_ERROR)).powi(2) + (stored * lse).powi(2) / 3.0
    }

    /// Relative variance of a label gradient's scalar, which multiplies a row:
    /// g itself in f32, and in `plain` the rounded entry of dlogits.
    pub(super) fn label_row_scale(&self) -> f64 {
        let entry = if self.step.options.plain { self.roundings.dlogits } else { 0.0 };
        (2.0 * F32).powi(2) + entry * entry / 3.0
    }

    /// Relative variance of one constant that rounds alike for all tokens:
    /// `g p` where p is near 1, and `g (p - 1)` where p is near 0.
    pub(super) fn shared_scale(&self, alike: bool) -> f64 {
        let constant = if alike { self.roundings.dlogits } else { 0.0 };
        (2.0 * F32).powi(2) + constant * constant / 3.0
    }

    /// Variance of adding two parts, each of which may be rounded first.
    pub(super) fn added(&self, one: f64, other: f64) -> f64 {
        let parts = self.roundings.parts;
        rounded(parts, one) + rounded(parts, other) + rounded(F32, one + other)
    }
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
                modelled += summed(F32, n as f64, exact, squares);
            }
            let share = squared / modelled;
            assert!(share < 1.2, "shift {shift}: {share} of the modelled variance");
            assert!(share > 0.1, "shift {shift}: the model is too wide, {share}");
        }
    }
}
