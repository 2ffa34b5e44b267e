//! dk that was recorded summed over microbatches and not in the addends of that sum, as jobs do
//! that look at their gradients once, at the end: judged against the sum of the reference's dk.

use backtape::head::Ranks;
use backtape::identity::Rank;
use backtape::shard::TensorKey;

use super::addends::{Read, Sum};
use super::comparison::Comparison;
use super::judge::Judge;
use super::microbatch::Slice;
use super::outcome::Outcome;
use super::plan::Plan;
use super::reference_dk::{Addend, KeptSum};
use super::rounding_variance::{rounded, stored};
use super::world::{At, Expectation};
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
        slices: &[Slice],
        (stage, key, why): (Stage, &TensorKey, &str),
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let told = slices.iter().all(|slice| slice.blocked.is_none());
        let own =
            self.plan.step.lacking.is_nothing() && !self.plan.step.options.declared.tied_embedding;
        let all = outcome.reference_dk.as_ref();
        let judged = all.is_some_and(|kept| !kept.sums[0].allowed.is_empty()) && told && own;
        let (true, Ok(divisor)) = (judged, self.plan.divisor(slices)) else {
            outcome.skip(stage, why);
            return Ok(());
        };
        // The norm of all gradients is judged from it as well, so it is put back.
        let Some(mut kept) = outcome.reference_dk.take() else { return Ok(()) };
        let head = slices.first().and_then(|one| one.inputs.head(self.plan.step));
        let every: Vec<usize> = (0..head.map_or(1, |head| head.k.rows)).collect();
        let classes = kept.classes.as_deref().unwrap_or(&every);
        let (mut wrong, mut averages) = (false, 1.0_f64);
        for sum in &kept.sums {
            let captured = match self.plan.captured_sum(key, &sum.ranks, slices)? {
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
            let ranks = if sum.ranks.is_empty() { self.plan.ranks_of_tokens(slices) } else { 1.0 };
            let count = slices.len() as f64 * ranks;
            let one = Judged { stage, key, sum, classes, captured, ranks, count };
            let (found, averaged) = self.compare_sum_or_mean(&one, divisor);
            averages = averages.max(averaged);
            wrong |= found.excess.is_some();
            outcome.add(stage, found);
        }
        if wrong && !self.plan.trial {
            outcome.unrecorded = unrecorded(slices, std::mem::take(&mut kept.addends));
        }
        kept.averaged = kept.averaged.max(averages);
        outcome.reference_dk = Some(kept);
        Ok(())
    }

    /// The comparison, and 1; where the ranks may have been averaged, that of the mean if it
    /// agrees, and over how many it is.
    fn compare_sum_or_mean(&self, of: &Judged<'_>, divisor: f64) -> (Comparison, f64) {
        let found = self.compare_sum(of, divisor);
        if found.excess.is_some() && of.ranks > 1.0 && self.plan.may_average_ranks(of.ranks) {
            let mean = self.compare_sum(of, divisor * of.ranks);
            if mean.excess.is_none() {
                return (mean, of.ranks);
            }
        }
        (found, 1.0)
    }

    fn compare_sum(&self, of: &Judged<'_>, divisor: f64) -> Comparison {
        let (rows, columns) = (of.classes.len(), of.sum.total.len() / of.classes.len().max(1));
        let captured = Matrix { rows, cols: columns, values: Values::F64(&of.captured.values) };
        let reduce = self.plan.roundings.reduce;
        let sum = policy::Sum::of(reduce);
        let bound = self.bound(rows, columns);
        let rank = of.sum.ranks.first().copied();
        let at = At { stage: of.stage, microbatch: None, rank };
        let by = divisor / self.world.scale(at);
        let mut reference: Vec<f64> = of.sum.total.iter().map(|x| x / by).collect();
        let values = &mut reference[..];
        self.world.expected(&mut Expectation { at, rows: of.classes, columns, values });
        let constant = super::elementwise::rounds(by);
        let allowed = |row: usize, column: usize, x: f64| {
            let at = row * columns + column;
            let element = &of.sum.allowed[at];
            let inner = element.allowed();
            let summing = sum.variance(of.count, of.sum.total[at], element.squares());
            let inner = Allowed { own: inner.own + summing, ..inner }.times(1.0 / by);
            let once = rounded(reduce, x);
            let shared = inner.shared + if constant { once } else { 0.0 };
            Allowed { own: inner.own + once + of.captured.stored(at, x), shared, ..inner }
        };
        let index = |row: usize| of.classes[row] as u64;
        let rows = Rows { captured, reference: &reference, index: &index, repeats: &once };
        let tally = Tally::of(&rows, allowed, &bound);
        Comparison::new(None, rank, of.key.to_string(), tally, &bound)
    }
}

impl Plan<'_> {
    /// The captured sum: what these ranks hold of it together, or where none is named, what all
    /// do. `Err` says why there is none.
    fn captured_sum(
        &self,
        key: &TensorKey,
        ranks: &[Rank],
        slices: &[Slice],
    ) -> Result<Result<Values64, String>, StepError> {
        if self.step.tensors[key].partial.is_none() {
            let tensor = self.step.oriented(key, None)?;
            let precision = matrix(&tensor).and(precision_of(tensor.dtype));
            let values = numbers(&tensor).unwrap_or_default();
            return Ok(Ok(Values64 { values, storage: None, precision }));
        }
        let mut sum = Sum::new(&self.step.tensors[key].shape);
        if ranks.is_empty() {
            let added = slices.iter().map(|slice| self.step.all_added(key, &slice.inputs));
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
        let chosen = |of: Vec<f64>| -> Vec<f64> {
            let row = |&v: &usize| &of[v * columns..(v + 1) * columns];
            classes.iter().flat_map(row).copied().collect()
        };
        let (values, storage) = (chosen(self.values), self.storage.map(chosen));
        Some(Values64 { values, storage, ..self })
    }

    /// Variance of an element that storing brought.
    fn stored(&self, at: usize, x: f64) -> f64 {
        self.storage.as_ref().map_or(stored(self.precision, x), |storage| storage[at])
    }
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
