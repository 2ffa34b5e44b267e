//! How much a replay has judged of what a dump holds, or of what was asked for.

use std::collections::BTreeSet;

use backtape::identity::Microbatch;
use backtape::role::Role;
use serde::Serialize;

use super::outcome::{NotChecked, Outcome, StageOutcome, Status};
use crate::head::step::StepError;
use crate::head::{HeadStep, Stage};

/// Something of a stage that has no verdict.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// Of which stage.
    pub stage: Stage,
    /// Of which microbatch; `None` for all of it.
    pub microbatch: Option<Microbatch>,
    /// Why.
    pub why: String,
}

/// Stages that were judged, of those that were recorded or asked for. Inputs do not count:
/// nothing says what they should be.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// How many were judged, in part at least.
    pub judged: usize,
    /// Of how many.
    pub of: usize,
    /// Which.
    #[serde(skip)]
    counted: BTreeSet<Stage>,
    /// What was left out of them.
    pub left_out: Vec<LeftOut>,
    /// Stages of which some tokens could not be judged, or some of the error: it is said which
    /// and why, and the rest was judged.
    pub narrowed: BTreeSet<Stage>,
    /// Why this is no agreement though nothing diverged: what was asked for by name is left out,
    /// or no gradient that was recorded could be judged.
    #[serde(skip)]
    pub lacks: Vec<String>,
}

impl Outcome {
    /// Notes that something of a stage has no verdict.
    pub(super) fn leave(
        &mut self,
        stage: Stage,
        microbatch: Option<Microbatch>,
        why: impl Into<String>,
    ) {
        let left = LeftOut { stage, microbatch, why: why.into() };
        if !self.coverage.left_out.contains(&left) {
            self.coverage.left_out.push(left);
        }
    }

    /// What a tensor gave; where the dump holds none that can be used, the stages that it is for
    /// have no verdict, and all others go on.
    pub(super) fn spared<T>(
        &mut self,
        found: Result<T, StepError>,
        (stages, microbatch): (&[Stage], Option<Microbatch>),
    ) -> Result<Option<T>, StepError> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.is_of_dump() => {
                let why = error.to_string();
                stages.iter().for_each(|&stage| self.leave(stage, microbatch, why.clone()));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Notes that a stage is judged but for some tokens, or some of its error.
    pub(super) fn narrow(&mut self, stage: Stage, what: String, why: String) {
        self.coverage.narrowed.insert(stage);
        self.not_checked.push(NotChecked { what, why });
    }

    /// Counts what was judged, once all was compared. `asked`: by name, or nothing.
    pub(super) fn cover(&mut self, step: &HeadStep<'_>, asked: &BTreeSet<Stage>) {
        let counts = |stage: &&StageOutcome| {
            !stage.stage.is_input()
                && !stage.is_unwanted()
                && (is_judged(stage) || recorded(step, stage.stage))
                && (stage.stage != Stage::GradNorm || asked.contains(&Stage::GradNorm))
        };
        let counted: Vec<Stage> = self.stages.iter().filter(counts).map(|one| one.stage).collect();
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
        let mut own = std::mem::take(&mut self.coverage);
        own.counted.extend(other.counted);
        own.narrowed.extend(other.narrowed);
        let new = |left: &LeftOut| !own.left_out.contains(left);
        let more: Vec<LeftOut> = other.left_out.into_iter().filter(new).collect();
        own.left_out.extend(more);
        own.left_out.sort_by_key(|one| (one.stage, one.microbatch));
        let lacks = other.lacks.into_iter().filter(|why| !own.lacks.contains(why));
        own.lacks.extend(lacks.collect::<Vec<_>>());
        own.judged = own.counted.iter().filter(|&&stage| is_judged(self.stage(stage))).count();
        own.of = own.counted.len();
        self.coverage = own;
    }

    /// What was left out of these stages: each that has no comparison has a reason of its own.
    fn left_of(&self, counted: &[Stage]) -> Vec<LeftOut> {
        let mut left = self.coverage.left_out.clone();
        left.retain(|one| counted.contains(&one.stage));
        for &stage in counted {
            let known = left.iter().any(|one| one.stage == stage);
            let outcome = self.stage(stage);
            if !is_judged(outcome) && !known {
                let why = outcome.reason.clone();
                left.push(LeftOut { stage, microbatch: None, why });
            }
        }
        left.sort_by_key(|one| (one.stage, one.microbatch));
        left
    }

    /// Why nothing that was judged makes an agreement.
    fn lacks(&self, counted: &[Stage], asked: &BTreeSet<Stage>) -> Vec<String> {
        let left = self.coverage.left_out.iter();
        // Who asks for a sample knows that it is one.
        let meant = |left: &&LeftOut| !self.sampled.contains(&left.stage);
        if !asked.is_empty() {
            let of = |left: &&LeftOut| asked.iter().any(|&one| of_asked(one, left.stage));
            let words = |left: &LeftOut| {
                let LeftOut { stage, why, .. } = left;
                format!("{stage}{} was asked for and not judged: {why}", left.place())
            };
            return left.filter(of).filter(meant).map(words).collect();
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

    fn not_checked(&self) -> NotChecked {
        let of = if self.microbatch.is_some() { self.place() } else { " in part".into() };
        NotChecked { what: format!("{}{of}", self.stage), why: self.why.clone() }
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

/// The stages of some roles.
pub(super) fn stages_of(roles: &[Role]) -> BTreeSet<Stage> {
    roles.iter().filter_map(|&role| Stage::of_role(role)).filter(|one| !one.is_input()).collect()
}
