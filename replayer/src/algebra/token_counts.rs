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
    /// What arrives at the losses of all tokens together: 1 for the mean of them. `None` of a policy loss.
    pub weight: Option<f64>,
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
        let arriving = arriving(&step, &inputs);
        let mut counts = TokenCounts {
            by_rank: BTreeMap::new(),
            by_microbatch: vec![0.0; inputs.len()],
            with_padding: vec![0.0; inputs.len()],
            are_sums: arriving.as_ref().is_some_and(|own| own.are_sums),
            weight: arriving.map(|own| own.weight),
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

/// What arrives at the losses of tokens.
struct Arriving {
    /// Of all tokens together.
    weight: f64,
    /// Whether it is the weight of each token that counts, and no share of it.
    are_sums: bool,
}

/// What arrives at the losses of the tokens of all microbatches; `None` of a policy loss.
fn arriving(step: &HeadStep<'_>, all: &[MicrobatchInputs]) -> Option<Arriving> {
    if step.is_policy_loss() {
        return None;
    }
    let is_mean = step.options.microbatch_reduction == MicrobatchReduction::Mean;
    let each = if is_mean { 1.0 / all.len() as f64 } else { 1.0 };
    let inputs: Vec<&MicrobatchInputs> = all.iter().collect();
    let mut arriving = Arriving { weight: 0.0, are_sums: true };
    for own in all {
        for (unit, denominator) in step.denominators(&inputs, own).ok()? {
            for row in unit.rows.iter().filter(|row| own.labels[**row] != IGNORED) {
                let of_token = each * own.cotangent[*row] * step.options.cotangent / denominator;
                arriving.are_sums &= is_near(of_token, 1.0);
                arriving.weight += own.weights[*row] * of_token;
            }
        }
    }
    Some(arriving)
}
