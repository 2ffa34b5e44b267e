//! Ways in which a sum over `n` places may be cut into pieces: sizes with what else there is to say.

use std::ops::Range;

use crate::kernels::policy::Cut;

/// Shards of a sum that are looked for at most.
const SHARDS: usize = 16;

/// Every size, the large ones first, with what is left over at the end or at the start; and the
/// declared one.
pub fn sizes(n: usize, declared: Option<usize>) -> impl Iterator<Item = (usize, Cut)> {
    let of = move |size: usize| {
        let over = n % size;
        let at_start = (over > 0).then_some((size, Cut { first: over, ..Cut::default() }));
        std::iter::once((size, Cut::default())).chain(at_start)
    };
    let declared = declared.filter(|&size| size > 0 && size < n);
    declared.map(|size| (size, Cut::default())).into_iter().chain((1..n).rev().flat_map(of))
}

/// So many parts as equal as can be, where those are no pieces of one size.
pub fn parts(n: usize, counts: Range<usize>) -> impl Iterator<Item = (usize, Cut)> {
    let uneven = move |parts: &usize| *parts < n && !n.is_multiple_of(*parts);
    counts.filter(uneven).map(move |parts| (n, Cut { parts, ..Cut::default() }))
}

/// Every size in every number of equal shards.
pub fn shards(n: usize) -> impl Iterator<Item = (usize, Cut)> {
    let counts = (2..=SHARDS).filter(move |&shards| n.is_multiple_of(shards));
    let of = move |shards: usize| {
        let cut = Cut { shards, ..Cut::default() };
        (1..=n / shards).rev().map(move |size| (size, cut))
    };
    counts.flat_map(of)
}

/// Every size from every start.
pub fn starts(n: usize) -> impl Iterator<Item = (usize, Cut)> {
    let of = |size: usize| (1..size).map(move |first| (size, Cut { first, ..Cut::default() }));
    (2..n).rev().flat_map(of)
}
