//! Reassembles dumped shards, proves the round trip, replays the loss backward
//! stage by stage against an f64 reference and says where the gradients diverge.
//!
//! Each layer knows only those before it; ARCHITECTURE.md has their order, which a test reads.

pub mod algebra;
pub mod assemble;
mod bits;
pub mod checks;
pub mod cli;
pub mod compare;
pub mod device;
pub mod diagnose;
pub mod draw;
pub mod dump;
pub mod export;
pub mod head;
pub mod kernels;
pub mod number;
pub mod ops;
pub mod parcel;
pub mod postmortem;
pub mod precision;
pub mod replay;
pub mod report;
pub mod spelling;
pub mod spill;
pub mod trajectory;
pub mod verify;
