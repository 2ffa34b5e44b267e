//! A gradient filter: tiles of dlogits in which no magnitude reaches a threshold are left out, as
//! Cut Cross-Entropy (CCE) does.
//!
//! The threshold is on `|p - onehot|`, before g multiplies it. So every unit's dlogits are computed
//! once with g = 1, and their magnitudes kept: all of them, or of large units the largest in each
//! block. Tile sizes and thresholds that jobs use are then tried on a few rows of dk.

use backtape::identity::{Microbatch, Rank};
use backtape::nan::largest;

use super::sampled_sums::SampledSums;
use super::unit_states::{Part, UnitState};
use crate::diagnose::evidence::Evidence;
use crate::head::roundings::F32;
use crate::kernels::policy::Policy;

/// Sizes of a block, in tokens and in classes. Tiles consist of whole blocks.
const BLOCKS: [usize; 3] = [1, 4, 8];
/// The smallest block size with at most this many blocks is used: they take memory, and every tile
/// size reads all of them.
const HELD: usize = 1 << 19;
/// How many tokens' entries of dlogits are in memory at a time.
const SPAN: usize = 256;
/// How many classes' entries are.
const COLUMNS: usize = 4096;
/// How many filters are offered, the best first.
const OFFERED: usize = 8;
/// A filter is offered if it leaves less than this share of the error without a filter.
const SEEN: f64 = 0.5;
/// Multiply-adds that finding an entry's tile and adding its products in a few columns takes as
/// long as.
const LOOKED_UP: usize = 16;
/// `p - 1` may be off by this many f32 roundings of a logit. Smaller magnitudes are noise in a
/// right job too, so no threshold below that is tried.
const ROUNDINGS: f64 = 64.0;

/// The parameters of a gradient filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filter {
    /// A tile is left out if all its magnitudes are below this.
    pub least: f64,
    /// Tokens and classes of a tile.
    pub tile: [usize; 2],
    /// Whether magnitudes include the label's part (`p - onehot`), or are those of p alone.
    pub labelled: bool,
}

/// One unit with the magnitudes of its dlogits at g = 1.
pub struct Filtered {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// The first rank of the unit.
    pub rank: Option<Rank>,
    /// Its tokens among those of the microbatch.
    pub rows: Vec<usize>,
    /// All of its tokens and all valid classes.
    pub part: Part,
    /// How many valid classes there are.
    pub classes: usize,
    /// Tokens and classes of a block.
    block: usize,
    /// `[blocks of tokens, blocks of classes]`: the largest magnitude in each.
    magnitudes: Vec<f32>,
}

impl Filtered {
    /// Computes the magnitudes of a unit; `None` where there are no q and k.
    pub fn new(
        evidence: &Evidence<'_>,
        unit: &UnitState,
        policy: &Policy,
        labelled: bool,
    ) -> Option<Filtered> {
        let inputs = unit.inputs(evidence)?;
        let classes = inputs.head(evidence.step)?.valid_vocab;
        let n = unit.rows.len();
        let (tokens, all): (Vec<usize>, Vec<usize>) = ((0..n).collect(), (0..classes).collect());
        let part = unit.part(evidence, &tokens, &all, labelled)?;
        let block = block_of(n, classes);
        let across = classes.div_ceil(block);
        let mut magnitudes = vec![0.0f32; n.div_ceil(block) * across];
        let ones = |tokens: &[usize]| unit.ones(evidence, tokens);
        for span in tokens.chunks(SPAN) {
            for columns in all.chunks(COLUMNS) {
                let entries = part.sub(span, columns).with(ones(span)).entries(policy);
                for (&t, row) in span.iter().zip(entries.chunks(columns.len())) {
                    for (&v, x) in columns.iter().zip(row) {
                        let largest = &mut magnitudes[t / block * across + v / block];
                        *largest = largest.max(x.abs() as f32);
                    }
                }
            }
        }
        let (microbatch, rank, rows) = (unit.microbatch, unit.rank, unit.rows.clone());
        Some(Filtered { microbatch, rank, rows, part, classes, block, magnitudes })
    }

    /// For every tile, row-major, whether the filter leaves it out.
    pub fn dropped(&self, filter: &Filter) -> Tiled {
        self.largest().over(filter.tile).dropped(filter.least)
    }

    /// The magnitudes as tiles of one block each.
    fn largest(&self) -> Largest {
        let across = self.classes.div_ceil(self.block);
        let rows = self.rows.len().div_ceil(self.block);
        let (tile, values) = ([self.block; 2], self.magnitudes.clone());
        Largest { tile, values, rows, across }
    }

    /// The filters with which the sampled dk of the unit fits best; empty where none fits much
    /// better than no filter.
    pub fn search(
        &self,
        evidence: &Evidence<'_>,
        unit: &UnitState,
        policy: &Policy,
        labelled: bool,
    ) -> Vec<Filter> {
        let Some(sums) = SampledSums::of_many_dk(evidence, unit, policy, labelled) else {
            return Vec::new();
        };
        let work = LOOKED_UP * sums.n * sums.rows;
        let none = sums.misfit();
        let logit = largest(unit.lse.iter().map(|lse| lse.abs()));
        let noise = if labelled { ROUNDINGS * F32 * logit } else { 0.0 };
        let levels: Vec<f64> = thresholds().filter(|&least| least > noise).collect();
        let mut filters: Vec<(f64, Filter)> = Vec::new();
        for largest in self.tiles() {
            if evidence.spend(work) {
                return Vec::new();
            }
            let (tile, first) = (largest.tile, largest.first_dropping(&levels));
            let first_level =
                |t: usize, v: usize| first[t / tile[0] * largest.across + v / tile[1]];
            let misfits = sums.misfits_without(levels.len(), &first_level);
            let filter = |level: usize| Filter { least: levels[level], tile, labelled };
            let new = telling(&first, &levels).into_iter();
            filters.extend(new.map(|level| (misfits[level], filter(level))));
        }
        filters.sort_by(|a, b| a.0.total_cmp(&b.0));
        let seen = filters.iter().filter(|(misfit, _)| *misfit < SEEN * none);
        seen.map(|&(_, filter)| filter).take(OFFERED).collect()
    }

    /// The largest magnitudes for every tile size: powers of two, and all tokens or all classes.
    /// Each is computed from a smaller size.
    fn tiles(&self) -> impl Iterator<Item = Largest> {
        let sizes = |of: usize, block: usize| {
            let whole = of.next_multiple_of(block);
            let sizes = (0..=9).map(|i| 1usize << i).filter(move |size| size % block == 0);
            sizes.filter(move |&size| size < whole).chain([whole])
        };
        let (classes, block) = (self.classes, self.block);
        let by_tokens = sizes(self.rows.len(), block).scan(self.largest(), move |largest, size| {
            *largest = largest.over([size, block]);
            Some(largest.clone())
        });
        by_tokens.flat_map(move |largest| {
            sizes(classes, block).scan(largest, |largest, size| {
                *largest = largest.over([largest.tile[0], size]);
                Some(largest.clone())
            })
        })
    }
}

/// The thresholds worth trying: those that leave out more tiles than the threshold before. `first`:
/// for each tile the first of the ascending `levels` that leaves it out. Of several that leave out
/// the same tiles, a power of two is taken, as most jobs use one.
fn telling(first: &[usize], levels: &[f64]) -> Vec<usize> {
    let mut new = first.to_vec();
    new.sort_unstable();
    new.dedup();
    let ends = new.iter().skip(1).copied().chain([levels.len()]);
    let alike = new.iter().zip(ends).filter(|(from, _)| **from < levels.len());
    let power = |&level: &usize| levels[level].log2().fract() == 0.0;
    alike.map(|(&from, to)| (from..to).rev().find(power).unwrap_or(from)).collect()
}

fn block_of(tokens: usize, classes: usize) -> usize {
    let few = |block: &usize| tokens.div_ceil(*block) * classes.div_ceil(*block) <= HELD;
    BLOCKS.into_iter().find(few).unwrap_or(BLOCKS[2])
}

/// The largest magnitude in each tile, `[rows, across]`.
#[derive(Clone)]
struct Largest {
    tile: [usize; 2],
    values: Vec<f32>,
    rows: usize,
    across: usize,
}

impl Largest {
    /// The same for larger tiles that consist of whole tiles of this size.
    fn over(&self, tile: [usize; 2]) -> Largest {
        let [tokens, classes] = [tile[0].div_ceil(self.tile[0]), tile[1].div_ceil(self.tile[1])];
        let (rows, across) = (self.rows.div_ceil(tokens), self.across.div_ceil(classes));
        let mut values = vec![0.0f32; rows * across];
        for (row_index, row) in self.values.chunks(self.across.max(1)).enumerate() {
            let to = &mut values[row_index / tokens * across..][..across];
            for (to, entries) in to.iter_mut().zip(row.chunks(classes)) {
                *to = entries.iter().fold(*to, |most, &x| most.max(x));
            }
        }
        Largest { tile, values, rows, across }
    }

    /// For every tile the first of the ascending thresholds that leaves it out; the number of
    /// thresholds where none does.
    fn first_dropping(&self, levels: &[f64]) -> Vec<usize> {
        let first = |&x: &f32| levels.partition_point(|&least| least <= f64::from(x));
        self.values.iter().map(first).collect()
    }

    fn dropped(&self, least: f64) -> Tiled {
        let dropped = self.values.iter().map(|&x| f64::from(x) < least).collect();
        Tiled { tile: self.tile, across: self.across, dropped }
    }
}

/// Which tiles of a plane are left out.
pub struct Tiled {
    tile: [usize; 2],
    across: usize,
    dropped: Vec<bool>,
}

impl Tiled {
    /// Whether the entry of a token (index into the unit's) and a class is left out.
    pub fn drops(&self, token: usize, class: usize) -> bool {
        self.dropped[token / self.tile[0] * self.across + class / self.tile[1]]
    }
}

/// Thresholds that jobs use, ascending: powers of two around CCE's 2⁻¹², and powers of ten.
fn thresholds() -> impl Iterator<Item = f64> {
    let twos = (4..=18).map(|k| 2f64.powi(-k));
    let mut all: Vec<f64> = twos.chain((2..=6).map(|k| 10f64.powi(-k))).collect();
    all.sort_by(f64::total_cmp);
    all.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_counted_by_tokens_then_classes() {
        let dropped = vec![true, false, false, true];
        let tiled = Tiled { tile: [16, 32], across: 2, dropped };
        assert!(tiled.drops(15, 31) && tiled.drops(16, 32));
        assert!(!tiled.drops(15, 32) && !tiled.drops(31, 0));
    }

    #[test]
    fn a_larger_tile_has_the_largest_of_the_tiles_in_it() {
        let values = vec![1.0, 5.0, 2.0, 0.0, 3.0, 4.0, 7.0, 6.0, 0.5];
        let single_entries = Largest { tile: [1, 1], values, rows: 3, across: 3 };
        assert_eq!(single_entries.over([2, 2]).values, [5.0, 4.0, 7.0, 0.5]);
        assert_eq!(single_entries.over([1, 2]).over([2, 4]).values, [5.0, 7.0]);
        assert_eq!(single_entries.over([1, 2]).first_dropping(&[2.0, 6.0]), [1, 1, 1, 1, 2, 0]);
    }

    #[test]
    fn of_thresholds_that_leave_out_as_much_a_power_of_two_is_tried() {
        let levels = [0.1, 0.125, 0.2, 0.25, 0.3, 0.4];
        assert_eq!(telling(&[0, 2, 2, 4, 6], &levels), [1, 3, 4]);
        assert_eq!(telling(&[1, 6], &levels), [3], "what the first leaves in does not tell");
    }

    #[test]
    fn the_default_of_cce_is_a_threshold_that_is_tried() {
        assert!(thresholds().any(|x| x == 2f64.powi(-12)));
    }
}
