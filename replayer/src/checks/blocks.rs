//! Recognises a kernel whose index map multiplied block indices twice, from which blocks of a
//! tensor hold finite numbers.
//!
//! The index map of a kernel grid returns the index of a block, and the grid multiplies it by the
//! block's size b. An index map that already returns the offset `i b` puts block i at `i b b`: the
//! first block is right, blocks that begin beyond the end are dropped or moved back to the end of
//! the axis, and the elements in between are never written or read. The places that hold numbers
//! then depend only on b, which is the length of the first run of them.

use backtape::shard::TensorKey;

use super::Subject;
use crate::assemble::{Tensor, assemble};
use crate::bits::{Kind, bits, kind};

/// Smallest block size that is reported: smaller blocks may appear by chance.
const LEAST: usize = 4;

/// A sentence about the axes of a tensor on which only blocks at `i b b` hold numbers, if there are
/// any.
pub(super) fn indexed_twice(subject: &Subject<'_>, key: &TensorKey) -> Option<String> {
    let tensor = assemble(subject.dump, key).ok()?;
    let axes = 0..tensor.shape.len();
    let axes_and_sizes = axes.filter_map(|axis| Some((axis, size(&numbers_along(&tensor, axis))?)));
    let words = |(axis, b): (usize, usize)| {
        format!(
            "along axis {axis} there are numbers only in blocks of {b} that begin at i x {b} x {b}, where block i should begin at i x {b}"
        )
    };
    let each: Vec<String> = axes_and_sizes.map(words).collect();
    (!each.is_empty()).then(|| each.join("; "))
}

/// Which places of an axis hold at least one finite number.
fn numbers_along(tensor: &Tensor, axis: usize) -> Vec<bool> {
    let width = tensor.dtype.width();
    let inner: u64 = tensor.shape[axis + 1..].iter().product();
    let (inner, length) = (inner as usize, tensor.shape[axis] as usize);
    let mut there = vec![false; length];
    for index in 0..tensor.bytes().len() / width {
        let place = index / inner % length;
        there[place] |=
            there[place] || kind(tensor.dtype, bits(tensor.bytes(), width, index)) == Kind::Finite;
    }
    there
}

/// The block size b for which the blocks at `i b b` are exactly the places that hold numbers.
/// Blocks that begin beyond the end of the axis are dropped, or moved to the last place at which a
/// whole block fits, or to the last block of the grid.
fn size(there: &[bool]) -> Option<usize> {
    let n = there.len();
    let b = there.iter().position(|there| !there)?;
    if b < LEAST || !there[b..].contains(&true) {
        return None;
    }
    let blocks = |last: usize| {
        let mut written = vec![false; n];
        for from in (0..n.div_ceil(b)).map(|i| (i * b * b).min(last)) {
            written.iter_mut().skip(from).take(b).for_each(|place| *place = true);
        }
        written
    };
    [n - b, (n - 1) / b * b, n].into_iter().any(|last| blocks(last) == there).then_some(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn along(n: usize, ranges: &[(usize, usize)]) -> Vec<bool> {
        (0..n).map(|at| ranges.iter().any(|&(from, to)| (from..to).contains(&at))).collect()
    }

    #[test]
    fn blocks_are_told_from_where_they_lie_and_other_gaps_are_not() {
        assert_eq!(size(&along(80, &[(0, 8), (64, 80)])), Some(8));
        assert_eq!(size(&along(80, &[(0, 8), (64, 72)])), Some(8));
        assert_eq!(size(&along(560, &[(0, 64), (496, 560)])), Some(64));
        assert_eq!(size(&along(60, &[(0, 8), (56, 60)])), Some(8));
        for others in
            [&[(0, 8)][..], &[(0, 8), (40, 48)], &[(8, 80)], &[(0, 80)], &[(0, 8), (16, 80)]]
        {
            assert_eq!(size(&along(80, others)), None, "{others:?}");
        }
    }
}
