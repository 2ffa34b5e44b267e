//! What happens to dk after the head: microbatches summed, ranks summed.
//!
//! Each stage is judged from the captured addends, so that a fault inside dk
//! is not blamed on the sums.

use std::sync::Arc;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::addends::Sum;
use super::comparison::Comparison;
use super::context::Replay;
use super::maps::Drawn;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::rounding_variance::{rounded, stored};
use super::summation_votes::Whole;
use super::world::{Expectation, StagePlace};
use crate::assemble::Tensor;
use crate::compare::{Allowed, Rows, Tally, once};
use crate::head::Stage;
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix};
use crate::kernels::policy;

/// A sum that was captured, and the addends it should be made of.
struct Judged<'a> {
    stage: Stage,
    pub(super) key: &'a TensorKey,
    pub(super) rank: Option<Rank>,
    captured: &'a Tensor,
    addends: &'a Arc<Sum>,
    pub(super) divisor: f64,
}

impl Replay<'_> {
    pub(super) fn judge_sums_and_norm(
        &self,
        microbatches: &[HeadMicrobatch],
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        self.sums(microbatches, outcome)?;
        if microbatches.iter().any(|microbatch| self.plan.step.judged(&microbatch.inputs).is_some())
        {
            let why = "ranks hold several versions of what the gradients are computed from";
            outcome.leave(Stage::GradNorm, None, why);
            return Ok(());
        }
        let norm = self.plan.norm(microbatches, outcome);
        outcome.spared(norm, (&[Stage::GradNorm], None)).map(|_| ())
    }

    /// The sums over microbatches and over ranks.
    pub(super) fn sums(
        &self,
        microbatches: &[HeadMicrobatch],
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let several = microbatches.iter().any(|microbatch| microbatch.inputs.microbatch.is_some());
        if several && self.plan.wants(Stage::Accumulate) {
            let result = self.accumulate(microbatches, outcome);
            outcome.spared(result, (&[Stage::Accumulate], None))?;
        }
        if self.plan.wants(Stage::Reduce) {
            let result = self.reduce(microbatches, outcome);
            outcome.spared(result, (&[Stage::Reduce], None))?;
        }
        Ok(())
    }

    /// dk without microbatch, before the reduction: the sum over microbatches.
    fn accumulate(
        &self,
        head_microbatches: &[HeadMicrobatch],
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let stage = Stage::Accumulate;
        let Some(key) = self.plan.step.find_reduced(Role::Dk, false) else {
            let why =
                "dk summed over microbatches, before the reduction over ranks, was not captured";
            outcome.skip(stage, why);
            return Ok(());
        };
        let divisor = match self.plan.divisor(head_microbatches) {
            Ok(divisor) => divisor,
            Err(why) => {
                outcome.skip(stage, why);
                return Ok(());
            }
        };
        let addend_of = |head_microbatch: &HeadMicrobatch| {
            let microbatch = head_microbatch.inputs.microbatch;
            self.plan.step.find(Role::Dk, microbatch).map(|key| (microbatch, key))
        };
        let Some(addends) = head_microbatches.iter().map(addend_of).collect::<Option<Vec<_>>>()
        else {
            let why = "dk of some microbatch was not captured";
            return self.judge.judge_sum_without_addends(
                head_microbatches,
                (stage, key, why),
                outcome,
            );
        };
        for rank in self.plan.holders(key) {
            let tensor = match self.plan.held_by(key, rank) {
                Ok(tensor) => tensor,
                Err(error) => {
                    outcome.skip(stage, error.to_string());
                    return Ok(());
                }
            };
            let mut parts = Vec::new();
            for &(microbatch, part) in &addends {
                let same_box = |part: &Tensor| part.place == tensor.place;
                let Some(mut part) = self.plan.held_by(part, rank).ok().filter(same_box) else {
                    let why = "dk of a microbatch is not held in the boxes in which its sum over microbatches is held: record both alike to have the sum judged";
                    outcome.skip(stage, why);
                    return Ok(());
                };
                // Both are the same box of dk: seen from its own corner.
                part.place = backtape::index_box::IndexBox::whole(&part.shape);
                parts.push((part, self.judge.world.weight(stage, microbatch, rank)));
            }
            let weights: Vec<f64> = parts.iter().map(|(_, weight)| *weight).collect();
            let addends = self.executor.sum(&(stage, rank, weights), &mut || {
                let mut addends = Sum::new(&tensor.shape);
                parts.iter().try_for_each(|(part, weight)| addends.add(part, *weight))?;
                Ok(addends)
            })?;
            let captured = &tensor;
            let judged = Judged { stage, key, rank, captured, addends: &addends, divisor };
            self.judge_sum(head_microbatches, judged, outcome)?;
        }
        Ok(())
    }

    /// dk after the reduction: the sum over ranks and microbatches.
    fn reduce(
        &self,
        microbatches: &[HeadMicrobatch],
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let stage = Stage::Reduce;
        let Some(key) = self.plan.step.find_reduced(Role::Dk, true) else {
            outcome.skip(stage, "dk after the reduction over ranks was not captured");
            return Ok(());
        };
        let tensor = self.plan.step.assemble(key)?;
        let captured = &tensor;
        if let Some(local) = self.plan.step.find_reduced(Role::Dk, false) {
            let partial = self.plan.step.tensors[local].partial.is_some();
            let added =
                |microbatch: &HeadMicrobatch| self.plan.step.each_added(local, &microbatch.inputs);
            if let Some(why) = microbatches.iter().find_map(|s| added(s).err()).filter(|_| partial)
            {
                outcome.skip(stage, why);
                return Ok(());
            }
            let addends = &self.weighted(&tensor.shape, &[(None, local)])?;
            let judged = Judged { stage, key, rank: None, captured, addends, divisor: 1.0 };
            return self.judge_sum(microbatches, judged, outcome);
        }
        let mut parts = Vec::new();
        for microbatch in microbatches {
            let part = self.plan.step.find(Role::Dk, microbatch.inputs.microbatch);
            let Some(part) = part.filter(|part| *part != key) else {
                let why = "dk before the reduction was not captured";
                return self.judge.judge_sum_without_addends(
                    microbatches,
                    (stage, key, why),
                    outcome,
                );
            };
            parts.push((microbatch.inputs.microbatch, part));
        }
        let addends = &self.weighted(&tensor.shape, &parts)?;
        match self.plan.divisor(microbatches) {
            Ok(divisor) => {
                let judged = Judged { stage, key, rank: None, captured, addends, divisor };
                self.judge_sum(microbatches, judged, outcome)?;
            }
            Err(why) => outcome.skip(stage, why),
        }
        Ok(())
    }

    /// The sum over ranks of some tensors, each addend times the world's weight.
    fn weighted(
        &self,
        shape: &[u64],
        parts: &[(Option<Microbatch>, &TensorKey)],
    ) -> Result<Arc<Sum>, StepError> {
        let stage = Stage::Reduce;
        let of_part = |&(microbatch, key): &(Option<Microbatch>, &TensorKey)| {
            let weight_of = |rank| self.judge.world.weight(stage, microbatch, rank);
            self.plan.holders(key).into_iter().map(weight_of).collect::<Vec<f64>>()
        };
        let weights: Vec<Vec<f64>> = parts.iter().map(of_part).collect();
        self.executor.sum(&(stage, weights), &mut || {
            let mut addends = Sum::new(shape);
            for &(microbatch, key) in parts {
                let weight = |rank| self.judge.world.weight(stage, microbatch, rank);
                addends.add_weighted(self.plan.step, key, &weight)?;
            }
            Ok(addends)
        })
    }

    fn judge_sum(
        &self,
        microbatches: &[HeadMicrobatch],
        judged: Judged<'_>,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let Judged { stage, key, rank, captured: tensor, addends, divisor } = judged;
        let Some(captured) = matrix(tensor).filter(|m| m.len() == addends.total.len()) else {
            outcome.skip(stage, "the addends have another shape than their sum");
            return Ok(());
        };
        let wide: Vec<f64> = addends.total.iter().map(|x| x / divisor).collect();
        let whole = Whole { stage, rank, captured, shape: &tensor.shape, wide: &wide };
        let chained = self.judge.chained(microbatches, &whole)?;
        let in_chains = chained.is_some();
        let mut reference = chained.unwrap_or_else(|| wide.clone());
        let every: Vec<usize> = (0..captured.rows).collect();
        let place = StagePlace { stage, microbatch: None, rank };
        let factor = self.judge.world.scale(place);
        reference.iter_mut().for_each(|x| *x *= factor);
        let divisor = divisor / factor;
        let judged_at = place;
        let (rows, columns, values) = (&every[..], captured.cols, &mut reference[..]);
        self.judge.world.expected(&mut Expectation { place, rows, columns, values });
        let (precision, reduce) = (precision_of(tensor.dtype), self.plan.roundings.reduce);
        let bound = self.judge.bound(captured.rows, captured.cols);
        let columns = captured.cols;
        let sum = policy::Sum::of(reduce);
        // A mean over three multiplies all by one rounded third.
        let constant = addends.rounds || super::elementwise::rounds(divisor);
        let allowed = |row: usize, column: usize, x: f64| {
            let element = row * columns + column;
            let sum = sum.variance(addends.count, addends.total[element], addends.squares[element]);
            let inner = (sum + addends.storage[element]) / (divisor * divisor);
            let noise = self.judge.world.noise(judged_at, row, column);
            let own = inner + rounded(reduce, x) + noise;
            let again = super::elementwise::rounds(factor);
            let shared = if constant { rounded(reduce, x) } else { 0.0 };
            Allowed { own, shared, ..Allowed::default() }.stored(stored(precision, x), again)
        };
        let rows =
            Rows { captured, reference: &reference, index: &|row| row as u64, repeats: &once };
        let mut judge = || {
            let tally = Tally::of(&rows, allowed, &bound);
            Comparison::new(None, rank, key.to_string(), tally, &bound)
        };
        let which = (stage, rank, divisor, &self.plan.roundings, bound);
        let sum_and_expected = (addends, &reference[..]);
        let mut comparison = self.executor.comparison(&which, sum_and_expected, &mut judge);
        let (first, all) = (0, captured.rows);
        let (rows, allowed) = (&rows, &allowed);
        let chart = self.plan.chart(&Drawn { stage, first, all, rows, allowed, bound: &bound });
        if comparison.excess.is_none() {
            // What a hypothesis says of the sum is what one rounding of it is a rounding of.
            let wide = if in_chains { &wide } else { &reference };
            comparison.excess =
                self.judge.chain_excess(microbatches, &Whole { wide, ..whole }, &bound)?;
        }
        if comparison.excess.is_some() && self.plan.step.options.declared.tied_embedding {
            // The lookup's part may have been added after the addends were recorded.
            let why = "tied_embedding=True: the sum is not that of the recorded dk; it may hold the input embedding's part, which the head does not know";
            outcome.skip(stage, why);
            return Ok(());
        }
        outcome.add(stage, comparison);
        if let Some(chart) = chart {
            self.plan.take_chart(stage, chart, (None, rank), outcome);
        }
        Ok(())
    }
}
