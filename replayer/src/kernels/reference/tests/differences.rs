//! Gradients against differences of the loss, with a step chosen by measured noise.
//!
//! The noise of a computed loss is estimated from a difference table: ECnoise of Moré and
//! Wild, "Estimating computational noise" (SIAM J. Sci. Comput. 33, 2011). The step is
//! then the one that balances noise and truncation ("Estimating derivatives of noisy
//! simulations", ACM TOMS 38, 2012, for central differences). Where both are measured,
//! no tolerance is left to choose.

use super::*;
use crate::kernels::matrix::{HeadInputs, Matrix, Values};

/// Standard deviation of the noise of a smooth function near 0.
///
/// Differences of order k of evenly spaced values lose the smooth part and keep the
/// noise, with variance `(2k)! / (k!)²` times its own. A level is believed when it and the
/// next two agree within a factor of 4 and the differences change sign. Never less than
/// the rounding of the value itself, which an exactly linear f may hide in a pattern.
pub(super) fn noise_of(f: &dyn Fn(f64) -> f64) -> f64 {
    let rounding_of_result = f64::EPSILON / 12f64.sqrt() * f(0.0).abs();
    // Begins with a spacing so small that the smooth part vanishes at the third level; widens it if
    // values are equal, narrows it if the function is not smooth.
    let levels: Vec<_> = [1e-9, 1e-7, 1e-11].into_iter().map(|step| levels(f, step)).collect();
    let believed = levels.iter().flat_map(|levels| levels.windows(3)).find(|three| {
        let sizes = three.iter().map(|level| level.0);
        let (low, high) = (sizes.clone().fold(f64::MAX, f64::min), sizes.fold(0.0, f64::max));
        three[0].1 && high <= 4.0 * low
    });
    // If no level agrees, the largest estimate of the higher levels is used, which overstates the
    // noise.
    let largest = || levels[0][2..].iter().fold(0.0f64, |max, level| max.max(level.0));
    believed.map_or_else(largest, |three| three[0].0).max(rounding_of_result)
}

/// Each level's estimate of the noise, and whether its differences change sign.
fn levels(f: &dyn Fn(f64) -> f64, spacing: f64) -> Vec<(f64, bool)> {
    const INTERVALS: usize = 8;
    let place = |i: usize| spacing * (i as f64 - INTERVALS as f64 / 2.0);
    let mut table: Vec<f64> = (0..=INTERVALS).map(|i| f(place(i))).collect();
    let mut factor = 1.0;
    let mut estimates = Vec::new();
    for k in 1..INTERVALS {
        table = table.windows(2).map(|pair| pair[1] - pair[0]).collect();
        factor *= k as f64 / (2.0 * (2 * k - 1) as f64);
        let mean = table.iter().map(|x| x * x).sum::<f64>() / table.len() as f64;
        let turns = table.iter().any(|&x| x < 0.0) && table.iter().any(|&x| x > 0.0);
        estimates.push(((factor * mean).sqrt(), turns));
    }
    estimates
}

/// The derivative of f at 0, with a bound of its error.
pub(super) fn derivative(f: &dyn Fn(f64) -> f64) -> (f64, f64) {
    // The estimate of the noise is good within a factor of 4.
    let noise = 4.0 * noise_of(f);
    let coarse = 1e-2;
    let third = (f(2.0 * coarse) - 2.0 * f(coarse) + 2.0 * f(-coarse) - f(-2.0 * coarse)).abs()
        / (2.0 * coarse.powi(3));
    let step = (3.0 * noise / third).cbrt().min(coarse);
    let central = |step: f64| (f(step) - f(-step)) / (2.0 * step);
    let (near, far) = (central(step), central(2.0 * step));
    // A difference of two evaluations has √2 of the noise of one, six deviations are
    // allowed; doubling the step shows three times the truncation.
    (near, 6.0 * noise / (2.0f64.sqrt() * step) + (far - near).abs())
}

#[test]
fn noise_that_was_put_in_is_found_within_a_factor_of_four() {
    for (sigma, slope) in [(1e-6, 1.0), (1e-9, 3.0), (1e-12, 0.0)] {
        // Uniform noise of deviation sigma, a hash of the argument.
        let noisy = |x: f64| {
            let bits = x.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let uniform = (bits >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
            (slope * x).sin() + 0.5 + sigma * 12f64.sqrt() * uniform
        };
        let noise = noise_of(&noisy);
        assert!(noise <= 4.0 * sigma && noise >= sigma / 4.0, "{noise} is not {sigma}");
    }
}

/// q, k, bias and given logits: what the loss is differentiated by.
type Point = [Vec<f64>; 4];

fn point(fixture: &Fixture) -> Point {
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect();
    [
        wide(&fixture.q),
        wide(&fixture.k),
        fixture.bias.clone().unwrap_or_default(),
        fixture.given.clone().unwrap_or_default(),
    ]
}

/// The loss whose gradient the backward pass claims to give, at fixed cotangents.
fn loss(fixture: &Fixture, [q, k, bias, given]: &Point) -> f64 {
    let mut inputs: HeadInputs = fixture.inputs();
    inputs.q.values = Values::F64(q);
    inputs.k.values = Values::F64(k);
    inputs.bias = inputs.bias.map(|_| &bias[..]);
    inputs.given = inputs.given.map(|matrix| Matrix { values: Values::F64(given), ..matrix });
    let result = forward(&inputs, SMALL_TILES, &NoProgress);
    let term = |t: usize| {
        f64::from(fixture.g_lse[t]) * result.lse[t]
            + f64::from(fixture.g_label[t]) * result.label_logits[t]
            + f64::from(fixture.smooth[t]) * result.logit_sum[t]
    };
    (0..fixture.tokens).map(term).sum()
}

/// The gradients that go with `point`.
fn gradients(fixture: &Fixture) -> Point {
    let lse = forward(&fixture.inputs(), SMALL_TILES, &NoProgress).lse;
    let (dq, dk) = run(fixture, &lse, SMALL_TILES);
    let plane = run_plane(fixture, &lse, SMALL_TILES, &NoProgress);
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
    [
        sum(&dq.dq_lse, &dq.dq_label),
        sum(&dk.lse, &dk.label),
        sum(&dk.bias_lse, &dk.bias_label),
        plane.dlogits,
    ]
}

/// Whether a value belongs to a padded column or an ignored token: the loss does not depend on it,
/// so that there is no noise to measure.
fn is_constant(fixture: &Fixture, part: usize, index: usize) -> bool {
    let (depth, vocab) = (fixture.depth.max(1), fixture.vocab);
    let ignored = |t: usize| fixture.labels[t] == IGNORED;
    match part {
        0 => ignored(index / depth),
        1 => index / depth >= fixture.valid,
        2 => index >= fixture.valid,
        _ => ignored(index / vocab) || index % vocab >= fixture.valid,
    }
}

fn assert_gradients_are_differences(fixture: &Fixture) {
    let (origin, gradients) = (point(fixture), gradients(fixture));
    for part in 0..4 {
        let (mut widest, mut largest) = (0.0f64, 0.0f64);
        for index in 0..origin[part].len() {
            let gradient = gradients[part][index];
            if is_constant(fixture, part, index) {
                assert_eq!(gradient, 0.0, "part {part}[{index}]");
                continue;
            }
            let along = |offset: f64| {
                let mut moved = origin.clone();
                moved[part][index] += offset;
                loss(fixture, &moved)
            };
            let (wanted, allowed) = derivative(&along);
            assert!(
                (gradient - wanted).abs() <= allowed,
                "part {part}[{index}]: {gradient} is not {wanted} within {allowed}"
            );
            widest = widest.max(allowed);
            largest = largest.max(gradient.abs());
        }
        assert!(widest <= 1e-6 * largest, "part {part}: {widest} says nothing of {largest}");
    }
}

#[test]
fn gradients_are_differences_of_the_loss_for_every_option() {
    let plain = Fixture::new(9, 4, 23, 19);
    let mut scaled = plain.clone().with_bias();
    scaled.transform.scale = 1.7;
    for fixture in [
        plain.clone(),
        plain.clone().with_smoothing(),
        scaled,
        with_options(plain.clone()),
        with_options(plain).with_given(),
    ] {
        assert_gradients_are_differences(&fixture);
    }
}
