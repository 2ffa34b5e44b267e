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
pub mod coverage;
mod devised;
mod dk;
mod dq;
pub mod estimate;
mod findings;
mod floors;
mod forward;
mod from_dlogits;
pub(crate) mod gather;
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
pub mod pass_cache;
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

use crate::compare::Bound;
use crate::device::Device;
use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Scores, Stage, Unit};
use crate::kernels::{Progress, Tiles};
use forward::ForwardState;
use loss::Upstream;
use maps::Draw;
use outcome::{Outcome, Passes};
use pass_cache::PassCache;
use sums_alone::SumsAlone;
use tasks::{Cluster, On};
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

/// How much of dq and dk is recomputed. What costs one GEMM or less is judged on all
/// tokens, whatever the effort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// All of them, element by element.
    #[default]
    All,
    /// None: they are checked with so many random probes.
    Probes {
        /// K of them.
        count: usize,
        /// What they are drawn from.
        seed: u64,
    },
    /// Rows of dq of a stratified sample of so many tokens; dk is estimated from them.
    Tokens {
        /// Of each microbatch.
        count: usize,
        /// What they are drawn from.
        seed: u64,
    },
}

/// Everything that one replay holds while it runs.
pub(crate) struct Replay<'a> {
    step: &'a HeadStep<'a>,
    wanted: BTreeSet<Stage>,
    roundings: Roundings,
    tiles: Tiles,
    comparisons: usize,
    effort: Effort,
    /// What the job is supposed to have done.
    world: &'a dyn World,
    /// Forward passes that this one has in common with others.
    cache: Option<&'a PassCache>,
    /// Where a replay leaves its forward passes for those trials.
    passes: Option<&'a PassCache>,
    /// True for a trial of a hypothesis: no floors, no norms.
    trial: bool,
    progress: &'a dyn Progress,
    /// Whether entries of dlogits are rounded with the label's part in them.
    whole: bool,
    /// What is to be drawn, if anything is.
    draw: Option<Draw>,
    /// Others that compute the tiles.
    on: Option<&'a On<'a>>,
    /// Whose sums are judged, where dk was recorded summed and not in the addends of the sum.
    sums_alone: Option<SumsAlone>,
    /// A device that computes the reference.
    device: Option<&'a dyn Device>,
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
    let tiles = Tiles::default();
    let comparisons = wanted.len() * units.max(1);
    let (effort, progress) = (request.effort, request.progress);
    let (trial, cache) = (false, None);
    let whole = allowed::whole(step, &roundings);
    let draw = request.draws.then(|| Draw::new(&slices));
    let on = request.cluster.map(|cluster| {
        let unusable = step.unusable.keys().map(tasks::name).collect();
        On::new(cluster, step.dump, unusable, (comparisons, whole))
    });
    let on = on.as_ref();
    let sums_alone = SumsAlone::of(step, &slices, &wanted, &roundings);
    let passes = Arc::<PassCache>::default();
    let replay = Replay {
        step,
        whole,
        wanted,
        roundings,
        tiles,
        comparisons,
        effort,
        world,
        cache,
        // What a device computed has not the bits that a trial's have.
        passes: request.device.is_none().then_some(&passes),
        trial,
        progress,
        draw,
        on,
        sums_alone,
        device: request.device,
    };
    let work = replay.work(&slices, replay.effort);
    (request.total)(work);
    let mut outcome = Outcome::new(&replay.wanted, &step.lacking);
    outcome.work = work;
    outcome.multiplied = replay.multiplied();
    for slice in slices.iter().filter(|slice| !slice.is_lost()) {
        replay.microbatch(slice, &mut outcome, &mut |unit, (state, upstream), outcome| {
            replay.backward(slice, unit, state, upstream, outcome)
        })?;
    }
    replay.step_loss(&slices, &mut outcome)?;
    replay.note_effort(&slices, &mut outcome);
    replay.across(&slices, &mut outcome)?;
    maps::note_hits(&slices, &mut outcome);
    outcome.set_aside_unjudged();
    outcome.finish(step, &coverage::stages_of(request.compare));
    replay.note_loose(&mut outcome);
    replay.note_coarse(&mut outcome);
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
        let upstream = self.upstream(slice, &state, outcome);
        let Some(upstream) = outcome.spared(upstream, (AFTER_FORWARD, microbatch))? else {
            return Ok(());
        };
        self.loss(slice, &state, outcome)?;
        self.plane(slice, &state, &upstream, outcome)?;
        for unit in &slice.units {
            let found = backward(unit, (&state, &upstream), outcome);
            outcome.spared(found, (&AFTER_FORWARD[4..], microbatch))?;
        }
        Ok(())
    }

    fn bound(&self, rows: usize, columns: usize) -> Bound {
        let nan_is_meant = self.trial && self.world.has_nan();
        let measured = !self.trial;
        Bound { nan_is_meant, measured, ..Bound::new(self.comparisons, rows, rows * columns) }
    }

    fn wants(&self, stage: Stage) -> bool {
        self.wanted.contains(&stage)
    }
}

/// A microbatch as words.
pub(crate) fn name(microbatch: Option<Microbatch>) -> String {
    microbatch.map_or("the step".into(), |mb| format!("microbatch {mb}"))
}
