//! Why a stage diverged: the causes of the catalogue are tried on the dump, and one is
//! named when it brings the captured tensors to what rounding explains.
//!
//! A wrong cause is worse than none: what nothing explains is `unknown`, and what two
//! causes explain equally well is tied.

pub mod against;
pub mod budget;
pub mod catalogue;
pub mod cause;
pub mod causes;
pub mod decide;
mod declarations;
pub mod detectors;
pub mod evidence;
mod found;
mod limited;
mod own;
mod plain;
mod proof;
pub mod rearranged;
mod sample;
pub mod search;
pub mod worlds;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::replay::outcome::{NotChecked, Outcome, StageOutcome};
use crate::replay::variant::Variant;
use crate::replay::world::World;
use against::Part;
use budget::Meter;
pub use budget::{Budget, Causes};
use catalogue::CATALOGUE;
use cause::{Cause, Effort};
use decide::{CLEAR, Decision, cover, decide};
use declarations::Suspect;
use evidence::{Evidence, Key, residuals};
use found::unknown;
pub use found::{Found, StageResidual, Standing};
pub use own::VariantStage;
use proof::Proof;
use search::{Search, Tried};

/// Hypotheses that a second cause is sought beside.
const PARTNERS: usize = 6;
/// The same of those that explain some comparisons and make others worse.
const EXPLAINING: usize = 2;
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

/// Names the causes of a divergence; empty when nothing diverged. What undeclared roundings
/// hide and a cause reproduces becomes a divergence of the outcome. Variants are tried
/// beside the catalogue. What could not be tried within the budget is said in the outcome.
pub fn diagnose(
    step: &HeadStep<'_>,
    outcome: &mut Outcome,
    variants: &[Arc<Variant>],
    budget: &Budget<'_>,
) -> Result<Vec<Found>, StepError> {
    // A search reads every input: what it would find of zeros in their place is no cause.
    if !step.lacking.is_nothing() {
        if outcome.first_divergence().is_some() {
            let (what, why) =
                ("why it diverged".into(), "the search needs every input of the step".into());
            outcome.not_checked.push(NotChecked { what, why });
        }
        return Ok(Vec::new());
    }
    if budget.causes == Causes::None {
        return Ok(Vec::new());
    }
    let own: Vec<own::Own> = variants.iter().cloned().map(own::Own).collect();
    let mut catalogue: Vec<&dyn Cause> = CATALOGUE.to_vec();
    catalogue.extend(own.iter().map(|one| one as &dyn Cause));
    let (examined, left_out) = examine(step, outcome, &catalogue, budget)?;
    outcome.not_checked.extend(left_out);
    Ok(match examined {
        Examined::Diverged(found, suspect) => told(outcome, found, suspect),
        Examined::Hidden(proof) => proof.map_or(Vec::new(), |proof| proof.told(outcome)),
        Examined::Cleared(keys) => {
            keys.iter().for_each(|key| outcome.cleared(key.stage, (key.microbatch, key.rank)));
            Vec::new()
        }
    })
}

/// The causes, and in the outcome the declaration that explains as much.
fn told(outcome: &mut Outcome, mut found: Vec<Found>, suspect: Option<Suspect>) -> Vec<Found> {
    if let Some(suspect) = suspect {
        // The declaration gives the factor, so it is not one that nothing explains. A cause of some
        // stages is left out beside an option that explains all of them.
        let known = |one: &Found| one.standing == Standing::Unknown || suspect.is_no_more_than(one);
        found.retain(|one| one.id != causes::upstream_factor::ID && known(one));
        let explained = found.iter().any(|one| one.standing != Standing::Unknown);
        // Something does explain it.
        found.retain(|one| one.standing != Standing::Unknown);
        if let [alone] = &mut found[..] {
            alone.standing = Standing::Named;
        }
        outcome.other_declaration = Some(suspect.told(explained));
    }
    found
}

/// Causes that several versions of one tensor show.
const OF_VERSIONS: [&str; 4] = [
    "silent-corruption",
    "sync-wrong-microbatch",
    "partial-not-reduced",
    causes::replica_divergence::ID,
];

/// Where the versions of tensors come from on which replicas disagree.
pub struct Versions(Vec<Found>);

impl Versions {
    /// Of the step as all ranks hold it; `outcome`: what was found of every version.
    pub fn of(step: &HeadStep<'_>, outcome: &Outcome) -> Result<Versions, StepError> {
        of_versions(step, outcome).map(Versions)
    }

    /// Whether one of them explains all that fails in one version: nothing is then looked for
    /// there, as each of many ranks may hold a version of its own.
    pub fn explain_all_of(&self, outcome: &Outcome) -> bool {
        let fails =
            |stage: &&StageOutcome| stage.comparisons.iter().any(|one| one.excess.is_some());
        let failing: Vec<&str> =
            outcome.stages.iter().filter(fails).map(|stage| stage.stage.name()).collect();
        !failing.is_empty() && self.0.iter().any(|of| explains(of, &failing))
    }

    /// All causes: these, and those of single versions that they do not explain.
    pub fn with(self, causes: Vec<Found>) -> Vec<Found> {
        let Versions(mut all) = self;
        let said =
            |cause: &Found| all.iter().any(|of| of.id == cause.id || explains(of, &cause.stages));
        let more: Vec<Found> = causes.into_iter().filter(|cause| !said(cause)).collect();
        all.extend(more);
        all
    }
}

/// Whether where versions come from explains what is wrong with some stages. That ranks hold other
/// bits says nothing of what any of them should hold.
fn explains(of: &Found, stages: &[&str]) -> bool {
    of.id != causes::replica_divergence::ID && stages.iter().all(|stage| of.stages.contains(stage))
}

fn of_versions(step: &HeadStep<'_>, outcome: &Outcome) -> Result<Vec<Found>, StepError> {
    let step = &step.holding();
    let inputs: Vec<MicrobatchInputs> =
        step.microbatches.iter().map(|&mb| step.inputs(mb)).collect::<Result<_, _>>()?;
    let meter = Meter::new(&Budget::default(), outcome);
    let search = Search {
        step,
        compared: stages(outcome, |_| true).into_iter().collect(),
        rows: sample::rows(outcome, &inputs),
        few: sample::few(outcome, &inputs),
        cache: Arc::default(),
        meter: &meter,
    };
    let base = residuals(outcome);
    let evidence = Evidence::new(step, outcome, &inputs, base, Vec::new()).searched_by(&search);
    let known = CATALOGUE.iter().copied().filter(|cause| OF_VERSIONS.contains(&cause.id()));
    let known: Vec<&dyn Cause> = known.collect();
    Ok(found::observed(&known, &evidence))
}

/// What an examination of an outcome finds.
enum Examined {
    /// Why it diverged, if it did, and the declaration with which it would not.
    Diverged(Vec<Found>, Option<Suspect>),
    /// A fault of a head that passes.
    Hidden(Option<Proof>),
    /// It leaves its bounds, and a plausible policy errs as it does: the bounds are wrong.
    Cleared(BTreeSet<Key>),
}

/// Multiply-adds of one GEMM over all microbatches up to which a trial takes less time than
/// its threads take to wake each other.
const SMALL: u64 = 1 << 22;

/// Runs a search in one thread where its trials are small, else in one of the threads that share
/// its work: from outside each piece of work would be handed over and waited for.
fn in_few_threads<R: Send>(inputs: &[MicrobatchInputs], run: impl FnOnce() -> R + Send) -> R {
    match rayon::ThreadPoolBuilder::new().num_threads(1).build() {
        Ok(one) if sample::work(inputs).0 <= SMALL => one.install(run),
        _ => rayon::scope(|_| run()),
    }
}

fn examine(
    step: &HeadStep<'_>,
    outcome: &Outcome,
    catalogue: &[&dyn Cause],
    budget: &Budget<'_>,
) -> Result<(Examined, Option<NotChecked>), StepError> {
    let diverged = outcome.first_divergence().is_some();
    let open = proof::open(outcome);
    if !diverged && step.unusable.is_empty() && open.is_empty() {
        return Ok((Examined::Diverged(Vec::new(), None), None));
    }
    let step = &step.holding();
    let inputs: Vec<MicrobatchInputs> =
        step.microbatches.iter().map(|&mb| step.inputs(mb)).collect::<Result<_, _>>()?;
    let meter = Meter::new(budget, outcome);
    let of = (step, outcome, &inputs[..], &meter);
    let found = in_few_threads(&inputs, || searched(of, catalogue, (diverged, open)));
    Ok((found, meter.said(budget.causes)))
}

fn searched(
    (step, outcome, inputs, meter): (&HeadStep<'_>, &Outcome, &[MicrobatchInputs], &Meter<'_>),
    catalogue: &[&dyn Cause],
    (diverged, open): (bool, BTreeSet<Key>),
) -> Examined {
    // What passes is asked for its roundings: sums of it say nothing of those.
    let compared: BTreeSet<Stage> =
        stages(outcome, |stage| diverged || !stage.is_sum()).into_iter().collect();
    let cache = outcome.passes.0.clone();
    let search = Search {
        step,
        compared,
        rows: sample::rows(outcome, inputs),
        few: sample::few(outcome, inputs),
        cache,
        meter,
    };
    let base = match &search.rows {
        Some(_) => search.residuals(&[]).unwrap_or_else(|| residuals(outcome)),
        None => residuals(outcome),
    };
    let mut evidence = Evidence::new(step, outcome, inputs, base, Vec::new()).searched_by(&search);
    let fails = |(_, of): &(&Key, &evidence::Residual)| !of.passes;
    let failing = evidence.whole.iter().filter(fails).map(|(&key, _)| key).collect();
    evidence.failing = failing;
    if !diverged && step.unusable.is_empty() {
        evidence.failing = open;
        let prove = |of: &[&dyn Cause]| proof::prove(&search, of, &evidence);
        return Examined::Hidden(twice(meter, catalogue, prove, Option::is_none));
    }
    if diverged && step.unusable.is_empty() && proof::cleared(&search, &evidence) {
        return Examined::Cleared(evidence.failing);
    }
    let suspect = declarations::suspect(&search, &evidence);
    let mut seen = found::observed(catalogue, &evidence);
    let of_seen = |key: &Key| seen.iter().any(|one| one.stages.contains(&key.stage.name()));
    evidence.failing.retain(|key| !of_seen(key));
    if evidence.failing.is_empty() && !(seen.is_empty() && diverged) {
        return Examined::Diverged(seen, suspect);
    }
    let is_unknown = |all: &Vec<Found>| all.iter().all(|one| one.standing == Standing::Unknown);
    let compute = |of: &[&dyn Cause]| computed(&search, of, &evidence);
    let found = match &suspect {
        // The causes that such an option may be mistaken for take little effort: only those are
        // tried.
        Some(suspect) if suspect.is_enough() => {
            let soon = catalogue.iter().copied().filter(|one| one.effort() == Effort::Little);
            compute(&soon.collect::<Vec<_>>())
        }
        _ => twice(meter, catalogue, compute, is_unknown),
    };
    seen.extend(found);
    Examined::Diverged(seen, suspect)
}

/// What a search of a catalogue finds. Where it is nothing, what was not needed is lent to the
/// causes that had to end before they had seen all.
fn twice<T>(
    meter: &Meter<'_>,
    catalogue: &[&dyn Cause],
    search: impl Fn(&[&dyn Cause]) -> T,
    is_nothing: impl Fn(&T) -> bool,
) -> T {
    let found = search(catalogue);
    let again = if is_nothing(&found) { meter.lends() } else { BTreeSet::new() };
    if again.is_empty() {
        return found;
    }
    let of = catalogue.iter().copied().filter(|cause| again.contains(cause.id()));
    let more = search(&of.collect::<Vec<_>>());
    if is_nothing(&more) { found } else { more }
}

/// The causes that emulation finds.
fn computed(search: &Search<'_>, catalogue: &[&dyn Cause], evidence: &Evidence<'_>) -> Vec<Found> {
    let failing = &evidence.failing;
    if failing.is_empty() {
        return vec![unknown(evidence, &[], failing)];
    }
    if proof::is_marginal(evidence, failing) {
        let proof = proof::prove(search, catalogue, evidence);
        let proof = proof.filter(|proof| proof.of.is_superset(failing));
        return proof.map_or_else(|| vec![found::unproved(evidence)], |proof| proof.found);
    }
    let mut tried = search.all(catalogue, evidence);
    if let Some(found) = alone(search, &mut tried, failing, evidence) {
        return found;
    }
    let marginal = |(keys, _): &(BTreeSet<Key>, Decision)| proof::is_marginal(evidence, keys);
    if let Some(parts) = cover(&tried, failing).filter(|parts| !parts.iter().any(marginal)) {
        let of = |(keys, decision): &(BTreeSet<Key>, Decision)| {
            found::of_decision(&tried, decision, keys, evidence)
        };
        return parts.iter().flat_map(of).collect();
    }
    let stacked = stacked(search, catalogue, &tried, evidence);
    stacked.unwrap_or_else(|| apart(search, &mut tried, evidence))
}

/// One cause, or several tied, of some failing comparisons.
fn alone(
    search: &Search<'_>,
    tried: &mut [Tried<'_>],
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> Option<Vec<Found>> {
    loop {
        let decision = decide(tried, keys)?;
        let again: Vec<usize> =
            decision.winners.iter().copied().filter(|&at| !tried[at].full).collect();
        if search.rows.is_none() || again.is_empty() {
            return Some(found::of_decision(tried, &decision, keys, evidence));
        }
        // What a sample accepts must hold for all rows.
        again.iter().for_each(|&at| search.confirm(&mut tried[at], evidence));
    }
}

/// The head's stages and the sums after them, each for itself: sums are judged from the
/// addends that were captured, so what is wrong with one says nothing of the other, and
/// that one is not known does not hide the other.
fn apart(search: &Search<'_>, tried: &mut [Tried<'_>], evidence: &Evidence<'_>) -> Vec<Found> {
    let (sums, head): (BTreeSet<Key>, BTreeSet<Key>) =
        evidence.failing.iter().copied().partition(|key| key.stage.is_sum());
    let nans = |key: &Key| evidence.residuals.get(key).is_some_and(|of| of.nonfinite > 0);
    // A sum of what is no number is none: that says nothing of the sum.
    if head.iter().any(nans) {
        return vec![unknown(evidence, tried, &evidence.failing)];
    }
    if sums.is_empty() || head.is_empty() {
        let found = in_part(search, tried, &evidence.failing, evidence);
        return found.unwrap_or_else(|| vec![unknown(evidence, tried, &evidence.failing)]);
    }
    let mut one = |keys| alone(search, tried, keys, evidence);
    let each = [(one(&head), &head), (one(&sums), &sums)];
    if each.iter().all(|(found, _)| found.is_none()) {
        return vec![unknown(evidence, tried, &evidence.failing)];
    }
    let of = |(found, keys): (Option<Vec<Found>>, &BTreeSet<Key>)| {
        let found = found.or_else(|| in_part(search, tried, keys, evidence));
        found.unwrap_or_else(|| vec![unknown(evidence, tried, keys)])
    };
    each.into_iter().flat_map(of).collect()
}

/// Gradients that a cause may explain while something else is not known.
const SIDES: [&[Part]; 3] = [&[Part::Plane, Part::OfQ, Part::OfK], &[Part::OfK], &[Part::OfQ]];

/// A cause of some of the gradients that fail, where it leaves next to nothing of them, and what
/// is not known of the rest.
fn in_part(
    search: &Search<'_>,
    tried: &mut [Tried<'_>],
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> Option<Vec<Found>> {
    SIDES.iter().find_map(|side| {
        let here = |key: &&Key| side.contains(&Part::of(key.stage));
        let of: BTreeSet<Key> = keys.iter().filter(here).copied().collect();
        let rest: BTreeSet<Key> = keys.difference(&of).copied().collect();
        let before = search::left_of(&evidence.residuals, &of);
        let settles = |one: &Tried<'_>| {
            // Beside causes that were not tried a fitted number says nothing of a part.
            let most = if search.meter.is_spent() { 0 } else { BOUGHT };
            let bought = !one.hypothesis.of_both && one.hypothesis.fitted > most;
            !bought && one.explains.is_superset(&of) && search::SETTLED * one.left_of(&of) <= before
        };
        if of.is_empty() || rest.is_empty() || !tried.iter().any(settles) {
            return None;
        }
        let mut found = alone(search, tried, &of, evidence)?;
        found.push(unknown(evidence, tried, &rest));
        Some(found)
    })
}

/// More fitted numbers than these say little where something else is not known.
const BOUGHT: usize = 2;

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
    let partners = partners(tried, evidence);
    let mut pairs: Vec<Pair<'_>> = Vec::new();
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
        let other = |one: &Tried<'_>| one.cause.id() != first.cause.id() && !one.hypothesis.of_both;
        let second: Vec<Tried<'_>> = second.into_iter().filter(other).collect();
        let Some(decision) = decide(&second, &inner.failing) else { continue };
        // A second cause explains little, and little is explained by many: it is believed
        // when nothing else comes near.
        if decision.next.is_some_and(|(_, by)| by < CLEAR) {
            continue;
        }
        let said = found::of_decision(&second, &decision, &inner.failing, &inner);
        for (&at, said) in decision.winners.iter().zip(said) {
            let winner = &second[at];
            let mut ids = [first.cause.id(), winner.cause.id()];
            ids.sort_unstable();
            let worlds = [world, &*winner.hypothesis.world];
            let known = pairs.iter().any(|pair| pair.ids == ids && pair.sure);
            // The same two the other way round, or what a sample accepts and all rows do not.
            if known || search.rows.is_some() && !search.holds(&worlds, &inner.failing) {
                continue;
            }
            // What the first explains is as the first leaves it: the second may be in one
            // gradient alone.
            let done: BTreeSet<Key> =
                evidence.failing.difference(&inner.failing).copied().collect();
            let left = winner.left_of(&inner.failing) + first.left_of(&done);
            let found = vec![found::partner(first, left, evidence), said];
            pairs.push(Pair { ids, left, found, sure: decision.winners.len() == 1 });
        }
    }
    // A pair is not sure beside others that were not tried.
    if search.meter.is_spent() { None } else { best_pairs(pairs) }
}

/// What a second cause is sought beside: whatever takes most of the energy away, and
/// whatever explains most comparisons though it makes others worse.
fn partners<'a, 'c>(tried: &'a [Tried<'c>], evidence: &Evidence<'_>) -> Vec<&'a Tried<'c>> {
    let before = search::left_of(&evidence.residuals, &evidence.failing);
    let floor = evidence.failing.len() as f64;
    let tried = || tried.iter().filter(|one| !one.hypothesis.of_both);
    let takes = |one: &&Tried<'_>| before - one.left > PARTIAL * (before - floor).max(0.0);
    let mut found: Vec<&Tried<'_>> = tried().filter(takes).collect();
    found.sort_by(|a, b| a.left.total_cmp(&b.left));
    found.truncate(PARTNERS);
    let explains = |one: &&Tried<'_>| !takes(one) && !one.explains.is_empty();
    let mut more: Vec<&Tried<'_>> = tried().filter(explains).collect();
    more.sort_by_key(|one| std::cmp::Reverse(one.explains.len()));
    found.extend(more.into_iter().take(EXPLAINING));
    found
}

/// Two causes that together explain everything.
struct Pair<'a> {
    ids: [&'a str; 2],
    left: f64,
    found: Vec<Found>,
    /// Whether no other second cause explains as much beside the first.
    sure: bool,
}

/// The pair that leaves least; of several that leave nearly as little, what not all of them
/// hold is tied.
fn best_pairs(mut pairs: Vec<Pair<'_>>) -> Option<Vec<Found>> {
    pairs.sort_by(|a, b| a.left.total_cmp(&b.left));
    let least = pairs.iter().find(|pair| pair.sure)?.left;
    pairs.retain(|pair| !(pair.left >= CLEAR * least.max(f64::MIN_POSITIVE)));
    let common = |id: &str| pairs.iter().all(|pair| pair.ids.contains(&id));
    let mut all: Vec<Found> = Vec::new();
    for one in pairs.iter().flat_map(|pair| &pair.found) {
        if all.iter().all(|of| of.id != one.id) {
            let standing = if common(&one.id) { one.standing } else { Standing::Tied };
            all.push(Found { standing, ..one.clone() });
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn found(id: &str) -> Found {
        Found {
            id: id.into(),
            standing: Standing::Named,
            explained: 1.0,
            norm_gap_explained: None,
            beats_next_by: None,
            next: None,
            bit_equal: false,
            parameters: BTreeMap::new(),
            stages: Vec::new(),
            residuals: Vec::new(),
            evidence: String::new(),
            advice: String::new(),
        }
    }

    fn pair<'a>(ids: [&'a str; 2], left: f64, sure: bool) -> Pair<'a> {
        Pair { ids, left, found: ids.map(found).into(), sure }
    }

    fn said(pairs: Vec<Pair<'_>>) -> Vec<(String, Standing)> {
        let all = best_pairs(pairs).unwrap_or_default();
        all.into_iter().map(|one| (one.id, one.standing)).collect()
    }

    #[test]
    fn what_not_every_pair_holds_is_tied_and_what_all_hold_is_named() {
        let all = vec![pair(["a", "b"], 1.0, true), pair(["a", "c"], 3.0, false)];
        let wanted = [("a", Standing::Named), ("b", Standing::Tied), ("c", Standing::Tied)];
        assert_eq!(said(all), wanted.map(|(id, standing)| (id.to_string(), standing)));
    }

    #[test]
    fn a_pair_that_leaves_ten_times_more_ties_with_nothing() {
        let all = vec![pair(["a", "c"], 10.0, true), pair(["a", "b"], 1.0, true)];
        assert!(said(all).iter().all(|(_, standing)| *standing == Standing::Named));
    }

    #[test]
    fn pairs_of_which_none_is_sure_are_not_believed() {
        assert_eq!(said(vec![pair(["a", "b"], 1.0, false), pair(["a", "c"], 1.0, false)]), []);
    }
}
