//! A gradient filter: tiles of dlogits in which nothing reaches a threshold are left out.
//!
//! The threshold is on `|p - onehot|`, before g multiplies it, so every unit's plane is
//! looked at once with g = 1: what is kept of it is every magnitude, or of a large plane the
//! largest of each block. Sizes and thresholds that jobs use are then tried on a few rows of
//! dk.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::nan::largest;

use super::sums::Sums;
use super::units::{Part, UnitState};
use crate::diagnose::evidence::Evidence;
use crate::head::roundings::F32;
use crate::kernels::policy::Policy;

/// Tokens and classes of a block: tiles are made of such.
const BLOCKS: [usize; 3] = [1, 4, 8];
/// Blocks of a plane up to which smaller ones are held: some memory, and every tile looks at
/// all of them.
const HELD: usize = 1 << 19;
/// Rows and columns of the plane that are held at a time.
const SPAN: usize = 256;
/// See [`SPAN`].
const COLUMNS: usize = 4096;
/// Tiles offered, the best first.
const OFFERED: usize = 8;
/// A filter counts as seen when it leaves less than this share of what none leaves.
const SEEN: f64 = 0.5;
/// Roundings to f32 of a logit by which `p - 1` may err: what is smaller than that is 0 in a right
/// job as well, or anything.
const ROUNDINGS: f64 = 64.0;

/// What is left out of dlogits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filter {
    /// Tiles whose magnitudes are all below it are left out.
    pub least: f64,
    /// Tokens and classes of a tile.
    pub tile: [usize; 2],
    /// Whether the label's part is in the tile: magnitudes are of `p - onehot`, else of p.
    pub labelled: bool,
}

/// One unit with its plane's magnitudes.
pub struct Filtered {
    /// Which microbatch.
    pub microbatch: Option<Microbatch>,
    /// The first rank of the unit.
    pub rank: Option<Rank>,
    /// Its tokens among those of the microbatch.
    pub rows: Vec<usize>,
    /// All of its tokens against all valid classes.
    pub part: Part,
    /// Classes.
    pub classes: usize,
    /// Tokens and classes of a block.
    block: usize,
    /// `[blocks of tokens, blocks of classes]`: the largest magnitude in each.
    magnitudes: Vec<f32>,
}

impl Filtered {
    /// Looks at the whole plane of a unit; `None` where there are no q and k.
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
                        let at = &mut magnitudes[t / block * across + v / block];
                        *at = at.max(x.abs() as f32);
                    }
                }
            }
        }
        let (microbatch, rank, rows) = (unit.microbatch, unit.rank, unit.rows.clone());
        Some(Filtered { microbatch, rank, rows, part, classes, block, magnitudes })
    }

    /// For every tile, row-major, whether the filter leaves it out.
    pub fn dropped(&self, filter: &Filter) -> Tiled {
        self.largest(filter.tile).dropped(filter.least)
    }

    fn largest(&self, tile: [usize; 2]) -> Largest {
        let [tokens, classes] = tile;
        let blocks = self.classes.div_ceil(self.block);
        let across = self.classes.div_ceil(classes);
        let mut values = vec![0.0f32; self.rows.len().div_ceil(tokens) * across];
        for (at, row) in self.magnitudes.chunks(blocks.max(1)).enumerate() {
            let first = at * self.block / tokens * across;
            for (column, &x) in row.iter().enumerate() {
                let at = first + column * self.block / classes;
                values[at] = values[at].max(x);
            }
        }
        Largest { tile, values, across }
    }

    /// The filters that fit a captured dk of the unit best, where one fits much better than
    /// none.
    pub fn search(
        &self,
        evidence: &Evidence<'_>,
        unit: &UnitState,
        policy: &Policy,
        labelled: bool,
    ) -> Vec<Filter> {
        let Some(sums) = Sums::of_many_dk(evidence, unit, policy, labelled) else {
            return Vec::new();
        };
        let work = 8 * sums.n * sums.rows * sums.cols;
        let none = sums.misfit_without(&|_, _| false);
        let logit = largest(unit.lse.iter().map(|lse| lse.abs()));
        let noise = if labelled { ROUNDINGS * F32 * logit } else { 0.0 };
        let mut found: Vec<(f64, Filter)> = Vec::new();
        for tile in self.tiles() {
            let largest = self.largest(tile);
            // What leaves out as much leaves out the same.
            let mut tried = BTreeSet::from([0]);
            for least in thresholds().filter(|&least| least > noise) {
                let tiled = largest.dropped(least);
                if !tried.insert(tiled.dropped.iter().filter(|dropped| **dropped).count()) {
                    continue;
                }
                if evidence.spend(work) {
                    return Vec::new();
                }
                let misfit = sums.misfit_without(&|t, v| tiled.drops(t, v));
                found.push((misfit, Filter { least, tile, labelled }));
            }
        }
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        let seen = found.iter().filter(|(misfit, _)| *misfit < SEEN * none);
        seen.map(|&(_, filter)| filter).take(OFFERED).collect()
    }

    /// Powers of two, and the whole of the tokens or of the classes.
    fn tiles(&self) -> Vec<[usize; 2]> {
        let sizes = |of: usize| {
            let whole = of.next_multiple_of(self.block);
            let sizes = (0..=9).map(|i| 1usize << i).filter(|size| size % self.block == 0);
            sizes.filter(move |&size| size < whole).chain([whole])
        };
        let tokens = sizes(self.rows.len());
        tokens.flat_map(|t| sizes(self.classes).map(move |v| [t, v])).collect()
    }
}

fn block_of(tokens: usize, classes: usize) -> usize {
    let few = |block: &usize| tokens.div_ceil(*block) * classes.div_ceil(*block) <= HELD;
    BLOCKS.into_iter().find(few).unwrap_or(BLOCKS[2])
}

struct Largest {
    tile: [usize; 2],
    values: Vec<f32>,
    across: usize,
}

impl Largest {
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
    /// Whether the entry of a token (of the unit's) and a class is left out.
    pub fn drops(&self, token: usize, class: usize) -> bool {
        self.dropped[token / self.tile[0] * self.across + class / self.tile[1]]
    }
}

/// Thresholds in use: powers of two around CCE's 2⁻¹², and of ten.
fn thresholds() -> impl Iterator<Item = f64> {
    let twos = (4..=18).map(|k| 2f64.powi(-k));
    twos.chain((2..=6).map(|k| 10f64.powi(-k)))
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
    fn the_default_of_cce_is_a_threshold_that_is_tried() {
        assert!(thresholds().any(|x| x == 2f64.powi(-12)));
    }
}
