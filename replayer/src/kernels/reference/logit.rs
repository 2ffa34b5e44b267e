//! From the product of q and k to a logit, and what rounding on the way does to it.
//!
//! `z0 = q k + bias`, `z1 = scale z0`, `z = softcap tanh(z1 / softcap)`. A job rounds
//! the result of each operation that it has, so each adds its own variance, carried to
//! the logit by the derivative of what follows it.

use super::backward::TermNoise;
use crate::kernels::matrix::HeadInputs;
use crate::kernels::transform::Transform;

/// The options that make a logit of a product.
#[derive(Clone, Copy)]
pub(super) struct Chain<'a> {
    bias: Option<&'a [f64]>,
    transform: Transform,
    /// Given logits were stored by the job: no product was rounded on the way.
    given: bool,
}

/// A logit, and how it answers to its product.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Logit {
    /// The logit itself.
    pub(super) value: f64,
    /// Variance of the logit, as rounding makes it.
    pub(super) var: f64,
    /// Derivative of the logit by the product: `F = scale (1 - tanh²)`.
    pub(super) slope: f64,
    /// Absolute variance of `slope`: where tanh saturates there is no relative one.
    pub(super) slope_var: f64,
}

impl<'a> Chain<'a> {
    pub(super) fn of(inputs: &HeadInputs<'a>) -> Self {
        let &HeadInputs { bias, transform, given, .. } = inputs;
        Chain { bias, transform, given: given.is_some() }
    }

    /// Whether the product is the logit.
    pub(super) fn is_plain(&self) -> bool {
        self.bias.is_none() && self.transform.is_identity()
    }

    /// Turns products into logits in place; `first` is the column of the first.
    pub(super) fn apply(&self, row: &mut [f64], first: usize) {
        if !self.is_plain() {
            for (v, x) in row.iter_mut().enumerate() {
                *x = self.transform.value(self.biased(*x, first + v));
            }
        }
    }

    /// The logit of column `v` with its variances; `norms` is `|q|² |k|²`.
    pub(super) fn logit(&self, product: f64, v: usize, norms: f64, noise: &TermNoise) -> Logit {
        let biased = self.biased(product, v);
        let Transform { scale, softcap, .. } = self.transform;
        let scaled = scale * biased;
        let square_if = |present: bool, x: f64| if present { square(finite(x)) } else { 0.0 };
        let scales = scale != 1.0;
        // Squares of the results before scaling, then of all before the softcap.
        let before = square_if(!self.given, product) + square_if(self.bias.is_some(), biased);
        let before = square(scale) * before + square_if(scales, scaled);
        let sums = noise.dot_rel_var * square(scale) * norms;
        let Some(cap) = softcap else {
            // Given and nothing done to it: the rounding is that of its own dtype.
            let untouched = square_if(self.given && self.bias.is_none() && !scales, scaled);
            let var = noise.logit_rel_var * (before + untouched) + floor(noise, scaled) + sums;
            return Logit { value: scaled, var, slope: scale, slope_var: 0.0 };
        };
        let (value, slope) = (self.transform.capped(scaled), self.transform.bend(scaled));
        let tanh = value / cap;
        let scaled_var = noise.logit_rel_var * before + sums;
        let from_tanh = 4.0 * square(square(tanh)) * noise.cap_rel_var;
        let from_logit = square(2.0 * tanh * slope / cap) * scaled_var;
        // A quotient, a tanh and a product: three results are rounded, and what the
        // first two lose in the format's smallest numbers the product multiplies.
        let own_variance = 3.0 * noise.logit_rel_var * square(value)
            + noise.logit_floor * (1.0 + self.transform.lost_in_smallest());
        Logit {
            value,
            var: square(slope) * scaled_var + own_variance,
            slope: scale * slope,
            slope_var: square(scale) * (from_tanh + from_logit),
        }
    }

    fn biased(&self, product: f64, v: usize) -> f64 {
        self.bias.map_or(product, |bias| product + bias[v])
    }
}

impl Logit {
    /// The product as it is.
    #[inline(always)]
    pub(super) fn plain(product: f64, norms: f64, noise: &TermNoise) -> Self {
        let var = noise.logit_rel_var * square(finite(product))
            + floor(noise, product)
            + noise.dot_rel_var * norms;
        Logit { value: product, var, slope: 1.0, slope_var: 0.0 }
    }
}

/// Variance in the format's smallest numbers, which an infinite logit is not near.
fn floor(noise: &TermNoise, x: f64) -> f64 {
    if x.is_infinite() { 0.0 } else { noise.logit_floor }
}

/// An infinite logit is rounded to itself: it has no error to carry on.
fn finite(x: f64) -> f64 {
    if x.is_infinite() { 0.0 } else { x }
}

fn square(x: f64) -> f64 {
    x * x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use crate::kernels::round::Precision;
    use crate::kernels::uncertain::Roundings;

    /// Goal: the variance that is written out here is the one that the formula of a logit propagates
    /// by itself. It may be larger: the quotient by a softcap is taken to err as its tanh does.
    #[test]
    fn the_variance_of_a_logit_is_the_propagated_one() {
        let mut draw = Draw::new(5);
        let unit = Precision::Bf16.unit_roundoff();
        for trial in 0..3000 {
            let noise = TermNoise {
                logit_rel_var: unit * unit / 3.0,
                dot_rel_var: 1e-4 * draw.unit(),
                ..TermNoise::default()
            };
            let transform = Transform::new(
                if trial % 2 == 0 { 1.0 } else { 0.5 + draw.unit() },
                (trial % 3 == 0).then(|| 5.0 + 40.0 * draw.unit()),
            );
            let bias = [3.0 * draw.normal()];
            let bias = (trial % 5 == 0).then_some(&bias[..]);
            let (product, norms) = (8.0 * draw.normal(), 50.0 * draw.unit());
            let written = Chain { bias, transform, given: false }.logit(product, 0, norms, &noise);
            let roundings = Roundings::new(unit, None);
            let own_variance = noise.logit_rel_var * product * product + noise.dot_rel_var * norms;
            let mut raw = roundings.with_variance(product, own_variance);
            if let Some(bias) = bias {
                raw = raw + roundings.exact(bias[0]);
            }
            let propagated = transform.value(raw);
            assert_eq!(written.value, propagated.value);
            let (propagated, _) = propagated.variances();
            let ratio = written.var / propagated;
            let most = if transform.bends() { 3.0 } else { 1.0 + 1e-9 };
            assert!((1.0 - 1e-9..=most).contains(&ratio), "{trial}: {ratio} {transform:?}");
        }
    }
}
