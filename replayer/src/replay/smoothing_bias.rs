//! The dense entries of a head whose p was rounded before, whose roundings are one error.

use super::correlated_errors::MeanError;
use crate::kernels::TokenCotangents;
use crate::kernels::round::Precision;

/// Entries of a binade that the mean error of its entries is taken from.
const ENTRIES: usize = 1 << 13;

/// The mean relative error of rounding the dense entries `g_lse p - g_smooth` to a format, `p`
/// of few bits already: the largest over the binades that p may lie in.
///
/// All p of a binade are multiples of one spacing, so where g changes no digit (a power of
/// two) all their entries lie equally far beside the multiples of it, by what smoothing takes
/// off each: they round to one side by the same amount. Where g has more digits, or p was
/// not rounded before, the entries fall anywhere between and their mean error is next to 0.
pub(super) fn of_smoothed_entries(
    p: Precision,
    to: Precision,
    (g_lse, g_smooth): (&[f64], &[f64]),
) -> f64 {
    let counted: Vec<usize> = (0..g_lse.len()).filter(|&t| g_lse[t] != 0.0).collect();
    let constant = |&t: &usize| (g_smooth[t] / g_lse[t]).abs();
    let least = counted.iter().map(constant).fold(f64::INFINITY, f64::min);
    if p.keeps_f32() || to.keeps_f32() || !(least < 1.0) {
        return 0.0;
    }
    let steps = (0.5 / p.unit_roundoff()) as usize;
    let every = (counted.len() * steps / ENTRIES).max(1);
    // Below what is taken off it p no longer makes the entry; where that is nothing, the entries of
    // all binades err alike.
    let binades = if least > 0.0 { least.log2().floor() as i32..0 } else { -1..0 };
    let error_of_binade = |exponent: i32| {
        let spacing = f64::from(exponent).exp2() / steps as f64;
        let multiples = (steps..2 * steps).map(|j| p.round64(spacing * j as f64));
        let multiples: Vec<f64> = multiples.collect();
        let tokens = counted.iter().step_by(every);
        let entries = tokens.flat_map(|&t| {
            let token = TokenCotangents { lse: g_lse[t], label: 0.0, smooth: g_smooth[t] };
            multiples.iter().map(move |&p| token.dense(p))
        });
        MeanError::of(entries, to).most()
    };
    binades.map(error_of_binade).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::correlated_errors::LAST_BITS;

    /// What is found of one g, of 527 classes and a smoothing of a tenth.
    fn of(p: Precision, g: f64, smoothing: f64) -> f64 {
        let smooth = -g * smoothing / 527.0;
        of_smoothed_entries(p, Precision::Bf16, (&[g], &[smooth]))
    }

    /// Goal: entries of a rounded p are known to err to one side where g is a power of two,
    /// and not where its digits put them anywhere between two numbers.
    #[test]
    fn only_a_factor_that_keeps_the_grid_moves_all_entries_alike() {
        let u = Precision::Bf16.unit_roundoff();
        let kept = of(Precision::Bf16, -0.5, 0.1);
        assert!(kept > 0.3 * u && kept <= u, "{}", kept / u);
        let moved = of(Precision::Bf16, -0.5 / 1.37, 0.1);
        assert!(moved < 0.3 * kept, "{} {}", moved / u, kept / u);
    }

    /// Goal: entries of a rounded p times nearly -1/2 are p/2: what z-loss added to g is lost of all.
    #[test]
    fn a_factor_next_to_a_power_of_two_is_rounded_away_from_all_entries() {
        let error = of(Precision::Bf16, -0.5006, 0.0);
        assert!((error - 1.2e-3).abs() < 1e-5, "{error}");
        let u = Precision::Bf16.unit_roundoff();
        assert!(of(Precision::Bf16, -0.5 / 1.37, 0.0) < 0.1 * u);
    }

    #[test]
    fn without_smoothing_or_without_a_rounded_p_there_is_no_grid() {
        // What the job's own g is off by is rounded away.
        assert!(of(Precision::Bf16, -0.5, 0.0) <= 1.01 * LAST_BITS);
        assert_eq!(of(Precision::F32, -0.5, 0.1), 0.0);
        assert_eq!(of_smoothed_entries(Precision::Bf16, Precision::Bf16, (&[], &[])), 0.0);
    }

    /// Goal: the error is that of the entries themselves: all p of one binade, less what
    /// smoothing takes off.
    #[test]
    fn the_entries_of_one_binade_err_by_what_is_found_at_most() {
        let (to, c) = (Precision::Bf16, 0.1 / 527.0);
        let error = of(Precision::Bf16, 1.0, 0.1);
        let entries = (128..256).map(|j| f64::from(j) / 65536.0 - c);
        let (off, total) = entries
            .fold((0.0, 0.0), |(off, total), x| (off + (to.round64(x) - x) * x, total + x * x));
        let mean: f64 = off / total;
        assert!(mean.abs() > 1e-3 && mean.abs() <= error * (1.0 + 1e-9), "{mean} {error}");
    }
}
