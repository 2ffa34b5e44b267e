//! The findings of the checks, as sentences for a report and as fields for JSON.

use backtape::identity::{Microbatch, Rank};
use backtape::shard::{TensorKey, When};
use serde::Serialize;

use super::Subject;
use crate::verify::NotChecked;

/// Most rows that a finding names; the others are only counted.
pub const NAMED_ROWS: usize = 16;

/// How severe a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something is wrong, and chance or rounding cannot explain it.
    Fail,
    /// Unusual enough to look at, though a right job may do it on purpose.
    Warn,
    /// Worth knowing.
    Note,
}

/// Where a fault was found; a field that is `None` or empty is not known or not limited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Which dumped step.
    pub step: Option<u64>,
    /// Which ranks.
    pub ranks: Vec<u32>,
    /// Which microbatch.
    pub microbatch: Option<u32>,
    /// Which tensor, by name.
    pub tensor: Option<String>,
    /// When it was captured.
    pub when: Option<When>,
    /// The first rows (leading dimensions flattened), at most [`NAMED_ROWS`].
    pub rows: Vec<u64>,
    /// How many rows there are in all.
    pub row_count: u64,
}

impl Place {
    /// The place of a whole step.
    pub fn of(subject: &Subject<'_>) -> Place {
        Place { step: Some(subject.dump.step.0), ..Place::default() }
    }

    /// The same place, narrowed to this tensor.
    pub fn tensor(self, key: &TensorKey) -> Place {
        let (tensor, microbatch) = (Some(key.tensor.to_string()), key.microbatch.map(|mb| mb.0));
        Place { tensor, microbatch, when: key.when, ..self }
    }

    /// The same place, narrowed to this microbatch.
    pub fn microbatch(self, microbatch: Option<Microbatch>) -> Place {
        Place { microbatch: microbatch.map(|mb| mb.0), ..self }
    }

    /// The same place, narrowed to these ranks.
    pub fn ranks(self, ranks: &[Rank]) -> Place {
        let mut ranks: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
        ranks.sort_unstable();
        ranks.dedup();
        Place { ranks, ..self }
    }

    /// The same place, narrowed to these rows, given in ascending order.
    pub fn rows(self, rows: &[u64]) -> Place {
        let named = rows.iter().take(NAMED_ROWS).copied().collect();
        Place { rows: named, row_count: rows.len() as u64, ..self }
    }
}

/// One thing that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check's name.
    pub check: &'static str,
    /// How severe it is.
    pub severity: Severity,
    /// The name of its cause in the catalogue, where it is one.
    pub cause: Option<&'static str>,
    /// Where it was found.
    #[serde(flatten)]
    pub place: Place,
    /// The evidence, in one sentence.
    pub evidence: String,
    /// What to do, in one sentence.
    pub advice: String,
}

/// The findings of one check while it runs.
#[derive(Debug)]
pub struct CheckResults {
    check: &'static str,
    /// The findings in the order in which they were added.
    pub findings: Vec<Finding>,
    /// What could not be checked, and why.
    pub not_checked: Vec<NotChecked>,
    /// How many tensors, pairs or steps were looked at; a check that looked at none does not pass.
    pub looked_at: u64,
}

impl CheckResults {
    /// No findings yet, for this check.
    pub fn new(check: &'static str) -> CheckResults {
        CheckResults { check, findings: Vec::new(), not_checked: Vec::new(), looked_at: 0 }
    }

    /// Adds a finding.
    pub fn add(
        &mut self,
        severity: Severity,
        cause: Option<&'static str>,
        place: Place,
        evidence: String,
        advice: impl Into<String>,
    ) {
        let (check, advice) = (self.check, advice.into());
        self.findings.push(Finding { check, severity, cause, place, evidence, advice });
    }

    /// Records what could not be checked, and why.
    pub fn skip(&mut self, what: impl Into<String>, why: impl Into<String>) {
        let item = NotChecked { what: what.into(), why: why.into() };
        if !self.not_checked.contains(&item) {
            self.not_checked.push(item);
        }
    }

    /// Counts one more tensor, pair or step that was looked at.
    pub fn looked(&mut self) {
        self.looked_at += 1;
    }
}
