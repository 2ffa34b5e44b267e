//! Why a stage diverged: the causes of the catalogue are tried on the dump, and one is
//! named when it brings the captured tensors to what rounding explains.
//!
//! A wrong cause is worse than none: what nothing explains is `unknown`, and what two
//! causes explain equally well is tied.

pub mod catalogue;
pub mod cause;
pub mod causes;
pub mod decide;
pub mod detectors;
pub mod evidence;
mod found;
mod own;
pub mod rearranged;
mod sample;
pub mod search;
pub mod worlds;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::replay::forward_cache::ForwardCache;
use crate::replay::outcome::Outcome;
use crate::replay::variant::Variant;
use crate::replay::world::World;
use catalogue::CATALOGUE;
use cause::Cause;
use decide::{CLEAR, Decision, cover, decide};
use evidence::{Evidence, Key, residuals};
use found::unknown;
pub use found::{Found, Standing};
pub use own::VariantStage;
use search::{Search, Tried};

/// Hypotheses that a second cause is sought beside.
const PARTNERS: usize = 6;
/// A partner of a composite must remove this share of the energy beyond the floor.
const PARTIAL: f64 = 0.2;

/// How every stage of every variant came out.
pub fn variants(
    step: &HeadStep<'_>,
    variants: &[Arc<Variant>],
) -> Result<Vec<VariantStage>, StepError> {
    let all: Vec<Vec<VariantStage>> =
        variants.iter().map(|one| own::judge(step, one)).collect::<Result<_, _>>()?;
    Ok(all.concat())
}

/// Names the causes of a divergence; empty when nothing diverged. Variants are tried
/// beside the catalogue.
pub fn diagnose(
    step: &HeadStep<'_>,
    outcome: &Outcome,
    variants: &[Arc<Variant>],
) -> Result<Vec<Found>, StepError> {
    let own: Vec<own::Own> = variants.iter().cloned().map(own::Own).collect();
    let mut catalogue: Vec<&dyn Cause> = CATALOGUE.to_vec();
    catalogue.extend(own.iter().map(|one| one as &dyn Cause));
    let catalogue = &catalogue[..];
    let failing: Vec<Stage> = stages(outcome, |_| true);
    let diverged = outcome.first_divergence().is_some();
    if !diverged && step.unusable.is_empty() {
        return Ok(Vec::new());
    }
    let inputs: Vec<MicrobatchInputs> =
        step.microbatches.iter().map(|&mb| step.inputs(mb)).collect::<Result<_, _>>()?;
    let compared: BTreeSet<Stage> = failing.into_iter().collect();
    let cache = ForwardCache::default();
    let search = Search {
        step,
        compared,
        rows: sample::rows(outcome, &inputs),
        few: sample::few(outcome, &inputs),
        cache,
    };
    let base = match &search.rows {
        Some(_) => search.residuals(&[]).unwrap_or_else(|| residuals(outcome)),
        None => residuals(outcome),
    };
    let mut evidence = Evidence::new(step, outcome, &inputs, base, Vec::new()).searched_by(&search);
    let fails = |(_, of): &(&Key, &evidence::Residual)| !of.passes;
    let failing = evidence.whole.iter().filter(fails).map(|(&key, _)| key).collect();
    evidence.failing = failing;
    let mut seen = found::observed(catalogue, &evidence);
    let of_seen = |key: &Key| seen.iter().any(|one| one.stages.contains(&key.stage.name()));
    evidence.failing.retain(|key| !of_seen(key));
    if evidence.failing.is_empty() && !(seen.is_empty() && diverged) {
        return Ok(seen);
    }
    seen.extend(computed(&search, catalogue, &evidence));
    Ok(seen)
}

/// The causes that emulation finds.
fn computed(search: &Search<'_>, catalogue: &[&dyn Cause], evidence: &Evidence<'_>) -> Vec<Found> {
    if evidence.failing.is_empty() {
        return vec![unknown(evidence, &[])];
    }
    let mut tried = search.all(catalogue, evidence);
    while let Some(decision) = decide(&tried, &evidence.failing) {
        let again: Vec<usize> =
            decision.winners.iter().copied().filter(|&at| !tried[at].full).collect();
        if search.rows.is_none() || again.is_empty() {
            return found::of_decision(&tried, &decision, &evidence.failing, evidence);
        }
        // What a sample accepts must hold for all rows.
        again.iter().for_each(|&at| search.confirm(&mut tried[at], evidence));
    }
    if let Some(parts) = cover(&tried, &evidence.failing) {
        let of = |(keys, decision): &(BTreeSet<Key>, Decision)| {
            found::of_decision(&tried, decision, keys, evidence)
        };
        return parts.iter().flat_map(of).collect();
    }
    let stacked = stacked(search, catalogue, &tried, evidence);
    stacked.unwrap_or_else(|| vec![unknown(evidence, &tried)])
}

/// Stages with comparisons.
fn stages(outcome: &Outcome, wanted: impl Fn(Stage) -> bool) -> Vec<Stage> {
    let compared = outcome.stages.iter().filter(|one| !one.comparisons.is_empty());
    compared.map(|one| one.stage).filter(|&stage| wanted(stage)).collect()
}

/// Two causes in one comparison: the second explains what the first leaves.
fn stacked<'a>(
    search: &'a Search<'a>,
    catalogue: &[&dyn Cause],
    tried: &'a [Tried<'_>],
    evidence: &Evidence<'a>,
) -> Option<Vec<Found>> {
    let before = search::left_of(&evidence.residuals, &evidence.failing);
    let floor = evidence.failing.len() as f64;
    let mut partners: Vec<&Tried<'_>> = tried
        .iter()
        .filter(|one| before - one.left > PARTIAL * (before - floor).max(0.0))
        .collect();
    partners.sort_by(|a, b| a.left.total_cmp(&b.left));
    partners.truncate(PARTNERS);
    let mut best: Option<(f64, Vec<Found>)> = None;
    let mut pairs: Vec<[&str; 2]> = Vec::new();
    for first in partners {
        let world: &dyn World = &*first.hypothesis.world;
        let mut inner = Evidence::new(
            evidence.step,
            evidence.outcome,
            evidence.inputs,
            first.residuals.clone(),
            vec![world],
        )
        .searched_by(search);
        // What passes as declared need not pass in the first cause's world too.
        inner.failing.retain(|key| evidence.failing.contains(key));
        let second = search.all(catalogue, &inner);
        let other = |one: &Tried<'_>| one.cause.id() != first.cause.id();
        let second: Vec<Tried<'_>> = second.into_iter().filter(other).collect();
        let Some(decision) = decide(&second, &inner.failing) else { continue };
        // A second cause explains little, and little is explained by many: it is believed
        // when nothing else comes near.
        if decision.winners.len() > 1 || decision.next.is_some_and(|(_, by)| by < CLEAR) {
            continue;
        }
        let winner = &second[decision.winners[0]];
        let worlds = [world, &*winner.hypothesis.world];
        if search.rows.is_some() && !search.holds(&worlds, &inner.failing) {
            continue;
        }
        let left = winner.left_of(&evidence.failing);
        let mut ids = [first.cause.id(), second[decision.winners[0]].cause.id()];
        ids.sort_unstable();
        if pairs.contains(&ids) {
            continue; // The same two the other way round.
        }
        pairs.push(ids);
        if best.as_ref().is_none_or(|(of, _)| left < *of) {
            let mut all = vec![found::partner(first, left, evidence)];
            all.extend(found::of_decision(&second, &decision, &inner.failing, &inner));
            best = Some((left, all));
        }
    }
    best.map(|(_, found)| found)
}
