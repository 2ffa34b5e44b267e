//! dk that was recorded summed over microbatches and not in the addends of that sum, as jobs do
//! that look at their gradients once, at the end: judged against the sum of the reference's dk.

use backtape::head::Ranks;
use backtape::identity::Rank;
use backtape::shard::TensorKey;

use super::addends::{Read, Sum};
use super::comparison::Comparison;
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::reference_dk::{Addend, KeptSum};
use super::rounding_variance::{rounded, stored};
use super::world::{Expectation, StagePlace};
use crate::compare::{Allowed, Rows, Tally, once};
use crate::dump::name_ranks;
use crate::head::Stage;
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, numbers};
use crate::kernels::matrix::{Matrix, Values};
use crate::kernels::policy;
use crate::kernels::round::Precision;

/// One captured sum and what it should be.
struct Judged<'a> {
    pub(super) stage: Stage,
    key: &'a TensorKey,
    pub(super) sum: &'a KeptSum,
    /// The classes that the sum's rows are.
    classes: &'a [usize],
    captured: Values64,
    /// Rows of tokens' own ranks that are in it.
    pub(super) ranks: f64,
    /// What was added: each rank's part of each microbatch.
    count: f64,
}

impl Judge<'_> {
    /// Judges such sums; `why` they are not judged from their addends.
    pub(super) fn judge_sum_without_addends(
        &self,
        microbatches: &[HeadMicrobatch],
        (stage, key, why): (Stage, &TensorKey, &str),
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let told = microbatches.iter().all(|microbatch| microbatch.blocked.is_none());
        let is_whole =
            self.plan.step.lacking.is_nothing() && !self.plan.step.options.declared.tied_embedding;
        let all = outcome.reference_dk.as_ref();
        let judged = all.is_some_and(|kept| !kept.sums[0].allowed.is_empty()) && told && is_whole;
        let (true, Ok(divisor)) = (judged, self.plan.divisor(microbatches)) else {
            outcome.skip(stage, why);
            return Ok(());
        };
        // The norm of all gradients is judged from it as well, so it is put back.
        let Some(mut kept) = outcome.reference_dk.take() else { return Ok(()) };
        let head =
            microbatches.first().and_then(|microbatch| microbatch.inputs.head(self.plan.step));
        let every: Vec<usize> = (0..head.map_or(1, |head| head.k.rows)).collect();
        let classes = kept.classes.as_deref().unwrap_or(&every);
        let (mut wrong, mut averages) = (false, 1.0_f64);
        for sum in &kept.sums {
            let captured = match self.plan.captured_sum(key, &sum.ranks, microbatches)? {
                Ok(captured) => captured,
                Err(why) => {
                    outcome.skip(stage, why);
                    continue;
                }
            };
            let columns = sum.total.len() / classes.len().max(1);
            let Some(captured) = captured.chosen(classes, (every.len(), columns)) else {
                outcome.skip(stage, "it has another shape than k");
                continue;
            };
            let ranks =
                if sum.ranks.is_empty() { self.plan.ranks_of_tokens(microbatches) } else { 1.0 };
            let count = microbatches.len() as f64 * ranks;
            let judged = Judged { stage, key, sum, classes, captured, ranks, count };
            let (comparison, averaged) = self.compare_sum_or_mean(&judged, divisor);
            averages = averages.max(averaged);
            wrong |= comparison.excess.is_some();
            outcome.add(stage, comparison);
        }
        if wrong && !self.plan.trial {
            outcome.unrecorded = unrecorded(microbatches, std::mem::take(&mut kept.addends));
        }
        kept.averaged = kept.averaged.max(averages);
        outcome.reference_dk = Some(kept);
        Ok(())
    }

    /// The comparison, and 1; where the ranks may have been averaged, that of the mean if it
    /// agrees, and over how many it is.
    fn compare_sum_or_mean(&self, judged: &Judged<'_>, divisor: f64) -> (Comparison, f64) {
        let comparison = self.compare_sum(judged, divisor);
        if comparison.excess.is_some()
            && judged.ranks > 1.0
            && self.plan.may_average_ranks(judged.ranks)
        {
            let mean = self.compare_sum(judged, divisor * judged.ranks);
            if mean.excess.is_none() {
                return (mean, judged.ranks);
            }
        }
        (comparison, 1.0)
    }

    fn compare_sum(&self, judged: &Judged<'_>, divisor: f64) -> Comparison {
        let (rows, columns) =
            (judged.classes.len(), judged.sum.total.len() / judged.classes.len().max(1));
        let captured = Matrix { rows, cols: columns, values: Values::F64(&judged.captured.values) };
        let reduce = self.plan.roundings.reduce;
        let sum = policy::Sum::of(reduce);
        let bound = self.bound(rows, columns);
        let rank = judged.sum.ranks.first().copied();
        let place = StagePlace { stage: judged.stage, microbatch: None, rank };
        let by = divisor / self.world.scale(place);
        let mut reference: Vec<f64> = judged.sum.total.iter().map(|x| x / by).collect();
        let values = &mut reference[..];
        self.world.expected(&mut Expectation { place, rows: judged.classes, columns, values });
        let constant = super::elementwise::rounds(by);
        let allowed = |row: usize, column: usize, x: f64| {
            let index = row * columns + column;
            let element = &judged.sum.allowed[index];
            let inner = element.allowed();
            let summing = sum.variance(judged.count, judged.sum.total[index], element.squares());
            let inner = Allowed { own: inner.own + summing, ..inner }.times(1.0 / by);
            let once = rounded(reduce, x);
            let shared = inner.shared + if constant { once } else { 0.0 };
            Allowed { own: inner.own + once + judged.captured.stored(index, x), shared, ..inner }
        };
        let index = |row: usize| judged.classes[row] as u64;
        let rows = Rows { captured, reference: &reference, index: &index, repeats: &once };
        let tally = Tally::of(&rows, allowed, &bound);
        Comparison::new(None, rank, judged.key.to_string(), tally, &bound)
    }
}

impl Plan<'_> {
    /// The captured sum: what these ranks hold of it together, or where none is named, what all
    /// do. `Err` says why there is none.
    fn captured_sum(
        &self,
        key: &TensorKey,
        ranks: &[Rank],
        microbatches: &[HeadMicrobatch],
    ) -> Result<Result<Values64, String>, StepError> {
        if self.step.tensors[key].partial.is_none() {
            let tensor = self.step.oriented(key, None)?;
            let precision = matrix(&tensor).and(precision_of(tensor.dtype));
            let values = numbers(&tensor).unwrap_or_default();
            return Ok(Ok(Values64 { values, storage: None, precision }));
        }
        let mut sum = Sum::new(&self.step.tensors[key].shape);
        if ranks.is_empty() {
            let added =
                microbatches.iter().map(|microbatch| self.step.all_added(key, &microbatch.inputs));
            if let Err(why) = added.collect::<Result<(), String>>() {
                return Ok(Err(why));
            }
            sum = Sum::of_addends(self.step, key)?;
        } else if !sum.add_of(self.step, key, ranks)? {
            let ranks = name_ranks(ranks);
            return Ok(Err(format!("{ranks} recorded no sum, though tokens lie there")));
        }
        let sum = sum.oriented(self.step, key);
        Ok(Ok(Values64 { values: sum.total, storage: Some(sum.storage), precision: None }))
    }

    /// Groups of ranks with tokens of their own, in the microbatch that has most.
    fn ranks_of_tokens(&self, microbatches: &[HeadMicrobatch]) -> f64 {
        let units_of = |microbatch: &HeadMicrobatch| {
            self.step.rank_rows(&microbatch.inputs).map_or(1, |units| units.len())
        };
        microbatches.iter().map(units_of).max().unwrap_or(1).max(1) as f64
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

/// A captured sum in f64: its values, the variance that storing its addends brought, and the
/// format of one that has no addends.
struct Values64 {
    values: Vec<f64>,
    storage: Option<Vec<f64>>,
    precision: Option<Precision>,
}

impl Values64 {
    /// The rows of some classes; `None` where the sum has another shape than `[all, columns]`.
    fn chosen(self, classes: &[usize], (all, columns): (usize, usize)) -> Option<Values64> {
        if self.values.len() != all * columns {
            return None;
        }
        let chosen = |values: Vec<f64>| -> Vec<f64> {
            let row = |&v: &usize| &values[v * columns..(v + 1) * columns];
            classes.iter().flat_map(row).copied().collect()
        };
        let (values, storage) = (chosen(self.values), self.storage.map(chosen));
        Some(Values64 { values, storage, ..self })
    }

    /// Variance of an element that storing brought.
    fn stored(&self, element: usize, x: f64) -> f64 {
        self.storage.as_ref().map_or(stored(self.precision, x), |storage| storage[element])
    }
}

/// What the addends should be, where all of them were kept.
fn unrecorded(microbatches: &[HeadMicrobatch], kept: Vec<Addend>) -> Vec<Read> {
    let units: usize = microbatches.iter().map(|microbatch| microbatch.units.len()).sum();
    if kept.len() != units {
        return Vec::new();
    }
    let read =
        |addend: Addend| (addend.microbatch, addend.ranks.first().copied(), addend.reference);
    kept.into_iter().map(read).collect()
}
