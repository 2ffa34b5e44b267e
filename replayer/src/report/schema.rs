//! The report as one JSON object, schema `backtape.report/1`.

use serde::Serialize;

use super::drawings::Drawings;
pub use super::verdict::{Reason, Verdict};
use crate::algebra::StepReport;
use crate::algebra::against::StepsApart;
use crate::checks::Checked;
use crate::compare::SeenFrom;
use crate::compare::measures::{NORMAL_SHARES, SCORE_ENDS, Summary};
use crate::device::Description;
use crate::diagnose::{CauseReport, VariantStage};
use crate::head::contradictions::Contradiction;
use crate::head::sources::HeadItem;
use crate::replay::against::{Difference, Likely, NamedDifference};
use crate::replay::comparison::{Comparison, HitClass};
use crate::replay::coverage::Coverage;
use crate::replay::norm_gap::NormGap;
use crate::replay::other_declaration::OtherDeclaration;
use crate::replay::outcome::{GradNorm, Multiplied, NotChecked, Outcome, StageOutcome, Status};

/// Name and version of the schema.
pub const SCHEMA: &str = "backtape.report/1";

/// The dump that was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DumpSummary {
    /// Its directory.
    pub path: String,
    /// Which run.
    pub run: String,
    /// Which attempt, the number of the launch.
    pub attempt: u32,
    /// Which step.
    pub step: u64,
    /// `committed`, or `partial` with the ranks that are missing.
    pub state: String,
    /// Ranks and mesh, in words.
    pub ranks: String,
    /// The head, in words.
    pub head: String,
    /// Every item of its declaration, with where it is from; empty where the dump does not say it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub head_items: Vec<HeadItem>,
    /// Number of shards.
    pub shards: u64,
    /// Bytes of all shards.
    pub bytes: u64,
    /// True when verification found nothing wrong.
    pub proved: bool,
    /// True when the only thing that is wrong is that replicas hold different bits.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub copies_differ: bool,
    /// What triggered the recording of the step, where it was not selected beforehand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trigger: Option<String>,
    /// Which tensors were to be recorded, where not all were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selection: Option<String>,
}

impl DumpSummary {
    /// What verification proved, in words.
    pub(super) fn proof(&self) -> &'static str {
        match (self.proved, self.copies_differ) {
            (true, _) => "bytes, place, coverage and replicas proved",
            (false, true) => "bytes, place and coverage proved, copies differ",
            (false, false) => "NOT proved",
        }
    }
}

/// One stage of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageReport {
    /// The stage's name.
    pub name: &'static str,
    /// How it came out.
    pub status: Status,
    /// Why it failed or was skipped.
    pub reason: String,
    /// The worst comparison of the stage; absent for inputs and skipped stages.
    #[serde(flatten)]
    pub worst: Option<ComparisonReport>,
    /// How many comparisons were made.
    pub comparisons: usize,
    /// Microbatch and rank of each comparison that fails.
    pub failing: Vec<(Option<u32>, Option<u32>)>,
    /// Where the stage passes, the smallest faults that all of its comparisons would have found:
    /// errors as a share of the norm, a factor as its distance from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_from: Option<SeenFrom>,
}

/// The numbers of one comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparisonReport {
    /// Where the captured value came from.
    pub source: String,
    /// Its microbatch.
    pub microbatch: Option<u32>,
    /// The rank whose addend it is, where it is one.
    pub rank: Option<u32>,
    /// Relative error against the f64 reference, Frobenius norm. Where `nonfinite` is not 0 it is
    /// NaN (null in JSON), as are `ratio`, `slope` and `max_abs`.
    pub error: f64,
    /// The relative error that the declared policy itself has.
    pub floor: f64,
    /// `emulated` (the policy was run), `sampled` (it was run for some rows, which stand for all)
    /// or `propagated` (from its rounding points).
    pub floor_source: &'static str,
    /// `error / floor`.
    pub ratio: f64,
    /// `⟨captured, ref⟩/⟨ref, ref⟩ - 1`.
    pub slope: f64,
    /// Largest absolute error.
    pub max_abs: f64,
    /// Values compared that are NaN or infinite, or whose reference is.
    pub nonfinite: u64,
    /// Elements compared.
    pub elements: u64,
    /// Elements beyond their bound.
    pub exceeding: u64,
    /// Row and column of the worst element.
    pub worst_index: Option<(u64, u64)>,
    /// Its value in the dump.
    pub worst_captured: Option<f64>,
    /// Its value in f64.
    pub worst_reference: Option<f64>,
    /// Row and column of the first element beyond its bound.
    pub first_index: Option<(u64, u64)>,
    /// Rows beyond their bound.
    pub exceeding_rows: u64,
    /// The worst of them: row, relative error, error over floor.
    pub worst_rows: Vec<(u64, f64, f64)>,
    /// For dk: the error of rows by how many tokens have them as label.
    pub by_hits: Vec<HitClass>,
    /// The plausible policy that fits best.
    pub best_member: Option<String>,
    /// The measures that other tools have too.
    pub measures: Summary,
    /// The distribution of |error| / σ, where σ is the standard deviation that the declared
    /// precision allows.
    pub scores: Vec<ScoreClass>,
}

/// Elements whose |error| / σ is in one class.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScoreClass {
    /// Lower end of the class.
    pub from: f64,
    /// Upper end; `None` for the last class.
    pub to: Option<f64>,
    /// Elements in it.
    pub count: u64,
    /// How many a normal distribution would have there.
    pub normal: f64,
}

fn score_classes(counts: &[u64; 6]) -> Vec<ScoreClass> {
    let all: u64 = counts.iter().sum();
    let class = |(at, &count): (usize, &u64)| ScoreClass {
        from: if at == 0 { 0.0 } else { SCORE_ENDS[at - 1] },
        to: SCORE_ENDS.get(at).copied(),
        count,
        normal: all as f64 * NORMAL_SHARES[at],
    };
    counts.iter().enumerate().map(class).collect()
}

/// Where the first divergence is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FirstDivergence {
    /// The stage.
    pub stage: String,
    /// The recorded tensor.
    pub tensor: String,
    /// Which microbatch.
    pub microbatch: Option<u32>,
    /// Which rank.
    pub rank: Option<u32>,
    /// Which of the two dumps, with `--against`.
    pub run: String,
    /// Why, in one sentence.
    pub reason: String,
}

/// The other dump of `--against`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AgainstReport {
    /// The other dump.
    pub dump: DumpSummary,
    /// Its stages against the reference.
    pub stages: Vec<StageReport>,
    /// Causes of its own divergence from the reference, if it diverges.
    pub causes: Vec<CauseReport>,
    /// The differences between both runs, stage by stage.
    pub differences: Vec<Difference>,
    /// Tensors outside the head, in the order of capture.
    pub tensors: Vec<NamedDifference>,
    /// Where those tensors likely start to differ; this is not a verdict.
    pub likely: Option<Likely>,
    /// How many of the requested tensors could not be judged.
    pub unjudged: usize,
    /// What the checks of its step found.
    pub checks: Checked,
    /// Its grad_norm.
    pub grad_norm: GradNorm,
    /// The difference of the two norms, and its shares.
    pub norm_gap: Option<NormGap>,
    /// What became of every parameter's gradient in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algebra: Option<StepReport>,
    /// The two steps against each other; absent where one run recorded none, or nobody asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<StepsApart>,
    /// What the HTML page draws of it.
    #[serde(skip)]
    pub drawings: Option<Drawings>,
}

/// Everything that a replay found, as one JSON object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Version of backtape.
    pub version: &'static str,
    /// The verdict.
    pub verdict: Verdict,
    /// Why it is not `agreed`; empty where it is.
    pub reasons: Vec<Reason>,
    /// The step.
    pub step: u64,
    /// Where the gradients diverge first.
    pub first_divergence: Option<FirstDivergence>,
    /// The dump.
    pub dump: DumpSummary,
    /// Every stage, in order.
    pub stages: Vec<StageReport>,
    /// How many of the stages that were recorded or requested were judged; absent without a head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// What became of every parameter's gradient; absent where that was not recorded or not asked
    /// for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algebra: Option<StepReport>,
    /// What was declared by hand and is not what was seen or measured.
    pub contradictions: Vec<Contradiction>,
    /// Another declaration of the head with which everything agrees, where something diverged and
    /// there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_declaration: Option<OtherDeclaration>,
    /// Causes from the catalogue.
    pub causes: Vec<CauseReport>,
    /// How the user's own functions compare, by stage; empty without any.
    pub variants: Vec<VariantStage>,
    /// The norm of the gradients.
    pub grad_norm: GradNorm,
    /// The other dump of `--against`.
    pub against: Option<AgainstReport>,
    /// What verification found, and which attempts were passed over, in sentences.
    pub findings: Vec<String>,
    /// What was not checked and why.
    pub not_checked: Vec<NotChecked>,
    /// What the checks of the step found; at fail level it is part of the verdict.
    pub checks: Checked,
    /// What computed the reference; absent unless a GPU was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceReport>,
    /// The emulated policies, which become part of `device` where a GPU computed.
    #[serde(skip)]
    pub multiplied: Vec<Multiplied>,
    /// What the memory guards found about the user's kernels; absent without any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<KernelReport>,
    /// What the HTML page draws in addition, if a page was asked for. It is not part of the JSON.
    #[serde(skip)]
    pub drawings: Option<Drawings>,
}

/// What computed the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceReport {
    /// The device, or `cpu`.
    pub name: String,
    /// Which compiler compiled the kernels, and with which flags; empty on the CPU.
    pub compiler: String,
    /// Which library multiplied matrices, and in which type; empty on the CPU.
    pub products: String,
    /// The emulated policies, and in which types their GEMMs multiplied and summed.
    pub policies: Vec<Multiplied>,
    /// Why the GPU that was asked for was not used, if so.
    pub fallback: Option<String>,
}

/// What the memory guards found about a user's kernel.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelReport {
    /// The name that was asked for.
    pub name: String,
    /// What it does that a kernel must not do, in sentences.
    pub findings: Vec<String>,
}

impl Report {
    /// Adds to the report what computed its reference.
    pub fn computed_by(self, device: Option<DeviceReport>) -> Report {
        let policies = self.multiplied.clone();
        let device = device.map(|device| DeviceReport { policies, ..device });
        Report { device, ..self }
    }
}

impl DeviceReport {
    /// The report of a GPU that was used.
    pub fn of(description: &Description) -> DeviceReport {
        let Description { name, compiler, products } = description.clone();
        DeviceReport { name, compiler, products, policies: Vec::new(), fallback: None }
    }

    /// The report of the CPU, where the GPU cannot be used.
    pub fn fallen_back(why: String) -> DeviceReport {
        let (compiler, products) = (String::new(), String::new());
        let (name, policies) = ("cpu".into(), Vec::new());
        DeviceReport { name, compiler, products, policies, fallback: Some(why) }
    }

    /// The report as one line.
    pub fn sentence(&self) -> String {
        match &self.fallback {
            Some(why) => format!("{}: {why}", self.name),
            None => {
                let types = |policy: &Multiplied| {
                    format!("{} (logits), {} (dq, dk)", policy.logits, policy.gradients)
                };
                let mut policies: Vec<_> = self.policies.iter().map(types).collect();
                policies.dedup();
                let policies = match policies.is_empty() {
                    true => String::new(),
                    false => format!("; policies: {}", policies.join("; ")),
                };
                format!("{}; {}; {}{policies}", self.name, self.compiler, self.products)
            }
        }
    }
}

impl StageReport {
    /// The report of one stage's outcome.
    pub fn new(outcome: &StageOutcome) -> StageReport {
        let id = |c: &Comparison| (c.microbatch.map(|mb| mb.0), c.rank.map(|rank| rank.0));
        StageReport {
            name: outcome.stage.name(),
            status: outcome.status,
            reason: outcome.reason.clone(),
            worst: outcome.worst().map(ComparisonReport::new),
            comparisons: outcome.comparisons.len(),
            failing: outcome.failing().map(id).collect(),
            seen_from: outcome.seen_from(),
        }
    }

    /// Every stage of an outcome.
    pub fn all(outcome: &Outcome) -> Vec<StageReport> {
        outcome.stages.iter().map(StageReport::new).collect()
    }
}

impl ComparisonReport {
    fn new(c: &Comparison) -> ComparisonReport {
        let worst = c.tally.first_nonfinite.as_ref().or(c.tally.worst.as_ref());
        ComparisonReport {
            source: c.source.clone(),
            microbatch: c.microbatch.map(|mb| mb.0),
            rank: c.rank.map(|rank| rank.0),
            error: c.tally.error(),
            floor: c.floor(),
            floor_source: match (c.members.is_empty(), c.sampled) {
                (true, _) => "propagated",
                (false, true) => "sampled",
                (false, false) => "emulated",
            },
            ratio: c.ratio(),
            slope: c.tally.of_numbers(c.tally.slope()),
            max_abs: c.tally.of_numbers(c.tally.max_abs),
            nonfinite: c.tally.nonfinite,
            elements: c.tally.elements,
            exceeding: c.tally.exceeding,
            worst_index: worst.map(|w| w.index),
            worst_captured: worst.map(|w| w.captured),
            worst_reference: worst.map(|w| w.reference),
            first_index: c.tally.first.as_ref().map(|w| w.index),
            exceeding_rows: c.tally.exceeding_rows,
            worst_rows: c.tally.worst_rows.iter().map(|r| (r.row, r.error, r.ratio)).collect(),
            by_hits: c.by_hits.clone(),
            best_member: c.best_member().map(str::to_string),
            measures: c.tally.measures.summary(c.tally.cosine(), c.tally.nonfinite),
            scores: score_classes(&c.tally.scores),
        }
    }
}

impl FirstDivergence {
    /// The first failing stage of an outcome, and its worst comparison.
    pub fn of(outcome: &Outcome, run: &str) -> Option<FirstDivergence> {
        let stage = outcome.first_divergence()?;
        let worst = stage.worst();
        Some(FirstDivergence {
            stage: stage.stage.name().into(),
            tensor: worst.map_or(stage.stage.name().into(), |c| c.source.clone()),
            microbatch: worst.and_then(|c| c.microbatch).map(|mb| mb.0),
            rank: worst.and_then(|c| c.rank).map(|rank| rank.0),
            run: run.into(),
            reason: stage.reason.clone(),
        })
    }
}
