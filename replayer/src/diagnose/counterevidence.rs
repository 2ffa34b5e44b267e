//! What speaks against a hypothesis: comparisons that agree as declared and would clearly fail in
//! its world.
//!
//! A hypothesis that explains one gradient of a unit but would break another gradient of the same
//! side (of q, or of k) is refuted there. One that would break the other side, the forward or the
//! sums may hold on one side alone; that costs it half a fitted number. The same goes for one that
//! explains the softmax part of a gradient and would break the label's part, or the other way
//! round: fused kernels compute the two separately.

use std::collections::BTreeSet;

use super::decision::CLEAR;
use super::evidence::{Evidence, Key, Residuals};
use crate::head::{Side, Stage};

/// A part of the step that may be right while another is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The forward pass and the loss.
    Forward,
    /// dlogits, where they were captured.
    Plane,
    /// The gradient of q and its parts.
    OfQ,
    /// The gradients of k and of the bias, and their parts.
    OfK,
    /// Sums over microbatches and ranks.
    Sums,
    /// The softmax part or the label's part of dq or dk.
    Only(Stage),
}

impl Part {
    /// The part that a stage belongs to.
    pub fn of(stage: Stage) -> Part {
        match stage.side() {
            Side::Input | Side::Forward => Part::Forward,
            Side::Entries => Part::Plane,
            Side::OfQ => Part::OfQ,
            Side::OfK => Part::OfK,
            Side::Sums => Part::Sums,
        }
    }

    /// The part in words.
    pub fn words(self) -> &'static str {
        match self {
            Part::Forward => "the forward",
            Part::Plane => "dlogits",
            Part::OfQ => "dq",
            Part::OfK => "dk",
            Part::Sums => "the sums of dk",
            Part::Only(stage) => stage.name(),
        }
    }
}

/// The parts of the step that speak against a hypothesis without refuting it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counterevidence {
    /// Parts of the step that agree as declared and would not in its world.
    pub parts: BTreeSet<Part>,
}

impl Evidence<'_> {
    /// The failing comparisons that a world explains, and the parts of the step that speak against
    /// it. `within`: all comparisons in that world.
    pub fn explained(&self, within: &Residuals) -> (BTreeSet<Key>, Counterevidence) {
        let passes = |key: &&Key| within.get(key).is_some_and(|residual| residual.passes);
        let explained: BTreeSet<Key> = self.failing.iter().filter(passes).copied().collect();
        let harmed: Vec<Key> =
            self.residuals.keys().filter(|key| self.harms(within, key)).copied().collect();
        let meets = |a: &Key, b: &Key| {
            a.microbatch == b.microbatch
                && (a.rank == b.rank || a.rank.is_none() || b.rank.is_none())
        };
        let refuted = |key: &Key| {
            let same = |other: &Key| Part::of(key.stage) == Part::of(other.stage);
            let refutes = |other: &Key| {
                same(other) && !are_siblings(key.stage, other.stage) && meets(key, other)
            };
            harmed.iter().any(refutes)
        };
        let explained: BTreeSet<Key> = explained.into_iter().filter(|key| !refuted(key)).collect();
        let beside = |other: &&Key| {
            let sums = Part::of(other.stage) == Part::Sums;
            explained.iter().any(|key| sums || meets(key, other))
        };
        let part = |key: &Key| {
            let sibling = explained.iter().any(|of| are_siblings(of.stage, key.stage));
            if sibling { Part::Only(key.stage) } else { Part::of(key.stage) }
        };
        let parts = harmed.iter().filter(beside).map(part).collect();
        (explained, Counterevidence { parts })
    }

    /// Whether a comparison that agrees as declared clearly fails in a world.
    fn harms(&self, within: &Residuals, key: &Key) -> bool {
        let (Some(before), Some(after)) = (self.residuals.get(key), within.get(key)) else {
            return false;
        };
        before.passes && !after.passes && after.energy > CLEAR * before.energy.max(before.floor)
    }
}

/// Whether two stages are the softmax part and the label's part of one gradient.
fn are_siblings(stage: Stage, other: Stage) -> bool {
    let pairs = [(Stage::DqLse, Stage::DqLabel), (Stage::DkLse, Stage::DkLabel)];
    pairs.iter().any(|&(a, b)| (stage, other) == (a, b) || (stage, other) == (b, a))
}
