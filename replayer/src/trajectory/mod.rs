//! Checks the trajectory of a run by its scalars. Each flag is a function over the recorded series
//! that looks for a known sign of trouble, and reports its evidence and the source of its
//! threshold.
//!
//! ```text
//! judge(&trajectory, &declared)
//!   -> ranks: grad_norm of rank 2 leaves the other 3 ranks at step 40: 1.25 against 1.31
//! ```
//!
//! It reads no tensors and needs no head. A flag that had nothing to look at is not clear but not
//! checked, with the reason. A new flag is a file and a line in [`FLAGS`].

mod chance;
mod clipping;
mod falling;
mod finding;
mod frozen;
mod jump;
mod moments;
mod nonfinite;
mod oscillation;
mod ranks;
mod read;
mod repeated;
mod series;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use serde::Serialize;

pub use finding::{Finding, FlagResults, Severity, Skipped};
pub use read::{RankScalars, ReadError, Trajectory, read};
pub use series::Series;

/// What the user declares about the job and its scalars do not tell.
#[derive(Clone, Debug, Default)]
pub struct Declared {
    /// Classes of the loss head.
    pub vocabulary: Option<u64>,
    /// Scalars that may differ between ranks, whatever their names.
    pub local: Vec<String>,
    /// Scalars that must be equal on all ranks.
    pub shared: Vec<String>,
}

/// Scalars that by their meaning are the same on all ranks.
const SHARED: [&str; 3] = ["learning_rate", "grad_norm", "grad_norm_clipped"];

/// The data that flags read.
pub(crate) struct View<'a> {
    pub(crate) trajectory: &'a Trajectory,
    /// The job's loss, averaged over the ranks.
    pub(crate) loss: Option<Series>,
    /// Classes of the head, and where the number comes from.
    pub(crate) vocabulary: Option<(f64, String)>,
    declared: &'a Declared,
}

impl View<'_> {
    /// A scalar of the job, from the first rank that recorded it.
    pub(crate) fn of(&self, name: &str) -> Option<&Series> {
        self.trajectory.ranks.iter().find_map(|rank| rank.series.get(name))
    }

    /// The names of all scalars, sorted.
    pub(crate) fn names(&self) -> BTreeSet<&str> {
        self.trajectory
            .ranks
            .iter()
            .flat_map(|rank| rank.series.keys().map(String::as_str))
            .collect()
    }

    /// True for a scalar that must be equal on all ranks, by its name or by declaration.
    pub(crate) fn is_shared(&self, name: &str) -> bool {
        let listed = |list: &[String]| list.iter().any(|one| one == name);
        let by_name = SHARED.contains(&name) || name == "vocabulary";
        !listed(&self.declared.local) && (by_name || listed(&self.declared.shared))
    }

    pub(crate) fn is_local(&self, name: &str) -> bool {
        self.declared.local.iter().any(|one| one == name)
    }
}

/// One flag.
pub struct Flag {
    /// Its name in findings and reports.
    pub name: &'static str,
    /// What it looks for, in a few words.
    pub about: &'static str,
    run: fn(&View<'_>, &mut FlagResults),
}

/// Every flag, in the order of a report.
pub const FLAGS: &[Flag] = &[
    Flag { name: "nonfinite", about: "every scalar is a number", run: nonfinite::run },
    Flag { name: "ranks", about: "ranks agree on what is the job's", run: ranks::run },
    Flag { name: "falling", about: "the loss falls no faster than data allow", run: falling::run },
    Flag { name: "repeated", about: "the loss has no fixed period", run: repeated::run },
    Flag { name: "jump", about: "the loss comes back from every jump", run: jump::run },
    Flag { name: "oscillation", about: "the loss does not swing in place", run: oscillation::run },
    Flag { name: "clipping", about: "not every step is clipped", run: clipping::run },
    Flag { name: "frozen", about: "gradient norms move", run: frozen::run },
    Flag { name: "moments", about: "Adam's second moment is its gradients'", run: moments::run },
];

/// How a flag ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Raised.
    Flagged,
    /// It looked at something, and is not raised.
    Clear,
    /// There was nothing that it could look at.
    NotChecked,
}

/// How one flag ended.
#[derive(Clone, Debug, Serialize)]
pub struct FlagSummary {
    /// Its name.
    pub flag: &'static str,
    /// What it looks for.
    pub about: &'static str,
    /// How it ended.
    pub status: Status,
    /// How many series or points it looked at.
    pub looked_at: u64,
}

/// The results of all flags.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Judged {
    /// One entry for each flag.
    pub flags: Vec<FlagSummary>,
    /// Findings of raised flags first, then notes, each in the order of the flags.
    pub findings: Vec<Finding>,
    /// What was not checked, and why.
    pub not_checked: Vec<Skipped>,
}

impl Judged {
    /// True when a flag is raised.
    pub fn flagged(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Flag)
    }
}

/// Runs every flag over what was read.
pub fn judge(trajectory: &Trajectory, declared: &Declared) -> Judged {
    let mut view = View { trajectory, loss: None, vocabulary: None, declared };
    view.loss = series::mean_over_ranks(trajectory, "loss");
    view.vocabulary = vocabulary(&view);
    let mut judged = Judged::default();
    for flag in FLAGS {
        let mut results = FlagResults::new(flag.name);
        (flag.run)(&view, &mut results);
        let raised = results.findings.iter().any(|finding| finding.severity == Severity::Flag);
        let status = match (raised, results.looked_at) {
            (true, _) => Status::Flagged,
            (false, 0) => Status::NotChecked,
            (false, _) => Status::Clear,
        };
        let Flag { name, about, .. } = *flag;
        judged.flags.push(FlagSummary { flag: name, about, status, looked_at: results.looked_at });
        judged.findings.extend(results.findings);
        judged.not_checked.extend(results.not_checked);
    }
    // The sort is stable, so that each flag's findings stay in their order.
    judged.findings.sort_by_key(|finding| finding.severity);
    judged
}

/// Classes of the head: the declared number, else the recorded one, else that of a dumped step.
fn vocabulary(view: &View<'_>) -> Option<(f64, String)> {
    if let Some(classes) = view.declared.vocabulary {
        return Some((classes as f64, "declared".into()));
    }
    let recorded = view.of("vocabulary").and_then(|series| series.values().last().copied());
    match recorded.filter(|classes| classes.is_finite()) {
        Some(classes) => Some((classes, "recorded as a scalar".into())),
        None => view.trajectory.vocabulary.map(|v| (v as f64, "of k in the dump".into())),
    }
    .filter(|(classes, _)| *classes >= 2.0)
}
