//! The policy of a job, and the policy beside a fault.

use super::{CLEAR, EXACT, ROUGHLY};
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::evidence::{Evidence, Key, Residuals};
use crate::diagnose::search::{Search, left_of};
use crate::head::{Roundings, Stage};
use crate::kernels::Tiles;
use crate::kernels::policy::{Path, Policy};
use crate::replay::plausible_policies;
use crate::replay::world::World;

/// A hypothesis is dismissed that leaves more than this share of what the best policy leaves
/// of every comparison, in that policy: a fault that is there is most of it.
const HELPS: f64 = 0.9;
/// Rounds of trying every rounding point the other way.
const PASSES: usize = 2;

/// Stands in for the declared policy.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Rounded(pub(super) Policy, pub(super) Tiles);

impl World for Rounded {
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        Some((self.0, self.1))
    }
}

/// Looks for the policy of a job, and for a fault beside it.
pub(super) struct Reproduction<'a> {
    pub(super) search: &'a Search<'a>,
    /// The same without the gradients of which nothing fails: what policies are chosen by.
    pub(super) looks: Search<'a>,
    pub(super) evidence: &'a Evidence<'a>,
    pub(super) roundings: Roundings,
    /// Whether the comparisons fail: then a policy that takes most of the energy away
    /// explains nothing, as the rest is the fault.
    pub(super) fail: bool,
}

/// A policy and what it leaves.
#[derive(Clone)]
pub(super) struct Fit {
    pub(super) rounded: Rounded,
    pub(super) residuals: Residuals,
    pub(super) left: f64,
}

impl<'a> Reproduction<'a> {
    pub(super) fn new(
        search: &'a Search<'a>,
        evidence: &'a Evidence<'a>,
        fail: bool,
    ) -> Option<Self> {
        let mut roundings = evidence.roundings()?;
        // A part that was captured is allowed no rounding to what it would be added as.
        let part = |key: &Key| Stage::PARTS.contains(&key.stage);
        if fail && evidence.failing.iter().any(part) {
            roundings.widest.parts = roundings.narrowest.parts;
        }
        let looks = search.of_failing(&evidence.failing);
        Some(Reproduction { search, looks, evidence, roundings, fail })
    }

    /// The comparisons as declared, over the same rows as a look.
    fn declared(&self) -> &Residuals {
        self.evidence.glance().unwrap_or(&self.evidence.residuals)
    }

    fn look(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        match self.search.few {
            Some(_) => self.looks.glance(worlds),
            None => self.looks.residuals(worlds),
        }
    }

    /// The policy, of those that differ in rounding points that the job leaves open, that
    /// leaves least in a world: points nearer to the inputs first, because what is
    /// rounded later shows only where they are right.
    pub(super) fn fit(&self, from: Rounded, world: Option<&dyn World>) -> Option<Fit> {
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
            for other in plausible_policies::points(&self.roundings) {
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

    /// Whether a fused head reproduces every comparison that takes the label's 1 off before it
    /// rounds, as others do that never hold the logits: with q and k alone it is no fault.
    pub(super) fn adds_labels_early(&self) -> bool {
        let narrow = self.roundings.narrowest;
        if self.fail || narrow.path != Path::Fused {
            return false;
        }
        let whole = Rounded(Policy { path: Path::Plain, ..narrow }, self.roundings.tiles);
        self.fit(whole, None).is_some_and(|fit| self.is_explained(&fit))
    }

    /// The best fit beside a hypothesis; none where it cannot be what happened.
    pub(super) fn beside(&self, hypothesis: &Hypothesis, right: &Fit) -> Option<Fit> {
        let world = &*hypothesis.world;
        let of_right = right.rounded;
        let starts = match world.policy(&self.roundings) {
            // Its own rounding of a sum, and for the rest that of the right head.
            Some((own, tiles)) => {
                let joined = plausible_policies::joined(own, of_right.0, &self.roundings);
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
    pub(super) fn gains(&self, one: &Fit, right: &Fit) -> bool {
        self.unexplained(right).any(|key| {
            CLEAR * energy(&one.residuals, key) <= ROUGHLY * energy(&right.residuals, key)
        })
    }

    /// Comparisons that the right head does not explain.
    fn unexplained<'s>(&'s self, right: &'s Fit) -> impl Iterator<Item = &'s Key> + 's {
        self.evidence.failing.iter().filter(|key| !self.explains(right, key))
    }

    /// Whether nothing is left of any comparison.
    pub(super) fn is_exact(&self, fit: &Fit) -> bool {
        self.evidence.failing.iter().all(|key| is_exact(&fit.residuals, key))
    }

    pub(super) fn explains(&self, fit: &Fit, key: &Key) -> bool {
        let most = CLEAR * energy(&fit.residuals, key) <= energy(self.declared(), key);
        most && !self.fail || is_exact(&fit.residuals, key)
    }

    /// Whether a policy reproduces every comparison.
    pub(super) fn is_explained(&self, fit: &Fit) -> bool {
        self.evidence.failing.iter().all(|key| self.explains(fit, key))
    }
}

pub(super) fn energy(of: &Residuals, key: &Key) -> f64 {
    of.get(key).map_or(f64::INFINITY, |of| of.energy)
}

/// Whether what is left of a comparison is no more than f32 itself may leave.
pub(super) fn is_exact(of: &Residuals, key: &Key) -> bool {
    of.get(key).is_some_and(|of| of.energy <= EXACT * of.reference)
}
