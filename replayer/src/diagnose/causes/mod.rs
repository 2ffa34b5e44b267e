//! The catalogue's entries, one file each.

pub mod chunk_accumulator_low_precision;
mod emulated;
pub mod gemm_low_precision;
pub mod label_prob_rounded_early;
pub mod label_scatter_low_precision;
pub mod label_shift;
pub mod lse_cancellation;
pub mod lse_logits_mismatch;
pub mod microbatch_accumulator_low_precision;
pub mod microbatch_count_scale;
pub mod tile_add_low_precision;
pub mod underflow;
pub mod zloss_mismatch;
