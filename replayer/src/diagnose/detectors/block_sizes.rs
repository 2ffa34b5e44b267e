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
use crate::kernels::matrix::IGNORED;

/// Logits of labels that are looked at.
const LABELS: usize = 32;
/// How near the product of dq with a random vector must be, over the norm of dq.
const NEAR_DQ: f64 = 0.05;
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
    /// The cotangents of lse, label and every logit.
    cotangents: [f64; 3],
    label: Option<usize>,
    /// lse of a forward that read rightly.
    right: f64,
}

impl Looked<'_> {
    /// Sizes of blocks of k that were read at `i b b`, by what was captured of the tokens: a
    /// token's products are worked out once, and every size but reads them elsewhere. None where
    /// there are too many sizes to try.
    pub fn block_sizes(&self, evidence: &Evidence<'_>, beyond: &[Beyond]) -> Option<Vec<usize>> {
        let n = self.direct.head.k.rows;
        if n.saturating_mul(n).saturating_mul(beyond.len()) > READS {
            return None;
        }
        let shown: Vec<Shown> = self.tokens.iter().map(|&t| self.shown(evidence, t)).collect();
        let fits =
            |map: Map| self.labels_fit(map) && shown.iter().all(|one| self.shown_fits(one, map));
        let any = |size: &usize| {
            beyond.iter().any(|&beyond| fits(Map::BlockTwice { size: *size, beyond }))
        };
        // Fewer than three blocks do not show.
        Some((2..n.div_ceil(2)).filter(any).collect())
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

    /// Whether the captured logits of labels are those of the rows that a map reads.
    fn labels_fit(&self, map: Map) -> bool {
        let n = self.direct.head.k.rows;
        self.labels.iter().all(|&(t, captured)| {
            let label = self.inputs.labels[t] as usize;
            let Some(row) = map.at(label, n) else { return false };
            let q = self.direct.q(Row::From(t));
            let read = |row: Row| self.direct.logit(dot(&q, &self.direct.k(row)), label).0;
            (read(row) - captured).abs() <= NEAR * (1.0 + captured.abs())
        })
    }

    fn shown_fits(&self, one: &Shown, map: Map) -> bool {
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
            return (own - captured).abs() <= NEAR * (1.0 + own.abs());
        }
        let Some(dq) = &one.dq else { return true };
        let [a, b, c] = dq.cotangents;
        let dense = |lse: f64| -> f64 {
            let entry = |v: usize| logits[v].1 * (a * (z[v] - lse).exp() + c);
            (0..valid).map(|v| entry(v) * at(&dq.rows, v)).sum()
        };
        let of_label =
            |row: f64, product: f64, label: usize| b * self.direct.logit(product, label).1 * row;
        let labels = match dq.label {
            None => vec![0.0],
            Some(v) => vec![
                of_label(dq.rows[v], one.products[v], v),
                of_label(at(&dq.rows, v), at(&one.products, v), v),
            ],
        };
        [own, dq.right].into_iter().any(|lse| {
            let dense = dense(lse);
            labels.iter().any(|label| (dense + label - dq.captured).abs() <= dq.near)
        })
    }
}

/// Captured logits of tokens of which no two have one label: the largest labels first, as the
/// first block is read where it lies.
pub(super) fn distinct(inputs: &MicrobatchInputs, captured: &Values) -> Vec<(usize, f64)> {
    let counts = |t: &usize| inputs.labels[*t] != IGNORED && inputs.weights[*t] != 0.0;
    let tokens = (0..inputs.tokens()).filter(counts);
    let of: BTreeMap<u32, usize> = tokens.map(|t| (inputs.labels[t], t)).collect();
    of.into_values().rev().take(LABELS).map(|t| (t, captured.values[t])).collect()
}
