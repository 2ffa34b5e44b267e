//! A user's own function for stages of the head: its values take part in the comparison
//! as the built-in formulas do, once as an explanation of what was captured, once as a
//! cure, in the place of what was captured.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::addends::Added;
use super::findings::Held;
use super::judge::Judge;
use super::outcome::Outcome;
use super::trial::in_world;
use super::world::{At, Declared, Expectation, World};
use crate::head::step::StepError;
use crate::head::{HeadStep, Stage};
use crate::kernels::round::Precision;

/// Values of one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Supplied {
    /// Which stage, microbatch and, for dk and its parts, first rank of the unit.
    pub at: At,
    /// `[T, D]` of the microbatch for dq and its parts, `[V, D]` for dk and its parts,
    /// `[V]` for dbias, `[T]` for lse, label_logits and logprobs; row-major.
    pub values: Vec<f64>,
    /// What the function returned them in.
    pub precision: Option<Precision>,
}

/// What one function gave for the whole step.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Its name.
    pub name: String,
    /// Its values.
    pub supplied: Vec<Supplied>,
}

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

/// Tensors that a function is given as they were recorded.
const INPUTS: [Role; 5] = [Role::Q, Role::K, Role::Logits, Role::Bias, Role::Weights];

/// Stages that a function may give.
pub const STAGES: [Stage; 10] = [
    Stage::Lse,
    Stage::LabelLogits,
    Stage::Logprobs,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
    Stage::DkLse,
    Stage::DkLabel,
    Stage::Dk,
    Stage::Dbias,
];

/// What functions are called with, unit by unit.
pub fn unit_inputs(step: &HeadStep<'_>) -> Result<Vec<UnitInputs>, StepError> {
    let mut found = Vec::new();
    in_world(step, &BTreeSet::new(), (&Declared, None), &mut |replay, slices| {
        for slice in slices {
            let mut unused = Outcome::new(&replay.plan.wanted, &replay.plan.step.lacking);
            let state = replay.forward(slice, &mut unused)?;
            let upstream = replay.judge.upstream(slice, &state, &mut unused)?;
            let held =
                |role| Some((role, replay.plan.step.held(role, slice.inputs.microbatch)?.clone()));
            let sources: Vec<_> = INPUTS.into_iter().filter_map(held).collect();
            found.extend(slice.units.iter().map(|unit| {
                let pick = |values: &[f64]| unit.rows.iter().map(|&t| values[t]).collect();
                let label = |&t: &usize| match slice.inputs.labels[t] {
                    crate::kernels::IGNORED => -1,
                    label => i64::from(label),
                };
                UnitInputs {
                    microbatch: slice.inputs.microbatch,
                    rank: unit.rank(),
                    rows: unit.rows.clone(),
                    labels: unit.rows.iter().map(label).collect(),
                    lse: pick(&state.lse),
                    g: pick(&upstream.g),
                    valid_vocab: slice.inputs.valid_vocab,
                    sources: sources.clone(),
                }
            }));
        }
        Ok(())
    })?;
    Ok(found)
}

impl Variant {
    /// The stages that it gives.
    pub fn stages(&self) -> BTreeSet<Stage> {
        self.supplied.iter().map(|one| one.at.stage).collect()
    }

    fn of(&self, at: &At) -> Option<&Supplied> {
        // Of tokens there is one tensor for all units.
        let whole = !at.stage.is_of_k();
        self.supplied.iter().find(|one| {
            let same = one.at.stage == at.stage && one.at.microbatch == at.microbatch;
            same && (whole || one.at.rank == at.rank)
        })
    }
}

/// The world in which the job did what the function does.
pub struct Explains(pub Arc<Variant>);

impl World for Explains {
    fn expected(&self, of: &mut Expectation<'_>) {
        let Some(own) = self.0.of(&of.at) else { return };
        for (&row, values) in of.rows.iter().zip(of.values.chunks_mut(of.columns.max(1))) {
            let from = row * of.columns;
            if let Some(own) = own.values.get(from..from + of.columns) {
                values.copy_from_slice(own);
            }
        }
    }
}

/// The world in which the function's values were captured.
pub struct StandsIn(pub Arc<Variant>);

impl World for StandsIn {
    fn captured(&self, at: &At) -> Option<&Supplied> {
        self.0.of(at)
    }
}

impl Judge<'_> {
    /// What stands in for a captured gradient, where something does.
    pub(super) fn stand_in(&self, at: &At, columns: usize) -> Option<(Held, Option<Precision>)> {
        let own = self.world.captured(at)?;
        let storage = |&x: &f64| super::allowed::stored(own.precision, x);
        let storage = own.values.iter().map(storage).collect();
        let squares = own.values.iter().map(|x| x * x).collect();
        let total = own.values.clone();
        let added = Added { cols: columns, total, storage, squares, count: 1.0 };
        Some((Held::Summed(added), own.precision))
    }
}

/// Whether a stage is one of tokens: `[T, ...]`.
pub fn of_tokens(stage: Stage) -> bool {
    stage.is_of_q() || matches!(stage, Stage::Lse | Stage::LabelLogits | Stage::Logprobs)
}
