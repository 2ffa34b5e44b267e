//! The loss head: the graph of its stages, its options as the job declared them, and the inputs of
//! one step as the dump holds them. The arithmetic of the stages is in `kernels`.

mod assembled;
pub mod contradictions;
mod error;
pub mod inputs;
mod lacking;
pub(crate) mod lowered;
pub mod options;
pub mod policy_file;
pub mod roundings;
pub mod sources;
pub mod stage;
pub mod step;
pub mod units;
mod view;

pub use inputs::{MicrobatchInputs, Scores};
pub use lacking::Lacking;
pub use options::{HeadOptions, Walk};
pub use roundings::Roundings;
pub use stage::{Kind, Share, Side, Stage};
pub use step::HeadStep;
pub use units::Unit;
