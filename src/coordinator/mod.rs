//! The coordinator: decides when a step is committed.
//!
//! ```text
//! service (gRPC) -> actor (one thread) -> state (pure) -> journal (fsync) -> answer
//! ```
//!
//! `state`, `attempts` and `arrivals` are pure: they use neither clock nor disk. `actor` owns them
//! and the journals, and answers a request only when its events are durable. Only `service` and
//! `wire` use wire types. `orders` (durable) and `pulse` (from heartbeats, not durable) choose what
//! running ranks are told to record. The coordinator holds no tensors in memory: uploaded files go
//! to disk in chunks.

mod accepted;
mod actor;
mod arrivals;
mod attempt_log;
mod attempts;
mod config;
mod event;
mod examine;
#[cfg(test)]
mod fence_test;
mod intake;
mod journal;
pub mod limits;
mod looks;
mod metrics;
#[cfg(test)]
mod model_test;
mod orders;
mod pulse;
mod quotas;
#[cfg(test)]
mod recall_test;
mod recent;
mod refusal;
mod request;
mod runs;
mod scalars;
mod scrapes;
mod server;
mod service;
#[cfg(test)]
mod simulation;
mod state;
mod status;
mod strangers;
mod wire;

pub use actor::Handle;
pub use config::{Config, Rules, ServeError, StartError};
pub use examine::{Examined, MAX_EXAMINED_BYTES, examine, examine_from};
pub use journal::JournalError;
pub use refusal::Refusal;
pub use server::{Coordinator, run, transport};
pub use status::{Overview, Progress, StepStatus, Unsettled};
pub use wire::{asking, channel, doubt, sending};
