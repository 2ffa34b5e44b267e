//! Detectors that need more than the comparisons: what a unit's backward starts from, and
//! searches over numbers that no dump declares.

pub mod sums;
pub mod units;
