//! The recorder that lives inside a rank of a training job.
//!
//! The training thread hands shards over and goes on. A thread of the recorder hashes them, writes
//! them, reports them to the coordinator and closes the step. The recorder may lose a capture,
//! which is then named with its reason. It never raises an error in the job that it is part of,
//! never holds the job up for longer than its cap, and never takes more memory than its budget.
//!
//! ```no_run
//! # use backtape_dumper::{Recorder, Settings};
//! let mut recorder = Recorder::start(Settings::new("dumps/run-a", 0, 1))?;
//! if recorder.wants(0) {
//!     let tape = recorder.step(0)?;
//!     // tape.head(...)?; tape.record(...)?;
//!     tape.close()?;
//! }
//! let summary = recorder.close()?;
//! # Ok::<(), backtape_dumper::RecorderError>(())
//! ```
//!
//! It does not read dumps: the replayer does.

mod capture;
mod client;
mod delivery;
pub mod device;
mod embedded;
mod error;
mod files;
mod heartbeat;
mod measure;
mod omissions;
mod patience;
mod queue;
mod ranges;
mod recorder;
mod recording;
mod rendezvous;
mod ring;
mod scalars;
mod schedule;
mod session;
mod settings;
pub mod squares;
mod steps;
mod summary;
mod tape;
mod vouch;
mod watch;
mod worker;

use backtape::identity::Rank;

pub use backtape::coordinator::Rules;
pub use backtape::scalars::Row;
pub use backtape::selection::{
    ByteLimit, IndexSelection, Selection, SelectionError, StepSelection, TensorSelection,
};
pub use capture::{Capture, Located, Payload};
pub use error::RecorderError;
pub use ranges::{Range, Ranges};
pub use recorder::Recorder;
pub use settings::{Settings, TransportChoice};
pub use steps::Steps;
pub use summary::Summary;
pub use tape::Tape;
pub use watch::Conditions;
