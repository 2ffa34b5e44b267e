//! What a recorded loss of one number should be.

use backtape::identity::{Microbatch, Rank};

/// What a sum of tokens' terms should be, and how far off rounding may bring it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Total {
    pub(super) value: f64,
    /// Variance before the value is stored.
    pub(super) own: f64,
    /// Root of the variance of the error that all terms share: amplitudes add.
    pub(super) shared: f64,
    pub(super) certain: f64,
}

/// The ranks that hold some tokens, and the loss over these.
type OfRanks = (Vec<Rank>, Total);

/// What the loss of a microbatch should be.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LossTotals {
    pub(super) microbatch: Option<Microbatch>,
    /// Over all tokens.
    pub(super) whole: Total,
    /// Over each rank's, or why they cannot be told apart.
    pub(super) by_rank: Result<Vec<OfRanks>, String>,
    /// How often the job may have stored a sum on its way to it.
    pub(super) stores: f64,
}
