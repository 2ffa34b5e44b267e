//! The catalogue's entries, one file each.

pub mod accumulation_window;
pub mod all_ignored;
pub mod bias_twice;
pub mod clipping;
pub mod cotangent_dropped;
pub mod label_scatter_low_precision;
pub mod label_shift;
pub mod microbatch_count_scale;
pub mod microbatch_mean_of_means;
pub mod rank_mean_vs_sum;
pub mod smoothing_mismatch;
pub mod softcap_mismatch;
pub mod temperature_mismatch;
pub mod valid_count;
pub mod zloss_mismatch;
