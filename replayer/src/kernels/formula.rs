//! The formulas of softmax cross-entropy, each once, over numbers of any kind.
//!
//! The logit is `transform`, an entry of dlogits is `matrix::TokenCotangents`; the rest is here.

use super::number::Number;

/// The softmax of a logit: `exp(z - lse)`.
#[inline(always)]
pub fn probability<N: Number>(logit: N, lse: N) -> N {
    log_probability(logit, lse).exp().step()
}

/// Its logarithm, `z - lse`.
#[inline(always)]
pub fn log_probability<N: Number>(logit: N, lse: N) -> N {
    logit - lse
}

/// A number bounded by tanh: `c tanh(x / c)`.
#[inline(always)]
pub fn tanh_bounded<N: Number>(x: N, cap: N) -> N {
    (x / cap.clone()).tanh() * cap
}

/// The derivative of that by x, from its value: `1 - (value / c)²`.
#[inline(always)]
pub fn tanh_bounded_slope<N: Number>(value: N, cap: N) -> N {
    (value / cap).one_minus_square()
}

/// The derivative of tanh at x: `1 - tanh²(x)` as `4 e / (1 + e)²` with `e = exp(-2 |x|)`. The
/// subtraction would cancel where tanh saturates, and there the gradient is all in what is left.
#[inline(always)]
pub fn tanh_slope<N: Number>(x: N) -> N {
    let e = x.abs().times(-2.0).exp();
    let sum = e.clone().plus(1.0);
    e.times(4.0) / (sum.clone() * sum)
}

/// The derivative of the loss by a logit of softmax p, the label's own part left out: `c p + s`, c
/// the cotangent of lse and s that of every logit.
#[inline(always)]
pub fn dense_entry<N: Number>(p: N, of_lse: N, smooth: N) -> N {
    p * of_lse + smooth
}

/// What a token's loss is made of beside its lse and its label's logit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenLoss {
    /// Share of the target that all classes have together, `s`.
    pub smoothing: f64,
    /// Factor of the squared lse, `λ`.
    pub z_loss: f64,
}

impl TokenLoss {
    /// The loss of a token before its weight: `lse - (1 - s) z_y - s mean(z) + λ lse²`. The mean
    /// is that of the logits of all valid classes, asked for where there is label smoothing.
    #[inline]
    pub fn value<N: Number>(&self, lse: N, label: N, mean: impl FnOnce() -> N) -> N {
        let mut loss = lse.clone() - self.of_label(label);
        if self.smoothing != 0.0 {
            loss = loss - mean().times(self.smoothing);
        }
        if self.z_loss != 0.0 {
            loss = loss + (lse.clone() * lse).times(self.z_loss);
        }
        loss
    }

    fn of_label<N: Number>(&self, label: N) -> N {
        if self.smoothing == 0.0 { label } else { label.times(1.0 - self.smoothing) }
    }

    /// Its derivative by lse: `1 + 2 λ lse`.
    #[inline]
    pub fn by_lse<N: Number>(&self, lse: N) -> N {
        lse.constant(1.0) + lse.times(2.0 * self.z_loss)
    }
}

/// What is subtracted from logits before exp: their maximum. An infinite one would turn inf - inf
/// into NaN where lse is plainly that inf, so nothing is subtracted then.
#[inline]
pub fn shift<N: Number + PartialOrd>(max: N) -> N {
    let infinity = max.constant(f64::INFINITY);
    let is_finite = max < infinity && max > max.constant(f64::NEG_INFINITY);
    if is_finite { max } else { infinity.constant(0.0) }
}

/// The log-sum-exp of logits that come one part after the other: their maximum so far, and the sum
/// of `exp(z - shift(max))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunningSum<N> {
    /// The largest logit so far; -inf before the first.
    pub max: N,
    /// Of the exponentials.
    pub sum: N,
}

impl<N: Number + PartialOrd + Copy> RunningSum<N> {
    /// Makes the sum one of a maximum that is at least as large, and returns the new shift.
    #[inline]
    pub fn raise(&mut self, max: N) -> N {
        let (old, new) = (shift(self.max), shift(max));
        // Where all logits so far are masked the sum is 0 (or NaN) and stays so.
        if self.max > max.constant(f64::NEG_INFINITY) && old != new {
            self.sum = self.sum * (old - new).exp();
        }
        self.max = max;
        new
    }

    /// The larger of the maximum and another number; NaN is passed over.
    #[inline]
    pub fn larger(&self, other: N) -> N {
        if other > self.max { other } else { self.max }
    }

    /// Takes in one logit that stands in `count` columns.
    pub fn absorb_copies(&mut self, logit: N, count: usize) {
        if count > 0 {
            let shift = self.raise(self.larger(logit));
            self.sum = self.sum + (logit - shift).exp().times(count as f64);
        }
    }

    /// The log-sum-exp of what was taken in.
    #[inline]
    pub fn lse(&self) -> N {
        self.lse_kept(|x| x)
    }

    /// The same where the sum and its logarithm are kept in a format of their own.
    #[inline]
    pub fn lse_kept(&self, kept: impl Fn(N) -> N) -> N {
        shift(self.max) + kept(kept(self.sum).ln())
    }
}

/// The log-sum-exp of a row that lies in memory, the exponentials added one after the other, and of
/// `masked` more columns that hold the same logit.
pub fn log_sum_exp<N>(row: &[N], masked: Option<(N, usize)>) -> N
where
    N: Number + PartialOrd + Copy + From<f32>,
{
    let none = N::from(f32::NEG_INFINITY);
    let mut running = RunningSum { max: none, sum: N::from(0.0) };
    let largest = row.iter().fold(none, |max, &z| if z > max { z } else { max });
    let shift = running.raise(largest);
    running.sum = row.iter().fold(running.sum, |sum, &z| sum + (z - shift).exp());
    if let Some((mask, count)) = masked {
        running.absorb_copies(mask, count);
    }
    running.lse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    #[test]
    fn parts_of_a_row_give_the_lse_of_the_whole_and_infinite_logits_are_no_nan() {
        let mut draw = Draw::new(7);
        let row: Vec<f64> = (0..100).map(|_| 30.0 * draw.normal()).collect();
        let exact = row.iter().map(|z| z.exp()).sum::<f64>().ln();
        assert!((log_sum_exp(&row, None) - exact).abs() < 1e-13 * exact.abs());
        let masked = (row.iter().map(|z| z.exp()).sum::<f64>() + 9.0 * 2f64.exp()).ln();
        assert!((log_sum_exp(&row, Some((2.0, 9))) - masked).abs() < 1e-13 * exact.abs());
        let infinite = [f64::INFINITY, 1.0];
        assert_eq!(log_sum_exp(&infinite, None), f64::INFINITY);
        assert_eq!(log_sum_exp(&[f64::NEG_INFINITY; 3], None), f64::NEG_INFINITY);
        assert!(log_sum_exp(&[f64::NAN, 1.0], None).is_nan());
        assert!(log_sum_exp(&[f32::NAN, 1.0], None).is_nan());
    }

    #[test]
    fn the_derivative_of_a_tokens_loss_by_lse_is_its_slope() {
        let loss = TokenLoss { smoothing: 0.1, z_loss: 0.03 };
        let loss_at = |lse: f64| loss.value(lse, 0.7, || 0.2);
        let slope = (loss_at(2.0 + 1e-5) - loss_at(2.0 - 1e-5)) / 2e-5;
        assert!((loss.by_lse(2.0) - slope).abs() < 1e-9);
        assert_eq!(TokenLoss::default().value(3.0, 1.0, || f64::NAN), 2.0);
    }
}
