//! How the ranks of one host find the coordinator that rank 0 carries: a small
//! file in the run's directory, replaced whole, removed when rank 0 closes.

use std::io;
use std::path::{Path, PathBuf};

use backtape::credentials::Token;
use backtape::store::durable;
use backtape::store::layout::RENDEZVOUS;
use serde::{Deserialize, Serialize};

/// Where the embedded coordinator of a launch listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rendezvous {
    /// `127.0.0.1:port`.
    pub(crate) address: String,
    /// The machine that this loopback address means.
    pub(crate) host: String,
    pub(crate) run: String,
    /// A number that rank 0 draws: it tells this launch's file from a later one's.
    pub(crate) launch: u64,
    /// What a rank shows the coordinator: only ranks of the job may read this file.
    pub(crate) token: Option<Token>,
}

impl Rendezvous {
    pub(crate) fn path(run_directory: &Path) -> PathBuf {
        run_directory.join(RENDEZVOUS)
    }

    /// What is published now; `None` where there is no file or none that can be read. That is no
    /// error, as rank 0 soon replaces a file that a crashed launch has left.
    pub(crate) fn read(run_directory: &Path) -> Option<Rendezvous> {
        let bytes = std::fs::read(Rendezvous::path(run_directory)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    pub(crate) fn publish(&self, run_directory: &Path) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self)?;
        durable::create_directory(run_directory)?;
        durable::replace(&Rendezvous::path(run_directory), &bytes)
    }

    /// Removes the file if it is still this launch's.
    pub(crate) fn withdraw(&self, run_directory: &Path) {
        if Rendezvous::read(run_directory).as_ref() == Some(self) {
            let _ = std::fs::remove_file(Rendezvous::path(run_directory));
        }
    }
}
