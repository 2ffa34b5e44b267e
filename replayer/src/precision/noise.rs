//! Measures the noise of a computed function by ECnoise (Moré and Wild 2011, "Estimating
//! computational noise", SIAM J. Sci. Comput. 33(3), section 5).
//!
//! Differences of values at equally spaced points are taken until the smooth part has vanished. The
//! k-th differences of noise of standard deviation σ have the mean square `σ² (2k)!/(k!)²`, for
//! every k.

/// Points of one estimate: the paper uses 7 to 9.
pub const POINTS: usize = 9;

/// Three successive levels that agree within this factor measure the noise.
const AGREE: f64 = 4.0;

/// If the values differ by more than this share, the points are too far apart.
const FAR: f64 = 0.1;

/// The result of an estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Estimate {
    /// The standard deviation of the noise.
    Noise(f64),
    /// Half of the values are equal: the points lie too close.
    TooClose,
    /// The function itself is still in the differences: the points lie too far apart.
    TooFar,
    /// A value is not finite.
    NotFinite,
}

/// The noise in values at equally spaced points.
pub fn estimate(values: &[f64]) -> Estimate {
    if !values.iter().all(|x| x.is_finite()) {
        return Estimate::NotFinite;
    }
    let (low, high) =
        values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &x| (a.min(x), b.max(x)));
    if (high - low) > FAR * high.abs().max(low.abs()) {
        return Estimate::TooFar;
    }
    let mut differences = values.to_vec();
    let (mut scale, mut levels) = (1.0, Vec::new());
    for order in 1..values.len() {
        differences = differences.windows(2).map(|pair| pair[1] - pair[0]).collect();
        if order == 1 && 2 * differences.iter().filter(|x| **x == 0.0).count() >= values.len() {
            return Estimate::TooClose;
        }
        let k = order as f64;
        scale *= 0.5 * k / (2.0 * k - 1.0);
        let mean = differences.iter().map(|x| x * x).sum::<f64>() / differences.len() as f64;
        let signs = differences.iter().any(|x| *x < 0.0) && differences.iter().any(|x| *x > 0.0);
        levels.push(((scale * mean).sqrt(), signs));
    }
    let steady = |three: &&[(f64, bool)]| {
        let low = three.iter().fold(f64::INFINITY, |low, level| low.min(level.0));
        let high = three.iter().fold(0.0, |high: f64, level| high.max(level.0));
        three[0].1 && high <= AGREE * low
    };
    match levels[..levels.len() - 1].windows(3).find(steady) {
        Some(levels) => Estimate::Noise(levels[0].0),
        None => Estimate::TooFar,
    }
}

/// The noise of a function near 0, from points whose distance starts at `spacing` and
/// is widened or narrowed tenfold until an estimate is found.
pub fn measure(function: impl Fn(f64) -> f64, spacing: f64) -> Option<f64> {
    let mut spacing = spacing;
    let mut before = None;
    for _ in 0..8 {
        let middle = (POINTS / 2) as f64;
        let values: Vec<f64> =
            (0..POINTS).map(|i| function((i as f64 - middle) * spacing)).collect();
        let factor = match estimate(&values) {
            Estimate::Noise(noise) => return Some(noise),
            Estimate::TooClose => 10.0,
            Estimate::TooFar => 0.1,
            Estimate::NotFinite => return None,
        };
        // If the points are too close at one distance and too far apart at the next, no distance
        // works.
        if before.is_some_and(|before: f64| before * factor == 1.0) {
            return None;
        }
        before = Some(factor);
        spacing *= factor;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    /// Goal: planted noise is measured within a factor of 4 by a single estimate, whatever the
    /// smooth part is.
    #[test]
    fn planted_noise_is_found_under_a_smooth_function() {
        for seed in 0..200 {
            let mut draw = Draw::new(seed);
            let sigma = 1e-7;
            let values: Vec<f64> = (0..POINTS)
                .map(|i| 3.5 + (1e-3 * i as f64).sin() + sigma * draw.normal())
                .collect();
            let Estimate::Noise(noise) = estimate(&values) else { panic!("seed {seed}") };
            assert!((0.25..4.0).contains(&(noise / sigma)), "seed {seed}: {noise:e}");
        }
    }

    #[test]
    fn the_mean_over_many_estimates_is_the_noise() {
        let squared_noise = |seed| {
            let mut draw = Draw::new(seed);
            let values: Vec<f64> = (0..POINTS).map(|_| 3.5 + 1e-7 * draw.normal()).collect();
            let Estimate::Noise(noise) = estimate(&values) else { panic!("seed {seed}") };
            noise * noise
        };
        let mean = ((0..400).map(squared_noise).sum::<f64>() / 400.0).sqrt();
        assert!((mean / 1e-7 - 1.0).abs() < 0.15, "{mean:e}");
    }

    #[test]
    fn a_constant_is_too_close_a_slope_too_far_and_nan_has_no_noise() {
        assert_eq!(estimate(&[1.0; POINTS]), Estimate::TooClose);
        let slope: Vec<f64> = (0..POINTS).map(|i| 1.0 + i as f64).collect();
        assert_eq!(estimate(&slope), Estimate::TooFar);
        assert_eq!(estimate(&[1.0, f64::NAN, 1.0, 1.0]), Estimate::NotFinite);
        assert_eq!(measure(|_| f64::NAN, 1e-3), None);
    }

    #[test]
    fn the_distance_of_the_points_is_found_from_a_bad_start() {
        let rounded = |x: f64| f64::from((3.5 + x.sin()) as f32);
        for start in [1e-1, 1e-9] {
            let noise = measure(rounded, start).unwrap();
            // Rounding to f32 at 3.5 has a uniform error of at most half a spacing of 2.4e-7.
            assert!((0.25..4.0).contains(&(noise / (2.4e-7 / 12f64.sqrt()))), "{noise:e}");
        }
    }
}
