//! Factors that jobs bring to all parameters at once, of parameters beside which others that are
//! reduced alike have none.
//!
//! The number of microbatches is divided by once for all parameters: where a few alone are three
//! times as large as they should be in a step of three microbatches, whatever multiplies these
//! explains it as well. And gradients are clipped together: a few alone that become smaller between
//! two backward passes are not.

use std::collections::BTreeSet;

use backtape::identity::Rank;

use super::causes;
use super::domain::Domain;
use super::inventory::Inventory;
use super::outcome::{Judged, Outcome, Reading, Stage};
use crate::number::plural;

/// How far from 1 the factor of two microbatches is at least: a parameter counts as right only where
/// its comparison would have shown as much.
const FACTOR: f64 = 0.5;

/// Says of parameters that alone have such a factor that something else may be its cause.
pub(super) fn tell(inventory: &Inventory<'_>, judged: &mut [Judged]) {
    let is_met = |one: &&Judged| {
        let reading = one.result.divergence().and_then(|own| own.reading.as_ref());
        let of_sums = one.stage <= Stage::Reduce;
        let is_of_all = |own: &Reading| {
            own.cause == causes::MICROBATCH_SCALE.name
                || of_sums && own.cause == causes::CLIP_TWICE.name
        };
        reading.is_some_and(is_of_all)
    };
    let met: BTreeSet<(Stage, &str)> =
        judged.iter().filter(is_met).map(|one| (one.stage, one.parameter.as_str())).collect();
    // On one rank alone, a parameter that is right on others is no other one.
    let is_right = |one: &&Judged| {
        would_show(one)
            && met.iter().any(|(stage, _)| *stage == one.stage)
            && !met.contains(&(one.stage, one.parameter.as_str()))
    };
    let right: BTreeSet<(Key, String)> = judged
        .iter()
        .filter(is_right)
        .map(|one| (key(inventory, one), one.parameter.clone()))
        .collect();
    let places: Vec<usize> = (0..judged.len()).filter(|at| is_met(&&judged[*at])).collect();
    for at in places {
        let own = key(inventory, &judged[at]);
        let others: BTreeSet<&str> =
            right.iter().filter(|(of, _)| *of == own).map(|(_, name)| name.as_str()).collect();
        let Outcome::Diverged(divergence) = &mut judged[at].result else { continue };
        let Some(reading) = divergence.reading.as_mut().filter(|_| !others.is_empty()) else {
            continue;
        };
        *reading = alone(reading, others.len());
    }
}

/// What parameters have in common that are reduced alike: the stage, the axes with the size of each,
/// and the ranks.
type Key = (Stage, Vec<(String, usize)>, Vec<Rank>);

fn key(inventory: &Inventory<'_>, one: &Judged) -> Key {
    let domain = Domain::of(inventory, one.ranks[0], &one.parameter);
    let axes = domain.axes.into_iter().map(|axis| (axis.name, axis.size)).collect();
    (one.stage, axes, one.ranks.clone())
}

/// The reading of parameters that alone have a factor, beside so many others that have none.
fn alone(reading: &Reading, others: usize) -> Reading {
    let others = plural(others as u64, "parameter");
    let scaled = causes::SCALED;
    match reading.words.split_once(super::sum_causes::SMALLER_EACH) {
        Some((_, terms)) => scaled.reads(format!(
            "what was summed before is multiplied between backward passes: {terms}; {others} reduced \
             alike do not have it, as they would if gradients were clipped"
        )),
        None => causes::UNKNOWN.reads(format!(
            "{} ({}), or something multiplies these parameters alone ({}): {others} reduced alike do \
             not have it",
            reading.words, reading.cause, scaled.name,
        )),
    }
}

/// Whether a stage agrees and would not if it had such a factor.
fn would_show(one: &Judged) -> bool {
    matches!(one.result, Outcome::Agreed { seen_from: Some(from), .. } if from < FACTOR)
}
