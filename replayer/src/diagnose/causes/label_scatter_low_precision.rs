//! `label-scatter-low-precision`: the label part of dk is added up in few bits, because
//! the rows of k were gathered in few bits and the transpose of a gather is a scatter-add
//! in the dtype of the gather.
//!
//! Real: baremetal-gpt fc9f8c7. Where the tokens are sharded each shard scatters by itself
//! and the shards' sums are added; the parts may be rounded before they are added.
//!
//! Detectors: dk or dk_label fails while dq is right, and there are labels that repeat. Emulation:
//! `acc = round(acc + round(g q))` over a row's tokens, for every plausible format, with and
//! without rounding of the product, from either end, in shards. The number of shards is also read
//! off the rows of the most frequent labels.

use std::collections::{BTreeMap, BTreeSet};

use super::emulated::{Emulated, formats_below};
use crate::diagnose::cause::{Cause, Effort, Hypothesis};
use crate::diagnose::evidence::Evidence;
use crate::head::{Roundings, Stage};
use crate::kernels::matrix::IGNORED;
use crate::kernels::policy::{Order, Path, Policy, Sum, Walk};
use crate::kernels::round::Precision;
use crate::replay::comparison::Comparison;

/// The catalogue's entry.
pub struct LabelScatterLowPrecision;

impl Cause for LabelScatterLowPrecision {
    fn id(&self) -> &str {
        "label-scatter-low-precision"
    }

    fn about(&self) -> &str {
        "the label part of dk is accumulated in a format of few bits: rows of frequent labels lose addends"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["baremetal-gpt fc9f8c7"]
    }

    fn advice(&self) -> &str {
        "gather the label rows of k in f32 (cast k before the gather), so that their transpose scatters in f32"
    }

    fn effort(&self) -> Effort {
        Effort::Much
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let stages = [Stage::DkLabel, Stage::Dk];
        let Some(roundings) = evidence.roundings() else { return Vec::new() };
        let several = evidence.inputs.iter().any(|inputs| repeats(&inputs.labels));
        if !evidence.fails_any(&stages) || !several || is_everywhere(evidence) {
            return Vec::new();
        }
        // Where the parts of dk were captured, their values show what they were rounded to.
        let apart = evidence.residuals.keys().any(|key| key.stage == Stage::DkLabel);
        let mut hypotheses = Vec::new();
        let declared = roundings.narrowest.sums.label_scatter.precision;
        for precision in formats_below(declared, &roundings) {
            for (shards, join, order) in cuts(evidence, precision) {
                // Sums of shards that are added in f32 may be stored in few bits again.
                let shown = apart && join == precision;
                for parts in [precision, Precision::F32].into_iter().skip(usize::from(shown)) {
                    for product in [precision, Precision::F32] {
                        let scatter = Scatter { precision, product, parts, shards, join, order };
                        hypotheses.push(scatter.hypothesis(&roundings));
                    }
                }
            }
        }
        hypotheses
    }
}

/// Whether rows that are the label of at most one token are as far off, relative to their expected
/// rounding, as rows of frequent labels: then no scatter-add lost summands.
fn is_everywhere(evidence: &Evidence<'_>) -> bool {
    let (mut rare, mut frequent) = ((0.0, 0.0), (0.0, 0.0));
    for (key, _) in evidence.failing_of(&[Stage::DkLabel, Stage::Dk]) {
        let comparisons = evidence.outcome.stage(key.stage).comparisons.iter();
        let is_of_unit = |comparison: &&Comparison| {
            comparison.microbatch == key.microbatch && comparison.rank == key.rank
        };
        for class in comparisons.filter(is_of_unit).flat_map(|comparison| &comparison.by_hits) {
            let to = match class.hits_from {
                0 | 1 => &mut rare,
                2 | 3 => continue,
                _ => &mut frequent,
            };
            to.0 += class.error_energy;
            to.1 += class.expected_energy;
        }
    }
    let over = |(error, expected): (f64, f64)| error / expected;
    over(frequent) <= MORE * over(rare)
}

/// Rows of frequent labels must have more than this many times the relative error energy of the
/// others.
const MORE: f64 = 1.5;

/// Whether several tokens have the same label.
fn repeats(labels: &[u32]) -> bool {
    let mut sorted: Vec<u32> = labels.iter().copied().filter(|&label| label != IGNORED).collect();
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[0] == pair[1])
}

/// The ways in which a unit's tokens may have been scattered: the number of shards, the format in
/// which the shards' sums are added, and from which end. Numbers of shards: one; the ranks, where
/// dk was captured over the tokens of all; the devices that a compiler may have cut the program
/// over; and the number that the roundings show.
fn cuts(evidence: &Evidence<'_>, precision: Precision) -> Vec<(usize, Precision, Walk)> {
    let whole =
        evidence.failing_of(&[Stage::DkLabel, Stage::Dk]).any(|(key, _)| key.rank.is_none());
    let ranks = Some(evidence.ranks()).filter(|_| whole);
    let shown = shards_shown(evidence, precision);
    let shards = DEVICES.into_iter().chain(ranks).chain(shown);
    let shards: BTreeSet<usize> = shards.filter(|&n| n > 1).collect();
    let single = [Walk::Ascending, Walk::Descending].map(|order| (1, precision, order));
    let several = shards.into_iter().flat_map(|shards| {
        [precision, Precision::F32].map(move |join| (shards, join, Walk::Ascending))
    });
    single.into_iter().chain(several).collect()
}

/// The number of shards that best explains the rows of the most frequent labels; none where it is
/// hardly better than one shard.
fn shards_shown(evidence: &Evidence<'_>, precision: Precision) -> Option<usize> {
    let (key, _) = evidence.failing_of(&[Stage::DkLabel, Stage::Dk]).next()?;
    let (plane, captured) = (evidence.plane(key)?, evidence.captured(key)?);
    let (tokens, d) = (plane.labels.len(), plane.q.cols);
    if evidence.spend(2 * SHARDS * tokens * d) {
        return None;
    }
    let mut hits: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (token, label) in plane.labels.iter().enumerate() {
        label.iter().for_each(|(class, _)| hits.entry(*class).or_default().push(token));
    }
    let mut frequent: Vec<(usize, Vec<usize>)> = hits.into_iter().collect();
    frequent.sort_by_key(|(_, tokens)| std::cmp::Reverse(tokens.len()));
    frequent.truncate(ROWS);
    let dense = |class: usize, column: usize| -> f64 {
        let product = |t: usize| plane.dense.row(t)[class] * plane.q.row(t)[column];
        if key.stage == Stage::Dk { (0..tokens).map(product).sum() } else { 0.0 }
    };
    let wanted: Vec<Vec<f64>> = frequent
        .iter()
        .map(|(class, _)| (0..d).map(|at| captured.row(*class)[at] - dense(*class, at)).collect())
        .collect();
    let left = |shards: usize| -> f64 {
        let size = tokens.div_ceil(shards).max(1);
        let mut least = f64::INFINITY;
        for rounds in [true, false] {
            let mut off = 0.0;
            for ((_, tokens), wanted) in frequent.iter().zip(&wanted) {
                for (column, wanted) in wanted.iter().enumerate() {
                    let addend = |t: usize| {
                        let x = plane.labels[t].map_or(0.0, |(_, entry)| entry)
                            * plane.q.row(t)[column];
                        if rounds { precision.round64(x) } else { x }
                    };
                    let shard = |indices: &[usize]| {
                        indices.iter().fold(0.0, |sum, &t| precision.round64(sum + addend(t)))
                    };
                    let sum: f64 = tokens.chunk_by(|a, b| a / size == b / size).map(shard).sum();
                    off += (wanted - sum).powi(2);
                }
            }
            least = least.min(off);
        }
        least
    };
    let left_by_one = left(1);
    let all = (2..=SHARDS.min(tokens)).map(|shards| (left(shards), shards));
    let (off, shards) = all.min_by(|a, b| a.0.total_cmp(&b.0))?;
    (off <= LESS * left_by_one).then_some(shards)
}

/// How many rows of frequent labels the number of shards is read off.
const ROWS: usize = 6;
/// The largest number of shards that is tried.
const SHARDS: usize = 64;
/// Share of the error with one shard that the best number of shards may leave.
const LESS: f64 = 0.5;

/// Devices that a compiler may have cut a rank's tokens over.
const DEVICES: [usize; 3] = [2, 4, 8];

struct Scatter {
    precision: Precision,
    product: Precision,
    parts: Precision,
    shards: usize,
    join: Precision,
    order: Walk,
}

impl Scatter {
    fn hypothesis(&self, roundings: &Roundings) -> Hypothesis {
        let Scatter { precision, product, parts, shards, join, order } = *self;
        let mut policy = Policy { path: Path::Fused, ..roundings.narrowest };
        policy.sums.label_scatter = Sum { precision, order: Order::Native };
        (policy.label_grad, policy.parts) = (product, parts);
        (policy.scatter_shards, policy.scatter_join) = (shards, join);
        policy.scatter_order = order;
        let end = if order == Walk::Ascending { "the first" } else { "the last" };
        let mut parameters = vec![
            ("accumulator", precision.name().to_string()),
            ("g q rounded to", product.name().to_string()),
            ("parts rounded to", parts.name().to_string()),
            ("shards", shards.to_string()),
            ("starts at", format!("{end} token")),
        ];
        if shards > 1 {
            parameters.push(("shards added in", join.name().to_string()));
        }
        Hypothesis::new(Emulated::backward(policy, roundings.tiles), parameters)
    }
}
