//! What a user's function for some stages is given, unit by unit.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::outcome::Outcome;
use super::world::Declared;
use super::world_replay::in_world;
use crate::head::HeadStep;
use crate::head::step::StepError;

/// Tensors that a function is given as they were recorded.
const INPUTS: [Role; 5] = [Role::Q, Role::K, Role::Logits, Role::Bias, Role::Weights];

/// What a function for the stages of one unit is given; all `[n]` of the unit's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitInputs {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// First rank of the unit; none where dk is of all tokens.
    pub rank: Option<Rank>,
    /// The unit's tokens among those of the microbatch.
    pub rows: Vec<usize>,
    /// Row of k, or -1 for a token that takes no part.
    pub labels: Vec<i64>,
    /// Log-sum-exp: captured where it was captured, else the reference.
    pub lse: Vec<f64>,
    /// Upstream gradient of each token's nll: `w cotangent / denominator`.
    pub g: Vec<f64>,
    /// Columns of the logits that are not padding.
    pub valid_vocab: usize,
    /// The tensors of the microbatch that the head reads, by role.
    pub sources: Vec<(Role, TensorKey)>,
}

/// What functions are called with, unit by unit.
pub fn unit_inputs(step: &HeadStep<'_>) -> Result<Vec<UnitInputs>, StepError> {
    let mut all_inputs = Vec::new();
    in_world(step, &BTreeSet::new(), (&Declared, None), &mut |replay, microbatches| {
        for microbatch in microbatches {
            let mut unused = Outcome::new(&replay.plan.wanted, &replay.plan.step.lacking);
            let state = replay.forward(microbatch, &mut unused)?;
            let upstream = replay.judge.upstream(microbatch, &state, &mut unused)?;
            let source = |role| {
                Some((role, replay.plan.step.recorded(role, microbatch.inputs.microbatch)?.clone()))
            };
            let sources: Vec<_> = INPUTS.into_iter().filter_map(source).collect();
            all_inputs.extend(microbatch.units.iter().map(|unit| {
                let pick = |values: &[f64]| unit.rows.iter().map(|&t| values[t]).collect();
                let label = |&t: &usize| match microbatch.inputs.labels[t] {
                    crate::kernels::IGNORED => -1,
                    label => i64::from(label),
                };
                UnitInputs {
                    microbatch: microbatch.inputs.microbatch,
                    rank: unit.rank(),
                    rows: unit.rows.clone(),
                    labels: unit.rows.iter().map(label).collect(),
                    lse: pick(&state.lse),
                    g: pick(&upstream.g),
                    valid_vocab: microbatch.inputs.valid_vocab,
                    sources: sources.clone(),
                }
            }));
        }
        Ok(())
    })?;
    Ok(all_inputs)
}
