//! The store: the layout of its directories, how files become durable, and how shard files are
//! written and read. It is all that the dumper and the replayer have in common.

pub mod backend;
pub mod durable;
pub mod header;
pub mod held_directory;
pub mod layout;
pub(crate) mod pieces;
pub mod probe;
pub mod shard_file;
pub mod shard_writer;

pub use backend::Backend;
pub use held_directory::HeldDirectory;
pub use layout::{AttemptDir, StepDir};
pub use pieces::Moved;
pub use shard_file::{ShardFile, ShardFileError};
pub use shard_writer::{FinishedFile, ShardWriter};
