//! From raw logit to logit, once for all who compute it: `z = softcap tanh(scale x / softcap)`.
//!
//! The formula stands here; on which numbers it runs, and what each operation rounds, is said by
//! [`Number`]. The vectorised rows of the f32 policies (`policy::exp`) and the kernels of a device
//! have their own.

use super::formula::{tanh_bounded, tanh_bounded_slope, tanh_slope};
use super::number::Number;
use super::round::Precision;

/// What turns a dot product (plus bias) into a logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transform {
    /// Factor of the raw logit: 1 / temperature.
    pub scale: f64,
    /// Bound of the scaled logit, where there is one.
    pub softcap: Option<f64>,
    /// True where a hypothesis says that the backward forgot the softcap: its derivative
    /// is then 1, in the reference. No policy forgets it.
    pub uncapped: bool,
}

/// A constant of it: its name, and its value, 0 where there is none.
pub type Constant = (&'static str, fn(&Transform) -> f64);

impl Transform {
    /// Leaves the raw logit as it is.
    pub const NONE: Transform = Transform { scale: 1.0, softcap: None, uncapped: false };

    /// Its constants, for those who take them by name.
    pub const CONSTANTS: [Constant; 2] = [
        ("scale", |transform| transform.scale),
        ("softcap", |transform| transform.softcap.unwrap_or(0.0)),
    ];

    /// Of a scale, and a softcap where there is one.
    pub const fn new(scale: f64, softcap: Option<f64>) -> Transform {
        Transform { scale, softcap, uncapped: false }
    }

    /// With its constants rounded to a format.
    pub fn rounded_to(self, format: Precision) -> Transform {
        let round = |x: f64| format.round64(x);
        Transform { scale: round(self.scale), softcap: self.softcap.map(round), ..self }
    }

    /// Scale and softcap in f32.
    pub fn in_f32(self) -> (f32, Option<f32>) {
        (self.scale as f32, self.softcap.map(|cap| cap as f32))
    }

    /// The logit of a raw one, bias included.
    #[inline]
    pub fn value<N: Number>(&self, raw: N) -> N {
        self.capped(if self.scale == 1.0 { raw } else { raw.times(self.scale).step() })
    }

    /// `softcap tanh(x / softcap)` of a scaled logit x; x where there is no softcap.
    #[inline]
    pub(crate) fn capped<N: Number>(&self, scaled: N) -> N {
        match self.softcap {
            Some(cap) => {
                let cap = scaled.constant(cap);
                tanh_bounded(scaled, cap).step()
            }
            None => scaled,
        }
    }

    /// Derivative of a logit by the raw one, from the logit.
    #[inline]
    pub fn slope_at<N: Number>(&self, logit: N) -> N {
        match self.softcap.filter(|_| !self.uncapped) {
            Some(cap) => {
                let cap = logit.constant(cap);
                tanh_bounded_slope(logit, cap).times(self.scale)
            }
            None => logit.constant(self.scale),
        }
    }

    /// Derivative of a logit by the raw one, from the raw one, bias included.
    pub fn slope(&self, raw: f64) -> f64 {
        self.scale * self.bend(self.scale * raw)
    }

    /// The derivative of `capped`, from the scaled logit.
    #[inline]
    pub(crate) fn bend(&self, scaled: f64) -> f64 {
        self.softcap.filter(|_| !self.uncapped).map_or(1.0, |cap| tanh_slope(scaled / cap))
    }

    /// The raw logit, bias included, that this one is made of; of one at or beyond the softcap an
    /// infinite one.
    pub fn undone(&self, logit: f64) -> f64 {
        let unbent = |cap: f64| cap * (logit / cap).clamp(-1.0, 1.0).atanh();
        self.softcap.map_or(logit, unbent) / self.scale
    }

    /// Whether the raw logit is the logit.
    pub fn is_identity(&self) -> bool {
        self.scale == 1.0 && self.softcap.is_none()
    }

    /// Whether its derivative is another one for each logit.
    pub fn bends(&self) -> bool {
        self.softcap.is_some()
    }

    /// Whether a logit lies beyond so large a share of the softcap, where nothing of the gradient
    /// is left; of one that is no number it may.
    pub fn saturates(&self, logit: f64, share: f64) -> bool {
        self.softcap.is_some_and(|cap| !(logit.abs() < cap * share))
    }

    /// How many results are rounded on the way: a scale is a product; a softcap is a quotient, a
    /// tanh and a product.
    pub fn operations(&self) -> f64 {
        f64::from(u8::from(self.scale != 1.0)) + if self.bends() { 3.0 } else { 0.0 }
    }

    /// Variance of what quotient and tanh lose in a format's smallest numbers, over the square of
    /// that: the softcap multiplies it.
    pub fn lost_in_smallest(&self) -> f64 {
        self.softcap.map_or(0.0, |cap| 2.0 * cap * cap)
    }

    /// How many of its constants a format does not hold, each of which errs alike for all logits.
    pub fn inexact_in(&self, format: Precision) -> u32 {
        let exact = |x: f64| format.round64(x) == x;
        // 1/0.7 as a factor, or 0.7 as a divisor: what the job did is not known.
        let scale = exact(self.scale) && exact(1.0 / self.scale);
        u32::from(!scale) + u32::from(!self.softcap.is_none_or(exact))
    }

    /// Its bits: equal for those that do the same.
    pub fn bits(&self) -> (u64, Option<u64>, bool) {
        (self.scale.to_bits(), self.softcap.map(f64::to_bits), self.uncapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logit_gives_back_its_slope_and_what_it_is_made_of() {
        let transform = Transform { scale: 1.7, softcap: Some(5.0), uncapped: false };
        let logit = |raw: f64| 5.0 * (1.7 * raw / 5.0).tanh();
        for raw in [-3.0, -0.4, 0.0, 0.9, 4.0] {
            let difference = (logit(raw + 1e-5) - logit(raw - 1e-5)) / 2e-5;
            assert!((transform.slope_at(logit(raw)) - difference).abs() < 1e-8, "{raw}");
            assert!((transform.slope(raw) - difference).abs() < 1e-8, "{raw}");
            assert_eq!(transform.value(raw), 5.0 * libm::tanh(1.7 * raw / 5.0));
            assert!((transform.undone(logit(raw)) - raw).abs() < 1e-11, "{raw}");
        }
        let uncapped = Transform { uncapped: true, ..transform };
        assert_eq!((uncapped.slope_at(4.0), uncapped.slope(4.0)), (1.7, 1.7));
        assert!(transform.slope(200.0) > 0.0, "nothing cancels where tanh is 1");
        assert_eq!((Transform::NONE.slope_at(9.0), Transform::NONE.undone(9.0)), (1.0, 9.0));
    }
}
