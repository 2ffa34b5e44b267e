//! A span of tokens of the token x vocabulary plane, with what its stages start from.

use std::ops::Range;

use backtape::identity::Microbatch;

use super::rounding_variance::share_of_equal_roundings;
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::round::Precision;

/// A span of tokens with what its stages start from.
pub(super) struct Span<'a> {
    pub(super) head: HeadInputs<'a>,
    pub(super) tokens: Range<usize>,
    pub(super) lse: &'a [f64],
    pub(super) cotangents: Cotangents<'a, f64>,
    /// How far a token's logits lie apart, as far as its softmax sees them.
    pub(super) spread: &'a [f64],
    /// Share of the roundings of a token's entries that are one, 0 to 1, and the variance
    /// of its logits where they are nearly equal.
    pub(super) alike: &'a [(f64, f64)],
    /// Variance that a token's row shares.
    pub(super) scale: &'a [f64],
    /// Rows that are judged.
    pub(super) sure: &'a [usize],
    pub(super) microbatch: Option<Microbatch>,
}

impl Span<'_> {
    /// Share of the roundings of a token's entries to a format that are one.
    pub(super) fn alike(&self, row: usize, to: Precision) -> f64 {
        let (alike, variance) = self.alike[row];
        alike.max(share_of_equal_roundings(variance.sqrt() / (2.0 * to.unit_roundoff())))
    }
}
