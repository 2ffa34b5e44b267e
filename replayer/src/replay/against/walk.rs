//! Two views of one value, walked in slabs on all threads.

use std::ops::Range;

use rayon::prelude::*;

use super::view::View;
use crate::assemble::AssembleError;
use crate::compare::measures::Point;
use crate::compare::pair::{Compared, FirstElement, compare};
use crate::compare::ulp::Format;

/// Elements of a slab: a few MiB on each side for each thread, and a fixed
/// number, so that no sum depends on the thread count.
const SLAB: u64 = 1 << 20;

/// Compares two views of one shape.
pub(super) fn walk(ours: &View<'_>, theirs: &View<'_>) -> Result<Compared, AssembleError> {
    let slabs = slabs(ours, theirs);
    let columns = ours.columns;
    let same = ours.dtype.filter(|_| ours.is_plain() && theirs.is_plain());
    let same = same.filter(|_| ours.dtype == theirs.dtype);
    let format = ours.stored().filter(|_| theirs.stored().is_some()).and_then(Format::of);
    let compare_slab = |range: &Range<u64>| -> Result<Compared, AssembleError> {
        let place = FirstElement { start: range.start, columns };
        if let Some(dtype) = same {
            let (x, y) = (ours.bytes(range.clone())?, theirs.bytes(range.clone())?);
            return Ok(compare(dtype, &x, &y, place));
        }
        let (x, y) = (ours.read(range.clone())?, theirs.read(range.clone())?);
        let mut compared = Compared::default();
        for (flat, (&captured, &reference)) in (range.start..).zip(x.iter().zip(&y)) {
            let index = (flat / columns.max(1), flat % columns.max(1));
            compared.add(Point { index, captured, reference }, format);
        }
        Ok(compared)
    };
    let parts: Vec<Compared> = slabs.par_iter().map(compare_slab).collect::<Result<_, _>>()?;
    let mut total = Compared::default();
    parts.into_iter().for_each(|part| total.merge(part));
    Ok(total)
}

/// Cuts at the seams of both sides; whole rows unless both sides are plain.
fn slabs(ours: &View<'_>, theirs: &View<'_>) -> Vec<Range<u64>> {
    let plain = ours.is_plain() && theirs.is_plain();
    let step = match plain {
        true => SLAB,
        false => (SLAB / ours.columns.max(1)).max(1) * ours.columns.max(1),
    };
    let mut ends = vec![ours.elements()];
    if plain {
        ends.extend(ours.seams());
        ends.extend(theirs.seams());
    }
    ends.sort_unstable();
    ends.dedup();
    let mut ranges = Vec::new();
    let mut start = 0;
    for end in ends {
        while start < end {
            let stop = end.min(start + step);
            ranges.push(start..stop);
            start = stop;
        }
    }
    ranges
}
