//! What the backward of one unit works on: the head of its tokens, and what is known of each token.

use backtape::identity::{Microbatch, Rank};

use super::world::UnitName;
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::reference::TermNoise;

/// What one unit's backward works on; all `[T]` of its tokens.
pub(super) struct Problem<'a> {
    pub(super) head: HeadInputs<'a>,
    pub(super) microbatch: Option<Microbatch>,
    /// The first rank of the unit.
    pub(super) rank: Option<Rank>,
    pub(super) lse: Vec<f64>,
    /// How each softmax term `g p` may be rounded.
    pub(super) noise: TermNoise,
    /// Relative variance that lse brings to a token's softmax terms.
    pub(super) scale: Vec<f64>,
    /// Relative variance of the token's g.
    pub(super) variance: Vec<f64>,
    /// The largest of `scale` and of `variance`.
    pub(super) largest: (f64, f64),
    pub(super) g_lse: Vec<f64>,
    pub(super) g_label: Vec<f64>,
    pub(super) g_smooth: Vec<f64>,
    /// Relative variance of the logits' constants, as it comes out in the gradients.
    pub(super) constants: f64,
    /// Share of the roundings of `g p` that may be alike for all tokens.
    pub(super) alike: f64,
    /// The same of entries that are not nearly g.
    pub(super) few: f64,
    /// For each token, the variance of errors that add up along q, over `q²/|q|⁴`; and
    /// the same for the rows of k, over `k²/|k|⁴`.
    pub(super) sliced: (Vec<f64>, f64),
    /// What rounding takes of an entry of dlogits in a coarse format's smallest numbers.
    pub(super) entry_floor: f64,
    /// Sum of k² over the vocabulary, a column each, where it is needed.
    pub(super) k_squares: Vec<f64>,
    /// Sum of k, likewise.
    pub(super) k_sums: Vec<f64>,
    /// Mean relative error of the label's addends, of dq and of dk.
    pub(super) label_bias: [f64; 2],
    /// The same of entries that hold the label's 1, where a fused head may round those.
    pub(super) whole_bias: f64,
    /// Mean relative error of the dense entries that smoothing moves off their grid.
    pub(super) dense_bias: f64,
    /// How much of the token's g may be there or not; empty where all of it is sure.
    pub(super) unsure: Vec<f64>,
    /// The cotangents of that: of lse, label and every logit, without their signs.
    pub(super) of_unsure: [Vec<f64>; 3],
}

impl Problem<'_> {
    /// Whose it is.
    pub(super) fn unit(&self) -> UnitName {
        (self.microbatch, self.rank)
    }

    /// The same tokens over other classes.
    pub(super) fn over<'h>(&self, head: HeadInputs<'h>) -> Problem<'h> {
        Problem {
            head,
            microbatch: self.microbatch,
            rank: self.rank,
            lse: self.lse.clone(),
            noise: self.noise,
            scale: self.scale.clone(),
            variance: self.variance.clone(),
            largest: self.largest,
            g_lse: self.g_lse.clone(),
            g_label: self.g_label.clone(),
            g_smooth: self.g_smooth.clone(),
            constants: self.constants,
            alike: self.alike,
            few: self.few,
            sliced: self.sliced.clone(),
            entry_floor: self.entry_floor,
            k_squares: self.k_squares.clone(),
            k_sums: self.k_sums.clone(),
            label_bias: self.label_bias,
            whole_bias: self.whole_bias,
            dense_bias: self.dense_bias,
            unsure: self.unsure.clone(),
            of_unsure: self.of_unsure.clone(),
        }
    }

    pub(super) fn cotangents(&self) -> Cotangents<'_, f64> {
        Cotangents { lse: &self.g_lse, label: &self.g_label, smooth: &self.g_smooth }
    }

    pub(super) fn largest_variance(&self) -> f64 {
        self.largest.1
    }

    pub(super) fn largest_scale(&self) -> f64 {
        self.largest.0 + self.largest.1
    }

    /// Rows whose g may be there or not.
    pub(super) fn uncertain_rows(&self) -> Vec<usize> {
        (0..self.unsure.len()).filter(|&row| self.is_uncertain(row)).collect()
    }

    /// Whether a row's g may be there or not.
    pub(super) fn is_uncertain(&self, row: usize) -> bool {
        self.unsure.get(row).is_some_and(|&unsure| !(unsure <= 0.0))
    }

    /// Whether any is.
    pub(super) fn any_uncertain(&self) -> bool {
        (0..self.unsure.len()).any(|row| self.is_uncertain(row))
    }
}
