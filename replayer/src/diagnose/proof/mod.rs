//! Faults that undeclared roundings hide, proved by reproducing them.
//!
//! A *policy* says where a head rounds, to which format, and in which order it sums. For a job that
//! does not declare its policy, the bounds allow every plausible rounding at its worst, and a
//! smaller fault passes. But rounding is not noise: a right head that is emulated in the job's own
//! policy has the job's own errors, element by element. So the policy is found first, by emulating
//! the plausible ones. Where one of them leaves a tenth of the energy, the comparison is explained.
//! Where none does, the causes are tried, each together with the policies. A cause that leaves a
//! tenth of what every policy without it leaves, and a tenth of what the cause leaves in f64, has
//! reproduced the job's own rounding errors, which does not happen by chance. Causes that may do no
//! more than round an intermediate value are not tried where the job leaves that rounding open.

mod confirm;
mod fit;

use std::collections::BTreeSet;

use super::cause::{Cause, Hypothesis};
use super::decision::CLEAR;
use super::evidence::{Evidence, Key};
use super::findings::CauseReport;
use super::search::Search;
use crate::head::Roundings;
use crate::head::Stage;
use crate::head::roundings::F32;
use crate::replay::comparison::Comparison;
use crate::replay::outcome::Outcome;
use crate::replay::plausible_policies;
use crate::replay::world::World;
use fit::{Fit, Reproduction, Rounded};

/// Under declared roundings, a comparison with more than this many times the energy of their
/// emulation may hide a fault within its bound. This only selects the comparisons to examine.
const MORE: f64 = 1.1;
/// Where the budget ran out, a fault is still proved if it leaves this many times less energy than
/// any policy without it.
const DECISIVE: f64 = 1e6;
/// On the few rows of a glance a hypothesis may leave this many times as much, relatively, as on
/// more rows.
const ROUGHLY: f64 = 1.2;
/// A proof needs the errors of at least this many tokens: as many different tokens that count and,
/// in gradients of tokens, as many rows that hold the error. By chance, one of a thousand parameter
/// values removes nine tenths of the energy of fifteen independent errors, or flips as many
/// roundings, with less than the probability of a false alarm. With fewer tokens that may happen by
/// chance.
const ROWS: f64 = 15.0;
/// Energy below this share of the reference's (16 roundings to f32, squared) counts as none.
const EXACT: f64 = (16.0 * F32) * (16.0 * F32);

/// Whether a stage belongs to the head: sums of gradients do not show how the head rounds.
fn is_of_head(stage: Stage) -> bool {
    !stage.is_sum()
}

/// Whether a policy is emulated for a stage: all gradients but the plane of dlogits.
fn is_emulated(stage: Stage) -> bool {
    stage.is_gradient() && stage != Stage::Dlogits
}

/// Whether comparisons fail by so little that a wrong hypothesis may bring them within their
/// bounds: by less than the factor that separates one cause from the next, where the job leaves its
/// roundings open. Then a cause must be proved as in a head that passes.
pub(super) fn is_marginal(evidence: &Evidence<'_>, keys: &BTreeSet<Key>) -> bool {
    let open = |key: &Key| {
        let is_of_unit = |comparison: &&Comparison| {
            comparison.microbatch == key.microbatch && comparison.rank == key.rank
        };
        let comparison = evidence.outcome.stage(key.stage).comparisons.iter().find(is_of_unit);
        is_emulated(key.stage) && comparison.is_some_and(leaves_open)
    };
    let near = |key: &Key| {
        // Over all rows, as a sample need not contain the worst one.
        let residual = evidence.whole.get(key);
        residual.is_some_and(|residual| residual.overshoot > 1.0 && residual.overshoot < CLEAR)
    };
    !keys.is_empty() && keys.iter().all(|key| open(key) && near(key))
}

/// Whether roundings below f32 are plausible in a comparison and not declared.
fn leaves_open(comparison: &Comparison) -> bool {
    comparison.members.len() > 1 && comparison.floor() > 2.0 * F32
}

/// Whether a comparison has more error energy than the emulation of the declared roundings, which
/// are coarser than f32. A right job's errors have other values but the same size.
fn errs_more(comparison: &Comparison) -> bool {
    let [declared] = &comparison.members[..] else { return false };
    comparison.floor() > 2.0 * F32 && comparison.tally.error_energy > MORE * declared.energy
}

/// A fault that was reproduced.
pub(super) struct Proof {
    /// Its cause, or several tied.
    pub(super) causes: Vec<CauseReport>,
    /// The comparisons that pass by their bound, but whose errors only the fault reproduces.
    pub(super) keys: BTreeSet<Key>,
    /// How many times less energy it leaves in those than any policy without it.
    pub(super) times: f64,
    /// Why their bound lets the fault pass.
    hidden: &'static str,
}

impl Proof {
    /// Turns the comparisons that it proves wrong into failures of the outcome, and returns the
    /// causes.
    pub(super) fn into_causes(self, outcome: &mut Outcome) -> Vec<CauseReport> {
        let ids: Vec<&str> = self.causes.iter().map(|cause| cause.id.as_str()).collect();
        let words = format!("{}, but with {} {}", self.hidden, ids.join(" or "), words(self.times));
        for Key { stage, microbatch, rank } in self.keys {
            outcome.reproduced(stage, (microbatch, rank), &words);
        }
        self.causes
    }
}

/// The comparisons that pass and may hide a fault: off by more than f32 rounding, with roundings
/// coarser than f32 that are plausible and not declared (or with more error than the declared ones
/// make), in stages that emulation covers.
pub(super) fn open(outcome: &Outcome) -> BTreeSet<Key> {
    let mut examined = BTreeSet::new();
    for stage in outcome.stages.iter().filter(|outcome| is_emulated(outcome.stage)) {
        let off = |comparison: &&Comparison| {
            !(comparison.tally.error_energy <= EXACT * comparison.tally.reference_energy)
        };
        let emulated = stage.comparisons.iter().filter(|comparison| !comparison.stored_apart);
        let passing = emulated.filter(|comparison| comparison.excess.is_none());
        let open = passing
            .filter(|comparison| leaves_open(comparison) || errs_more(comparison))
            .filter(off);
        let key = |comparison: &Comparison| Key {
            stage: stage.stage,
            microbatch: comparison.microbatch,
            rank: comparison.rank,
        };
        examined.extend(open.map(key));
    }
    examined
}

/// Looks for a fault with which some policy reproduces the errors that no policy alone reproduces.
/// The evidence's `failing` are the comparisons to examine.
pub(super) fn prove(
    search: &Search<'_>,
    catalogue: &[&dyn Cause],
    evidence: &Evidence<'_>,
) -> Option<Proof> {
    let search = &search.only(is_of_head);
    let fails = |key: &Key| evidence.residuals.get(key).is_some_and(|residual| !residual.passes);
    let fail = evidence.failing.iter().any(fails);
    let reproduction = Reproduction::new(search, evidence, fail)?;
    let right = reproduction
        .fit(Rounded(reproduction.roundings.narrowest, reproduction.roundings.tiles), None)?;
    if reproduction.is_explained(&right) || reproduction.adds_labels_early() {
        return None;
    }
    // A cause that only rounds intermediates is no fault where the bounds allow it and the job does
    // not declare otherwise.
    let declared =
        reproduction.fail || plausible_policies::points(&reproduction.roundings).is_empty();
    let roundings = &reproduction.roundings;
    let provable = move |cause: &dyn Cause, hypothesis: &Hypothesis| {
        let policy = hypothesis.world.policy(roundings);
        let says =
            policy.is_some_and(|(policy, _)| plausible_policies::contradicts(&policy, roundings));
        // Numbers for every token may merely fit the job's own rounding of each.
        !hypothesis.per_token && (declared || !cause.may_be_right() || says)
    };
    let hypotheses = catalogue.iter().flat_map(|&cause| {
        let all = search.hypotheses(cause, evidence);
        let all = all.into_iter().filter(move |hypothesis| provable(cause, hypothesis));
        all.map(move |hypothesis| (cause, hypothesis))
    });
    let near: Vec<(&dyn Cause, Hypothesis, Fit)> = hypotheses
        .filter_map(|(cause, hypothesis)| {
            let fit = reproduction.beside(&hypothesis, &right);
            search.meter.note_if_spent(cause.id());
            let fit = fit?;
            // What was seen in the job's own call outweighs what roundings leave room for.
            let stands = !hypothesis.contradicts_call || reproduction.is_exact(&fit);
            (stands && reproduction.gains(&fit, &right)).then_some((cause, hypothesis, fit))
        })
        .collect();
    let spent = search.meter.is_spent();
    // A hypothesis that is far behind the nearest on a few rows is neither the cause nor tied with
    // it.
    let least = near.iter().map(|(.., fit)| fit.left).fold(f64::INFINITY, f64::min);
    let beside = |fit: &Fit| fit.left <= ROUGHLY * CLEAR * least || reproduction.is_exact(fit);
    let near: Vec<_> = near.into_iter().filter(|(.., fit)| beside(fit)).collect();
    if near.is_empty() {
        return None;
    }
    let ids: Vec<&str> = near.iter().map(|(cause, ..)| cause.id()).collect();
    let proof = reproduction.confirmed(near);
    // With untried causes left, a fault counts as proved only if it leaves next to nothing, so that
    // others could at most be tied.
    let proof = proof.filter(|proof| !spent || proof.times >= DECISIVE);
    if proof.is_none() && search.meter.is_over() {
        ids.into_iter().for_each(|id| search.meter.note_if_spent(id));
    }
    proof
}

/// Whether some plausible policy reproduces every failing comparison, so that each passes in it:
/// then the head is right and the bound was too narrow. Only for failures of tests over a
/// comparison as a whole: a single wrong row or element has hardly any of the energy, and a policy
/// that explains the rest proves nothing about it.
pub(super) fn cleared(search: &Search<'_>, evidence: &Evidence<'_>) -> bool {
    let single = |key: &Key| {
        let is_of_unit = |comparison: &&Comparison| {
            comparison.microbatch == key.microbatch && comparison.rank == key.rank
        };
        let comparison = evidence.outcome.stage(key.stage).comparisons.iter().find(is_of_unit);
        comparison.is_none_or(|comparison| {
            comparison.tally.exceeding > 0 || comparison.tally.exceeding_rows > 0
        })
    };
    if evidence.failing.iter().any(single) {
        return false;
    }
    let search = &search.only(is_of_head);
    let Some(reproduction) = emulated(search, evidence) else { return false };
    let first = Rounded(reproduction.roundings.narrowest, reproduction.roundings.tiles);
    let Some(fit) = reproduction.fit(first, None) else { return false };
    if !reproduction.is_explained(&fit) {
        return false;
    }
    let keys = &evidence.failing;
    let all = search.of_failing(keys).in_full(&[&fit.rounded], keys).unwrap_or_default();
    let closely = |key: &Key| {
        let before = evidence.whole.get(key).map_or(0.0, |residual| residual.energy);
        all.get(key)
            .is_some_and(|residual| residual.passes && CLEAR * CLEAR * residual.energy <= before)
    };
    keys.iter().all(closely)
}

/// Whether gradients fail that emulation covers, and no policy that a head with these other options
/// leaves open reproduces them. Then the wider bounds of that head explain nothing.
pub(super) fn is_refuted(
    search: &Search<'_>,
    evidence: &Evidence<'_>,
    (world, roundings): (&dyn World, Roundings),
) -> bool {
    let numbers =
        |key: &&Key| evidence.residuals.get(key).is_some_and(|residual| residual.nonfinite == 0);
    let keys = evidence.failing.iter().filter(|key| is_emulated(key.stage)).filter(numbers);
    let keys: Vec<&Key> = keys.collect();
    let search = &search.only(is_of_head);
    let Some(mut reproduction) = Reproduction::new(search, evidence, false) else { return false };
    reproduction.roundings = roundings;
    let first = Rounded(reproduction.roundings.narrowest, reproduction.roundings.tiles);
    let fit = reproduction.fit(first, Some(world));
    fit.is_some_and(|fit| keys.iter().any(|key| !reproduction.explains(&fit, key)))
}

/// A search for policies, if emulation covers everything that fails.
fn emulated<'a>(search: &'a Search<'a>, evidence: &'a Evidence<'a>) -> Option<Reproduction<'a>> {
    let keys = &evidence.failing;
    let all = keys.iter().all(|key| is_emulated(key.stage));
    let numbers =
        |key: &Key| evidence.residuals.get(key).is_some_and(|residual| residual.nonfinite == 0);
    let able = !keys.is_empty() && all && keys.iter().all(numbers);
    able.then(|| Reproduction::new(search, evidence, false))?
}

/// A clause that says how closely a fault is reproduced.
fn words(times: f64) -> String {
    const OF: &str = "of the squared error that the best plausible rounding without it leaves";
    match times {
        times if times < 1e6 => format!("the emulated head leaves 1/{times:.0} {OF}"),
        times if times.is_finite() => format!("the emulated head leaves less than a millionth {OF}"),
        _ => "the emulated head equals in every bit what was captured, and no plausible rounding without it does".into(),
    }
}
