//! The addends of dk: who holds them, and what their sum is divided by.

use backtape::head::MicrobatchReduction;
use backtape::identity::Rank;
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::microbatch::HeadMicrobatch;
use super::plan::Plan;
use crate::assemble::{self, Tensor};
use crate::head::step::{StepError, addends_of_elements};

impl Plan<'_> {
    /// What a sum over microbatches is divided by; `Err` when the dump holds fewer
    /// than the job had.
    pub(super) fn divisor(&self, microbatches: &[HeadMicrobatch]) -> Result<f64, String> {
        if let Some(missing) = self.step.lacking.microbatches().first() {
            return Err(missing.clone());
        }
        Ok(match self.step.options.microbatch_reduction {
            MicrobatchReduction::Mean => microbatches.len().max(1) as f64,
            MicrobatchReduction::Sum => 1.0,
        })
    }

    /// The ranks that hold addends of a tensor; one `None` for a whole one.
    pub(super) fn holders(&self, key: &TensorKey) -> Vec<Option<Rank>> {
        match self.step.tensors[key].partial {
            None => vec![None],
            Some(_) => assemble::holders(self.step.dump, key).into_iter().map(Some).collect(),
        }
    }

    pub(super) fn held_by(&self, key: &TensorKey, rank: Option<Rank>) -> Result<Tensor, StepError> {
        match rank {
            Some(rank) if self.step.tensors[key].partial.is_some() => {
                self.step.addend(key, &[rank])
            }
            _ => self.step.assemble(key),
        }
    }

    /// What the reduction over ranks divides by: where dk's addends make up a mean, their number,
    /// of which ranks that cut dk hold one together.
    pub(super) fn ranks_averaged(&self, microbatches: &[HeadMicrobatch]) -> f64 {
        let first = microbatches
            .first()
            .and_then(|microbatch| self.step.find(Role::Dk, microbatch.inputs.microbatch));
        match first.map(|key| (key, self.step.tensors[key].partial)) {
            Some((key, Some(Reduction::Mean))) => {
                let most = addends_of_elements(self.step, key).into_iter().max();
                f64::from(most.unwrap_or(1).max(1))
            }
            _ => 1.0,
        }
    }
}
