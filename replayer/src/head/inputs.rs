//! The inputs of the head in one microbatch, assembled from the dump in global coordinates and
//! checked against the declaration.

use std::collections::HashMap;

use backtape::dtype::Dtype;
use backtape::head::Loss;
use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::HeadStep;
use super::error::{StepError, unfit};
use super::view::{integers, matrix, numbers, rows};
use crate::assemble::Tensor;
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix, Reads, Values};

/// What the logits or the log-probabilities are computed from.
pub enum Scores {
    /// Dot products of q `[T, D]`, leading dimensions flattened, and k `[V, D]`.
    Product {
        /// Hidden states.
        q: Tensor,
        /// The unembedding.
        k: Tensor,
    },
    /// Logits that the job recorded, `[T, V]`.
    Logits(Tensor),
    /// Log-probabilities of the labels, `[T]`: nothing before them was recorded.
    Logprobs,
    /// The scores were recorded in this dtype and cannot be read: the tokens are counted, and
    /// nothing else of the microbatch is computed.
    Lost(Dtype),
}

/// The inputs of one microbatch, `T` tokens.
pub struct MicrobatchInputs {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// What the logits or the log-probabilities are computed from.
    pub scores: Scores,
    /// Class of each token, `[T]`; [`IGNORED`] for a token that does not count.
    pub labels: Vec<u32>,
    /// Weight of each token, `[T]`; 1 where the job recorded none.
    pub weights: Vec<f64>,
    /// Bias of each class, `[V]`, if the head has one.
    pub bias: Option<Vec<f64>>,
    /// Upstream cotangent of each token's loss, `[T]`; 1 where there is none.
    pub cotangent: Vec<f64>,
    /// Columns of the logits that are not padding.
    pub valid_vocab: usize,
    /// Tokens of one sequence: the last of the leading dimensions.
    pub sequence: usize,
    /// How many tokens have the same q or logits as this token, itself included, `[T]`: the first
    /// token of every sequence often has the same hidden state.
    pub copies: Vec<f64>,
    /// The tensor whose rows are the tokens, used in messages and to find which ranks hold which
    /// tokens.
    pub rows_key: TensorKey,
    /// Tokens, in order, whose label is not a class and not the declared `ignore_label`, with that
    /// label. The tokens are ignored here, and a check reports the labels.
    pub outside: Vec<(usize, i64)>,
    /// Where a hypothesis is tried: what it assumes that the softmax path read in place of q and k.
    pub reads: Option<Misread>,
}

/// Tensors that a hypothesis assumes that the softmax path read in place of q and k, of the same
/// shapes.
pub struct Misread {
    /// Read in place of q, and whether dk was multiplied with it too.
    pub q: Option<(Tensor, bool)>,
    /// Read in place of k, and whether dq was multiplied with it too.
    pub k: Option<(Tensor, bool)>,
    /// Raw logits read in place of the product of q and k, `[T, V]`.
    pub scores: Option<Vec<f64>>,
}

impl MicrobatchInputs {
    /// Number of tokens T.
    pub fn tokens(&self) -> usize {
        self.labels.len()
    }

    /// D, or 0 where the head does not start from q and k.
    pub fn width(&self) -> usize {
        match &self.scores {
            Scores::Product { q, .. } => q.shape.last().map_or(0, |&n| n as usize),
            _ => 0,
        }
    }

    /// The dtype that undeclared roundings of the head are taken to be in.
    pub fn dtype(&self, step: &HeadStep<'_>) -> Dtype {
        match &self.scores {
            Scores::Product { q, .. } => q.dtype,
            Scores::Logits(logits) => logits.dtype,
            Scores::Logprobs => step.tensors[&self.rows_key].dtype,
            Scores::Lost(dtype) => *dtype,
        }
    }

    /// The inputs as the kernels take them; `None` where the head starts from log-probabilities, or
    /// where the scores are lost.
    pub fn head(&self, step: &HeadStep<'_>) -> Option<HeadInputs<'_>> {
        let checked = "checked when it was gathered";
        let empty = |rows| Matrix { rows, cols: 0, values: Values::F32(&[]) };
        let (q, k, given) = match &self.scores {
            Scores::Product { q, k } => {
                (matrix(q).expect(checked), matrix(k).expect(checked), None)
            }
            Scores::Logits(logits) => {
                let logits = matrix(logits).expect(checked);
                (empty(logits.rows), empty(logits.cols), Some(logits))
            }
            Scores::Logprobs | Scores::Lost(_) => return None,
        };
        let reads = self.reads.as_ref().map(|reads| {
            let ((q, q_product), (k, k_product)) = (read(&reads.q, q), read(&reads.k, k));
            let scores = reads.scores.as_ref().map(|values| {
                let (rows, cols) = (self.tokens(), k.rows);
                (Matrix { rows, cols, values: Values::F64(values) }, 0)
            });
            Reads { q, k, q_product, k_product, scores }
        });
        Some(HeadInputs {
            bias: self.bias.as_deref(),
            given,
            reads,
            transform: step.options.transform,
            mask: step.options.mask,
            copies: Some(&self.copies),
            ..HeadInputs::plain(q, k, &self.labels, self.valid_vocab)
        })
    }

    /// What is wrong with the labels, where some name no class.
    pub fn wrong_labels(&self) -> Option<String> {
        let any = !self.outside.is_empty();
        any.then(|| format!("not all {}", wanted_labels(&self.outside, self.valid_vocab)))
    }

    /// The sequence that each token belongs to, `[T]`.
    pub fn sequences(&self) -> Vec<u32> {
        (0..self.tokens()).map(|t| (t / self.sequence.max(1)) as u32).collect()
    }
}

/// (token, label) for labels that are not a class.
type Outside = Vec<(usize, i64)>;

impl HeadStep<'_> {
    /// Assembles the inputs of a microbatch; an error where one of them cannot be read.
    pub fn inputs(&self, microbatch: Option<Microbatch>) -> Result<MicrobatchInputs, StepError> {
        match self.lacking.any_of(microbatch) {
            Some((key, why)) => Err(StepError::Unusable { key, why }),
            None => self.what_is_left(microbatch),
        }
    }

    /// Assembles the inputs of a microbatch that can be read. Those that [`HeadStep::lacking`]
    /// names are set to 0, or ignored, since nothing that is computed from them is judged.
    pub(crate) fn what_is_left(
        &self,
        microbatch: Option<Microbatch>,
    ) -> Result<MicrobatchInputs, StepError> {
        let scores = self.scores();
        let lost =
            [scores, Role::K].iter().any(|&role| self.lacking.input(role, microbatch).is_some());
        if lost {
            return self.counted(scores, microbatch);
        }
        let rows_key = self.need(scores, microbatch)?.clone();
        self.needs_sequences(&rows_key)?;
        let first = self.assemble(&rows_key)?;
        let (scores, tokens, vocab) = match scores {
            Role::Q => self.product(first, microbatch)?,
            Role::Logits => given(first)?,
            _ => (Scores::Logprobs, first.elements(), usize::MAX),
        };
        let valid = self.valid_vocab(vocab, &rows_key)?;
        let mut outside = Vec::new();
        let labels = match (&scores, self.recorded(Role::Labels, microbatch)) {
            // Log-probabilities need no labels: every token whose weight is not 0 counts.
            (Scores::Logprobs, None) => (vec![0; tokens], self.last_dimension(&rows_key, tokens)),
            (_, None) if self.lacking.input(Role::Labels, microbatch).is_some() => {
                (vec![IGNORED; tokens], self.last_dimension(&rows_key, tokens))
            }
            _ => {
                let (labels, sequence, outside_labels) =
                    self.labels(self.need(Role::Labels, microbatch)?, tokens, valid)?;
                outside = outside_labels;
                (labels, sequence)
            }
        };
        let (mut labels, sequence) = labels;
        let weights = self.optional(Role::Weights, microbatch, tokens)?;
        let mut weights = weights.unwrap_or_else(|| vec![1.0; tokens]);
        if !self.options.declared.labels_shifted {
            shift(&mut labels, sequence, IGNORED);
            shift(&mut weights, sequence, 0.0);
        }
        let cotangent = self.cotangent(microbatch, tokens)?;
        let bias = match &scores {
            Scores::Logprobs => None,
            _ => self.optional(Role::Bias, microbatch, vocab)?,
        };
        let valid_vocab = valid;
        let copies = match &scores {
            // Where k is 0 all tokens have the same logits.
            Scores::Product { k, .. } if matrix(k).is_some_and(|k| k.is_zero()) => {
                vec![tokens as f64; tokens]
            }
            Scores::Product { q: rows, .. } | Scores::Logits(rows) => copies(rows, tokens),
            Scores::Logprobs | Scores::Lost(_) => vec![1.0; tokens],
        };
        Ok(MicrobatchInputs {
            microbatch,
            scores,
            labels,
            weights,
            bias,
            cotangent,
            valid_vocab,
            sequence,
            copies,
            rows_key,
            outside,
            reads: None,
        })
    }

    /// The labels and weights of a microbatch of which nothing else can be computed: the mean of
    /// other microbatches may be over its tokens too.
    fn counted(
        &self,
        scores: Role,
        microbatch: Option<Microbatch>,
    ) -> Result<MicrobatchInputs, StepError> {
        let scores_tensor = self.scores_of(microbatch);
        let (rows_key, info) = scores_tensor.ok_or_else(|| self.missing(scores, microbatch))?;
        let whole = match self.recorded(Role::Labels, microbatch) {
            Some(key) => {
                let tokens = self.tensors[key].shape.iter().product::<u64>() as usize;
                Some((self.labels(key, tokens, usize::MAX)?, tokens))
            }
            None => None,
        };
        let ((mut labels, sequence, _), tokens) = whole.unwrap_or_default();
        let weights = self.optional(Role::Weights, microbatch, tokens)?;
        let mut weights = weights.unwrap_or_else(|| vec![1.0; tokens]);
        if !self.options.declared.labels_shifted {
            shift(&mut labels, sequence, IGNORED);
            shift(&mut weights, sequence, 0.0);
        }
        Ok(MicrobatchInputs {
            microbatch,
            scores: Scores::Lost(info.dtype),
            labels,
            weights,
            bias: None,
            cotangent: vec![1.0; tokens],
            valid_vocab: 0,
            sequence,
            copies: vec![1.0; tokens],
            rows_key: rows_key.clone(),
            outside: Vec::new(),
            reads: None,
        })
    }

    /// The labels, the weights and what arrives at the loss of the tokens of a microbatch, without what their
    /// scores are computed from.
    pub(crate) fn tokens_of(
        &self,
        microbatch: Option<Microbatch>,
    ) -> Result<MicrobatchInputs, StepError> {
        if let Some((key, why)) = self.lacking.any_of(microbatch) {
            return Err(StepError::Unusable { key, why });
        }
        let own = self.counted(self.scores(), microbatch)?;
        let cotangent = self.cotangent(microbatch, own.tokens())?;
        Ok(MicrobatchInputs { cotangent, ..own })
    }

    /// The labels of a microbatch as they were recorded, before the head shifts them, `[T]`.
    pub(crate) fn recorded_labels(&self, inputs: &MicrobatchInputs) -> Option<Vec<u32>> {
        let key = self.recorded(Role::Labels, inputs.microbatch)?;
        let (labels, ..) = self.labels(key, inputs.tokens(), inputs.valid_vocab).ok()?;
        Some(labels)
    }

    /// The weights of a microbatch as they were recorded, `[T]`: 1 where there are none.
    pub(crate) fn recorded_weights(&self, inputs: &MicrobatchInputs) -> Option<Vec<f64>> {
        let weights = self.optional(Role::Weights, inputs.microbatch, inputs.tokens()).ok()?;
        Some(weights.unwrap_or_else(|| vec![1.0; inputs.tokens()]))
    }

    /// The tensor of a role in the microbatch, or the one that all microbatches share.
    pub fn recorded(&self, role: Role, microbatch: Option<Microbatch>) -> Option<&TensorKey> {
        if self.lacking.input(role, microbatch).is_some() {
            return None;
        }
        self.find(role, microbatch).or_else(|| self.find(role, None))
    }

    fn need(&self, role: Role, microbatch: Option<Microbatch>) -> Result<&TensorKey, StepError> {
        self.recorded(role, microbatch).ok_or_else(|| self.missing(role, microbatch))
    }

    fn product(
        &self,
        q: Tensor,
        microbatch: Option<Microbatch>,
    ) -> Result<(Scores, usize, usize), StepError> {
        let k = self.oriented(self.need(Role::K, microbatch)?, None)?;
        let columns = |tensor: &Tensor| tensor.shape.last().copied().unwrap_or(0);
        let d = columns(&q);
        if q.shape.len() < 2 || matrix(&q).is_none() {
            return Err(unfit(&q, "floats of at least two dimensions, [..., D]"));
        }
        if k.shape.len() != 2 || columns(&k) != d || matrix(&k).is_none() {
            let layout = if self.options.transposed() { "[D, V]" } else { "[V, D]" };
            let wanted = format!("a float tensor of layout {layout} with D = {d}, as q has");
            return Err(unfit(&k, &wanted));
        }
        let (tokens, vocab) = (rows(&q), k.shape[0] as usize);
        Ok((Scores::Product { q, k }, tokens, vocab))
    }

    fn valid_vocab(&self, vocab: usize, key: &TensorKey) -> Result<usize, StepError> {
        match self.options.valid_vocab {
            Some(valid) if valid > vocab as u64 => {
                let (vocabulary, wanted) = (
                    format!("of a vocabulary of {vocab}"),
                    format!("at least valid_vocab = {valid} classes"),
                );
                Err(StepError::Unfit { key: key.clone(), found: vocabulary, wanted })
            }
            valid => Ok(valid.map_or(vocab, |valid| valid as usize)),
        }
    }

    /// The labels, how many tokens a sequence has, and the labels that are not a class.
    fn labels(
        &self,
        key: &TensorKey,
        tokens: usize,
        valid: usize,
    ) -> Result<(Vec<u32>, usize, Outside), StepError> {
        let tensor = self.assemble(key)?;
        let values = integers(&tensor).filter(|values| values.len() == tokens);
        let values = values.ok_or_else(|| unfit(&tensor, &format!("{tokens} integers")))?;
        let ignore = self.options.ignore_label;
        let mut outside = Vec::new();
        let checked_label = |(token, &label): (usize, &i64)| match usize::try_from(label) {
            _ if Some(label) == ignore => IGNORED,
            Ok(row) if row < valid => row as u32,
            _ => {
                outside.push((token, label));
                IGNORED
            }
        };
        let labels = values.iter().enumerate().map(checked_label).collect();
        let wanted = || wanted_labels(&outside, valid);
        // If all labels that are not a class have the same negative value, and no `ignore_label` is
        // declared, the declaration was forgotten, and it is not known what the job computed for
        // these tokens.
        if let Some(&(_, first)) = outside.first()
            && ignore.is_none()
            && first < 0
            && outside.iter().all(|&(_, label)| label == first)
        {
            return Err(unfit(&tensor, &wanted()));
        }
        Ok((labels, tensor.shape.last().map_or(tokens, |&n| n as usize), outside))
    }

    /// Tokens of one sequence, from a tensor `[B, S]` or `[T]`.
    fn last_dimension(&self, key: &TensorKey, tokens: usize) -> usize {
        self.tensors[key].shape.last().map_or(tokens, |&n| n as usize)
    }

    /// The `count` numbers of a role that the job need not have; zeros where the tensor is lost.
    pub fn optional(
        &self,
        role: Role,
        microbatch: Option<Microbatch>,
        count: usize,
    ) -> Result<Option<Vec<f64>>, StepError> {
        let Some(key) = self.recorded(role, microbatch) else {
            let lost = self.lacking.input(role, microbatch).is_some();
            return Ok(lost.then(|| vec![0.0; count]));
        };
        let tensor = self.assemble(key)?;
        let values = numbers(&tensor).filter(|values| values.len() == count);
        values.map(Some).ok_or_else(|| unfit(&tensor, &format!("{count} numbers")))
    }

    /// What arrives at the loss of each token: of a loss that is reduced over tokens, each has that
    /// of the loss it is in.
    fn cotangent(
        &self,
        microbatch: Option<Microbatch>,
        tokens: usize,
    ) -> Result<Vec<f64>, StepError> {
        let given = self.optional(Role::Cotangent, microbatch, tokens)?;
        Ok(given.unwrap_or_else(|| vec![1.0; tokens]))
    }

    /// Advantages of a policy loss, `[T]`. They are recorded for each token, or for each sequence
    /// and then repeated for its tokens.
    pub fn advantages(&self, inputs: &MicrobatchInputs) -> Result<Vec<f64>, StepError> {
        let (tokens, mb) = (inputs.tokens(), inputs.microbatch);
        if self.lacking.input(Role::Advantages, mb).is_some() {
            return Ok(vec![0.0; tokens]);
        }
        let key = self.recorded(Role::Advantages, mb);
        let key = key.ok_or_else(|| self.missing(Role::Advantages, mb))?;
        let count: u64 = self.tensors[key].shape.iter().product();
        let sequences = tokens / inputs.sequence.max(1);
        if count == sequences as u64 && count != tokens as u64 {
            let each = self.optional(Role::Advantages, mb, sequences)?.unwrap_or_default();
            return Ok((0..tokens).map(|t| each[t / inputs.sequence]).collect());
        }
        Ok(self.optional(Role::Advantages, mb, tokens)?.unwrap_or_default())
    }

    /// True when the loss is a policy loss.
    pub fn is_policy_loss(&self) -> bool {
        self.options.loss == Loss::Grpo
    }
}

/// The matrix that is read in place of `recorded`, if any, and whether the gradient is multiplied with
/// it too.
fn read<'t>(misread: &'t Option<(Tensor, bool)>, recorded: Matrix<'t>) -> (Matrix<'t>, bool) {
    match misread {
        Some((tensor, product)) => (matrix(tensor).unwrap_or(recorded), *product),
        None => (recorded, true),
    }
}

/// A sentence about what labels should be, where some are not a class.
fn wanted_labels(outside: &[(usize, i64)], valid: usize) -> String {
    let (token, label) = outside.first().copied().unwrap_or_default();
    let more = match outside.len().saturating_sub(1) {
        0 => String::new(),
        more => format!(" and {more} more tokens lie outside too"),
    };
    format!(
        "labels in 0..{valid}: token {token} has {label}{more}; declare ignore_label={label} if it means nothing"
    )
}

fn given(logits: Tensor) -> Result<(Scores, usize, usize), StepError> {
    if logits.shape.len() < 2 || matrix(&logits).is_none() {
        return Err(unfit(&logits, "floats of at least two dimensions, [..., V]"));
    }
    let (tokens, vocab) = (rows(&logits), logits.shape[logits.shape.len() - 1] as usize);
    Ok((Scores::Logits(logits), tokens, vocab))
}

/// For each row of a tensor, how many rows have the same bytes.
fn copies(tensor: &Tensor, rows: usize) -> Vec<f64> {
    let width = (tensor.bytes().len() / rows.max(1)).max(1);
    let mut counts: HashMap<&[u8], f64> = HashMap::new();
    let each = || tensor.bytes().chunks_exact(width).take(rows);
    each().for_each(|row| *counts.entry(row).or_insert(0.0) += 1.0);
    each().map(|row| counts[row]).collect()
}

/// Moves the values of each sequence forward by one place; the last place gets `last`.
fn shift<T: Copy>(values: &mut [T], sequence: usize, last: T) {
    for of_sequence in values.chunks_mut(sequence.max(1)) {
        of_sequence.rotate_left(1);
        of_sequence[of_sequence.len() - 1] = last;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_shift_inside_their_sequence_and_the_last_one_takes_no_part() {
        let mut labels = vec![1, 2, 3, 4, 5, 6];
        shift(&mut labels, 3, IGNORED);
        assert_eq!(labels, [2, 3, IGNORED, 5, 6, IGNORED]);
    }
}
