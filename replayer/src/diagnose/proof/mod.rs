//! Faults that undeclared roundings hide, proved by reproducing them.
//!
//! A job that does not declare how it rounds is allowed every plausible rounding at its
//! worst, and a fault that is smaller than that passes. But rounding is no noise: a right
//! head in the policy that the job has errs as the job does, element by element. So the
//! policy is found first, by emulating the plausible ones. Where one of them leaves a tenth
//! of the energy, the comparison is explained. Where none does, the causes are tried, each
//! together with the policies: one that leaves a tenth of what is left by every policy
//! without it, and of what it leaves itself in f64, has reproduced the job's own rounding
//! errors, which chance does not. Causes that may be no more than a rounding of an
//! intermediate are not tried where the job leaves that open: undeclared ones are right.

mod confirm;
mod fit;

use std::collections::BTreeSet;

use super::cause::{Cause, Hypothesis};
use super::decision::CLEAR;
use super::evidence::{Evidence, Key};
use super::findings::Found;
use super::search::Search;
use crate::head::Roundings;
use crate::head::Stage;
use crate::head::roundings::F32;
use crate::replay::members;
use crate::replay::outcome::{Comparison, Outcome};
use crate::replay::world::World;
use fit::{Fit, Reproduction, Rounded};

/// A comparison under declared roundings that errs by more than so many times the energy of
/// their emulation may hold a fault that its bound hides. It decides what is looked at alone.
const MORE: f64 = 1.1;
/// How many times less energy a proof leaves than any policy without its fault, where what was
/// not tried may not speak against it.
const DECISIVE: f64 = 1e6;
/// A hypothesis over the rows of a look may leave this many times what it leaves over more.
const ROUGHLY: f64 = 1.2;
/// A proof needs the errors of so many tokens at least: that many different tokens that count,
/// and in gradients of tokens that many rows that hold the error. One number that is chosen among
/// a thousand takes nine tenths of the energy of fifteen independent errors, or flips as many
/// roundings, with a probability below that of a false alarm; of fewer it does so by chance.
const ROWS: f64 = 15.0;
/// Energy of so many roundings to f32 is not told from none.
const EXACT: f64 = (16.0 * F32) * (16.0 * F32);

/// Whether a stage is the head's own: sums of gradients say nothing of how it rounds.
fn is_of_head(stage: Stage) -> bool {
    !stage.is_sum()
}

/// Whether a policy is emulated for a stage: all gradients but the plane of dlogits.
fn is_emulated(stage: Stage) -> bool {
    stage.is_gradient() && stage != Stage::Dlogits
}

/// Whether comparisons fail by so little that a hypothesis brings them within their bounds
/// without being what happened: by less than what tells one cause from the next, where the
/// job leaves open how it rounds. Then a cause must be proved like one of a head that passes.
pub(super) fn is_marginal(evidence: &Evidence<'_>, keys: &BTreeSet<Key>) -> bool {
    let open = |key: &Key| {
        let of = |one: &&Comparison| one.microbatch == key.microbatch && one.rank == key.rank;
        let found = evidence.outcome.stage(key.stage).comparisons.iter().find(of);
        is_emulated(key.stage) && found.is_some_and(leaves_open)
    };
    let near = |key: &Key| {
        // Over all rows: a sample need not hold the one that is furthest off.
        let of = evidence.whole.get(key);
        of.is_some_and(|of| of.overshoot > 1.0 && of.overshoot < CLEAR)
    };
    !keys.is_empty() && keys.iter().all(|key| open(key) && near(key))
}

/// Whether roundings below f32 are plausible in a comparison and not declared.
fn leaves_open(one: &Comparison) -> bool {
    one.members.len() > 1 && one.floor() > 2.0 * F32
}

/// Whether a comparison errs by more than the emulation of the declared roundings, which are
/// below f32: a clean job's errors are other values of the same size.
fn errs_more(one: &Comparison) -> bool {
    let [declared] = &one.members[..] else { return false };
    one.floor() > 2.0 * F32 && one.tally.error_energy > MORE * declared.energy
}

/// A fault that was reproduced.
pub(super) struct Proof {
    /// Its cause, or several tied.
    pub(super) found: Vec<Found>,
    /// Comparisons that pass by their bound and are reproduced with the fault alone.
    pub(super) of: BTreeSet<Key>,
    /// How many times less energy it leaves there than any policy without it.
    pub(super) times: f64,
    /// What its bound leaves room for.
    hidden: &'static str,
}

impl Proof {
    /// Makes the comparisons fail that it proves to be wrong, and returns the causes.
    pub(super) fn told(self, outcome: &mut Outcome) -> Vec<Found> {
        let ids: Vec<&str> = self.found.iter().map(|one| one.id.as_str()).collect();
        let words = format!("{}, but with {} {}", self.hidden, ids.join(" or "), words(self.times));
        for Key { stage, microbatch, rank } in self.of {
            outcome.reproduced(stage, (microbatch, rank), &words);
        }
        self.found
    }
}

/// Comparisons that pass and are off by more than f32, where roundings below f32 are plausible
/// and not declared, and which emulations round as the job did.
pub(super) fn open(outcome: &Outcome) -> BTreeSet<Key> {
    let mut found = BTreeSet::new();
    for stage in outcome.stages.iter().filter(|one| is_emulated(one.stage)) {
        let off =
            |one: &&Comparison| !(one.tally.error_energy <= EXACT * one.tally.reference_energy);
        let emulated = stage.comparisons.iter().filter(|one| !one.stored_apart);
        let passing = emulated.filter(|one| one.excess.is_none());
        let open = passing.filter(|one| leaves_open(one) || errs_more(one)).filter(off);
        let key = |one: &Comparison| Key {
            stage: stage.stage,
            microbatch: one.microbatch,
            rank: one.rank,
        };
        found.extend(open.map(key));
    }
    found
}

/// A fault beside which some policy reproduces what no policy alone does; the evidence's
/// failing comparisons are those that are open.
pub(super) fn prove(
    search: &Search<'_>,
    catalogue: &[&dyn Cause],
    evidence: &Evidence<'_>,
) -> Option<Proof> {
    let search = &search.only(is_of_head);
    let fails = |key: &Key| evidence.residuals.get(key).is_some_and(|of| !of.passes);
    let fail = evidence.failing.iter().any(fails);
    let of = Reproduction::new(search, evidence, fail)?;
    let right = of.fit(Rounded(of.roundings.narrowest, of.roundings.tiles), None)?;
    if of.is_explained(&right) || of.adds_labels_early() {
        return None;
    }
    // What only rounds intermediates is right where the bounds allow it and the job does not
    // say otherwise.
    let declared = of.fail || members::points(&of.roundings).is_empty();
    let roundings = &of.roundings;
    let provable = move |cause: &dyn Cause, hypothesis: &Hypothesis| {
        let policy = hypothesis.world.policy(roundings);
        let says = policy.is_some_and(|(policy, _)| members::contradicts(&policy, roundings));
        // A number for every token may be the job's own rounding of one, and is no fault.
        !hypothesis.per_token && (declared || !cause.may_be_right() || says)
    };
    let hypotheses = catalogue.iter().flat_map(|&cause| {
        let all = search.hypotheses(cause, evidence);
        let all = all.into_iter().filter(move |hypothesis| provable(cause, hypothesis));
        all.map(move |hypothesis| (cause, hypothesis))
    });
    let near: Vec<(&dyn Cause, Hypothesis, Fit)> = hypotheses
        .filter_map(|(cause, hypothesis)| {
            let fit = of.beside(&hypothesis, &right);
            search.meter.leaves(cause.id());
            let fit = fit?;
            of.gains(&fit, &right).then_some((cause, hypothesis, fit))
        })
        .collect();
    let spent = search.meter.is_spent();
    // What a look shows to be far behind the nearest is neither the cause nor tied with it.
    let least = near.iter().map(|(.., fit)| fit.left).fold(f64::INFINITY, f64::min);
    let beside = |fit: &Fit| fit.left <= ROUGHLY * CLEAR * least || of.is_exact(fit);
    let near: Vec<_> = near.into_iter().filter(|(.., fit)| beside(fit)).collect();
    if near.is_empty() {
        return None;
    }
    let ids: Vec<&str> = near.iter().map(|(cause, ..)| cause.id()).collect();
    let proof = of.confirmed(near);
    // A fault is proved beside others that were not tried only where those could at most be tied.
    let proof = proof.filter(|proof| !spent || proof.times >= DECISIVE);
    if proof.is_none() && search.meter.is_over() {
        ids.into_iter().for_each(|id| search.meter.leaves(id));
    }
    proof
}

/// Whether some plausible policy reproduces every failing comparison, and each passes beside
/// it: the declared head was computed as plausible heads are, and what failed is the bound.
/// Only of tests over a comparison as a whole: a row or an element that is wrong is hardly
/// any of the energy, and the policy that explains the rest says nothing of it.
pub(super) fn cleared(search: &Search<'_>, evidence: &Evidence<'_>) -> bool {
    let single = |key: &Key| {
        let of = |one: &&Comparison| one.microbatch == key.microbatch && one.rank == key.rank;
        let found = evidence.outcome.stage(key.stage).comparisons.iter().find(of);
        found.is_none_or(|one| one.tally.exceeding > 0 || one.tally.exceeding_rows > 0)
    };
    if evidence.failing.iter().any(single) {
        return false;
    }
    let search = &search.only(is_of_head);
    let Some(of) = emulated(search, evidence) else { return false };
    let first = Rounded(of.roundings.narrowest, of.roundings.tiles);
    let Some(fit) = of.fit(first, None) else { return false };
    if !of.is_explained(&fit) {
        return false;
    }
    let keys = &evidence.failing;
    let all = search.of_failing(keys).in_full(&[&fit.rounded], keys).unwrap_or_default();
    let closely = |key: &Key| {
        let before = evidence.whole.get(key).map_or(0.0, |of| of.energy);
        all.get(key).is_some_and(|of| of.passes && CLEAR * CLEAR * of.energy <= before)
    };
    keys.iter().all(closely)
}

/// Whether gradients fail that are emulated, and no policy that a head with other options leaves
/// open reproduces them: that more is allowed there says nothing.
pub(super) fn is_refuted(
    search: &Search<'_>,
    evidence: &Evidence<'_>,
    (world, roundings): (&dyn World, Roundings),
) -> bool {
    let numbers = |key: &&Key| evidence.residuals.get(key).is_some_and(|of| of.nonfinite == 0);
    let keys = evidence.failing.iter().filter(|key| is_emulated(key.stage)).filter(numbers);
    let keys: Vec<&Key> = keys.collect();
    let search = &search.only(is_of_head);
    let Some(mut of) = Reproduction::new(search, evidence, false) else { return false };
    of.roundings = roundings;
    let first = Rounded(of.roundings.narrowest, of.roundings.tiles);
    let fit = of.fit(first, Some(world));
    fit.is_some_and(|fit| keys.iter().any(|key| !of.explains(&fit, key)))
}

/// Where all that fails is emulated.
fn emulated<'a>(search: &'a Search<'a>, evidence: &'a Evidence<'a>) -> Option<Reproduction<'a>> {
    let keys = &evidence.failing;
    let all = keys.iter().all(|key| is_emulated(key.stage));
    let numbers = |key: &Key| evidence.residuals.get(key).is_some_and(|of| of.nonfinite == 0);
    let able = !keys.is_empty() && all && keys.iter().all(numbers);
    able.then(|| Reproduction::new(search, evidence, false))?
}

/// How closely a fault is reproduced, as a clause.
fn words(times: f64) -> String {
    const OF: &str = "of the squared error that the best plausible rounding without it leaves";
    match times {
        times if times < 1e6 => format!("the emulated head leaves 1/{times:.0} {OF}"),
        times if times.is_finite() => format!("the emulated head leaves less than a millionth {OF}"),
        _ => "the emulated head equals in every bit what was captured, and no plausible rounding without it does".into(),
    }
}
