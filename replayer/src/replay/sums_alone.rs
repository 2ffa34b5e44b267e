//! dk that was recorded summed over microbatches and not in the addends of that sum, as jobs do
//! that look at their gradients once, at the end: judged against the sum of the reference's dk.

use std::collections::BTreeSet;

use backtape::head::Ranks;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::addends::{Read, Sum};
use super::allowed::{rounded, stored, summed};
use super::kept::Addend;
use super::outcome::{Comparison, Outcome};
use super::world::{At, Expectation};
use super::{Replay, Slice};
use crate::compare::{Allowed, Rows, Tally, once};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, numbers};
use crate::head::{HeadStep, Roundings, Stage};
use crate::kernels::matrix::{Matrix, Values};
use crate::kernels::policy;
use crate::kernels::round::Precision;

/// Whether dk of some microbatch was recorded in sums alone, which are among what is `compared`.
/// What an accumulator of few bits loses is known of recorded addends only.
pub(super) fn of(step: &HeadStep<'_>, compared: &BTreeSet<Stage>, roundings: &Roundings) -> bool {
    let asked = [Stage::Accumulate, Stage::Reduce].iter().any(|stage| compared.contains(stage));
    if !asked || roundings.swamps() {
        return false;
    }
    let several = step.microbatches.iter().any(Option::is_some);
    let sums = [true, false].map(|reduced| step.find_reduced(Role::Dk, reduced).is_some());
    let lacks = |microbatch: &Option<_>| step.find(Role::Dk, *microbatch).is_none();
    several && sums.contains(&true) && step.microbatches.iter().any(lacks)
}

impl Replay<'_> {
    /// Judges such a sum; `why` it is not judged from its addends.
    pub(super) fn sum_alone(
        &self,
        slices: &[Slice],
        (stage, key, why): (Stage, &TensorKey, &str),
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let told = slices.iter().all(|slice| slice.blocked.is_none());
        let own = self.step.lacking.is_nothing() && !self.step.options.declared.tied_embedding;
        let kept = outcome.reference_dk.as_ref().filter(|kept| !kept.allowed.is_empty());
        let (Some(kept), true, Ok(divisor)) = (kept, told && own, self.divisor(slices)) else {
            outcome.skip(stage, why);
            return Ok(());
        };
        let Values64 { values, storage, precision } = self.held_sum(key)?;
        let head = slices.first().and_then(|one| one.inputs.head(self.step));
        let all = head.map_or(1, |head| head.k.rows);
        let every: Vec<usize> = (0..all).collect();
        let classes = kept.classes.as_deref().unwrap_or(&every);
        let (rows, columns) = (classes.len(), kept.total.len() / classes.len().max(1));
        let Some(values) = values.filter(|values| values.len() == all * columns) else {
            outcome.skip(stage, "it has another shape than k");
            return Ok(());
        };
        let chosen = |of: Vec<f64>| -> Vec<f64> {
            let row = |&v: &usize| &of[v * columns..(v + 1) * columns];
            classes.iter().flat_map(row).copied().collect()
        };
        let (values, storage) = (chosen(values), storage.map(chosen));
        let captured = Matrix { rows, cols: columns, values: Values::F64(&values) };
        let ranks = self.ranks_of_tokens(slices);
        let (count, sum) = (slices.len() as f64 * ranks, policy::Sum::of(self.roundings.reduce));
        let reduce = self.roundings.reduce;
        let bound = self.bound(rows, columns);
        let at = At { stage, microbatch: None, rank: None };
        let factor = self.world.scale(at);
        let judged = |by: f64| {
            let by = by / factor;
            let mut reference: Vec<f64> = kept.total.iter().map(|x| x / by).collect();
            let values = &mut reference[..];
            self.world.expected(&mut Expectation { at, rows: classes, columns, values });
            let constant = super::dk::rounds(by);
            let allowed = |row: usize, column: usize, x: f64| {
                let at = row * columns + column;
                let element = &kept.allowed[at];
                let inner = element.allowed();
                let summing = summed(sum, count, kept.total[at], element.squares());
                let inner = Allowed { own: inner.own + summing, ..inner }.times(1.0 / by);
                let once = rounded(reduce, x);
                let shared = inner.shared + if constant { once } else { 0.0 };
                let kept = storage.as_ref().map_or(stored(precision, x), |storage| storage[at]);
                Allowed { own: inner.own + once + kept, shared, ..inner }
            };
            let index = |row: usize| classes[row] as u64;
            let rows = Rows { captured, reference: &reference, index: &index, repeats: &once };
            let tally = Tally::of(&rows, allowed, &bound);
            Comparison::new(None, None, key.to_string(), tally, &bound)
        };
        let mut found = judged(divisor);
        if found.excess.is_some() && ranks > 1.0 && self.may_average_ranks(ranks) {
            let mean = judged(divisor * ranks);
            if mean.excess.is_none() {
                found = mean;
            }
        }
        if found.excess.is_some() && !self.trial {
            let kept = outcome.reference_dk.as_mut().map(|kept| std::mem::take(&mut kept.addends));
            outcome.unrecorded = unrecorded(slices, kept.unwrap_or_default());
        }
        outcome.add(stage, found);
        Ok(())
    }

    /// The captured sum, over the ranks where each holds an addend of it.
    fn held_sum(&self, key: &TensorKey) -> Result<Values64, StepError> {
        if self.step.tensors[key].partial.is_some() {
            let sum = Sum::of_partial(self.step, key)?.oriented(self.step, key);
            let (values, storage) = (Some(sum.total), Some(sum.storage));
            return Ok(Values64 { values, storage, precision: None });
        }
        let tensor = self.step.oriented(key, None)?;
        let precision = matrix(&tensor).and(precision_of(tensor.dtype));
        Ok(Values64 { values: numbers(&tensor), storage: None, precision })
    }

    /// Groups of ranks with tokens of their own, in the microbatch that has most.
    fn ranks_of_tokens(&self, slices: &[Slice]) -> f64 {
        let of = |slice: &Slice| self.step.rank_rows(&slice.inputs).map_or(1, |units| units.len());
        slices.iter().map(of).max().unwrap_or(1).max(1) as f64
    }

    /// Whether the job may have averaged its ranks and not added them. No option says so of a sum
    /// without addends. It may where each rank has a denominator of its own, and where the loss
    /// was multiplied by the number of ranks beforehand.
    fn may_average_ranks(&self, ranks: f64) -> bool {
        let options = &self.step.options;
        let multiplied = options.cotangent.abs() >= ranks && options.cotangent % ranks == 0.0;
        options.scope.ranks != Ranks::All || multiplied
    }
}

/// A captured sum in f64: its values, where it holds numbers, the variance that storing its addends
/// brought, and the format of one that has none.
struct Values64 {
    values: Option<Vec<f64>>,
    storage: Option<Vec<f64>>,
    precision: Option<Precision>,
}

/// What the addends should be, where all of them were kept.
fn unrecorded(slices: &[Slice], kept: Vec<Addend>) -> Vec<Read> {
    let units: usize = slices.iter().map(|slice| slice.units.len()).sum();
    if kept.len() != units {
        return Vec::new();
    }
    let one = |of: Addend| (of.microbatch, of.ranks.first().copied(), of.reference);
    kept.into_iter().map(one).collect()
}
