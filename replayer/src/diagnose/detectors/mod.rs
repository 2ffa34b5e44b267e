//! Cheap measurements of captured tensors that say which hypotheses are worth a trial,
//! and with which numbers.

pub mod fit;
pub mod tokens;
pub mod uniform;
