//! Cheap measurements of captured tensors. Causes use them to decide which hypotheses are worth a
//! trial and with which parameters: values read off a few rows, least-squares fits, and searches
//! over numbers that no dump declares.

pub mod addend_counts;
pub mod addends;
pub mod block_sizes;
pub mod captured;
pub mod class_counts;
pub mod common_factor;
pub mod divisors;
pub mod dlogits_plane;
pub mod fitted_numbers;
pub mod gradient;
pub mod implied_lse;
pub mod label_fit;
pub mod least_squares;
pub mod misread_rows;
pub mod nan;
pub mod other_q;
pub mod pieces;
pub mod places;
pub mod raw_logits;
pub mod reference;
pub mod replicas;
pub mod row_maps;
pub mod sampled_sums;
pub mod segments;
pub mod shown_labels;
pub mod single_tokens;
pub mod stray_entries;
pub mod sum_counts;
pub mod sum_cuts;
pub mod suspect_tokens;
pub mod tile_filter;
pub mod token_counts;
pub mod token_orders;
pub mod token_runs;
pub mod unit_states;
pub mod vocab_shards;
