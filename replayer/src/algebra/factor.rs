//! What a factor that all values of a gradient have in common says of how it was unscaled or clipped.

use super::causes;
use super::declaration::Limit;
use super::outcome::Reading;

/// How near a factor must be to a number to be taken for it, at the least.
pub(super) const NEAR: f64 = 1e-3;

/// Whether a factor is this number to rounding.
pub(super) fn is_near(factor: f64, number: f64) -> bool {
    (factor / number - 1.0).abs() < NEAR
}

/// A factor of all values of a tensor, and how far rounding may bring it from its number.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub(super) value: f64,
    pub(super) tolerance: f64,
}

impl Factor {
    fn is(self, number: f64) -> bool {
        (self.value / number - 1.0).abs() < self.tolerance
    }
}

/// What a factor of what is left of a gradient that was divided by its loss scale says.
pub(super) fn unscaling(
    factor: Factor,
    scale: f64,
    limit: Option<Limit>,
    others: &[f64],
) -> Option<Reading> {
    if let Some(limit) = limit.filter(|own| own.coefficient() < 1.0 && factor.is(own.coefficient()))
    {
        let words = format!(
            "it was clipped with the loss scale {scale} in it: the norm {} is of the scaled \
             gradients, and gave the coefficient {:.6}",
            limit.norm,
            limit.coefficient()
        );
        return Some(causes::CLIP_BEFORE_UNSCALE.reads(words));
    }
    if factor.is(scale) {
        let words = format!("the loss scale {scale} is still in it");
        return Some(causes::SCALE_LEFT.reads(words));
    }
    if factor.is(1.0 / scale) {
        let words = format!("it was divided by the loss scale {scale} twice");
        return Some(causes::SCALE_TWICE.reads(words));
    }
    let other =
        others.iter().find(|other| !is_near(**other, scale) && factor.is(scale / **other))?;
    let words = format!(
        "it was divided by {other}, the loss scale of other gradients, and its loss was multiplied by \
         {scale}"
    );
    Some(causes::SCALE_LEFT.reads(words))
}

/// The loss scale of a gradient that is clipped.
#[derive(Clone, Copy, Default)]
pub(super) struct Scales {
    /// What its loss was multiplied by.
    pub(super) own: Option<f64>,
    /// The same where it was not taken out before it was clipped.
    pub(super) late: Option<f64>,
    /// The same where clipping takes it out.
    pub(super) together: Option<f64>,
}

/// What a factor of a clipped gradient says. `limit`: what it is clipped to.
pub(super) fn clipping(factor: Factor, limit: Option<Limit>, scales: Scales) -> Option<Reading> {
    match (scales.together, limit) {
        (Some(scale), Some(limit)) => clipping_and_unscaling(factor, limit, scale),
        _ => clipped_by(factor, limit.map_or(1.0, |limit| limit.coefficient()), scales),
    }
}

/// The same of one that was clipped and divided by the loss scale in one operation.
fn clipping_and_unscaling(factor: Factor, limit: Limit, scale: f64) -> Option<Reading> {
    let coefficient = limit.coefficient().min(1.0);
    if factor.is(scale) {
        let words = format!("the loss scale {scale} is still in it");
        return Some(causes::SCALE_LEFT.reads(words));
    }
    if factor.is(scale / coefficient) {
        let words = format!("it was neither divided by the loss scale {scale} nor clipped");
        return Some(causes::SCALE_LEFT.reads(words));
    }
    let scaled = Limit { norm: limit.norm * scale, ..limit }.coefficient();
    if coefficient == 1.0 && scaled < 1.0 && factor.is(scaled) {
        let words = format!("it was clipped by a norm that has the loss scale {scale} in it");
        return Some(causes::CLIP_BEFORE_UNSCALE.reads(words));
    }
    if coefficient < 1.0 && factor.is(1.0 / scale) {
        let words = format!(
            "it was clipped by a norm that has the loss scale {scale} in it, or was divided by that \
             scale twice"
        );
        return Some(causes::SCALED.reads(words));
    }
    clipped_by(factor, coefficient, Scales { own: Some(scale), ..Scales::default() })
}

/// What a factor of a gradient says that is multiplied by this coefficient.
pub(super) fn clipped_by(factor: Factor, coefficient: f64, scales: Scales) -> Option<Reading> {
    if let Some(scale) = scales.late.filter(|scale| factor.is(1.0 / scale) && !is_near(*scale, 1.0))
    {
        let words = format!(
            "it was clipped with the loss scale {scale} in it, which was taken out after that"
        );
        return Some(causes::CLIP_BEFORE_UNSCALE.reads(words));
    }
    if coefficient < 1.0 && factor.is(1.0 / coefficient) {
        let words =
            format!("the gradient is not clipped: its coefficient would be {coefficient:.6}");
        return Some(causes::NOT_CLIPPED.reads(words));
    }
    if coefficient < 1.0 && factor.is(coefficient) {
        let words = format!("the coefficient {coefficient:.6} was applied twice");
        return Some(causes::CLIP_TWICE.reads(words));
    }
    if let Some(scale) = scales.own.filter(|scale| factor.is(1.0 / scale) && !is_near(*scale, 1.0))
    {
        let words = format!("it was divided by the loss scale {scale} twice");
        return Some(causes::SCALE_TWICE.reads(words));
    }
    let words = format!("captured = {:.7} x what clipping gives", factor.value);
    Some(causes::SCALED.reads(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause_of(value: f64, limit: Limit, scale: f64) -> &'static str {
        let factor = Factor { value, tolerance: 1e-6 };
        clipping_and_unscaling(factor, limit, scale).expect("a factor is read").cause
    }

    #[test]
    fn a_factor_of_what_was_clipped_and_unscaled_at_once_says_which_of_the_two_is_wrong() {
        let clips = Limit { norm: 4.0, max_norm: 1.0, epsilon: 0.0, of_clipped: false };
        let does_not = Limit { norm: 0.5, ..clips };
        assert_eq!(cause_of(64.0, clips, 64.0), causes::SCALE_LEFT.name);
        assert_eq!(cause_of(64.0 * 4.0, clips, 64.0), causes::SCALE_LEFT.name);
        assert_eq!(cause_of(4.0, clips, 64.0), causes::NOT_CLIPPED.name);
        assert_eq!(cause_of(0.25, clips, 64.0), causes::CLIP_TWICE.name);
        // By the norm with the scale in it, 32, it is clipped although it should not be.
        assert_eq!(cause_of(1.0 / 32.0, does_not, 64.0), causes::CLIP_BEFORE_UNSCALE.name);
        assert_eq!(cause_of(1.0 / 64.0, does_not, 64.0), causes::SCALE_TWICE.name);
        // Both give this one where it is to be clipped, and neither is named.
        assert_eq!(cause_of(1.0 / 64.0, clips, 64.0), causes::SCALED.name);
    }
}
