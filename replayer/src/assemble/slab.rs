//! Parts of a tensor, so that a tensor that is larger than memory can be read part by part.
//!
//! A part that is contiguous in one intact shard is borrowed from the mapped file, so that
//! comparing two dumps copies nothing.

use std::borrow::Cow;
use std::ops::Range;

use backtape::index_box::{IndexBox, gaps};
use backtape::shard::TensorKey;

use super::{AssembleError, Tensor, assemble_box, distinct_boxes, fill, known, shifted, values};
use crate::dump::StepDump;
use crate::dump::addend::group;

/// The bytes of a range of elements, by row-major index, of a tensor that the ranks hold as values.
pub fn elements<'a>(
    dump: &'a StepDump,
    key: &TensorKey,
    range: Range<u64>,
) -> Result<Cow<'a, [u8]>, AssembleError> {
    let info = values(dump, key)?;
    let boxes = boxes_of(&info.shape, range);
    if let [place] = boxes.as_slice()
        && let Some(bytes) = in_one_shard(dump, key, place)
    {
        return Ok(Cow::Borrowed(bytes));
    }
    let mut bytes = Vec::new();
    for place in &boxes {
        bytes.extend_from_slice(assemble_box(dump, key, place)?.bytes());
    }
    Ok(Cow::Owned(bytes))
}

/// The part of each addend of a partial tensor inside a box: one list of tensors for each addend,
/// each with its box in the global tensor.
pub fn addends_in(
    dump: &StepDump,
    key: &TensorKey,
    place: &IndexBox,
) -> Result<Vec<Vec<Tensor>>, AssembleError> {
    let info = known(dump, key)?;
    let addend = |shards: &Vec<crate::dump::ShardRef>| {
        let boxes = distinct_boxes(dump, shards);
        let covered = gaps(&place.extent(), &shifted(&boxes, place)).is_empty();
        let parts: Vec<IndexBox> = match covered {
            true => vec![place.clone()],
            false => boxes.iter().filter_map(|own| own.intersection(place)).collect(),
        };
        parts.into_iter().map(|part| fill(dump, key, info.dtype, shards, part)).collect()
    };
    group(dump, info).values().map(addend).collect()
}

/// The boxes that make up a range of elements by row-major index, in that order.
pub fn boxes_of(shape: &[u64], range: Range<u64>) -> Vec<IndexBox> {
    let mut boxes = Vec::new();
    cut(&mut Vec::new(), shape, range, &mut boxes);
    boxes
}

fn cut(outer: &mut Vec<(u64, u64)>, shape: &[u64], range: Range<u64>, boxes: &mut Vec<IndexBox>) {
    let Some((_, inner)) = shape.split_first() else {
        boxes.push(IndexBox(outer.clone()));
        return;
    };
    let stride: u64 = inner.iter().product();
    let mut start = range.start;
    while start < range.end {
        let row = start / stride;
        if start.is_multiple_of(stride) && range.end - start >= stride {
            let last = range.end / stride;
            let whole = inner.iter().map(|&n| (0, n));
            boxes.push(IndexBox(outer.iter().copied().chain([(row, last)]).chain(whole).collect()));
            start = last * stride;
        } else {
            let end = range.end.min((row + 1) * stride);
            outer.push((row, row + 1));
            cut(outer, inner, start - row * stride..end - row * stride, boxes);
            outer.pop();
            start = end;
        }
    }
}

/// The bytes of a box, if they are contiguous in one intact shard.
fn in_one_shard<'a>(dump: &'a StepDump, key: &TensorKey, place: &IndexBox) -> Option<&'a [u8]> {
    let info = &dump.tensors()[key];
    info.shards.iter().find_map(|shard| {
        let record = dump.record(shard);
        let offset = offset(place, &record.place)? * record.dtype.width();
        let length = place.elements()? as usize * record.dtype.width();
        dump.intact_bytes(shard)?.get(offset..offset + length)
    })
}

/// How many elements of `shard` precede those of `place`, if the shard holds the place
/// contiguously: after the first dimension in which the place has more than one index, it must span
/// all of the shard.
fn offset(place: &IndexBox, shard: &IndexBox) -> Option<usize> {
    let mut one_run = true;
    let mut offset = 0;
    for (part, whole) in place.0.iter().zip(&shard.0) {
        let inside = whole.0 <= part.0 && part.1 <= whole.1;
        if !inside || !(one_run || part == whole) {
            return None;
        }
        one_run &= part.1 - part.0 == 1;
        offset = offset * (whole.1 - whole.0) + part.0 - whole.0;
    }
    Some(offset as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(place: &IndexBox, shape: &[u64]) -> Vec<u64> {
        let mut positions = vec![0];
        for (&(lo, hi), &n) in place.0.iter().zip(shape) {
            positions = positions.iter().flat_map(|at| (lo..hi).map(move |i| at * n + i)).collect();
        }
        positions
    }

    #[test]
    fn boxes_of_a_range_are_its_elements_in_order_and_few() {
        for shape in [vec![], vec![7], vec![3, 5], vec![2, 3, 4], vec![1, 1, 9], vec![2, 1, 3, 2]] {
            let all: u64 = shape.iter().product();
            for start in 0..all {
                for end in start + 1..=all {
                    let boxes = boxes_of(&shape, start..end);
                    let positions: Vec<u64> = boxes.iter().flat_map(|b| flat(b, &shape)).collect();
                    assert_eq!(positions, (start..end).collect::<Vec<_>>(), "{shape:?}");
                    assert!(boxes.len() <= (2 * shape.len()).max(1), "{shape:?} {boxes:?}");
                }
            }
        }
    }

    /// Method: every box in a small shard is compared with the definition, that the positions of
    /// its elements in the shard are consecutive.
    #[test]
    fn a_box_is_borrowed_only_where_it_is_one_run_of_the_shard() {
        let shard = IndexBox(vec![(1, 4), (0, 3), (2, 4)]);
        let ranges = |n: u64| (0..n).flat_map(move |lo| (lo + 1..=n).map(move |hi| (lo, hi)));
        let position = |at: &[u64]| -> Option<usize> {
            let mut index = 0;
            for (&i, &(lo, hi)) in at.iter().zip(&shard.0) {
                index = index * (hi - lo) + (lo..hi).contains(&i).then(|| i - lo)?;
            }
            Some(index as usize)
        };
        for (a, (b, c)) in
            ranges(5).flat_map(|a| ranges(3).flat_map(move |b| ranges(4).map(move |c| (a, (b, c)))))
        {
            let place = IndexBox(vec![a, b, c]);
            let mut offsets = Vec::new();
            for i in a.0..a.1 {
                for j in b.0..b.1 {
                    (c.0..c.1).for_each(|k| offsets.push(position(&[i, j, k])));
                }
            }
            let run =
                offsets.iter().enumerate().all(|(n, p)| *p == offsets[0].map(|first| first + n));
            let wanted = if run { offsets[0] } else { None };
            // `offset` may miss a contiguous box, but never returns a wrong position.
            let borrowed = offset(&place, &shard);
            assert!(borrowed == wanted || borrowed.is_none(), "{place} {borrowed:?} {wanted:?}");
        }
        assert_eq!(offset(&IndexBox(vec![(2, 3), (1, 3), (2, 4)]), &shard), Some(8));
    }
}
