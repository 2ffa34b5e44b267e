//! All entries of dlogits of a small unit, and the products that dq and dk are. Detectors that
//! solve for parameters by least squares need them.

use backtape::identity::{Microbatch, Rank};
use rayon::prelude::*;

use super::captured::Values;
use super::single_tokens::{Direct, SCALAR, dot};
use crate::assemble::Row;
use crate::diagnose::evidence::Evidence;
use crate::kernels::formula::probability;
use crate::kernels::matrix::IGNORED;

/// A unit is small up to this many multiply-adds of one product.
const SMALL: usize = 1 << 28;
/// The most entries that one unit may have, and all units of a step together. This keeps their
/// memory below a few hundred MiB.
const ENTRIES: usize = 1 << 21;
const HELD: usize = 1 << 23;
/// How many products one use of a unit costs: the softmax part, the label's part, and those that
/// are compared with them.
const PRODUCTS: usize = 4;

/// A row-major matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Values of a row.
    pub cols: usize,
    /// Row after row.
    pub values: Vec<f64>,
}

impl Rows {
    /// One row.
    pub fn row(&self, index: usize) -> &[f64] {
        &self.values[index * self.cols..(index + 1) * self.cols]
    }

    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.values.len() / self.cols.max(1)
    }

    /// The transpose.
    pub fn transposed(&self) -> Rows {
        let (rows, cols) = (self.count(), self.cols);
        let element = |at: usize| self.values[at % rows.max(1) * cols + at / rows.max(1)];
        Rows { cols: rows, values: (0..rows * cols).map(element).collect() }
    }

    /// The product of the transpose of this matrix, `[n, m]`, with `[n, k]`: `[m, k]`.
    pub fn transposed_times(&self, other: &Rows) -> Rows {
        self.transposed().times(other)
    }

    /// The product of this matrix, `[m, n]`, with `[n, k]`.
    pub fn times(&self, other: &Rows) -> Rows {
        let of_row = |row: &[f64]| {
            let mut sum = vec![0.0; other.cols];
            for (&x, other_row) in row.iter().zip(other.values.chunks(other.cols.max(1))) {
                if x != 0.0 {
                    sum.iter_mut().zip(other_row).for_each(|(sum, y)| *sum += x * y);
                }
            }
            sum
        };
        let rows: Vec<Vec<f64>> = self.values.par_chunks(self.cols.max(1)).map(of_row).collect();
        Rows { cols: other.cols, values: rows.concat() }
    }
}

/// The entries of dlogits of one unit, and what dq and dk multiply them with.
pub struct Plane {
    /// The unit's tokens among those of the microbatch, `[n]`.
    pub rows: Vec<usize>,
    /// lse as the backward reads it, `[n]`.
    pub lse: Vec<f64>,
    /// q of the unit's tokens, `[n, D]`.
    pub q: Rows,
    /// k of the valid classes, `[V, D]`.
    pub k: Rows,
    /// exp(logit - lse), lse as the backward reads it, `[n, V]`.
    pub p: Rows,
    /// The softmax part of dlogits, `[n, V]`.
    pub dense: Rows,
    /// The label's class of each token and its entry of dlogits, `[n]`; none for an ignored token.
    pub labels: Vec<Option<(usize, f64)>>,
}

impl Plane {
    /// Computes the entries of a unit. `entries_held`: entries of other units that are in memory
    /// already.
    /// `None` where the unit is too large beside those, or the budget is spent.
    pub(in crate::diagnose) fn new(
        evidence: &Evidence<'_>,
        (microbatch, rank): (Option<Microbatch>, Option<Rank>),
        entries_held: usize,
    ) -> Option<Plane> {
        let mut units = evidence.units().iter();
        let unit = units
            .find(|unit| unit.microbatch == microbatch && (unit.rank == rank || rank.is_none()))?;
        let inputs = evidence.inputs_of(microbatch)?;
        let direct = Direct::new(evidence, inputs)?;
        let (head, n) = (&direct.head, unit.rows.len());
        let whole = rank.is_some() || n == inputs.tokens();
        let (v, d) = (head.valid_vocab, head.q.cols);
        let small = n * v <= ENTRIES && entries_held + n * v <= HELD && n * v * d <= SMALL;
        if !whole || !small || evidence.spend(SCALAR * n * v * d) {
            return None;
        }
        let rows = |count: usize, of: &dyn Fn(usize) -> Vec<f64>| Rows {
            cols: d,
            values: (0..count).flat_map(of).collect(),
        };
        let q = rows(n, &|i| direct.q(Row::From(unit.rows[i])));
        let k = rows(v, &|class| direct.k(Row::From(class)));
        let [a, b, c] = &unit.cotangents;
        let entries = |i: usize| -> (Vec<f64>, Vec<f64>) {
            let entry = |class: usize| {
                let (z, slope) = direct.logit(dot(q.row(i), k.row(class)), class);
                let p = probability(z, unit.lse[i]);
                (p, slope * (a[i] * p + c[i]))
            };
            (0..v).map(entry).unzip()
        };
        let rows: Vec<(Vec<f64>, Vec<f64>)> = (0..n).into_par_iter().map(entries).collect();
        let (p, dense): (Vec<Vec<f64>>, Vec<Vec<f64>>) = rows.into_iter().unzip();
        let [p, dense] = [p, dense].map(|all| Rows { cols: v, values: all.concat() });
        let label = |i: usize| {
            let label = inputs.labels[unit.rows[i]];
            let class = (label != IGNORED && (label as usize) < v).then_some(label as usize)?;
            let slope = direct.logit(dot(q.row(i), k.row(class)), class).1;
            Some((class, slope * b[i]))
        };
        let labels = (0..n).map(label).collect();
        let (rows, lse) = (unit.rows.clone(), unit.lse.clone());
        Some(Plane { rows, lse, q, k, p, dense, labels })
    }

    /// Multiply-adds of the products that one use of this unit costs.
    pub fn work(&self) -> usize {
        PRODUCTS * self.p.values.len() * self.q.cols
    }

    /// The label's entries of dlogits, `[n, V]`; zero elsewhere.
    pub fn of_labels(&self) -> Rows {
        let mut values = vec![0.0; self.dense.values.len()];
        for (i, label) in self.labels.iter().enumerate() {
            if let Some((class, entry)) = label {
                values[i * self.dense.cols + class] = *entry;
            }
        }
        Rows { cols: self.dense.cols, values }
    }

    /// All entries of dlogits, `[n, V]`.
    pub fn entries(&self) -> Rows {
        let labels = self.of_labels();
        let both = self.dense.values.iter().zip(&labels.values).map(|(a, b)| a + b);
        Rows { cols: self.dense.cols, values: both.collect() }
    }

    /// The captured dq of the unit's tokens, `[n, D]`.
    pub fn dq(&self, captured: &Values) -> Rows {
        let row = |&t: &usize| captured.row(t).to_vec();
        Rows { cols: captured.columns, values: self.rows.iter().flat_map(row).collect() }
    }

    /// The captured dk of the valid classes, `[V, D]`.
    pub fn dk(&self, captured: &Values) -> Rows {
        let end = (self.k.count() * captured.columns).min(captured.values.len());
        Rows { cols: captured.columns, values: captured.values[..end].to_vec() }
    }
}
