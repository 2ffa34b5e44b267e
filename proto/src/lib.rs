//! The wire types of backtape, generated from `proto/backtape/v1`.
//!
//! Only `wire.rs` and the gRPC adapters of the other crates name these types:
//! everything else speaks the domain types of the crate `backtape`.

#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
mod generated {
    tonic::include_proto!("backtape.v1");
}

pub use generated::*;
