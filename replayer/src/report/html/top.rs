//! The head of the page: the verdict in one sentence, what was read, where to go on.

use askama::Template;

use super::{Markup, Page, markup};
use crate::algebra::{Group, StepReport};
use crate::diagnose::{CauseReport, Standing};
use crate::head::sources::by_source;
use crate::number::{bytes, plural};
use crate::report::Report;
use crate::report::schema::{DumpSummary, Verdict};
use crate::report::text;

pub(super) fn verdict_word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Agreed => "agreed",
        Verdict::Diverged => "diverged",
        Verdict::Misdeclared => "misdeclared",
        Verdict::Incomplete => "incomplete",
        Verdict::Differs => "differs",
    }
}

/// A mark that says the same without a colour.
fn glyph(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Agreed => "✓",
        Verdict::Diverged | Verdict::Misdeclared => "✕",
        Verdict::Incomplete => "?",
        Verdict::Differs => "≠",
    }
}

#[derive(Template)]
#[template(path = "top.html")]
struct Top<'a> {
    report: &'a Report,
    id: &'a str,
    word: &'static str,
    glyph: &'static str,
    sentence: String,
    /// What was declared by hand and is not so, and another declaration by which the job would be
    /// right.
    declarations: Vec<String>,
    /// The causes in a line, with what to do: whoever is woken reads no further.
    causes: &'a [CauseReport],
    said: String,
    /// What diverges first of the step, where nothing of the head diverges before it.
    of_step: Option<&'a Group>,
    facts: Vec<(&'static str, String)>,
    /// Sections of the page, and what they are called.
    parts: Vec<(&'static str, &'static str)>,
}

impl Page<'_> {
    pub(super) fn top(&self) -> Markup {
        let report = self.report;
        let mut facts = facts("run", &report.dump);
        let steps = self.step_parts();
        let mut parts = Vec::new();
        parts.extend(steps.iter().filter(|_| self.step_leads()));
        if !self.has_no_head() {
            parts.extend([("graph", "Graph"), ("causes", "Cause"), ("stages", "Stages")]);
        }
        if let Some(against) = &report.against {
            facts.extend(self::facts("against", &against.dump));
            parts.extend(self.has_pair().then_some(("against", "Both runs")));
        }
        if !self.has_no_head() {
            parts.extend([("maps", "Heat maps"), ("norm", "grad_norm")]);
        }
        parts.extend(steps.iter().filter(|_| !self.step_leads()));
        parts.extend([("ranks", "Ranks"), ("unchecked", "Not checked")]);
        let contradictions = report.contradictions.iter();
        let mut declarations: Vec<String> =
            contradictions.map(|found| found.sentence.clone()).collect();
        let other = report.other_declaration.as_ref();
        declarations.extend(
            other.map(|other| format!("{}; to tell, look at {}", other.sentence(), other.look)),
        );
        markup(&Top {
            report,
            id: &self.id,
            word: verdict_word(report.verdict),
            glyph: glyph(report.verdict),
            sentence: text::verdict(report),
            declarations,
            causes: self.shown(&report.causes),
            said: summary_of(&report.causes),
            of_step: report
                .algebra
                .as_ref()
                .and_then(StepReport::first)
                .filter(|_| self.step_leads()),
            facts,
            parts,
        })
    }
}

impl Page<'_> {
    /// The sections of the step.
    fn step_parts(&self) -> Vec<(&'static str, &'static str)> {
        let against = self.report.against.as_ref();
        let parts = [
            (against.is_some_and(|own| own.step.is_some()), ("both-steps", "Steps of both runs")),
            (self.report.algebra.is_some(), ("step", "Step")),
            (against.is_some_and(|own| own.algebra.is_some()), ("other-step", "Other run's step")),
        ];
        parts.into_iter().filter_map(|(is_there, part)| is_there.then_some(part)).collect()
    }
}

/// What is said of all causes together.
fn summary_of(causes: &[CauseReport]) -> String {
    match causes {
        [] => String::new(),
        [first, ..] if first.standing == Standing::Unknown => {
            "nothing in the catalogue explains it".into()
        }
        [first, ..] if first.standing == Standing::Tied => {
            "the captured tensors cannot tell them apart".into()
        }
        [only] => format!("to do: {}", only.advice),
        _ => "each explains a part of it".into(),
    }
}

fn facts(label: &'static str, dump: &DumpSummary) -> Vec<(&'static str, String)> {
    let step = format!("{}, attempt {}, step {}", dump.run, dump.attempt, dump.step);
    let size = format!("{}, {}", plural(dump.shards, "shard"), bytes(dump.bytes));
    let where_to_look = if dump.proved { "" } else { ": see the ranks below" };
    let mut facts = vec![
        (label, format!("{step} ({}); read from {}", dump.ranks, dump.path)),
        ("dump", format!("{}; {size}; {}{where_to_look}", dump.state, dump.proof())),
        ("head", dump.head.clone()),
    ];
    let sources = by_source(&dump.head_items);
    facts.extend((!sources.is_empty()).then_some(("declaration", sources)));
    facts.extend(dump.trigger.clone().map(|trigger| ("trigger", trigger)));
    facts.extend(dump.selection.clone().map(|selection| ("selection", selection)));
    facts
}
