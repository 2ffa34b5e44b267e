//! What was acknowledged, kept where no power cut reaches it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use backtape::hash::TrustHash;

/// Step of an attempt.
pub(crate) type StepOf = (u32, u64);

/// A file that somebody was told is durable. Paths are relative to the mount.
#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) header_hash: TrustHash,
    pub(crate) shards: u64,
}

/// What the ranks were told of one step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    pub(crate) files: BTreeMap<PathBuf, File>,
    pub(crate) closed: BTreeSet<u32>,
    pub(crate) committed: bool,
}

/// What a recorder was told of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorded {
    pub(crate) committed: BTreeSet<u64>,
    pub(crate) shards: u64,
}

/// Everything acknowledged on one image.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// Written without a coordinator: `ShardWriter` alone.
    pub(crate) files: Vec<File>,
    /// `durable::create`: path and the coordinates of its bytes.
    pub(crate) created: BTreeMap<PathBuf, u64>,
    /// `durable::replace` of one file: the newest version acknowledged, and the newest tried.
    pub(crate) replaced: (u64, u64),
    pub(crate) steps: BTreeMap<StepOf, Step>,
    /// Manifests that stood at their final name, and what they held.
    pub(crate) manifests: BTreeMap<PathBuf, TrustHash>,
    /// Hash of `run.json`, by attempt.
    pub(crate) runs: BTreeMap<u32, TrustHash>,
    /// By run and rank.
    pub(crate) recorded: BTreeMap<(String, u32), Recorded>,
    /// Steps that were worked on since the last check.
    pub(crate) touched: BTreeSet<StepOf>,
    /// Calls that failed before the power was cut.
    pub(crate) refused: Vec<String>,
}

/// What a campaign was told, in numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) files: u64,
    pub(crate) shards: u64,
    pub(crate) closes: u64,
    pub(crate) commits: u64,
}

impl Ledger {
    pub(crate) fn totals(&self) -> Totals {
        let reported = || self.steps.values().flat_map(|step| step.files.values());
        let recorded = || self.recorded.values();
        Totals {
            files: (self.files.len() + self.created.len() + reported().count()) as u64
                + self.replaced.0,
            shards: reported().map(|file| file.shards).sum::<u64>()
                + recorded().map(|run| run.shards).sum::<u64>(),
            closes: self.steps.values().map(|step| step.closed.len() as u64).sum(),
            commits: self.steps.values().filter(|step| step.committed).count() as u64
                + recorded().map(|run| run.committed.len() as u64).sum::<u64>(),
        }
    }
}

impl Totals {
    pub(crate) fn add(&mut self, other: Totals) {
        self.files += other.files;
        self.shards += other.shards;
        self.closes += other.closes;
        self.commits += other.commits;
    }
}
