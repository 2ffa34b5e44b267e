//! One scalar over the steps, and the robust statistics that flags compute from it.

use super::read::Trajectory;

/// Values by ascending step; if a step was recorded again, the last value counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    steps: Vec<u64>,
    values: Vec<f64>,
    /// How often the steps went back, as when a job resumes from an earlier checkpoint.
    rewinds: u64,
}

impl Series {
    /// Adds a value. A step at or before the last one removes the values from that step on.
    pub fn push(&mut self, step: u64, value: f64) {
        if self.steps.last().is_some_and(|&last| step <= last) {
            let keep = self.steps.partition_point(|&old| old < step);
            self.steps.truncate(keep);
            self.values.truncate(keep);
            self.rewinds += 1;
        }
        self.steps.push(step);
        self.values.push(value);
    }

    /// The steps, ascending.
    pub fn steps(&self) -> &[u64] {
        &self.steps
    }

    /// The values, by step.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// How often the steps went back.
    pub fn rewinds(&self) -> u64 {
        self.rewinds
    }

    /// How many steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// True if there are no steps.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The value at a step.
    pub fn at(&self, step: u64) -> Option<f64> {
        self.steps.binary_search(&step).ok().map(|index| self.values[index])
    }

    /// The points whose value is finite.
    pub(crate) fn finite(&self) -> Series {
        let mut finite = Series { rewinds: self.rewinds, ..Series::default() };
        for (&step, &value) in self.steps.iter().zip(&self.values) {
            if value.is_finite() {
                finite.steps.push(step);
                finite.values.push(value);
            }
        }
        finite
    }

    /// The last `count` points.
    pub(crate) fn last(mut self, count: usize) -> Series {
        let from = self.len().saturating_sub(count);
        self.steps.drain(..from);
        self.values.drain(..from);
        self
    }

    /// The longest part with equally spaced steps, which flags about periods need.
    pub(crate) fn regular(&self) -> Series {
        let (mut best, mut start) = (0..self.len().min(1), 0);
        for end in 2..=self.len() {
            let stride = |i: usize| self.steps[i] - self.steps[i - 1];
            if end - start > 2 && stride(end - 1) != stride(end - 2) {
                start = end - 2;
            }
            if end - start > best.len() {
                best = start..end;
            }
        }
        let (steps, values) = (self.steps[best.clone()].to_vec(), self.values[best].to_vec());
        Series { steps, values, rewinds: self.rewinds }
    }
}

/// The mean over the ranks that recorded a scalar, at the steps that all of them have. Ranks with
/// fewer than nine tenths of the longest rank's steps are left out: the mean would jump where they
/// start and stop though no rank's value does.
pub(crate) fn mean_over_ranks(trajectory: &Trajectory, name: &str) -> Option<Series> {
    let all = trajectory.ranks.iter().filter_map(|rank| rank.series.get(name));
    let all: Vec<Series> = all.map(Series::finite).collect();
    let longest = all.iter().map(Series::len).max().filter(|&n| n > 0)?;
    let whole: Vec<&Series> =
        all.iter().filter(|series| 10 * series.len() >= 9 * longest).collect();
    let mut mean = Series::default();
    for &step in whole[0].steps() {
        let values: Option<Vec<f64>> = whole.iter().map(|series| series.at(step)).collect();
        if let Some(values) = values {
            mean.push(step, values.iter().sum::<f64>() / values.len() as f64);
        }
    }
    mean.rewinds = whole.iter().map(|series| series.rewinds).max().unwrap_or(0);
    Some(mean)
}

/// The median; NaN if there are no values.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Standard deviation of a normal distribution over its median absolute deviation.
const NORMAL_MAD: f64 = 1.4826;

/// The standard deviation of the noise from step to step, whatever the trend. It comes from the
/// median absolute difference of neighbours, which spikes do not change.
pub(crate) fn noise(values: &[f64]) -> f64 {
    let steps: Vec<f64> = values.windows(2).map(|pair| (pair[1] - pair[0]).abs()).collect();
    NORMAL_MAD * median(&steps) / std::f64::consts::SQRT_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_comes_again_takes_back_what_followed_it() {
        let mut series = Series::default();
        for (step, value) in [(0, 5.0), (1, 4.0), (2, 3.0), (1, 4.5), (2, 3.5)] {
            series.push(step, value);
        }
        assert_eq!((series.steps(), series.values()), (&[0, 1, 2][..], &[5.0, 4.5, 3.5][..]));
        assert_eq!(series.rewinds(), 1);
    }

    #[test]
    fn the_regular_part_is_the_longest_with_one_distance() {
        let mut series = Series::default();
        for step in [0, 1, 2, 10, 20, 30, 40, 41] {
            series.push(step, 0.0);
        }
        assert_eq!(series.regular().steps(), [10, 20, 30, 40]);
        assert_eq!(Series::default().regular().len(), 0);
    }
}
