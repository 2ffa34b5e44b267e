//! The part of the backward pass that a GPU may compute, before the label part is added.

use super::backward::TermNoise;
use crate::kernels::matrix::HeadInputs;

/// What is known of each token from its label's column, once the tile with that column was
/// computed, all `[T]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LabelTerms {
    /// The derivative F of the transform at the label's logit, and its variance.
    pub slopes: Vec<(f64, f64)>,
    /// The value of dlogits at the label that the job rounds: the whole entry where
    /// `TermNoise::whole`, else its label part.
    pub entries: Vec<f64>,
}

/// The dense sums over all tokens for a slab of k's rows, wherever they were computed; `[rows, D]`
/// or `[rows]`, and empty, as in `DkBlock`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DenseSums {
    /// Sums of the entries.
    pub lse: Vec<f64>,
    /// Sums of their squares.
    pub lse_sq: Vec<f64>,
    /// Sums of their variances.
    pub lse_var: Vec<f64>,
    /// Sums of the magnitudes that a gradient filter may have dropped.
    pub dropped: Vec<f64>,
    /// Sums of the entries whose p is confident.
    pub confident: Vec<f64>,
    /// For the bias, sums of the entries.
    pub bias_lse: Vec<f64>,
    /// For the bias, sums of their variances.
    pub bias_var: Vec<f64>,
    /// For the bias, sums of their squares times the token's number of copies.
    pub bias_sq: Vec<f64>,
}

impl DenseSums {
    /// The sums of a head before any token was added.
    pub fn zeros(inputs: &HeadInputs, noise: &TermNoise) -> Self {
        let zeros = || vec![0.0; inputs.k.rows * inputs.q.cols];
        let when = |there: bool| if there { zeros() } else { Vec::new() };
        let column = || vec![0.0; inputs.k.rows];
        DenseSums {
            lse: zeros(),
            lse_sq: zeros(),
            lse_var: zeros(),
            dropped: when(noise.filter > 0.0),
            confident: when(noise.confident > 0.0),
            bias_lse: column(),
            bias_var: column(),
            bias_sq: column(),
        }
    }
}
