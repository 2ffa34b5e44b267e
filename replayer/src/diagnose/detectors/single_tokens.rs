//! Logits, lse and entries of dlogits of single tokens in f64, to check a hypothesis on a handful
//! of tokens before a trial is spent on it.

use rayon::prelude::*;

use crate::assemble::Row;
use crate::diagnose::evidence::Evidence;
use crate::head::MicrobatchInputs;
use crate::kernels::formula::{log_sum_exp, probability};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::reference;
use crate::kernels::{NoProgress, Progress, Tiles, TokenCotangents};

/// A detector may spend at most this many multiply-adds.
pub const WORK: usize = 1 << 31;

/// A multiply-add for a single row takes as long as this many in a product of matrices.
pub const SCALAR: usize = 8;

/// Below this many multiply-adds one thread is used.
const ALONE: usize = 1 << 20;

/// A microbatch's head, for products of single rows.
pub struct Direct<'a> {
    /// The inputs of the head.
    pub head: HeadInputs<'a>,
    /// Where the work is reported.
    progress: &'a dyn Progress,
}

/// A token's logits over the vocabulary.
pub struct TokenRow {
    /// Logits of the valid classes.
    pub logits: Vec<f64>,
    /// Their log-sum-exp, masked columns included where the mask is finite.
    pub lse: f64,
}

impl<'a> Direct<'a> {
    /// `None` where there are no q and k.
    pub fn new(evidence: &Evidence<'a>, inputs: &'a MicrobatchInputs) -> Option<Direct<'a>> {
        let (head, progress) = (inputs.head(evidence.step)?, evidence.progress());
        (head.given.is_none() && head.q.cols > 0).then_some(Direct { head, progress })
    }

    /// The same, also where logits were recorded in the place of q and k.
    pub fn of_logits(evidence: &Evidence<'a>, inputs: &'a MicrobatchInputs) -> Option<Direct<'a>> {
        let (head, progress) = (inputs.head(evidence.step)?, evidence.progress());
        (head.given.is_some() || head.q.cols > 0).then_some(Direct { head, progress })
    }

    /// The logit of a token and a class, recorded or not, and its derivative.
    pub fn logit_at(&self, token: usize, class: usize) -> (f64, f64) {
        match &self.head.given {
            Some(given) => self.logit(given.get_f64(token * given.cols + class), class),
            None => self.logit_of(&self.q(Row::From(token)), class),
        }
    }

    /// Logits of a token and all valid classes, recorded or not.
    pub fn logits_at(&self, token: usize) -> Vec<f64> {
        match &self.head.given {
            Some(_) => (0..self.head.valid_vocab).map(|v| self.logit_at(token, v).0).collect(),
            None => self.against(&self.q(Row::From(token)), &Row::From).logits,
        }
    }

    /// A row of q.
    pub fn q(&self, row: Row) -> Vec<f64> {
        self.row(&self.head.q, row)
    }

    /// A row of k.
    pub fn k(&self, row: Row) -> Vec<f64> {
        self.row(&self.head.k, row)
    }

    /// Counts a product for every row that is read, as each is multiplied with another.
    fn row(&self, matrix: &crate::kernels::Matrix<'_>, row: Row) -> Vec<f64> {
        self.progress.advance((SCALAR * matrix.cols) as u64);
        match row {
            Row::From(row) if row < matrix.rows => {
                let mut values = vec![0.0; matrix.cols];
                matrix.panel_f64(row..row + 1, &mut values);
                values
            }
            Row::From(_) | Row::Zeros => vec![0.0; matrix.cols],
            Row::Nans => vec![f64::NAN; matrix.cols],
        }
    }

    /// The logit of a class from the product of its row of k with q, and its derivative by that
    /// product.
    pub fn logit(&self, product: f64, class: usize) -> (f64, f64) {
        self.head.logit(product, class)
    }

    /// The logit of one class for a row of q, and its derivative by their product.
    pub fn logit_of(&self, q: &[f64], class: usize) -> (f64, f64) {
        self.logit(dot(q, &self.k(Row::From(class))), class)
    }

    /// The entry of dlogits of one class for a row of q, from its token's lse and cotangents.
    /// `is_label`: whether the class is the token's label.
    pub fn entry(
        &self,
        (q, class): (&[f64], usize),
        (lse, cotangents): (f64, TokenCotangents),
        is_label: bool,
    ) -> f64 {
        let (z, slope) = self.logit_of(q, class);
        slope * cotangents.entry(probability(z, lse), is_label)
    }

    /// The logits of a row of q with all valid classes, where class v reads the row `k(v)` of k.
    pub fn against(&self, q: &[f64], k: &(dyn Fn(usize) -> Row + Sync)) -> TokenRow {
        let classes = 0..self.head.valid_vocab;
        let of_class = |class: usize| self.logit(dot(q, &self.k(k(class))), class).0;
        let logits: Vec<f64> = match self.work() > ALONE {
            true => classes.into_par_iter().map(of_class).collect(),
            false => classes.map(of_class).collect(),
        };
        let lse = self.lse(&logits);
        TokenRow { logits, lse }
    }

    /// Log-sum-exp of a row of logits of the valid classes.
    pub fn lse(&self, logits: &[f64]) -> f64 {
        let padded = self.head.k.rows - self.head.valid_vocab;
        log_sum_exp(logits, self.head.mask.map(|mask| (mask, padded)))
    }

    /// lse of all tokens in f64, of the declared head.
    pub fn every_lse(&self) -> Vec<f64> {
        reference::forward(&self.head, Tiles::default(), &NoProgress).lse
    }

    /// Multiply-adds of one token's logits.
    pub fn work(&self) -> usize {
        (self.head.k.rows * self.head.q.cols).max(1)
    }
}

/// Inner product over the shorter length, in several partial sums so that the processor can add
/// them in parallel.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    const SUMS: usize = 8;
    let both = a.len().min(b.len());
    let (a, b) = (&a[..both], &b[..both]);
    let [of_a, of_b] = [a, b].map(|values| values.chunks_exact(SUMS));
    let rest: f64 = of_a.remainder().iter().zip(of_b.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0; SUMS];
    for (a, b) in of_a.zip(of_b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f64>() + rest
}

/// Squared distance of two vectors.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

/// Sum of squares of a vector.
pub fn energy(a: &[f64]) -> f64 {
    a.iter().map(|x| x * x).sum()
}

/// A row as a multiple of another.
pub struct Multiple {
    /// The factor; 1 where the other row is zero.
    pub times: f64,
    /// Squared distance with the factor 1.
    pub before: f64,
    /// Squared distance with this factor.
    pub left: f64,
}

/// The multiple of the row `other` that is nearest to `row`.
pub fn multiple(row: &[f64], other: &[f64]) -> Multiple {
    let other_energy = energy(other);
    let times = if other_energy > 0.0 { dot(row, other) / other_energy } else { 1.0 };
    let off = |x: f64| -> f64 { row.iter().zip(other).map(|(c, r)| (c - x * r).powi(2)).sum() };
    Multiple { times, before: off(1.0), left: off(times) }
}

/// True when two rows are equal up to rounding and a slightly different divisor: near enough to be
/// worth a trial, which then decides.
pub fn alike(a: &[f64], b: &[f64]) -> bool {
    let most = energy(a).max(energy(b));
    most > 0.0 && distance(a, b) <= 0.01 * most
}

/// The tokens of a microbatch that count in the loss, of the sample or of all.
pub fn tokens(evidence: &Evidence<'_>, inputs: &MicrobatchInputs) -> Vec<usize> {
    let counts = |&t: &usize| inputs.labels[t] != IGNORED && inputs.weights[t] != 0.0;
    match evidence.rows.as_ref().and_then(|rows| rows.tokens.get(&inputs.microbatch)) {
        Some(rows) => rows.iter().copied().filter(counts).collect(),
        None => (0..inputs.tokens()).filter(counts).collect(),
    }
}
