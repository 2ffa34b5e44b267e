//! The loss head: its stage graph, its options as the job declared them, and
//! the inputs of one step gathered from the dump. No arithmetic of the stages:
//! that is `kernels`.

pub mod options;
pub mod policy_file;
pub mod roundings;
pub mod stage;
pub mod step;

pub use options::HeadOptions;
pub use roundings::Roundings;
pub use stage::Stage;
pub use step::{HeadStep, MicrobatchInputs, Unit};
