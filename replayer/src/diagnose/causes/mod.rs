//! The catalogue's entries, one file each.

pub mod label_scatter_low_precision;
pub mod label_shift;
pub mod microbatch_count_scale;
pub mod zloss_mismatch;
