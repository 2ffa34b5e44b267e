//! Whether the factors by which stages are off are those of another divisor of the loss: another
//! count of tokens.
//!
//! The declared divisors, and the groups of tokens that are counted together, are computed once, as
//! many counts are tried.

use std::collections::BTreeMap;

use backtape::head::Span;
use backtape::identity::{Microbatch, Rank};

use super::common_factor::{SCALED, informative, is_near};
use crate::diagnose::evidence::{Evidence, Key};
use crate::diagnose::worlds::{Counted, divisor};
use crate::head::units::CountedTogether;
use crate::head::{MicrobatchInputs, Stage, Unit};

/// Stages whose values follow the divisors of the tokens' losses: all but the sums over
/// microbatches and ranks.
const FOLLOW: &[Stage] = SCALED.split_at(10).0;

/// The factor by which another divisor changes the gradients of a microbatch's tokens on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// Which rank; none for all.
    pub rank: Option<Rank>,
    /// The factor.
    pub ratio: f64,
}

/// The declared divisors of the tokens' losses.
pub struct Divisors<'e> {
    evidence: &'e Evidence<'e>,
    all: Vec<&'e MicrobatchInputs>,
    /// The declared divisors of each microbatch: groups of its tokens with their divisor.
    declared: Vec<Vec<(Unit, f64)>>,
}

impl<'e> Divisors<'e> {
    /// `None` where no stage that follows a divisor fails, or the divisors cannot be computed.
    pub fn of(evidence: &'e Evidence<'_>) -> Option<Divisors<'e>> {
        if !evidence.fails_any(FOLLOW) {
            return None;
        }
        let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
        let divisors_of =
            |inputs: &&MicrobatchInputs| evidence.step.denominators(&all, inputs).ok();
        let declared = all.iter().map(divisors_of).collect::<Option<_>>()?;
        Some(Divisors { evidence, all, declared })
    }

    /// The declared divisors: of each microbatch, groups of its tokens with their divisor.
    pub fn declared(&self) -> &[Vec<(Unit, f64)>] {
        &self.declared
    }

    /// The groups of each microbatch's tokens that this span counts together; none where ranks
    /// share tokens.
    pub fn groups(&self, span: &Span) -> Option<Vec<Vec<CountedTogether<'e>>>> {
        let mut other = self.evidence.step.clone();
        other.options.scope = span.clone();
        other.all_groups(&self.all).ok()
    }

    /// The factor by which a world changes the gradients of each rank in each microbatch; none
    /// where it cannot be computed.
    pub fn ratios(
        &self,
        world: &Counted,
        groups: &[Vec<CountedTogether<'e>>],
    ) -> Option<Vec<Ratio>> {
        let policy = self.evidence.step.is_policy_loss();
        let mut ratios = Vec::new();
        for ((inputs, groups), declared) in self.all.iter().zip(groups).zip(&self.declared) {
            let used = world.of_groups(policy, groups);
            for (unit, n) in if used.len() >= declared.len() { &used } else { declared } {
                let Some(&row) = unit.rows.first() else { continue };
                let ratio = divisor(declared, row)? / divisor(&used, row)?;
                if !n.is_finite() || !ratio.is_finite() {
                    continue;
                }
                let ranks = unit.ranks.iter().map(|&rank| Some(rank));
                let of_all = unit.ranks.is_empty().then_some(None);
                let of_rank = |rank| Ratio { microbatch: inputs.microbatch, rank, ratio };
                ratios.extend(ranks.chain(of_all).map(of_rank));
            }
        }
        Some(ratios).filter(|ratios| !ratios.is_empty())
    }

    /// Whether some failing stage is off, in all its comparisons, by these factors divided by
    /// `means`.
    pub fn fit(&self, ratios: &[Ratio], means: f64) -> bool {
        // A comparison over several ranks has a factor between the smallest and the largest of
        // theirs.
        let range = |key: &Key| {
            let of_unit = ratios.iter().filter(|ratio| {
                ratio.microbatch == key.microbatch
                    && (ratio.rank.is_none() || key.rank.is_none() || ratio.rank == key.rank)
            });
            of_unit
                .map(|ratio| ratio.ratio / means)
                .fold((f64::INFINITY, 0.0f64), |(low, high), ratio| {
                    (low.min(ratio), high.max(ratio))
                })
        };
        let within = |key: &Key, factor: f64| {
            let (low, high) = range(key);
            (low..=high).contains(&factor) || is_near(factor, low) || is_near(factor, high)
        };
        FOLLOW.iter().any(|&stage| {
            self.evidence.fails(stage)
                && informative(self.evidence, stage)
                    .all(|(key, residual)| residual.nonfinite > 0 || within(&key, residual.factor))
        })
    }
}

/// Factors by which the sums over microbatches and ranks are off: the number of microbatches, of
/// ranks, their product, or the inverse of one of these, as where a mean was taken for a sum.
pub fn sums(evidence: &Evidence<'_>) -> BTreeMap<Stage, f64> {
    let (m, w) = (evidence.microbatches() as f64, evidence.ranks() as f64);
    let factors = [m, 1.0 / m, w, 1.0 / w, m * w, 1.0 / (m * w)];
    let of_stage = |stage: Stage| {
        let all = |&&factor: &&f64| {
            factor != 1.0
                && evidence.fails(stage)
                && informative(evidence, stage)
                    .all(|(_, residual)| is_near(residual.factor, factor))
        };
        factors.iter().find(all).map(|&factor| (stage, factor))
    };
    Stage::SUMS.into_iter().filter_map(of_stage).collect()
}
