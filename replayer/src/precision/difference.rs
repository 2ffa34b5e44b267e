//! Compares finite differences with the exact derivative: their error at each step, the noise of
//! the loss, and the step with the smallest error.
//!
//! With noise of standard deviation σ the mean square errors are
//! `2σ²/h² + (h f''/2)²` forward and `σ²/(2h²) + (h² f'''/6)²` central, least at
//! `h = (8)^(1/4) (σ/|f''|)^(1/2)` and `h = (3σ/|f'''|)^(1/3)` (Moré and Wild 2012,
//! "Estimating derivatives of noisy simulations", ACM TOMS 38(3)).

use serde::Serialize;

use super::loss::Loss;
use super::noise;
use super::summation::F32;
use crate::draw::Draw;
use crate::kernels::logits::Direction;

/// How many decades of steps the table has: 10^-1 to 10^-9 of the scale.
const DECADES: i32 = 9;
/// Elements of q that the gradient check moves one at a time.
const ELEMENTS: usize = 48;
/// The step that gradient checks commonly use, whatever the precision.
pub const CHECK_STEP: f64 = 1e-5;

/// The input that is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Input {
    Q,
    K,
}

/// Errors at one step, relative to the derivative, root mean square over directions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AtStep {
    /// How far each element is moved, root mean square.
    pub step: f64,
    /// Forward difference of the f32 loss.
    pub forward_f32: f64,
    /// Central difference of the f32 loss.
    pub central_f32: f64,
    /// `u |loss| / step`.
    pub predicted: f64,
    /// Forward difference of the f64 loss.
    pub forward_f64: f64,
    /// Central difference of the f64 loss.
    pub central_f64: f64,
    /// Whether it is the best step of forward differences of the f32 loss.
    pub forward_best: Best,
    /// Whether it is the best step of central ones.
    pub central_best: Best,
}

/// By which criterion a step is the best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Best {
    /// It is not the best.
    #[default]
    No,
    /// Best according to noise and curvature.
    Predicted,
    /// Best by the errors in the table.
    Measured,
    /// Both.
    Both,
}

/// The differences along random directions of one input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Differences {
    /// The input that is varied.
    pub input: Input,
    /// Root mean square of the input's elements.
    pub scale: f64,
    /// Root mean square of the exact derivative over the directions.
    pub derivative: f64,
    /// Standard deviation of the f32 loss; absent where it could not be measured.
    pub noise: Option<f64>,
    /// Root mean square of the second derivative.
    pub second: f64,
    /// Root mean square of the third derivative.
    pub third: f64,
    /// The step that should be best for forward differences of the f32 loss.
    pub best_forward: Option<f64>,
    /// The step that should be best for central differences of the f32 loss.
    pub best_central: Option<f64>,
    /// The table, largest step first.
    pub steps: Vec<AtStep>,
}

/// A gradient check that moves one element of q at a time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Elements moved.
    pub elements: usize,
    /// The step taken.
    pub step: f64,
    /// `‖difference - gradient‖ / ‖gradient‖`, central, f32 loss.
    pub error: f64,
    /// The error predicted from noise and step.
    pub predicted: Option<f64>,
    /// The best step for these elements.
    pub best_step: Option<f64>,
    /// The error measured at it.
    pub best_error: Option<f64>,
}

/// Random directions, root mean square 1.
pub fn directions(loss: &Loss<'_>, input: Input, count: usize, draw: &mut Draw) -> Vec<Direction> {
    let d = loss.head.q.cols;
    let mut unit = |n: usize| {
        let values: Vec<f64> = (0..n).map(|_| draw.normal()).collect();
        let size = rms(values.iter().copied());
        values.into_iter().map(|x| x / size).collect::<Vec<f64>>()
    };
    match input {
        Input::Q => (0..count).map(|_| Direction::Q(unit(loss.tokens.len() * d))).collect(),
        Input::K => (0..count)
            .map(|n| {
                let row = unit(d);
                let seed = (row[0].to_bits() ^ n as u64).wrapping_mul(0x2545_f491_4f6c_dd1d);
                Direction::K { seed, row }
            })
            .collect(),
    }
}

/// Differences along these directions.
pub fn differences(
    loss: &Loss<'_>,
    input: Input,
    scale: f64,
    directions: &[Direction],
) -> Differences {
    let over = |of: &dyn Fn(&Direction) -> f64| rms(directions.iter().map(of));
    let exact: Vec<f64> = directions.iter().map(|by| loss.derivative(by)).collect();
    let derivative = rms(exact.iter().copied());
    let noise = noise_of(loss, scale, directions);
    let second = over(&|by| second(&|h| loss.at::<f64>(h, by), scale));
    let third = over(&|by| third(&|h| loss.at::<f64>(h, by), scale));
    let best_forward =
        noise.map(|noise| 8f64.powf(0.25) * (noise / second).sqrt()).filter(|h| *h <= scale);
    let best_central = noise.map(|noise| (3.0 * noise / third).cbrt()).filter(|h| *h <= scale);
    let mut wanted: Vec<(f64, Best, Best)> =
        (1..=DECADES).map(|n| (scale * 10f64.powi(-n), Best::No, Best::No)).collect();
    wanted.extend(best_forward.map(|h| (h, Best::Predicted, Best::No)));
    wanted.extend(best_central.map(|h| (h, Best::No, Best::Predicted)));
    wanted.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (narrow, wide) = (loss.total(&loss.token_losses::<f32>(None)), base(loss));
    let errors_at = |(step, forward_best, central_best): (f64, Best, Best)| {
        let errors_of_directions: Vec<[f64; 4]> = directions
            .iter()
            .zip(&exact)
            .map(|(by, exact)| {
                let (up, down) = (loss.at::<f32>(step, by), loss.at::<f32>(-step, by));
                let (above, below) = (loss.at::<f64>(step, by), loss.at::<f64>(-step, by));
                [
                    (up - narrow) / step - exact,
                    (up - down) / (2.0 * step) - exact,
                    (above - wide) / step - exact,
                    (above - below) / (2.0 * step) - exact,
                ]
            })
            .collect();
        let error = |which: usize| {
            rms(errors_of_directions.iter().map(|errors| errors[which])) / derivative
        };
        AtStep {
            step,
            forward_f32: error(0),
            central_f32: error(1),
            predicted: F32 * wide.abs() / step / derivative,
            forward_f64: error(2),
            central_f64: error(3),
            forward_best,
            central_best,
        }
    };
    let mut steps: Vec<AtStep> = wanted.into_iter().map(errors_at).collect();
    if let Some(best) = smallest(&steps, |step| step.forward_f32) {
        steps[best].forward_best = steps[best].forward_best.and_measured();
    }
    if let Some(best) = smallest(&steps, |step| step.central_f32) {
        steps[best].central_best = steps[best].central_best.and_measured();
    }
    Differences {
        input,
        scale,
        derivative,
        noise,
        second,
        third,
        best_forward,
        best_central,
        steps,
    }
}

/// Checks single elements of q, at the usual step and at the best one.
pub fn check(loss: &Loss<'_>, scale: f64, noise: Option<f64>, draw: &mut Draw) -> Check {
    let d = loss.head.q.cols;
    let narrow = loss.token_losses::<f32>(None);
    let moved: Vec<(Loss<'_>, usize, Direction)> = (0..ELEMENTS.min(loss.tokens.len() * d))
        .map(|_| {
            let (token, column) = (draw.below(loss.tokens.len()), draw.below(d));
            let mut unit = vec![0.0; d];
            unit[column] = 1.0;
            (loss.alone(token), token, Direction::Q(unit))
        })
        .collect();
    let gradient: Vec<f64> = moved.iter().map(|(loss, _, by)| loss.derivative(by)).collect();
    let size = rms(gradient.iter().copied());
    // Only one token's loss changes; those of the others are reused.
    let loss_at = |(one, token, by): &(Loss<'_>, usize, Direction), step: f64| {
        let mut losses = narrow.clone();
        losses[*token] = one.token_losses::<f32>(Some((step, by)))[0];
        loss.total(&losses)
    };
    let error = |step: f64| {
        let differences =
            moved.iter().map(|one| (loss_at(one, step) - loss_at(one, -step)) / (2.0 * step));
        rms(differences.zip(&gradient).map(|(difference, exact)| difference - exact)) / size
    };
    let third = rms(moved.iter().map(|(loss, _, by)| third(&|h| loss.at::<f64>(h, by), scale)));
    let best_step = noise.map(|noise| (3.0 * noise / third).cbrt()).filter(|h| *h <= scale);
    let expected = |noise: f64, h: f64| {
        ((noise / h).powi(2) / 2.0 + (h * h * third / 6.0).powi(2)).sqrt() / size
    };
    Check {
        elements: moved.len(),
        step: CHECK_STEP,
        error: error(CHECK_STEP),
        predicted: noise.map(|noise| expected(noise, CHECK_STEP)),
        best_step,
        best_error: best_step.map(error),
    }
}

fn smallest(steps: &[AtStep], error: impl Fn(&AtStep) -> f64) -> Option<usize> {
    let finite = (0..steps.len()).filter(|&at| error(&steps[at]).is_finite());
    finite.min_by(|&a, &b| error(&steps[a]).total_cmp(&error(&steps[b])))
}

impl Best {
    fn and_measured(self) -> Best {
        match self {
            Best::No | Best::Measured => Best::Measured,
            Best::Predicted | Best::Both => Best::Both,
        }
    }

    /// The word that the table shows.
    pub fn word(self) -> &'static str {
        match self {
            Best::No => "",
            Best::Predicted => "predicted",
            Best::Measured => "measured",
            Best::Both => "both",
        }
    }
}

fn base(loss: &Loss<'_>) -> f64 {
    loss.total(&loss.token_losses::<f64>(None))
}

/// The noise of the f32 loss, root mean square over the directions in which it can be measured.
fn noise_of(loss: &Loss<'_>, scale: f64, directions: &[Direction]) -> Option<f64> {
    let noise_along = |by: &Direction| noise::measure(|h| loss.at::<f32>(h, by), 1e-4 * scale);
    let noises: Vec<f64> = directions.iter().filter_map(noise_along).collect();
    (!noises.is_empty()).then(|| rms(noises.into_iter()))
}

/// The second derivative, by differences of the f64 loss. With a step of 10^-3 of the scale their
/// relative error from noise is 1e-10, from truncation 1e-6.
fn second(f: &dyn Fn(f64) -> f64, scale: f64) -> f64 {
    let h = 1e-3 * scale;
    (f(h) - 2.0 * f(0.0) + f(-h)) / (h * h)
}

/// The third derivative, with a step of 10^-2 of the scale: relative error from noise 1e-10, from
/// truncation 1e-4.
fn third(f: &dyn Fn(f64) -> f64, scale: f64) -> f64 {
    let h = 1e-2 * scale;
    (f(2.0 * h) - 2.0 * f(h) + 2.0 * f(-h) - f(-2.0 * h)) / (2.0 * h * h * h)
}

/// Root mean square; NaN if a value is NaN.
pub fn rms(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len() as f64;
    (values.map(|x| x * x).sum::<f64>() / n).sqrt()
}
