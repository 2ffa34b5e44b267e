//! The ways in which a sum over `n` places (tokens or classes) may be cut into pieces whose partial
//! sums are rounded: the size of a piece, and a [`Cut`] for shards, unequal parts or another start.

use std::ops::Range;

use crate::kernels::policy::Cut;

/// The largest number of shards that is tried.
const SHARDS: usize = 16;

/// The declared size, then every size from the largest down, with the incomplete piece at the end
/// or at the start.
pub fn sizes(n: usize, declared: Option<usize>) -> impl Iterator<Item = (usize, Cut)> {
    let cuts_of = move |size: usize| {
        let over = n % size;
        let at_start = (over > 0).then_some((size, Cut { first: over, ..Cut::default() }));
        std::iter::once((size, Cut::default())).chain(at_start)
    };
    let declared = declared.filter(|&size| size > 0 && size < n);
    declared.map(|size| (size, Cut::default())).into_iter().chain((1..n).rev().flat_map(cuts_of))
}

/// Each of these numbers of parts, as equal as possible, unless all would be of one size, which
/// [`sizes`] covers.
pub fn parts(n: usize, counts: Range<usize>) -> impl Iterator<Item = (usize, Cut)> {
    let uneven = move |parts: &usize| *parts < n && !n.is_multiple_of(*parts);
    counts.filter(uneven).map(move |parts| (n, Cut { parts, ..Cut::default() }))
}

/// Every number of equal shards, with every size of pieces in them.
pub fn shards(n: usize) -> impl Iterator<Item = (usize, Cut)> {
    let counts = (2..=SHARDS).filter(move |&shards| n.is_multiple_of(shards));
    let cuts_of = move |shards: usize| {
        let cut = Cut { shards, ..Cut::default() };
        (1..=n / shards).rev().map(move |size| (size, cut))
    };
    counts.flat_map(cuts_of)
}

/// Every size, with every length of the first piece.
pub fn starts(n: usize) -> impl Iterator<Item = (usize, Cut)> {
    let cuts_of = |size: usize| (1..size).map(move |first| (size, Cut { first, ..Cut::default() }));
    (2..n).rev().flat_map(cuts_of)
}
