//! What the checks found, in words that a report can print and JSON can carry.

use backtape::identity::{Microbatch, Rank};
use backtape::shard::{TensorKey, When};
use serde::Serialize;

use super::Subject;
use crate::verify::NotChecked;

/// Rows named in a finding; the rest is counted.
pub const NAMED_ROWS: usize = 16;

/// How much a finding weighs.
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

/// Where a finding was made; what is `None` or empty is not known or is all of it.
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
    /// A step, and nothing more.
    pub fn of(subject: &Subject<'_>) -> Place {
        Place { step: Some(subject.dump.step.0), ..Place::default() }
    }

    /// The same, of this tensor.
    pub fn tensor(self, key: &TensorKey) -> Place {
        let (tensor, microbatch) = (Some(key.tensor.to_string()), key.microbatch.map(|mb| mb.0));
        Place { tensor, microbatch, when: key.when, ..self }
    }

    /// The same, in this microbatch.
    pub fn microbatch(self, microbatch: Option<Microbatch>) -> Place {
        Place { microbatch: microbatch.map(|mb| mb.0), ..self }
    }

    /// The same, on these ranks.
    pub fn ranks(self, ranks: &[Rank]) -> Place {
        let mut ranks: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
        ranks.sort_unstable();
        ranks.dedup();
        Place { ranks, ..self }
    }

    /// The same, at these rows, given in ascending order.
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
    /// How much it weighs.
    pub severity: Severity,
    /// Of the catalogue, where it is one of its causes.
    pub cause: Option<&'static str>,
    /// Where.
    #[serde(flatten)]
    pub place: Place,
    /// What speaks for it, in one sentence.
    pub evidence: String,
    /// What to do, in one sentence.
    pub advice: String,
}

/// What one check has to say.
#[derive(Debug)]
pub struct Found {
    check: &'static str,
    /// In the order in which they were made.
    pub findings: Vec<Finding>,
    /// What could not be checked, and why.
    pub not_checked: Vec<NotChecked>,
    /// Things that were looked at; a check that looked at nothing passed nothing.
    pub looked_at: u64,
}

impl Found {
    /// Nothing yet, of this check.
    pub fn new(check: &'static str) -> Found {
        Found { check, findings: Vec::new(), not_checked: Vec::new(), looked_at: 0 }
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

    /// Says what could not be checked.
    pub fn skip(&mut self, what: impl Into<String>, why: impl Into<String>) {
        let item = NotChecked { what: what.into(), why: why.into() };
        if !self.not_checked.contains(&item) {
            self.not_checked.push(item);
        }
    }

    /// Counts one thing more that was looked at.
    pub fn looked(&mut self) {
        self.looked_at += 1;
    }
}
