//! What happens to dk after the head: microbatches summed, ranks summed, norm.
//!
//! Each stage is judged from the captured addends, so that a fault inside dk
//! is not blamed on the sums.

use backtape::head::MicrobatchReduction;
use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::allowed::{rounded, summed};
use super::backward::Slab;
use super::outcome::{Comparison, NotChecked, Outcome};
use super::{Replay, Slice};
use crate::assemble::{self, Tensor};
use crate::compare::{Allowed, Rows, Tally, once};
use crate::head::Stage;
use crate::head::roundings::unit_of;
use crate::head::step::{StepError, matrix};

/// Largest reference dk that is kept whole for the norm.
const KEPT_BYTES: usize = 1 << 30;

/// Captured addends of one sum.
struct Addends {
    total: Vec<f64>,
    squares: Vec<f64>,
    storage: Vec<f64>,
    count: f64,
}

impl Replay<'_> {
    /// Adds one unit's reference dk to the sum over units.
    pub(super) fn keep_reference(&self, slab: &Slab, elements: usize, outcome: &mut Outcome) {
        if elements * 8 > KEPT_BYTES || !self.wants(Stage::Reduce) {
            return;
        }
        let total = outcome.reference_dk.get_or_insert_with(|| vec![0.0; elements]);
        let from = slab.range.start * (slab.lse.len() / slab.range.len().max(1));
        for (at, (lse, label)) in slab.lse.iter().zip(&slab.label).enumerate() {
            total[from + at] += lse + label;
        }
    }

    pub(super) fn across(&self, slices: &[Slice], outcome: &mut Outcome) -> Result<(), StepError> {
        let several = slices.iter().any(|slice| slice.inputs.microbatch.is_some());
        if several && self.wants(Stage::Accumulate) {
            self.accumulate(slices, outcome)?;
        }
        if self.wants(Stage::Reduce) {
            self.reduce(slices, outcome)?;
        }
        self.norm(slices, outcome)
    }

    /// dk without microbatch, before the reduction: the sum over microbatches.
    fn accumulate(&self, slices: &[Slice], outcome: &mut Outcome) -> Result<(), StepError> {
        let Some(key) = self.step.find_reduced(Role::Dk, false) else {
            let why =
                "dk summed over microbatches, before the reduction over ranks, was not captured";
            outcome.skip(Stage::Accumulate, why);
            return Ok(());
        };
        for rank in self.holders(key) {
            let tensor = self.value(key, rank)?;
            let mut addends = Addends::new(&tensor);
            for slice in slices {
                let Some(part) = self.step.find(Role::Dk, slice.inputs.microbatch) else {
                    outcome.skip(Stage::Accumulate, "dk of some microbatch was not captured");
                    return Ok(());
                };
                addends.add(&self.value(part, rank)?);
            }
            let rank = rank.map(backtape::identity::Rank);
            self.judge_sum(Stage::Accumulate, key, rank, &tensor, addends, slices, outcome);
        }
        Ok(())
    }

    /// dk after the reduction: the sum over ranks and microbatches.
    fn reduce(&self, slices: &[Slice], outcome: &mut Outcome) -> Result<(), StepError> {
        let Some(key) = self.step.find_reduced(Role::Dk, true) else {
            outcome.skip(Stage::Reduce, "dk after the reduction over ranks was not captured");
            return Ok(());
        };
        let tensor = self.step.assemble(key)?;
        let mut addends = Addends::new(&tensor);
        if let Some(local) = self.step.find_reduced(Role::Dk, false) {
            for rank in self.holders(local) {
                addends.add(&self.value(local, rank)?);
            }
            self.judge_sum(Stage::Reduce, key, None, &tensor, addends, &[], outcome);
            return Ok(());
        }
        for slice in slices {
            let part =
                self.step.find(Role::Dk, slice.inputs.microbatch).filter(|part| *part != key);
            let Some(part) = part else {
                outcome.skip(Stage::Reduce, "dk before the reduction was not captured");
                return Ok(());
            };
            for rank in self.holders(part) {
                addends.add(&self.value(part, rank)?);
            }
        }
        self.judge_sum(Stage::Reduce, key, None, &tensor, addends, slices, outcome);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // The sum, its result and where both belong.
    fn judge_sum(
        &self,
        stage: Stage,
        key: &TensorKey,
        rank: Option<backtape::identity::Rank>,
        tensor: &Tensor,
        addends: Addends,
        slices: &[Slice],
        outcome: &mut Outcome,
    ) {
        let Some(captured) = matrix(tensor).filter(|m| m.len() == addends.total.len()) else {
            outcome.skip(stage, "the addends have another shape than their sum");
            return;
        };
        let mean = self.step.options.microbatch_reduction == MicrobatchReduction::Mean;
        let divisor = if mean { slices.len().max(1) as f64 } else { 1.0 };
        let reference: Vec<f64> = addends.total.iter().map(|x| x / divisor).collect();
        let (unit, reduce) = (unit_of(tensor.dtype), self.roundings.reduce);
        let bound = self.bound(captured.rows, captured.cols);
        let columns = captured.cols;
        let allowed = |row: usize, column: usize, x: f64| {
            let at = row * columns + column;
            let sum = summed(reduce, addends.count, addends.total[at], addends.squares[at]);
            let inner = (sum + addends.storage[at]) / (divisor * divisor);
            Allowed { own: inner + rounded(unit, x) + rounded(reduce, x), ..Allowed::default() }
        };
        let rows =
            Rows { captured, reference: &reference, index: &|row| row as u64, repeats: &once };
        let tally = Tally::of(&rows, allowed, &bound);
        outcome.add(stage, Comparison::new(None, rank, key.to_string(), tally, &bound));
    }

    /// The ranks that hold addends of a tensor; one `None` for a whole one.
    fn holders(&self, key: &TensorKey) -> Vec<Option<u32>> {
        let info = &self.step.tensors[key];
        if info.partial.is_none() {
            return vec![None];
        }
        let mut ranks: Vec<_> =
            info.shards.iter().map(|shard| Some(self.step.dump.record(shard).rank.0)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn value(&self, key: &TensorKey, rank: Option<u32>) -> Result<Tensor, StepError> {
        match rank {
            None => self.step.assemble(key),
            Some(rank) => assemble::addend(self.step.dump, key, backtape::identity::Rank(rank))
                .map_err(|source| StepError::Assemble { key: key.clone(), source }),
        }
    }

    /// grad_norm as reported, and as it would be with the reference dk.
    fn norm(&self, slices: &[Slice], outcome: &mut Outcome) -> Result<(), StepError> {
        let captured = match self.step.find(Role::GradNorm, None::<Microbatch>) {
            Some(key) => {
                let tensor = self.step.assemble(key)?;
                matrix(&tensor).filter(|m| m.len() == 1).map(|m| m.get_f64(0))
            }
            None => None,
        };
        outcome.grad_norm.captured = captured;
        let whole = slices.iter().all(|slice| slice.blocked.is_none());
        let reduced = self.step.find_reduced(Role::Dk, true).filter(|_| whole);
        if let (Some(key), Some(reference)) = (reduced, outcome.reference_dk.take()) {
            let tensor = self.step.assemble(key)?;
            if let Some(dk) = matrix(&tensor).filter(|m| m.len() == reference.len()) {
                let mean = self.step.options.microbatch_reduction == MicrobatchReduction::Mean;
                let divisor = if mean { slices.len() as f64 } else { 1.0 };
                let ours: f64 = (0..dk.len()).map(|i| dk.get_f64(i).powi(2)).sum();
                let exact: f64 = reference.iter().map(|x| (x / divisor).powi(2)).sum();
                outcome.grad_norm.dk_captured = Some(ours.sqrt());
                outcome.grad_norm.dk_reference = Some(exact.sqrt());
                if let Some(captured) = captured {
                    let with_reference = (captured * captured - ours + exact).max(0.0).sqrt();
                    outcome.grad_norm.reference = Some(with_reference);
                    outcome.grad_norm.gap = Some(captured - with_reference);
                }
            }
        }
        if self.wants(Stage::GradNorm) && captured.is_some() {
            let why =
                "the dump holds the gradient of the head only, the norm is over all parameters";
            outcome.skip(Stage::GradNorm, why);
            let what = "grad_norm as the job reported it".into();
            outcome.not_checked.push(NotChecked { what, why: why.into() });
        }
        Ok(())
    }
}

impl Addends {
    fn new(like: &Tensor) -> Addends {
        let zeros = || vec![0.0; matrix(like).map_or(0, |m| m.len())];
        Addends { total: zeros(), squares: zeros(), storage: zeros(), count: 0.0 }
    }

    /// Adds one captured addend; its own storage may have rounded what the job summed.
    fn add(&mut self, addend: &Tensor) {
        let unit = unit_of(addend.dtype);
        let Some(values) = matrix(addend).filter(|m| m.len() == self.total.len()) else {
            self.total.clear();
            return;
        };
        for at in 0..values.len() {
            let x = values.get_f64(at);
            self.total[at] += x;
            self.squares[at] += x * x;
            self.storage[at] += rounded(unit, x);
        }
        self.count += 1.0;
    }
}
