//! The types that the dumper and the replayer share: what a shard is, how it is named, hashed and
//! laid out on disk, and the coordinator that commits steps.
//!
//! The dumper and the replayer do not depend on each other; everything on which they must agree is
//! in this crate. It contains no Python and no numerics, and only `cli` writes to the terminal.
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
pub mod part;
pub mod placement;
pub mod role;
pub mod scalars;
pub mod selection;
pub mod shard;
pub mod store;

/// Version of backtape itself, as every answer and every `run.json` carries it.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Which build this is, for example a commit: the value of the environment variable
/// `BACKTAPE_BUILD` at compile time. The build does not ask git, because then every commit would
/// recompile everything.
pub const BUILD: &str = match option_env!("BACKTAPE_BUILD") {
    Some(build) => build,
    None => "unnamed",
};

/// Major version of the on-disk format. A reader refuses a newer version with an error that names
/// it: guessing what unknown fields mean could produce a wrong verdict.
pub const FORMAT_VERSION: u32 = 1;
