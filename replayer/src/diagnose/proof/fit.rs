//! Finds the rounding policy of a job, alone or together with a fault.

use super::{CLEAR, EXACT, ROUGHLY};
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::evidence::{Evidence, Key, Residuals};
use crate::diagnose::search::{Search, left_of};
use crate::head::{Roundings, Stage};
use crate::kernels::Tiles;
use crate::kernels::policy::{Path, Policy};
use crate::replay::plausible_policies;
use crate::replay::world::World;

/// A hypothesis is dismissed if, in the best policy, it leaves more than this share of what that
/// policy alone leaves in every comparison: a real fault makes up most of that.
const HELPS: f64 = 0.9;
/// How often every rounding point is tried the other way.
const PASSES: usize = 2;

/// A rounding policy in the place of the declared one.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Rounded(pub(super) Policy, pub(super) Tiles);

impl World for Rounded {
    fn policy(&self, _declared: &Roundings) -> Option<(Policy, Tiles)> {
        Some((self.0, self.1))
    }
}

/// The search for a job's policy, and for a fault together with it.
pub(super) struct Reproduction<'a> {
    pub(super) search: &'a Search<'a>,
    /// The same search without the families of gradients in which nothing fails; policies are
    /// chosen by it.
    pub(super) looks: Search<'a>,
    pub(super) evidence: &'a Evidence<'a>,
    pub(super) roundings: Roundings,
    /// Whether the comparisons fail. Then a policy that removes most of the energy explains
    /// nothing, as the rest may be the fault.
    pub(super) fail: bool,
}

/// A policy and the errors that it leaves.
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
        // A part that was captured by itself is not allowed the rounding that it would get when
        // added to the other part.
        let part = |key: &Key| Stage::PARTS.contains(&key.stage);
        if fail && evidence.failing.iter().any(part) {
            roundings.widest.parts = roundings.narrowest.parts;
        }
        let looks = search.of_failing(&evidence.failing);
        Some(Reproduction { search, looks, evidence, roundings, fail })
    }

    /// The comparisons of the declared head, over the same rows as [`Reproduction::look`].
    fn declared(&self) -> &Residuals {
        self.evidence.glance().unwrap_or(&self.evidence.residuals)
    }

    fn look(&self, worlds: &[&dyn World]) -> Option<Residuals> {
        match self.search.few {
            Some(_) => self.looks.glance(worlds),
            None => self.looks.residuals(worlds),
        }
    }

    /// The policy that leaves least energy in a world, of those that differ in the rounding points
    /// that the job leaves open. Points nearer to the inputs are switched first, because later
    /// roundings show only where the earlier ones are right.
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

    /// Whether a fused head that subtracts the label's 1 before it rounds reproduces every
    /// comparison. Heads that are not fused do so, and it is no fault.
    pub(super) fn adds_labels_early(&self) -> bool {
        let narrow = self.roundings.narrowest;
        if self.fail || narrow.path != Path::Fused {
            return false;
        }
        let whole = Rounded(Policy { path: Path::Plain, ..narrow }, self.roundings.tiles);
        self.fit(whole, None).is_some_and(|fit| self.is_explained(&fit))
    }

    /// The best policy together with a hypothesis; none where the hypothesis helps in no
    /// comparison.
    pub(super) fn beside(&self, hypothesis: &Hypothesis, right: &Fit) -> Option<Fit> {
        let world = &*hypothesis.world;
        let of_right = right.rounded;
        let starts = match world.policy(&self.roundings) {
            // The hypothesis' own rounding of a sum, and the fitted policy for everything else.
            Some((policy, tiles)) => {
                let joined = plausible_policies::joined(policy, of_right.0, &self.roundings);
                [Some(joined), (joined != policy).then_some(policy)]
                    .map(|policy| Some(Rounded(policy?, tiles)))
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
    pub(super) fn gains(&self, fit: &Fit, right: &Fit) -> bool {
        self.unexplained(right).any(|key| {
            CLEAR * energy(&fit.residuals, key) <= ROUGHLY * energy(&right.residuals, key)
        })
    }

    /// Comparisons that the right head in its best policy does not explain.
    fn unexplained<'s>(&'s self, right: &'s Fit) -> impl Iterator<Item = &'s Key> + 's {
        self.evidence.failing.iter().filter(|key| !self.explains(right, key))
    }

    /// Whether no comparison has an error beyond f32 rounding.
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

pub(super) fn energy(residuals: &Residuals, key: &Key) -> f64 {
    residuals.get(key).map_or(f64::INFINITY, |residual| residual.energy)
}

/// Whether a comparison has no error beyond f32 rounding.
pub(super) fn is_exact(residuals: &Residuals, key: &Key) -> bool {
    residuals.get(key).is_some_and(|residual| residual.energy <= EXACT * residual.reference)
}
