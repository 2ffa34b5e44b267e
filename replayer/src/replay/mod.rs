//! Replays the head of one step: every captured stage against the f64 reference
//! on the dump's own inputs, each stage from the *captured* stages before it
//! where they were captured (teacher forcing), so that one early error does not
//! paint all later stages red.

mod across;
pub mod against;
mod allowed;
mod backward;
pub mod estimate;
mod findings;
mod forward;
mod gather;
mod members;
pub mod outcome;
pub mod probe;
pub mod sample;

use std::collections::BTreeSet;

use backtape::identity::Microbatch;
use backtape::role::Role;

use crate::compare::Bound;
use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Roundings, Stage, Unit};
use crate::kernels::{Progress, Tiles};
use outcome::{NotChecked, Outcome};

pub(crate) use forward::head_inputs;

/// What to compare, and how.
pub struct Request<'a> {
    /// The roles asked for; empty: every role that the dump holds.
    pub compare: &'a [Role],
    /// Random probes instead of the recomputed dq and dk, where asked for.
    pub probes: Option<Probes>,
    /// A stratified sample of so many tokens of each microbatch, where asked for.
    pub tokens: Option<usize>,
    /// Told of the work done, in multiply-adds.
    pub progress: &'a dyn Progress,
    /// Given the whole work once it is known.
    pub total: &'a dyn Fn(u64),
}

/// Random probes: how many, and from which seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    /// K of them.
    pub count: usize,
    /// What they are drawn from.
    pub seed: u64,
}

/// Everything that one replay holds while it runs.
pub(crate) struct Replay<'a> {
    step: &'a HeadStep<'a>,
    wanted: BTreeSet<Stage>,
    roundings: Roundings,
    tiles: Tiles,
    comparisons: usize,
    probes: Option<Probes>,
    progress: &'a dyn Progress,
}

/// A microbatch with its units.
pub(crate) struct Slice {
    inputs: MicrobatchInputs,
    units: Vec<Unit>,
    /// Why addends could not be told apart, if they could not.
    blocked: Option<String>,
}

/// Replays a step. An error means that no stage could be judged at all.
pub fn replay(step: &HeadStep<'_>, request: &Request<'_>) -> Result<Outcome, StepError> {
    let slices = slices(step)?;
    let wanted = wanted(step, request.compare)?;
    let roundings = Roundings::plausible(&step.options, slices[0].inputs.q.dtype);
    let units: usize = slices.iter().map(|slice| slice.units.len()).sum();
    let tiles = Tiles::default();
    let comparisons = wanted.len() * units.max(1);
    let (probes, progress) = (request.probes, request.progress);
    let replay = Replay { step, wanted, roundings, tiles, comparisons, probes, progress };
    (request.total)(replay.work(&slices));
    let mut outcome = Outcome::new(&replay.wanted);
    let all: Vec<&MicrobatchInputs> = slices.iter().map(|slice| &slice.inputs).collect();
    for slice in &slices {
        let forward = replay.forward(slice, &all, &mut outcome)?;
        if let Some(why) = &slice.blocked {
            let what = format!("dk of {}", name(slice.inputs.microbatch));
            outcome.not_checked.push(NotChecked { what, why: why.clone() });
        }
        for unit in &slice.units {
            replay.backward(slice, unit, &all, &forward, &mut outcome)?;
        }
    }
    if let Some(tokens) = request.tokens {
        let what = format!("a sample of {tokens} tokens");
        let why = "this version of replay takes all tokens: the verdict is on all of them".into();
        outcome.not_checked.push(NotChecked { what, why });
    }
    replay.across(&slices, &mut outcome)?;
    outcome.finish(step);
    Ok(outcome)
}

fn slices(step: &HeadStep<'_>) -> Result<Vec<Slice>, StepError> {
    let one = |&microbatch: &Option<Microbatch>| {
        let inputs = step.inputs(microbatch)?;
        let (units, blocked) = match step.units(&inputs) {
            Ok(units) => (units, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        Ok(Slice { inputs, units, blocked })
    };
    step.microbatches.iter().map(one).collect()
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

impl Replay<'_> {
    fn bound(&self, rows: usize, columns: usize) -> Bound {
        Bound::new(self.comparisons, rows, rows * columns)
    }

    fn wants(&self, stage: Stage) -> bool {
        self.wanted.contains(&stage)
    }
}

/// A microbatch as words.
pub(crate) fn name(microbatch: Option<Microbatch>) -> String {
    microbatch.map_or("the step".into(), |mb| format!("microbatch {mb}"))
}
