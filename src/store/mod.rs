//! The store on disk: where things lie, how they become durable, how a shard
//! file is written and read. The only contract between dumper and replayer.

pub mod backend;
pub mod durable;
pub mod header;
pub mod held;
pub mod layout;
pub(crate) mod pieces;
pub mod probe;
pub mod shard_file;
pub mod shard_writer;

pub use backend::Backend;
pub use held::HeldDirectory;
pub use layout::{AttemptDir, StepDir};
pub use pieces::Moved;
pub use shard_file::{ShardFile, ShardFileError};
pub use shard_writer::{FinishedFile, ShardWriter};
