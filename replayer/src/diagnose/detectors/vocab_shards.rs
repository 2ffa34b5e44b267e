//! The shards that a vocabulary may be cut into, and rows of dq that hold the part of one shard
//! only.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rayon::prelude::*;

use super::gradient::Gradient;
use super::single_tokens::distance;
use crate::diagnose::data_worlds::ReplacedValues;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;

/// The largest number of shards that is tried.
pub const MOST: usize = 64;
/// A row holds one shard's part if that leaves at most this share of its squared error.
const LEFT: f64 = 0.1;

/// A vocabulary shard: which one of how many.
pub struct Shard {
    /// How many shards there are.
    pub count: usize,
    /// Which one, counted from 0.
    pub number: usize,
    /// Its classes.
    pub range: Range<usize>,
}

/// The two usual ways to cut a vocabulary into `count` nearly equal shards: the last one is shorter,
/// or the first ones are longer by one.
fn cut_in(vocab: usize, count: usize) -> [Vec<Range<usize>>; 2] {
    let (up, rest) = (vocab.div_ceil(count), vocab % count);
    let last_is_shorter = |at: usize| (at * up).min(vocab)..((at + 1) * up).min(vocab);
    let first_are_longer = |index: usize| {
        let start = index * (vocab / count) + index.min(rest);
        start..start + vocab / count + usize::from(index < rest)
    };
    [(0..count).map(last_is_shorter).collect(), (0..count).map(first_are_longer).collect()]
}

/// The shards of every such cut into 2 to [`MOST`] shards.
pub fn shards(vocab: usize) -> Vec<Shard> {
    let shard_of =
        |(of, (number, range)): (usize, (usize, Range<usize>))| Shard { count: of, number, range };
    let cut = |count: usize| {
        cut_in(vocab, count)
            .into_iter()
            .flat_map(move |cut| cut.into_iter().enumerate())
            .map(move |at| (count, at))
    };
    let all = (2..=MOST.min(vocab)).flat_map(cut).map(shard_of);
    all.filter(|shard| !shard.range.is_empty()).collect()
}

/// Rows of dq that hold only one shard's part of the sum over classes, while other rows do not, or
/// hold another shard's.
pub struct RowsOfShards {
    /// The number of shards.
    pub shards: usize,
    /// The tokens whose rows hold each shard's part.
    pub tokens: BTreeMap<usize, Vec<usize>>,
    /// The world in which these rows hold these parts.
    pub world: ReplacedValues,
}

/// Finds such rows. Numbers of shards that are tried: the sizes of the mesh's axes, and the number
/// of ranks.
pub fn rows_of_shards(evidence: &Evidence<'_>) -> Option<RowsOfShards> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Dq]).map(|(key, _)| key).collect();
    let all = keys.into_iter().map(|key| Gradient::of(evidence, key));
    let all = all.collect::<Option<Vec<Gradient>>>().filter(|all| !all.is_empty())?;
    let mesh = &evidence.step.dump.manifest.mesh;
    let axes = mesh.0.iter().map(|(_, size)| *size as usize).chain([evidence.ranks()]);
    let sizes: BTreeSet<usize> = axes.filter(|size| (2..=MOST).contains(size)).collect();
    let work: usize = all.iter().map(|gradient| gradient.reference.values.len()).sum();
    let classes = all[0].other().count();
    let mut candidates: Vec<(f64, RowsOfShards)> = Vec::new();
    for cut in sizes.into_iter().flat_map(|size| cut_in(classes, size)) {
        if evidence.spend(work * classes) {
            break;
        }
        candidates.extend(rows_of_cut(&all, &cut));
    }
    // Cuts into shards of nearly the same sizes explain nearly as much, so the best is taken.
    candidates.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, nearest)| nearest)
}

/// The squared error that is left with this cut, and the rows; none where too much is left, or
/// every row holds the same shard's part.
fn rows_of_cut(all: &[Gradient], cut: &[Range<usize>]) -> Option<(f64, RowsOfShards)> {
    let mut rows_found = RowsOfShards {
        shards: cut.len(),
        tokens: BTreeMap::new(),
        world: ReplacedValues::default(),
    };
    let (mut left, mut before, mut rows) = (0.0, 0.0, 0);
    for gradient in all {
        let mut changed = Vec::new();
        for (row, near_row) in nearest(gradient, cut)?.into_iter().enumerate() {
            rows += 1;
            before += near_row.off;
            left += near_row.part.as_ref().map_or(near_row.off, |(_, near, _)| *near);
            if let Some((shard, _, values)) = near_row.part {
                rows_found.tokens.entry(shard).or_default().push(gradient.row(row));
                changed.push((gradient.row(row), values));
            }
        }
        rows_found.world = rows_found.world.rows(gradient.key, changed.into_iter());
    }
    let count: usize = rows_found.tokens.values().map(Vec::len).sum();
    // Where every row holds the same shard's part, dq was not reduced over shards, which is another
    // cause.
    let some = (1..rows).contains(&count) || rows_found.tokens.len() > 1;
    (left <= LEFT * before && some).then_some((left, rows_found))
}

/// A row of dq: its squared error and, if some shard's part is much nearer, that shard, its squared
/// distance and its values.
struct Nearest {
    off: f64,
    part: Option<(usize, f64, Vec<f64>)>,
}

fn nearest(gradient: &Gradient, cut: &[Range<usize>]) -> Option<Vec<Nearest>> {
    let entries = gradient.entries(false)?;
    let (captured, reference, k) = (&gradient.captured, &gradient.reference, gradient.other());
    let of_row = |row: usize| {
        let part = |(number, shard): (usize, &Range<usize>)| {
            let mut sum = vec![0.0; captured.cols];
            for class in shard.clone() {
                let entry = entries.row(class)[row];
                sum.iter_mut().zip(k.row(class)).for_each(|(sum, k)| *sum += entry * k);
            }
            (number, distance(captured.row(row), &sum), sum)
        };
        let off = distance(captured.row(row), reference.row(row));
        let nearest = cut.iter().enumerate().map(part).min_by(|a, b| a.1.total_cmp(&b.1));
        Nearest { off, part: nearest.filter(|(_, near, _)| off > 0.0 && *near <= LEFT * off) }
    };
    Some((0..reference.count()).into_par_iter().map(of_row).collect())
}
