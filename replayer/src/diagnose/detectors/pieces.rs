//! In how many pieces a sum was taken whose partial sums are rounded, read off the roundings.
//!
//! Between two roundings a sum is exact as far as few bits show, so any way of cutting it
//! costs a rounding for each piece, once the sums up to every place are known. So every size
//! is tried, not those that jobs are known to use; and shards, other starts and sequences.
//! Of the right cut the roundings are those of the job; of any other they are as far off as
//! no rounding at all. Most cuts are seen to be wrong by a dozen elements, nearly all others
//! by a hundred.

use std::ops::Range;

use super::cuts::{parts, shards, sizes, starts};
use super::sums::Sums;
use crate::kernels::policy::{Cut, Walk};
use crate::kernels::round::Precision;

/// A cut counts as seen when it leaves less than this share of what one sum in f32 leaves.
const SEEN: f64 = 0.5;
/// Cuts that are offered.
const OFFERED: usize = 3;
/// A cut is worth a closer look when it leaves less than this share on the first elements.
const WORTH: f64 = 0.8;
/// What an element that does not fit counts for at most, in what one sum in f32 leaves of it.
const MOST: f64 = 4.0;
/// Elements that every cut is tried on: those that one sum in f32 is furthest off from, for their row.
const FIRST: usize = 16;
/// Elements that cuts are tried on which fit those.
const FEW: usize = 96;
/// Cuts that are tried on all elements.
const BEST: usize = 24;
/// Equal parts of a sum that are looked for before anything of which there are more.
const PARTS: usize = 256;
/// Multiply-adds that a rounded addition takes as long as.
const ROUNDING: usize = 24;

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

    /// Squared distance of each captured value from the sum taken in these pieces.
    fn misfits(&self, pieces: &Pieces) -> Vec<f64> {
        let sum = self.taken(pieces);
        sum.iter().zip(&self.captured).map(|(sum, captured)| (sum - captured).powi(2)).collect()
    }

    /// The sum taken in these pieces, as it is stored.
    fn taken(&self, pieces: &Pieces) -> Vec<f64> {
        let flat = Cut { sequence: 0, ..pieces.cut };
        let spans = flat.spans(self.n, pieces.size, pieces.walk == Walk::Descending);
        let shards = flat.shard_starts(self.n);
        let mut all: Option<Vec<f32>> = None;
        let [mut total, mut own] = [(); 2].map(|()| vec![0.0f32; self.cells]);
        for (nth, span) in spans.iter().enumerate() {
            if nth > 0 && shards.contains(&span.start) {
                let done = std::mem::replace(&mut total, vec![0.0; self.cells]);
                all = Some(joined(all, done, pieces.total));
            }
            self.between(span, &mut own);
            pieces.addend.round_slice(&mut own);
            total.iter_mut().zip(&own).for_each(|(sum, x)| *sum += x);
            pieces.total.round_slice(&mut total);
        }
        let total = if all.is_some() { joined(all, total, pieces.total) } else { total };
        let stored = |x: f64| self.stored.map_or(x, |precision| precision.round64(x));
        total.iter().zip(&self.rest).map(|(&sum, rest)| stored(f64::from(sum) + rest)).collect()
    }

    /// What [`Prefix::misfits`] takes, in multiply-adds.
    fn work(&self, pieces: &Pieces) -> usize {
        self.n.div_ceil(pieces.size.max(1)).max(pieces.cut.parts) * self.cells * ROUNDING
    }

    fn between(&self, span: &Range<usize>, own: &mut [f32]) {
        let at = |place: usize| &self.sums[place * self.cells..(place + 1) * self.cells];
        let ends = at(span.end).iter().zip(at(span.start));
        own.iter_mut().zip(ends).for_each(|(own, (to, from))| *own = (to - from) as f32);
    }
}

fn joined(all: Option<Vec<f32>>, mut own: Vec<f32>, to: Precision) -> Vec<f32> {
    if let Some(all) = all {
        own.iter_mut().zip(&all).for_each(|(sum, x)| *sum += x);
        to.round_slice(&mut own);
    }
    own
}

/// What is known of a sum before its cut is looked for.
#[derive(Clone, Copy)]
pub struct Wanted {
    /// What partial sums may be rounded to.
    pub precision: Precision,
    /// Size of the pieces, where it is declared.
    pub declared: Option<usize>,
    /// Tokens of a sequence, where pieces may run along it; 0 elsewhere.
    pub sequence: usize,
    /// Whether all pieces are of one size, but for what is left over at the end.
    pub equal: bool,
}

/// The cuts that fit, the best first, where one of them fits much better than a sum in f32
/// does.
pub fn search((of, spend): (&Sums, &dyn Fn(usize) -> bool), wanted: Wanted) -> Vec<Pieces> {
    let mut sequences = vec![0];
    let several = Cut { sequence: wanted.sequence, ..Cut::default() }.places(of.n).1 > 1;
    sequences.extend(several.then_some(wanted.sequence));
    let mut found: Vec<(f64, Pieces)> = Vec::new();
    for sequence in sequences {
        found.extend(Looks::new(of, Wanted { sequence, ..wanted }).seen(spend));
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().map(|(_, pieces)| pieces).take(OFFERED).collect()
}

/// Some elements of a sum in one order of its places.
struct Look {
    of: Prefix,
    /// What each element counts by, squared: what one sum in f32 leaves of it and, on average, of
    /// its row. So no element counts for all others because it is large.
    sizes: Vec<f64>,
    /// Shares that one sum in f32 leaves of all of them.
    unrounded: f64,
}

impl Look {
    /// How far the captured values are from the sum taken in these pieces, as a share of how far
    /// they are from one sum in f32.
    fn misfit(&self, pieces: &Pieces) -> f64 {
        self.shares(&self.of.misfits(pieces)) / self.unrounded
    }

    fn shares(&self, left: &[f64]) -> f64 {
        let share =
            |(left, size): (&f64, &f64)| if *size > 0.0 { (left / size).min(MOST) } else { 0.0 };
        left.iter().zip(&self.sizes).map(share).sum()
    }
}

/// A dozen elements, a hundred, and all.
struct Looks {
    wanted: Wanted,
    all: [Look; 3],
}

impl Looks {
    fn new(of: &Sums, wanted: Wanted) -> Looks {
        let f32 = Precision::F32;
        let unrounded = Pieces {
            size: of.n,
            cut: Cut::default(),
            total: f32,
            addend: f32,
            walk: Walk::Ascending,
        };
        let mut cells: Vec<usize> = (0..of.rows * of.cols).collect();
        // A wide tensor that holds numbers of few bits alone was rounded to them at last.
        let narrow = |x: &f64| wanted.precision.round64(*x) == *x;
        let stored = of.captured.iter().all(narrow).then_some(wanted.precision).or(of.stored);
        let taken = |cells: &[usize]| Prefix { stored, ..Prefix::new(of, wanted.sequence, cells) };
        let whole = taken(&cells);
        let off = whole.misfits(&unrounded);
        let of_rows: Vec<f64> = off
            .chunks(of.cols.max(1))
            .map(|row| row.iter().sum::<f64>() / row.len() as f64)
            .collect();
        let size = |cell: usize| off[cell] + of_rows[cell / of.cols];
        let look = |of: Prefix, cells: &[usize]| {
            let sizes = cells.iter().map(|&cell| size(cell)).collect();
            let own: Vec<f64> = cells.iter().map(|&cell| off[cell]).collect();
            let found = Look { of, sizes, unrounded: 1.0 };
            Look { unrounded: found.shares(&own), ..found }
        };
        let some = |cells: &[usize]| look(taken(cells), cells);
        let few: Vec<usize> =
            cells.iter().copied().step_by(cells.len().div_ceil(FEW).max(1)).collect();
        let (few, whole) = (some(&few), look(whole, &cells));
        let far = |cell: usize| off[cell] / size(cell).max(f64::MIN_POSITIVE);
        cells.sort_by(|&a, &b| far(b).total_cmp(&far(a)));
        cells.truncate(FIRST);
        Looks { wanted, all: [some(&cells), few, whole] }
    }

    /// The cuts that are seen: those of which there are few are tried before all others.
    fn seen(&self, spend: &dyn Fn(usize) -> bool) -> Vec<(f64, Pieces)> {
        let (n, wanted) = (self.all[2].of.n, self.wanted);
        if wanted.equal {
            let plain = |(_, cut): &(usize, Cut)| *cut == Cut::default();
            return self.best(sizes(n, wanted.declared).filter(plain), spend);
        }
        let mut found = self.best(sizes(n, wanted.declared).chain(parts(n, 2..PARTS)), spend);
        if found.is_empty() {
            found = self.best(shards(n), spend);
        }
        if found.is_empty() {
            found = self.best(starts(n).chain(parts(n, PARTS..n)), spend);
        }
        let cut = |pieces: Pieces| Cut { sequence: wanted.sequence, ..pieces.cut };
        found.iter_mut().for_each(|(_, pieces)| pieces.cut = cut(*pieces));
        found
    }

    /// Those cuts that fit all elements.
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
                if spend(first.of.work(&pieces)) {
                    break 'all;
                }
                near.extend(self.glance(&pieces, spend).map(|misfit| (misfit, pieces)));
            }
        }
        near.sort_by(|a, b| a.0.total_cmp(&b.0));
        near.truncate(BEST);
        let on_all = near.into_iter().filter(|(_, pieces)| !spend(whole.of.work(pieces)));
        let on_all = on_all.map(|(_, pieces)| (whole.misfit(&pieces), pieces));
        on_all.filter(|(misfit, _)| *misfit < SEEN).collect()
    }

    /// What a cut leaves of few elements, where it fits the first ones and those.
    fn glance(&self, pieces: &Pieces, spend: &dyn Fn(usize) -> bool) -> Option<f64> {
        let [first, few, _] = &self.all;
        if !(first.misfit(pieces) < WORTH) || spend(few.of.work(pieces)) {
            return None;
        }
        Some(few.misfit(pieces)).filter(|misfit| *misfit < SEEN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums whose captured values were taken in these pieces.
    fn made(n: usize, pieces: &Pieces, (rows, cols): (usize, usize)) -> Sums {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.3
        };
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
            let found = search((&sums, &free), of(wanted.cut.sequence));
            let places = |of: &Pieces| of.cut.spans(n, of.size, false);
            let first = found.first().map(places);
            assert_eq!(first, Some(places(&wanted)), "{n}: {wanted:?} {found:?}");
        }
    }

    #[test]
    fn one_large_element_that_fits_by_chance_does_not_hide_the_cut() {
        let cut = Cut { shards: 4, ..Cut::default() };
        let wanted = pieces(21, cut);
        // Of thousands of cuts many round one element as the right one does.
        for large in 0..12 {
            let mut sums = made(240, &wanted, (120, 1));
            sums.entries.chunks_mut(sums.rows).for_each(|of| of[large] *= 1000.0);
            let cells: Vec<usize> = (0..sums.rows * sums.cols).collect();
            sums.captured = Prefix::new(&sums, 0, &cells).taken(&wanted);
            let found = search((&sums, &|_| false), of(0));
            assert_eq!(found.first(), Some(&wanted), "{large}: {found:?}");
        }
    }

    #[test]
    fn a_sum_in_one_piece_has_no_cut() {
        let one =
            Pieces { total: Precision::F32, addend: Precision::F32, ..pieces(200, Cut::default()) };
        assert_eq!(search((&made(200, &one, (12, 10)), &|_| false), of(0)), []);
    }
}
