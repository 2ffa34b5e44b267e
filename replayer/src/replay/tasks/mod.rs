//! Tasks: parts of a replay that other processes compute, on other machines too.
//!
//! A task is a range of tokens times a range of classes, of the forward, of a captured plane or
//! of the backward, or what one member of the floor makes of a slab. It names what it reads, and
//! whoever computes it reads that from the dump, and no more. A tile goes on from the sums that
//! the tile before it left, so who computes it changes no bit:
//!
//! ```text
//!            classes 0..4096        4096..8192
//! tokens 0..2048    [ ] -- dq of these tokens --> [ ]
//!                    |                             |
//!                 dk of these classes              dk
//!                    v                             v
//! tokens 2048..     [ ] -- dq ------------------> [ ]
//! ```
//!
//! Here is no cluster and no network: [`Workers`] start tasks and keep their sums. What is not
//! the head's products (bounds, the search for a cause) is computed where the replay was called.

pub(super) mod drive;
mod error;
pub mod perform;
mod read;
pub(super) mod task;

use std::path::{Path, PathBuf};

use backtape::head::PolicyDeclaration;

use crate::dump::Selection;

pub use super::tasks::error::TaskError;

/// Sums that a worker holds, given to one task or fetched: either takes them away.
#[derive(Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// Who computes tasks.
pub trait Workers: Sync {
    /// Starts a task on the sums of others, and returns what stands for its own: as many as it
    /// `gives`. It does not wait for it.
    fn start(
        &self,
        task: Vec<u8>,
        from: Vec<Option<Handle>>,
        gives: usize,
    ) -> Result<Vec<Handle>, String>;

    /// Waits for sums. An error is one clause: why there are none, and none will come.
    fn fetch(&self, sums: Handle) -> Result<Vec<u8>, String>;
}

/// How the plane of tokens x classes is cut into tasks. It changes no bit of any result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Most tokens of a task, taken up to whole tiles; 2,048 by default.
    pub tokens: Option<usize>,
    /// Most classes, likewise; by default as many as a slab of 32 MiB holds.
    pub classes: Option<usize>,
}

/// Where the tasks of a replay are computed, and what they are told of it.
pub struct Cluster<'a> {
    workers: &'a dyn Workers,
    path: PathBuf,
    run: Option<String>,
    policy: Option<String>,
    cut: Cut,
    spill: Option<String>,
}

impl<'a> Cluster<'a> {
    /// Workers that can read the dump at the same path. `policy` stands in for what the job
    /// declared.
    pub fn new(
        workers: &'a dyn Workers,
        (path, selection): (&Path, &Selection),
        policy: Option<&PolicyDeclaration>,
        cut: Cut,
    ) -> Cluster<'a> {
        // A worker has another working directory. A URL stays what it is.
        let path = path.canonicalize().unwrap_or_else(|_| path.into());
        let policy = policy.map(|policy| serde_json::to_string(policy).expect("plain data"));
        Cluster { workers, path, run: selection.run.clone(), policy, cut, spill: None }
    }

    /// Tasks keep large arrays in files of this directory of their own host, see `spill`.
    pub fn spilling_to(self, directory: Option<&Path>) -> Cluster<'a> {
        let absolute = |of: &Path| of.canonicalize().unwrap_or_else(|_| of.into());
        let spill = directory.map(|of| absolute(of).to_string_lossy().into_owned());
        Cluster { spill, ..self }
    }
}
