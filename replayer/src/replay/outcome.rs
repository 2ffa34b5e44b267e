//! What a replay found, stage by stage: plain data for the report.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::identity::Microbatch;
use backtape::nan::by_size;
use serde::Serialize;

use super::addends;
use super::comparison::Comparison;
use super::coverage::{Coverage, LeftOut};
use super::estimate::Sampled;
use super::executor::pass_cache::PassCache;
use super::expected_loss::LossTotals;
use super::maps::Map;
use super::other_declaration::OtherDeclaration;
use super::probe::Reach;
use super::reference_dk::ReferenceDk;
use crate::compare::SeenFrom;
use crate::head::step::StepError;
use crate::head::{Lacking, Stage};

pub use super::norm_shares::{GradNorm, Share};

/// Why a comparison that leaves tokens out tells nothing.
const ONLY_ZEROS: &str = "all tokens that could be judged have a gradient of zero";
/// Reason of a stage that the dump does not hold.
pub(super) const NOT_CAPTURED: &str = "not captured";
/// Reason of one that is beside what was asked for.
pub(super) const NOT_ASKED: &str = "not asked for";

/// How a stage came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Its error is what the declared precision must have.
    Pass,
    /// It differs, and nothing says how much it may; or it passes only because the job does
    /// not declare how it rounds.
    Warn,
    /// Its error is more than rounding can explain.
    Fail,
    /// It was not compared: `reason` says why.
    Skip,
}

/// Something that this run did not check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotChecked {
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
}

/// A stage over all its comparisons.
#[derive(Clone, Debug, PartialEq)]
pub struct StageOutcome {
    /// Which stage.
    pub stage: Stage,
    /// How it came out.
    pub status: Status,
    /// Why it failed or was skipped.
    pub reason: String,
    /// Every comparison, by microbatch and rank.
    pub comparisons: Vec<Comparison>,
}

/// All that a replay found.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Every stage, in order.
    pub stages: Vec<StageOutcome>,
    /// What was not checked and why.
    pub not_checked: Vec<NotChecked>,
    /// How much of what there is was judged.
    pub coverage: Coverage,
    /// The norm of the gradients.
    pub grad_norm: GradNorm,
    /// Maps of dq and dk, where a drawing was asked for.
    pub maps: Vec<Map>,
    /// The emulated policies and in which types a device multiplied for them; empty without one.
    pub multiplied: Vec<Multiplied>,
    /// Another declaration with which everything would agree.
    pub other_declaration: Option<OtherDeclaration>,
    /// Multiply-adds of the replay; 0 of a trial, which counts its own.
    pub work: u64,
    /// Reference dk summed over ranks and microbatches, while it is needed.
    pub(super) reference_dk: Option<ReferenceDk>,
    /// Addends of a sum of dk that is not right and of which none was recorded: what they should
    /// be.
    pub(crate) unrecorded: Vec<addends::Read>,
    /// What random probes can see of each stage, the worst of all units.
    pub(super) reaches: Vec<(Stage, Reach)>,
    /// What a sample says of each stage, the unit that is off most.
    pub(super) estimates: Vec<(Stage, Sampled)>,
    /// The stages of those.
    pub(super) sampled: BTreeSet<Stage>,
    /// What the loss of each microbatch should be, where the step's is judged.
    pub(super) losses: Vec<LossTotals>,
    /// What the step lacks: nothing that depends on it gets into the outcome.
    pub(super) lacking: Lacking,
    /// The replay's forward passes.
    pub(crate) passes: Passes,
}

/// Forward passes that a replay leaves to the search for causes. They say nothing that the
/// outcome does not, so outcomes are compared without them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Passes(pub(crate) Arc<PassCache>);

impl PartialEq for Passes {
    fn eq(&self, _: &Passes) -> bool {
        true
    }
}

/// In which types a device multiplied for a policy.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Multiplied {
    /// The policy, as the stages call it.
    pub policy: String,
    /// Operands and sums of its logits.
    pub logits: &'static str,
    /// Operands and sums of its dq and dk.
    pub gradients: &'static str,
}

impl StageOutcome {
    /// The comparison to show: failing before passing, then the largest ratio.
    pub fn worst(&self) -> Option<&Comparison> {
        let rank = |c: &Comparison| (c.excess.is_some(), c.ratio());
        self.comparisons.iter().max_by(|a, b| {
            let ((fail_a, ratio_a), (fail_b, ratio_b)) = (rank(a), rank(b));
            fail_a.cmp(&fail_b).then(by_size(&ratio_a, &ratio_b))
        })
    }

    /// The smallest faults that every one of its comparisons would have shown, where it passes.
    pub fn seen_from(&self) -> Option<SeenFrom> {
        let passes = matches!(self.status, Status::Pass | Status::Warn);
        let all: Option<Vec<SeenFrom>> =
            self.comparisons.iter().map(|comparison| comparison.seen_from).collect();
        all.filter(|_| passes)?.into_iter().reduce(SeenFrom::in_both)
    }

    /// True when nobody asked for it.
    pub(super) fn is_unwanted(&self) -> bool {
        self.status == Status::Skip && self.reason == NOT_ASKED
    }

    /// Settles the status from the comparisons.
    pub(super) fn settle(&mut self) {
        let failing = self.failing().count();
        let first = self.worst().and_then(|worst| worst.excess.clone());
        self.status = if failing > 0 { Status::Fail } else { Status::Pass };
        self.reason = first.unwrap_or_default();
    }

    /// The comparisons that fail.
    pub fn failing(&self) -> impl Iterator<Item = &Comparison> {
        self.comparisons.iter().filter(|comparison| comparison.excess.is_some())
    }
}

impl Outcome {
    pub(super) fn new(wanted: &BTreeSet<Stage>, lacking: &Lacking) -> Outcome {
        let stage = |&stage: &Stage| {
            let reason = if wanted.contains(&stage) { NOT_CAPTURED } else { NOT_ASKED };
            let (status, comparisons) = (Status::Skip, Vec::new());
            StageOutcome { stage, status, reason: reason.into(), comparisons }
        };
        let stages = Stage::ALL.iter().map(stage).collect();
        let (not_checked, grad_norm) = (Vec::new(), GradNorm::default());
        let (maps, reaches, estimates) = (Vec::new(), Vec::new(), Vec::new());
        Outcome {
            stages,
            not_checked,
            grad_norm,
            maps,
            multiplied: Vec::new(),
            other_declaration: None,
            work: 0,
            reference_dk: None,
            unrecorded: Vec::new(),
            reaches,
            estimates,
            coverage: Coverage::default(),
            sampled: BTreeSet::new(),
            losses: Vec::new(),
            lacking: lacking.clone(),
            passes: Passes::default(),
        }
    }

    /// The outcome of one stage.
    pub fn stage(&self, stage: Stage) -> &StageOutcome {
        &self.stages[stage as usize]
    }

    pub(super) fn add(&mut self, stage: Stage, comparison: Comparison) {
        if self.lacking.withholds(stage, comparison.microbatch).is_none() {
            self.stages[stage as usize].comparisons.push(comparison);
        }
    }

    /// Says why a stage is not compared, which it may be in part all the same.
    pub(super) fn skip(&mut self, stage: Stage, reason: impl Into<String>) {
        let reason = reason.into();
        self.leave(stage, None, reason.clone());
        self.stages[stage as usize].reason = reason;
    }

    /// Drops comparisons that tell nothing, and says so.
    pub(super) fn set_aside_unjudged(&mut self) {
        for index in 0..self.stages.len() {
            let stage = self.stages[index].stage;
            let narrowed = self.coverage.narrowed.contains(&stage);
            let mut all = std::mem::take(&mut self.stages[index].comparisons);
            for comparison in all.iter_mut().filter(|comparison| narrowed && comparison.is_empty())
            {
                comparison.unjudged.get_or_insert_with(|| ONLY_ZEROS.into());
            }
            let (told, nothing): (Vec<Comparison>, Vec<Comparison>) =
                all.into_iter().partition(|comparison| comparison.unjudged.is_none());
            self.stages[index].comparisons = told;
            for comparison in nothing {
                self.leave(stage, comparison.microbatch, comparison.unjudged.unwrap_or_default());
            }
        }
    }

    /// A stage that is wrong without a comparison.
    pub(super) fn fail(&mut self, stage: Stage, reason: impl Into<String>) {
        let outcome = &mut self.stages[stage as usize];
        outcome.status = Status::Fail;
        outcome.reason = reason.into();
    }

    pub(super) fn pass(&mut self, stage: Stage, reason: impl Into<String>) {
        let outcome = &mut self.stages[stage as usize];
        outcome.status = Status::Pass;
        outcome.reason = reason.into();
    }

    /// Notes what probes can see of a stage in one more unit.
    pub(super) fn reached(&mut self, stage: Stage, reach: Reach) {
        match self.reaches.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, worst)) => *worst = worst.worse(reach),
            None => self.reaches.push((stage, reach)),
        }
    }

    /// Notes what a sample says of a stage in one more unit: evidence, no verdict.
    /// Values that are no numbers are no question of sampling.
    pub(super) fn estimated(&mut self, stage: Stage, sampled: Sampled) {
        if self.lacking.withholds_some(stage).is_some() {
            return;
        }
        if sampled.nonfinite > 0 {
            let words = format!("{} values of {stage} are not finite", sampled.nonfinite);
            return self.fail(stage, words);
        }
        match self.estimates.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, worst)) if by_size(&sampled.off(), &worst.off()).is_gt() => *worst = sampled,
            Some(_) => {}
            None => self.estimates.push((stage, sampled)),
        }
    }

    /// The first stage whose own output leaves its allowed range.
    pub fn first_divergence(&self) -> Option<&StageOutcome> {
        self.stages.iter().find(|outcome| outcome.status == Status::Fail)
    }

    /// How many stages were really compared: an empty comparison is no pass.
    pub fn compared(&self) -> usize {
        self.stages.iter().filter(|outcome| !outcome.comparisons.is_empty()).count()
    }

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
        result: Result<T, StepError>,
        (stages, microbatch): (&[Stage], Option<Microbatch>),
    ) -> Result<Option<T>, StepError> {
        match result {
            Ok(value) => Ok(Some(value)),
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
}
