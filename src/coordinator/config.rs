//! The configuration of a coordinator, and the errors of its start.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::limits;
use crate::credentials::Guard;
use crate::identity::Name;
use crate::store::backend::ConnectError;

/// The configuration of a coordinator.
#[derive(Clone, Debug)]
pub struct Config {
    /// The store with the runs: a directory, or a bucket's URL.
    pub store: PathBuf,
    /// Ranks that must close a step before it is committed.
    pub world_size: u32,
    /// Serve this run only; `None` serves any run of the store.
    pub run: Option<Name>,
    /// True when this coordinator serves one launch: attempts found on disk are older, and the
    /// first rank opens the next one.
    pub new_attempt: bool,
    /// How long after its first event a step that is not complete is called partial.
    pub step_deadline: Duration,
    /// Limits on triggered recordings.
    pub rules: Rules,
    /// Where `/metrics` and `/healthz` are served in plain HTTP; nowhere by default.
    pub metrics: Option<SocketAddr>,
    /// What callers need to authenticate.
    pub guard: Guard,
}

/// Limits on triggered recordings, because a diverged run would trigger one at every step and fill
/// the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Most triggered recordings of a run, over all its attempts.
    pub max_triggers: u32,
    /// How long after a triggered recording ranks cannot trigger another one; people can.
    pub trigger_cooldown: Duration,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { max_triggers: limits::MAX_TRIGGERS, trigger_cooldown: limits::TRIGGER_COOLDOWN }
    }
}

impl Config {
    /// The configuration of a coordinator that serves every run of a store and continues where an
    /// earlier one stopped.
    pub fn new(store: impl Into<PathBuf>, world_size: u32) -> Config {
        Config {
            store: store.into(),
            world_size,
            run: None,
            new_attempt: false,
            step_deadline: limits::STEP_DEADLINE,
            rules: Rules::default(),
            metrics: None,
            guard: Guard::default(),
        }
    }
}

/// Why a coordinator did not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum StartError {
    #[error("{path} cannot be used as the store: choose a directory or a bucket that this user can write", path = path.display())]
    Store { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Bucket(#[from] ConnectError),
    #[error("the coordinator's thread cannot be started")]
    Thread(#[source] io::Error),
    #[error("the certificate or its key cannot be used: {0}")]
    Tls(String),
    #[error("a world size of 0 has no ranks to wait for: give the number of processes of the job")]
    NoRanks,
}

/// Why a coordinator stopped serving.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ServeError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("{0} cannot be listened on for metrics: choose another --metrics")]
    Metrics(SocketAddr, #[source] io::Error),
    #[error("the coordinator can no longer accept connections")]
    Transport(#[source] tonic::transport::Error),
    #[error(
        "the coordinator's thread ended unexpectedly; what was acknowledged is safe: restart it"
    )]
    ActorDied,
}
