//! The loss of some tokens in f32 and in f64, at q and k or at a step from them, and its derivative
//! along a direction in closed form.
//!
//! `L = Σ_t g_t (lse_t - (1 - s) z_t,y - s/K Σ_v z_t,v + λ lse_t²)`, where `g_t` is the token's
//! weight over the sum of the weights of these tokens: the scale and reduction of the job's own
//! loss do not change relative errors. The z-loss is included even if the job leaves it out of the
//! loss that it reports, since its gradient is part of the job's. The f32 loss computes every step
//! in f32 as a plain job does: logits, exponentials added one after the other, logarithm, tokens
//! added one after the other.

use rayon::prelude::*;

use crate::kernels::formula::{TokenLoss, log_sum_exp, probability};
use crate::kernels::logits::{Direction, Real, columns, label, logits, slopes};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::round::Precision;

/// Some tokens of a head, with their shares of the loss.
pub struct Loss<'a> {
    /// q, k and labels.
    pub head: HeadInputs<'a>,
    /// The tokens, none of them ignored.
    pub tokens: Vec<usize>,
    /// The weight of each over the sum of all weights.
    pub shares: Vec<f64>,
    /// The precision in which the job stores its logits.
    pub stored: Precision,
    /// Beyond the negative log-likelihood.
    pub terms: TokenLoss,
}

impl<'a> Loss<'a> {
    /// The loss of those tokens that have a label and a weight.
    pub fn new(
        head: HeadInputs<'a>,
        tokens: &[usize],
        weights: &[f64],
        stored: Precision,
        terms: TokenLoss,
    ) -> Loss<'a> {
        let counts = |&&t: &&usize| label(&head, t).is_some() && weights[t] != 0.0;
        let tokens: Vec<usize> = tokens.iter().filter(counts).copied().collect();
        let total: f64 = tokens.iter().map(|&t| weights[t]).sum();
        let shares = tokens.iter().map(|&t| weights[t] / total).collect();
        Loss { head, tokens, shares, stored, terms }
    }

    /// Loss of each token, without its share.
    pub fn token_losses<F: Real>(&self, moved: Option<(f64, &Direction)>) -> Vec<F> {
        let all = logits::<F>(&self.head, &self.tokens, moved, self.stored);
        let width = columns(&self.head);
        let valid = self.head.valid_vocab;
        let loss_of_token = |(&token, row): (&usize, &[F])| {
            let lse = log_sum_exp(row, None);
            let label = label(&self.head, token).expect("tokens have labels");
            let sum = || row[..valid].iter().fold(F::of(0.0), |sum, &z| sum + z);
            self.terms.value(lse, row[label], || sum().over(valid as f64))
        };
        self.tokens.par_iter().zip(all.par_chunks(width.max(1))).map(loss_of_token).collect()
    }

    /// Adds up the tokens' losses in their order.
    pub fn total<F: Real>(&self, losses: &[F]) -> f64 {
        let addends = losses.iter().zip(&self.shares).map(|(&nll, &share)| nll * F::of(share));
        addends.fold(F::of(0.0), |sum, x| sum + x).wide()
    }

    /// The loss at `step` along the direction.
    pub fn at<F: Real>(&self, step: f64, direction: &Direction) -> f64 {
        self.total(&self.token_losses::<F>(Some((step, direction))))
    }

    /// `Σ_t g_t ((1 + 2λ lse_t) Σ_v p_tv z'_tv - (1 - s) z'_t,y - s/K Σ_v z'_tv)`, in f64.
    pub fn derivative(&self, direction: &Direction) -> f64 {
        let all = logits::<f64>(&self.head, &self.tokens, None, Precision::F64);
        let slopes = slopes(&self.head, &self.tokens, &all, direction);
        let width = columns(&self.head).max(1);
        let rows = all.chunks(width).zip(slopes.chunks(width));
        let slope_of_token = |(row, slopes): (&[f64], &[f64]), token: usize| {
            let lse = log_sum_exp(row, None);
            let label = label(&self.head, token).expect("tokens have labels");
            let mean: f64 = row.iter().zip(slopes).map(|(&z, s)| probability(z, lse) * s).sum();
            let all: f64 = slopes[..self.head.valid_vocab].iter().sum();
            // The derivative of the loss is the loss of the logits' slopes, with lse's own.
            let slope = self.terms.by_lse(lse) * mean;
            TokenLoss { z_loss: 0.0, ..self.terms }
                .value(slope, slopes[label], || all / self.head.valid_vocab as f64)
        };
        let tokens = self.tokens.iter().zip(&self.shares);
        rows.zip(tokens).map(|(row, (&token, share))| share * slope_of_token(row, token)).sum()
    }

    /// The loss of a single one of the tokens, with its share.
    pub fn alone(&self, index: usize) -> Loss<'a> {
        let (tokens, shares) = (vec![self.tokens[index]], vec![self.shares[index]]);
        Loss { head: self.head, tokens, shares, stored: self.stored, terms: self.terms }
    }
}

/// The largest logit.
pub fn max<F: Real>(row: &[F]) -> F {
    row.iter().fold(F::of(f64::NEG_INFINITY), |max, &z| if z > max { z } else { max })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use crate::kernels::matrix::{IGNORED, Matrix, Values};
    use crate::kernels::reference;
    use crate::kernels::tiles::{NoProgress, Tiles};
    use crate::kernels::transform::Transform;

    const D: usize = 11;

    fn numbers(seed: u64, n: usize) -> Vec<f64> {
        let mut draw = Draw::new(seed);
        (0..n).map(|_| draw.normal()).collect()
    }

    fn head<'a>(q: &'a [f64], k: &'a [f64], labels: &'a [u32]) -> HeadInputs<'a> {
        let matrix = |values: &'a [f64]| Matrix {
            rows: values.len() / D,
            cols: D,
            values: Values::F64(values),
        };
        HeadInputs::plain(matrix(q), matrix(k), labels, k.len() / D - 3)
    }

    #[test]
    fn the_f64_loss_is_that_of_the_reference_and_the_f32_loss_is_close() {
        let (q, k) = (numbers(1, 5 * D), numbers(2, 150 * D));
        let labels = [3, IGNORED, 77, 146, 3];
        let head = head(&q, &k, &labels);
        let weights = [1.0, 9.0, 0.5, 0.0, 2.0];
        let loss =
            Loss::new(head, &[0, 1, 2, 3, 4], &weights, Precision::F32, TokenLoss::default());
        assert_eq!(loss.tokens, [0, 2, 4]);
        let exact = reference::forward(&head, Tiles::default(), &NoProgress);
        let nll = |t: usize| exact.lse[t] - exact.label_logits[t];
        let wanted = (nll(0) + 0.5 * nll(2) + 2.0 * nll(4)) / 3.5;
        let total = loss.total(&loss.token_losses::<f64>(None));
        assert!((total - wanted).abs() < 1e-14 * wanted, "{total} {wanted}");
        let narrow = loss.total(&loss.token_losses::<f32>(None));
        assert!(narrow != total && (narrow - wanted).abs() < 1e-5 * wanted, "{narrow}");
    }

    /// Method: central differences of the f64 loss with a step of 1e-5, which err by about 1e-10.
    #[test]
    fn the_derivative_is_the_slope_of_the_loss_for_q_for_k_and_under_every_option() {
        let (q, k) = (numbers(3, 4 * D), numbers(4, 70 * D));
        let labels = [0, 66, 5, 5];
        let bias = numbers(5, 70);
        let capped = Transform::new(0.7, Some(2.0));
        let plain = head(&q, &k, &labels);
        let optioned =
            HeadInputs { bias: Some(&bias), transform: capped, mask: Some(-1.0), ..plain };
        let terms = TokenLoss { smoothing: 0.2, z_loss: 1e-2 };
        for (head, terms) in [(plain, TokenLoss::default()), (optioned, terms)] {
            let loss = Loss::new(head, &[0, 1, 2, 3], &[1.0; 4], Precision::F32, terms);
            let along_k = Direction::K { seed: 8, row: numbers(7, D) };
            for direction in [Direction::Q(numbers(6, 4 * D)), along_k] {
                let h = 1e-5;
                let (up, down) = (loss.at::<f64>(h, &direction), loss.at::<f64>(-h, &direction));
                let (slope, wanted) = (loss.derivative(&direction), (up - down) / (2.0 * h));
                assert!((slope - wanted).abs() < 1e-8 * wanted.abs().max(1e-2), "{slope} {wanted}");
            }
        }
    }
}
