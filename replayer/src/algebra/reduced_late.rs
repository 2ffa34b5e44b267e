//! Gradients that were brought together after the place where a job is taken to have done so: after
//! each rank has clipped its own, or within the optimizer's step, where nobody sees it.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::part::Part;

use super::causes;
use super::domain::Domain;
use super::factor::is_near;
use super::judge::Judge;
use super::local_norms::clipped_to;
use super::outcome::{Judged, Outcome, Reading, Stage};
use super::sum_causes::WEIGHTED;
use super::sums::SumOf;
use crate::compare::Tally;
use crate::number::short;

/// What to look at where gradients were clipped before they were brought together.
pub(super) const ORDER: &str = "the order: ranks bring gradients together first, and clip them by the norm of what comes of it";

/// What is said of a gradient that was recorded before ranks brought it together, in words.
const LATER: &str =
    "it was recorded as reduced before ranks brought it together: call .reduced() after that";

/// How near a sum of clipped gradients must be to what was recorded: norms are computed in f32, and
/// coefficients of ranks differ by more where they differ.
const NEAR: f64 = 1e-2;

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

    /// Names gradients that each rank clipped before they were brought together: what the optimizer took
    /// is their sum, each times the coefficient of its rank. Where that is one and the same for all ranks
    /// they were reduced first.
    fn clipped_before(&self, judged: &mut [Judged], parameter: &str) {
        let Some((is_right, coefficients)) = self.sum_of_clipped(parameter) else { return };
        let one = coefficients[0];
        let is_global = coefficients.iter().all(|other| is_near(*other, one));
        if !is_right {
            return;
        }
        let words = "ranks clipped their own gradients, each by its own norm, and brought them together \
                     after that: what the optimizer took is the same on all of them";
        for one in judged.iter_mut().filter(|one| one.parameter == parameter) {
            let Outcome::Diverged(divergence) = &mut one.result else { continue };
            if !matches!(one.stage, Stage::Reduce | Stage::Clip) {
                continue;
            }
            if is_global {
                one.result = Outcome::unchecked(LATER.into());
            } else {
                divergence.readings = vec![causes::NORM_LOCAL.reads(words).looking_at(ORDER)];
                divergence.factor = None;
            }
        }
        // Norms are of the same gradients.
        let norms = judged.iter_mut().filter(|one| is_global && one.stage == Stage::Norm);
        for one in norms.filter(|one| one.result.divergence().is_some()) {
            one.result = Outcome::unchecked(LATER.into());
        }
    }

    /// Whether what the optimizer took is the sum of the ranks' own gradients, each times the coefficient of
    /// its rank, and these coefficients.
    fn sum_of_clipped(&self, parameter: &str) -> Option<(bool, Vec<f64>)> {
        let inventory = self.inventory;
        let key = inventory.key(parameter, &Part::Clipped)?;
        let coefficient = |rank: Rank| {
            let limits = inventory.declared.get(&rank)?.limits_of(parameter);
            let [limit] = limits[..] else { return None };
            Some(limit.coefficient().min(1.0))
        };
        let mut all = Vec::new();
        let is_right = inventory.pieces(key, &|_| ()).iter().all(|piece| {
            let domain = Domain::of(inventory, piece.ranks[0], parameter);
            let Ok(addends) = inventory.addends(&domain, parameter) else { return false };
            let own: Option<Vec<f64>> = addends.iter().map(|own| coefficient(own.rank)).collect();
            let Some(own) = own else { return false };
            let weights: Vec<f64> = own.iter().map(|own| own * domain.scale).collect();
            all.extend(own);
            let (rank, place, addends) = (piece.ranks[0], &piece.place, &addends[..]);
            let of = SumOf { key, rank, place, addends, weights: &weights, sent: domain.sent };
            let near = |tally: Tally| tally.slope().abs() < NEAR && tally.error() < NEAR;
            self.sum(&of).is_ok_and(near)
        });
        (!all.is_empty()).then_some((is_right, all))
    }

    /// Names weights of ranks that bring each rank's gradients to one norm: each was clipped by its own
    /// before they were brought together.
    pub(super) fn weighted_by_norms(&self, judged: &mut [Judged]) {
        let is_weighted = |own: &&mut Reading| own.cause == causes::RANKS_WEIGHTED.name;
        let diverged = judged.iter_mut().filter_map(|one| match &mut one.result {
            Outcome::Diverged(divergence) => Some(&mut divergence.readings),
            _ => None,
        });
        let weighted: Vec<&mut Reading> = diverged.flatten().filter(is_weighted).collect();
        let norms = if weighted.is_empty() { None } else { self.inventory.local_norms() };
        for reading in weighted {
            let factors = &reading.weights.0;
            let Some(allowed) = norms.as_ref().and_then(|norms| clipped_to(factors, norms)) else {
                continue;
            };
            let words = format!(
                "each gradient was clipped to {} by its own norm before they were brought together: {}",
                short(allowed),
                reading.words.trim_start_matches(WEIGHTED)
            );
            *reading = causes::NORM_LOCAL.reads(words).looking_at(ORDER);
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
