//! Tensors with one number a token: what was captured, and its comparison.

use backtape::role::Role;

use super::comparison::{Comparison, MemberError};
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::rounding_variance::stored;
use super::world::StagePlace;
use crate::compare::{Allowed, Rows, Tally};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, unfit};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{IGNORED, Matrix, Values};
use crate::kernels::round::Precision;

/// A captured `[T]` tensor, widened, with the precision it was stored in.
pub(super) struct Column {
    pub(super) source: String,
    pub(super) values: Vec<f64>,
    pub(super) stored: Option<Precision>,
}

/// What a `[T]` stage should be, and how far off rounding may bring it.
#[derive(Clone, Default)]
pub(super) struct Expected {
    pub(super) values: Vec<f64>,
    /// Variances before the value is stored.
    pub(super) variance: Vec<f64>,
    /// Errors that are certain rather than random; empty for none.
    pub(super) certain: Vec<f64>,
    /// Variances of the error that all tokens share; empty for none.
    pub(super) shared: Vec<f64>,
}

impl Expected {
    /// The same times a factor.
    pub(super) fn times(mut self, factor: f64) -> Expected {
        let square = factor * factor;
        self.values.iter_mut().for_each(|x| *x *= factor);
        self.certain.iter_mut().for_each(|x| *x *= factor.abs());
        self.variance.iter_mut().chain(&mut self.shared).for_each(|x| *x *= square);
        self
    }
}

/// The tokens of which a stage is judged.
#[derive(Clone, Copy)]
pub(super) enum Tokens {
    /// Every one: what is asked for does not depend on its label, or is 0 where it takes no part.
    All,
    /// Those with a label that is not ignored.
    Labelled,
    /// Those with a label, but for the last of a sequence where its weight is 0: no token follows
    /// it, so a job may look up any label there, and neither the loss nor a gradient depends on it.
    Followed,
}

impl Tokens {
    fn has(self, inputs: &MicrobatchInputs, t: usize) -> bool {
        match self {
            Tokens::All => true,
            Tokens::Labelled => inputs.labels[t] != IGNORED,
            Tokens::Followed => {
                let is_last = (t + 1).is_multiple_of(inputs.sequence.max(1));
                inputs.labels[t] != IGNORED && !(is_last && inputs.weights[t] == 0.0)
            }
        }
    }
}

impl Column {
    /// The captured value and the variance that storing it brought.
    pub(super) fn at(&self, token: usize) -> (f64, f64) {
        (self.values[token], stored(self.stored, self.values[token]))
    }
}

impl Judge<'_> {
    /// A captured `[T]` tensor of the microbatch, if it was recorded.
    pub(super) fn column(
        &self,
        role: Role,
        head_microbatch: &HeadMicrobatch,
    ) -> Result<Option<Column>, StepError> {
        let microbatch = head_microbatch.inputs.microbatch;
        if let Some(stage) = Stage::of_role(role)
            && let Some(supplied) =
                self.world.captured(&StagePlace { stage, microbatch, rank: None })
        {
            let (values, stored) = (supplied.values.clone(), supplied.precision);
            return Ok(Some(Column { source: format!("a variant's {stage}"), values, stored }));
        }
        let Some(key) = self.plan.step.find(role, microbatch) else {
            return Ok(None);
        };
        let tokens = head_microbatch.inputs.tokens();
        // The same role may be [T, V]: that is judged on the plane.
        let elements: u64 = self.plan.step.tensors[key].shape.iter().product();
        if role == Role::Logprobs && elements != tokens as u64 {
            return Ok(None);
        }
        let tensor = self.plan.step.assemble(key)?;
        match matrix(&tensor).filter(|values| values.len() == tokens) {
            Some(values) => {
                let stored = precision_of(tensor.dtype);
                let values = (0..tokens).map(|t| values.get_f64(t)).collect();
                Ok(Some(Column { source: key.to_string(), values, stored }))
            }
            None => Err(unfit(&tensor, &format!("{tokens} floats, one a token"))),
        }
    }

    /// Compares a captured column with what it should be, over some of the tokens.
    pub(super) fn judge_column(
        &self,
        inputs: &MicrobatchInputs,
        captured: &Column,
        expected: &Expected,
        tokens: Tokens,
        members: Vec<MemberError>,
    ) -> Comparison {
        let judged = self.plan.step.judged(inputs);
        let counted = |t: &usize| {
            let is_judged = judged.as_ref().is_none_or(|judged| judged[*t]);
            is_judged && tokens.has(inputs, *t)
        };
        let kept: Vec<usize> = (0..expected.values.len()).filter(counted).collect();
        let values: Vec<f64> = kept.iter().map(|&t| captured.values[t]).collect();
        let exact: Vec<f64> = kept.iter().map(|&t| expected.values[t]).collect();
        let rows = Rows {
            captured: Matrix { rows: kept.len(), cols: 1, values: Values::F64(&values) },
            reference: &exact,
            index: &|row| kept[row] as u64,
            repeats: &|row| inputs.copies[kept[row]],
        };
        let allowed = |row: usize, _, x: f64| Allowed {
            own: expected.variance[kept[row]] + stored(captured.stored, x),
            certain: expected.certain.get(kept[row]).copied().unwrap_or(0.0),
            shared: expected.shared.get(kept[row]).copied().unwrap_or(0.0),
            ..Allowed::default()
        };
        let bound = self.bound(expected.values.len(), 1);
        let mut tally = Tally::of(&rows, allowed, &bound);
        if let Some(stored) = captured.stored {
            tally.stored_in(stored, &exact);
        }
        let (microbatch, source) = (inputs.microbatch, captured.source.clone());
        let only = self.plan.step.only.as_ref().filter(|_| judged.is_some());
        let rank = only.and_then(|ranks| ranks.first().copied());
        Comparison { members, ..Comparison::new(microbatch, rank, source, tally, &bound) }
    }
}
