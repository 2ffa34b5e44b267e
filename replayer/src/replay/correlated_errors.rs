//! Sums of addends that are nearly equal, whose roundings do not average out.
//!
//! A partial sum in the binade of spacing `U` is a multiple of `U`, so adding `x` to any
//! of them errs by what rounding `x` itself to `U` does: equal addends err alike, however
//! they are ordered. The √n law of `rounding_variance` takes them for independent. Heads that
//! start at zero, or near it, have such sums at step 0: the exponentials of a token, the
//! losses of all tokens, the entries of dlogits that dbias sums.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::compare::ONE_ROUNDING;
use crate::kernels::policy::{Order, Sum};
use crate::kernels::round::Precision;

/// Relative variance, alike for sums that are alike, of a sum of `n` addends whose
/// relative standard deviation is `spread`; 0 where they spread over several spacings.
///
/// The spacing at the whole sum is between `n u` and `2 n u` addends. Each partial sum
/// `s_k` errs by `u s_k` at most, to one side: `Σ u s_k` is `u n/2` times the total.
pub(super) fn nearly_equal(sum: Sum, n: f64, spread: f64) -> f64 {
    let u = sum.unit();
    let additions = match sum.order {
        Order::Native | Order::Sequential => n,
        Order::Blocked(block) => {
            let block = (block.max(1) as f64).min(n);
            block + n / block
        }
        Order::Pairwise | Order::Kahan | Order::Neumaier => return 0.0,
    };
    // A sum in a low precision stops growing: what that loses is counted elsewhere.
    match spread < 2.0 * u * additions && sum.precision.keeps_f32() {
        true => (u * additions / 2.0).powi(2) / ONE_ROUNDING,
        false => 0.0,
    }
}

/// Relative standard deviation of `n` addends of that total and squares.
pub(super) fn spread(n: f64, total: f64, squares: f64) -> f64 {
    match total == 0.0 {
        true => f64::INFINITY,
        false => (n * squares / (total * total) - 1.0).max(0.0).sqrt(),
    }
}

/// Variance of summing addends one after the other: every partial sum is rounded once.
pub(super) fn sequential_variance(sum: Sum, addends: &[f64]) -> f64 {
    let u = sum.unit();
    let partial = addends.iter().scan(0.0, |sum, x| {
        *sum += x;
        Some(*sum * *sum)
    });
    u * u / 3.0 * partial.sum::<f64>()
}

/// How far summing these one after the other may be off because many round to the same
/// side: for each binade that the partial sums pass, the addends' mean error there.
pub(super) fn one_sided_error(sum: Sum, addends: &[f64]) -> f64 {
    if !sum.precision.keeps_f32() || sum.precision == Precision::F64 {
        return 0.0;
    }
    if !addends.iter().sum::<f64>().is_finite() {
        return 0.0;
    }
    let u = sum.unit();
    // Partial sums in each binade, by its exponent: of addends of either sign they come back.
    let mut passed: BTreeMap<i32, usize> = BTreeMap::new();
    let mut partial = 0.0f64;
    for x in addends {
        partial += x;
        if partial != 0.0 {
            *passed.entry(partial.abs().log2().floor() as i32).or_default() += 1;
        }
    }
    let error_of_binade = |(exponent, count): (i32, usize)| {
        let spacing = 2.0 * u * f64::from(exponent).exp2();
        if spacing > 0.0 { count as f64 * mean_error(addends, spacing) } else { 0.0 }
    };
    passed.into_iter().map(error_of_binade).sum()
}

/// The addends' mean error of rounding to multiples of a spacing, beyond what it is by
/// chance. An addend that lies near a tie may go to either side: moved by an eighth of
/// the spacing they all go to one.
fn mean_error(addends: &[f64], spacing: f64) -> f64 {
    let n = addends.len() as f64;
    let error = |x: f64| (x / spacing).round_ties_even() - x / spacing;
    let mean = |by: f64| addends.iter().map(|x| error(x + by * spacing)).sum::<f64>() / n;
    let most = [-0.125, 0.0, 0.125].map(|by| mean(by).abs()).into_iter().fold(0.0, f64::max);
    spacing * (most - 2.0 / (12.0 * n).sqrt()).max(0.0)
}

/// Products that the mean error of all is taken from.
const PRODUCTS: usize = 1 << 16;

/// The mean relative error of rounding the label's addends `g x` to a format, `x` the rows
/// that the counted tokens take: of q for dk, of k for dq.
///
/// Numbers of few bits times one number that all tokens share err to one side: q in bf16
/// times 1/1023 lies just above q/1024, and rounds down to it every time. Where a product
/// lies near a tie, the last bits of g decide for all of them alike.
pub(super) fn of_label_addends(
    to: Precision,
    g: &[f64],
    row: impl Fn(usize) -> Vec<f64> + Sync,
) -> f64 {
    let counted: Vec<usize> = (0..g.len()).filter(|&t| g[t] != 0.0).collect();
    let Some(&first) = counted.first() else { return 0.0 };
    let step = (counted.len() * row(first).len() / PRODUCTS).max(1);
    let of_token = |&t: &usize| MeanError::of(row(t).into_iter().map(|x| g[t] * x), to);
    let chosen: Vec<usize> = counted.into_iter().step_by(step).collect();
    let each: Vec<MeanError> = chosen.par_iter().with_min_len(16).map(of_token).collect();
    let mut all = MeanError::default();
    each.iter().for_each(|errors| all.join(errors));
    all.most()
}

/// How far a job's numbers may be off by their own rounding: a few units of f32.
pub(super) const LAST_BITS: f64 = 2.4e-7;

/// The mean relative error of rounding numbers to a format, each by its energy. Where numbers lie
/// near a tie their last bits decide for all of them alike, so they are rounded as they are, and
/// moved by those bits to either side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MeanError {
    /// Sums of errors times numbers, and of squared numbers: moved down, as they are, moved up.
    sums: [(f64, f64); 3],
}

impl MeanError {
    /// Of these numbers.
    pub(super) fn of(numbers: impl Iterator<Item = f64>, to: Precision) -> MeanError {
        let mut errors = MeanError::default();
        for x in numbers {
            for (shift, (error, squares)) in
                [-LAST_BITS, 0.0, LAST_BITS].into_iter().zip(&mut errors.sums)
            {
                let x = x * (1.0 + shift);
                *error += (to.round64(x) - x) * x;
                *squares += x * x;
            }
        }
        errors
    }

    /// Adds other numbers.
    pub(super) fn join(&mut self, other: &MeanError) {
        for (sum, more) in self.sums.iter_mut().zip(&other.sums) {
            *sum = (sum.0 + more.0, sum.1 + more.1);
        }
    }

    /// Sums of errors times numbers and of squares, of the numbers as they are.
    pub(super) fn sums(&self) -> (f64, f64) {
        self.sums[1]
    }

    /// The size of the mean, the largest of the three; 0 where there is no number.
    pub(super) fn most(&self) -> f64 {
        let mean = |(error, squares): (f64, f64)| {
            if squares > 0.0 { (error / squares).abs() } else { 0.0 }
        };
        self.sums.map(mean).into_iter().filter(|x| x.is_finite()).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Allowed;
    use crate::compare::allowance::{Allowance, LABEL, Label, OfColumn, OfRow, Sums};
    use crate::replay::rounding_variance::summed_by;

    /// Numbers of -0.5 to 0.5.
    fn uniform() -> impl FnMut() -> f64 {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        }
    }

    fn wide(addends: &[f32]) -> Vec<f64> {
        addends.iter().map(|&x| f64::from(x)).collect()
    }

    fn error(addends: &[f32]) -> f64 {
        let sum: f32 = addends.iter().sum();
        (f64::from(sum) - wide(addends).iter().sum::<f64>()).abs()
    }

    /// Goal: no sum of equal, nearly equal or repeated addends errs more than is allowed,
    /// which five standard deviations of independent roundings do not allow.
    #[test]
    fn addends_that_are_alike_err_within_what_is_allowed() {
        let mut uniform = uniform();
        let mut beyond = 0;
        for draw in 0..300 {
            let (first, second) = (uniform() + 10.5, uniform() + 10.5);
            let spread = [0.0, 1e-6, 1e-4, 1e-2][draw % 4];
            let addend = |at: usize, uniform: &mut dyn FnMut() -> f64| {
                let base = if draw % 3 == 0 && at.is_multiple_of(2) { second } else { first };
                (base + spread * uniform()) as f32
            };
            let addends: Vec<f32> = (0..5000).map(|at| addend(at, &mut uniform)).collect();
            let wide_addends = wide(&addends);
            let random = sequential_variance(Sum::NATIVE, &wide_addends).sqrt();
            let side = one_sided_error(Sum::NATIVE, &wide_addends);
            let error = error(&addends);
            assert!(error < side + 5.0 * random, "draw {draw}: {error} {side} {random}");
            beyond += usize::from(error > 5.0 * random);
        }
        assert!(beyond > 50, "{beyond} of 300 draws needed it");
    }

    /// Goal: a row of few distinct addends, each of many copies, errs beyond what is allowed of
    /// addends that differ, and within what copies are allowed, their largest error included.
    #[test]
    fn copies_of_few_addends_err_within_what_copies_are_allowed() {
        let mut uniform = uniform();
        let (mut beyond, copies) = (0, 500);
        for distinct in [1, 2, 5].repeat(60) {
            let values: Vec<f32> = (0..distinct).map(|_| uniform() as f32 + 1.0).collect();
            let addends: Vec<f32> =
                (0..distinct * copies).map(|at| values[at % distinct]).collect();
            let wide_addends = wide(&addends);
            let (n, total) = (wide_addends.len() as f64, wide_addends.iter().sum::<f64>());
            let squares: f64 = wide_addends.iter().map(|x| x * x).sum();
            let apart = Sum::NATIVE.variance(n, total, squares);
            let (label_total, label_squares) = summed_by(Sum::NATIVE, n);
            let copied = Sum::NATIVE.unit() * n;
            let row = OfRow { hits: n, label_total, label_squares, copied, ..OfRow::default() };
            let label = Label { copies: 1, ..Label::default() };
            let stage = Allowance { parts: LABEL, label, ..Allowance::default() };
            let allowed = |alike: f64| {
                let sums = Sums {
                    y: total,
                    label_squares: squares,
                    label_alike: alike,
                    ..Sums::default()
                };
                stage.of(&sums, &row, &OfColumn::default())
            };
            let Allowed { own, most, .. } = allowed(copies as f64 * squares);
            let error = error(&addends);
            let reach = (5.0 * own.sqrt()).min(5.0 * apart.sqrt() + most);
            assert!(error < reach, "{error} {reach}");
            beyond += usize::from(error > 5.0 * apart.sqrt());
            assert!(
                allowed(squares).most == 0.0 && (allowed(squares).own / apart - 1.0).abs() < 1e-12
            );
        }
        assert!(beyond > 20, "{beyond} of 180 draws needed it");
    }

    /// Goal: g of 1023 tokens times numbers of bf16 is known to err to one side, by a
    /// quarter of u, and g of 1000 tokens not to.
    #[test]
    fn a_factor_just_above_a_power_of_two_rounds_all_products_down() {
        let mut uniform = uniform();
        let rows: Vec<Vec<f64>> = (0..500)
            .map(|_| (0..64).map(|_| Precision::Bf16.round64(uniform())).collect())
            .collect();
        let error_for = |tokens: f64| {
            let g = vec![1.0 / tokens; rows.len()];
            of_label_addends(Precision::Bf16, &g, |t| rows[t].clone())
        };
        let u = Precision::Bf16.unit_roundoff();
        assert!((error_for(1023.0) / (0.25 * u) - 1.0).abs() < 0.05, "{}", error_for(1023.0) / u);
        assert!(
            error_for(1000.0) < 0.05 * u && error_for(1024.0) < 1e-3 * u,
            "{} {}",
            error_for(1000.0),
            error_for(1024.0)
        );
    }

    /// Goal: what is no number, and sums that change their sign at every step, end at once.
    #[test]
    fn addends_that_are_no_numbers_or_of_either_sign_are_walked_once() {
        for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX] {
            assert_eq!(one_sided_error(Sum::NATIVE, &[1.0, wrong, wrong, 2.0]), 0.0, "{wrong}");
        }
        let signs: Vec<f64> = (0..200_000).map(|at| if at % 2 == 0 { 1.5 } else { -1.5 }).collect();
        assert!(one_sided_error(Sum::NATIVE, &signs).is_finite());
    }

    #[test]
    fn addends_that_differ_are_given_next_to_nothing() {
        let mut uniform = uniform();
        for _ in 0..50 {
            let addends: Vec<f32> = (0..5000).map(|_| uniform() as f32 + 10.0).collect();
            let wide_addends = wide(&addends);
            let side = one_sided_error(Sum::NATIVE, &wide_addends);
            assert!(side < sequential_variance(Sum::NATIVE, &wide_addends).sqrt(), "{side}");
        }
    }

    #[test]
    fn nearly_equal_exponentials_err_within_their_share_of_the_total() {
        let mut uniform = uniform();
        for draw in 0..100 {
            let spread = [1e-7, 1e-6, 1e-5, 1e-4][draw % 4];
            let addends: Vec<f32> =
                (0..3000).map(|_| (1.0 + spread * (uniform() - 0.5)) as f32).collect();
            let (n, total) = (addends.len() as f64, wide(&addends).iter().sum::<f64>());
            let deviation = spread / 12f64.sqrt();
            let alike = (ONE_ROUNDING * nearly_equal(Sum::NATIVE, n, deviation)).sqrt() * total;
            let random = Sum::NATIVE.variance(n, total, total * total / n).sqrt();
            let error = error(&addends);
            assert!(error < alike + 5.0 * random, "{spread}: {error} {alike} {random}");
        }
    }

    /// Goal: runs of addends of either sign, whose partial sums an order that does not
    /// know them underestimates.
    #[test]
    fn runs_of_alike_addends_err_within_the_variance_of_their_own_order() {
        let mut uniform = uniform();
        let (mut squared, mut known, mut unknown) = (0.0, 0.0, 0.0);
        for _ in 0..400 {
            let (mut base, mut addends) = (0.0, Vec::new());
            for index in 0..1200 {
                base = if index % 40 == 0 { uniform() } else { base };
                addends.push((base + 0.1 * uniform()) as f32);
            }
            let wide = wide(&addends);
            let total: f64 = wide.iter().sum();
            let squares = wide.iter().map(|x| x * x).sum();
            squared += error(&addends).powi(2);
            known += sequential_variance(Sum::NATIVE, &wide);
            unknown += Sum::NATIVE.variance(wide.len() as f64, total, squares);
        }
        assert!(squared < known, "{squared} {known}");
        assert!(unknown < known, "{unknown} {known}");
    }
}
