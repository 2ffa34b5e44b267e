//! The probabilities of findings by chance, and the rounding error of a norm.

/// Probability that a healthy run raises one flag by chance, the same as for every check of
/// backtape.
pub(crate) const FALSE_ALARM: f64 = crate::compare::bound::FALSE_ALARM;

/// Bound of the relative error of a norm in f32: a pairwise sum of 2³² elements has 32 roundings,
/// the square root and the reduction over ranks a few more; the bound is twice 32 units of 2⁻²⁴.
pub(crate) const NORM_ROUNDING: f64 = 64.0 / (1u64 << 24) as f64;

/// P(X ≥ k) for n trials of probability p, summed term by term.
pub(crate) fn binomial_tail(n: u64, k: u64, p: f64) -> f64 {
    let choose = |k: u64| {
        libm::lgamma(n as f64 + 1.0)
            - libm::lgamma(k as f64 + 1.0)
            - libm::lgamma((n - k) as f64 + 1.0)
    };
    let term = |k: u64| (choose(k) + k as f64 * p.ln() + (n - k) as f64 * (1.0 - p).ln()).exp();
    (k..=n).map(term).sum::<f64>().min(1.0)
}

/// The relative spacing of the coarsest format, among bf16, f16, f32 and f64, that represents all
/// these values. Norms that the job rounded to that format may differ by that much.
pub(crate) fn spacing(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let fits = |bits: i32| {
        let keeps = |value: f64| {
            let mask = !((1u64 << (52 - bits)) - 1);
            !value.is_finite() || value.to_bits() & !mask == 0
        };
        values.clone().all(keeps)
    };
    // Powers of two are numbers of every format, and no evidence of one.
    let told = values.clone().filter(|v| v.is_finite() && v.to_bits() << 12 != 0).count();
    let coarse = [7, 10, 23].into_iter().find(|&bits| told > 0 && fits(bits));
    (-f64::from(coarse.unwrap_or(52))).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_binomial_is_what_the_definition_gives() {
        assert!((binomial_tail(3, 2, 0.5) - 0.5).abs() < 1e-12);
        assert!((binomial_tail(88, 88, 0.9) - 0.9f64.powi(88)).abs() < 1e-12);
        assert_eq!(binomial_tail(10, 0, 0.3), 1.0);
    }

    #[test]
    fn the_format_of_values_is_seen_in_their_bits() {
        let spacing_of = |values: &[f64]| spacing(values.iter().copied());
        assert_eq!(spacing_of(&[1.0078125, 3.0]), 2f64.powi(-7));
        assert_eq!(spacing_of(&[f64::from(0.1f32)]), 2f64.powi(-23));
        assert_eq!(spacing_of(&[0.1]), 2f64.powi(-52));
        assert_eq!(spacing_of(&[1.0, f64::NAN]), 2f64.powi(-52));
    }
}
