//! Classes whose logits are nearly their bias, for all tokens.

use std::ops::Range;

use super::rounding_variance::share_of_equal_roundings;
use crate::kernels::matrix::HeadInputs;

/// For each of some classes, the share of the roundings of its entries, 0 to 1, that all tokens share;
/// empty without a bias.
///
/// Of a class whose row of k is nearly zero the logits `q k + b` lie within a few steps of
/// their format, and so does its p where the tokens' lse is alike: they are rounded to few
/// values, whose errors a sum over the tokens does not average out. A head without a bias
/// has no such class: its logits spread as wide as they are large.
///
/// `lse` is `[T]`, `counts` says which tokens have a gradient, `steps` are the relative
/// spacings of logits and of p.
pub(super) fn shared_by_tokens(
    head: &HeadInputs<'_>,
    (lse, classes): (&[f64], Range<usize>),
    counts: impl Fn(usize) -> bool,
    (of_logits, of_p): (f64, f64),
) -> Vec<f64> {
    let depth = head.q.cols;
    let Some(bias) = head.bias else { return Vec::new() };
    let tokens: Vec<usize> = (0..head.q.rows).filter(|&t| counts(t)).collect();
    let moments: Vec<(f64, f64)> = (0..depth)
        .map(|column| mean_and_variance(&tokens, |t| head.q.get_f64(t * depth + column)))
        .collect();
    let (_, of_lse) = mean_and_variance(&tokens, |t| lse[t]);
    let share = |v: usize| {
        let row = moments.iter().enumerate().map(|(column, moment)| {
            let k = head.k.get_f64(v * depth + column);
            (k * moment.0, k * k * moment.1)
        });
        let (mean, variance) = row.fold((bias[v], 0.0), |sum, x| (sum.0 + x.0, sum.1 + x.1));
        let logits = variance.sqrt() / (of_logits * mean.abs());
        let p = (variance + of_lse).sqrt() / of_p;
        share_of_equal_roundings(logits).max(share_of_equal_roundings(p))
    };
    classes.map(share).collect()
}

/// Of no numbers both are 0.
fn mean_and_variance(tokens: &[usize], value: impl Fn(usize) -> f64) -> (f64, f64) {
    let n = (tokens.len() as f64).max(1.0);
    let mean = tokens.iter().map(|&t| value(t)).sum::<f64>() / n;
    (mean, tokens.iter().map(|&t| (value(t) - mean).powi(2)).sum::<f64>() / n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::matrix::{IGNORED, Matrix, Values};

    /// Goal: a class's share is its own wherever a slab of classes begins: the shares of the first
    /// slab once stood for those of every other.
    #[test]
    fn the_classes_of_a_later_slab_have_their_own_shares() {
        let (tokens, depth, classes) = (9, 3, 24);
        let q: Vec<f32> = (0..tokens * depth).map(|i| (i as f32 * 0.7).sin()).collect();
        // Rows of k fade towards the last class, whose logits are its bias for all tokens.
        let k = |v: usize| 10f32.powi(-(v as i32) / 3) * (1.0 + v as f32 * 0.1);
        let k: Vec<f32> = (0..classes * depth).map(|i| k(i / depth)).collect();
        let bias: Vec<f64> = (0..classes).map(|v| 1.0 + v as f64).collect();
        let matrix = |rows, values| Matrix { rows, cols: depth, values };
        let (q, k) = (matrix(tokens, Values::F32(&q)), matrix(classes, Values::F32(&k)));
        let labels = vec![IGNORED; tokens];
        let head = HeadInputs { bias: Some(&bias), ..HeadInputs::plain(q, k, &labels, classes) };
        let lse = vec![30.0; tokens];
        let shares = |range| shared_by_tokens(&head, (&lse, range), |_| true, (0.01, 0.01));
        let all = shares(0..classes);
        assert!(all[0] < 0.1 && all[classes - 1] == 1.0, "{all:?}");
        for first in 0..classes {
            assert_eq!(shares(first..classes), all[first..], "{first}");
        }
    }
}
