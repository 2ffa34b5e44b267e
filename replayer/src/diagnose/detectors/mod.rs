//! Cheap measurements of captured tensors that say which hypotheses are worth a trial,
//! and with which numbers: what a unit's backward starts from, and searches over numbers
//! that no dump declares.

pub mod addends;
pub mod asked;
pub mod block_sizes;
pub mod captured;
pub mod counted;
pub mod counted_classes;
pub mod counted_sums;
pub mod counted_tokens;
pub mod cuts;
pub mod dense;
pub mod direct;
pub mod divisors;
pub mod extents;
pub mod filter;
pub mod fit;
pub mod gradient;
pub mod labels;
pub mod maps;
pub mod misread;
pub mod nan;
pub mod orders;
pub mod other_q;
pub mod pieces;
pub mod places;
pub mod plane;
pub mod reference;
pub mod relabelled;
pub mod replicas;
pub mod segments;
pub mod shards;
pub mod solve;
pub mod strays;
pub mod sums;
pub mod tokens;
pub mod uniform;
pub mod units;
