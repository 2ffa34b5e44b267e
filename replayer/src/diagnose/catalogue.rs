//! The list of all causes. To add one: its file in `causes/`, and its line here.

use super::cause::Cause;
use super::causes;

/// Every cause, in the order in which ties are reported.
pub const CATALOGUE: &[&dyn Cause] = &[
    &causes::label_scatter_low_precision::LabelScatterLowPrecision,
    &causes::chunk_accumulator_low_precision::ChunkAccumulatorLowPrecision,
    &causes::microbatch_accumulator_low_precision::MicrobatchAccumulatorLowPrecision,
    &causes::tile_add_low_precision::TileAddLowPrecision,
    &causes::label_prob_rounded_early::LabelProbRoundedEarly,
    &causes::lse_logits_mismatch::LseLogitsMismatch,
    &causes::lse_cancellation::LseCancellation,
    &causes::gemm_low_precision::GemmLowPrecision,
    &causes::gradient_filter::GradientFilter,
    &causes::underflow::Underflow,
    &causes::microbatch_count_scale::MicrobatchCountScale,
    &causes::microbatch_mean_of_means::MicrobatchMeanOfMeans,
    &causes::rank_mean_vs_sum::RankMeanVsSum,
    &causes::valid_count::ValidCount,
    &causes::cotangent_dropped::CotangentDropped,
    &causes::accumulation_window::AccumulationWindow,
    &causes::zloss_mismatch::ZLossMismatch,
    &causes::smoothing_mismatch::SmoothingMismatch,
    &causes::softcap_mismatch::SoftcapMismatch,
    &causes::temperature_mismatch::TemperatureMismatch,
    &causes::bias_twice::BiasTwice,
    &causes::all_ignored::AllIgnored,
    &causes::clipping::Clipping,
    &causes::label_shift::LabelShift,
];
