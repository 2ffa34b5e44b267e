//! How many tokens each rank's microbatches have, by the labels and weights of the loss head.

use std::collections::BTreeMap;

use backtape::head::MicrobatchReduction;
use backtape::identity::Rank;
use backtape::shard::TensorKey;

use super::factor::is_near;
use crate::dump::StepDump;
use crate::head::{HeadStep, MicrobatchInputs};
use crate::kernels::matrix::IGNORED;

/// The tokens of a step.
pub(super) struct TokenCounts {
    /// Of each rank the weights of its tokens that count, summed over a microbatch, in order.
    pub by_rank: BTreeMap<Rank, Vec<f64>>,
    /// The same over all ranks, each token once.
    pub by_microbatch: Vec<f64>,
    /// All tokens of each microbatch, those included that do not count.
    pub with_padding: Vec<f64>,
    /// Whether each loss is the sum of those of its tokens.
    pub are_sums: bool,
}

impl TokenCounts {
    /// Those of a step whose head is in the dump; `None` where labels or weights of it are not.
    pub(super) fn of(
        dump: &StepDump,
        unusable: &dyn Fn(&TensorKey) -> Option<String>,
    ) -> Option<TokenCounts> {
        dump.manifest.head.as_ref()?;
        let step = HeadStep::new(dump, None, unusable).ok()?;
        let inputs = step.microbatches.iter().map(|microbatch| step.tokens_of(*microbatch).ok());
        let inputs: Vec<MicrobatchInputs> = inputs.collect::<Option<_>>()?;
        let mut counts = TokenCounts {
            by_rank: BTreeMap::new(),
            by_microbatch: vec![0.0; inputs.len()],
            with_padding: vec![0.0; inputs.len()],
            are_sums: are_sums(&step, &inputs)?,
        };
        for (at, own) in inputs.iter().enumerate() {
            for unit in step.rank_rows(own).ok()? {
                let counted = unit.rows.iter().filter(|row| own.labels[**row] != IGNORED);
                let weight: f64 = counted.map(|row| own.weights[*row]).sum();
                counts.with_padding[at] += unit.rows.len() as f64;
                counts.by_microbatch[at] += weight;
                for rank in unit.ranks {
                    let of_rank = counts.by_rank.entry(rank);
                    of_rank.or_insert_with(|| vec![0.0; inputs.len()])[at] += weight;
                }
            }
        }
        (counts.whole() > 0.0).then_some(counts)
    }

    /// Those of the step that count.
    pub(super) fn whole(&self) -> f64 {
        self.by_microbatch.iter().sum()
    }

    /// Those of a rank that count.
    pub(super) fn of_rank(&self, rank: Rank) -> Option<f64> {
        Some(self.by_rank.get(&rank)?.iter().sum())
    }

    /// Ranks that hold tokens of their own, as those of data parallelism do.
    pub(super) fn groups(&self) -> f64 {
        let all: f64 = self.by_rank.keys().filter_map(|rank| self.of_rank(*rank)).sum();
        self.by_rank.len() as f64 * self.whole() / all
    }
}

/// Whether what arrives at the loss of each token that counts is its weight, and no share of it.
fn are_sums(step: &HeadStep<'_>, all: &[MicrobatchInputs]) -> Option<bool> {
    let is_mean = step.options.microbatch_reduction == MicrobatchReduction::Mean && all.len() > 1;
    if is_mean || step.is_policy_loss() {
        return Some(false);
    }
    let inputs: Vec<&MicrobatchInputs> = all.iter().collect();
    for own in all {
        for (unit, denominator) in step.denominators(&inputs, own).ok()? {
            let counted = unit.rows.iter().filter(|row| own.labels[**row] != IGNORED);
            let mut shares =
                counted.map(|row| own.cotangent[*row] * step.options.cotangent / denominator);
            if !shares.all(|share| is_near(share, 1.0)) {
                return Some(false);
            }
        }
    }
    Some(true)
}
