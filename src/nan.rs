//! Maxima and orders in which NaN is not lost.
//!
//! `f64::max` ignores NaN, so that the largest error computed with it is 0 when every error is NaN;
//! and `f64::total_cmp` sorts a NaN whose sign bit is set (x86 returns one for 0/0) below all
//! numbers. Every maximum that is tested against a threshold or shown goes through these functions.

use std::cmp::Ordering;

/// The larger of two numbers; NaN if one of them is NaN.
pub fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// The largest of some non-negative numbers; 0 if there are none, NaN if one of them is NaN.
pub fn largest(sizes: impl IntoIterator<Item = f64>) -> f64 {
    sizes.into_iter().fold(0.0, larger)
}

/// Orders numbers from the smallest to the largest, with NaN of either sign above all numbers.
pub fn by_size(a: &f64, b: &f64) -> Ordering {
    a.is_nan().cmp(&b.is_nan()).then_with(|| match a.is_nan() {
        true => Ordering::Equal,
        false => a.total_cmp(b),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_of_either_sign_and_on_either_side_is_the_largest() {
        for nan in [f64::NAN, -f64::NAN] {
            assert!(larger(nan, 1.0).is_nan() && larger(1.0, nan).is_nan());
            assert!(largest([1.0, nan, f64::INFINITY]).is_nan());
            let mut sorted = [f64::INFINITY, nan, -1.0, 0.0];
            sorted.sort_by(by_size);
            assert!(sorted[3].is_nan() && sorted[..3] == [-1.0, 0.0, f64::INFINITY]);
        }
        assert_eq!((largest([]), largest([2.0, 3.0, 1.0])), (0.0, 3.0));
    }
}
