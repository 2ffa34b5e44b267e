//! How the outcome of a replay is settled: the status of each stage, and how much was judged.

use std::collections::BTreeSet;

use backtape::role::Role;

use super::coverage::{Coverage, LeftOut};
use super::outcome::{NOT_ASKED, NOT_CAPTURED, NotChecked, Outcome, StageOutcome, Status};
use crate::algebra::is_part;
use crate::head::{HeadStep, Stage};

impl Outcome {
    /// Counts what was judged, once all was compared. `asked`: by name, or nothing.
    pub(super) fn cover(&mut self, step: &HeadStep<'_>, asked: &BTreeSet<Stage>) {
        let counts = |stage: &&StageOutcome| {
            !stage.stage.is_input()
                && !stage.is_unwanted()
                && (is_judged(stage) || recorded(step, stage.stage))
                && (stage.stage != Stage::GradNorm || asked.contains(&Stage::GradNorm))
        };
        let counted: Vec<Stage> =
            self.stages.iter().filter(counts).map(|outcome| outcome.stage).collect();
        let judged = |&&stage: &&Stage| is_judged(self.stage(stage));
        let coverage = Coverage {
            judged: counted.iter().filter(judged).count(),
            of: counted.len(),
            counted: counted.iter().copied().collect(),
            left_out: self.left_of(&counted),
            narrowed: self.coverage.narrowed.clone(),
            lacks: Vec::new(),
        };
        // What has no comparison at all is listed with the skipped stages.
        let in_part = coverage.left_out.iter().filter(|left| is_judged(self.stage(left.stage)));
        let in_part: Vec<NotChecked> = in_part.map(LeftOut::not_checked).collect();
        self.not_checked.extend(in_part);
        self.coverage = coverage;
        self.coverage.lacks = self.lacks(&counted, asked);
    }

    /// Takes what was judged of another version of the step's tensors. Call it once the stages
    /// hold what was compared of both.
    pub(super) fn cover_too(&mut self, other: Coverage) {
        let mut coverage = std::mem::take(&mut self.coverage);
        coverage.counted.extend(other.counted);
        coverage.narrowed.extend(other.narrowed);
        let new = |left: &LeftOut| !coverage.left_out.contains(left);
        let more: Vec<LeftOut> = other.left_out.into_iter().filter(new).collect();
        coverage.left_out.extend(more);
        coverage.left_out.sort_by_key(|left_out| (left_out.stage, left_out.microbatch));
        let lacks = other.lacks.into_iter().filter(|why| !coverage.lacks.contains(why));
        coverage.lacks.extend(lacks.collect::<Vec<_>>());
        coverage.judged =
            coverage.counted.iter().filter(|&&stage| is_judged(self.stage(stage))).count();
        coverage.of = coverage.counted.len();
        self.coverage = coverage;
    }

    /// What was left out of these stages: each that has no comparison has a reason of its own.
    fn left_of(&self, counted: &[Stage]) -> Vec<LeftOut> {
        let mut left = self.coverage.left_out.clone();
        left.retain(|left_out| counted.contains(&left_out.stage));
        for &stage in counted {
            let known = left.iter().any(|left_out| left_out.stage == stage);
            let outcome = self.stage(stage);
            if !is_judged(outcome) && !known {
                let why = outcome.reason.clone();
                left.push(LeftOut { stage, microbatch: None, why });
            }
        }
        left.sort_by_key(|left_out| (left_out.stage, left_out.microbatch));
        left
    }

    /// Why nothing that was judged makes an agreement.
    pub(super) fn lacks(&self, counted: &[Stage], asked: &BTreeSet<Stage>) -> Vec<String> {
        let left = self.coverage.left_out.iter();
        // Who asks for a sample knows that it is one.
        let meant = |left: &&LeftOut| !self.sampled.contains(&left.stage);
        if !asked.is_empty() {
            let is_asked = |left: &&LeftOut| asked.iter().any(|&stage| of_asked(stage, left.stage));
            let words = |left: &LeftOut| {
                let LeftOut { stage, why, .. } = left;
                format!("{stage}{} was asked for and not judged: {why}", left.place())
            };
            return left.filter(is_asked).filter(meant).map(words).collect();
        }
        let gradients: Vec<Stage> =
            counted.iter().copied().filter(|&stage| stage >= Stage::Dlogprobs).collect();
        let none = gradients.iter().all(|&stage| !is_judged(self.stage(stage)));
        if gradients.is_empty() || !none {
            return Vec::new();
        }
        let first = left.filter(|left| gradients.contains(&left.stage)).find(meant);
        let words = |left: &LeftOut| {
            format!("no gradient that the dump holds could be judged: {}", left.why)
        };
        first.map(words).into_iter().collect()
    }
}

impl LeftOut {
    fn place(&self) -> String {
        self.microbatch.map_or(String::new(), |mb| format!(" of microbatch {mb}"))
    }

    pub(super) fn not_checked(&self) -> NotChecked {
        let words = if self.microbatch.is_some() { self.place() } else { " in part".into() };
        NotChecked { what: format!("{}{words}", self.stage), why: self.why.clone() }
    }
}

impl Outcome {
    /// Says what probes and samples see and do not see.
    fn note_reach(&mut self) {
        for (stage, reach) in std::mem::take(&mut self.reaches) {
            let what = format!("elements of {stage} one by one");
            self.not_checked.push(NotChecked { what, why: reach.sentence(stage) });
        }
        for (stage, sampled) in std::mem::take(&mut self.estimates) {
            self.sampled.insert(stage);
            if self.stage(stage).status == Status::Skip {
                self.skip(stage, sampled.sentence());
                let what = format!("single rows of {stage}");
                let why = "a sample sees an error of the whole or of its scale of several error bars; a label row, an index or a scatter that is wrong needs all tokens".into();
                self.not_checked.push(NotChecked { what, why });
            }
        }
    }

    /// Settles each stage's status from its comparisons. `asked`: stages that were asked for by
    /// name.
    pub(super) fn finish(&mut self, step: &HeadStep<'_>, asked: &BTreeSet<Stage>) {
        self.reference_dk = None;
        self.losses.clear();
        self.note_reach();
        for outcome in &mut self.stages {
            if outcome.comparisons.is_empty() {
                let left = self.coverage.left_out.iter().find(|left| left.stage == outcome.stage);
                if let Some(left) = left.filter(|_| outcome.reason == NOT_CAPTURED) {
                    outcome.reason.clone_from(&left.why);
                }
                let why = self.lacking.withholds_some(outcome.stage);
                let asked = outcome.reason != NOT_ASKED && outcome.status != Status::Fail;
                if let Some(why) = why.filter(|_| asked) {
                    (outcome.status, outcome.reason) = (Status::Skip, why);
                }
                continue;
            }
            outcome.settle();
        }
        self.cover(step, asked);
        let tensors = step.tensors.iter();
        let extra = tensors.filter(|(key, info)| info.role.is_none() && !is_part(key));
        for (key, _) in extra {
            let why = "it has no role in the loss head; `--against` compares it".into();
            self.not_checked.push(NotChecked { what: key.to_string(), why });
        }
        // Where ranks part, all that a step records of them differs: that is told by one line.
        let (of_step, others): (Vec<_>, Vec<_>) =
            step.unusable.iter().partition(|(key, _)| is_part(key));
        for (key, why) in others {
            let what = format!("what depends on {key}");
            self.not_checked.push(NotChecked { what, why: why.clone() });
        }
        if let Some((key, why)) = of_step.first() {
            let what = match of_step.len() - 1 {
                0 => format!("what depends on {key}"),
                more => format!("what depends on {key} and {more} more tensors of the step"),
            };
            self.not_checked.push(NotChecked { what, why: (*why).clone() });
        }
        for why in self.lacking.microbatches() {
            let what = "what depends on every microbatch".into();
            self.not_checked.push(NotChecked { what, why: why.clone() });
        }
        let asked =
            |outcome: &&StageOutcome| outcome.status == Status::Skip && !outcome.is_unwanted();
        for outcome in self.stages.iter().filter(asked) {
            let what = outcome.stage.to_string();
            self.not_checked.push(NotChecked { what, why: why_skipped(outcome) });
        }
    }
}

/// Whether something of it was compared, or it is wrong without that.
fn is_judged(stage: &StageOutcome) -> bool {
    !stage.comparisons.is_empty() || stage.status == Status::Fail
}

/// Whether a stage is what was asked for: of dk also its sums, which are recorded as dk.
fn of_asked(asked: Stage, stage: Stage) -> bool {
    stage == asked || (asked == Stage::Dk && stage.is_sum())
}

/// Whether the dump holds what a stage would be compared with.
fn recorded(step: &HeadStep<'_>, stage: Stage) -> bool {
    let several = step.microbatches.iter().any(Option::is_some);
    let dk = |reduced: bool| step.find_reduced(Role::Dk, reduced);
    match (stage, stage.role()) {
        (Stage::Accumulate, _) => several && dk(false).is_some(),
        // Without a microbatch, what is held of a reduced dk alone is judged as dk.
        (Stage::Reduce, _) => {
            dk(true).is_some_and(|key| several || step.find(Role::Dk, None) != Some(key))
        }
        (_, Some(role)) if role == step.scores() => false,
        (Stage::Loss, _) => {
            let any = step.microbatches.iter().any(|&mb| step.find(Role::Loss, mb).is_some());
            any || step.find(Role::Loss, None).is_some()
        }
        (_, Some(role)) => step.microbatches.iter().any(|&mb| step.find(role, mb).is_some()),
        _ => false,
    }
}

fn why_skipped(outcome: &StageOutcome) -> String {
    match outcome.stage.role() {
        _ if outcome.reason != NOT_CAPTURED => outcome.reason.clone(),
        Some(Role::Weights) => "none recorded: every token counts 1".into(),
        Some(Role::Bias) => "none recorded: the logits have no bias".into(),
        Some(_) => "not captured: tape.record(NAME, ...) would have it compared".into(),
        None => {
            "an intermediate that jobs do not record; recomputed inside the later stages".into()
        }
    }
}
