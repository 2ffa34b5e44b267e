//! What the norm of the gradients would have been had every sum of them been right, and which
//! parameters the difference comes from.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
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
    /// Some gradients were sampled: of each of these the sample's ratio of the two stands for all of
    /// it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
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
        let mut sums: Vec<(&Judged, Energies)> =
            sums().filter_map(|one| Some((one, one.energies?))).collect();
        sums.retain(|(one, _)| counted.insert((&one.parameter, &one.place)));
        let mut whole = Energies::default();
        let samples = weights(inventory, &sums);
        let mut groups: BTreeMap<Option<&Reading>, (BTreeSet<&str>, f64)> = BTreeMap::new();
        for (one, energies) in &sums {
            let weight = samples.get(one.parameter.as_str()).copied().unwrap_or(1.0);
            whole.captured += weight * energies.captured;
            whole.right += weight * energies.right;
            if let Some(divergence) = one.result.divergence() {
                let group = groups.entry(divergence.reading.as_ref()).or_default();
                group.0.insert(&one.parameter);
                group.1 += weight * (energies.captured - energies.right);
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
            estimated: !samples.is_empty(),
            shares: groups.into_values().map(share).collect(),
        })
    }
}

/// By sampled parameter, how often the sum of the squares of its sample goes into that of all of it. A
/// sample of zeros says nothing of the rest.
fn weights<'a>(
    inventory: &Inventory<'_>,
    sums: &[(&'a Judged, Energies)],
) -> BTreeMap<&'a str, f64> {
    let mut sampled: BTreeMap<&str, f64> = BTreeMap::new();
    for (one, energies) in sums {
        if inventory.samples.of_parameter(&one.parameter).is_some() {
            *sampled.entry(&one.parameter).or_default() += energies.captured;
        }
    }
    let weight = |(name, sample): (&'a str, f64)| {
        let whole = inventory.declared_squares(name, "reduced", Rank(0))?.ok()?.whole();
        Some((name, if sample > 0.0 { whole / sample } else { 1.0 }))
    };
    sampled.into_iter().filter_map(weight).collect()
}
