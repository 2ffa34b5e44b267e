//! A recorded loss that is one number: of a microbatch, of some ranks' tokens, or of the step.

use backtape::head::{LossReduction, Ranks};
use backtape::identity::{Microbatch, Rank};
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::addends::Sum;
use super::comparison::Comparison;
use super::correlated_errors::{one_sided_error, sequential_variance};
use super::expected_loss::{LossTotals, Total};
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::rounding_variance::{relative, stored};
use super::token_column::{Expected, Tokens};
use super::world::{Expectation, StagePlace};
use crate::compare::{Allowed, Bound, Rows, Tally, once};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, unfit};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels;
use crate::kernels::matrix::{Matrix, Values};
use crate::kernels::policy::{Order, Policy};

/// Where a loss stands in the report.
#[derive(Clone, Copy)]
struct Place<'a> {
    pub(super) microbatch: Option<Microbatch>,
    rank: Option<Rank>,
    key: &'a TensorKey,
    /// Losses that are judged beside it.
    losses: usize,
}

impl Judge<'_> {
    /// The recorded loss against the tokens' terms, or their sums.
    pub(super) fn judge_loss(
        &self,
        head_microbatch: &HeadMicrobatch,
        terms: &Expected,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let microbatch = head_microbatch.inputs.microbatch;
        if !self.plan.wants(Stage::Loss) || !self.plan.holds_loss(head_microbatch) {
            return Ok(());
        }
        let is_recorded = |role| self.plan.step.find(role, microbatch).is_some();
        let captured = is_recorded(Role::Lse) && is_recorded(Role::LabelLogits);
        if !captured && self.plan.step.judged(&head_microbatch.inputs).is_some() {
            let why = "ranks hold several versions of what it is computed from: record lse and label_logits to have it judged";
            outcome.leave(Stage::Loss, microbatch, why);
            return Ok(());
        }
        let place = StagePlace { stage: Stage::Loss, microbatch, rank: None };
        let terms = terms.clone().times(self.world.scale(place));
        let totals = self.totals(head_microbatch, &terms);
        if let Some(key) = self.plan.step.find(Role::Loss, microbatch) {
            let result = match self.plan.step.options.reduction {
                LossReduction::None => self.judge_losses(head_microbatch, &terms, outcome),
                _ => self.judge_totals(key, microbatch, &totals, outcome),
            };
            outcome.spared(result, (&[Stage::Loss], microbatch))?;
        }
        outcome.losses.push(totals);
        Ok(())
    }
}

impl Plan<'_> {
    /// Whether a loss of the microbatch, or of the step, was recorded.
    pub(super) fn holds_loss(&self, microbatch: &HeadMicrobatch) -> bool {
        self.step.recorded(Role::Loss, microbatch.inputs.microbatch).is_some()
    }
}

impl Judge<'_> {
    /// A loss that was recorded without a microbatch, of a step that has some: the sum over them
    /// as the head declares it.
    pub(super) fn step_loss(
        &self,
        microbatches: &[HeadMicrobatch],
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let several = microbatches.iter().all(|microbatch| microbatch.inputs.microbatch.is_some());
        let Some(key) = self.plan.step.find(Role::Loss, None).filter(|_| several) else {
            return Ok(());
        };
        if !self.plan.wants(Stage::Loss) {
            return Ok(());
        }
        let result = self.judge_step_loss(microbatches, key, outcome);
        outcome.spared(result, (&[Stage::Loss], None)).map(|_| ())
    }

    fn judge_step_loss(
        &self,
        microbatches: &[HeadMicrobatch],
        key: &TensorKey,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let losses = std::mem::take(&mut outcome.losses);
        let ready = match self.plan.divisor(microbatches) {
            _ if self.plan.step.options.reduction == LossReduction::None => {
                Err("reduction=none: the loss of a step is no sum that the head declares".into())
            }
            _ if losses.len() != microbatches.len() => {
                Err("the loss of some microbatch could not be worked out".to_string())
            }
            divisor => divisor,
        };
        match ready {
            Ok(divisor) => {
                let totals = self.loss_over_microbatches(&losses, divisor)?;
                self.judge_totals(key, None, &totals, outcome)
            }
            Err(why) => {
                outcome.leave(Stage::Loss, None, format!("{key}: {why}"));
                Ok(())
            }
        }
    }

    /// The loss of each token.
    fn judge_losses(
        &self,
        microbatch: &HeadMicrobatch,
        terms: &Expected,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let Some(captured) = self.column(Role::Loss, microbatch)? else { return Ok(()) };
        let comparison =
            self.judge_column(&microbatch.inputs, &captured, terms, Tokens::All, Vec::new());
        outcome.add(Stage::Loss, comparison);
        Ok(())
    }

    /// Judges what ranks hold of a loss: one number, or addends of it.
    fn judge_totals(
        &self,
        key: &TensorKey,
        microbatch: Option<Microbatch>,
        totals: &LossTotals,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let by_rank = self.plan.step.options.scope.ranks != Ranks::All;
        let place = Place { microbatch, rank: None, key, losses: 1 };
        let several = totals.by_rank.as_ref().map_or(true, |ranks| ranks.len() > 1);
        let Some(reduction) = self.plan.step.tensors[key].partial else {
            if by_rank && several {
                let why = "each rank has a loss of its own, as scope declares; record it with partial=\"mean\" or partial=\"sum\"";
                outcome.leave(Stage::Loss, microbatch, why);
                return Ok(());
            }
            let tensor = self.plan.step.assemble(key)?;
            let captured = one_float(&tensor)?;
            let storage = totals.stores * stored(precision_of(tensor.dtype), totals.whole.value);
            self.judge_total(place, captured, (&totals.whole, storage), outcome);
            return Ok(());
        };
        // A mean of addends is the loss whatever each of them was multiplied by; where each has
        // a denominator of its own, and where they are summed, each is the loss of its tokens.
        if reduction == Reduction::Mean && !by_rank {
            let sum = Sum::of_partial(self.plan.step, key)?;
            let [captured] = sum.total[..] else { return Err(self.plan.no_float(key)) };
            let storage = totals.stores * sum.storage[0];
            self.judge_total(place, captured, (&totals.whole, storage), outcome);
            return Ok(());
        }
        let ranks = match &totals.by_rank {
            Ok(ranks) => ranks,
            Err(why) => {
                outcome.leave(Stage::Loss, microbatch, why.clone());
                return Ok(());
            }
        };
        for (holders, total) in ranks {
            let tensor = self.plan.step.addend(key, holders)?;
            let captured = one_float(&tensor)?;
            let storage = totals.stores * stored(precision_of(tensor.dtype), total.value);
            let place = Place { rank: holders.first().copied(), losses: ranks.len(), ..place };
            self.judge_total(place, captured, (total, storage), outcome);
        }
        Ok(())
    }
}

impl Plan<'_> {
    fn no_float(&self, key: &TensorKey) -> StepError {
        let shape = format!("of shape {:?}", self.step.tensors[key].shape);
        StepError::Unfit { key: key.clone(), found: shape, wanted: "one float".into() }
    }
}

impl Judge<'_> {
    fn judge_total(
        &self,
        place: Place<'_>,
        captured: f64,
        (total, storage): (&Total, f64),
        outcome: &mut Outcome,
    ) {
        let bound = self.bound(1, 1);
        let share = Bound::new(self.plan.comparisons * place.losses, 1, 1);
        let bound = Bound { nan_is_meant: bound.nan_is_meant, measured: bound.measured, ..share };
        let rows = Rows {
            captured: Matrix { rows: 1, cols: 1, values: Values::F64(&[captured]) },
            reference: &[total.value],
            index: &|_| 0,
            repeats: &once,
        };
        let allowed = |_, _, _| Allowed {
            own: total.own + storage,
            shared: total.shared * total.shared,
            certain: total.certain,
            ..Allowed::default()
        };
        let tally = Tally::of(&rows, allowed, &bound);
        let Place { microbatch, rank, key, .. } = place;
        outcome.add(Stage::Loss, Comparison::new(microbatch, rank, key.to_string(), tally, &bound));
    }

    /// The loss over all tokens, and over each rank's.
    fn totals(&self, microbatch: &HeadMicrobatch, terms: &Expected) -> LossTotals {
        let inputs = &microbatch.inputs;
        let all: Vec<usize> = (0..inputs.tokens()).collect();
        let ranks = self.plan.step.rank_rows(inputs);
        let of_ranks = |units: Vec<crate::head::Unit>| {
            let total_of = |unit: crate::head::Unit| {
                let total = self.total(inputs, terms, (&unit.rows, unit.rank()));
                (unit.ranks, total)
            };
            units.into_iter().map(total_of).collect()
        };
        LossTotals {
            microbatch: inputs.microbatch,
            whole: self.total(inputs, terms, (&all, None)),
            by_rank: ranks.map(of_ranks),
            stores: 1.0,
        }
    }

    /// The sum of some tokens' terms.
    fn total(
        &self,
        inputs: &MicrobatchInputs,
        terms: &Expected,
        (rows, rank): (&[usize], Option<Rank>),
    ) -> Total {
        let select = |values: &[f64]| -> Vec<f64> {
            rows.iter().filter_map(|&t| values.get(t)).copied().collect()
        };
        let (values, copies) = (select(&terms.values), select(&inputs.copies));
        let place = StagePlace { stage: Stage::Loss, microbatch: inputs.microbatch, rank };
        let mut value = [values.iter().sum::<f64>()];
        let (first, single) = (&[0][..], &mut value[..]);
        self.world.expected(&mut Expectation { place, rows: first, columns: 1, values: single });
        let [total] = value;
        let squares: f64 = values.iter().map(|x| x * x).sum();
        let sum = self.plan.roundings.widest.sums.lse;
        // Tokens that are copies err alike: m equal errors of variance a sum to m² a.
        let variances = select(&terms.variance);
        let errs = variances.iter().zip(&copies).map(|(own, copies)| copies * own);
        // So do the additions of equal addends.
        let most = copies.iter().copied().fold(1.0, f64::max);
        // Terms of one sequence are alike: their partial sums, in the order of the tokens,
        // may be larger than those of terms in an order that does not know them.
        let in_order = sequential_variance(sum, &values);
        let counted: Vec<f64> = values.iter().copied().filter(|&x| x != 0.0).collect();
        let own = errs.sum::<f64>()
            + most * sum.variance(values.len() as f64, total, squares).max(in_order)
            + self.kept_losses(values.len(), total, squares)
            + relative(2.0 * self.plan.roundings.compute(), total);
        // One constant moves all terms the same way: amplitudes add.
        let shared = select(&terms.shared).iter().map(|v| v.sqrt()).sum();
        let certain = select(&terms.certain).iter().sum::<f64>() + one_sided_error(sum, &counted);
        Total { value: total, own, shared, certain }
    }

    /// Variance of summing losses that are kept in the format of log p, as `nll_loss` of few bits
    /// does it on a CPU: in blocks, and the sums of these again. The sum is divided by a number of
    /// that format.
    fn kept_losses(&self, tokens: usize, total: f64, squares: f64) -> f64 {
        let Policy { log_p, .. } = self.plan.roundings.widest;
        if !self.plan.roundings.widest.keeps_log_p() {
            return 0.0;
        }
        let order = Order::Blocked((tokens as f64).sqrt().ceil() as usize);
        let sum = kernels::policy::Sum { precision: log_p, order };
        sum.variance(tokens as f64, total, squares) + relative(log_p.unit_roundoff(), total)
    }

    /// The sum over microbatches: of what was captured of them, where that was all of it.
    fn loss_over_microbatches(
        &self,
        losses: &[LossTotals],
        divisor: f64,
    ) -> Result<LossTotals, StepError> {
        let mut whole = Vec::new();
        for totals in losses {
            whole.push(self.captured_total(totals)?.unwrap_or(totals.whole));
        }
        let every = losses.iter().map(|totals| totals.by_rank.as_ref().map_err(Clone::clone));
        let by_rank = every.collect::<Result<Vec<_>, String>>().and_then(|every| {
            let Some(first) = every.first() else { return Ok(Vec::new()) };
            let same = every.iter().all(|ranks| {
                ranks.len() == first.len() && ranks.iter().zip(*first).all(|(a, b)| a.0 == b.0)
            });
            if !same {
                return Err("other ranks share tokens in each microbatch".to_string());
            }
            let added_at = |index: usize| {
                let each: Vec<Total> = every.iter().map(|ranks| ranks[index].1).collect();
                (first[index].0.clone(), self.added(&each, divisor))
            };
            Ok((0..first.len()).map(added_at).collect())
        });
        let (whole, stores) = (self.added(&whole, divisor), losses.len() as f64 + 1.0);
        Ok(LossTotals { microbatch: None, whole, by_rank, stores })
    }

    /// The loss of a microbatch as one number that was captured, and may be believed.
    fn captured_total(&self, losses: &LossTotals) -> Result<Option<Total>, StepError> {
        let key = self.plan.step.find(Role::Loss, losses.microbatch);
        let whole = key.filter(|key| self.plan.step.tensors[*key].partial.is_none());
        let trusted = self.world.trusts(Stage::Loss, losses.microbatch);
        let Some(key) =
            whole.filter(|_| trusted && self.plan.step.options.scope.ranks == Ranks::All)
        else {
            return Ok(None);
        };
        let tensor = self.plan.step.assemble(key)?;
        let value = one_float(&tensor)?;
        // The job may have gone on with what it had not stored yet.
        let own = stored(precision_of(tensor.dtype), value);
        Ok(Some(Total { value, own, ..Total::default() }))
    }

    /// A sum or a mean of losses, each addition rounded.
    fn added(&self, totals: &[Total], divisor: f64) -> Total {
        let sum = |part: fn(&Total) -> f64| totals.iter().map(part).sum::<f64>();
        let size = sum(|total| total.value.abs());
        let additions = relative(self.plan.roundings.compute() * (totals.len() as f64 + 1.0), size);
        Total {
            value: sum(|total| total.value) / divisor,
            own: (sum(|total| total.own) + additions) / (divisor * divisor),
            shared: sum(|total| total.shared) / divisor,
            certain: sum(|total| total.certain) / divisor,
        }
    }
}

fn one_float(tensor: &crate::assemble::Tensor) -> Result<f64, StepError> {
    match matrix(tensor).filter(|values| values.len() == 1) {
        Some(values) => Ok(values.get_f64(0)),
        None => Err(unfit(tensor, "one float")),
    }
}
