//! The list of all causes. To add one: its file in `causes/`, and its line here.

use super::cause::Cause;
use super::causes;

/// Every cause, in the order in which ties are reported.
pub const CATALOGUE: &[&dyn Cause] = &[
    &causes::label_scatter_low_precision::LabelScatterLowPrecision,
    &causes::microbatch_count_scale::MicrobatchCountScale,
    &causes::zloss_mismatch::ZLossMismatch,
    &causes::label_shift::LabelShift,
    &causes::tail_tile_unmasked::TailTileUnmasked,
    &causes::block_index_times_block::BlockIndexTimesBlock,
    &causes::buffer_overwritten::BufferOverwritten,
    &causes::index_overflow_32::IndexOverflow32,
    &causes::stride_ignored::StrideIgnored,
    &causes::int_target_out_of_range::IntTargetOutOfRange,
    &causes::tied_embedding::TiedEmbedding,
    &causes::partial_not_reduced::PartialNotReduced,
    &causes::sync_wrong_microbatch::SyncWrongMicrobatch,
    &causes::duplicate_batch::DuplicateBatch,
    &causes::dropped_batch::DroppedBatch,
    &causes::token_order::TokenOrder,
    &causes::uninitialised_output::UninitialisedOutput,
    &causes::zero_times_inf::ZeroTimesInf,
    &causes::replica_divergence::ReplicaDivergence,
    &causes::silent_corruption::SilentCorruption,
    &causes::nan_origin::NanOrigin,
];
