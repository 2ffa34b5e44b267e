//! What a replay found, stage by stage: plain data for the report.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::identity::{Microbatch, Rank};
use backtape::nan::{by_size, largest};
use backtape::role::Role;
use serde::Serialize;

use super::addends;
use super::coverage::Coverage;
use super::estimate::Sampled;
use super::executor::pass_cache::PassCache;
use super::kept::ReferenceDk;
use super::loss_total::LossTotals;
use super::maps::Map;
pub use super::norm::{GradNorm, Share};
use super::other_declaration::OtherDeclaration;
use super::probe::Reach;
use crate::compare::tally::relative;
use crate::compare::{Bound, SeenFrom, Tally};
use crate::head::{HeadStep, Lacking, Stage};

/// Why a comparison that leaves tokens out tells nothing.
const ONLY_ZEROS: &str = "all tokens that could be judged have a gradient of zero";
/// Reason of a stage that the dump does not hold.
const NOT_CAPTURED: &str = "not captured";
/// Reason of one that is beside what was asked for.
const NOT_ASKED: &str = "not asked for";

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

/// One emulated member of the plausible policies and its error energy.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberError {
    /// What this member rounds.
    pub name: String,
    /// Sum of its squared errors against the same reference.
    pub energy: f64,
}

/// Rows of dk by how often they are a label.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HitClass {
    /// Fewest hits of the class.
    pub hits_from: u32,
    /// Rows in it.
    pub rows: u64,
    /// Sum of squared errors in it.
    pub error_energy: f64,
    /// Sum of the variances that the declared precision explains.
    pub expected_energy: f64,
}

/// One comparison: a stage of one unit of one microbatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Which microbatch; `None` for what has none.
    pub microbatch: Option<Microbatch>,
    /// Whose addend; `None` for a global tensor.
    pub rank: Option<Rank>,
    /// Where the captured value came from, as words.
    pub source: String,
    /// The numbers.
    pub tally: Tally,
    /// Why it fails, if it does.
    pub excess: Option<String>,
    /// Why it tells nothing, if so: then a stage is skipped, and a hypothesis not believed.
    pub unjudged: Option<String>,
    /// How many times the error energy that it may have it has, by the test that it is
    /// furthest beyond.
    pub overshoot: f64,
    /// How small a fault would have been seen, where that can be said.
    pub seen_from: Option<SeenFrom>,
    /// The emulated members; empty when the floor is propagated.
    pub members: Vec<MemberError>,
    /// Whether they were emulated in a sample of the rows.
    pub sampled: bool,
    /// Whether it is of a sum of what ranks stored in fewer bits, each for itself: what an
    /// emulation of all their tokens at once does not round.
    pub stored_apart: bool,
    /// For dk: error by label hits.
    pub by_hits: Vec<HitClass>,
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
    reaches: Vec<(Stage, Reach)>,
    /// What a sample says of each stage, the unit that is off most.
    estimates: Vec<(Stage, Sampled)>,
    /// The stages of those.
    pub(super) sampled: BTreeSet<Stage>,
    /// What the loss of each microbatch should be, where the step's is judged.
    pub(super) losses: Vec<LossTotals>,
    /// What the step lacks: nothing that depends on it gets into the outcome.
    lacking: Lacking,
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

impl Comparison {
    /// A comparison whose floor is propagated, not emulated.
    pub(super) fn new(
        microbatch: Option<Microbatch>,
        rank: Option<Rank>,
        source: String,
        tally: Tally,
        bound: &Bound,
    ) -> Comparison {
        Comparison {
            microbatch,
            rank,
            source,
            excess: tally.excess(bound),
            unjudged: tally.unjudged(bound),
            overshoot: tally.overshoot(bound),
            seen_from: tally.seen_from(bound),
            tally,
            members: Vec::new(),
            sampled: false,
            stored_apart: false,
            by_hits: Vec::new(),
        }
    }

    /// Error of the worst plausible member, or the propagated expectation.
    pub fn floor(&self) -> f64 {
        let worst = largest(self.members.iter().map(|member| member.energy));
        let energy = if self.members.is_empty() { self.tally.budget.expected() } else { worst };
        relative(energy, self.tally.reference_energy)
    }

    /// Error of the member that rounds least; 0 without one.
    pub fn least(&self) -> f64 {
        let energies = self.members.iter().map(|member| member.energy);
        relative(energies.min_by(by_size).unwrap_or_default(), self.tally.reference_energy)
    }

    /// Captured error over floor; 1 where both are zero.
    pub fn ratio(&self) -> f64 {
        match (self.tally.error(), self.floor()) {
            (0.0, 0.0) => 1.0,
            (error, floor) => error / floor,
        }
    }

    /// Whether it passes, and compares zeros alone.
    fn is_empty(&self) -> bool {
        self.excess.is_none() && self.tally.reference_energy == 0.0
    }

    /// The member whose error is nearest to the captured one.
    pub fn best_member(&self) -> Option<&str> {
        let error = self.tally.error_energy;
        let distance = |member: &MemberError| (member.energy / error).ln().abs();
        let nearest = self.members.iter().min_by(|a, b| by_size(&distance(a), &distance(b)));
        nearest.map(|member| member.name.as_str())
    }
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
        let all: Option<Vec<SeenFrom>> = self.comparisons.iter().map(|one| one.seen_from).collect();
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
        for at in 0..self.stages.len() {
            let stage = self.stages[at].stage;
            let narrowed = self.coverage.narrowed.contains(&stage);
            let mut all = std::mem::take(&mut self.stages[at].comparisons);
            for one in all.iter_mut().filter(|one| narrowed && one.is_empty()) {
                one.unjudged.get_or_insert_with(|| ONLY_ZEROS.into());
            }
            let (told, nothing): (Vec<Comparison>, Vec<Comparison>) =
                all.into_iter().partition(|one| one.unjudged.is_none());
            self.stages[at].comparisons = told;
            for one in nothing {
                self.leave(stage, one.microbatch, one.unjudged.unwrap_or_default());
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
    pub(super) fn estimated(&mut self, stage: Stage, found: Sampled) {
        if self.lacking.withholds_some(stage).is_some() {
            return;
        }
        if found.nonfinite > 0 {
            let words = format!("{} values of {stage} are not finite", found.nonfinite);
            return self.fail(stage, words);
        }
        match self.estimates.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, worst)) if by_size(&found.off(), &worst.off()).is_gt() => *worst = found,
            Some(_) => {}
            None => self.estimates.push((stage, found)),
        }
    }

    /// Says what probes and samples see and do not see.
    fn note_reach(&mut self) {
        for (stage, reach) in std::mem::take(&mut self.reaches) {
            let what = format!("elements of {stage} one by one");
            self.not_checked.push(NotChecked { what, why: reach.sentence(stage) });
        }
        for (stage, found) in std::mem::take(&mut self.estimates) {
            self.sampled.insert(stage);
            if self.stage(stage).status == Status::Skip {
                self.skip(stage, found.sentence());
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
        let extra = step.tensors.iter().filter(|(_, info)| info.role.is_none());
        for (key, _) in extra {
            let why = "it has no role in the loss head; `--against` compares it".into();
            self.not_checked.push(NotChecked { what: key.to_string(), why });
        }
        for (key, why) in &step.unusable {
            let what = format!("what depends on {key}");
            self.not_checked.push(NotChecked { what, why: why.clone() });
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

    /// The first stage whose own output leaves its allowed range.
    pub fn first_divergence(&self) -> Option<&StageOutcome> {
        self.stages.iter().find(|outcome| outcome.status == Status::Fail)
    }

    /// How many stages were really compared: an empty comparison is no pass.
    pub fn compared(&self) -> usize {
        self.stages.iter().filter(|outcome| !outcome.comparisons.is_empty()).count()
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
