//! What a rank watches for: a loss or gradient norm that is not finite, a gradient norm above a
//! bound, and one far from its running median.
//!
//! Far is: more than `spread` times the robust deviation (1.4826 times the median
//! absolute deviation) of the logarithms of the last [`WINDOW`] norms away from
//! their median, in either direction. Of log-normal norms without trend, with
//! the window as it is estimated and not as it truly is, a step is called far
//! with a probability that a test below computes: below 1 in 10^9 at the
//! default of 10. Norms with heavier tails or a trend trigger more often.

use std::collections::VecDeque;

/// Norms that the median is taken over.
const WINDOW: usize = 64;

/// How many norms there must be before one is judged by their median: the deviation of fewer is too
/// uncertain.
const WARM_UP: usize = 64;

/// The least deviation of the logarithms that is assumed: norms that were all clipped to one value
/// do not deviate, and the first that differed by a rounding error would be far.
const LEAST_DEVIATION: f64 = 0.01;

/// A normal deviate's standard deviation over its median absolute deviation.
const NORMAL_OVER_MAD: f64 = 1.4826;

/// When a rank triggers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conditions {
    /// Largest gradient norm that is no trigger.
    pub grad_norm: Option<f64>,
    /// Deviations from the running median that are no trigger; `None`: any.
    pub spread: Option<f64>,
}

impl Default for Conditions {
    fn default() -> Conditions {
        Conditions { grad_norm: None, spread: Some(10.0) }
    }
}

/// The conditions, and the numbers of earlier steps that they need.
pub(crate) struct Watch {
    conditions: Conditions,
    /// Logarithms of the last norms that were positive and finite.
    window: VecDeque<f64>,
    /// Whether the last loss and the last norm were wrong: a number that stays wrong triggers once.
    loss_wrong: bool,
    norm_wrong: bool,
}

impl Watch {
    pub(crate) fn new(conditions: Conditions) -> Watch {
        Watch { conditions, window: VecDeque::new(), loss_wrong: false, norm_wrong: false }
    }

    /// Why these numbers trigger a recording, if they do and the numbers before them did not.
    pub(crate) fn judge(&mut self, loss: Option<f64>, grad_norm: Option<f64>) -> Option<String> {
        let loss = loss.and_then(|loss| {
            let why = (!loss.is_finite()).then(|| format!("the loss is {loss}"));
            let before = std::mem::replace(&mut self.loss_wrong, why.is_some());
            why.filter(|_| !before)
        });
        let norm = grad_norm.and_then(|norm| {
            let why = self.norm_fault(norm);
            let before = std::mem::replace(&mut self.norm_wrong, why.is_some());
            why.filter(|_| !before)
        });
        loss.or(norm)
    }

    fn norm_fault(&mut self, norm: f64) -> Option<String> {
        if !norm.is_finite() {
            return Some(format!("grad_norm is {norm}"));
        }
        let far = self.far(norm);
        if let Some(bound) = self.conditions.grad_norm
            && !(norm <= bound)
        {
            return Some(format!("grad_norm {norm} is above {bound}"));
        }
        far
    }

    /// Judges a norm by those before it, then remembers it.
    fn far(&mut self, norm: f64) -> Option<String> {
        // A norm of 0 has no logarithm; gradients that vanish show in the loss.
        if norm <= 0.0 {
            return None;
        }
        let log = norm.ln();
        let fault =
            self.conditions.spread.filter(|_| self.window.len() >= WARM_UP).and_then(|most| {
                let (center, deviation) = center_and_deviation(&self.window);
                let away = (log - center) / deviation.max(LEAST_DEVIATION);
                (!(away.abs() <= most)).then(|| {
                let typical = center.exp();
                format!(
                    "grad_norm {norm} is {away:+.1} deviations from its running median {typical:.6}"
                )
            })
            });
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(log);
        fault
    }
}

fn center_and_deviation(window: &VecDeque<f64>) -> (f64, f64) {
    let mut values: Vec<f64> = window.iter().copied().collect();
    let center = median(&mut values);
    values.iter_mut().for_each(|value| *value = (*value - center).abs());
    (center, NORMAL_OVER_MAD * median(&mut values))
}

fn median(values: &mut [f64]) -> f64 {
    let (middle, even) = (values.len() / 2, values.len().is_multiple_of(2));
    let (below, upper, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    match below.iter().copied().max_by(f64::total_cmp) {
        Some(lower) if even => (lower + *upper) / 2.0,
        _ => *upper,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A linear congruential generator is enough to draw windows.
    struct Draws(u64);

    impl Draws {
        fn uniform(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            let (u, v) = (self.uniform(), self.uniform());
            (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        }
    }

    /// An upper bound of the normal tail, P(Z > x) for x > 0 (Mill's ratio).
    fn tail(x: f64) -> f64 {
        if x < 1.0 { 0.5 } else { (-x * x / 2.0).exp() / (x * std::f64::consts::TAU.sqrt()) }
    }

    /// Goal: the stated probability of a false trigger. Method: draw windows of
    /// normal logarithms, and add up the exact tail beyond the bound that each
    /// of them gives; no false trigger has to happen for it to be counted.
    #[test]
    fn a_clean_step_is_called_far_less_than_once_in_a_billion() {
        let (mut draws, windows) = (Draws(7), 100_000);
        let most = Conditions::default().spread.unwrap();
        let mut sum = 0.0;
        for _ in 0..windows {
            let window: VecDeque<f64> = (0..WINDOW).map(|_| draws.normal()).collect();
            let (center, deviation) = center_and_deviation(&window);
            sum += tail(most * deviation - center) + tail(most * deviation + center);
        }
        let probability = sum / f64::from(windows);
        assert!(probability < 1e-9, "{probability:e}");
    }

    #[test]
    fn what_is_no_number_triggers_once_until_it_is_well_again() {
        let mut watch = Watch::new(Conditions::default());
        assert_eq!(watch.judge(Some(2.0), None), None);
        assert_eq!(watch.judge(Some(f64::NAN), None).unwrap(), "the loss is NaN");
        assert_eq!(watch.judge(Some(f64::NAN), None), None, "said once");
        assert_eq!(watch.judge(Some(2.0), Some(f64::INFINITY)).unwrap(), "grad_norm is inf");
        assert!(watch.judge(Some(f64::NEG_INFINITY), None).is_some());
    }

    #[test]
    fn a_norm_above_its_bound_triggers_and_one_at_it_does_not() {
        let mut watch = Watch::new(Conditions { grad_norm: Some(5.0), spread: None });
        assert_eq!(watch.judge(None, Some(5.0)), None);
        assert!(watch.judge(None, Some(5.000001)).unwrap().contains("above 5"));
    }

    #[test]
    fn a_norm_far_from_the_median_triggers_in_both_directions() {
        for factor in [30.0, 1.0 / 30.0] {
            let mut watch = Watch::new(Conditions::default());
            let mut draws = Draws(3);
            for _ in 0..1000 {
                let norm = (0.3 + 0.2 * draws.normal()).exp();
                assert_eq!(watch.judge(Some(1.0), Some(norm)), None);
            }
            let why = watch.judge(Some(1.0), Some(1.35 * factor)).unwrap();
            assert!(why.contains("deviations from its running median"), "{why}");
        }
    }

    #[test]
    fn norms_that_were_clipped_to_one_value_may_differ_by_a_rounding() {
        let mut watch = Watch::new(Conditions::default());
        for _ in 0..100 {
            assert_eq!(watch.judge(None, Some(1.0)), None);
        }
        assert_eq!(watch.judge(None, Some(0.9999)), None);
        assert!(watch.judge(None, Some(2.0)).is_some());
    }
}
