//! The block sizes b with which blocks of k may have been read at row `i * b * b`. For every size,
//! the lse, label logits or dq of a few tokens that it would give are compared with the captured
//! ones.

use std::collections::BTreeMap;

use super::captured::Values;
use super::misread_rows::{FailingTokens, NEAR};
use super::row_maps::{Beyond, Map};
use super::single_tokens::{dot, energy};
use crate::assemble::Row;
use crate::diagnose::evidence::Evidence;
use crate::draw::Draw;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::formula::probability;
use crate::kernels::matrix::{IGNORED, TokenCotangents};

/// How many label logits are compared.
const LABELS: usize = 32;
/// How near the product of dq with a random vector must be, relative to the norm of dq.
const NEAR_DQ: f64 = 0.05;
/// A size is offered if its values are at most this many times as far from the captured ones as
/// those of the best size.
const AS_NEAR: f64 = 16.0;
/// From this many compared numbers on, sizes that are less near than that are dropped.
const MANY: usize = 3;
/// A distance of this share of [`NEAR`] may be rounding to f32 alone.
const ROUNDED: f64 = 1e-3;
/// At most this many logits of a token are read to find a size.
const READS: usize = 1 << 26;

/// What is captured of one token, and its products with all rows of k.
struct Shown {
    /// Its products with every row of k.
    products: Vec<f64>,
    lse: Option<f64>,
    dq: Option<Projected>,
}

/// A token's dq and the rows of k, each multiplied with one random vector, so that a single number
/// tells whether other rows of k give this dq.
struct Projected {
    captured: f64,
    /// How far the product may be off to be worth a trial.
    near: f64,
    rows: Vec<f64>,
    cotangents: TokenCotangents,
    label: Option<usize>,
    /// lse of a forward that read the right rows.
    right: f64,
}

impl FailingTokens<'_> {
    /// The block sizes with which k may have been read at `i * b * b`, the likeliest first. A
    /// token's products with k are computed once; each size only reads them in other places. None
    /// where there are too many sizes to try.
    pub fn block_sizes(&self, evidence: &Evidence<'_>, beyond: &[Beyond]) -> Option<Vec<usize>> {
        let n = self.direct.head.k.rows;
        if n.saturating_mul(n).saturating_mul(beyond.len()) > READS {
            return None;
        }
        let shown: Vec<Shown> = self.tokens.iter().map(|&t| self.shown(evidence, t)).collect();
        let off = |map: Map| -> Option<f64> {
            let of_labels = self.labels_off(map)?;
            shown.iter().try_fold(of_labels, |most, shown| Some(most.max(self.off(shown, map)?)))
        };
        let nearest = |size: usize| {
            let each = beyond.iter().filter_map(|&beyond| off(Map::BlockTwice { size, beyond }));
            Some((each.min_by(f64::total_cmp)?, size))
        };
        // Sizes with fewer than three blocks are left out: too few rows would be read elsewhere.
        let mut sizes: Vec<(f64, usize)> = (2..n.div_ceil(2)).filter_map(nearest).collect();
        sizes.sort_by(|a, b| a.0.total_cmp(&b.0));
        // With only one or two numbers, a wrong size may be nearest by chance, so all are kept.
        if shown.len() + self.labels.len() >= MANY {
            let most = sizes.first().map_or(0.0, |best| AS_NEAR * best.0.max(ROUNDED));
            sizes.retain(|(off, _)| *off <= most);
        }
        Some(sizes.into_iter().map(|(_, size)| size).collect())
    }

    fn shown(&self, evidence: &Evidence<'_>, t: usize) -> Shown {
        let q = self.direct.q(Row::From(t));
        let product = |v: usize| dot(&q, &self.direct.k(Row::From(v)));
        let products = (0..self.direct.head.k.rows).map(product).collect();
        let lse = self.lse.as_ref().map(|lse| lse.values[t]);
        let dq = if lse.is_none() { self.projected(evidence, t) } else { None };
        Shown { products, lse, dq }
    }

    fn projected(&self, evidence: &Evidence<'_>, t: usize) -> Option<Projected> {
        let (captured, key) = self.dq.as_ref()?;
        let (mb, reference) = (&self.inputs.microbatch, evidence.reference());
        let cotangents = *reference.cotangents.get(mb)?.get(&t)?;
        let mut draw = Draw::new(t as u64);
        let along: Vec<f64> = (0..captured.columns).map(|_| draw.normal()).collect();
        let projection = |row: &[f64]| dot(row, &along);
        let k = |v: usize| projection(&self.direct.k(Row::From(v)));
        let label = self.inputs.labels[t];
        let in_it = key.stage == Stage::Dq && label != IGNORED;
        let row = captured.row(t);
        Some(Projected {
            captured: projection(row),
            near: NEAR_DQ * energy(row).sqrt(),
            rows: (0..self.direct.head.k.rows).map(k).collect(),
            cotangents,
            label: in_it.then_some(label as usize),
            right: reference.lse.get(mb)?[t],
        })
    }

    /// The largest distance of a captured label logit from that of the row that a map reads, as a
    /// share of [`NEAR`]; none where one is further than [`NEAR`].
    fn labels_off(&self, map: Map) -> Option<f64> {
        let n = self.direct.head.k.rows;
        self.labels.iter().try_fold(0.0f64, |most, &(t, captured)| {
            let label = self.inputs.labels[t] as usize;
            let q = self.direct.q(Row::From(t));
            let row = self.direct.k(map.at(label, n)?);
            let read = self.direct.logit(dot(&q, &row), label).0;
            Some(most.max(near((read - captured).abs(), NEAR * (1.0 + captured.abs()))?))
        })
    }

    /// The same for a token's lse, or for its dq.
    fn off(&self, shown: &Shown, map: Map) -> Option<f64> {
        let (n, valid) = (self.direct.head.k.rows, self.direct.head.valid_vocab);
        let mapped = |values: &[f64], v: usize| match map.at(v, n) {
            Some(Row::From(row)) => values[row],
            Some(Row::Nans) => f64::NAN,
            _ => 0.0,
        };
        let logits: Vec<(f64, f64)> =
            (0..valid).map(|v| self.direct.logit(mapped(&shown.products, v), v)).collect();
        let z: Vec<f64> = logits.iter().map(|of| of.0).collect();
        let implied_lse = self.direct.lse(&z);
        if let Some(captured) = shown.lse {
            return near((implied_lse - captured).abs(), NEAR * (1.0 + implied_lse.abs()));
        }
        // A token without captured lse or dq does not count.
        let Some(dq) = &shown.dq else { return Some(0.0) };
        let upstream = dq.cotangents;
        let dense = |lse: f64| -> f64 {
            let entry = |v: usize| logits[v].1 * upstream.dense(probability(z[v], lse));
            (0..valid).map(|v| entry(v) * mapped(&dq.rows, v)).sum()
        };
        let of_label = |row: f64, product: f64, label: usize| {
            upstream.label * self.direct.logit(product, label).1 * row
        };
        let labels = match dq.label {
            None => vec![0.0],
            Some(v) => vec![
                of_label(dq.rows[v], shown.products[v], v),
                of_label(mapped(&dq.rows, v), mapped(&shown.products, v), v),
            ],
        };
        let each = [implied_lse, dq.right].into_iter().flat_map(|lse| {
            let dense = dense(lse);
            labels.iter().map(move |label| (dense + label - dq.captured).abs())
        });
        each.filter_map(|off| near(off, dq.near)).min_by(f64::total_cmp)
    }
}

/// A distance as a share of the allowed one; none where it is larger or NaN.
fn near(off: f64, near: f64) -> Option<f64> {
    (off <= near).then(|| off / near.max(f64::MIN_POSITIVE))
}

/// Captured label logits of tokens with distinct labels. The largest labels come first, because the
/// first block is always read in the right place.
pub(super) fn distinct(inputs: &MicrobatchInputs, captured: &Values) -> Vec<(usize, f64)> {
    let counts = |t: &usize| inputs.labels[*t] != IGNORED && inputs.weights[*t] != 0.0;
    let tokens = (0..inputs.tokens()).filter(counts);
    let by_label: BTreeMap<u32, usize> = tokens.map(|t| (inputs.labels[t], t)).collect();
    by_label.into_values().rev().take(LABELS).map(|t| (t, captured.values[t])).collect()
}
