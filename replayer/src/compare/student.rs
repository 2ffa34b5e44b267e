//! Tails of Student's t: what an error bar is worth when few rows made it.

/// The `t` that |T| of `freedom` degrees exceeds with probability `exp(-x)`.
///
/// `P(|T| > t) = I_w(freedom/2, 1/2)` with `w = freedom / (freedom + t²)` (Abramowitz
/// and Stegun 26.7.1, 26.5.27), inverted by bisection of log t.
pub fn quantile(freedom: f64, x: f64) -> f64 {
    if !(freedom > 0.0) {
        return f64::INFINITY;
    }
    let wanted = (-x).exp();
    let tail = |t: f64| beta(freedom / (freedom + t * t), freedom / 2.0, 0.5);
    let (mut low, mut high) = (-20.0, 60.0);
    for _ in 0..200 {
        let middle = (low + high) / 2.0;
        if tail(f64::exp(middle)) > wanted { low = middle } else { high = middle }
    }
    f64::exp(high)
}

/// The regularised incomplete beta function `I_w(a, b)`, by its continued fraction
/// (Abramowitz and Stegun 26.5.8) evaluated after Lentz.
fn beta(w: f64, a: f64, b: f64) -> f64 {
    if w <= 0.0 || w >= 1.0 {
        return w.clamp(0.0, 1.0);
    }
    if w > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - beta(1.0 - w, b, a);
    }
    let gamma = libm::lgamma(a + b) - libm::lgamma(a) - libm::lgamma(b);
    let front = (gamma + a * w.ln() + b * (1.0 - w).ln()).exp() / a;
    let tiny = |x: f64| if x.abs() < 1e-300 { 1e-300 } else { x };
    let (mut c, mut d) = (1.0, 1.0 / tiny(1.0 - (a + b) * w / (a + 1.0)));
    let mut fraction = d;
    for m in 1..500 {
        let m = f64::from(m);
        let even = m * (b - m) * w / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * w / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut change = 1.0;
        for term in [even, odd] {
            d = 1.0 / tiny(1.0 + term * d);
            c = tiny(1.0 + term / c);
            change = c * d;
            fraction *= change;
        }
        if (change - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front * fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of printed tables: one degree of freedom is the Cauchy distribution, many
    /// are the normal.
    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (freedom, tail, wanted) in [
            (1.0, 0.05, 12.706_204_736),
            (1.0, 1e-4, 6_366.197_671),
            (2.0, 0.05, 4.302_652_730),
            (5.0, 0.01, 4.032_142_984),
            (10.0, 0.05, 2.228_138_852),
            (1e7, 0.05, 1.959_964),
        ] {
            let found = quantile(freedom, -f64::ln(tail));
            assert!((found / wanted - 1.0).abs() < 2e-6, "{freedom} {tail}: {found}");
        }
        assert_eq!(quantile(0.0, 9.0), f64::INFINITY);
        assert_eq!(quantile(f64::NAN, 9.0), f64::INFINITY);
    }
}
