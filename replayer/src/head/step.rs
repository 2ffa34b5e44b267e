//! The inputs of one step, gathered from the dump in global coordinates, and
//! the units in which its backward is replayed.
//!
//! A unit is a set of token rows whose gradients were summed together before
//! anything was recorded: one rank's tokens where ranks recorded addends of dk,
//! all tokens of the microbatch otherwise.

use std::collections::BTreeMap;

use backtape::head::{Denominator, LossReduction, Scope};
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::options::HeadOptions;
use crate::assemble::{self, Tensor};
use crate::dump::{StepDump, TensorInfo};
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix, Values};

/// Why a step's head cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The job declared no head.
    #[error("step {step} declares no loss head: call tape.head(...) inside recorder.step({step})")]
    NoHead {
        /// The step.
        step: u64,
    },
    /// The declaration cannot be replayed.
    #[error(transparent)]
    Head(#[from] super::options::HeadError),
    /// A role that every replay needs was not recorded.
    #[error(
        "the dump holds no {role}{of}: record it with tape.record(\"{role}\", ...) or do not ask for it; recorded: {recorded}"
    )]
    Missing {
        /// The role.
        role: Role,
        /// Of which microbatch, as words.
        of: String,
        /// What there is instead.
        recorded: String,
    },
    /// A role that every replay needs is there and cannot be believed.
    #[error("{key} cannot be used: {why}")]
    Unusable {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        why: String,
    },
    /// A tensor that is there cannot be put together.
    #[error("{key} cannot be reassembled: {source}")]
    Assemble {
        /// Which tensor.
        key: TensorKey,
        /// Why.
        source: assemble::AssembleError,
    },
    /// Shape or dtype does not fit the head.
    #[error("{key} is {found}, the head needs {wanted}")]
    Unfit {
        /// Which tensor.
        key: TensorKey,
        /// Its dtype and shape.
        found: String,
        /// What would fit.
        wanted: String,
    },
}

/// Where the head's tensors lie in the dump.
pub struct HeadStep<'a> {
    /// The dump.
    pub dump: &'a StepDump,
    /// The checked declaration.
    pub options: HeadOptions,
    /// Every tensor of the step that can be used.
    pub tensors: BTreeMap<TensorKey, TensorInfo>,
    /// Tensors that are damaged or incomplete, and why: they are judged as
    /// absent, and what depends on them gets no verdict.
    pub unusable: BTreeMap<TensorKey, String>,
    /// The microbatches in which q was recorded; `None` for a job without them.
    pub microbatches: Vec<Option<Microbatch>>,
}

/// q, k, labels and weights of one microbatch, in global coordinates.
pub struct MicrobatchInputs {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// `[T, D]`, leading dimensions flattened.
    pub q: Tensor,
    /// `[V, D]`.
    pub k: Tensor,
    /// `[T]`; [`IGNORED`] where the token takes no part.
    pub labels: Vec<u32>,
    /// `[T]`, 1 where the job recorded none.
    pub weights: Vec<f64>,
    /// Columns of the logits that are not padding.
    pub valid_vocab: usize,
    /// Key of q, for messages.
    pub q_key: TensorKey,
}

/// Token rows whose gradients belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// The rank that holds them; `None` for all tokens of the microbatch.
    pub rank: Option<Rank>,
    /// Row indices into `[T, D]`, ascending.
    pub rows: Vec<usize>,
}

impl<'a> HeadStep<'a> {
    /// Reads the declaration and finds the tensors; `unusable` says why a
    /// tensor must not be believed.
    pub fn new(
        dump: &'a StepDump,
        unusable: impl Fn(&TensorKey) -> Option<String>,
    ) -> Result<HeadStep<'a>, StepError> {
        let declared = dump.manifest.head.as_ref();
        let declared = declared.ok_or(StepError::NoHead { step: dump.step.0 })?;
        let options = HeadOptions::new(declared)?;
        let reasons = dump.tensors().keys().filter_map(|key| Some((key.clone(), unusable(key)?)));
        let unusable: BTreeMap<_, _> = reasons.collect();
        let usable = dump.tensors().iter().filter(|(key, _)| !unusable.contains_key(key));
        let tensors: BTreeMap<_, _> =
            usable.map(|(key, info)| (key.clone(), info.clone())).collect();
        let of_q = tensors.iter().filter(|(_, info)| info.role == Some(Role::Q));
        let mut microbatches: Vec<_> = of_q.map(|(key, _)| key.microbatch).collect();
        microbatches.dedup();
        let step = HeadStep { dump, options, tensors, unusable, microbatches };
        if step.microbatches.is_empty() {
            return Err(step.missing(Role::Q, None));
        }
        Ok(step)
    }

    /// The tensor of a role in a microbatch, preferring what was captured
    /// before the reduction over ranks.
    pub fn find(&self, role: Role, microbatch: Option<Microbatch>) -> Option<&TensorKey> {
        let of = |(key, info): &(&TensorKey, &TensorInfo)| {
            info.role == Some(role) && key.microbatch == microbatch
        };
        let found = self.tensors.iter().filter(of).map(|(key, _)| key);
        found.min_by_key(|key| key.when == Some(When::PostReduce))
    }

    /// The tensor of a role that has no microbatch, at this moment.
    pub fn find_reduced(&self, role: Role, reduced: bool) -> Option<&TensorKey> {
        let of = |(key, info): &(&TensorKey, &TensorInfo)| {
            let post = key.when == Some(When::PostReduce)
                || (key.when.is_none() && info.partial.is_none());
            info.role == Some(role) && key.microbatch.is_none() && post == reduced
        };
        self.tensors.iter().find(of).map(|(key, _)| key)
    }

    /// Assembles a tensor that is there.
    pub fn assemble(&self, key: &TensorKey) -> Result<Tensor, StepError> {
        assemble::assemble(self.dump, key)
            .map_err(|source| StepError::Assemble { key: key.clone(), source })
    }

    /// Gathers the inputs of a microbatch.
    pub fn inputs(&self, microbatch: Option<Microbatch>) -> Result<MicrobatchInputs, StepError> {
        let need = |role| {
            let own = self.find(role, microbatch).or_else(|| self.find(role, None));
            own.ok_or_else(|| self.missing(role, microbatch))
        };
        let (q_key, k_key, labels_key) = (need(Role::Q)?, need(Role::K)?, need(Role::Labels)?);
        if let Some(bias) =
            self.find(Role::Bias, microbatch).or_else(|| self.find(Role::Bias, None))
        {
            let found = "recorded".to_string();
            let wanted = "no bias: this version of replay does not know how to replay one".into();
            return Err(StepError::Unfit { key: bias.clone(), found, wanted });
        }
        let (q, k) = (self.assemble(q_key)?, self.assemble(k_key)?);
        let columns = |tensor: &Tensor| tensor.shape.last().copied().unwrap_or(0);
        let d = columns(&q);
        if q.shape.len() < 2 || matrix(&q).is_none() {
            return Err(unfit(&q, "bf16, f16, f32 or f64 of at least two dimensions, [..., D]"));
        }
        if k.shape.len() != 2 || columns(&k) != d || matrix(&k).is_none() {
            return Err(unfit(
                &k,
                &format!("a float tensor of shape [V, {d}], since q has D = {d}"),
            ));
        }
        let tokens = rows(&q);
        let valid = self.options.valid_vocab.unwrap_or(k.shape[0]);
        if valid > k.shape[0] {
            return Err(unfit(&k, &format!("at least valid_vocab = {valid} rows")));
        }
        let labels = self.labels(labels_key, tokens, valid as usize)?;
        let weights_key = self.find(Role::Weights, microbatch);
        let weights = weights_key.map(|key| self.weights(key, tokens)).transpose()?;
        let weights = weights.unwrap_or_else(|| vec![1.0; tokens]);
        let (q_key, valid_vocab) = (q_key.clone(), valid as usize);
        Ok(MicrobatchInputs { microbatch, q, k, labels, weights, valid_vocab, q_key })
    }

    fn labels(&self, key: &TensorKey, tokens: usize, valid: usize) -> Result<Vec<u32>, StepError> {
        let tensor = self.assemble(key)?;
        let values = integers(&tensor).filter(|values| values.len() == tokens);
        let values = values.ok_or_else(|| unfit(&tensor, &format!("{tokens} integers")))?;
        let ignore = self.options.ignore_label;
        let one = |(token, &label): (usize, &i64)| match usize::try_from(label) {
            _ if Some(label) == ignore => Ok(IGNORED),
            Ok(row) if row < valid => Ok(row as u32),
            _ => Err(unfit(
                &tensor,
                &format!(
                    "labels in 0..{valid}: token {token} has {label}; declare ignore_label={label} if it means nothing"
                ),
            )),
        };
        values.iter().enumerate().map(one).collect()
    }

    fn weights(&self, key: &TensorKey, tokens: usize) -> Result<Vec<f64>, StepError> {
        let tensor = self.assemble(key)?;
        let values = match matrix(&tensor) {
            Some(values) => Some((0..values.len()).map(|i| values.get_f64(i)).collect()),
            None => integers(&tensor).map(|all| all.iter().map(|&n| n as f64).collect()),
        };
        let values = values.filter(|values: &Vec<f64>| values.len() == tokens);
        values.ok_or_else(|| unfit(&tensor, &format!("{tokens} numbers")))
    }

    /// Token rows by the rank that recorded addends of dk over them; all tokens
    /// when dk was recorded whole. `Err` says why addends cannot be told apart.
    pub fn units(&self, inputs: &MicrobatchInputs) -> Result<Vec<Unit>, String> {
        let tokens = rows(&inputs.q);
        let parts = [Role::Dk, Role::DkLse, Role::DkLabel];
        let partial = parts.iter().any(|&role| {
            let key = self.find(role, inputs.microbatch);
            key.is_some_and(|key| self.tensors[key].partial.is_some())
        });
        if !partial {
            return Ok(vec![Unit { rank: None, rows: (0..tokens).collect() }]);
        }
        let mut by_rank: BTreeMap<Rank, Vec<usize>> = BTreeMap::new();
        for shard in &self.tensors[&inputs.q_key].shards {
            let record = self.dump.record(shard);
            let shape = &record.shape[..record.shape.len() - 1];
            let place = &record.place.0[..shape.len()];
            by_rank.entry(record.rank).or_default().extend(flat_rows(place, shape));
        }
        let mut seen = vec![0u32; tokens];
        for rows in by_rank.values_mut() {
            rows.sort_unstable();
            rows.dedup();
            rows.iter().for_each(|&row| seen[row] += 1);
        }
        if seen.iter().any(|&n| n != 1) {
            return Err("several ranks hold the same tokens, so the share of each rank's addend is not known".into());
        }
        Ok(by_rank.into_iter().map(|(rank, rows)| Unit { rank: Some(rank), rows }).collect())
    }

    /// What the loss of these rows is divided by, over the declared scope.
    pub fn denominator(
        &self,
        all: &[&MicrobatchInputs],
        own: &MicrobatchInputs,
        unit: &Unit,
    ) -> f64 {
        if self.options.reduction != LossReduction::Mean {
            return 1.0;
        }
        let count = |inputs: &MicrobatchInputs, rows: &mut dyn Iterator<Item = usize>| -> f64 {
            match self.options.denominator {
                Denominator::Valid => rows.filter(|&t| inputs.labels[t] != IGNORED).count() as f64,
                Denominator::All => rows.count() as f64,
                Denominator::Weights => {
                    rows.filter(|&t| inputs.labels[t] != IGNORED).map(|t| inputs.weights[t]).sum()
                }
                Denominator::Number(n) => n,
            }
        };
        if let Denominator::Number(n) = self.options.denominator {
            return n;
        }
        match self.options.scope {
            Scope::Global => all.iter().map(|one| count(one, &mut (0..one.labels.len()))).sum(),
            Scope::Microbatch => count(own, &mut (0..own.labels.len())),
            Scope::Rank => count(own, &mut unit.rows.iter().copied()),
        }
    }

    pub(crate) fn missing(&self, role: Role, microbatch: Option<Microbatch>) -> StepError {
        let of_role = |key: &&TensorKey| self.dump.tensors()[*key].role == Some(role);
        if let Some(key) = self.unusable.keys().find(of_role) {
            let (key, why) = (key.clone(), self.unusable[key].clone());
            return StepError::Unusable { key, why };
        }
        let of = microbatch.map(|mb| format!(" of microbatch {mb}")).unwrap_or_default();
        let names: std::collections::BTreeSet<_> =
            self.tensors.keys().map(|key| key.tensor.as_str()).collect();
        let recorded = names.into_iter().collect::<Vec<_>>().join(", ");
        StepError::Missing { role, of, recorded }
    }
}

/// The tensor as a matrix: last dimension as columns, all others flattened.
pub fn matrix(tensor: &Tensor) -> Option<Matrix<'_>> {
    let values = None
        .or(tensor.bf16_bits().map(Values::Bf16))
        .or(tensor.f16_bits().map(Values::F16))
        .or(tensor.f32().map(Values::F32))
        .or(tensor.f64().map(Values::F64))?;
    let cols = tensor.shape.last().map_or(1, |&n| n as usize);
    let elements: u64 = tensor.shape.iter().product();
    Some(Matrix { rows: (elements as usize).checked_div(cols).unwrap_or(0), cols, values })
}

/// Rows of a tensor when its last dimension is columns.
fn rows(tensor: &Tensor) -> usize {
    tensor.shape[..tensor.shape.len() - 1].iter().product::<u64>() as usize
}

pub(crate) fn integers(tensor: &Tensor) -> Option<Vec<i64>> {
    if let Some(values) = tensor.i32() {
        return Some(values.iter().map(|&n| i64::from(n)).collect());
    }
    if let Some(values) = tensor.u32() {
        return Some(values.iter().map(|&n| i64::from(n)).collect());
    }
    tensor.i64().map(<[i64]>::to_vec)
}

pub(crate) fn unfit(tensor: &Tensor, wanted: &str) -> StepError {
    let found = format!("{} {:?}", tensor.dtype, tensor.shape);
    StepError::Unfit { key: tensor.key.clone(), found, wanted: wanted.into() }
}

/// Flat row-major indices of the points of a box.
fn flat_rows(place: &[(u64, u64)], shape: &[u64]) -> Vec<usize> {
    let mut flat = vec![0usize];
    for (&(lo, hi), &n) in place.iter().zip(shape) {
        let extend = |&base: &usize| (lo..hi).map(move |i| base * n as usize + i as usize);
        flat = flat.iter().flat_map(extend).collect();
    }
    flat
}

/// Rows of k from a vocabulary range, with the labels that lie in it.
pub fn vocabulary_slab<'m>(
    inputs: &HeadInputs<'m>,
    range: std::ops::Range<usize>,
    labels: &'m mut Vec<u32>,
) -> HeadInputs<'m> {
    let inside = |&label: &u32| match (label as usize).checked_sub(range.start) {
        Some(row) if label != IGNORED && row < range.len() => row as u32,
        _ => IGNORED,
    };
    *labels = inputs.labels.iter().map(inside).collect();
    let valid_vocab = inputs.valid_vocab.clamp(range.start, range.end) - range.start;
    let bias = inputs.bias.map(|bias| &bias[range.clone()]);
    HeadInputs { k: rows_of(&inputs.k, range), labels, valid_vocab, bias, ..*inputs }
}

/// Some rows of a matrix, in place.
pub fn rows_of<'m>(matrix: &Matrix<'m>, range: std::ops::Range<usize>) -> Matrix<'m> {
    let (from, to) = (range.start * matrix.cols, range.end * matrix.cols);
    let values = match matrix.values {
        Values::Bf16(bits) => Values::Bf16(&bits[from..to]),
        Values::F16(bits) => Values::F16(&bits[from..to]),
        Values::F32(values) => Values::F32(&values[from..to]),
        Values::F64(values) => Values::F64(&values[from..to]),
    };
    Matrix { rows: range.len(), cols: matrix.cols, values }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_points_of_a_box_are_its_rows_in_the_flattened_tensor() {
        assert_eq!(flat_rows(&[(1, 3), (0, 2)], &[4, 3]), vec![3, 4, 6, 7]);
        assert_eq!(flat_rows(&[], &[]), vec![0]);
    }
}
