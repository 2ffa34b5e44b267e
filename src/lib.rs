//! The shared nouns of backtape: what a shard is, how it is named, hashed and
//! laid out on disk, and the coordinator that commits steps.
//!
//! Everything the dumper and the replayer agree on is here and only here; the
//! two never see each other. This crate knows nothing of Python or of numerics, and
//! `cli` alone of the terminal.
//!
//! The dependency direction is `proto <- backtape <- {dumper, replayer} <- python`.

pub mod cli;
pub mod coordinator;
pub mod credentials;
pub mod dtype;
#[doc(hidden)]
pub mod faults;
pub mod fingerprint;
pub mod hash;
pub mod head;
pub mod identity;
pub mod index_box;
pub mod manifest;
pub mod nan;
pub mod placement;
pub mod role;
pub mod scalars;
pub mod selection;
pub mod shard;
pub mod store;

/// Version of backtape itself, as every answer and every `run.json` carries it.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Which build this is, as who built it named it in `BACKTAPE_BUILD`: a commit, for example. Not
/// asked of git: every commit would compile everything again.
pub const BUILD: &str = match option_env!("BACKTAPE_BUILD") {
    Some(build) => build,
    None => "unnamed",
};

/// Major version of the on-disk format. A reader refuses a newer one by name:
/// guessing at unknown fields could turn into a wrong verdict.
pub const FORMAT_VERSION: u32 = 1;
