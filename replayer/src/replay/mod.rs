//! Replays the head of one step: every captured stage against the f64 reference
//! on the dump's own inputs, each stage from the *captured* stages before it
//! where they were captured (teacher forcing), so that one early error does not
//! paint all later stages red.

mod across;
pub(crate) mod addends;
pub mod against;
mod alike;
mod allowances;
mod allowed;
mod backward;
mod biased;
mod chained;
mod classes;
mod column;
mod compared;
pub mod compiled;
mod context;
pub mod coverage;
mod dk;
mod dq;
pub mod estimate;
pub mod executor;
mod findings;
mod floors;
mod forward;
mod from_dlogits;
pub(crate) mod gather;
mod judge;
mod kept;
mod kinks;
mod lists;
mod loose;
mod loss;
mod loss_total;
pub mod maps;
pub(crate) mod members;
mod norm;
pub mod norm_pair;
pub mod other_declaration;
pub mod outcome;
pub mod plan;
mod plane;
mod plane_compared;
pub mod probe;
mod probed;
mod products;
pub mod recompute;
pub(crate) mod reductions;
mod reordered;
mod rounded_entries;
pub mod sample;
mod sampled;
mod slab;
mod slabs;
mod smoothed;
mod sums_alone;
pub mod tasks;
pub(crate) mod ties;
pub mod trial;
pub mod variant;
pub(crate) mod versions;
pub mod world;

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::identity::Microbatch;
use backtape::role::Role;

use crate::device::Device;
use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Scores, Stage, Unit};
use crate::kernels::{Progress, Tiles};
use context::Replay;
use executor::Executor;
use executor::pass_cache::PassCache;
use forward::ForwardState;
use judge::Judge;
use loss::Upstream;
use maps::Draw;
use outcome::{Outcome, Passes};
pub use plan::Effort;
use plan::Plan;
use sums_alone::SumsAlone;
use tasks::Cluster;
use world::{Declared, World};

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

/// A microbatch with its units.
pub(crate) struct Slice {
    inputs: MicrobatchInputs,
    units: Vec<Unit>,
    /// Tokens by what their loss is divided by.
    denominators: Vec<(Unit, f64)>,
    /// Why addends could not be told apart, if they could not.
    blocked: Option<String>,
}

impl Slice {
    /// True when nothing of it can be computed.
    fn is_lost(&self) -> bool {
        matches!(self.inputs.scores, Scores::Lost(_))
    }
}

/// Replays a step. An error means that no stage could be judged at all.
pub fn replay(step: &HeadStep<'_>, request: &Request<'_>) -> Result<Outcome, StepError> {
    let world = &Declared;
    let slices = slices(step, world, HeadStep::what_is_left)?;
    let wanted = wanted(step, request.compare)?;
    let roundings = Roundings::plausible(&step.options, slices[0].inputs.dtype(step))?;
    let units: usize = slices.iter().map(|slice| slice.units.len()).sum();
    let whole = allowed::whole(step, &roundings);
    let sums_alone = SumsAlone::of(step, &slices, &wanted, &roundings);
    let plan = Plan {
        step,
        whole,
        comparisons: wanted.len() * units.max(1),
        wanted,
        roundings,
        tiles: Tiles::default(),
        effort: request.effort,
        sums_alone,
        draw: request.draws.then(|| Draw::new(&slices)),
        trial: false,
    };
    let passes = Arc::<PassCache>::default();
    let others = (request.cluster, request.device);
    let executor = Executor::of_replay(&plan, others, &passes, request.progress);
    let replay = Replay { plan: &plan, executor, judge: Judge { plan: &plan, world } };
    let work = replay.work(&slices, replay.plan.effort);
    (request.total)(work);
    let mut outcome = Outcome::new(&replay.plan.wanted, &step.lacking);
    outcome.work = work;
    outcome.multiplied = replay.executor.multiplied();
    for slice in slices.iter().filter(|slice| !slice.is_lost()) {
        replay.microbatch(slice, &mut outcome, &mut |unit, (state, upstream), outcome| {
            replay.backward(slice, unit, state, upstream, outcome)
        })?;
    }
    replay.judge.step_loss(&slices, &mut outcome)?;
    replay.note_effort(&slices, &mut outcome);
    replay.across(&slices, &mut outcome)?;
    maps::note_hits(&slices, &mut outcome);
    outcome.set_aside_unjudged();
    outcome.finish(step, &coverage::stages_of(request.compare));
    replay.plan.note_loose(&mut outcome);
    replay.plan.note_coarse(&mut outcome);
    drop(replay);
    outcome.passes = Passes(passes);
    Ok(outcome)
}

/// How the inputs of a microbatch are gathered.
type Gather<'a> = fn(&HeadStep<'a>, Option<Microbatch>) -> Result<MicrobatchInputs, StepError>;

fn slices<'a>(
    step: &HeadStep<'a>,
    world: &dyn World,
    gather: Gather<'a>,
) -> Result<Vec<Slice>, StepError> {
    let gather = |&microbatch: &Option<Microbatch>| {
        let mut inputs = gather(step, microbatch)?;
        world.inputs(step, &mut inputs);
        Ok(inputs)
    };
    let inputs: Vec<MicrobatchInputs> =
        step.microbatches.iter().map(gather).collect::<Result<_, StepError>>()?;
    let all: Vec<&MicrobatchInputs> = inputs.iter().collect();
    let counted = |one: &MicrobatchInputs| {
        if matches!(one.scores, Scores::Lost(_)) {
            return Ok(Vec::new());
        }
        let found = step.denominators(&all, one).map_err(|why| StepError::Unfit {
            key: one.rows_key.clone(),
            found: "of ranks that cannot be counted as declared".into(),
            wanted: format!("tokens counted over {}: {why}", step.options.scope),
        });
        found.map(|mut found| {
            world.denominators(step, &all, one, &mut found);
            found
        })
    };
    let counted: Vec<_> = inputs.iter().map(counted).collect::<Result<_, _>>()?;
    let slice = |(inputs, denominators): (MicrobatchInputs, Vec<(Unit, f64)>)| {
        let (units, blocked) = match step.units(&inputs) {
            _ if matches!(inputs.scores, Scores::Lost(_)) => (Vec::new(), None),
            Ok(units) => (units, None),
            // Rows of dq are known all the same.
            Err(why) => {
                let rows = (0..inputs.tokens()).collect();
                (vec![Unit { ranks: Vec::new(), rows }], Some(why))
            }
        };
        Slice { inputs, units, denominators, blocked }
    };
    Ok(inputs.into_iter().zip(counted).map(slice).collect())
}

/// The captured stages that serve the comparison; refuses a role that is not there.
fn wanted(step: &HeadStep<'_>, compare: &[Role]) -> Result<BTreeSet<Stage>, StepError> {
    let held = |role: Role| step.dump.tensors().values().any(|info| info.role == Some(role));
    if let Some(&role) = compare.iter().find(|&&role| !held(role)) {
        return Err(step.missing(role, None));
    }
    let serves = |stage: Stage| {
        let asked = compare.iter().filter_map(|&role| Stage::of_role(role));
        compare.is_empty() || asked.into_iter().any(|asked| stage.serves(asked))
    };
    Ok(Stage::ALL.iter().copied().filter(|&stage| serves(stage)).collect())
}

/// Given a unit, and what its backward starts from.
type EachUnit<'a> =
    dyn FnMut(&Unit, (&ForwardState, &Upstream), &mut Outcome) -> Result<(), StepError> + 'a;

/// The stages of a microbatch that need more than the forward pass.
const AFTER_FORWARD: &[Stage] = &[
    Stage::Logits,
    Stage::Loss,
    Stage::Dlogprobs,
    Stage::Dlogits,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
    Stage::DkLse,
    Stage::DkLabel,
    Stage::Dk,
    Stage::Dbias,
];

impl Replay<'_> {
    /// Judges the stages of one microbatch; `backward` those of each unit. What cannot be used
    /// of the dump costs the stages that need it.
    fn microbatch(
        &self,
        slice: &Slice,
        outcome: &mut Outcome,
        backward: &mut EachUnit<'_>,
    ) -> Result<(), StepError> {
        let microbatch = slice.inputs.microbatch;
        let state = self.forward(slice, outcome);
        let all = Stage::ALL.iter().copied().filter(|stage| !stage.is_input());
        let all: Vec<Stage> = all.collect();
        let Some(state) = outcome.spared(state, (&all, microbatch))? else { return Ok(()) };
        let upstream = self.judge.upstream(slice, &state, outcome);
        let Some(upstream) = outcome.spared(upstream, (AFTER_FORWARD, microbatch))? else {
            return Ok(());
        };
        self.judge.loss(slice, &state, outcome)?;
        self.plane(slice, &state, &upstream, outcome)?;
        for unit in &slice.units {
            let found = backward(unit, (&state, &upstream), outcome);
            outcome.spared(found, (&AFTER_FORWARD[4..], microbatch))?;
        }
        Ok(())
    }
}

/// A microbatch as words.
pub(crate) fn name(microbatch: Option<Microbatch>) -> String {
    microbatch.map_or("the step".into(), |mb| format!("microbatch {mb}"))
}
