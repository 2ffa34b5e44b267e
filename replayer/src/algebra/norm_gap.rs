//! What the norm of the gradients would have been had every sum of them been right, and which
//! parameters the difference comes from.

use std::collections::{BTreeMap, BTreeSet};

use backtape::index_box::IndexBox;
use serde::Serialize;

use super::inventory::Inventory;
use super::names::pattern;
use super::outcome::{Energies, Judged, Outcome, Reading};

/// The norm of the gradients as it is and as it would have been.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NormGap {
    /// As the job computed it, the first norm that it declares.
    pub reported: Option<f64>,
    /// Of the gradients that were captured after the reduction.
    pub captured: f64,
    /// Of the sums as they should be.
    pub right: f64,
    /// Parameters with one cause, and their share of the difference of the squares. The shares add
    /// up to 1.
    pub shares: Vec<(String, f64)>,
}

impl NormGap {
    /// The gap, where a sum diverges and every sum could be judged.
    pub(super) fn of(
        inventory: &Inventory<'_>,
        judged: &[Judged],
        names: &[&str],
    ) -> Option<NormGap> {
        let sums = || judged.iter().filter(|one| one.tensor.starts_with("step.reduced:"));
        let is_lacking = |one: &Judged| {
            one.energies.is_none() && matches!(one.result, Outcome::Unchecked { .. })
        };
        let is_diverged = |one: &Judged| one.result.divergence().is_some();
        if sums().any(is_lacking) || !sums().any(is_diverged) {
            return None;
        }
        // Each element once: the first of the copies of a box.
        let mut counted: BTreeSet<(&str, &IndexBox)> = BTreeSet::new();
        let mut whole = Energies::default();
        let mut groups: BTreeMap<Option<&Reading>, (BTreeSet<&str>, f64)> = BTreeMap::new();
        for one in sums() {
            let Some(energies) = one.energies else { continue };
            if !counted.insert((&one.parameter, &one.place)) {
                continue;
            }
            whole.captured += energies.captured;
            whole.right += energies.right;
            if let Some(divergence) = one.result.divergence() {
                let group = groups.entry(divergence.reading.as_ref()).or_default();
                group.0.insert(&one.parameter);
                group.1 += energies.captured - energies.right;
            }
        }
        let gap: f64 = groups.values().map(|(_, gap)| gap).sum();
        let share = |(own, part): (BTreeSet<&str>, f64)| {
            (pattern(&own.into_iter().collect::<Vec<_>>(), names), part / gap)
        };
        let mut declared = inventory.declared.values().flat_map(|own| &own.norms);
        Some(NormGap {
            reported: declared.next().and_then(|norm| norm.value),
            captured: whole.captured.sqrt(),
            right: whole.right.sqrt(),
            shares: groups.into_values().map(share).collect(),
        })
    }
}
