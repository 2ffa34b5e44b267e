//! The catalogue's entries, one file each.

pub mod accumulation_window;
pub mod all_ignored;
pub mod bias_twice;
pub mod chunk_accumulator_low_precision;
pub mod clipping;
pub mod cotangent_dropped;
mod emulated;
pub mod gemm_low_precision;
pub mod gradient_filter;
pub mod label_prob_rounded_early;
pub mod label_scatter_low_precision;
pub mod label_shift;
pub mod lse_cancellation;
pub mod lse_logits_mismatch;
pub mod microbatch_accumulator_low_precision;
pub mod microbatch_count_scale;
pub mod microbatch_mean_of_means;
pub mod rank_mean_vs_sum;
pub mod smoothing_mismatch;
pub mod softcap_mismatch;
pub mod temperature_mismatch;
pub mod tile_add_low_precision;
pub mod underflow;
pub mod valid_count;
pub mod zloss_mismatch;
