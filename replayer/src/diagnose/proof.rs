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
//! intermediate are not tried: undeclared ones are right.

use std::collections::{BTreeMap, BTreeSet};

use super::cause::{Cause, Hypothesis};
use super::decide::{CLEAR, decide};
use super::evidence::{Evidence, FORWARD, GRADIENTS, Key, Residuals};
use super::found::{self, Found};
use super::search::{Search, Tried, left_of};
use crate::head::roundings::F32;
use crate::head::{Roundings, Stage};
use crate::kernels::Tiles;
use crate::kernels::policy::Policy;
use crate::replay::members;
use crate::replay::outcome::{Comparison, Outcome};
use crate::replay::world::World;

/// A hypothesis is dismissed that leaves more than this share of what the best policy leaves
/// of every comparison, in that policy: a fault that is there is most of it.
const HELPS: f64 = 0.9;
/// A hypothesis over the rows of a look may leave this many times what it leaves over more.
const ROUGHLY: f64 = 1.2;
/// What is reproduced may make the other comparisons this many times worse: they are
/// rounded as the declared head would.
const WORSE: f64 = 2.0;
/// Energy of so many roundings to f32 is not told from none.
const EXACT: f64 = (16.0 * F32) * (16.0 * F32);
/// The parts of the gradients.
const PARTS: [Stage; 4] = [Stage::DqLse, Stage::DqLabel, Stage::DkLse, Stage::DkLabel];
/// Rounds of trying every rounding point the other way.
const PASSES: usize = 2;

/// Whether a policy is emulated for a stage: all gradients but the plane of dlogits.
fn is_emulated(stage: Stage) -> bool {
    GRADIENTS.contains(&stage) && stage != Stage::Dlogits
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

/// A fault that was reproduced.
pub(super) struct Proof {
    /// Its cause, or several tied.
    pub(super) found: Vec<Found>,
    /// Comparisons that pass by their bound and are reproduced with the fault alone.
    pub(super) of: BTreeSet<Key>,
    /// How many times less energy it leaves there than any policy without it.
    pub(super) times: f64,
}

impl Proof {
    /// Makes the comparisons fail that it proves to be wrong, and returns the causes.
    pub(super) fn told(self, outcome: &mut Outcome) -> Vec<Found> {
        let ids: Vec<&str> = self.found.iter().map(|one| one.id.as_str()).collect();
        let words = format!(
            "undeclared roundings may be as large, but with {} {}",
            ids.join(" or "),
            words(self.times)
        );
        for Key { stage, microbatch, rank } in self.of {
            outcome.reproduced(stage, (microbatch, rank), &words);
        }
        self.found
    }
}

/// Comparisons that pass and are off by more than f32, where roundings below f32 are plausible
/// and not declared.
pub(super) fn open(outcome: &Outcome) -> BTreeSet<Key> {
    let mut found = BTreeSet::new();
    for stage in outcome.stages.iter().filter(|one| is_emulated(one.stage)) {
        let off =
            |one: &&Comparison| !(one.tally.error_energy <= EXACT * one.tally.reference_energy);
        let passing = stage.comparisons.iter().filter(|one| one.excess.is_none());
        let open = passing.filter(|one| leaves_open(one)).filter(off);
        let key = |one: &Comparison| Key {
            stage: stage.stage,
            microbatch: one.microbatch,
            rank: one.rank,
        };
        found.extend(open.map(key));
    }
    found
}

/// Stands in for the declared policy.
#[derive(Clone, Copy, PartialEq)]
struct Rounded(Policy, Tiles);

impl World for Rounded {
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        Some((self.0, self.1))
    }
}

/// Looks for the policy of a job, and for a fault beside it.
struct Reproduction<'a> {
    search: &'a Search<'a>,
    evidence: &'a Evidence<'a>,
    roundings: Roundings,
    /// Whether the comparisons fail: then a policy that takes most of the energy away
    /// explains nothing, as the rest is the fault.
    fail: bool,
}

/// A policy and what it leaves.
#[derive(Clone)]
struct Fit {
    rounded: Rounded,
    residuals: Residuals,
    left: f64,
}

/// A fault beside which some policy reproduces what no policy alone does; the evidence's
/// failing comparisons are those that are open.
pub(super) fn prove(
    search: &Search<'_>,
    catalogue: &[&dyn Cause],
    evidence: &Evidence<'_>,
) -> Option<Proof> {
    let fails = |key: &Key| evidence.residuals.get(key).is_some_and(|of| !of.passes);
    let fail = evidence.failing.iter().any(fails);
    let of = Reproduction::new(search, evidence, fail)?;
    let right = of.fit(Rounded(of.roundings.narrowest, of.roundings.tiles), None)?;
    if of.is_explained(&right) {
        return None;
    }
    // What only rounds intermediates is right where the bounds allow it.
    let provable = catalogue.iter().filter(|cause| of.fail || !cause.may_be_right());
    let hypotheses =
        provable.flat_map(|cause| cause.hypotheses(evidence).into_iter().map(move |h| (*cause, h)));
    let near: Vec<(&dyn Cause, Hypothesis, Fit)> = hypotheses
        .filter_map(|(cause, hypothesis)| {
            let fit = of.beside(&hypothesis, &right)?;
            of.gains(&fit, &right).then_some((cause, hypothesis, fit))
        })
        .collect();
    // What a look shows to be far behind the nearest is neither the cause nor tied with it.
    let least = near.iter().map(|(.., fit)| fit.left).fold(f64::INFINITY, f64::min);
    let beside = |fit: &Fit| fit.left <= ROUGHLY * CLEAR * least || of.is_exact(fit);
    let near: Vec<_> = near.into_iter().filter(|(.., fit)| beside(fit)).collect();
    if near.is_empty() { None } else { of.confirmed(near) }
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
    let Some(of) = emulated(search, evidence) else { return false };
    let first = Rounded(of.roundings.narrowest, of.roundings.tiles);
    let Some(fit) = of.fit(first, None) else { return false };
    if !of.is_explained(&fit) {
        return false;
    }
    let keys = &evidence.failing;
    let all = search.in_full(&[&fit.rounded]).unwrap_or_default();
    let closely = |key: &Key| {
        let before = evidence.whole.get(key).map_or(0.0, |of| of.energy);
        all.get(key).is_some_and(|of| of.passes && CLEAR * CLEAR * of.energy <= before)
    };
    keys.iter().all(closely)
}

/// Where all that fails is emulated.
fn emulated<'a>(search: &'a Search<'a>, evidence: &'a Evidence<'a>) -> Option<Reproduction<'a>> {
    let keys = &evidence.failing;
    let all = keys.iter().all(|key| is_emulated(key.stage));
    let numbers = |key: &Key| evidence.residuals.get(key).is_some_and(|of| of.nonfinite == 0);
    let able = !keys.is_empty() && all && keys.iter().all(numbers);
    able.then(|| Reproduction::new(search, evidence, false))?
}

impl<'a> Reproduction<'a> {
    fn new(search: &'a Search<'a>, evidence: &'a Evidence<'a>, fail: bool) -> Option<Self> {
        let mut roundings = evidence.roundings()?;
        // A part that was captured is allowed no rounding to what it would be added as.
        let part = |key: &Key| PARTS.contains(&key.stage);
        if fail && evidence.failing.iter().any(part) {
            roundings.widest.parts = roundings.narrowest.parts;
        }
        Some(Reproduction { search, evidence, roundings, fail })
    }

    /// The comparisons as declared, over the same rows as a look.
    fn declared(&self) -> &Residuals {
        self.evidence.glance().unwrap_or(&self.evidence.residuals)
    }

    fn look(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        match self.search.few {
            Some(_) => self.search.glance(worlds),
            None => self.search.residuals(worlds),
        }
    }

    /// The policy, of those that differ in rounding points that the job leaves open, that
    /// leaves least in a world: points nearer to the inputs first, because what is
    /// rounded later shows only where they are right.
    fn fit(&self, from: Rounded, world: Option<&dyn World>) -> Option<Fit> {
        let keys = &self.evidence.failing;
        let look = |rounded: Rounded| -> Option<Fit> {
            let worlds: Vec<&dyn World> =
                std::iter::once(&rounded as &dyn World).chain(world).collect();
            let residuals = self.look(&worlds)?;
            let left = left_of(&residuals, keys);
            Some(Fit { rounded, residuals, left })
        };
        let mut best = look(from)?;
        for _ in 0..PASSES {
            let before = best.rounded;
            for other in members::points(&self.roundings) {
                let Rounded(policy, tiles) = best.rounded;
                let other = look(Rounded(other.switched(policy, &self.roundings), tiles))?;
                if other.left < best.left {
                    best = other;
                }
                if world.is_none() && self.is_explained(&best) {
                    return Some(best);
                }
            }
            if best.rounded == before {
                break;
            }
        }
        Some(best)
    }

    /// The best fit beside a hypothesis; none where it cannot be what happened.
    fn beside(&self, hypothesis: &Hypothesis, right: &Fit) -> Option<Fit> {
        let world = &*hypothesis.world;
        let of_right = right.rounded;
        let starts = match world.policy(&self.roundings) {
            // Its own rounding of a sum, and for the rest that of the right head.
            Some((own, tiles)) => {
                let joined = members::joined(own, of_right.0, &self.roundings);
                [Some(joined), (joined != own).then_some(own)].map(|of| Some(Rounded(of?, tiles)))
            }
            None => [Some(of_right), None],
        };
        let helps = |from: &Rounded| {
            let residuals = self.look(&[from, world]).unwrap_or_default();
            let less = |key| energy(&residuals, key) <= HELPS * energy(&right.residuals, key);
            self.unexplained(right).any(less)
        };
        let from = starts.into_iter().flatten().find(helps)?;
        self.fit(from, Some(world))
    }

    /// Whether a fit may have reproduced a comparison that the right head does not explain.
    fn gains(&self, one: &Fit, right: &Fit) -> bool {
        self.unexplained(right).any(|key| {
            CLEAR * energy(&one.residuals, key) <= ROUGHLY * energy(&right.residuals, key)
        })
    }

    /// Comparisons that the right head does not explain.
    fn unexplained<'s>(&'s self, right: &'s Fit) -> impl Iterator<Item = &'s Key> + 's {
        self.evidence.failing.iter().filter(|key| !self.explains(right, key))
    }

    /// Whether nothing is left of any comparison.
    fn is_exact(&self, fit: &Fit) -> bool {
        self.evidence.failing.iter().all(|key| is_exact(&fit.residuals, key))
    }

    fn explains(&self, fit: &Fit, key: &Key) -> bool {
        let most = CLEAR * energy(&fit.residuals, key) <= energy(self.declared(), key);
        most && !self.fail || is_exact(&fit.residuals, key)
    }

    /// Whether a policy reproduces every comparison.
    fn is_explained(&self, fit: &Fit) -> bool {
        self.evidence.failing.iter().all(|key| self.explains(fit, key))
    }

    /// The least energy that any plausible policy leaves of each comparison.
    fn least(&self) -> BTreeMap<Key, f64> {
        let declared = |key: &Key| (*key, energy(&self.evidence.residuals, key));
        let mut found: BTreeMap<Key, f64> = self.evidence.failing.iter().map(declared).collect();
        for policy in members::all(&self.roundings) {
            let rounded = Rounded(policy, self.roundings.tiles);
            let Some(of) = self.search.residuals(&[&rounded]) else { continue };
            found.iter_mut().for_each(|(key, least)| *least = least.min(energy(&of, key)));
        }
        found
    }

    /// What a hypothesis leaves in f64, where it is no policy itself: what a policy beside it
    /// must still explain.
    fn unrounded(&self, hypothesis: &Hypothesis) -> Option<Residuals> {
        match hypothesis.world.policy(&self.roundings) {
            Some(_) => None,
            None => self.search.residuals(&[&*hypothesis.world]),
        }
    }

    /// What a hypothesis that is a policy leaves once its sums are right again: a rounding of
    /// intermediates that came with it, and that no plausible policy has, is not its fault.
    fn with_right_sums(&self, hypothesis: &Hypothesis, fitted: &Rounded) -> Option<Residuals> {
        hypothesis.world.policy(&self.roundings)?;
        let narrow = self.roundings.narrowest;
        let policy = Policy {
            sums: narrow.sums,
            tile_add: narrow.tile_add,
            chunk_add: narrow.chunk_add,
            addend: narrow.addend,
            scatter_shards: narrow.scatter_shards,
            scatter_join: narrow.scatter_join,
            scatter_order: narrow.scatter_order,
            ..fitted.0
        };
        self.search.residuals(&[&Rounded(policy, self.roundings.tiles)])
    }

    /// Whether what the dump holds to f32 as declared is something else in a world: then that
    /// is not what happened, though no policy is asked to be as exact.
    fn contradicts(&self, of: &Residuals) -> bool {
        let declared = &self.evidence.residuals;
        let exact = |key: &&Key| {
            let open = self.evidence.failing.contains(key);
            !open && is_emulated(key.stage) && is_exact(declared, key)
        };
        declared.keys().filter(exact).any(|key| !is_exact(of, key))
    }

    /// What holds against every plausible policy, over more rows than a look.
    fn confirmed(&self, near: Vec<(&dyn Cause, Hypothesis, Fit)>) -> Option<Proof> {
        let least = self.least();
        let declared = &self.evidence.residuals;
        let tried = near.into_iter().filter_map(|(cause, mut hypothesis, Fit { rounded, .. })| {
            let residuals = self.search.residuals(&[&rounded, &*hypothesis.world])?;
            let energy = |key: &Key| energy(&residuals, key);
            let unrounded = self.unrounded(&hypothesis);
            if unrounded.as_ref().is_some_and(|of| self.contradicts(of)) {
                return None;
            }
            // A number that is fitted may take most of a fault away that it is not: what it
            // leaves must be the job's roundings, and the policy must explain those too.
            let reproduces = |key: &Key| {
                let of = unrounded.as_ref().map(|of| self::energy(of, key));
                of.is_none_or(|of| CLEAR * energy(key) <= of || is_exact(&residuals, key))
            };
            let explained = |key: &Key| !self.fail && CLEAR * least[key] <= declared[key].energy;
            let harms = |key: &Key| match explained(key) {
                true => !(CLEAR * energy(key) <= declared[key].energy),
                false => !(energy(key) <= WORSE * least[key]),
            };
            let right_sums = self.with_right_sums(&hypothesis, &rounded);
            // Where right sums leave nothing either, no sum is part of what was reproduced: of
            // two energies of 0 neither is ten times the other.
            let sums = |key: &Key| {
                let without = |of: &Residuals| CLEAR * energy(key) <= self::energy(of, key);
                let needed = |of: &Residuals| !is_exact(of, key) && without(of);
                right_sums.as_ref().is_none_or(needed)
            };
            let gains = |key: &&Key| {
                let less = CLEAR * energy(key) <= least[*key];
                !explained(key) && less && reproduces(key) && sums(key)
            };
            let explains: BTreeSet<Key> = least.keys().filter(gains).copied().collect();
            if explains.is_empty() || least.keys().any(harms) {
                return None;
            }
            let rounds = members::rounded(&rounded.0, &self.roundings);
            if !rounds.is_empty() {
                hypothesis.parameters.push(("the job rounds", rounds));
            }
            let left = left_of(&residuals, &self.evidence.failing);
            let full = self.search.rows.is_none();
            Some(Tried { cause, hypothesis, residuals, explains, left, full })
        });
        self.proof(&tried.collect::<Vec<_>>(), &least)
    }

    /// The best of what was confirmed.
    fn proof(&self, tried: &[Tried<'_>], least: &BTreeMap<Key, f64>) -> Option<Proof> {
        let most = |one: &&Tried<'_>| one.explains.len();
        let mut of = tried.iter().max_by_key(most)?.explains.clone();
        let decision = decide(tried, &of)?;
        let winner = &tried[decision.winners[0]];
        let energy = |key: &Key| winner.residuals[key].energy;
        let times =
            of.iter().map(|key| least[key]).sum::<f64>() / of.iter().map(energy).sum::<f64>();
        let mut found = found::of_decision(tried, &decision, &of, self.evidence);
        for one in &mut found {
            let of = tried.iter().find(|of| of.cause.id() == one.id);
            let about = of.map_or("", |of| of.cause.about());
            one.evidence = format!("{about}: {}", words(times));
        }
        of.extend(self.forward(winner));
        Some(Proof { found, of, times })
    }

    /// Comparisons of the forward pass that lie nearer to the proved fault than to the
    /// declared head: the fault is there too, however wide the bound.
    fn forward(&self, of: &Tried<'_>) -> BTreeSet<Key> {
        let declared = &self.evidence.residuals;
        let nearer = |key: &&Key| {
            let (Some(before), Some(after)) = (declared.get(key), of.residuals.get(key)) else {
                return false;
            };
            let told_apart = before.energy > EXACT * before.reference;
            told_apart && CLEAR * after.energy <= before.energy
        };
        declared.keys().filter(|key| FORWARD.contains(&key.stage)).filter(nearer).copied().collect()
    }
}

fn energy(of: &Residuals, key: &Key) -> f64 {
    of.get(key).map_or(f64::INFINITY, |of| of.energy)
}

/// Whether what is left of a comparison is no more than f32 itself may leave.
fn is_exact(of: &Residuals, key: &Key) -> bool {
    of.get(key).is_some_and(|of| of.energy <= EXACT * of.reference)
}

/// How closely a fault is reproduced, as a clause.
fn words(times: f64) -> String {
    match times.is_finite() {
        true => format!(
            "the emulated head leaves 1/{times:.0} of the squared error that the best plausible rounding without it leaves"
        ),
        false => "the emulated head equals in every bit what was captured, and no plausible rounding without it does".into(),
    }
}
