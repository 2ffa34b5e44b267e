//! Sizes of blocks of k that were read at `i b b`, by what was captured of a few tokens: what
//! every size would have read, against lse, the labels' logits or dq.

use std::collections::BTreeMap;

use super::captured::Values;
use super::direct::{dot, energy};
use super::maps::{Beyond, Map};
use super::misread::{Looked, NEAR};
use crate::assemble::Row;
use crate::diagnose::evidence::Evidence;
use crate::draw::Draw;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{IGNORED, TokenCotangents};

/// Logits of labels that are looked at.
const LABELS: usize = 32;
/// How near the product of dq with a random vector must be, over the norm of dq.
const NEAR_DQ: f64 = 0.05;
/// A size is offered where what it reads is at most so many times as far from what was captured as
/// what the best reads.
const AS_NEAR: f64 = 16.0;
/// Numbers from which a size that is not as near as the best is left out.
const MANY: usize = 3;
/// What is this share of [`NEAR`] away may be rounding to f32 alone.
const ROUNDED: f64 = 1e-3;
/// Logits of a token that may be read to find a size.
const READS: usize = 1 << 26;

/// What a token shows of the rows of k that were read.
struct Shown {
    /// Its products with every row of k.
    products: Vec<f64>,
    lse: Option<f64>,
    dq: Option<Projected>,
}

/// A token's dq and the rows of k, each as its product with one random vector: one number
/// tells whether rows read elsewhere would have made it.
struct Projected {
    captured: f64,
    /// How far it may be off to be worth a trial.
    near: f64,
    rows: Vec<f64>,
    cotangents: TokenCotangents,
    label: Option<usize>,
    /// lse of a forward that read rightly.
    right: f64,
}

impl Looked<'_> {
    /// Sizes of blocks of k that were read at `i b b`, the likeliest first, by what was captured
    /// of the tokens: a token's products are worked out once, and every size but reads them
    /// elsewhere. None where there are too many sizes to try.
    pub fn block_sizes(&self, evidence: &Evidence<'_>, beyond: &[Beyond]) -> Option<Vec<usize>> {
        let n = self.direct.head.k.rows;
        if n.saturating_mul(n).saturating_mul(beyond.len()) > READS {
            return None;
        }
        let shown: Vec<Shown> = self.tokens.iter().map(|&t| self.shown(evidence, t)).collect();
        let off = |map: Map| -> Option<f64> {
            let of_labels = self.labels_off(map)?;
            shown.iter().try_fold(of_labels, |most, one| Some(most.max(self.off(one, map)?)))
        };
        let nearest = |size: usize| {
            let each = beyond.iter().filter_map(|&beyond| off(Map::BlockTwice { size, beyond }));
            Some((each.min_by(f64::total_cmp)?, size))
        };
        // Fewer than three blocks do not show.
        let mut found: Vec<(f64, usize)> = (2..n.div_ceil(2)).filter_map(nearest).collect();
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        // What one number or two show, a wrong size may by chance show as well.
        if shown.len() + self.labels.len() >= MANY {
            let most = found.first().map_or(0.0, |best| AS_NEAR * best.0.max(ROUNDED));
            found.retain(|(off, _)| *off <= most);
        }
        Some(found.into_iter().map(|(_, size)| size).collect())
    }

    fn shown(&self, evidence: &Evidence<'_>, t: usize) -> Shown {
        let q = self.direct.q(Row::From(t));
        let of = |v: usize| dot(&q, &self.direct.k(Row::From(v)));
        let products = (0..self.direct.head.k.rows).map(of).collect();
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
        let of = |row: &[f64]| dot(row, &along);
        let k = |v: usize| of(&self.direct.k(Row::From(v)));
        let label = self.inputs.labels[t];
        let in_it = key.stage == Stage::Dq && label != IGNORED;
        let row = captured.row(t);
        Some(Projected {
            captured: of(row),
            near: NEAR_DQ * energy(row).sqrt(),
            rows: (0..self.direct.head.k.rows).map(k).collect(),
            cotangents,
            label: in_it.then_some(label as usize),
            right: reference.lse.get(mb)?[t],
        })
    }

    /// How far the captured logits of labels are at most from those of the rows that a map reads,
    /// over [`NEAR`]; none where they are further.
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

    /// The same of what a token shows.
    fn off(&self, one: &Shown, map: Map) -> Option<f64> {
        let (n, valid) = (self.direct.head.k.rows, self.direct.head.valid_vocab);
        let at = |of: &[f64], v: usize| match map.at(v, n) {
            Some(Row::From(row)) => of[row],
            Some(Row::Nans) => f64::NAN,
            _ => 0.0,
        };
        let logits: Vec<(f64, f64)> =
            (0..valid).map(|v| self.direct.logit(at(&one.products, v), v)).collect();
        let z: Vec<f64> = logits.iter().map(|of| of.0).collect();
        let own = self.direct.lse(&z);
        if let Some(captured) = one.lse {
            return near((own - captured).abs(), NEAR * (1.0 + own.abs()));
        }
        // A token of which nothing else was captured says nothing.
        let Some(dq) = &one.dq else { return Some(0.0) };
        let upstream = dq.cotangents;
        let dense = |lse: f64| -> f64 {
            let entry = |v: usize| logits[v].1 * upstream.dense((z[v] - lse).exp());
            (0..valid).map(|v| entry(v) * at(&dq.rows, v)).sum()
        };
        let of_label = |row: f64, product: f64, label: usize| {
            upstream.label * self.direct.logit(product, label).1 * row
        };
        let labels = match dq.label {
            None => vec![0.0],
            Some(v) => vec![
                of_label(dq.rows[v], one.products[v], v),
                of_label(at(&dq.rows, v), at(&one.products, v), v),
            ],
        };
        let each = [own, dq.right].into_iter().flat_map(|lse| {
            let dense = dense(lse);
            labels.iter().map(move |label| (dense + label - dq.captured).abs())
        });
        each.filter_map(|off| near(off, dq.near)).min_by(f64::total_cmp)
    }
}

/// A distance as the share of what is near; none where it is further, or no number.
fn near(off: f64, near: f64) -> Option<f64> {
    (off <= near).then(|| off / near.max(f64::MIN_POSITIVE))
}

/// Captured logits of tokens of which no two have one label: the largest labels first, as the
/// first block is read where it lies.
pub(super) fn distinct(inputs: &MicrobatchInputs, captured: &Values) -> Vec<(usize, f64)> {
    let counts = |t: &usize| inputs.labels[*t] != IGNORED && inputs.weights[*t] != 0.0;
    let tokens = (0..inputs.tokens()).filter(counts);
    let of: BTreeMap<u32, usize> = tokens.map(|t| (inputs.labels[t], t)).collect();
    of.into_values().rev().take(LABELS).map(|t| (t, captured.values[t])).collect()
}
