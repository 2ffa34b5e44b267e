//! Measurements of captured tensors that say which hypotheses are worth a trial, and with
//! which numbers; what a unit's backward starts from.

pub mod filter;
pub mod fit;
pub mod sums;
pub mod tokens;
pub mod uniform;
pub mod units;
