//! Checks of a dump that need no replay and, most of them, no declared head. They look for faults
//! in the data, in the bits of the tensors, and in what different ranks hold.
//!
//! A check is a function over the opened steps. It reads shards from the mapped files without
//! copying them, so its memory grows with the number of tokens, not with the tensors. It lists what
//! it could not check: a check that looked at nothing does not pass.
//!
//! ```text
//! check(&[subject])
//!   -> batches: step 0: rank 2 holds the tokens of rank 0 (duplicate-batch)
//! ```
//!
//! Adding a check touches its file and [`CHECKS`].

mod batches;
mod blocks;
mod columns;
mod counts;
mod damage;
mod facts;
mod finding;
mod gradients;
mod labels;
mod nonfinite;
mod pieces;
mod poison;
mod recompute;
mod reduced;
mod replicas;
mod shift;
mod stale;
mod start;
mod surprisal;
mod tokens;
mod zeros;

use backtape::head::HeadDeclaration;
use backtape::role::Role;
use backtape::shard::TensorKey;
use rayon::prelude::*;
use serde::Serialize;

pub use damage::is_damage;
pub use finding::{CheckResults, Finding, NAMED_ROWS, Place, Severity};
pub use gradients::{GradientStatistics, statistics};

use crate::dump::{StepDump, TensorInfo};
use crate::verify::{NotChecked, Verification};

/// One dumped step, and what verification found in it.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The step.
    pub dump: &'a StepDump,
    /// Its verification.
    pub proof: &'a Verification,
}

impl<'a> Subject<'a> {
    /// The head, where the job declared one.
    pub fn head(&self) -> Option<&'a HeadDeclaration> {
        self.dump.manifest.head.as_ref()
    }

    /// The tensors of a role, by key.
    pub fn of_role(&self, role: Role) -> impl Iterator<Item = (&'a TensorKey, &'a TensorInfo)> {
        self.dump.tensors().iter().filter(move |(_, info)| info.role == Some(role))
    }
}

/// One check.
pub struct Check {
    /// Its name in findings and reports.
    pub name: &'static str,
    /// What it looks for, in a few words.
    pub about: &'static str,
    run: Run,
    /// Whether it is part of every replay. Such a check looks at one step at a time, and what it
    /// finds at fail level is a fault of the job.
    of_replay: bool,
}

type Run = fn(&[Subject<'_>], &mut CheckResults);

/// A check that is part of every replay.
const fn weighs(name: &'static str, about: &'static str, run: Run) -> Check {
    Check { name, about, run, of_replay: true }
}

/// A check that only `replay checks` runs.
const fn told(name: &'static str, about: &'static str, run: Run) -> Check {
    Check { name, about, run, of_replay: false }
}

/// Every check, in the order of a report.
pub const CHECKS: &[Check] = &[
    told("damage", "all of the dump can be read", damage::run),
    weighs("batches", "no batch and no sequence repeats", batches::run),
    weighs("shift", "labels are the ids that follow the inputs", shift::run),
    weighs("labels", "labels name classes, and some count", labels::run),
    weighs("nonfinite", "every value is a number", nonfinite::run),
    weighs("poison", "no memory was left unwritten", poison::run),
    weighs("buffers", "no gradient is another buffer", stale::run),
    weighs("zeros", "no row is zero that cannot be", zeros::run),
    weighs("replicas", "replicas hold the same bits", replicas::run),
    weighs("recompute", "what is computed again is the same", recompute::run),
    weighs("reduced", "reduced gradients are no rank's own", reduced::run),
    weighs("counts", "the loss counts what the data count", counts::run),
    told("start", "the first loss against log V", start::run),
    told("clipping", "how many steps were clipped", gradients::run),
];

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// A finding at fail level.
    Fail,
    /// One at warn level.
    Warn,
    /// It looked at something, and found nothing to warn of.
    Pass,
    /// There was nothing that it could look at.
    NotChecked,
}

/// How one check ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckSummary {
    /// Its name.
    pub check: &'static str,
    /// What it looks for.
    pub about: &'static str,
    /// How it ended.
    pub status: Status,
    /// How many tensors, pairs or steps it looked at.
    pub looked_at: u64,
}

/// The results of all checks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    /// One entry for each check.
    pub checks: Vec<CheckSummary>,
    /// The most severe first, then in the order of the checks.
    pub findings: Vec<Finding>,
    /// What was not checked, and why.
    pub not_checked: Vec<CheckSkipped>,
    /// Statistics of every recorded gradient; empty where the checks run as part of a replay.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub statistics: Vec<GradientStatistics>,
}

/// What a check did not look at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckSkipped {
    /// The check's name.
    pub check: &'static str,
    /// What, and why.
    #[serde(flatten)]
    pub item: NotChecked,
}

impl Checked {
    /// Sets how each check ended from its findings.
    pub fn settle(&mut self) {
        for check in &mut self.checks {
            let findings = self.findings.iter().filter(|finding| finding.check == check.check);
            check.status = match findings.map(|finding| finding.severity).min() {
                Some(Severity::Fail) => Status::Fail,
                Some(Severity::Warn) => Status::Warn,
                _ if check.looked_at == 0 => Status::NotChecked,
                _ => Status::Pass,
            };
        }
    }

    /// True when something is found to be wrong.
    pub fn failed(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Fail)
    }
}

/// Runs every check over some steps of one run, in ascending order of steps.
pub fn check(subjects: &[Subject<'_>]) -> Checked {
    let all: Vec<&Check> = CHECKS.iter().collect();
    Checked { statistics: statistics(subjects), ..run(&all, subjects) }
}

/// Runs the checks that are part of the replay of a step.
pub fn check_replayed(subject: Subject<'_>) -> Checked {
    let all: Vec<&Check> = CHECKS.iter().filter(|check| check.of_replay).collect();
    run(&all, &[subject])
}

fn run(checks: &[&Check], subjects: &[Subject<'_>]) -> Checked {
    // A partial step holds fewer tokens, microbatches and tensors than the job had, which the other
    // checks would report as faults: only `damage` looks at it.
    let whole = |subject: &&Subject<'_>| subject.dump.is_whole();
    let whole: Vec<Subject<'_>> = subjects.iter().filter(whole).copied().collect();
    let results_of = |check: &&Check| {
        let mut results = CheckResults::new(check.name);
        let subjects_checked = if check.name == "damage" { subjects } else { &whole[..] };
        (check.run)(subjects_checked, &mut results);
        results
    };
    let all: Vec<CheckResults> = checks.par_iter().map(results_of).collect();
    let mut checked = Checked::default();
    for (check, results) in checks.iter().zip(all) {
        let Check { name, about, .. } = **check;
        let (status, looked_at) = (Status::NotChecked, results.looked_at);
        checked.checks.push(CheckSummary { check: name, about, status, looked_at });
        checked.findings.extend(results.findings);
        let skipped = results.not_checked.into_iter();
        checked.not_checked.extend(skipped.map(|item| CheckSkipped { check: name, item }));
    }
    // The sort is stable, so that each check's findings stay in their order.
    checked.findings.sort_by_key(|finding| finding.severity);
    checked.settle();
    checked
}
