//! The captured values of one comparison, all of them, widened to f64.

use backtape::dtype::Dtype;
use backtape::identity::Rank;
use backtape::role::Role;

use crate::diagnose::evidence::Key;
use crate::head::step::matrix;
use crate::head::{HeadStep, MicrobatchInputs, Stage, Unit};
use crate::kernels::round::Precision;
use crate::replay::addends::Sum;

/// A tensor with more values than this is not read as a whole, and detectors do without it.
const MOST: u64 = 1 << 27;

/// A captured tensor as a matrix: rows are tokens, classes, or one scalar.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// Values of a row.
    pub columns: usize,
    /// Row-major.
    pub values: Vec<f64>,
    /// Bits of one stored element; 0 for a sum of addends, which was not stored.
    pub bits: u32,
    /// True where those are bf16's.
    pub is_bf16: bool,
}

impl Values {
    /// One row.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    /// The format that elements were stored in; `None` for a sum of addends, and for 8-bit formats.
    pub fn stored(&self) -> Option<Precision> {
        match (self.bits, self.is_bf16) {
            (16, true) => Some(Precision::Bf16),
            (16, false) => Some(Precision::F16),
            (32, _) => Some(Precision::F32),
            (64, _) => Some(Precision::F64),
            _ => None,
        }
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.values.len() / self.columns.max(1)
    }
}

/// The captured values of a comparison; `None` where they are too many, or where no tensor of the
/// stage's own role was captured.
pub fn captured(step: &HeadStep<'_>, inputs: &[MicrobatchInputs], wanted: Key) -> Option<Values> {
    let tensor = match wanted.stage {
        Stage::Accumulate | Stage::Reduce => {
            let key = step.find_reduced(Role::Dk, wanted.stage == Stage::Reduce)?;
            let unrecorded =
                |inputs: &&MicrobatchInputs| step.find(Role::Dk, inputs.microbatch).is_none();
            // A sum whose addends were not recorded is compared with the head's own gradients, in
            // their layout.
            let alone = inputs.iter().find(unrecorded);
            match (wanted.rank, step.tensors[key].partial) {
                (Some(rank), Some(_)) if alone.is_some() => {
                    let microbatch = alone?.microbatch;
                    let ranks = ranks(step, inputs, Key { microbatch, ..wanted }, rank)?;
                    step.oriented(key, Some(&ranks)).ok()?
                }
                (None, None) if alone.is_some() => step.oriented(key, None).ok()?,
                // A sum over all tokens: the sum of the ranks' addends, or the one rank's.
                (None, Some(_)) if alone.is_some() => {
                    return summed(
                        wanted.stage,
                        Sum::of_addends(step, key).ok()?.oriented(step, key),
                    );
                }
                (Some(rank), Some(_)) => step.addend(key, &[rank]).ok()?,
                _ => step.assemble(key).ok()?,
            }
        }
        stage => {
            let key = step.find(stage.role()?, wanted.microbatch)?;
            let info = &step.tensors[key];
            if info.shape.iter().product::<u64>() > MOST {
                return None;
            }
            let of_tokens = stage < Stage::DkLse;
            match (info.partial, wanted.rank) {
                (Some(_), Some(rank)) if !of_tokens => {
                    step.oriented(key, Some(&ranks(step, inputs, wanted, rank)?)).ok()?
                }
                (Some(_), _) => {
                    return summed(
                        wanted.stage,
                        Sum::of_partial(step, key).ok()?.oriented(step, key),
                    );
                }
                (None, _) => step.oriented(key, None).ok()?,
            }
        }
    };
    let values_matrix = matrix(&tensor)?;
    let columns = if is_column(wanted.stage) { 1 } else { values_matrix.cols };
    let values = values_matrix.to_f64();
    let is_bf16 = tensor.dtype == Dtype::Bf16;
    Some(Values { columns, values, bits: 8 * tensor.dtype.width() as u32, is_bf16 })
}

/// Whether a stage has one number per token or class.
fn is_column(stage: Stage) -> bool {
    use Stage::{Dbias, Dlogprobs, LabelLogits, Logprobs, Loss, Lse};
    matches!(stage, Lse | LabelLogits | Logprobs | Loss | Dlogprobs | Dbias)
}

fn summed(stage: Stage, sum: Sum) -> Option<Values> {
    let columns = if is_column(stage) { 1 } else { *sum.shape.last()? as usize };
    Some(Values { columns, values: sum.total, bits: 0, is_bf16: false })
}

/// The ranks of the unit of which this is the first rank.
fn ranks(
    step: &HeadStep<'_>,
    inputs: &[MicrobatchInputs],
    key: Key,
    rank: Rank,
) -> Option<Vec<Rank>> {
    unit(step, inputs, key).map(|unit| unit.ranks).or(Some(vec![rank]))
}

/// The unit of a comparison.
pub fn unit(step: &HeadStep<'_>, inputs: &[MicrobatchInputs], key: Key) -> Option<Unit> {
    let inputs_of_key = inputs.iter().find(|inputs| inputs.microbatch == key.microbatch)?;
    step.units(inputs_of_key).ok()?.into_iter().find(|unit| unit.rank() == key.rank)
}
