//! In which pieces a sum was taken whose partial sums are rounded, found by comparing the
//! roundings.
//!
//! Between two roundings to few bits a sum in f32 is practically exact. So once the prefix sums are
//! known, any way to cut the sum costs one subtraction and one rounding per piece. Every size is
//! therefore tried, not only those that jobs are known to use; also shards, other starts and pieces
//! along sequences. The right cut gives the job's own rounding errors; any other is as far off as
//! no rounding at all. A dozen elements rule out most cuts, a hundred nearly all others.

use std::ops::Range;

use super::sampled_sums::SampledSums;
use super::sum_cuts::{parts, shards, sizes, starts};
use crate::kernels::policy::{Cut, Walk};
use crate::kernels::round::Precision;

/// A cut is offered if it leaves less than this share of what one sum in f32 leaves.
const SEEN: f64 = 0.5;
/// How many cuts are offered.
const OFFERED: usize = 3;
/// A cut is tried on more elements if it leaves less than this share on the first ones.
const WORTH: f64 = 0.8;
/// One element counts for at most this many times what one sum in f32 leaves of it.
const MOST: f64 = 4.0;
/// Every cut is tried on this many elements: those from which one sum in f32 is furthest, relative
/// to their row.
const FIRST: usize = 16;
/// Cuts that fit those are tried on this many elements.
const FEW: usize = 96;
/// The best of those, this many, are tried on all elements.
const BEST: usize = 24;
/// Cuts into fewer equal parts than this are tried first, those into more parts last, as there are
/// many.
const PARTS: usize = 256;
/// A rounded addition takes as long as this many multiply-adds.
const ROUNDING: usize = 24;

/// How a sum is cut, and how its partial sums are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pieces {
    /// Addends of a piece; positions in a sequence where pieces run along it.
    pub size: usize,
    /// Shards, unequal parts, another start, or sequences.
    pub cut: Cut,
    /// The format that the running sum is rounded to after a piece was added.
    pub total: Precision,
    /// The format that a piece's own sum is rounded to before that.
    pub addend: Precision,
    /// From which end the pieces are added.
    pub walk: Walk,
}

/// Prefix sums of some elements.
struct Prefix {
    n: usize,
    cells: usize,
    /// Prefix sums, `[places + 1, cells]`.
    sums: Vec<f64>,
    rest: Vec<f64>,
    captured: Vec<f64>,
    stored: Option<Precision>,
}

impl Prefix {
    fn new(sampled: &SampledSums, sequence: usize, cells: &[usize]) -> Prefix {
        let cut = Cut { sequence, ..Cut::default() };
        let (places, each) = cut.places(sampled.n);
        let mut sums = vec![0.0; (places + 1) * cells.len()];
        for place in 0..places {
            let (done, next) = sums.split_at_mut((place + 1) * cells.len());
            next[..cells.len()].copy_from_slice(&done[place * cells.len()..]);
            for copy in 0..each {
                let i = copy * places + place;
                for (sum, &cell) in next.iter_mut().zip(cells) {
                    let (row, col) = (cell / sampled.cols, cell % sampled.cols);
                    let entry = f64::from(sampled.entries[i * sampled.rows + row]);
                    *sum += entry * f64::from(sampled.others[i * sampled.cols + col]);
                }
            }
        }
        let pick = |values: &[f64]| cells.iter().map(|&cell| values[cell]).collect();
        let (rest, captured) = (pick(&sampled.rest), pick(&sampled.captured));
        Prefix { n: places, cells: cells.len(), sums, rest, captured, stored: sampled.stored }
    }

    /// Squared distance of each captured value from the sum taken in these pieces.
    fn misfits(&self, pieces: &Pieces) -> Vec<f64> {
        let sum = self.taken(pieces);
        sum.iter().zip(&self.captured).map(|(sum, captured)| (sum - captured).powi(2)).collect()
    }

    /// The sum taken in these pieces, rounded to the stored format.
    fn taken(&self, pieces: &Pieces) -> Vec<f64> {
        let flat = Cut { sequence: 0, ..pieces.cut };
        let spans = flat.spans(self.n, pieces.size, pieces.walk == Walk::Descending);
        let shards = flat.shard_starts(self.n);
        let mut all: Option<Vec<f32>> = None;
        let [mut total, mut addend] = [(); 2].map(|()| vec![0.0f32; self.cells]);
        for (nth, span) in spans.iter().enumerate() {
            if nth > 0 && shards.contains(&span.start) {
                let done = std::mem::replace(&mut total, vec![0.0; self.cells]);
                all = Some(joined(all, done, pieces.total));
            }
            self.between(span, &mut addend);
            pieces.addend.round_slice(&mut addend);
            total.iter_mut().zip(&addend).for_each(|(sum, x)| *sum += x);
            pieces.total.round_slice(&mut total);
        }
        let total = if all.is_some() { joined(all, total, pieces.total) } else { total };
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        total.iter().zip(&self.rest).map(|(&sum, rest)| stored(f64::from(sum) + rest)).collect()
    }

    /// The work of [`Prefix::misfits`] in multiply-adds.
    fn work(&self, pieces: &Pieces) -> usize {
        self.n.div_ceil(pieces.size.max(1)).max(pieces.cut.parts) * self.cells * ROUNDING
    }

    fn between(&self, span: &Range<usize>, addend: &mut [f32]) {
        let sums_before = |place: usize| &self.sums[place * self.cells..(place + 1) * self.cells];
        let ends = sums_before(span.end).iter().zip(sums_before(span.start));
        addend.iter_mut().zip(ends).for_each(|(own, (to, from))| *own = (to - from) as f32);
    }
}

fn joined(all: Option<Vec<f32>>, mut addend: Vec<f32>, to: Precision) -> Vec<f32> {
    if let Some(all) = all {
        addend.iter_mut().zip(&all).for_each(|(sum, x)| *sum += x);
        to.round_slice(&mut addend);
    }
    addend
}

/// What is given about a sum whose cut is looked for.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// The format that partial sums are rounded to.
    pub precision: Precision,
    /// Size of the pieces, where it is declared.
    pub declared: Option<usize>,
    /// Tokens of a sequence, where pieces may run along it; 0 elsewhere.
    pub sequence: usize,
    /// Whether only cuts into pieces of one size, with the rest at the end, are tried.
    pub equal: bool,
}

/// The cuts that fit much better than one sum in f32, the best first.
pub fn search(
    (sums, spend): (&SampledSums, &dyn Fn(usize) -> bool),
    wanted: Wanted,
) -> Vec<Pieces> {
    let mut sequences = vec![0];
    let several = Cut { sequence: wanted.sequence, ..Cut::default() }.places(sums.n).1 > 1;
    sequences.extend(several.then_some(wanted.sequence));
    let mut cuts: Vec<(f64, Pieces)> = Vec::new();
    for sequence in sequences {
        cuts.extend(Samples::new(sums, Wanted { sequence, ..wanted }).seen(spend));
    }
    cuts.sort_by(|a, b| a.0.total_cmp(&b.0));
    cuts.into_iter().map(|(_, pieces)| pieces).take(OFFERED).collect()
}

/// Some elements of a sum, for pieces along all addends or along a sequence.
struct Sample {
    prefix: Prefix,
    /// The squared error by which each element's misfit is divided: what one sum in f32 leaves of
    /// it plus the mean of its row. So a large element does not outweigh all others.
    sizes: Vec<f64>,
    /// The sum of these quotients for one sum in f32.
    unrounded: f64,
}

impl Sample {
    /// The distance of the captured values from the sum taken in these pieces, as a share of their
    /// distance from one sum in f32.
    fn misfit(&self, pieces: &Pieces) -> f64 {
        self.shares(&self.prefix.misfits(pieces)) / self.unrounded
    }

    fn shares(&self, left: &[f64]) -> f64 {
        let share =
            |(left, size): (&f64, &f64)| if *size > 0.0 { (left / size).min(MOST) } else { 0.0 };
        left.iter().zip(&self.sizes).map(share).sum()
    }
}

/// Three samples of elements that a cut is tried on in turn: a dozen, a hundred, and all.
struct Samples {
    wanted: Wanted,
    all: [Sample; 3],
}

impl Samples {
    fn new(sums: &SampledSums, wanted: Wanted) -> Samples {
        let f32 = Precision::F32;
        let unrounded = Pieces {
            size: sums.n,
            cut: Cut::default(),
            total: f32,
            addend: f32,
            walk: Walk::Ascending,
        };
        let mut cells: Vec<usize> = (0..sums.rows * sums.cols).collect();
        // A tensor stored in a wide format whose values all have few bits was rounded to those at
        // the end.
        let narrow = |x: &f64| wanted.precision.round64(*x) == *x;
        let stored = sums.captured.iter().all(narrow).then_some(wanted.precision).or(sums.stored);
        let taken =
            |cells: &[usize]| Prefix { stored, ..Prefix::new(sums, wanted.sequence, cells) };
        let whole = taken(&cells);
        let off = whole.misfits(&unrounded);
        let of_rows: Vec<f64> = off
            .chunks(sums.cols.max(1))
            .map(|row| row.iter().sum::<f64>() / row.len() as f64)
            .collect();
        let size = |cell: usize| off[cell] + of_rows[cell / sums.cols];
        let look = |prefix: Prefix, cells: &[usize]| {
            let sizes = cells.iter().map(|&cell| size(cell)).collect();
            let errors: Vec<f64> = cells.iter().map(|&cell| off[cell]).collect();
            let sample = Sample { prefix, sizes, unrounded: 1.0 };
            Sample { unrounded: sample.shares(&errors), ..sample }
        };
        let some = |cells: &[usize]| look(taken(cells), cells);
        let few: Vec<usize> =
            cells.iter().copied().step_by(cells.len().div_ceil(FEW).max(1)).collect();
        let (few, whole) = (some(&few), look(whole, &cells));
        let far = |cell: usize| off[cell] / size(cell).max(f64::MIN_POSITIVE);
        cells.sort_by(|&a, &b| far(b).total_cmp(&far(a)));
        cells.truncate(FIRST);
        Samples { wanted, all: [some(&cells), few, whole] }
    }

    /// The cuts that fit. Families with few cuts are tried before those with many, and the first
    /// family that has one ends the search.
    fn seen(&self, spend: &dyn Fn(usize) -> bool) -> Vec<(f64, Pieces)> {
        let (n, wanted) = (self.all[2].prefix.n, self.wanted);
        if wanted.equal {
            let plain = |(_, cut): &(usize, Cut)| *cut == Cut::default();
            return self.best(sizes(n, wanted.declared).filter(plain), spend);
        }
        let mut cuts = self.best(sizes(n, wanted.declared).chain(parts(n, 2..PARTS)), spend);
        if cuts.is_empty() {
            cuts = self.best(shards(n), spend);
        }
        if cuts.is_empty() {
            cuts = self.best(starts(n).chain(parts(n, PARTS..n)), spend);
        }
        let cut = |pieces: Pieces| Cut { sequence: wanted.sequence, ..pieces.cut };
        cuts.iter_mut().for_each(|(_, pieces)| pieces.cut = cut(*pieces));
        cuts
    }

    /// Those of these cuts that fit all elements.
    fn best(
        &self,
        cuts: impl Iterator<Item = (usize, Cut)>,
        spend: &dyn Fn(usize) -> bool,
    ) -> Vec<(f64, Pieces)> {
        let [first, _, whole] = &self.all;
        let mut near: Vec<(f64, Pieces)> = Vec::new();
        let (total, f32) = (self.wanted.precision, Precision::F32);
        let ways = [Walk::Ascending, Walk::Descending]
            .into_iter()
            .flat_map(|walk| [total, f32].map(|addend| (addend, walk)));
        let ways: Vec<(Precision, Walk)> = ways.collect();
        'all: for (size, cut) in cuts {
            for &(addend, walk) in &ways {
                if cut.shards > 1 && walk == Walk::Descending {
                    continue;
                }
                let pieces = Pieces { size, cut, total, addend, walk };
                if spend(first.prefix.work(&pieces)) {
                    break 'all;
                }
                near.extend(self.glance(&pieces, spend).map(|misfit| (misfit, pieces)));
            }
        }
        near.sort_by(|a, b| a.0.total_cmp(&b.0));
        near.truncate(BEST);
        let on_all = near.into_iter().filter(|(_, pieces)| !spend(whole.prefix.work(pieces)));
        let on_all = on_all.map(|(_, pieces)| (whole.misfit(&pieces), pieces));
        on_all.filter(|(misfit, _)| *misfit < SEEN).collect()
    }

    /// The misfit of a cut on the second sample, if it fits on the first and on the second.
    fn glance(&self, pieces: &Pieces, spend: &dyn Fn(usize) -> bool) -> Option<f64> {
        let [first, few, _] = &self.all;
        if !(first.misfit(pieces) < WORTH) || spend(few.prefix.work(pieces)) {
            return None;
        }
        Some(few.misfit(pieces)).filter(|misfit| *misfit < SEEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums whose captured values were computed in these pieces.
    fn made(n: usize, pieces: &Pieces, (rows, cols): (usize, usize)) -> SampledSums {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.3
        };
        let entries = (0..n * rows).map(|_| uniform()).collect();
        let others = (0..n * cols).map(|_| uniform()).collect();
        let zeros = vec![0.0; rows * cols];
        let mut sums = SampledSums {
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
        sums.captured = prefix.taken(pieces);
        sums
    }

    fn pieces(size: usize, cut: Cut) -> Pieces {
        let half = Precision::Bf16;
        Pieces { size, cut, total: half, addend: half, walk: Walk::Ascending }
    }

    fn of(sequence: usize) -> Wanted {
        Wanted { precision: Precision::Bf16, declared: None, sequence, equal: false }
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
            let sums = made(n, &wanted, (12, 10));
            let free = |_| false;
            let cuts = search((&sums, &free), of(wanted.cut.sequence));
            let places = |pieces: &Pieces| pieces.cut.spans(n, pieces.size, false);
            let first = cuts.first().map(places);
            assert_eq!(first, Some(places(&wanted)), "{n}: {wanted:?} {cuts:?}");
        }
    }

    #[test]
    fn one_large_element_that_fits_by_chance_does_not_hide_the_cut() {
        let cut = Cut { shards: 4, ..Cut::default() };
        let wanted = pieces(21, cut);
        // Of thousands of cuts many round one element as the right one does.
        for large in 0..12 {
            let mut sums = made(240, &wanted, (120, 1));
            sums.entries.chunks_mut(sums.rows).for_each(|values| values[large] *= 1000.0);
            let cells: Vec<usize> = (0..sums.rows * sums.cols).collect();
            sums.captured = Prefix::new(&sums, 0, &cells).taken(&wanted);
            let cuts = search((&sums, &|_| false), of(0));
            assert_eq!(cuts.first(), Some(&wanted), "{large}: {cuts:?}");
        }
    }

    #[test]
    fn a_sum_in_one_piece_has_no_cut() {
        let in_one_piece =
            Pieces { total: Precision::F32, addend: Precision::F32, ..pieces(200, Cut::default()) };
        assert_eq!(search((&made(200, &in_one_piece, (12, 10)), &|_| false), of(0)), []);
    }
}
