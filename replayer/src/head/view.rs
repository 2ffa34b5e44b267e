//! Assembled tensors as the kernels take them: matrices and slices of them, without a copy.

use std::collections::BTreeSet;

use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::HeadStep;
use crate::assemble::{self, Tensor};
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix, Reads, Values};
use crate::kernels::rows_of;

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
pub(super) fn rows(tensor: &Tensor) -> usize {
    tensor.shape[..tensor.shape.len() - 1].iter().product::<u64>() as usize
}

/// The elements of an integer tensor of any width; `None` for another dtype, or where one does not
/// fit an i64.
pub(crate) fn integers(tensor: &Tensor) -> Option<Vec<i64>> {
    fn widened<T: Copy + Into<i64>>(values: Option<&[T]>) -> Option<Vec<i64>> {
        values.map(|values| values.iter().map(|&n| n.into()).collect())
    }
    let unsigned = || tensor.u64()?.iter().map(|&n| i64::try_from(n).ok()).collect();
    widened(tensor.i64())
        .or_else(|| widened(tensor.i32()))
        .or_else(|| widened(tensor.u32()))
        .or_else(|| widened(tensor.i16()))
        .or_else(|| widened(tensor.u16()))
        .or_else(|| widened(tensor.i8()))
        .or_else(|| widened(tensor.u8()))
        .or_else(unsigned)
}

/// The elements of a tensor as f64; `None` for a dtype that is not a number.
pub(crate) fn numbers(tensor: &Tensor) -> Option<Vec<f64>> {
    match matrix(tensor) {
        Some(values) => Some(values.to_f64()),
        None => integers(tensor).map(|all| all.iter().map(|&n| n as f64).collect()),
    }
}

/// Row-major indices of the points of a box in a tensor of this shape.
pub(crate) fn flat_rows(place: &[(u64, u64)], shape: &[u64]) -> Vec<usize> {
    let mut flat = vec![0usize];
    for (&(lo, hi), &n) in place.iter().zip(shape) {
        let extend = |&base: &usize| (lo..hi).map(move |i| base * n as usize + i as usize);
        flat = flat.iter().flat_map(extend).collect();
    }
    flat
}

/// For each element of a partial tensor, row-major, how many ranks recorded an addend of it: ranks
/// that shard the tensor add to their own part only.
pub(crate) fn addends_of_elements(step: &HeadStep<'_>, key: &TensorKey) -> Vec<u32> {
    let info = &step.tensors[key];
    let mut counts = vec![0; info.shape.iter().product::<u64>() as usize];
    for rank in assemble::holders(step.dump, key) {
        let records = info.shards.iter().map(|shard| step.dump.record(shard));
        let places: BTreeSet<&IndexBox> =
            records.filter(|record| record.rank == rank).map(|record| &record.place).collect();
        let all = places.into_iter().flat_map(|place| flat_rows(&place.0, &info.shape));
        all.for_each(|at| counts[at] += 1);
    }
    counts
}

/// The inputs with the rows of k of a vocabulary range only; labels outside it become `IGNORED`.
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
    let reads = inputs.reads.map(|reads| Reads {
        k: rows_of(&reads.k, range.clone()),
        scores: reads.scores.map(|(scores, first)| (scores, first + range.start)),
        ..reads
    });
    HeadInputs { k: rows_of(&inputs.k, range), labels, valid_vocab, bias, reads, ..*inputs }
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
