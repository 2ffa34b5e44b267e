//! The variance that the declared precision explains, per element of a stage.
//!
//! Rounding to nearest errs uniformly within half a spacing: at most `u|x|`, so
//! its variance is at most `u²x²/3`. A sum of `n` addends in an accumulator of
//! unit roundoff `u` rounds every partial sum `s_k` once; for addends in an
//! order that does not know them, `E s_k² = (k/n)² r² + k/n (1 - k/n) S` with
//! `r` the total and `S` the sum of squares, so `Σ_k s_k² ≤ n/3 r² + n/6 S`
//! and the variance is `u²/3` of that (Higham and Mary 2019 derive the √n law).
//! Sequential summation is the worst order in use; blocked ones do better.

use super::forward::CONFIDENT;
use super::judge::Judge;
use crate::compare::allowance::Rounding;
use crate::dump::TensorInfo;
use crate::head::roundings::F32;
use crate::head::{HeadStep, Roundings};
use crate::kernels::policy::{Order, Path, Policy, Sum};
use crate::kernels::reference::TermNoise;
use crate::kernels::round::Precision;

/// Below the smallest normal f32 (and bf16) hardware may flush to zero.
pub(super) const FLUSH: f64 = 1.175_494_350_822_287_5e-38;

/// Relative error of one exp and one multiplication, in units of u: XLA's and
/// libm's exp are within 2 ulp, the product within half.
const EXP_ERROR: f64 = 4.0;

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
pub(super) fn whole(step: &HeadStep<'_>, roundings: &Roundings) -> bool {
    use backtape::role::Role::{DkLabel, DkLse, DqLabel, DqLse};
    let parts = [DqLse, DqLabel, DkLse, DkLabel];
    let part = |info: &TensorInfo| info.role.is_some_and(|role| parts.contains(&role));
    roundings.widest.path != Path::Fused
        && roundings.widest.p.unit_roundoff() <= F32
        && !step.tensors.values().any(part)
}

impl Judge<'_> {
    /// Relative variance of one softmax term `g_lse p` as the job may hold it.
    pub(super) fn term_noise(&self, d: usize) -> TermNoise {
        let Policy { logits, p, dlogits, product, sums, .. } = self.plan.roundings.widest;
        let compute = self.plan.roundings.compute();
        let square = |p: Precision| p.unit_roundoff().powi(2);
        // p may be rounded, and the product g·p again.
        let p_rel_var = (square(p) + square(dlogits)) / 3.0 + (EXP_ERROR * compute).powi(2);
        // The logit's own rounding, and its accumulation over D.
        let n = d as f64;
        let logit = (square(logits) + compute * compute) / 3.0 + summed(sums.logits, n, 1.0, 0.0);
        // Σ q²k² is about |q|²|k|²/D: its accumulation, its products, and what
        // narrowing q and k costs each of them.
        let each = (square(product) + 2.0 * self.plan.roundings.input().powi(2)) / 3.0;
        let dot = summed(sums.logits, n, 0.0, 1.0 / n.max(1.0)) + each / n.max(1.0);
        TermNoise {
            p_rel_var,
            logit_rel_var: logit,
            dot_rel_var: dot,
            logit_floor: (logits.smallest_subnormal() / 2.0).powi(2),
            cap_rel_var: square(logits) / 3.0 + (EXP_ERROR * compute).powi(2),
            label_step: 2.0 * self.plan.roundings.widest.label_grad.unit_roundoff(),
            filter: self.plan.step.options.declared.gradient_filter.unwrap_or(0.0),
            whole: self.plan.whole,
            exp_rel_var: (EXP_ERROR * compute).powi(2),
            confident: if self.constant() > F32 { CONFIDENT } else { 0.0 },
        }
    }

    /// Unit roundoff of the coarsest rounding of `g p`.
    fn constant(&self) -> f64 {
        let Policy { p, dlogits, .. } = self.plan.roundings.widest;
        p.unit_roundoff().max(dlogits.unit_roundoff())
    }

    /// Relative variance of one such rounding, of entries that share it.
    pub(super) fn one_constant(&self) -> f64 {
        self.constant().powi(2) / 3.0
    }

    /// Half the smallest step of what an entry of dlogits may be rounded to, where
    /// that is coarse: f16 and f8 lose entries of a mean over many tokens in it. A step
    /// of p is `|g|` times as large in dlogits (and in a scaled logit's product times
    /// its scale); `g` is 0 where no p lies between.
    pub(super) fn entry_floor(&self, g: f64) -> f64 {
        let Policy { p, dlogits, .. } = self.plan.roundings.widest;
        let coarse = |precision: Precision| {
            let tiny = precision.smallest_subnormal() / 2.0;
            if tiny > FLUSH { tiny } else { 0.0 }
        };
        let by_p = g.abs() * self.plan.step.options.transform.scale.abs().max(1.0);
        (coarse(dlogits).powi(2) + (by_p * coarse(p)).powi(2)).sqrt()
    }

    /// Variance of one addend of dq or dk beyond its entry's: the rounding of the
    /// product, relative.
    pub(super) fn product_rel_var(&self) -> f64 {
        self.plan.roundings.widest.product.unit_roundoff().powi(2) / 3.0
    }

    /// Variance of narrowing the other factor to the GEMM's input, relative: all rows
    /// meet the same narrowed k (or q), so they share it.
    pub(super) fn narrowing(&self) -> f64 {
        self.plan.roundings.input().powi(2) / 3.0
    }

    /// Variance of adding up partial results: tiles of the vocabulary for dq, tiles
    /// or chunks of tokens for dk.
    pub(super) fn joined(&self, parts: usize, chunks: bool, total: f64, squares: f64) -> f64 {
        let Policy { tile_add, chunk_add, .. } = self.plan.roundings.widest;
        let precision = if chunks { chunk_add } else { tile_add };
        summed(Sum::of(precision), parts as f64, total, squares)
    }

    /// The same as factors of `total²` and of `squares`.
    pub(super) fn joined_by(&self, parts: usize, chunks: bool) -> (f64, f64) {
        (self.joined(parts, chunks, 1.0, 0.0), self.joined(parts, chunks, 0.0, 1.0))
    }

    /// Relative variance of the constants that make a logit of a product, which round
    /// alike for all: those that its format does not hold exactly.
    pub(super) fn constants(&self) -> f64 {
        let logits = self.plan.roundings.widest.logits;
        let transform = self.plan.step.options.transform;
        let u = logits.unit_roundoff();
        // tanh of a small number of few bits is rounded back to that number: its x²/3 is lost
        // of every logit, to the same side.
        let tanh = transform.bends() && u > F32;
        f64::from(transform.inexact_in(logits) + u32::from(tanh)) * u * u / 3.0
    }

    /// Operations between the product and the logit, each of which may round.
    fn logit_operations(&self, biased: bool) -> f64 {
        1.0 + f64::from(u8::from(biased)) + self.plan.step.options.transform.operations()
    }

    /// Variance of a token's lse before it is stored: its logits' errors, which
    /// p averages, and a sum of V exponentials. `norms` is the largest `|q|²|k|²`,
    /// `bias` the largest |bias|.
    pub(super) fn lse_variance(&self, token: &TokenSize, d: usize, v: usize, bias: f64) -> f64 {
        let noise = self.term_noise(d);
        let scale = self.plan.step.options.transform.scale.abs();
        // A result on the way is larger than the logit by the bias at most; a bound
        // multiplies its error by less than it divides.
        let x = token.row_max.abs() + 1.0 + scale * bias;
        let operations = self.logit_operations(bias > 0.0);
        let logits = operations * noise.logit_rel_var * x * x
            + noise.dot_rel_var * scale * scale * token.norms;
        let compute = self.plan.roundings.compute();
        let sum = summed(self.plan.roundings.widest.sums.lse, v as f64, 1.0, 0.0);
        let lost = self.plan.step.options.transform.lost_in_smallest();
        let logits = logits + noise.logit_floor * (1.0 + lost);
        logits + sum + (EXP_ERROR * compute).powi(2) + (compute * (token.lse.abs() + x)).powi(2)
    }

    /// Variance of a label logit before it is stored: products may be rounded where
    /// logits may. `squares` is `Σ q²k²`, `dot` the product.
    pub(super) fn label_logit_variance(&self, label: &LabelSize, d: usize, biased: bool) -> f64 {
        let Policy { logits, product, sums, .. } = self.plan.roundings.widest;
        let scale = self.plan.step.options.transform.scale;
        let u = logits.unit_roundoff().max(product.unit_roundoff());
        let products = (u * u + 2.0 * self.plan.roundings.input().powi(2)) / 3.0 * label.squares;
        let sum = summed(sums.logits, d as f64, label.dot, label.squares);
        let before = scale * scale * (products + sum);
        let lost = self.plan.step.options.transform.lost_in_smallest();
        let before = before + lost * (logits.smallest_subnormal() / 2.0).powi(2);
        let rounding = |x: f64| rounded(logits, x) + relative(self.plan.roundings.compute(), x);
        // The product and each result up to the logit, none of which exceeds both.
        let largest = label.value.abs().max((scale * label.dot).abs());
        before + self.logit_operations(biased) * rounding(largest)
    }

    /// Relative variance, alike over a token's row, from the lse it used. z-loss
    /// makes `1 + 2 λ lse` of it once more.
    pub(super) fn lse_scale(&self, lse: f64, stored: f64) -> f64 {
        if !lse.is_finite() {
            return 0.0; // p is 0, or no number: nothing of it is rounded
        }
        let kept = self.plan.roundings.lse.map_or(stored, |kept| kept.unit_roundoff().max(stored));
        let compute = self.plan.roundings.compute();
        let z = 2.0 * self.plan.step.options.declared.z_loss;
        let by_z = if z == 0.0 { 0.0 } else { (z / (1.0 + z * lse)).abs() };
        (compute * (lse.abs() + EXP_ERROR)).powi(2)
            + (kept * lse * (1.0 + by_z)).powi(2) / 3.0
            + (compute * EXP_ERROR * by_z * lse).powi(2)
    }

    /// Relative variance of a label gradient's scalar, which multiplies a row:
    /// g itself, and in `plain` the rounded entry of dlogits.
    pub(super) fn label_row_scale(&self) -> f64 {
        let entry = match self.plan.step.options.plain() {
            true => self.plan.roundings.widest.dlogits.unit_roundoff(),
            false => 0.0,
        };
        (2.0 * self.plan.roundings.compute()).powi(2) + entry * entry / 3.0
    }

    /// Relative variance of one constant that rounds alike for all tokens:
    /// `g p` where p is near 1, and `g (p - 1)` where p is near 0.
    /// `alike` is the share of the roundings, 0 to 1, that are one.
    pub(super) fn shared_scale(&self, alike: f64) -> f64 {
        (2.0 * self.plan.roundings.compute()).powi(2) + alike * self.one_constant()
    }

    /// Relative variance of what the transform does to all logits alike: the job holds
    /// the temperature in its own precision and may multiply by its reciprocal, and an
    /// implementation of tanh errs to one side by an ulp or two (XLA's is a rational
    /// function). Two roundings, so `2 compute` as in `shared_scale`, and those of
    /// constants that the logits' format does not hold.
    pub(super) fn transform_scale(&self) -> f64 {
        let transform = self.plan.step.options.transform;
        match transform.is_identity() {
            true => 0.0,
            false => (2.0 * self.plan.roundings.compute()).powi(2) + self.constants(),
        }
    }
}

/// What the lse of a token is made of.
pub(super) struct TokenSize {
    pub(super) lse: f64,
    pub(super) row_max: f64,
    pub(super) norms: f64,
}

/// What the logit of a label is made of.
pub(super) struct LabelSize {
    pub(super) value: f64,
    pub(super) dot: f64,
    pub(super) squares: f64,
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
