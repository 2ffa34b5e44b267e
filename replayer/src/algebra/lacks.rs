//! What keeps a step from being agreed although nothing of it diverges.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::part::{OF_GRADIENT, Part};

use super::declaration::{Declaration, Hyper, Moved, Optimizer};
use super::domain::Domain;
use super::factor::is_near;
use super::inventory::Inventory;
use super::lost::LOST;
use super::names::pattern;
use super::optimizer::{NO_STEP, NOT_DECLARED};
use super::outcome::{Judged, Outcome, Stage};
use super::summary::StageSummary;
use crate::dump::name_ranks;
use crate::number::short;

/// How the sentence on a stage begins of which nothing was judged.
pub(crate) const NOTHING_OF: &str = "nothing of the stage";

/// Sentences, each of which makes the verdict incomplete.
pub(super) fn lacks(
    inventory: &Inventory<'_>,
    stages: &[StageSummary],
    judged: &[Judged],
) -> Vec<String> {
    let mut lacks: Vec<String> =
        stages.iter().filter_map(|stage| not_judged(stage, judged)).collect();
    lacks.extend(not_updated(inventory, judged));
    lacks.extend(not_stepped(inventory));
    lacks.extend(lost(inventory));
    lacks.extend(other_settings(inventory));
    lacks.extend(held_by_some(inventory));
    lacks.extend(held_by_none(inventory));
    lacks.extend(later_steps(inventory));
    lacks.extend(scaled_norm(inventory));
    lacks.extend(nothing_moved(inventory, stages, judged));
    lacks.extend(multiplied_by_unknown(inventory));
    lacks.extend(other_divisors(inventory));
    lacks.extend(divided_by_each(inventory));
    lacks.extend(not_told(inventory, stages));
    lacks.extend(near_copies(inventory));
    lacks.extend(moved(inventory));
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
    // What collects gradients for a later step of the optimizer has changed.
    let has_moved = |name: &String| inventory.has_other_state(name);
    if inventory.parameters.keys().any(has_moved) {
        return None;
    }
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
    let ranks: Vec<Rank> = inventory.declared.keys().copied().collect();
    inventory.parameters.keys().find_map(|name| {
        let words = inventory.other_setting_of(name, &ranks)?;
        Some(format!("{words} (as for {name})"))
    })
}

impl Inventory<'_> {
    /// Whether the parameter is another after the step than before it, on some rank.
    fn is_moved(&self, parameter: &str) -> bool {
        let key = |part| self.key(parameter, &part);
        let pair = key(Part::Before).zip(key(Part::After));
        pair.is_some_and(|(before, after)| {
            let mut ranks = self.holders(after).into_iter();
            ranks.any(|rank| self.hashes(before, rank) != self.hashes(after, rank))
        })
    }

    /// Whether any tensor of the optimizer's state is another after the step than before it.
    fn has_other_state(&self, parameter: &str) -> bool {
        let mut parts = self.parameters[parameter].tensors.keys().map(|(part, _)| part);
        parts.any(|after| {
            let Part::StateAfter(state) = after else { return false };
            let before = self.key(parameter, &Part::StateBefore(state.clone()));
            let pair = before.zip(self.key(parameter, after));
            pair.is_some_and(|(before, after)| {
                let mut ranks = self.holders(after).into_iter();
                ranks.any(|rank| self.hashes(before, rank) != self.hashes(after, rank))
            })
        })
    }

    /// The first setting of a parameter's optimizer that two of these ranks declare otherwise, in
    /// words.
    pub(super) fn other_setting_of(&self, parameter: &str, ranks: &[Rank]) -> Option<String> {
        let mut first: Option<(Rank, &Hyper)> = None;
        for rank in ranks {
            let own = self.declared.get(rank).and_then(|own| own.optimizer_of(parameter));
            let Some((_, hyper)) = own else { continue };
            let (first, other) = *first.get_or_insert((*rank, hyper));
            if let Some(setting) = hyper.difference(other) {
                return Some(format!(
                    "ranks {first} and {rank} declare another {setting} for it: each steps its copy by \
                     its own"
                ));
            }
        }
        None
    }
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
    Some(format!("{NOTHING_OF} {} could be judged: {why}", stage.stage.name()))
}

/// What is said of parameters that moved and that no optimizer is declared to hold.
const NOBODY: &str = "no optimizer is declared to hold it, and it changed";

/// How many reasons are told of updates that were not judged.
const REASONS: usize = 3;

/// Parameters with a gradient whose update was not judged, where that of others was: by the reasons.
/// Of a sample the report says what it cannot see.
fn not_updated(inventory: &Inventory<'_>, judged: &[Judged]) -> Vec<String> {
    let updates = || judged.iter().filter(|one| one.stage == Stage::Update);
    if updates().all(|one| matches!(one.result, Outcome::Unchecked { .. })) {
        return Vec::new();
    }
    let mut reasons: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for one in updates() {
        let Outcome::Unchecked { why, is_meant: false } = &one.result else { continue };
        let name = &one.parameter;
        let has_gradient = OF_GRADIENT.iter().any(|part| inventory.key(name, part).is_some());
        // What nothing is said to move and nothing moved is frozen.
        if why.ends_with(NOT_DECLARED) && !inventory.is_moved(name) {
            continue;
        }
        if has_gradient && inventory.samples.of_parameter(name).is_none() {
            let why = if why.ends_with(NOT_DECLARED) { NOBODY } else { why };
            reasons.entry(why).or_default().insert(name);
        }
    }
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let told = |(why, own): (&str, BTreeSet<&str>)| {
        format!("the update of {} could not be judged: {why}", pattern(&Vec::from_iter(own), &all))
    };
    reasons.into_iter().take(REASONS).map(told).collect()
}

/// What a sum is multiplied by, and the parameters of which it is.
type Divided<'a> = (f64, Vec<&'a str>);

/// Gradients that are brought together over the same ranks and divided by other numbers, where the
/// job sets the number.
fn other_divisors(inventory: &Inventory<'_>) -> Option<String> {
    let rank = *inventory.declared.keys().next()?;
    let declared = &inventory.declared[&rank];
    // By the ranks that are summed over: whether the job sets a number, and the parameters of each.
    let mut by_ranks: BTreeMap<Vec<Rank>, (bool, Vec<Divided<'_>>)> = BTreeMap::new();
    for (name, own) in &declared.parameters {
        let domain = Domain::of(inventory, rank, name);
        if domain.ranks.len() < 2 || domain.unknown.is_some() {
            continue;
        }
        let (is_set, scales) = by_ranks.entry(domain.ranks).or_default();
        *is_set |= own.reduce.iter().any(|own| own.divisor.is_some());
        match scales.iter_mut().find(|(scale, _)| is_near(*scale, domain.scale)) {
            Some((_, same)) => same.push(name),
            None => scales.push((domain.scale, vec![name])),
        }
    }
    let mut apart = by_ranks.iter().filter(|(_, (is_set, scales))| *is_set && scales.len() > 1);
    let (ranks, (_, scales)) = apart.next()?;
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let told = scales.iter().map(|(scale, own)| {
        let divisor = short(1.0 / scale);
        format!("{} divided by {divisor}", pattern(own, &all))
    });
    Some(format!(
        "gradients that are summed over {} are not all divided by the same number, as the job has it \
         set: {}; each was judged by its own",
        name_ranks(ranks),
        told.collect::<Vec<_>>().join(", ")
    ))
}

/// A number that code of the job's own has multiplied all gradients by, and that is none of its sizes: it may be a
/// clipping by another norm than that of all, or any factor that is meant.
fn multiplied_by_unknown(inventory: &Inventory<'_>) -> Option<String> {
    let told = inventory.own_scaling.as_ref()?.told.as_ref()?;
    told.equals.is_empty().then(|| {
        format!(
            "code of the job's own multiplied all gradients by {} after the last backward pass, which is no \
             number of the job that is known: where it clips, say so by .norm(value, max_norm=), and \
             where it takes out a loss scale, by loss_scale=",
            short(told.factor)
        )
    })
}

/// Copies of which several ranks have gradients, where nothing says how these come together: a factor that is lost
/// there is seen nowhere.
fn not_told(inventory: &Inventory<'_>, stages: &[StageSummary]) -> Option<String> {
    let is_judged = |stage: &StageSummary| {
        matches!(stage.stage, Stage::Accumulate | Stage::Reduce)
            && stage.agreed + stage.diverged > 0
    };
    if stages.iter().any(is_judged) {
        return None;
    }
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let is_lacking = |name: &&str| {
        let own = inventory.declared.values().filter_map(|own| own.parameters.get(*name));
        let several = own.filter(|own| own.absent.contains_key("reduce")).count() > 1;
        several && inventory.key(name, &Part::Reduced).is_some() && !inventory.are_others(name)
    };
    let lacking: Vec<&str> = all.iter().copied().filter(is_lacking).collect();
    let declared = inventory.declared.values();
    let why =
        declared.filter_map(|own| own.parameters.get(*lacking.first()?)?.absent.get("reduce"));
    let why = why.into_iter().next()?;
    Some(format!(
        "what the gradients of {} were summed and divided by was not judged: {why}",
        pattern(&lacking, &all)
    ))
}

/// Gradients that the ranks that bring them together divide by other numbers, each by its own.
fn divided_by_each(inventory: &Inventory<'_>) -> Option<String> {
    let divisors = |name: &str| -> BTreeMap<Rank, f64> {
        let own = inventory.declared.iter().filter_map(|(rank, declared)| {
            let of = declared.parameters.get(name)?;
            let is_set = of.reduce.iter().any(|own| own.divisor.is_some());
            let domain = Domain::of(inventory, *rank, name);
            let is_sum = is_set && domain.ranks.len() > 1 && domain.unknown.is_none();
            is_sum.then_some((*rank, 1.0 / domain.scale))
        });
        own.collect()
    };
    // Of ranks that sum over others the numbers may differ.
    let are_apart = |name: &str| {
        let all = divisors(name);
        let (first, divisor) = all.first_key_value().map(|(rank, own)| (*rank, *own))?;
        let together = Domain::of(inventory, first, name).ranks;
        let other =
            all.iter().find(|(rank, own)| together.contains(rank) && !is_near(**own, divisor));
        other.map(|(rank, own)| (first, divisor, *rank, *own))
    };
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let apart: Vec<&str> = all.iter().copied().filter(|name| are_apart(name).is_some()).collect();
    let (first, divisor, rank, other) = are_apart(apart.first()?)?;
    Some(format!(
        "{}: rank {first} divides the sum over ranks by {}, and rank {rank} divides it by {}, as the job \
         has set it; each was judged by its own",
        pattern(&apart, &all),
        short(divisor),
        short(other)
    ))
}

/// Parameters whose value changed within the step by something else than their optimizer, by when it
/// did.
fn moved(inventory: &Inventory<'_>) -> Vec<String> {
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let is_so = |name: &str, when: Moved| {
        let mut own = inventory.declared.values().filter_map(|own| own.parameters.get(name));
        own.any(|own| own.moved == Some(when))
    };
    let told = |(when, words): (Moved, &str)| {
        let moved: Vec<&str> = all.iter().copied().filter(|name| is_so(name, when)).collect();
        (!moved.is_empty()).then(|| format!("{}: {words}", pattern(&moved, &all)))
    };
    let each = [
        (
            Moved::BetweenPasses,
            "the value changed between two backward passes whose gradients are summed, so that the sum \
             is the gradient at no point: clear the gradients in between, as zero_grad does",
        ),
        (
            Moved::BeforeStep,
            "the value with which the optimizer's step began is another than that of the tape's first \
             forward pass, and no optimizer changed it: weights that were exchanged or moved for a \
             forward pass have to be put back before the step",
        ),
    ];
    each.into_iter().filter_map(told).collect()
}

/// Parameters of one name that are not declared to be copies, and look like some that have drifted.
fn near_copies(inventory: &Inventory<'_>) -> Option<String> {
    let all: Vec<&str> = inventory.parameters.keys().map(String::as_str).collect();
    let near = all.iter().filter_map(|name| Some((*name, inventory.likeness(name)?)));
    let (names, likenesses): (Vec<&str>, Vec<f64>) = near.unzip();
    let least = likenesses.into_iter().min_by(f64::total_cmp)?;
    Some(format!(
        "{}: the values that ranks hold under each name before the step are correlated (by {least:.4} \
         at the least), as those of copies are that have drifted apart, and it is not declared \
         whether these are copies or other parameters: declare how the gradients of copies are reduced, or \
         give other parameters other names",
        pattern(&names, &all)
    ))
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
