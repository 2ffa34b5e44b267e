//! The units in which the backward of a microbatch is replayed, and what their
//! losses are divided by.
//!
//! A unit is a set of token rows whose gradients were summed together before
//! anything was recorded: the tokens of the ranks that recorded one addend of
//! dk, all tokens of the microbatch otherwise. Ranks that hold the same tokens
//! (tensor parallelism) hold one addend together.

use std::collections::BTreeMap;

use backtape::head::{Denominator, LossAverage, LossReduction, Scope};
use backtape::identity::Rank;
use backtape::role::Role;

use super::view::flat_rows;
use super::{HeadStep, MicrobatchInputs};
use crate::kernels::matrix::IGNORED;

/// Token rows whose gradients belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// The ranks that hold them; none for all tokens of the microbatch.
    pub ranks: Vec<Rank>,
    /// Row indices into `[T, D]`, ascending.
    pub rows: Vec<usize>,
}

impl Unit {
    /// The rank to name in a report.
    pub fn rank(&self) -> Option<Rank> {
        self.ranks.first().copied()
    }
}

impl HeadStep<'_> {
    /// Token rows by the ranks that recorded addends of dk over them; all tokens
    /// when dk was recorded whole. `Err` says why addends cannot be told apart.
    pub fn units(&self, inputs: &MicrobatchInputs) -> Result<Vec<Unit>, String> {
        let tokens = inputs.tokens();
        let parts = [Role::Dk, Role::DkLse, Role::DkLabel, Role::Dbias];
        let partial = parts.iter().any(|&role| {
            let key = self.find(role, inputs.microbatch);
            key.is_some_and(|key| self.tensors[key].partial.is_some())
        });
        let own = self.own_units(inputs)?;
        match (own, partial) {
            (Some(units), true) => Ok(units),
            (Some(units), false) => {
                let mut rows: Vec<usize> =
                    units.iter().flat_map(|unit| unit.rows.clone()).collect();
                rows.sort_unstable();
                let ranks = units.into_iter().flat_map(|unit| unit.ranks).collect();
                Ok(vec![Unit { ranks, rows }])
            }
            (None, true) => self.rank_rows(inputs),
            (None, false) => Ok(vec![Unit { ranks: Vec::new(), rows: (0..tokens).collect() }]),
        }
    }

    /// The units of the ranks whose tokens alone are judged; `None` where all tokens are.
    fn own_units(&self, inputs: &MicrobatchInputs) -> Result<Option<Vec<Unit>>, String> {
        let Some(only) = &self.only else { return Ok(None) };
        let mut units = self.rank_rows(inputs)?;
        let all = units.len();
        units.retain(|unit| unit.ranks.iter().any(|rank| only.contains(rank)));
        Ok((units.len() < all).then_some(units))
    }

    /// Whether a token is judged, `[T]`; `None` where all are.
    pub(crate) fn judged(&self, inputs: &MicrobatchInputs) -> Option<Vec<bool>> {
        let units = self.own_units(inputs).ok().flatten()?;
        let mut judged = vec![false; inputs.tokens()];
        units.iter().flat_map(|unit| &unit.rows).for_each(|&row| judged[row] = true);
        Some(judged)
    }

    /// The tokens by the ranks that hold them.
    pub(crate) fn rank_rows(&self, inputs: &MicrobatchInputs) -> Result<Vec<Unit>, String> {
        let mut by_rank: BTreeMap<Rank, Vec<usize>> = BTreeMap::new();
        let info = &self.dump.tensors()[&inputs.rows_key];
        // The last dimension of q and of the logits is not one of tokens.
        let leading = info.shape.len() - usize::from(self.scores() != Role::Logprobs);
        for shard in &info.shards {
            let record = self.dump.record(shard);
            let (place, shape) = (&record.place.0[..leading], &record.shape[..leading]);
            by_rank.entry(record.rank).or_default().extend(flat_rows(place, shape));
        }
        let mut by_rows: BTreeMap<Vec<usize>, Vec<Rank>> = BTreeMap::new();
        for (rank, mut rows) in by_rank {
            rows.sort_unstable();
            rows.dedup();
            by_rows.entry(rows).or_default().push(rank);
        }
        let mut seen = vec![0u32; inputs.tokens()];
        by_rows.keys().flatten().for_each(|&row| seen[row] += 1);
        if seen.iter().any(|&n| n != 1) {
            return Err("ranks hold tokens that overlap in part, so the share of each rank's addend is not known".into());
        }
        let unit = |(rows, ranks): (Vec<usize>, Vec<Rank>)| Unit { ranks, rows };
        let mut units: Vec<Unit> = by_rows.into_iter().map(unit).collect();
        units.sort_by_key(Unit::rank);
        Ok(units)
    }

    /// Groups of tokens with one denominator, and that denominator.
    pub fn denominators(
        &self,
        all: &[&MicrobatchInputs],
        own: &MicrobatchInputs,
    ) -> Result<Vec<(Unit, f64)>, String> {
        let whole = || vec![Unit { ranks: Vec::new(), rows: (0..own.tokens()).collect() }];
        let units = match self.options.scope {
            Scope::Rank => self.rank_rows(own)?,
            _ => whole(),
        };
        let with = |unit: Unit| {
            let denominator = self.denominator(all, own, &unit);
            (unit, denominator)
        };
        Ok(units.into_iter().map(with).collect())
    }

    /// What the loss of these rows is divided by, over the declared scope.
    fn denominator(&self, all: &[&MicrobatchInputs], own: &MicrobatchInputs, unit: &Unit) -> f64 {
        if self.options.reduction != LossReduction::Mean {
            return 1.0;
        }
        if let Denominator::Number(n) = self.options.denominator {
            return n;
        }
        let whole = |one: &MicrobatchInputs| self.count(one, &mut (0..one.tokens()));
        match self.options.scope {
            Scope::Global => all.iter().map(|one| whole(one)).sum(),
            Scope::Microbatch => whole(own),
            Scope::Rank => self.count(own, &mut unit.rows.iter().copied()),
        }
    }

    /// The declared denominator over some rows of one microbatch.
    fn count(&self, inputs: &MicrobatchInputs, rows: &mut dyn Iterator<Item = usize>) -> f64 {
        let counted = |&t: &usize| inputs.labels[t] != IGNORED;
        let average = self.options.grpo.as_ref().map(|grpo| grpo.average);
        if average == Some(LossAverage::Sequence) {
            // A mean of sequences: those with a token that counts.
            let held = |t: &usize| counted(t) && inputs.weights[*t] != 0.0;
            let mut sequences: Vec<usize> =
                rows.filter(held).map(|t| t / inputs.sequence.max(1)).collect();
            sequences.dedup();
            return sequences.len() as f64;
        }
        match self.options.denominator {
            Denominator::Valid if self.is_policy_loss() => {
                rows.filter(|t| counted(t) && inputs.weights[*t] != 0.0).count() as f64
            }
            Denominator::Valid => rows.filter(counted).count() as f64,
            Denominator::All => rows.count() as f64,
            Denominator::Weights => rows.filter(counted).map(|t| inputs.weights[t]).sum(),
            Denominator::Number(n) => n,
        }
    }
}

/// What a token's weight is of a mean. A token that does not count adds nothing, even
/// where none counts and the mean is over 0: a job that guards the division has 0 there,
/// and one that does not has a NaN, which then differs.
pub(crate) fn share(weight: f64, denominator: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { weight / denominator }
}
