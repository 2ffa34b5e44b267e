//! Factors that may be the number of microbatches, of parameters beside which others that are
//! reduced alike have none.
//!
//! The number of microbatches is divided by once for all parameters. Where some of them alone are
//! twice or half as large as they should be in a step of two microbatches, whatever doubles or
//! halves these explains it as well. Larger numbers are not met by chance.

use std::collections::BTreeSet;

use super::causes;
use super::domain::Domain;
use super::inventory::Inventory;
use super::outcome::{Judged, Outcome};
use crate::number::plural;

/// The number of microbatches that a factor equals by chance.
const COMMON: usize = 2;

/// Says of parameters that alone have such a factor that either may be its cause.
pub(super) fn tell(inventory: &Inventory<'_>, judged: &mut [Judged]) {
    let right = judged.iter().filter(|one| would_show(one)).cloned().collect::<Vec<_>>();
    for one in judged {
        let stage = one.stage;
        let Outcome::Diverged(divergence) = &mut one.result else { continue };
        let Some(reading) = divergence.reading.as_mut() else { continue };
        let declared = inventory.declared.get(&one.ranks[0]);
        let declared = declared.and_then(|own| own.microbatches).unwrap_or(1) as usize;
        let recorded = inventory.microbatches(&one.parameter).iter().flatten().count();
        let count = recorded.max(declared);
        if reading.cause != causes::MICROBATCH_SCALE.name || count != COMMON {
            continue;
        }
        let own = Domain::of(inventory, one.ranks[0], &one.parameter);
        let is_alike = |other: &&Judged| {
            other.stage == stage && {
                let domain = Domain::of(inventory, other.ranks[0], &other.parameter);
                (domain.axes, domain.scale) == (own.axes.clone(), own.scale)
            }
        };
        let others = right.iter().filter(is_alike).map(|other| &other.parameter);
        let others = others.collect::<BTreeSet<_>>().len();
        if others == 0 {
            continue;
        }
        *reading = causes::UNKNOWN.reads(format!(
            "{} ({}), or something multiplies these parameters alone ({}): {} reduced alike do not \
             have it",
            reading.words,
            causes::MICROBATCH_SCALE.name,
            causes::SCALED.name,
            plural(others as u64, "parameter"),
        ));
    }
}

/// Whether a stage agrees and would not if it had such a factor.
fn would_show(one: &Judged) -> bool {
    let least = 1.0 - 1.0 / COMMON as f64;
    matches!(one.result, Outcome::Agreed { seen_from: Some(from), .. } if from < least)
}
