//! The list of all causes. To add one: its file in `causes/`, and its line here.

use super::cause::Cause;
use super::causes;

/// Every cause, in the order in which ties are reported.
pub const CATALOGUE: &[&dyn Cause] = &[
    &causes::label_scatter_low_precision::LabelScatterLowPrecision,
    &causes::microbatch_count_scale::MicrobatchCountScale,
    &causes::zloss_mismatch::ZLossMismatch,
    &causes::label_shift::LabelShift,
];
