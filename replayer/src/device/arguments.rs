//! The structs of `kernels/reference.cu`, field for field. An address of 0 is a null pointer.

use super::machine::Arguments;
use crate::kernels::Transform;

/// Lanes in which a row is summed: `LANES` of the kernels.
pub(super) const LANES: usize = 64;

/// How elements lie: the kernels' enumeration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Bf16 = 0,
    F16 = 1,
    F32 = 2,
    F64 = 3,
}

/// From raw logit to logit, as kernels take it: its constants, and whether there is a bound.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct TransformArguments {
    constants: [f64; 2],
    capped: i64,
}

impl From<Transform> for TransformArguments {
    fn from(transform: Transform) -> TransformArguments {
        let constants = Transform::CONSTANTS.map(|(_, value)| value(&transform));
        TransformArguments { constants, capped: transform.bends().into() }
    }
}

/// The options that make a logit of a product, and the variances of `TermNoise`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) bias: u64,
    pub(super) transform: TransformArguments,
    pub(super) uncapped: i64,
    pub(super) given: i64,
    pub(super) p_rel_var: f64,
    pub(super) logit_rel_var: f64,
    pub(super) dot_rel_var: f64,
    pub(super) logit_floor: f64,
    pub(super) cap_rel_var: f64,
    pub(super) filter: f64,
    pub(super) whole: i64,
    pub(super) exp_rel_var: f64,
    pub(super) confident: f64,
    pub(super) log_p_rel_var: f64,
}

/// Upstream of the rows' tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens {
    pub(super) lse: u64,
    pub(super) c_lse: u64,
    pub(super) c_label: u64,
    pub(super) c_smooth: u64,
    pub(super) copies: u64,
    pub(super) norms: u64,
    pub(super) labels: u64,
}

/// What a row of logits has summed up to here.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Running {
    pub(super) max: f64,
    pub(super) sum: f64,
    pub(super) logits: f64,
    pub(super) squares: f64,
}

/// Declares a kernel's arguments; the first field says how many threads it takes.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $kernel:literal, { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name {
            pub(super) threads: i64,
            $(pub(super) $field: $type,)*
        }

        // SAFETY: `repr(C)`, every field a multiple of 8 bytes; `host` runs each against its kernel.
        unsafe impl Arguments for $name {
            const KERNEL: &'static str = $kernel;

            fn threads(&self) -> usize {
                self.threads as usize
            }
        }
    };
}

pub(super) use kernel;

kernel!(
    /// Elements as f64, and their squares where there is room for them.
    Widen, "widen",
    { from: u64, values: u64, squared: u64, dtype: i64, stride: i64, first: i64, columns: i64 }
);
kernel!(
    /// Sums of rows.
    RowSums, "row_sums",
    { values: u64, sums: u64, columns: i64 }
);
kernel!(
    /// Absolute values.
    Magnitudes, "magnitudes",
    { from: u64, to: u64 }
);
kernel!(
    /// Values onto others.
    Add, "add",
    { sums: u64, addends: u64 }
);
kernel!(
    /// Logits of some columns into the lanes of their rows.
    Absorb, "absorb",
    { products: u64, columns: i64, first: i64, lanes: u64, head: Head }
);
kernel!(
    /// Lanes onto what earlier columns left, and the labels' logits.
    Fold, "fold",
    {
        products: u64, columns: i64, first: i64, lanes: u64, rows: u64, labels: u64,
        label_logits: u64, head: Head,
    }
);
kernel!(
    /// Entries of dlogits, dense, with their squares and variances.
    Terms, "terms",
    {
        dense: u64, squared: u64, noisy: u64, dropped: u64, confident: u64, columns: i64,
        first: i64, key_norms: u64, label_slopes: u64, label_slope_vars: u64, label_entries: u64,
        tokens: Tokens, head: Head,
    }
);
kernel!(
    /// A stage's entries of a tile, with their variances.
    Plane, "plane",
    {
        products: u64, values: u64, variances: u64, stage: i64, stride: i64, columns: i64,
        valid: i64, first: i64, key_norms: u64, masked: f64, tokens: Tokens, head: Head,
    }
);
