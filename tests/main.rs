//! The one integration binary of the workspace: real processes, real sockets,
//! real files.

// clippy.toml exempts test functions; here the whole crate is a test.
#![allow(clippy::unwrap_used)]

mod against;
mod buckets;
mod causes;
mod causes_arithmetic;
mod causes_scale;
mod checks;
mod cluster;
mod coordination;
mod coverage;
mod damage;
mod device;
mod efforts;
mod errors;
mod false_alarms;
mod flips;
mod heads;
mod hidden;
mod looking;
mod numbers;
mod operating;
mod page;
mod partial;
mod precision;
mod recorder;
mod replay;
mod security;
mod standin;
mod step_checks;
mod support;
mod tidy;
mod trajectory;
mod triggers;
mod verdict;
