//! Gradients that were brought together after the place where a job is taken to have done so: after
//! each rank has clipped its own, or within the optimizer's step, where nobody sees it.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::part::Part;

use super::causes;
use super::domain::Domain;
use super::judge::Judge;
use super::outcome::{Judged, Outcome, Reading, Stage};

/// What to look at where gradients were clipped before they were brought together.
pub(super) const ORDER: &str = "the order: ranks bring gradients together first, and clip them by the norm of what comes of it";

/// What is said of a gradient that the optimizer's step brings together, in words.
const INSIDE: &str = "ranks took their own gradients into the optimizer's step, and hold the same parameter after it: \
     what the step does brings gradients together, which is not recorded";

impl Judge<'_> {
    /// Says of gradients that were not reduced where they are taken to be whether they were later.
    pub(super) fn reduced_late(&self, judged: &mut [Judged]) {
        let is_own = |one: &&Judged| {
            let readings = one.result.divergence().map(|own| &own.readings[..]);
            let is_not_reduced = |own: &Reading| own.cause == causes::NOT_REDUCED.name;
            one.stage == Stage::Reduce && readings.is_some_and(|own| own.iter().any(is_not_reduced))
        };
        let names: BTreeSet<String> =
            judged.iter().filter(is_own).map(|one| one.parameter.clone()).collect();
        for name in names {
            if self.is_one(&name, &Part::Clipped) {
                match self.is_clipped(&name) {
                    true => self.clipped_before(judged, &name),
                    false => self.reduced_in_step(judged, &name),
                }
            } else if self.is_one(&name, &Part::After) && !is_updated(judged, &name) {
                brought_together_inside(judged, &name);
            }
        }
    }

    /// Whether the ranks that should have reduced a gradient together hold one and the same tensor,
    /// which is not what it was before the step.
    fn is_one(&self, parameter: &str, part: &Part) -> bool {
        let inventory = self.inventory;
        let Some(key) = inventory.key(parameter, part) else { return false };
        let mut boxes: BTreeMap<_, Vec<Vec<Rank>>> = BTreeMap::new();
        for piece in inventory.pieces(key, &|_| ()) {
            boxes.entry(piece.place).or_default().push(piece.ranks);
        }
        let is_moved = |rank: Rank| {
            let before = inventory.key(parameter, &Part::Before);
            let hashes = |key| inventory.hashes(key, rank);
            *part != Part::After || before.is_some_and(|before| hashes(before) != hashes(key))
        };
        boxes.into_values().all(|pieces| {
            let [ranks] = &pieces[..] else { return false };
            let domain = Domain::of(inventory, ranks[0], parameter);
            domain.ranks.len() > 1
                && domain.ranks.iter().all(|rank| ranks.contains(rank))
                && is_moved(ranks[0])
        })
    }

    /// Whether the job says that it clips the gradient.
    fn is_clipped(&self, parameter: &str) -> bool {
        let mut declared = self.inventory.declared.values();
        declared.any(|own| own.clip_value.is_some() || own.limit_of(parameter).is_some())
    }

    /// Judges as the reduced gradient what the optimizer took, where nothing clipped it: an optimizer's
    /// own step brought it together before it called that of its base.
    fn reduced_in_step(&self, judged: &mut [Judged], parameter: &str) {
        let inventory = self.inventory;
        let Some(key) = inventory.key(parameter, &Part::Clipped) else { return };
        let pieces = inventory.pieces(key, &|_| ());
        for one in judged.iter_mut().filter(|one| one.parameter == parameter) {
            let Some(piece) = pieces.iter().find(|own| own.place == one.place) else { continue };
            match one.stage {
                Stage::Reduce => {
                    let domain = Domain::of(inventory, piece.ranks[0], parameter);
                    let sum = inventory.addends(&domain, parameter).and_then(|addends| {
                        self.sum_of_addends((parameter, key, piece), &addends, &domain)
                    });
                    one.tensor = key.to_string();
                    one.result = sum.map_or_else(Outcome::unchecked, |(outcome, _)| outcome);
                }
                Stage::Clip => {
                    let why = "nothing clipped it: it was reduced within the optimizer's step";
                    one.result = Outcome::not_done(why.into());
                }
                _ => {}
            }
        }
    }

    /// Names gradients that each rank clipped before they were brought together.
    fn clipped_before(&self, judged: &mut [Judged], parameter: &str) {
        let words = "ranks clipped their own gradients, each by its own norm, and brought them together \
                     after that: what the optimizer took is the same on all of them";
        for one in judged.iter_mut().filter(|one| one.parameter == parameter) {
            let Outcome::Diverged(divergence) = &mut one.result else { continue };
            if matches!(one.stage, Stage::Reduce | Stage::Clip) {
                divergence.readings = vec![causes::NORM_LOCAL.reads(words).looking_at(ORDER)];
                divergence.factor = None;
            }
        }
    }
}

/// Whether some rank's parameter is what the optimizer makes of its own gradient.
fn is_updated(judged: &[Judged], parameter: &str) -> bool {
    let is_so = |one: &Judged| {
        one.stage == Stage::Update
            && one.parameter == parameter
            && matches!(one.result, Outcome::Agreed { .. })
    };
    judged.iter().any(is_so)
}

/// Takes back what was judged by gradients that the optimizer did not take.
fn brought_together_inside(judged: &mut [Judged], parameter: &str) {
    let stages = [Stage::Reduce, Stage::State, Stage::Update];
    for one in judged.iter_mut().filter(|one| one.parameter == parameter) {
        if stages.contains(&one.stage) && one.result.divergence().is_some() {
            one.result = Outcome::unchecked(INSIDE.into());
        }
    }
}
