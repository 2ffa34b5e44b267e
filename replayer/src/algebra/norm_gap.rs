//! What the norm of the gradients would have been had every sum of them been right, and which
//! parameters the difference comes from.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use serde::Serialize;

use super::declaration::Norm;
use super::inventory::Inventory;
use super::names::pattern;
use super::norm::NORM;
use super::outcome::{Energies, Judged, Outcome, Reading, Stage};

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
    /// No sum is wrong: the norm is not that of the captured gradients.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub of_norm: bool,
    /// How far apart rounding may bring the squares of the last two.
    pub apart: f64,
    /// Parameters with one cause, and their share of the difference of the squares. The shares add
    /// up to 1; there are none where rounding explains the difference, or it is no number.
    pub shares: Vec<(String, f64)>,
}

impl NormGap {
    /// The gap, where a sum diverges and every sum could be judged, or a norm alone diverges.
    pub(super) fn of(
        inventory: &Inventory<'_>,
        judged: &[Judged],
        names: &[&str],
    ) -> Option<NormGap> {
        let is_wrong_sum = |one: &Judged| {
            matches!(one.stage, Stage::Accumulate | Stage::Reduce | Stage::Unscale)
                && one.result.divergence().is_some()
        };
        match judged.iter().any(is_wrong_sum) {
            true => NormGap::of_sums(inventory, judged, names),
            false => judged.iter().find_map(|one| NormGap::of_wrong_norm(inventory, one)),
        }
    }

    /// The gap of a norm that is not that of the captured gradients.
    fn of_wrong_norm(inventory: &Inventory<'_>, one: &Judged) -> Option<NormGap> {
        let factor = one.result.divergence()?.factor.filter(|_| one.stage == Stage::Norm)?;
        let at: usize = one.tensor.strip_prefix(NORM)?.parse().ok()?;
        let norm = inventory.declared.get(one.ranks.first()?)?.norms.get(at)?;
        let value = norm.value?;
        let captured = value / factor;
        Some(NormGap {
            reported: Some(value),
            captured,
            right: captured,
            estimated: false,
            of_norm: true,
            shares: Vec::new(),
            apart: 0.0,
        })
    }

    /// The gap, where a sum diverges and every sum could be judged.
    fn of_sums(inventory: &Inventory<'_>, judged: &[Judged], names: &[&str]) -> Option<NormGap> {
        let normed = normed(inventory);
        let sums = || {
            let own = judged.iter().filter(|one| one.tensor.starts_with("step.reduced:"));
            own.filter(|one| normed.is_empty() || normed.contains(one.parameter.as_str()))
        };
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
            whole.apart += weight * energies.apart;
            if let Some(divergence) = one.result.divergence() {
                let group = groups.entry(divergence.reading.as_ref()).or_default();
                group.0.insert(&one.parameter);
                group.1 += weight * (energies.captured - energies.right);
            }
        }
        let parts = groups.into_values();
        let parts = parts.map(|(own, part)| (pattern(&Vec::from_iter(own), names), part)).collect();
        // The sums of several boxes are added in f64 too.
        let added = sums.len() as f64 * f64::EPSILON / 2.0 * (whole.captured + whole.right);
        let apart = whole.apart + added;
        // A norm that the job took of gradients without the loss scale is of smaller ones.
        let scale = scale_in(inventory);
        Some(NormGap {
            reported: first(inventory).and_then(|norm| norm.value),
            captured: whole.captured.sqrt() / scale,
            right: whole.right.sqrt() / scale,
            estimated: !samples.is_empty(),
            of_norm: false,
            shares: shares(parts, apart),
            apart: apart / (scale * scale),
        })
    }
}

/// The first norm that a rank declares.
fn first<'a>(inventory: &'a Inventory<'_>) -> Option<&'a Norm> {
    inventory.declared.values().find_map(|own| own.norms.first())
}

/// The parameters of the first norm, on any rank: a job may take several, each of others.
fn normed<'a>(inventory: &'a Inventory<'_>) -> BTreeSet<&'a str> {
    let norms = inventory.declared.values().filter_map(|own| own.norms.first());
    norms.flat_map(|norm| norm.parameters.iter().map(String::as_str)).collect()
}

/// The loss scale that reduced gradients have in them, and the first norm has not.
fn scale_in(inventory: &Inventory<'_>) -> f64 {
    let is_without = first(inventory).is_some_and(|norm| norm.of.as_deref() != Some("reduced"));
    let mut scales = inventory.declared.values().filter_map(|own| own.loss_scale);
    scales.next().filter(|_| is_without).unwrap_or(1.0)
}

/// The shares of the sum of these parts; none where rounding explains it, as where wrong parts
/// cancel: a share of what is left says nothing. Ranks may hold boxes of the same parameters that
/// are wrong in several ways, which are told as one.
fn shares(parts: Vec<(String, f64)>, apart: f64) -> Vec<(String, f64)> {
    let gap: f64 = parts.iter().map(|(_, part)| part).sum();
    if !(gap.abs() > apart && gap.is_finite()) {
        return Vec::new();
    }
    let mut shares: Vec<(String, f64)> = Vec::new();
    for (what, part) in parts {
        match shares.iter_mut().find(|(known, _)| *known == what) {
            Some((_, share)) => *share += part / gap,
            None => shares.push((what, part / gap)),
        }
    }
    shares
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(of: &[(&str, f64)]) -> Vec<(String, f64)> {
        of.iter().map(|(what, part)| (what.to_string(), *part)).collect()
    }

    #[test]
    fn parts_with_one_name_are_one_share() {
        let told = shares(parts(&[("w", 1.0), ("b", -1.0), ("w", 4.0)]), 1e-6);
        assert_eq!(told, parts(&[("w", 1.25), ("b", -0.25)]));
    }

    /// Goal: no share is told of what rounding leaves. Method: parts that cancel but for a
    /// rounding, beside the same that leave more; then parts that are no numbers.
    #[test]
    fn what_rounding_explains_and_what_is_no_number_have_no_shares() {
        let cancelling = |left: f64| parts(&[("w", 3.0), ("b", -3.0 + left)]);
        assert!(shares(cancelling(2f64.powi(-50)), 1e-6).is_empty());
        assert_eq!(shares(cancelling(0.5), 1e-6), parts(&[("w", 6.0), ("b", -5.0)]));
        for wrong in [f64::NAN, f64::INFINITY] {
            assert!(shares(parts(&[("w", wrong), ("b", 1.0)]), 1e-6).is_empty());
        }
        assert!(shares(parts(&[("w", 1.0)]), f64::NAN).is_empty());
    }
}
