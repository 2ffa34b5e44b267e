//! What verification found, what was not checked and why, and how to read the page.

use askama::Template;

use super::{Markup, Page, markup};
use crate::report::{Report, step_checks};

#[derive(Template)]
#[template(path = "rest.html")]
struct Rest<'a> {
    id: &'a str,
    report: &'a Report,
    /// Items of a list that are shown.
    items: usize,
    findings: &'a [String],
    /// What the checks of the step found, as the text has it, and how much that is.
    checks: &'a [String],
    all_checks: usize,
    unchecked: Vec<Unchecked<'a>>,
    all_unchecked: usize,
}

/// Things that were not checked for one reason.
struct Unchecked<'a> {
    why: &'a str,
    what: String,
    more: String,
}

impl Page<'_> {
    pub(super) fn rest(&self) -> Markup {
        let report = self.report;
        let mut checks = step_checks::lines(&report.checks, "");
        if let Some(against) = &report.against {
            checks.extend(step_checks::lines(&against.checks, "other run: "));
        }
        // Things with one reason together, as the text has them.
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for item in &report.not_checked {
            match reasons.iter_mut().find(|(why, _)| *why == item.why) {
                Some((_, what)) => what.push(&item.what),
                None => reasons.push((&item.why, vec![&item.what])),
            }
        }
        markup(&Rest {
            id: &self.id,
            report,
            items: self.detail.items,
            findings: self.shown(&report.findings),
            checks: self.shown(&checks),
            all_checks: checks.len(),
            unchecked: self.shown(&reasons).iter().map(|of| self.unchecked(of)).collect(),
            all_unchecked: reasons.len(),
        })
    }

    fn unchecked<'a>(&self, (why, what): &(&'a str, Vec<&str>)) -> Unchecked<'a> {
        let shown = self.shown(what);
        let more = match what.len() - shown.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        Unchecked { why, what: shown.join(", "), more }
    }
}
