//! The findings of a flag.

use serde::Serialize;

/// Whether a finding raises its flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Chance and a healthy job do not explain it.
    Flag,
    /// Worth knowing; a healthy job may do it.
    Note,
}

/// One finding with its evidence.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Which flag.
    pub flag: &'static str,
    /// Whether it is raised.
    pub severity: Severity,
    /// The step at which it begins.
    pub step: Option<u64>,
    /// The ranks that it is about; empty for the whole job.
    pub ranks: Vec<u32>,
    /// Which scalar.
    pub scalar: String,
    /// The evidence, in one sentence.
    pub evidence: String,
    /// The threshold that was exceeded, and where it comes from.
    pub threshold: String,
}

/// What a flag did not check.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// Which flag.
    pub flag: &'static str,
    /// What was not checked.
    pub what: String,
    /// Why not.
    pub why: String,
}

/// Collects the findings of a flag while it runs.
pub struct FlagResults {
    flag: &'static str,
    /// How many series or points it looked at.
    pub looked_at: u64,
    /// The findings in the order in which they were added.
    pub findings: Vec<Finding>,
    /// What it did not check.
    pub not_checked: Vec<Skipped>,
}

/// What a finding is about.
pub(crate) struct Place<'a> {
    pub(crate) step: Option<u64>,
    pub(crate) ranks: Vec<u32>,
    pub(crate) scalar: &'a str,
}

impl<'a> Place<'a> {
    /// A scalar of the job from a step on.
    pub(crate) fn at(scalar: &'a str, step: u64) -> Place<'a> {
        Place { step: Some(step), ranks: Vec::new(), scalar }
    }
}

impl FlagResults {
    pub(crate) fn new(flag: &'static str) -> FlagResults {
        FlagResults { flag, looked_at: 0, findings: Vec::new(), not_checked: Vec::new() }
    }

    pub(crate) fn looked(&mut self) {
        self.looked_at += 1;
    }

    pub(crate) fn skip(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.not_checked.push(Skipped { flag: self.flag, what: what.into(), why: why.into() });
    }

    pub(crate) fn raise(&mut self, place: Place<'_>, evidence: String, threshold: String) {
        self.add(Severity::Flag, place, evidence, threshold);
    }

    pub(crate) fn note(&mut self, place: Place<'_>, evidence: String, threshold: String) {
        self.add(Severity::Note, place, evidence, threshold);
    }

    fn add(&mut self, severity: Severity, place: Place<'_>, evidence: String, threshold: String) {
        let Place { step, ranks, scalar } = place;
        let scalar = scalar.into();
        let flag = self.flag;
        self.findings.push(Finding { flag, severity, step, ranks, scalar, evidence, threshold });
    }
}
