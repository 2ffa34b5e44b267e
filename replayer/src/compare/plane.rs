//! Computes the error that rounding may make in an entry of the token x vocabulary plane, from
//! coefficients of its stage and of its token.
//!
//! As in `allowance`, the structs are plain memory: `device/kernels/compare.cu` has the same
//! structs and does the same operations in the same order.

use super::allowance::Rounding;
use super::bound::Allowed;

/// Which quantity of the plane a stage holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneStage {
    /// Logits.
    Logits = 0,
    /// Log-probabilities of every class.
    Logprobs = 1,
    /// The gradient of the loss with respect to the logits.
    Dlogits = 2,
}

/// The coefficients of a stage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PlaneAllowance {
    /// A [`PlaneStage`].
    pub stage: i64,
    /// Rounding of an entry of dlogits to the format that the job computes it in.
    pub entry: Rounding,
    /// Rounding of the subtraction `logit - lse` that gives a log-probability.
    pub subtracted: Rounding,
    /// Rounding to the format that the entry was stored in; all 0 where storing rounds nothing.
    pub stored: Rounding,
    /// Threshold of the gradient filter: entries of a smaller probability may have been dropped; 0
    /// for none.
    pub filter: f64,
    /// Absolute value of the factor that the transform multiplies all logits by.
    pub factor: f64,
    /// Variance of the relative error that all entries of dlogits share.
    pub shared: f64,
    /// Variance of the relative error that all logits share, from rounding a constant of the
    /// transform.
    pub transformed: f64,
}

/// The coefficients of a token.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct OfToken {
    /// Its log-sum-exp.
    pub lse: f64,
    /// Cotangent of the log-sum-exp.
    pub upstream: f64,
    /// Cotangent of the label's logit.
    pub label_upstream: f64,
    /// Variance of the relative error that its row shares; of log-probabilities the absolute error.
    pub scale: f64,
    /// Spread of its logits, weighted by their probabilities.
    pub spread: f64,
    /// Share, 0 to 1, of the variance of storing its entries that comes from equal rounding errors.
    pub alike: f64,
    /// Its label.
    pub label: i64,
}

impl PlaneAllowance {
    /// The error allowed in an entry before it is stored. Its reference is `x`, and `own` is the
    /// variance that the reference computed for it.
    pub fn of(&self, token: &OfToken, column: usize, x: f64, own: f64) -> Allowed {
        let (dlogits, logprobs) = (PlaneStage::Dlogits as i64, PlaneStage::Logprobs as i64);
        if self.stage == dlogits {
            let is_label = token.label == column as i64;
            let label = if is_label { (self.factor * token.label_upstream).abs() } else { 0.0 };
            let dense = x.abs() + label;
            let dropped = x.abs() < self.filter * (token.upstream * self.factor).abs();
            // A relative error δ of all logits z changes p by the relative amount δ (z - E z).
            let moved = self.transformed * (1.0 + token.spread * token.spread);
            Allowed {
                own: own + self.entry.variance(x),
                row: token.scale * dense * dense,
                shared: (self.shared + moved) * x * x,
                certain: if dropped { x.abs() } else { 0.0 },
                ..Allowed::default()
            }
        } else if self.stage == logprobs {
            // The error of lse is an absolute error of the log-probabilities of the whole row.
            let size = token.lse.abs() + x.abs();
            Allowed {
                own: own + self.subtracted.variance(size),
                row: token.scale,
                shared: self.transformed * size * size,
                ..Allowed::default()
            }
        } else {
            Allowed { own, shared: self.transformed * x * x, ..Allowed::default() }
        }
    }

    /// Adds the rounding of storing an entry whose reference is `x`; `again` as in
    /// [`Allowed::stored`].
    pub fn storing(&self, token: &OfToken, x: f64, again: bool, inner: Allowed) -> Allowed {
        let storage = self.stored.variance(x);
        let inner = inner.stored(storage, again);
        // Entries that are nearly equal are rounded by the same error when they are stored.
        Allowed { shared: inner.shared + token.alike * storage, ..inner }
    }
}
