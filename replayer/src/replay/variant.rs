//! A user's own function for stages of the head: its values take part in the comparison
//! as the built-in formulas do, once as an explanation of what was captured, once as a
//! cure, in the place of what was captured.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::world::{Expectation, StagePlace, Supplied, World};
use crate::head::Stage;

/// What one function gave for the whole step.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// Its name.
    pub name: String,
    /// Its values.
    pub supplied: Vec<Supplied>,
}

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

impl Variant {
    /// The stages that it gives.
    pub fn stages(&self) -> BTreeSet<Stage> {
        self.supplied.iter().map(|supplied| supplied.place.stage).collect()
    }

    fn of(&self, place: &StagePlace) -> Option<&Supplied> {
        // Of tokens there is one tensor for all units.
        let whole = !place.stage.is_of_k();
        self.supplied.iter().find(|supplied| {
            let same = supplied.place.stage == place.stage
                && supplied.place.microbatch == place.microbatch;
            same && (whole || supplied.place.rank == place.rank)
        })
    }
}

/// The world in which the job did what the function does.
pub struct Explains(pub Arc<Variant>);

impl World for Explains {
    fn expected(&self, expectation: &mut Expectation<'_>) {
        let Some(supplied) = self.0.of(&expectation.place) else { return };
        for (&row, values) in
            expectation.rows.iter().zip(expectation.values.chunks_mut(expectation.columns.max(1)))
        {
            let from = row * expectation.columns;
            if let Some(row_values) = supplied.values.get(from..from + expectation.columns) {
                values.copy_from_slice(row_values);
            }
        }
    }
}

/// The world in which the function's values were captured.
pub struct StandsIn(pub Arc<Variant>);

impl World for StandsIn {
    fn captured(&self, place: &StagePlace) -> Option<&Supplied> {
        self.0.of(place)
    }
}

/// Whether a stage is one of tokens: `[T, ...]`.
pub fn of_tokens(stage: Stage) -> bool {
    stage.is_of_q() || matches!(stage, Stage::Lse | Stage::LabelLogits | Stage::Logprobs)
}
