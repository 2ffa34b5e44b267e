//! In how many pieces a sum was taken whose partial sums are rounded, read off the roundings.
//!
//! Between two roundings a sum is exact as far as few bits show, so any way of cutting it
//! costs a rounding for each piece, once the sums up to every place are known. So every size
//! is tried, not those that jobs are known to use; and shards, other starts and sequences.
//! Of the right cut the roundings are those of the job; of any other they are as far off as
//! no rounding at all. Most cuts are seen to be wrong by few elements.

use std::ops::Range;

use super::sums::Sums;
use crate::kernels::policy::{Cut, Walk};
use crate::kernels::round::Precision;

/// A cut counts as seen when it leaves less than this share of what one sum in f32 leaves.
const SEEN: f64 = 0.5;
/// Cuts that are offered.
const OFFERED: usize = 3;
/// Elements that every cut is tried on.
const FEW: usize = 96;
/// Cuts that are tried on all elements.
const BEST: usize = 24;
/// Shards of a sum that are looked for at most.
const SHARDS: usize = 16;
/// Multiply-adds that a rounded addition takes as long as.
const ROUNDING: usize = 24;
/// Roundings of all elements that a search may take.
const WORK: usize = 1 << 24;

/// How partial sums are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pieces {
    /// Addends of a piece; places of a sequence where pieces run along it.
    pub size: usize,
    /// What else is known of where pieces begin.
    pub cut: Cut,
    /// What the running sum is rounded to after a piece was added.
    pub total: Precision,
    /// What a piece's own sum is rounded to before.
    pub addend: Precision,
    /// Which end comes first.
    pub walk: Walk,
}

/// Sums of some elements up to every place.
struct Prefix {
    n: usize,
    cells: usize,
    /// `[places + 1, cells]`.
    sums: Vec<f64>,
    rest: Vec<f64>,
    captured: Vec<f64>,
    stored: Option<Precision>,
}

impl Prefix {
    fn new(of: &Sums, sequence: usize, cells: &[usize]) -> Prefix {
        let cut = Cut { sequence, ..Cut::default() };
        let (places, each) = cut.places(of.n);
        let mut sums = vec![0.0; (places + 1) * cells.len()];
        for place in 0..places {
            let (done, next) = sums.split_at_mut((place + 1) * cells.len());
            next[..cells.len()].copy_from_slice(&done[place * cells.len()..]);
            for copy in 0..each {
                let i = copy * places + place;
                for (sum, &cell) in next.iter_mut().zip(cells) {
                    let (row, col) = (cell / of.cols, cell % of.cols);
                    let entry = f64::from(of.entries[i * of.rows + row]);
                    *sum += entry * f64::from(of.others[i * of.cols + col]);
                }
            }
        }
        let pick = |values: &[f64]| cells.iter().map(|&cell| values[cell]).collect();
        let (rest, captured) = (pick(&of.rest), pick(&of.captured));
        Prefix { n: places, cells: cells.len(), sums, rest, captured, stored: of.stored }
    }

    /// Squared distance of the captured values from the sum taken in these pieces.
    fn misfit(&self, pieces: &Pieces) -> f64 {
        let flat = Cut { sequence: 0, ..pieces.cut };
        let spans = flat.spans(self.n, pieces.size, pieces.walk == Walk::Descending);
        let mut all: Option<Vec<f32>> = None;
        let mut total = vec![0.0f32; self.cells];
        for (nth, span) in spans.iter().enumerate() {
            if nth > 0 && flat.starts_shard(self.n, span) {
                let done = std::mem::replace(&mut total, vec![0.0; self.cells]);
                all = Some(joined(all, done, pieces.total));
            }
            let mut own = self.between(span);
            pieces.addend.round_slice(&mut own);
            total.iter_mut().zip(&own).for_each(|(sum, x)| *sum += x);
            pieces.total.round_slice(&mut total);
        }
        let total = if all.is_some() { joined(all, total, pieces.total) } else { total };
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        let error = |((&sum, rest), captured): ((&f32, &f64), &f64)| {
            (stored(f64::from(sum) + rest) - captured).powi(2)
        };
        total.iter().zip(&self.rest).zip(&self.captured).map(error).sum()
    }

    /// What [`Prefix::misfit`] takes, in multiply-adds.
    fn work(&self, pieces: &Pieces) -> usize {
        self.n.div_ceil(pieces.size.max(1)).max(pieces.cut.parts) * self.cells * ROUNDING
    }

    fn between(&self, span: &Range<usize>) -> Vec<f32> {
        let at = |place: usize| &self.sums[place * self.cells..(place + 1) * self.cells];
        at(span.end).iter().zip(at(span.start)).map(|(to, from)| (to - from) as f32).collect()
    }
}

fn joined(all: Option<Vec<f32>>, mut own: Vec<f32>, to: Precision) -> Vec<f32> {
    if let Some(all) = all {
        own.iter_mut().zip(&all).for_each(|(sum, x)| *sum += x);
        to.round_slice(&mut own);
    }
    own
}

/// The cuts that fit, the best first, where one of them fits much better than a sum in f32
/// does. `sequence`: tokens of a sequence, where pieces may run along it; 0 elsewhere.
pub fn search(
    (of, spend): (&Sums, &dyn Fn(usize) -> bool),
    precision: Precision,
    declared: Option<usize>,
    sequence: usize,
) -> Vec<Pieces> {
    let all: Vec<usize> = (0..of.rows * of.cols).collect();
    let few: Vec<usize> = all.iter().copied().step_by(all.len().div_ceil(FEW).max(1)).collect();
    let mut sequences = vec![0];
    let several = Cut { sequence, ..Cut::default() }.places(of.n).1 > 1;
    sequences.extend(several.then_some(sequence));
    let mut found: Vec<(f64, Pieces)> = Vec::new();
    for sequence in sequences {
        let (glance, whole) = (Prefix::new(of, sequence, &few), Prefix::new(of, sequence, &all));
        found.extend(in_order((&glance, &whole, spend), sequence, precision, declared));
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().map(|(_, pieces)| pieces).take(OFFERED).collect()
}

/// What is seen of the places in one order.
fn in_order(
    (glance, whole, spend): (&Prefix, &Prefix, &dyn Fn(usize) -> bool),
    sequence: usize,
    precision: Precision,
    declared: Option<usize>,
) -> Vec<(f64, Pieces)> {
    let f32 = Precision::F32;
    let one = Pieces {
        size: whole.n,
        cut: Cut::default(),
        total: f32,
        addend: f32,
        walk: Walk::Ascending,
    };
    let unrounded = [glance, whole].map(|of| of.misfit(&one));
    let best = |cuts: Vec<(usize, Cut)>| -> Vec<(f64, Pieces)> {
        let mut near: Vec<(f64, Pieces)> = Vec::new();
        for (size, cut) in cuts {
            for (addend, walk) in [
                (precision, Walk::Ascending),
                (f32, Walk::Ascending),
                (precision, Walk::Descending),
            ] {
                if cut.shards > 1 && walk == Walk::Descending {
                    continue;
                }
                let pieces = Pieces { size, cut, total: precision, addend, walk };
                if spend(glance.work(&pieces)) {
                    break;
                }
                near.push((glance.misfit(&pieces), pieces));
            }
        }
        near.sort_by(|a, b| a.0.total_cmp(&b.0));
        near.retain(|(misfit, _)| *misfit < SEEN * unrounded[0]);
        near.truncate(BEST);
        let on_all = near.into_iter().filter(|(_, pieces)| !spend(whole.work(pieces)));
        let on_all = on_all.map(|(_, pieces)| (whole.misfit(&pieces), pieces));
        let seen = on_all.filter(|(misfit, _)| *misfit < SEEN * unrounded[1]);
        let cut = |pieces: Pieces| Pieces { cut: Cut { sequence, ..pieces.cut }, ..pieces };
        seen.map(|(misfit, pieces)| (misfit, cut(pieces))).collect()
    };
    let mut found = best(sizes(whole.n, declared));
    if found.is_empty() {
        found = best(shards(whole.n));
    }
    if found.is_empty() {
        found = best(starts(whole.n));
    }
    found
}

/// Every size, with what is left over at the end or at the start, and every number of parts.
fn sizes(n: usize, declared: Option<usize>) -> Vec<(usize, Cut)> {
    let least = n * 16 * 3 * FEW / WORK;
    let mut found: Vec<(usize, Cut)> = Vec::new();
    for size in (1..n).filter(|&size| size > least) {
        found.push((size, Cut::default()));
        let over = n % size;
        if over > 0 {
            found.push((size, Cut { first: over, ..Cut::default() }));
        }
    }
    let equal = |&parts: &usize| !n.is_multiple_of(parts) && n.div_ceil(parts) > least;
    let parts = (2..n).filter(equal).map(|parts| (n, Cut { parts, ..Cut::default() }));
    found.extend(parts);
    found.extend(declared.filter(|&size| size > 0 && size < n).map(|size| (size, Cut::default())));
    found
}

/// Every size in every number of equal shards.
fn shards(n: usize) -> Vec<(usize, Cut)> {
    let least = n * 16 * 3 * FEW * SHARDS / WORK;
    let counts = (2..=SHARDS).filter(|&shards| n.is_multiple_of(shards));
    let of = |shards: usize| {
        let cut = Cut { shards, ..Cut::default() };
        (1..=n / shards).filter(move |&size| size > least).map(move |size| (size, cut))
    };
    counts.flat_map(of).collect()
}

/// Every size from every start, where those are not too many.
fn starts(n: usize) -> Vec<(usize, Cut)> {
    if n * n * 3 * FEW > 16 * WORK {
        return Vec::new();
    }
    let of = |size: usize| (1..size).map(move |first| (size, Cut { first, ..Cut::default() }));
    (2..n).flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums whose captured values were taken in these pieces.
    fn made(n: usize, pieces: &Pieces) -> Sums {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.3
        };
        let (rows, cols) = (12, 10);
        let entries = (0..n * rows).map(|_| uniform()).collect();
        let others = (0..n * cols).map(|_| uniform()).collect();
        let zeros = vec![0.0; rows * cols];
        let mut sums = Sums {
            n,
            rows,
            cols,
            entries,
            others,
            rest: zeros.clone(),
            captured: zeros,
            stored: None,
            places: (0..rows).collect(),
        };
        let cells: Vec<usize> = (0..rows * cols).collect();
        let prefix = Prefix::new(&sums, pieces.cut.sequence, &cells);
        // (x - 0)² - (x - 1)² = 2x - 1, one element at a time: no second copy of the sum.
        let of = |target: f64, at: usize| {
            let mut captured = vec![0.0; rows * cols];
            captured[at] = target;
            let sums = prefix.sums.clone();
            Prefix { sums, captured, rest: prefix.rest.clone(), ..prefix }.misfit(pieces)
        };
        let taken = |&at: &usize| pieces.total.round64((of(0.0, at) - of(1.0, at) + 1.0) / 2.0);
        sums.captured = cells.iter().map(taken).collect();
        sums
    }

    fn pieces(size: usize, cut: Cut) -> Pieces {
        let half = Precision::Bf16;
        Pieces { size, cut, total: half, addend: half, walk: Walk::Ascending }
    }

    #[test]
    fn the_cut_is_read_off_the_roundings() {
        let none = Cut::default();
        let all = [
            (301, pieces(16, none)),
            (500, pieces(125, none)),
            (257, pieces(37, none)),
            (257, pieces(29, Cut { first: 257 % 29, ..none })),
            (230, pieces(230, Cut { parts: 9, ..none })),
            (230, pieces(31, Cut { first: 12, ..none })),
            (240, pieces(17, Cut { sequence: 60, ..none })),
            (240, pieces(21, Cut { shards: 4, ..none })),
        ];
        for (n, wanted) in all {
            let sums = made(n, &wanted);
            let free = |_| false;
            let found = search((&sums, &free), Precision::Bf16, None, wanted.cut.sequence);
            let places = |of: &Pieces| of.cut.spans(n, of.size, false);
            let first = found.first().map(places);
            assert_eq!(first, Some(places(&wanted)), "{n}: {wanted:?} {found:?}");
        }
    }

    #[test]
    fn a_sum_in_one_piece_has_no_cut() {
        let one =
            Pieces { total: Precision::F32, addend: Precision::F32, ..pieces(200, Cut::default()) };
        assert_eq!(search((&made(200, &one), &|_| false), Precision::Bf16, None, 0), []);
    }
}
