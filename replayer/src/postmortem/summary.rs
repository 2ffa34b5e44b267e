//! What was found of a run, brought together: the report of a dump that was opened and proved.

use std::path::Path;

use backtape::shard::TensorKey;

use super::error::RunError;
use super::settings::Settings;
use crate::algebra;
use crate::checks::{Subject, check_replayed};
use crate::dump::StepDump;
use crate::head::HeadStep;
use crate::head::contradictions::{self, Contradiction};
use crate::head::sources::items;
use crate::head::step::StepError;
use crate::number::plural;
use crate::replay::outcome::{NotChecked, Outcome};
use crate::report::schema::{DumpSummary, FirstDivergence, Report, SCHEMA, StageReport};
use crate::report::step_checks;
use crate::report::verdict::{self, Reason};
use crate::verify::{FindingKind, Verification, VerifyFinding};

/// A dump that was opened and proved.
#[derive(Clone, Copy)]
pub(super) struct Opened<'a> {
    /// As the user named it.
    pub(super) path: &'a Path,
    pub(super) dump: &'a StepDump,
    pub(super) proof: &'a Verification,
}

impl<'a> Opened<'a> {
    /// Why there is no verdict on it.
    pub(super) fn wrong(&self, source: StepError) -> RunError {
        RunError::Step { path: self.path.into(), source: Box::new(source) }
    }

    /// Its head.
    pub(super) fn head(&self, settings: &Settings<'_>) -> Result<HeadStep<'a>, RunError> {
        let unusable = |key: &TensorKey| self.proof.unusable(key).map(str::to_string);
        let head = HeadStep::new(self.dump, settings.policy, unusable);
        head.map_err(|source| self.wrong(source))
    }

    /// Its report; without stages where its head was not replayed. Causes are not looked for.
    pub(super) fn report(&self, judged: Option<(&HeadStep<'_>, &Outcome)>) -> Report {
        let Opened { path, dump: opened, proof } = *self;
        let uncommitted =
            opened.state.why().map(|why| format!("step {} is not committed: {why}", opened.step));
        let microbatches = judged.map(|(step, _)| step.microbatches.len());
        let manifest = &opened.manifest;
        let dump = summary(path, opened, microbatches, proof);
        let mut findings = sentences(proof);
        findings.extend(opened.passed_over());
        let outcome = judged.map(|(_, outcome)| outcome);
        let mut not_checked: Vec<NotChecked> =
            outcome.map(|outcome| outcome.not_checked.clone()).unwrap_or_default();
        // What nobody asked for was not forgotten by the job.
        for item in not_checked.iter_mut().filter(|item| item.why.starts_with("not captured")) {
            if let Some(why) = manifest.unselected(&item.what, None) {
                item.why = why;
            }
        }
        let unproved = proof.not_checked.iter();
        not_checked
            .extend(unproved.map(|n| NotChecked { what: n.what.clone(), why: n.why.clone() }));
        let checked =
            step_checks::weighed(opened, check_replayed(Subject { dump: opened, proof }), outcome);
        let replayed =
            outcome.and_then(|outcome| FirstDivergence::of(outcome, opened.run.as_str()));
        let mut reasons = verdict::of_head(judged, replayed.as_ref());
        reasons.extend(verdict::of_checks(&checked));
        reasons.extend(uncommitted.map(Reason::incomplete));
        let first_divergence = step_checks::first_of(opened, &checked, replayed);
        let contradictions = contradictions(opened, judged, &mut not_checked);
        Report {
            schema: SCHEMA,
            version: backtape::VERSION,
            verdict: verdict::verdict(&reasons),
            reasons,
            step: opened.step.0,
            first_divergence,
            dump,
            stages: outcome.map(StageReport::all).unwrap_or_default(),
            coverage: outcome.map(|outcome| outcome.coverage.clone()),
            algebra: None,
            contradictions,
            other_declaration: outcome.and_then(|outcome| outcome.other_declaration.clone()),
            causes: Vec::new(),
            variants: Vec::new(),
            grad_norm: outcome.map(|outcome| outcome.grad_norm.clone()).unwrap_or_default(),
            against: None,
            findings,
            not_checked,
            checks: checked,
            device: None,
            multiplied: outcome.map(|outcome| outcome.multiplied.clone()).unwrap_or_default(),
            kernels: Vec::new(),
            drawings: None,
        }
    }
}

/// What the job declared by hand and does not have. What could not be compared is noted.
fn contradictions(
    dump: &StepDump,
    judged: Option<(&HeadStep<'_>, &Outcome)>,
    not_checked: &mut Vec<NotChecked>,
) -> Vec<Contradiction> {
    let mut all = dump.manifest.head.as_ref().map(contradictions::of_options).unwrap_or_default();
    if let Some((step, _)) = judged {
        all.extend(contradictions::of_step(step));
        match contradictions::of_division(step) {
            Ok(found) => all.extend(found),
            Err(why) => {
                let what = "how the loss is divided, as it is declared by hand".into();
                not_checked.push(NotChecked { what, why });
            }
        }
    }
    all
}

/// What verification found, in sentences. That copies of a step's tensors differ is told once: one
/// wrong gradient makes every later tensor of its parameter differ.
fn sentences(proof: &Verification) -> Vec<String> {
    let is_step = |finding: &&VerifyFinding| {
        finding.kind == FindingKind::ReplicasDisagree
            && finding.tensor.as_ref().is_some_and(algebra::is_part)
    };
    let (copies, others): (Vec<&VerifyFinding>, Vec<_>) = proof.findings.iter().partition(is_step);
    let mut sentences: Vec<String> =
        others.iter().map(|finding| finding.sentence.clone()).collect();
    if let Some(first) = copies.first() {
        let more = match copies.len() - 1 {
            0 => String::new(),
            more => format!(", and so do {more} more boxes of the step's tensors"),
        };
        sentences.push(format!("{}{more}", first.sentence));
    }
    sentences
}

fn summary(
    path: &Path,
    dump: &StepDump,
    microbatches: Option<usize>,
    proof: &Verification,
) -> DumpSummary {
    let manifest = &dump.manifest;
    let mesh = if manifest.mesh.0.is_empty() {
        String::new()
    } else {
        format!(", mesh {}", manifest.mesh)
    };
    let state = dump.state.to_string();
    let head = match &manifest.head {
        None => "none declared".to_string(),
        Some(head) => format!(
            "{} {}, {} over {} ({}), {}",
            word(&head.loss),
            head.path,
            word(&head.reduction),
            word(&head.denominator),
            head.scope,
            match microbatches {
                Some(n) => plural(n as u64, "microbatch"),
                None => "not replayed".into(),
            },
        ),
    };
    DumpSummary {
        path: path.display().to_string(),
        run: dump.run.to_string(),
        attempt: dump.attempt.0,
        step: dump.step.0,
        state,
        ranks: format!("{}{mesh}", plural(u64::from(manifest.world_size), "rank")),
        head,
        head_items: manifest.head.as_ref().map(items).unwrap_or_default(),
        shards: proof.shards,
        bytes: proof.bytes,
        proved: proof.intact(),
        copies_differ: proof.only_copies_differ(),
        trigger: manifest.trigger.as_ref().map(|trigger| trigger.sentence()),
        selection: manifest.selections.first().map(|kept| {
            let (of, ranks) = (kept.selection.restrictions(), &kept.ranks);
            format!("{of} (asked of ranks {ranks})")
        }),
    }
}

/// The declared word of an option, as JSON spells it.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default().trim_matches('"').to_string()
}
