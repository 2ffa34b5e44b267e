//! The structs of `kernels/policy.cu`, field for field. An address of 0 is a null pointer.

use crate::device::arguments::{TransformArguments, kernel};
use crate::device::machine::Arguments;

/// Lanes in which a row is summed: `SINGLES` of the kernels.
pub(super) const LANES: usize = 32;

kernel!(
    /// Elements rounded to the policy's operands, as they are stored.
    Narrow, "narrow",
    {
        from: u64, to: u64, dtype: i64, stride: i64, first: i64, columns: i64, input: i64,
        operand: i64, stored: i64,
    }
);
kernel!(
    /// Raw logits to logits, in place.
    Logits, "policy_logits",
    {
        logits: u64, columns: i64, first: i64, bias: u64, transform: TransformArguments,
        leaving: i64, between: i64, end: i64,
    }
);
kernel!(
    /// The largest logit of each lane.
    Maxima, "policy_maxima",
    { logits: u64, columns: i64, maxima: u64 }
);
kernel!(
    /// Sums of each lane: of exponentials, of logits.
    LaneSums, "policy_lanes",
    { logits: u64, columns: i64, maxima: u64, sums: u64, logit_sums: u64, rows: u64 }
);
kernel!(
    /// Lanes onto what earlier columns left, and the labels' logits.
    Fold, "policy_fold",
    {
        logits: u64, columns: i64, first: i64, maxima: u64, sums: u64, logit_sums: u64, rows: u64,
        labels: u64,
    }
);
kernel!(
    /// Logits to dlogits, in place, and as an operand.
    Dlogits, "policy_dlogits",
    {
        tile: u64, operand: u64, stored: i64, columns: i64, first: i64, lse: u64, g_lse: u64,
        g_label: u64, smooth: u64, labels: u64, label_g: u64, transform: TransformArguments,
        whole: i64, p: i64, dlogits: i64,
    }
);
kernel!(
    /// A tile's own part, rounded, onto a sum that is rounded.
    Joined, "policy_joined",
    { own: u64, target: u64, part: i64, total: i64, adds: i64 }
);
kernel!(
    /// Sums of columns.
    Columns, "policy_columns",
    { tile: u64, rows: i64, sums: u64, adds: i64 }
);
