//! Token ids of a step, as sequences: the labels, and the integer inputs that jobs record under the
//! usual names.

use backtape::dtype::Dtype;
use backtape::identity::Rank;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::Subject;
use super::pieces::{Piece, pieces};
use crate::bits::{bits, integer};
use crate::dump::TensorInfo;

/// Names under which jobs usually record the ids that the model reads.
const INPUTS: [&str; 8] =
    ["tokens", "inputs", "input_ids", "input_tokens", "token_ids", "ids", "input", "x"];

/// The last part of a name such as `batch/input_ids` or `batch.input_ids`.
fn last_part(name: &str) -> &str {
    name.rsplit(['/', '.']).next().unwrap_or(name)
}

/// True for a tensor of ids that the model reads.
pub(super) fn is_input(key: &TensorKey, info: &TensorInfo) -> bool {
    let named = INPUTS.contains(&last_part(key.tensor.as_str()));
    named && info.role.is_none() && is_ids(info.dtype)
}

/// True for the target ids.
pub(super) fn is_labels(info: &TensorInfo) -> bool {
    info.role == Some(Role::Labels) && is_ids(info.dtype)
}

/// Ids are integers of any width; models that read bytes have ids of one byte.
fn is_ids(dtype: Dtype) -> bool {
    !dtype.is_float() && dtype != Dtype::Bool
}

/// The part of a batch that one rank (or several, as replicas) held: rows of a `[B, S]` tensor, or
/// a `[T]` tensor as one row.
pub(super) struct Batch<'a> {
    pub(super) piece: Piece<'a>,
    /// Length of a row of this piece, at least 1.
    pub(super) length: usize,
}

impl<'a> Batch<'a> {
    fn new(piece: Piece<'a>, dims: usize, inner: usize) -> Batch<'a> {
        let elements = piece.bytes.len() / piece.record.dtype.width().max(1) / inner.max(1);
        let place = &piece.place().0;
        let length = match dims {
            0 | 1 => elements,
            _ => (place[dims - 1].1 - place[dims - 1].0) as usize,
        };
        Batch { piece, length: length.max(1) }
    }

    /// The ranks that held it.
    pub(super) fn ranks(&self) -> &[Rank] {
        &self.piece.ranks
    }

    /// The ids, row-major; -1 for an id that does not fit an i64.
    pub(super) fn ids(&self) -> impl Iterator<Item = i64> + '_ {
        let dtype = self.piece.record.dtype;
        let count = self.piece.bytes.len() / dtype.width();
        (0..count)
            .map(move |i| integer(dtype, bits(self.piece.bytes, dtype.width(), i)).unwrap_or(-1))
    }
}

/// The batches of a tensor of ids.
pub(super) fn batches<'a>(subject: &Subject<'a>, info: &'a TensorInfo) -> Vec<Batch<'a>> {
    let (recorded, _) = pieces(subject.dump, info);
    let full = recorded.into_iter().filter(|piece| !piece.bytes.is_empty());
    full.map(|piece| Batch::new(piece, info.shape.len(), 1)).collect()
}

/// The batches of q, in which each token's row of q is one symbol.
pub(super) fn rows_of_q<'a>(subject: &Subject<'a>, info: &'a TensorInfo) -> Vec<Batch<'a>> {
    let dims = info.shape.len();
    if dims < 2 {
        return Vec::new();
    }
    let (recorded, _) = pieces(subject.dump, info);
    let full = recorded.into_iter().filter(|piece| !piece.bytes.is_empty());
    let width = |piece: &Piece<'_>| piece.columns();
    full.map(|piece| {
        let inner = width(&piece);
        Batch::new(piece, dims - 1, inner)
    })
    .collect()
}
