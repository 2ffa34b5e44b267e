//! A replay in the world of a hypothesis, lent to whoever asks something of it.

use std::collections::BTreeSet;

use super::context::Replay;
use super::executor::Executor;
use super::executor::pass_cache::PassCache;
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::plan::{Effort, Plan};
use super::reference_dk::SumsWithoutAddends;
use super::world::World;
use crate::head::step::StepError;
use crate::head::{HeadStep, Roundings, Stage};
use crate::kernels::{NoProgress, Progress, Tiles};

/// Given a replay in a world, and the microbatches as the world has them.
pub(super) type Within<'a> =
    dyn FnMut(&Replay<'_>, &[HeadMicrobatch]) -> Result<(), StepError> + 'a;

/// Lends a replay in a world, and the microbatches as the world has them.
pub(super) fn in_world(
    step: &HeadStep<'_>,
    compared: &BTreeSet<Stage>,
    (world, cache): (&dyn World, Option<&PassCache>),
    then: &mut Within<'_>,
) -> Result<(), StepError> {
    counted_in_world(step, compared, (world, cache, &NoProgress), then)
}

pub(super) fn counted_in_world(
    step: &HeadStep<'_>,
    compared: &BTreeSet<Stage>,
    (world, cache, progress): (&dyn World, Option<&PassCache>, &dyn Progress),
    then: &mut Within<'_>,
) -> Result<(), StepError> {
    let mut altered = step.clone();
    world.options(&mut altered.options);
    let microbatches = super::microbatch::head_microbatches(&altered, world, HeadStep::inputs)?;
    let roundings = Roundings::plausible(&altered.options, microbatches[0].inputs.dtype(&altered))?;
    let units: usize = microbatches.iter().map(|microbatch| microbatch.units.len()).sum();
    let whole_entries = super::rounding_variance::rounds_whole_entries(&altered, &roundings);
    let sums_without_addends =
        SumsWithoutAddends::of(&altered, &microbatches, compared, &roundings);
    let plan = Plan {
        step: &altered,
        whole_entries,
        wanted: compared.clone(),
        roundings,
        tiles: Tiles::default(),
        comparisons: compared.len().max(1) * units.max(1),
        effort: Effort::All,
        sums_without_addends,
        draw: None,
        trial: true,
    };
    let executor = Executor::of_trial(&plan, cache, progress);
    let replay = Replay { plan: &plan, executor, judge: Judge { plan: &plan, world } };
    then(&replay, &microbatches)
}
