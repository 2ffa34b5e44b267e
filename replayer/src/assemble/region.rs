//! Copies boxes of row-major bytes: cuts a box into pieces that are contiguous in memory, and
//! copies the elements that two boxes share.
//!
//! Callers have checked every box against its bytes (`ShardRecord::check`), so that no allocation
//! here depends on what a wrong record claims.

use std::ops::Range;

use backtape::index_box::IndexBox;

/// Bytes of one piece of parallel work: large enough to hide the bookkeeping,
/// small enough that every core has some.
const PIECE_BYTES: u64 = 1 << 20;

/// Cuts a box into consecutive contiguous pieces of about a MiB.
pub(crate) fn pieces(place: &IndexBox, width: usize) -> Vec<IndexBox> {
    pieces_of(place, PIECE_BYTES / width as u64)
}

/// The same in pieces of at most so many elements.
pub(crate) fn pieces_of(place: &IndexBox, most: u64) -> Vec<IndexBox> {
    let mut pieces = Vec::new();
    cut(place.clone(), 0, most, &mut pieces);
    pieces
}

fn cut(place: IndexBox, dim: usize, most: u64, pieces: &mut Vec<IndexBox>) {
    let inner = |from: usize| place.0[from..].iter().map(|(lo, hi)| hi - lo).product::<u64>();
    if dim == place.0.len() || inner(dim) <= most {
        pieces.push(place);
        return;
    }
    let (lo, hi) = place.0[dim];
    let rows = (most / inner(dim + 1)).max(1);
    let mut start = lo;
    while start < hi {
        let end = hi.min(start.saturating_add(rows));
        let mut piece = place.clone();
        piece.0[dim] = (start, end);
        // A row that is too large on its own is cut along the next dimension.
        match end - start == 1 {
            true => cut(piece, dim + 1, most, pieces),
            false => pieces.push(piece),
        }
        start = end;
    }
}

/// True when two boxes with the same number of dimensions share an element. It does not allocate,
/// as it is called for every pair of a piece and a shard.
pub(crate) fn intersect(a: &IndexBox, b: &IndexBox) -> bool {
    let mut pairs = a.0.iter().zip(&b.0);
    pairs.all(|(a, b)| a.0.max(b.0) < a.1.min(b.1))
}

/// Copies `region` from the bytes of box `from` into the bytes of box `to`.
/// The region lies in both.
pub(crate) fn copy(
    region: &IndexBox,
    (from, source): (&IndexBox, &[u8]),
    (to, target): (&IndexBox, &mut [u8]),
    width: usize,
) {
    // Both sides must be cut into the same runs: where a row is whole in one box and only a part of
    // a longer row in the other, the run ends at its end in both.
    let merged = whole_dims(region, from).min(whole_dims(region, to));
    let (read, written) = (runs(region, from, merged, width), runs(region, to, merged, width));
    for (there, here) in read.zip(written) {
        target[here].copy_from_slice(&source[there]);
    }
}

/// The bytes of `region`, copied from the bytes of box `from`.
pub(crate) fn extract(region: &IndexBox, from: &IndexBox, source: &[u8], width: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for run in runs(region, from, whole_dims(region, from), width) {
        out.extend_from_slice(&source[run]);
    }
    out
}

/// Where the bytes of `region` are in those of `from`, where they lie there one after the other.
pub(crate) fn run(region: &IndexBox, from: &IndexBox, width: usize) -> Option<Range<usize>> {
    let is_within = region.0.iter().zip(&from.0).all(|(a, b)| a.0 >= b.0 && a.1 <= b.1);
    let is_some = region.0.iter().all(|(low, high)| low < high);
    if region.0.len() != from.0.len() || !is_within || !is_some {
        return None;
    }
    let mut runs = runs(region, from, whole_dims(region, from), width);
    let first = runs.next()?;
    runs.next().is_none().then_some(first)
}

/// How many of the last dimensions of `place` the region spans completely.
fn whole_dims(region: &IndexBox, place: &IndexBox) -> usize {
    let pairs = region.0.iter().zip(&place.0).rev();
    pairs.take_while(|(a, b)| a == b).count()
}

/// The byte ranges of `region` in the row-major bytes of `place`, in order. The region spans the
/// last `merged` dimensions completely, so that one run covers them and the region's range in the
/// dimension before them.
fn runs<'a>(
    region: &'a IndexBox,
    place: &'a IndexBox,
    merged: usize,
    width: usize,
) -> impl Iterator<Item = Range<usize>> + 'a {
    let dims = place.0.len();
    let mut strides = vec![width; dims];
    for dim in (1..dims).rev() {
        let (lo, hi) = place.0[dim];
        strides[dim - 1] = strides[dim] * (hi - lo) as usize;
    }
    let (outer, inner) = region.0.split_at(dims.saturating_sub(merged + 1));
    let extents = |ranges: &[(u64, u64)]| ranges.iter().map(|(lo, hi)| hi - lo).product::<u64>();
    let (count, length) = (extents(outer), extents(inner) as usize * width);
    let mut index: Vec<u64> = region.0.iter().map(|(lo, _)| *lo).collect();
    (0..count).map(move |_| {
        let steps = index.iter().zip(&place.0).zip(&strides);
        let start: usize = steps.map(|((&i, &(lo, _)), stride)| (i - lo) as usize * stride).sum();
        for (i, &(lo, hi)) in index[..outer.len()].iter_mut().zip(outer).rev() {
            *i += 1;
            if *i < hi {
                break;
            }
            *i = lo;
        }
        start..start + length
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    /// Goal: bytes that are used where they lie are those of the region. Method: drawn regions of
    /// drawn boxes, against their copies.
    #[test]
    fn a_region_in_one_run_is_its_copy_and_other_regions_have_none() {
        let (mut draw, mut found, mut scattered) = (Draw::new(3), 0, 0);
        for _ in 0..2000 {
            let dims = draw.below(4);
            let within = |draw: &mut Draw, low: u64, high: u64| {
                let [a, b] = [(); 2].map(|()| low + draw.below((high - low + 1) as usize) as u64);
                if draw.below(2) == 0 { (low, high) } else { (a.min(b), a.max(b)) }
            };
            let from: Vec<(u64, u64)> = (0..dims).map(|dim| (dim as u64, dim as u64 + 4)).collect();
            let region = from.iter().map(|(low, high)| within(&mut draw, *low, *high)).collect();
            let (from, region) = (IndexBox(from), IndexBox(region));
            let bytes: Vec<u8> = (0..2 * 4usize.pow(dims as u32)).map(|at| at as u8).collect();
            let copy = extract(&region, &from, &bytes, 2);
            match run(&region, &from, 2) {
                Some(run) => {
                    assert_eq!(bytes[run], copy, "{region:?} of {from:?}");
                    found += 1;
                }
                None => scattered += 1,
            }
        }
        assert!(found > 200 && scattered > 200, "{found} {scattered}");
        let outside = IndexBox(vec![(0, 5)]);
        assert_eq!(run(&outside, &IndexBox(vec![(0, 4)]), 2), None);
    }
}
