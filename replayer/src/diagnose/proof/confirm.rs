//! Checks a fault against every plausible policy, over more rows than a glance.

use std::collections::{BTreeMap, BTreeSet};

use super::fit::{Fit, Reproduction, Rounded, energy, is_exact};
use super::{CLEAR, EXACT, Proof, ROWS, is_emulated, words};
use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::counterevidence::Counterevidence;
use crate::diagnose::decision::decide;
use crate::diagnose::detectors::captured::unit;
use crate::diagnose::evidence::{Key, Residuals};
use crate::diagnose::findings;
use crate::diagnose::search::{Tried, left_of};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::kernels::policy::Policy;
use crate::replay::plausible_policies;

/// A proved fault may leave this many times the least energy in the comparisons that it does not
/// explain.
const WORSE: f64 = 2.0;

/// The energy left in a comparison, and how many rows hold it.
#[derive(Clone, Copy)]
struct Left {
    energy: f64,
    /// As a share of the reference's energy.
    share: f64,
    rows: f64,
}

impl Left {
    fn of(residuals: &Residuals, key: &Key) -> Left {
        let (rows, reference) =
            residuals.get(key).map_or((0.0, 0.0), |residual| (residual.rows, residual.reference));
        let energy = energy(residuals, key);
        Left { energy, share: energy / reference, rows }
    }
}

/// The energy that right heads leave in comparisons.
struct Least {
    /// For each examined comparison, with the plausible policy that leaves least.
    open: BTreeMap<Key, Left>,
    /// For other gradients of tokens, which have no error beyond f32 rounding.
    exact: BTreeMap<Key, Left>,
}

impl Least {
    fn energy(&self, key: &Key) -> f64 {
        self.open[key].energy
    }

    /// Whether so many tokens hold the remaining error that no choice of a parameter reproduces it
    /// by chance. In dk the error of a few tokens is spread over all classes, so the rows of dq of
    /// the same unit are counted, unless a plausible policy explains dq.
    fn is_of_many_tokens(&self, key: &Key, explained: impl Fn(&Key) -> bool) -> bool {
        let same = |of: &Key| of.microbatch == key.microbatch && of.rank == key.rank;
        let of_tokens = |key: &Key| same(key) && key.stage.is_of_q();
        let open = self.open.iter().filter(|(key, _)| !explained(key));
        // Errors in the entries of a few tokens are about equally large in dq and dk, relative to
        // each.
        let like = |other: &Left| self.open[key].share <= CLEAR * CLEAR * other.share;
        let exact = self.exact.iter().filter(|(_, left)| like(left));
        open.chain(exact).all(|(key, left)| !of_tokens(key) || left.rows >= ROWS)
    }
}

impl Reproduction<'_> {
    /// The least energy that any plausible policy leaves of each comparison; none where not
    /// all of them could be emulated within the budget.
    fn least(&self) -> Option<Least> {
        let declared = |key: &Key| (*key, Left::of(&self.evidence.residuals, key));
        let mut open: BTreeMap<Key, Left> = self.evidence.failing.iter().map(declared).collect();
        for policy in plausible_policies::all(&self.roundings) {
            let rounded = Rounded(policy, self.roundings.tiles);
            let Some(residuals) = self.search.confirming(&[&rounded]) else { continue };
            for (key, least) in &mut open {
                let other = Left::of(&residuals, key);
                *least = if other.energy < least.energy { other } else { *least };
            }
        }
        let declared = &self.evidence.residuals;
        let exact = |key: &&Key| !open.contains_key(key) && is_exact(declared, key);
        let tokens = declared.keys().filter(|key| key.stage.is_of_q()).filter(exact);
        let exact = tokens.map(|key| (*key, Left::of(declared, key))).collect();
        (!self.search.meter.is_over()).then_some(Least { open, exact })
    }

    /// How many different tokens count in a comparison; copies count as one.
    fn tokens(&self, key: &Key) -> f64 {
        let is_of_microbatch = |inputs: &&MicrobatchInputs| inputs.microbatch == key.microbatch;
        let (inputs, step) = (self.evidence.inputs, self.evidence.step);
        let Some(inputs_of_key) = inputs.iter().find(is_of_microbatch) else { return 0.0 };
        let Some(unit) = unit(step, inputs, *key) else { return 0.0 };
        let counts = unit.rows.iter().filter(|&&token| inputs_of_key.labels[token] != IGNORED);
        counts.map(|&token| 1.0 / inputs_of_key.copies[token]).sum()
    }

    /// The residuals of a hypothesis in f64, where it is no policy itself: the errors that a policy
    /// must still explain.
    fn unrounded(&self, hypothesis: &Hypothesis) -> Option<Residuals> {
        match hypothesis.world.policy(&self.roundings) {
            Some(_) => None,
            None => self.search.confirming(&[&*hypothesis.world]),
        }
    }

    /// The residuals of a hypothesis that is a policy, with its sums corrected. If they are as
    /// small, the fit is due to roundings of intermediates that came with the policy, and the sums
    /// are not at fault.
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
        self.search.confirming(&[&Rounded(policy, self.roundings.tiles)])
    }

    /// Whether a comparison that agrees to f32 precision as declared no longer does in a world:
    /// then the world is not what happened.
    fn contradicts(&self, residuals: &Residuals) -> bool {
        let declared = &self.evidence.residuals;
        let exact = |key: &&Key| {
            let open = self.evidence.failing.contains(key);
            !open && is_emulated(key.stage) && is_exact(declared, key)
        };
        declared.keys().filter(exact).any(|key| !is_exact(residuals, key))
    }

    /// The proof by the best hypothesis that holds against every plausible policy, over all sampled
    /// rows.
    pub(super) fn confirmed(&self, near: Vec<(&dyn Cause, Hypothesis, Fit)>) -> Option<Proof> {
        let least = self.least()?;
        let declared = &self.evidence.residuals;
        let tried = near.into_iter().filter_map(|(cause, mut hypothesis, Fit { rounded, .. })| {
            let residuals = self.search.confirming(&[&rounded, &*hypothesis.world])?;
            let energy = |key: &Key| energy(&residuals, key);
            let unrounded = self.unrounded(&hypothesis);
            if unrounded.as_ref().is_some_and(|residuals| self.contradicts(residuals)) {
                return None;
            }
            // A fitted number may remove most of the error of another fault. So the rest must be
            // the job's roundings, which the policy must explain too.
            let reproduces = |key: &Key| {
                let before = unrounded.as_ref().map(|residuals| self::energy(residuals, key));
                before.is_none_or(|value| CLEAR * energy(key) <= value || is_exact(&residuals, key))
            };
            let explained =
                |key: &Key| !self.fail && CLEAR * least.energy(key) <= declared[key].energy;
            let harms = |key: &Key| match explained(key) {
                true => !(CLEAR * energy(key) <= declared[key].energy),
                false => !(energy(key) <= WORSE * least.energy(key)),
            };
            // For a cause that may only round intermediates, no sum has to be at fault.
            let of_sums = !cause.may_be_right();
            let right_sums = of_sums.then(|| self.with_right_sums(&hypothesis, &rounded)).flatten();
            // If corrected sums leave nothing either, the sums are not part of what was reproduced.
            // (Of two zero energies neither is ten times the other.)
            let sums = |key: &Key| {
                let without =
                    |residuals: &Residuals| CLEAR * energy(key) <= self::energy(residuals, key);
                let needed =
                    |residuals: &Residuals| !is_exact(residuals, key) && without(residuals);
                right_sums.as_ref().is_none_or(needed)
            };
            let gains = |key: &&Key| {
                let less = CLEAR * energy(key) <= least.energy(key);
                let many = self.fail
                    || least.is_of_many_tokens(key, explained) && self.tokens(key) >= ROWS;
                !explained(key) && less && many && reproduces(key) && sums(key)
            };
            let mut explains: BTreeSet<Key> = least.open.keys().filter(gains).copied().collect();
            if self.fail && self.search.rows.is_some() && !explains.is_empty() {
                // For failing comparisons the result on the sample must hold for all rows.
                let all = self.looks.in_full(&[&rounded, &*hypothesis.world], &explains)?;
                explains.retain(|key| all.get(key).is_some_and(|residual| residual.passes));
            }
            if explains.is_empty() || least.open.keys().any(harms) {
                return None;
            }
            let rounds = plausible_policies::rounded(&rounded.0, &self.roundings);
            if !rounds.is_empty() {
                hypothesis.parameters.push(("the job rounds", rounds));
            }
            let left = left_of(&residuals, &self.evidence.failing);
            let full = self.search.rows.is_none();
            let against = Counterevidence::default();
            Some(Tried { cause, hypothesis, residuals, explains, left, full, against })
        });
        self.proof(&tried.collect::<Vec<_>>(), &least)
    }

    /// The proof by the best confirmed hypothesis.
    fn proof(&self, tried: &[Tried<'_>], least: &Least) -> Option<Proof> {
        let most = |trial: &&Tried<'_>| trial.explains.len();
        let mut keys = tried.iter().max_by_key(most)?.explains.clone();
        let decision = decide(tried, &keys)?;
        let winner = &tried[decision.winners[0]];
        let energy = |key: &Key| winner.residuals[key].energy;
        let times = keys.iter().map(|key| least.energy(key)).sum::<f64>()
            / keys.iter().map(energy).sum::<f64>();
        let mut findings = findings::of_decision(tried, &decision, &keys, self.evidence);
        for finding in &mut findings {
            let winner_of_id = tried.iter().find(|trial| trial.cause.id() == finding.id);
            let about = winner_of_id.map_or("", |trial| trial.cause.about());
            finding.evidence = format!("{about}: {}", words(times));
        }
        keys.extend(self.forward(winner));
        let hidden = match plausible_policies::points(&self.roundings).is_empty() {
            true => "the bound leaves room for as much",
            false => "undeclared roundings may be as large",
        };
        Some(Proof { causes: findings, keys, times, hidden })
    }

    /// Comparisons of the forward pass that are ten times nearer to the head with the proved fault
    /// than to the declared one: the fault is there too, although the bound lets it pass.
    fn forward(&self, trial: &Tried<'_>) -> BTreeSet<Key> {
        let declared = &self.evidence.residuals;
        let nearer = |key: &&Key| {
            let (Some(before), Some(after)) = (declared.get(key), trial.residuals.get(key)) else {
                return false;
            };
            let told_apart = before.energy > EXACT * before.reference;
            told_apart && CLEAR * after.energy <= before.energy
        };
        declared
            .keys()
            .filter(|key| Stage::FORWARD.contains(&key.stage))
            .filter(nearer)
            .copied()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an error of dk that only three tokens have in dq too is no proof; one that is far
    /// larger than dq's, or that many tokens have, may be.
    #[test]
    fn what_f32_left_of_a_few_tokens_is_seen_in_dq_though_dq_is_not_open() {
        let key = |stage| Key { stage, microbatch: None, rank: None };
        let left = |share: f64, rows| Left { energy: share, share, rows };
        for (share, rows, many) in [(4.0, 3.0, false), (4.0, 40.0, true), (1e4, 3.0, true)] {
            let open = [(key(Stage::Dk), left(share, 3.0))].into();
            let exact = [(key(Stage::Dq), left(1.0, rows))].into();
            let least = Least { open, exact };
            assert_eq!(least.is_of_many_tokens(&key(Stage::Dk), |_| false), many, "{share} {rows}");
        }
    }
}
