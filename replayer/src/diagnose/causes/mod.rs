//! The catalogue's entries, one file each.

pub mod block_index_times_block;
pub mod buffer_overwritten;
pub mod dropped_batch;
pub mod duplicate_batch;
pub mod index_overflow_32;
pub mod int_target_out_of_range;
pub mod label_scatter_low_precision;
pub mod label_shift;
pub mod microbatch_count_scale;
pub mod nan_origin;
pub mod partial_not_reduced;
pub mod replica_divergence;
pub mod silent_corruption;
pub mod stride_ignored;
pub mod sync_wrong_microbatch;
pub mod tail_tile_unmasked;
pub mod tied_embedding;
pub mod token_order;
pub mod uninitialised_output;
pub mod zero_times_inf;
pub mod zloss_mismatch;
