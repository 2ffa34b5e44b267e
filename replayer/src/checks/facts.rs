//! What is known of the tokens of one microbatch: their labels, weights and likelihoods, and the
//! ranks that hold them.
//!
//! Only vectors of `T` numbers are assembled here, no matrices.

use backtape::head::HeadDeclaration;
use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

use super::Subject;
use super::pieces::pieces;
use crate::assemble::{Tensor, assemble};
use crate::bits::{bits, integer, value};

/// Labels that usually mean an ignored token; used where no head is declared.
const CUSTOMARY: [i64; 2] = [-100, -1];

/// The tokens of one microbatch, `T` of them.
pub(super) struct Facts {
    pub(super) microbatch: Option<Microbatch>,
    /// The tensor of the labels.
    pub(super) key: TensorKey,
    /// Labels as recorded, `[T]`.
    pub(super) recorded: Vec<i64>,
    /// The class that each position should predict; `None` for an ignored token, `[T]`.
    pub(super) targets: Vec<Option<i64>>,
    /// Weight of each position, 0 for an ignored token, `[T]`.
    pub(super) weights: Vec<f64>,
    /// Whether weights were recorded.
    pub(super) weighted: bool,
    /// Log-sum-exp and the label's logit, `[T]`, where both were recorded.
    pub(super) likelihood: Option<(Vec<f64>, Vec<f64>)>,
    /// Unit roundoff of the coarser of the two dtypes of `likelihood`.
    pub(super) roundoff: f64,
    /// Index into `holders` of the ranks that held each token, `[T]`.
    pub(super) holder: Vec<usize>,
    pub(super) holders: Vec<Vec<Rank>>,
    /// The tokens of each of `holders`, ascending.
    pub(super) held_tokens: Vec<Vec<usize>>,
}

/// The facts of each microbatch that has labels, or why its labels cannot be used.
pub(super) fn facts(subject: &Subject<'_>) -> Vec<Result<Facts, (TensorKey, String)>> {
    let keys = subject.of_role(Role::Labels).map(|(key, _)| key);
    keys.map(|key| of_labels(subject, key).map_err(|why| (key.clone(), why))).collect()
}

fn of_labels(subject: &Subject<'_>, key: &TensorKey) -> Result<Facts, String> {
    let tensor = assemble(subject.dump, key).map_err(|error| error.to_string())?;
    let recorded =
        integers(&tensor).ok_or_else(|| format!("{key} is {}, no integers", tensor.dtype))?;
    let (tokens, head) = (recorded.len(), subject.head());
    let sequence = tensor.shape.last().map_or(tokens, |&n| n as usize).max(1);
    let ignored = |label: i64| ignored(head, label);
    let mut targets: Vec<Option<i64>> =
        recorded.iter().map(|&label| Some(label).filter(|&label| !ignored(label))).collect();
    let given = optional(subject, Role::Weights, key.microbatch, tokens)?;
    let weighted = given.is_some();
    let mut weights = given.map_or_else(|| vec![1.0; tokens], |(values, _)| values);
    if head.is_some_and(|head| !head.labels_shifted) {
        shift(&mut targets, sequence, None);
        shift(&mut weights, sequence, 0.0);
    }
    let without = targets.iter().zip(&mut weights).filter(|(target, _)| target.is_none());
    without.for_each(|(_, weight)| *weight = 0.0);
    let lse = vector(subject, Role::Lse, key.microbatch, tokens);
    let label_logits = vector(subject, Role::LabelLogits, key.microbatch, tokens);
    let both = lse.zip(label_logits);
    let roundoff = both.as_ref().map_or(0.0, |((_, a), (_, b))| a.max(*b));
    let likelihood = both.map(|((lse, _), (label_logits, _))| (lse, label_logits));
    let (holder, holders) = holders(subject, key, tokens);
    let mut tokens_held = vec![Vec::new(); holders.len()];
    holder.iter().enumerate().for_each(|(t, &group)| tokens_held[group].push(t));
    Ok(Facts {
        microbatch: key.microbatch,
        key: key.clone(),
        recorded,
        targets,
        weights,
        weighted,
        likelihood,
        roundoff,
        holder,
        holders,
        held_tokens: tokens_held,
    })
}

impl Facts {
    /// Number of tokens T.
    pub(super) fn tokens(&self) -> usize {
        self.targets.len()
    }

    /// Tokens that are not ignored.
    pub(super) fn valid(&self) -> usize {
        self.targets.iter().flatten().count()
    }

    /// `lse - label_logit` of a token, where both were recorded.
    pub(super) fn nll(&self, token: usize) -> Option<f64> {
        let (lse, label_logits) = self.likelihood.as_ref()?;
        Some(lse[token] - label_logits[token])
    }
}

/// True for the label of an ignored token: the declared one, or without a head a customary one.
pub(super) fn ignored(head: Option<&HeadDeclaration>, label: i64) -> bool {
    match head {
        Some(head) => head.ignore_label == Some(label),
        None => CUSTOMARY.contains(&label),
    }
}

/// True for a label that usually means an ignored token.
pub(super) fn customary(label: i64) -> bool {
    CUSTOMARY.contains(&label)
}

/// Moves the values of each sequence forward by one place; the last place gets `last`.
fn shift<T: Copy>(values: &mut [T], sequence: usize, last: T) {
    for of_sequence in values.chunks_mut(sequence) {
        of_sequence.rotate_left(1);
        of_sequence[of_sequence.len() - 1] = last;
    }
}

fn holders(subject: &Subject<'_>, key: &TensorKey, tokens: usize) -> (Vec<usize>, Vec<Vec<Rank>>) {
    let (recorded, _) = pieces(subject.dump, &subject.dump.tensors()[key]);
    let mut holder = vec![0; tokens];
    let dims = subject.dump.tensors()[key].shape.len();
    for (index, piece) in recorded.iter().enumerate() {
        let (columns, start) = (piece.columns() as u64, piece.column_range().0);
        let row_length = subject.dump.tensors()[key].shape.last().copied().unwrap_or(1);
        for row in 0..piece.rows() {
            let row = piece.global_row(row);
            let first = if dims > 1 { row * row_length + start } else { row };
            (first..first + columns).for_each(|t| holder[t as usize] = index);
        }
    }
    (holder, recorded.into_iter().map(|piece| piece.ranks).collect())
}

/// The elements of an integer tensor; `None` for another dtype, or where one does not fit an i64.
pub(super) fn integers(tensor: &Tensor) -> Option<Vec<i64>> {
    let width = tensor.dtype.width();
    (0..tensor.elements()).map(|i| integer(tensor.dtype, bits(tensor.bytes(), width, i))).collect()
}

/// The values of a role in a microbatch (or of a tensor that all microbatches share), if there are
/// `count` of them, and the unit roundoff of their dtype.
pub(super) fn vector(
    subject: &Subject<'_>,
    role: Role,
    microbatch: Option<Microbatch>,
    count: usize,
) -> Option<(Vec<f64>, f64)> {
    let is_wanted = |key: &&TensorKey| {
        key.when != Some(When::PostReduce)
            && (key.microbatch == microbatch || key.microbatch.is_none())
    };
    let mut keys: Vec<&TensorKey> =
        subject.of_role(role).map(|(key, _)| key).filter(is_wanted).collect();
    keys.sort_by_key(|key| key.microbatch != microbatch);
    let tensor = assemble(subject.dump, keys.first()?).ok()?;
    let width = tensor.dtype.width();
    let number = |i| value(tensor.dtype, bits(tensor.bytes(), width, i));
    let roundoff = roundoff(tensor.dtype);
    (tensor.elements() == count).then(|| ((0..count).map(number).collect(), roundoff))
}

/// The same for a role that a job need not record. `Err` where the job recorded it, in this or
/// another microbatch, and the values of this microbatch cannot be used.
pub(super) fn optional(
    subject: &Subject<'_>,
    role: Role,
    microbatch: Option<Microbatch>,
    count: usize,
) -> Result<Option<(Vec<f64>, f64)>, String> {
    let values = vector(subject, role, microbatch, count);
    match subject.of_role(role).next() {
        Some((key, _)) if values.is_none() => {
            let place = microbatch.map_or(String::new(), |mb| format!(" of microbatch {mb}"));
            Err(format!("{}{place} cannot be used", key.tensor))
        }
        _ => Ok(values),
    }
}

/// Unit roundoff of a dtype, half the spacing of its numbers at 1; 0 for integers.
pub(super) fn roundoff(dtype: backtape::dtype::Dtype) -> f64 {
    crate::bits::format(dtype).map_or(0.0, |(_, fraction)| (-f64::from(fraction) - 1.0).exp2())
}

/// The number of classes V: the declared one, else the number of rows of k, else the width of the
/// logits.
pub(super) fn classes(subject: &Subject<'_>) -> Option<u64> {
    let head = subject.head();
    if let Some(valid) = head.and_then(|head| head.valid_vocab) {
        return Some(valid);
    }
    let transposed = head.is_some_and(|head| head.k_layout == backtape::head::KLayout::Dv);
    let k = subject.of_role(Role::K).find(|(_, info)| info.shape.len() == 2);
    let logits = || subject.of_role(Role::Logits).find(|(_, info)| info.shape.len() > 1);
    match (k, head) {
        // Without a declaration the layout of k is not known.
        (Some((_, info)), Some(_)) => Some(info.shape[usize::from(transposed)]),
        _ => logits().and_then(|(_, info)| info.shape.last().copied()),
    }
}
