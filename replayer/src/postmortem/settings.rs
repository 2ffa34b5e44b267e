//! How a head is replayed, and who watches.

use std::sync::Arc;

use backtape::head::PolicyDeclaration;

use super::kernels::Kernels;
use crate::algebra::against::Mapping;
use crate::device::Device;
use crate::diagnose::Causes;
use crate::draw::seed_of;
use crate::dump::StepDump;
use crate::head::HeadStep;
use crate::kernels::{NoProgress, Progress};
use crate::replay::Effort;
use crate::replay::tasks::Cluster;
use crate::replay::variant::Variant;
use crate::report::Report;
use crate::verify::{Verification, verify};

/// How a head is replayed, beyond what its job declared. By default: everything is recomputed,
/// by this process, and nobody watches.
#[derive(Clone, Copy)]
pub struct Settings<'a> {
    /// Stands in for the declared rounding points.
    pub policy: Option<&'a PolicyDeclaration>,
    /// Checks dk and dq with so many random probes in place of recomputing them.
    pub probes: Option<usize>,
    /// Replays so many tokens of each microbatch; `probes` goes before it.
    pub tokens: Option<usize>,
    /// A user's own functions.
    pub variants: &'a [Arc<Variant>],
    /// Who computes the tiles; `None`: this process.
    pub cluster: Option<&'a Cluster<'a>>,
    /// What computes the reference; `None`: this process.
    pub device: Option<&'a dyn Device>,
    /// A user's own kernels.
    pub kernels: Option<&'a Kernels>,
    /// Which parameters of two runs are the same where their names differ.
    pub mapping: Option<&'a Mapping>,
    /// Whether what a page draws is gathered.
    pub draws: bool,
    /// How closely causes are looked for.
    pub causes: Causes,
    /// Shown what is known before the causes are looked for.
    pub show: Option<&'a dyn Fn(Report)>,
    /// Told how far the work is.
    pub watch: &'a dyn Watch,
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Settings {
            policy: None,
            probes: None,
            tokens: None,
            variants: &[],
            cluster: None,
            device: None,
            kernels: None,
            mapping: None,
            draws: false,
            causes: Causes::default(),
            show: None,
            watch: &NoProgress,
        }
    }
}

impl Settings<'_> {
    /// How much of a step is replayed. Its draws are the same each time.
    pub(super) fn effort(&self, step: &HeadStep<'_>) -> Effort {
        let seed = seed_of(step.dump.run.as_str(), step.dump.step.0);
        match (self.probes, self.tokens) {
            (Some(count), _) => Effort::Probes { count, seed },
            (None, Some(count)) => Effort::Tokens { count, seed },
            (None, None) => Effort::All,
        }
    }

    /// Tells who watches that causes are looked for, with so many multiply-adds at most.
    pub(super) fn begin_search(&self, work: u64) {
        self.watch.begin("search for causes", Work::MultiplyAdds, work);
    }
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Bytes that are read and hashed.
    Bytes,
    /// Multiply-adds of the replay.
    MultiplyAdds,
}

/// Who is told which work begins, how much there is of it, and how much was done.
pub trait Watch: Progress {
    /// Another kind of work begins, and so much of it is known.
    fn begin(&self, what: &'static str, work: Work, total: u64);
    /// So much more of the same is to be done.
    fn expect(&self, work: u64);
}

impl Watch for NoProgress {
    fn begin(&self, _what: &'static str, _work: Work, _total: u64) {}
    fn expect(&self, _work: u64) {}
}

/// Proves a dump while somebody watches; what is counted after it are multiply-adds.
pub fn proved(dump: &StepDump, watch: &dyn Watch) -> Verification {
    let shards = dump.tensors().values().flat_map(|info| &info.shards);
    let total = shards.map(|shard| dump.record(shard).length).sum();
    watch.begin("verify", Work::Bytes, total);
    let proof = verify(dump, &|bytes| watch.advance(bytes));
    watch.begin("replay", Work::MultiplyAdds, 0);
    proof
}
