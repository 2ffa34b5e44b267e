//! The variance that the declared precision explains of each operation of the head.

use super::judge::Judge;
use super::rounding_variance::{CONFIDENT, relative, rounded};
use crate::compare::allowance::FLUSH;
use crate::head::roundings::F32;
use crate::kernels::policy::{Policy, Sum};
use crate::kernels::reference::TermNoise;
use crate::kernels::round::Precision;

/// Relative error of one exp and one multiplication, in units of u: XLA's and
/// libm's exp are within 2 ulp, the product within half.
const EXP_ERROR: f64 = 4.0;

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
        let logit = (square(logits) + compute * compute) / 3.0 + sums.logits.variance(n, 1.0, 0.0);
        // Σ q²k² is about |q|²|k|²/D: its accumulation, its products, and what
        // narrowing q and k costs each of them.
        let each = (square(product) + 2.0 * self.plan.roundings.input().powi(2)) / 3.0;
        let dot = sums.logits.variance(n, 0.0, 1.0 / n.max(1.0)) + each / n.max(1.0);
        TermNoise {
            p_rel_var,
            logit_rel_var: logit,
            dot_rel_var: dot,
            logit_floor: (logits.smallest_subnormal() / 2.0).powi(2),
            cap_rel_var: square(logits) / 3.0 + (EXP_ERROR * compute).powi(2),
            label_step: 2.0 * self.plan.roundings.widest.label_grad.unit_roundoff(),
            filter: self.plan.step.options.declared.gradient_filter.unwrap_or(0.0),
            whole: self.plan.whole_entries,
            exp_rel_var: (EXP_ERROR * compute).powi(2),
            log_p_rel_var: self.plan.roundings.kept_log_p().powi(2) / 3.0,
            confident: if self.constant() > F32 { CONFIDENT } else { 0.0 },
        }
    }

    /// Unit roundoff of the coarsest rounding of `g p`. Where log p is kept its rounding is one of p
    /// that is `|log p|` times as coarse: by ln K on the average over p, as `Σ p |log p|` is the
    /// entropy.
    pub(super) fn constant(&self) -> f64 {
        let Policy { p, dlogits, .. } = self.plan.roundings.widest;
        let of_p = p.unit_roundoff().max(dlogits.unit_roundoff());
        of_p.max(self.plan.roundings.kept_log_p() * self.plan.largest_entropy())
    }

    /// Variance of a token's lse where the sum of its exponentials, and the logarithm of that, are
    /// kept in the format of log p.
    pub(super) fn kept_sum(&self) -> f64 {
        let unit = self.plan.roundings.kept_log_p();
        if unit == 0.0 {
            return 0.0;
        }
        (unit * unit + (unit * self.plan.largest_entropy()).powi(2)) / 3.0
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
        Sum::of(precision).variance(parts as f64, total, squares)
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
        let sum = self.plan.roundings.widest.sums.lse.variance(v as f64, 1.0, 0.0);
        let lost = self.plan.step.options.transform.lost_in_smallest();
        let logits = logits + noise.logit_floor * (1.0 + lost) + self.kept_sum();
        logits + sum + (EXP_ERROR * compute).powi(2) + (compute * (token.lse.abs() + x)).powi(2)
    }

    /// Variance of a label logit before it is stored: products may be rounded where
    /// logits may. `squares` is `Σ q²k²`, `dot` the product.
    pub(super) fn label_logit_variance(&self, label: &LabelSize, d: usize, biased: bool) -> f64 {
        let Policy { logits, product, sums, .. } = self.plan.roundings.widest;
        let scale = self.plan.step.options.transform.scale;
        let u = logits.unit_roundoff().max(product.unit_roundoff());
        let products = (u * u + 2.0 * self.plan.roundings.input().powi(2)) / 3.0 * label.squares;
        let sum = sums.logits.variance(d as f64, label.dot, label.squares);
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
    ///
    /// A job that keeps log p in few bits has its denominator in them too, and 1 over it: two
    /// roundings of all gradients.
    pub(super) fn shared_scale(&self, alike: f64) -> f64 {
        let denominator = 2.0 * self.plan.roundings.kept_log_p().powi(2) / 3.0;
        (2.0 * self.plan.roundings.compute()).powi(2) + alike * self.one_constant() + denominator
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
