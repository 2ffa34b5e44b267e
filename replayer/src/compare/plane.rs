//! How what is allowed of an entry of the token x vocabulary plane follows from the numbers of its
//! stage and of its token.
//!
//! As `allowance` is for dq and dk: plain memory, of which `device/kernels/compare.cu` has the same
//! structs and does the same operations in the same order.

use super::allowance::Rounding;
use super::bound::Allowed;

/// What the plane holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneStage {
    /// Logits.
    Logits = 0,
    /// Log-probabilities of every class.
    Logprobs = 1,
    /// The gradient of the loss by the logits.
    Dlogits = 2,
}

/// The numbers of a stage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PlaneAllowance {
    /// A [`PlaneStage`].
    pub stage: i64,
    /// Of an entry of dlogits as the job may hold it.
    pub entry: Rounding,
    /// Of the subtraction that makes a log-probability.
    pub subtracted: Rounding,
    /// What the entry was stored as; all 0 where that rounds nothing.
    pub stored: Rounding,
    /// A softmax below it may have been dropped; 0 for none.
    pub filter: f64,
    /// Size of the factor of all logits.
    pub factor: f64,
    /// Relative variance that all entries of dlogits share.
    pub shared: f64,
    /// Relative variance of what is done to all logits alike.
    pub transformed: f64,
}

/// The numbers of a token.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct OfToken {
    /// Its log-sum-exp.
    pub lse: f64,
    /// What goes back to it.
    pub upstream: f64,
    /// What goes back to its label's logit.
    pub label_upstream: f64,
    /// Variance that its row shares, relative; of log-probabilities absolute.
    pub scale: f64,
    /// How far its logits lie apart, as far as its softmax sees them.
    pub spread: f64,
    /// Share of the storing of its entries that is one rounding, 0 to 1.
    pub alike: f64,
    /// Its label.
    pub label: i64,
}

impl PlaneAllowance {
    /// What is allowed of an entry before it was stored: it should be `x`, and `own` is the
    /// variance that the reference propagated.
    pub fn of(&self, token: &OfToken, column: usize, x: f64, own: f64) -> Allowed {
        let (dlogits, logprobs) = (PlaneStage::Dlogits as i64, PlaneStage::Logprobs as i64);
        if self.stage == dlogits {
            let is_label = token.label == column as i64;
            let label = if is_label { (self.factor * token.label_upstream).abs() } else { 0.0 };
            let dense = x.abs() + label;
            let dropped = x.abs() < self.filter * (token.upstream * self.factor).abs();
            // A scale of the logits moves p by (z - E z) of itself.
            let moved = self.transformed * (1.0 + token.spread * token.spread);
            Allowed {
                own: own + self.entry.variance(x),
                row: token.scale * dense * dense,
                shared: (self.shared + moved) * x * x,
                certain: if dropped { x.abs() } else { 0.0 },
                ..Allowed::default()
            }
        } else if self.stage == logprobs {
            // A softmax of its own: its lse errs as scale says, absolutely.
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

    /// Adds what storing an entry rounds, which should be `x`; `again` as in
    /// [`Allowed::stored`].
    pub fn storing(&self, token: &OfToken, x: f64, again: bool, inner: Allowed) -> Allowed {
        let storage = self.stored.variance(x);
        let inner = inner.stored(storage, again);
        // Entries that are alike are rounded alike as they are stored.
        Allowed { shared: inner.shared + token.alike * storage, ..inner }
    }
}
