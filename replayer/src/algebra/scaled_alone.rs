//! Factors that may be the number of microbatches, of parameters beside which others that are
//! reduced alike have none.
//!
//! The number of microbatches is divided by once for all parameters. Where some of them alone are
//! twice or half as large as they should be in a step of two microbatches, whatever doubles or
//! halves these explains it as well. Larger numbers are not met by chance.

use std::collections::BTreeSet;

use backtape::identity::Rank;

use super::causes;
use super::domain::Domain;
use super::inventory::Inventory;
use super::outcome::{Judged, Outcome, Stage};
use crate::number::plural;

/// The number of microbatches that a factor equals by chance.
const COMMON: usize = 2;

/// Says of parameters that alone have such a factor that either may be its cause.
pub(super) fn tell(inventory: &Inventory<'_>, judged: &mut [Judged]) {
    let is_met = |one: &&Judged| {
        let reading = one.result.divergence().and_then(|own| own.reading.as_ref());
        reading.is_some_and(|own| own.cause == causes::MICROBATCH_SCALE.name)
            && microbatches(inventory, one) == COMMON
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
        *reading = causes::UNKNOWN.reads(format!(
            "{} ({}), or something multiplies these parameters alone ({}): {} reduced alike do not \
             have it",
            reading.words,
            causes::MICROBATCH_SCALE.name,
            causes::SCALED.name,
            plural(others.len() as u64, "parameter"),
        ));
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

/// How many microbatches a parameter has in the step, as recorded or declared.
fn microbatches(inventory: &Inventory<'_>, one: &Judged) -> usize {
    let declared = inventory.declared.get(&one.ranks[0]).and_then(|own| own.microbatches);
    let recorded = inventory.microbatches(&one.parameter).iter().flatten().count();
    recorded.max(declared.unwrap_or(1) as usize)
}

/// Whether a stage agrees and would not if it had such a factor.
fn would_show(one: &Judged) -> bool {
    let least = 1.0 - 1.0 / COMMON as f64;
    matches!(one.result, Outcome::Agreed { seen_from: Some(from), .. } if from < least)
}
