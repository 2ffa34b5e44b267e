//! Small operations on lists of numbers that many stages need.

use rayon::prelude::*;

/// Elements that one thread adds at a time.
const MANY: usize = 1 << 14;

pub(super) fn sum(left: &[f64], other: &[f64]) -> Vec<f64> {
    match left.len() < MANY {
        true => left.iter().zip(other).map(|(a, b)| a + b).collect(),
        false => left.par_iter().zip(other).with_min_len(MANY).map(|(a, b)| a + b).collect(),
    }
}

/// Multiplies the values by a factor; a factor of 1, which is usual, changes none.
pub(super) fn scale(values: &mut [f64], factor: f64) {
    if factor != 1.0 {
        values.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Whether a product with a factor is rounded: a power of two changes no digit.
pub(super) fn rounds(factor: f64) -> bool {
    factor != 0.0 && factor.abs().log2().fract() != 0.0
}

pub(super) fn add(total: &mut [f64], part: &[f64]) {
    total.iter_mut().zip(part).for_each(|(total, &part)| *total += part);
}

/// How far two emulations lie apart, element by element.
pub(super) fn distance(left: &[f64], other: &[f64]) -> Vec<f64> {
    left.iter().zip(other).map(|(a, b)| (a - b).abs()).collect()
}
