//! Why a stage diverged. Each cause of the catalogue is tried on the dump; it is named when, with
//! that cause in the reference, the captured tensors differ from it by no more than rounding
//! explains.
//!
//! A wrong cause is worse than none: a divergence that no cause explains is `unknown`, and two
//! causes that explain it equally well are tied.
//!
//! The words of this module: a *world* is a hypothesis about the job in executable form, hooks that
//! change a replay ([`World`]). A *trial* is a replay in a world, judged by the same bounds as the
//! declared head; the *background* of a trial are the worlds that are in force already. A *unit* is
//! the set of tokens of one microbatch whose gradients were summed before anything was recorded:
//! one rank's, or all. A *comparison* is one stage of one unit, captured against reference, and a
//! [`Key`] names it. Its *energy* is the sum of the squared errors, its *floor* the energy that
//! rounding is expected to cause. A world *explains* a comparison that fails as declared and passes
//! in that world. A *glance* is a trial over about 24 rows, which dismisses hopeless hypotheses
//! cheaply.
//!
//! [`World`]: crate::replay::world::World

pub mod budget;
pub mod catalogue;
pub mod cause;
mod cause_pairs;
pub mod causes;
pub mod counterevidence;
pub mod data_worlds;
pub mod decision;
mod declarations;
pub mod detectors;
pub mod evidence;
mod findings;
mod localized;
mod proof;
mod sample;
pub mod search;
mod user_variants;
mod without_parts;
pub mod worlds;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::head::step::StepError;
use crate::head::{HeadStep, MicrobatchInputs, Stage};
use crate::replay::outcome::{NotChecked, Outcome, StageOutcome};
use crate::replay::variant::Variant;
use budget::Meter;
pub use budget::{Budget, Causes};
use catalogue::CATALOGUE;
use cause::{Cause, Effort};
use cause_pairs::pairs_of_causes;
use counterevidence::Part;
use decision::{Decision, cover, decide};
use declarations::Suspect;
use evidence::{Evidence, Key, residuals};
use findings::unknown;
pub use findings::{CauseReport, StageResidual, Standing};
use proof::Proof;
use search::{Search, Tried};
use user_variants::UserVariant;
pub use user_variants::VariantStage;

/// Judges every stage that the user's variants compute.
pub fn variants(
    step: &HeadStep<'_>,
    variants: &[Arc<Variant>],
) -> Result<Vec<VariantStage>, StepError> {
    let judged: Vec<Vec<VariantStage>> = variants
        .iter()
        .map(|variant| user_variants::judge(step, variant))
        .collect::<Result<_, _>>()?;
    Ok(judged.concat())
}

/// Names the causes of a divergence; empty when nothing diverged. The user's variants are tried as
/// the catalogue's causes are. Where undeclared roundings widen a bound so that a fault passes, and
/// a cause reproduces its errors, that comparison becomes a divergence of `outcome`.
/// `outcome.not_checked` lists the causes for which the budget did not suffice.
pub fn diagnose(
    step: &HeadStep<'_>,
    outcome: &mut Outcome,
    variants: &[Arc<Variant>],
    budget: &Budget<'_>,
) -> Result<Vec<CauseReport>, StepError> {
    // The search needs every input. It would read those that are lacking as zeros, and might name a
    // cause for the errors that these zeros make.
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
    let user_causes: Vec<UserVariant> = variants.iter().cloned().map(UserVariant).collect();
    let mut catalogue: Vec<&dyn Cause> = CATALOGUE.to_vec();
    catalogue.extend(user_causes.iter().map(|variant| variant as &dyn Cause));
    let (examined, left_out) = examine(step, outcome, &catalogue, budget)?;
    outcome.not_checked.extend(left_out);
    Ok(match examined {
        Examined::Diverged(findings, suspect) => reported(outcome, findings, suspect),
        Examined::Hidden(proof) => proof.map_or(Vec::new(), |proof| proof.into_causes(outcome)),
        Examined::Cleared(keys) => {
            keys.iter().for_each(|key| outcome.cleared(key.stage, (key.microbatch, key.rank)));
            Vec::new()
        }
    })
}

/// The causes to report. Where another declaration of the head explains the divergence, `outcome`
/// gets it, and the causes that it makes superfluous are dropped.
fn reported(
    outcome: &mut Outcome,
    mut causes: Vec<CauseReport>,
    suspect: Option<Suspect>,
) -> Vec<CauseReport> {
    if let Some(suspect) = suspect {
        // `upstream-factor` says that no count gives the factor; here the declaration gives it. A
        // cause that explains only some of the stages is dropped beside an option that explains
        // all.
        let known = |cause: &CauseReport| {
            cause.standing == Standing::Unknown || suspect.is_no_more_than(cause)
        };
        causes.retain(|cause| cause.id != causes::upstream_factor::ID && known(cause));
        let explained = causes.iter().any(|cause| cause.standing != Standing::Unknown);
        // The declaration explains the divergence, so it is not `unknown`.
        causes.retain(|cause| cause.standing != Standing::Unknown);
        if let [alone] = &mut causes[..] {
            alone.standing = Standing::Named;
        }
        outcome.other_declaration = Some(suspect.finding(explained));
    }
    causes
}

/// Causes that show in ranks holding different versions of one replicated tensor.
const OF_VERSIONS: [&str; 4] = [
    "silent-corruption",
    "sync-wrong-microbatch",
    "partial-not-reduced",
    causes::replica_divergence::ID,
];

/// Causes that explain why replicas of a tensor differ from rank to rank.
pub struct Versions(Vec<CauseReport>);

impl Versions {
    /// Looks for them in the step with the tensors of all ranks. `outcome`: the comparisons of
    /// every version.
    pub fn of(step: &HeadStep<'_>, outcome: &Outcome) -> Result<Versions, StepError> {
        of_versions(step, outcome).map(Versions)
    }

    /// Whether one of these causes explains every stage that fails in one version. That version is
    /// then not searched: each of many ranks may hold its own, and one search for each would be
    /// slow.
    pub fn explain_all_of(&self, outcome: &Outcome) -> bool {
        let fails = |stage: &&StageOutcome| {
            stage.comparisons.iter().any(|comparison| comparison.excess.is_some())
        };
        let failing: Vec<&str> =
            outcome.stages.iter().filter(fails).map(|stage| stage.stage.name()).collect();
        !failing.is_empty() && self.0.iter().any(|cause| explains(cause, &failing))
    }

    /// These causes, followed by those found in single versions that these do not explain.
    pub fn with(self, causes: Vec<CauseReport>) -> Vec<CauseReport> {
        let Versions(mut all) = self;
        let said = |cause: &CauseReport| {
            all.iter().any(|of| of.id == cause.id || explains(of, &cause.stages))
        };
        let more: Vec<CauseReport> = causes.into_iter().filter(|cause| !said(cause)).collect();
        all.extend(more);
        all
    }
}

/// Whether a cause explains the divergence of all these stages. `replica-divergence` does not: that
/// ranks hold different bits says nothing about which of them is wrong.
fn explains(cause: &CauseReport, stages: &[&str]) -> bool {
    cause.id != causes::replica_divergence::ID
        && stages.iter().all(|stage| cause.stages.contains(stage))
}

fn of_versions(step: &HeadStep<'_>, outcome: &Outcome) -> Result<Vec<CauseReport>, StepError> {
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
    Ok(findings::observed(&known, &evidence))
}

/// What the search finds.
enum Examined {
    /// The causes of the divergence, if there is one, and another declaration with which nothing
    /// would diverge.
    Diverged(Vec<CauseReport>, Option<Suspect>),
    /// A fault in a head of which every comparison passes.
    Hidden(Option<Proof>),
    /// These comparisons fail, but a plausible rounding policy reproduces their errors: the bounds
    /// were too narrow, and there is no fault.
    Cleared(BTreeSet<Key>),
}

/// Up to this many multiply-adds of one GEMM over all microbatches, starting threads takes longer
/// than a trial.
const SMALL: u64 = 1 << 22;

/// Runs a search in a pool of one thread where its trials are small. Otherwise runs it on a thread
/// of the global pool: a caller outside the pool would have to hand over each piece of work and
/// wait for it.
fn in_few_threads<R: Send>(inputs: &[MicrobatchInputs], run: impl FnOnce() -> R + Send) -> R {
    match rayon::ThreadPoolBuilder::new().num_threads(1).build() {
        Ok(pool) if sample::work(inputs).0 <= SMALL => pool.install(run),
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
    let subject = (step, outcome, &inputs[..], &meter);
    let examined = in_few_threads(&inputs, || run_search(subject, catalogue, (diverged, open)));
    Ok((examined, meter.not_checked(budget.causes)))
}

fn run_search(
    (step, outcome, inputs, meter): (&HeadStep<'_>, &Outcome, &[MicrobatchInputs], &Meter<'_>),
    catalogue: &[&dyn Cause],
    (diverged, open): (bool, BTreeSet<Key>),
) -> Examined {
    // Where nothing diverged, only the rounding policy is looked for, and sums of gradients over
    // microbatches and ranks say nothing about it.
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
    let fails = |(_, residual): &(&Key, &evidence::Residual)| !residual.passes;
    let failing = evidence.whole.iter().filter(fails).map(|(&key, _)| key).collect();
    evidence.failing = failing;
    if !diverged && step.unusable.is_empty() {
        evidence.failing = open;
        let prove = |of: &[&dyn Cause]| proof::prove(&search, of, &evidence);
        return Examined::Hidden(search_and_lend_rest(meter, catalogue, prove, Option::is_none));
    }
    if diverged && step.unusable.is_empty() && proof::cleared(&search, &evidence) {
        return Examined::Cleared(evidence.failing);
    }
    let suspect = declarations::suspect(&search, &evidence);
    let mut observed = findings::observed(catalogue, &evidence);
    let is_observed =
        |key: &Key| observed.iter().any(|cause| cause.stages.contains(&key.stage.name()));
    evidence.failing.retain(|key| !is_observed(key));
    if evidence.failing.is_empty() && !(observed.is_empty() && diverged) {
        return Examined::Diverged(observed, suspect);
    }
    let is_unknown =
        |all: &Vec<CauseReport>| all.iter().all(|cause| cause.standing == Standing::Unknown);
    let compute = |of: &[&dyn Cause]| found_by_trials(&search, of, &evidence);
    let computed_causes = match &suspect {
        // Only the cheap causes are tried: all those that could be mistaken for such an option are
        // among them.
        Some(suspect) if suspect.is_enough() => {
            let cheap = catalogue.iter().copied().filter(|cause| cause.effort() == Effort::Little);
            compute(&cheap.collect::<Vec<_>>())
        }
        _ => search_and_lend_rest(meter, catalogue, compute, is_unknown),
    };
    observed.extend(computed_causes);
    Examined::Diverged(observed, suspect)
}

/// Searches the catalogue. If it finds nothing, the unspent rest of the budget goes to the causes
/// that had run out of their share, and those are tried once more.
fn search_and_lend_rest<T>(
    meter: &Meter<'_>,
    catalogue: &[&dyn Cause],
    search: impl Fn(&[&dyn Cause]) -> T,
    is_nothing: impl Fn(&T) -> bool,
) -> T {
    let first = search(catalogue);
    let again = if is_nothing(&first) { meter.lend_rest() } else { BTreeSet::new() };
    if again.is_empty() {
        return first;
    }
    let cut_off = catalogue.iter().copied().filter(|cause| again.contains(cause.id()));
    let more = search(&cut_off.collect::<Vec<_>>());
    if is_nothing(&more) { first } else { more }
}

/// The causes that are found by trying their worlds, in contrast to those that are observed.
fn found_by_trials(
    search: &Search<'_>,
    catalogue: &[&dyn Cause],
    evidence: &Evidence<'_>,
) -> Vec<CauseReport> {
    let failing = &evidence.failing;
    if failing.is_empty() {
        return vec![unknown(evidence, &[], failing)];
    }
    if proof::is_marginal(evidence, failing) {
        let proof = proof::prove(search, catalogue, evidence);
        let proof = proof.filter(|proof| proof.keys.is_superset(failing));
        return proof.map_or_else(|| vec![findings::unproved(evidence)], |proof| proof.causes);
    }
    let mut tried = search.all(catalogue, evidence);
    if let Some(causes) = one_cause(search, &mut tried, failing, evidence) {
        return causes;
    }
    let marginal = |(keys, _): &(BTreeSet<Key>, Decision)| proof::is_marginal(evidence, keys);
    if let Some(parts) = cover(&tried, failing).filter(|parts| !parts.iter().any(marginal)) {
        let findings_of = |(keys, decision): &(BTreeSet<Key>, Decision)| {
            findings::of_decision(&tried, decision, keys, evidence)
        };
        return parts.iter().flat_map(findings_of).collect();
    }
    let pairs = pairs_of_causes(search, catalogue, &tried, evidence);
    pairs.unwrap_or_else(|| head_and_sums_apart(search, &mut tried, evidence))
}

/// The one cause, or the several tied ones, that explain all of these failing comparisons.
fn one_cause(
    search: &Search<'_>,
    tried: &mut [Tried<'_>],
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> Option<Vec<CauseReport>> {
    loop {
        let decision = decide(tried, keys)?;
        let sampled_only: Vec<usize> =
            decision.winners.iter().copied().filter(|&index| !tried[index].full).collect();
        if search.rows.is_none() || sampled_only.is_empty() {
            return Some(findings::of_decision(tried, &decision, keys, evidence));
        }
        // A winner on the sampled rows must also pass on all rows.
        sampled_only.iter().for_each(|&index| search.confirm(&mut tried[index], evidence));
    }
}

/// Decides the head's stages and the sums over microbatches and ranks separately. The reference of
/// a sum is made of the captured gradients, so a fault in one group does not affect the other, and
/// an unknown cause in one must not hide a known cause in the other.
fn head_and_sums_apart(
    search: &Search<'_>,
    tried: &mut [Tried<'_>],
    evidence: &Evidence<'_>,
) -> Vec<CauseReport> {
    let (sums, head): (BTreeSet<Key>, BTreeSet<Key>) =
        evidence.failing.iter().copied().partition(|key| key.stage.is_sum());
    let nans =
        |key: &Key| evidence.residuals.get(key).is_some_and(|or_in_part| or_in_part.nonfinite > 0);
    // A NaN in the head's gradients makes every sum of them NaN, whether the sum itself was taken
    // rightly or not.
    if head.iter().any(nans) {
        return vec![unknown(evidence, tried, &evidence.failing)];
    }
    if sums.is_empty() || head.is_empty() {
        let causes = in_part(search, tried, &evidence.failing, evidence);
        return causes.unwrap_or_else(|| vec![unknown(evidence, tried, &evidence.failing)]);
    }
    let mut cause_of = |keys| one_cause(search, tried, keys, evidence);
    let each = [(cause_of(&head), &head), (cause_of(&sums), &sums)];
    if each.iter().all(|(causes, _)| causes.is_none()) {
        return vec![unknown(evidence, tried, &evidence.failing)];
    }
    let or_in_part = |(causes, keys): (Option<Vec<CauseReport>>, &BTreeSet<Key>)| {
        let causes = causes.or_else(|| in_part(search, tried, keys, evidence));
        causes.unwrap_or_else(|| vec![unknown(evidence, tried, keys)])
    };
    each.into_iter().flat_map(or_in_part).collect()
}

/// Sets of gradients that one cause may explain while the rest stays unknown.
const SIDES: [&[Part]; 3] = [&[Part::Plane, Part::OfQ, Part::OfK], &[Part::OfK], &[Part::OfQ]];

/// A cause that removes nearly all of the error from one of the `SIDES`, followed by `unknown` for
/// the other failing comparisons.
fn in_part(
    search: &Search<'_>,
    tried: &mut [Tried<'_>],
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> Option<Vec<CauseReport>> {
    SIDES.iter().find_map(|side| {
        let on_side = |key: &&Key| side.contains(&Part::of(key.stage));
        let explained_keys: BTreeSet<Key> = keys.iter().filter(on_side).copied().collect();
        let rest: BTreeSet<Key> = keys.difference(&explained_keys).copied().collect();
        let before = search::left_of(&evidence.residuals, &explained_keys);
        let settles = |trial: &Tried<'_>| {
            // If some causes could not be tried, a hypothesis with any fitted number is not
            // believed here.
            let most_fitted = if search.meter.is_spent() { 0 } else { BOUGHT };
            let overfitted = !trial.hypothesis.per_token && trial.hypothesis.fitted > most_fitted;
            !overfitted
                && trial.explains.is_superset(&explained_keys)
                && search::SETTLED * trial.left_of(&explained_keys) <= before
        };
        if explained_keys.is_empty() || rest.is_empty() || !tried.iter().any(settles) {
            return None;
        }
        let mut findings = one_cause(search, tried, &explained_keys, evidence)?;
        findings.push(unknown(evidence, tried, &rest));
        Some(findings)
    })
}

/// A hypothesis with more fitted numbers than this is not believed to explain one side while
/// another cause is unknown.
const BOUGHT: usize = 2;

/// The stages that were compared, of those that are wanted.
fn stages(outcome: &Outcome, wanted: impl Fn(Stage) -> bool) -> Vec<Stage> {
    let compared = outcome.stages.iter().filter(|judged| !judged.comparisons.is_empty());
    compared.map(|judged| judged.stage).filter(|&stage| wanted(stage)).collect()
}
