//! Replays the head of one step: every captured stage against the f64 reference
//! on the dump's own inputs, each stage from the *captured* stages before it
//! where they were captured (teacher forcing), so that one early error does not
//! paint all later stages red.

pub(crate) mod addends;
pub mod against;
mod backward;
mod bound_tightness;
mod captured_gradients;
mod class_subset;
mod clip_bound_tokens;
pub mod comparison;
mod context;
mod correlated_classes;
mod correlated_errors;
pub mod coverage;
mod device_comparison;
mod dk;
mod dk_addends;
mod dlogits_rounding;
mod dq;
mod dq_state;
mod elementwise;
pub mod estimate;
pub mod executor;
mod expected_loss;
mod findings;
mod floor_estimate;
mod forward;
mod from_dlogits;
pub(crate) mod gathered_rows;
mod grad_norm;
mod gradient_allowances;
mod gradient_probes;
mod gradient_sums;
mod judge;
mod label_counts;
mod loss;
mod loss_comparison;
mod low_precision_sums;
pub mod maps;
pub(crate) mod microbatch;
mod microbatch_stages;
pub mod norm_gap;
mod norm_shares;
mod operation_variance;
pub mod other_declaration;
pub mod outcome;
pub mod plan;
mod plane;
mod plane_comparison;
mod plane_span;
pub(crate) mod plausible_policies;
pub mod probe;
mod problem;
mod qk_products;
pub mod recompute;
mod reference_dk;
mod reference_dk_sum;
pub(crate) mod rounding_ties;
mod rounding_variance;
mod sampled_floors;
mod settling;
mod slab;
mod smoothing_bias;
mod stage_values;
pub mod stratified_sample;
mod summation_order;
pub(crate) mod summation_search;
mod summation_votes;
mod sums_without_addends;
pub mod tasks;
mod token_column;
mod token_sample;
pub mod trial;
mod unit_gradients;
pub mod unit_inputs;
mod unit_problem;
mod unit_report;
pub mod user_kernels;
pub mod variant;
pub(crate) mod versions;
mod vocabulary_walk;
mod work;
pub mod world;
mod world_replay;

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::role::Role;

use crate::device::Device;
use crate::head::step::StepError;
use crate::head::{HeadStep, Roundings, Stage};
use crate::kernels::{Progress, Tiles};
use context::Replay;
use executor::Executor;
use executor::pass_cache::PassCache;
use judge::Judge;
use maps::Draw;
use microbatch::head_microbatches;
use outcome::{Outcome, Passes};
use plan::Plan;
use reference_dk::SumsWithoutAddends;
use tasks::Cluster;
use world::Declared;

pub use plan::Effort;

/// What to compare, and how.
pub struct Request<'a> {
    /// The roles asked for; empty: every role that the dump holds.
    pub compare: &'a [Role],
    /// How much of dq and dk is recomputed.
    pub effort: Effort,
    /// Told of the work done, in multiply-adds.
    pub progress: &'a dyn Progress,
    /// Given the whole work once it is known.
    pub total: &'a (dyn Fn(u64) + Sync),
    /// Whether maps of dq and dk are gathered for a drawing.
    pub draws: bool,
    /// Who computes the tiles; `None`: this process.
    pub cluster: Option<&'a Cluster<'a>>,
    /// What computes the reference; `None`: this process.
    pub device: Option<&'a dyn Device>,
}

/// Replays a step. An error means that no stage could be judged at all.
pub fn replay(step: &HeadStep<'_>, request: &Request<'_>) -> Result<Outcome, StepError> {
    let world = &Declared;
    let microbatches = head_microbatches(step, world, HeadStep::what_is_left)?;
    let wanted = wanted(step, request.compare)?;
    let roundings = Roundings::plausible(&step.options, microbatches[0].inputs.dtype(step))?;
    let units: usize = microbatches.iter().map(|microbatch| microbatch.units.len()).sum();
    let whole_entries = rounding_variance::rounds_whole_entries(step, &roundings);
    let sums_without_addends = SumsWithoutAddends::of(step, &microbatches, &wanted, &roundings);
    let plan = Plan {
        step,
        whole_entries,
        comparisons: wanted.len() * units.max(1),
        wanted,
        roundings,
        tiles: Tiles::default(),
        effort: request.effort,
        sums_without_addends,
        draw: request.draws.then(|| Draw::new(&microbatches)),
        trial: false,
    };
    let passes = Arc::<PassCache>::default();
    let others = (request.cluster, request.device);
    let executor = Executor::of_replay(&plan, others, &passes, request.progress);
    let replay = Replay { plan: &plan, executor, judge: Judge { plan: &plan, world } };
    let work = replay.work(&microbatches, replay.plan.effort);
    (request.total)(work);
    let mut outcome = Outcome::new(&replay.plan.wanted, &step.lacking);
    outcome.work = work;
    outcome.multiplied = replay.executor.multiplied();
    for microbatch in microbatches.iter().filter(|microbatch| !microbatch.is_lost()) {
        replay.microbatch(microbatch, &mut outcome, &mut |unit, (state, upstream), outcome| {
            replay.backward(microbatch, unit, state, upstream, outcome)
        })?;
    }
    replay.judge.step_loss(&microbatches, &mut outcome)?;
    replay.note_effort(&microbatches, &mut outcome);
    replay.judge_sums_and_norm(&microbatches, &mut outcome)?;
    unit_report::note_hits(&microbatches, &mut outcome);
    outcome.set_aside_unjudged();
    outcome.finish(step, &coverage::stages_of(request.compare));
    replay.plan.note_wide_bounds(&mut outcome);
    replay.plan.note_coarse_dtypes(&mut outcome);
    drop(replay);
    outcome.passes = Passes(passes);
    Ok(outcome)
}

/// The captured stages that serve the comparison; refuses a role that is not there.
fn wanted(step: &HeadStep<'_>, compare: &[Role]) -> Result<BTreeSet<Stage>, StepError> {
    let is_recorded = |role: Role| step.dump.tensors().values().any(|info| info.role == Some(role));
    if let Some(&role) = compare.iter().find(|&&role| !is_recorded(role)) {
        return Err(step.missing(role, None));
    }
    let serves = |stage: Stage| {
        let asked = compare.iter().filter_map(|&role| Stage::of_role(role));
        compare.is_empty() || asked.into_iter().any(|asked| stage.serves(asked))
    };
    Ok(Stage::ALL.iter().copied().filter(|&stage| serves(stage)).collect())
}
