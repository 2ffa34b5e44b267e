//! What a replay found, stage by stage: plain data for the report.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use serde::Serialize;

use super::estimate::Sampled;
use super::maps::Map;
use super::norm::ReferenceDk;
pub use super::norm::{GradNorm, Share};
use super::probe::Reach;
use crate::compare::tally::relative;
use crate::compare::{Bound, Tally};
use crate::head::{HeadStep, Stage};

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
    /// How many times the error energy that it may have it has, by the test that it is
    /// furthest beyond.
    pub overshoot: f64,
    /// The emulated members; empty when the floor is propagated.
    pub members: Vec<MemberError>,
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
    /// The norm of the gradients.
    pub grad_norm: GradNorm,
    /// Maps of dq and dk, where a drawing was asked for.
    pub maps: Vec<Map>,
    /// The emulated policies and in which types a device multiplied for them; empty without one.
    pub multiplied: Vec<Multiplied>,
    /// Multiply-adds of the replay; 0 of a trial, which counts its own.
    pub work: u64,
    /// Reference dk summed over ranks and microbatches, while it is needed.
    pub(super) reference_dk: Option<ReferenceDk>,
    /// What random probes can see of each stage, the worst of all units.
    reaches: Vec<(Stage, Reach)>,
    /// What a sample says of each stage, the unit that is off most.
    estimates: Vec<(Stage, Sampled)>,
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
        let (excess, overshoot) = (tally.excess(bound), tally.overshoot(bound));
        let (members, by_hits) = (Vec::new(), Vec::new());
        Comparison { microbatch, rank, source, tally, excess, overshoot, members, by_hits }
    }

    /// Error of the worst plausible member, or the propagated expectation.
    pub fn floor(&self) -> f64 {
        let worst = self.members.iter().map(|member| member.energy).fold(0.0, f64::max);
        let energy = if self.members.is_empty() { self.tally.budget.expected() } else { worst };
        relative(energy, self.tally.reference_energy)
    }

    /// Captured error over floor; 1 where both are zero.
    pub fn ratio(&self) -> f64 {
        match (self.tally.error(), self.floor()) {
            (0.0, 0.0) => 1.0,
            (error, floor) => error / floor,
        }
    }

    /// The member whose error is nearest to the captured one.
    pub fn best_member(&self) -> Option<&str> {
        let error = self.tally.error_energy;
        let distance = |member: &MemberError| (member.energy / error).ln().abs();
        let nearest = self.members.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        nearest.map(|member| member.name.as_str())
    }
}

impl StageOutcome {
    /// The comparison to show: failing before passing, then the largest ratio.
    pub fn worst(&self) -> Option<&Comparison> {
        let rank = |c: &Comparison| (c.excess.is_some(), c.ratio());
        self.comparisons.iter().max_by(|a, b| {
            let ((fail_a, ratio_a), (fail_b, ratio_b)) = (rank(a), rank(b));
            fail_a.cmp(&fail_b).then(ratio_a.total_cmp(&ratio_b))
        })
    }

    /// The comparisons that fail.
    pub fn failing(&self) -> impl Iterator<Item = &Comparison> {
        self.comparisons.iter().filter(|comparison| comparison.excess.is_some())
    }
}

impl Outcome {
    pub(super) fn new(wanted: &BTreeSet<Stage>) -> Outcome {
        let stage = |&stage: &Stage| {
            let reason = if wanted.contains(&stage) { "not captured" } else { "not asked for" };
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
            work: 0,
            reference_dk: None,
            reaches,
            estimates,
        }
    }

    /// The outcome of one stage.
    pub fn stage(&self, stage: Stage) -> &StageOutcome {
        &self.stages[stage as usize]
    }

    pub(super) fn add(&mut self, stage: Stage, comparison: Comparison) {
        self.stages[stage as usize].comparisons.push(comparison);
    }

    pub(super) fn skip(&mut self, stage: Stage, reason: impl Into<String>) {
        self.stages[stage as usize].reason = reason.into();
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
        if found.nonfinite > 0 {
            let words = format!("{} values of {stage} are not finite", found.nonfinite);
            self.stages[stage as usize].status = Status::Fail;
            return self.skip(stage, words);
        }
        match self.estimates.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, worst)) if found.off() > worst.off() => *worst = found,
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
            if self.stage(stage).status == Status::Skip {
                self.skip(stage, found.sentence());
                let what = format!("single rows of {stage}");
                let why = "a sample sees an error of the whole or of its scale of several error bars; a label row, an index or a scatter that is wrong needs all tokens".into();
                self.not_checked.push(NotChecked { what, why });
            }
        }
    }

    /// Settles each stage's status from its comparisons.
    pub(super) fn finish(&mut self, step: &HeadStep<'_>) {
        self.reference_dk = None;
        self.note_reach();
        for outcome in &mut self.stages {
            if outcome.comparisons.is_empty() {
                continue;
            }
            let failing = outcome.failing().count();
            let first = outcome.worst().and_then(|worst| worst.excess.clone());
            outcome.status = if failing > 0 { Status::Fail } else { Status::Pass };
            outcome.reason = first.unwrap_or_default();
        }
        let extra = step.tensors.iter().filter(|(_, info)| info.role.is_none());
        for (key, _) in extra {
            let why = "it has no role in the loss head; `--against` compares it".into();
            self.not_checked.push(NotChecked { what: key.to_string(), why });
        }
        for (key, why) in &step.unusable {
            let what = format!("what depends on {key}");
            self.not_checked.push(NotChecked { what, why: why.clone() });
        }
        let asked = |outcome: &&StageOutcome| {
            outcome.status == Status::Skip && outcome.reason != "not asked for"
        };
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
        Some(Role::Weights) => "none recorded: every token counts 1".into(),
        Some(Role::Bias) => "none recorded: the logits have no bias".into(),
        Some(_) if outcome.reason == "not captured" => {
            "not captured: tape.record(NAME, ...) would have it compared".into()
        }
        None if outcome.reason == "not captured" => {
            "an intermediate that jobs do not record; recomputed inside the later stages".into()
        }
        _ => outcome.reason.clone(),
    }
}
