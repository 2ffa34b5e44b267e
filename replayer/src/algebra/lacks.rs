//! What keeps a step from being agreed although nothing of it diverges.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::part::{OF_GRADIENT, Part};

use super::declaration::{Declaration, Hyper, Optimizer};
use super::inventory::Inventory;
use super::lost::LOST;
use super::names::pattern;
use super::optimizer::NO_STEP;
use super::outcome::{Judged, Outcome, Stage};
use super::summary::StageSummary;

/// Sentences, each of which makes the verdict incomplete.
pub(super) fn lacks(
    inventory: &Inventory<'_>,
    stages: &[StageSummary],
    judged: &[Judged],
) -> Vec<String> {
    let mut lacks: Vec<String> =
        stages.iter().filter_map(|stage| not_judged(stage, judged)).collect();
    lacks.extend(not_stepped(inventory));
    lacks.extend(lost(inventory));
    lacks.extend(other_settings(inventory));
    lacks.extend(held_by_some(inventory));
    lacks.extend(held_by_none(inventory));
    lacks.extend(later_steps(inventory));
    lacks.extend(scaled_norm(inventory));
    lacks.extend(nothing_moved(inventory, stages, judged));
    lacks.extend(inventory.counted_without_moments());
    lacks
}

/// Parameters with a gradient that no optimizer holds, where one stepped others.
fn held_by_none(inventory: &Inventory<'_>) -> Option<String> {
    let has_gradient = |name: &&str| inventory.key(name, &Part::Reduced).is_some();
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let unheld = all.iter().copied().filter(has_gradient);
    let unheld: Vec<&str> = unheld.filter(|name| inventory.is_held_by_none(name)).collect();
    (!unheld.is_empty()).then(|| {
        format!(
            "no optimizer that was given holds {}, which got a gradient: whether it is updated is not \
             known (one that is not to be trained has requires_grad=False)",
            pattern(&unheld, &all)
        )
    })
}

/// Parameters whose optimizer stepped again within the tape.
fn later_steps(inventory: &Inventory<'_>) -> Option<String> {
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let again: Vec<&str> =
        all.iter().copied().filter(|name| inventory.has_later_steps(name)).collect();
    (!again.is_empty()).then(|| {
        format!(
            "the optimizer of {} stepped several times while the tape was open, and its first step \
             alone was judged: open a tape around each step",
            pattern(&again, &all)
        )
    })
}

/// A norm that nothing is clipped by, of gradients with the loss scale in them. The job may divide it
/// before it reports it.
fn scaled_norm(inventory: &Inventory<'_>) -> Option<String> {
    let mut declared = inventory.declared.values().flat_map(|own| {
        let scale = own.loss_scale.filter(|scale| *scale != 1.0);
        own.norms.iter().enumerate().filter_map(move |(at, norm)| Some((at, norm, scale?)))
    });
    let (at, _, scale) = declared.find(|(_, norm, _)| {
        norm.of.as_deref() == Some("reduced") && norm.max_norm.is_none() && !norm.of_nothing
    })?;
    Some(format!(
        "norm {at} is of gradients with the loss scale {scale} in them, so that it is {scale} x that of \
         the gradients which the optimizer takes"
    ))
}

/// A step that left every parameter and every state as it was, though there are gradients.
fn nothing_moved(
    inventory: &Inventory<'_>,
    stages: &[StageSummary],
    judged: &[Judged],
) -> Option<String> {
    let update = stages.iter().find(|own| own.stage == Stage::Update)?;
    let is_still = |one: &Judged| {
        let Outcome::Unchecked { why, .. } = &one.result else { return false };
        one.stage == Stage::Update && why.ends_with(NO_STEP)
    };
    let is_nothing = update.agreed + update.diverged == 0 && judged.iter().any(is_still);
    let has_gradient =
        |name: &String| OF_GRADIENT.iter().any(|part| inventory.key(name, part).is_some());
    (is_nothing && inventory.parameters.keys().any(has_gradient)).then(|| {
        "no parameter and no state of an optimizer changed, though there are gradients: the \
         optimizer took no step, or the job did not take over what it gave"
            .into()
    })
}

/// Parameters that the optimizers of some ranks hold, and those of others do not.
fn held_by_some(inventory: &Inventory<'_>) -> Option<String> {
    let is_split = |name: &&str| {
        let has_stepped = |own: &&Declaration| own.optimizers.iter().any(Optimizer::has_stepped);
        let declared = inventory.declared.values().filter(has_stepped);
        let own = declared.filter_map(|own| own.parameters.get(*name));
        let held: BTreeSet<bool> = own.map(|own| own.optimizer.is_some()).collect();
        held.len() == 2
    };
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let split: Vec<&str> = all.iter().copied().filter(is_split).collect();
    (!split.is_empty()).then(|| {
        format!(
            "{}: the optimizer of some rank holds each of them, and those of other ranks do not: what \
             became of the copies there is not known",
            pattern(&split, &all)
        )
    })
}

/// A parameter for which ranks declare other settings of its optimizer.
fn other_settings(inventory: &Inventory<'_>) -> Option<String> {
    let mut told: BTreeMap<&str, (Rank, &Hyper)> = BTreeMap::new();
    for (rank, declared) in &inventory.declared {
        for name in declared.parameters.keys() {
            let Some((_, hyper)) = declared.optimizer_of(name) else { continue };
            let (first, other) = told.entry(name).or_insert((*rank, hyper));
            if let Some(setting) = hyper.difference(other) {
                return Some(format!(
                    "ranks {first} and {rank} declare another {setting} for {name}: each steps its copy \
                     by its own"
                ));
            }
        }
    }
    None
}

/// Parameters that lost their gradient, where others have theirs.
fn lost(inventory: &Inventory<'_>) -> Option<String> {
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let is_lost = |name: &&str| inventory.has_gradients() && inventory.lost(name).is_some();
    let lost: Vec<&str> = all.iter().copied().filter(is_lost).collect();
    (!lost.is_empty()).then(|| format!("{}: {LOST}", pattern(&lost, &all)))
}

/// A stage of which nothing was judged. Local gradients alone may lack: a compiled step sums and
/// reduces them where nobody can look, and says so.
fn not_judged(stage: &StageSummary, judged: &[Judged]) -> Option<String> {
    if stage.stage == Stage::Accumulate || stage.agreed + stage.diverged > 0 {
        return None;
    }
    let why =
        judged.iter().filter(|one| one.stage == stage.stage).find_map(|one| match &one.result {
            Outcome::Unchecked { why, is_meant: false } => Some(why),
            _ => None,
        })?;
    Some(format!("nothing of the stage {} could be judged: {why}", stage.stage.name()))
}

/// Parameters with a gradient whose optimizer was not called, where another one was.
fn not_stepped(inventory: &Inventory<'_>) -> Option<String> {
    let has_gradient = |name: &&str| inventory.key(name, &Part::Reduced).is_some();
    let waiting = |declared: &Declaration| {
        let is_idle = |own: &Optimizer| own.steps == Some(0) && !own.skipped;
        let idle = |own: &Optimizer| {
            is_idle(own) && declared.optimizers.iter().any(Optimizer::has_stepped)
        };
        let of = |optimizer: Option<usize>| declared.optimizers.get(optimizer?);
        let own = declared.parameters.iter();
        let own = own.filter(|(_, own)| of(own.optimizer).is_some_and(idle));
        own.map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    let waiting: BTreeSet<String> = inventory.declared.values().flat_map(waiting).collect();
    let waiting: Vec<&str> = waiting.iter().map(String::as_str).filter(has_gradient).collect();
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    (!waiting.is_empty()).then(|| {
        format!(
            "the optimizer of {} took no step, though there is a gradient and another optimizer \
             took one",
            pattern(&waiting, &all)
        )
    })
}
