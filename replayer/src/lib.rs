//! Reassembles dumped shards, proves the round trip, replays the loss backward
//! stage by stage against an f64 reference and says where the gradients diverge.
//!
//! Layers, each knowing only those before it: `dump` (what lies on disk),
//! `assemble`, `verify`, `head` (stage graph and options), `kernels` (arithmetic,
//! no I/O), `device` (the same on a GPU), `compare` (errors against what rounding explains), `checks` (what needs
//! no replay), `export` (tensors to files for other tools), `trajectory`
//! (what the scalars of all steps say), `replay` (stages in order, in the world of a hypothesis too),
//! `diagnose` (the catalogue of causes), `report` (plain data to text or JSON), `cli`.

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
pub mod parcel;
pub mod precision;
pub mod replay;
pub mod report;
pub mod spelling;
pub mod spill;
pub mod trajectory;
pub mod verify;
