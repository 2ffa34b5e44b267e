//! What another device computed of the backward pass, before the label path is added.

use super::backward::TermNoise;
use crate::kernels::matrix::HeadInputs;

/// What the label's column says of each token, once its tile was seen, all `[T]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LabelTerms {
    /// F and its variance.
    pub slopes: Vec<(f64, f64)>,
    /// What the label's entry is rounded as.
    pub entries: Vec<f64>,
}

/// The dense sums over all tokens for a slab of k's rows, from wherever they were computed;
/// `[rows, D]` or `[rows]` as in `DkBlock`, empty where they are there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DenseSums {
    /// Of the entries.
    pub lse: Vec<f64>,
    /// Of their squares.
    pub lse_sq: Vec<f64>,
    /// Of their variances.
    pub lse_var: Vec<f64>,
    /// Of what a gradient filter may have dropped.
    pub dropped: Vec<f64>,
    /// Of confident entries.
    pub confident: Vec<f64>,
    /// For the bias, of the entries.
    pub bias_lse: Vec<f64>,
    /// For the bias, of their variances.
    pub bias_var: Vec<f64>,
    /// For the bias, of their squares times the copies of the token.
    pub bias_sq: Vec<f64>,
}

impl DenseSums {
    /// Of a head of which no token was walked.
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
