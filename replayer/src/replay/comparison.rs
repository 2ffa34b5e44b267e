//! One comparison of a stage, as the outcome holds it.

use backtape::identity::{Microbatch, Rank};
use backtape::nan::{by_size, largest};
use serde::Serialize;

use crate::compare::tally::relative;
use crate::compare::{Bound, SeenFrom, Tally};

/// One emulated member of the plausible policies and its error energy.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberError {
    /// What this member rounds.
    pub name: String,
    /// Sum of its squared errors against the same reference.
    pub energy: f64,
}

/// Rows of dk by how often they are a label.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HitClass {
    /// Fewest hits of the class.
    pub hits_from: u32,
    /// Rows in it.
    pub rows: u64,
    /// Sum of squared errors in it.
    pub error_energy: f64,
    /// Sum of the variances that the declared precision explains.
    pub expected_energy: f64,
}

/// One comparison: a stage of one unit of one microbatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Which microbatch; `None` for what has none.
    pub microbatch: Option<Microbatch>,
    /// Whose addend; `None` for a global tensor.
    pub rank: Option<Rank>,
    /// Where the captured value came from, as words.
    pub source: String,
    /// The numbers.
    pub tally: Tally,
    /// Why it fails, if it does.
    pub excess: Option<String>,
    /// Why it tells nothing, if so: then a stage is skipped, and a hypothesis not believed.
    pub unjudged: Option<String>,
    /// How many times the error energy that it may have it has, by the test that it is
    /// furthest beyond.
    pub overshoot: f64,
    /// How small a fault would have been seen, where that can be said.
    pub seen_from: Option<SeenFrom>,
    /// The emulated members; empty when the floor is propagated.
    pub members: Vec<MemberError>,
    /// Whether they were emulated in a sample of the rows.
    pub sampled: bool,
    /// Whether it is of a sum of what ranks stored in fewer bits, each for itself: what an
    /// emulation of all their tokens at once does not round.
    pub stored_apart: bool,
    /// For dk: error by label hits.
    pub by_hits: Vec<HitClass>,
}

impl Comparison {
    /// A comparison whose floor is propagated, not emulated.
    pub(super) fn new(
        microbatch: Option<Microbatch>,
        rank: Option<Rank>,
        source: String,
        tally: Tally,
        bound: &Bound,
    ) -> Comparison {
        Comparison {
            microbatch,
            rank,
            source,
            excess: tally.excess(bound),
            unjudged: tally.unjudged(bound),
            overshoot: tally.overshoot(bound),
            seen_from: tally.seen_from(bound),
            tally,
            members: Vec::new(),
            sampled: false,
            stored_apart: false,
            by_hits: Vec::new(),
        }
    }

    /// Error of the worst plausible member, or the propagated expectation.
    pub fn floor(&self) -> f64 {
        let worst = largest(self.members.iter().map(|member| member.energy));
        let energy = if self.members.is_empty() { self.tally.budget.expected() } else { worst };
        relative(energy, self.tally.reference_energy)
    }

    /// Error of the member that rounds least; 0 without one.
    pub fn least(&self) -> f64 {
        let energies = self.members.iter().map(|member| member.energy);
        relative(energies.min_by(by_size).unwrap_or_default(), self.tally.reference_energy)
    }

    /// Captured error over floor; 1 where both are zero.
    pub fn ratio(&self) -> f64 {
        match (self.tally.error(), self.floor()) {
            (0.0, 0.0) => 1.0,
            (error, floor) => error / floor,
        }
    }

    /// Whether it passes, and compares zeros alone.
    pub(super) fn is_empty(&self) -> bool {
        self.excess.is_none() && self.tally.reference_energy == 0.0
    }

    /// The member whose error is nearest to the captured one.
    pub fn best_member(&self) -> Option<&str> {
        let error = self.tally.error_energy;
        let distance = |member: &MemberError| (member.energy / error).ln().abs();
        let nearest = self.members.iter().min_by(|a, b| by_size(&distance(a), &distance(b)));
        nearest.map(|member| member.name.as_str())
    }
}
