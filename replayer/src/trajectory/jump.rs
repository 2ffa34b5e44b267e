//! Flags a loss that jumps and does not come back; notes jumps that do.
//!
//! The W values before a step are compared with all values after it, only by their order: if the
//! loss did not shift, at least W later values are all above W earlier ones with a probability of
//! at most 1 / C(2W, W), whatever the distribution of the noise. A slow rise has this order too, so
//! the level must also rise by a tenth.

use super::View;
use super::chance::FALSE_ALARM;
use super::finding::{FlagResults, Place};
use super::series::{median, noise};
use crate::number::short;

/// Values before and after a step: C(40, 20) is 1.4e11, which is enough for 1e7 steps.
const WINDOW: usize = 20;

/// Smallest relative rise of the level: a loss on its plateau wanders by less.
const RISE: f64 = 0.1;

/// Smallest rise in units of the noise of the windows' medians, four deviations of a difference of
/// two: a loss whose batches resemble their neighbours wanders by itself.
const WANDER: f64 = 6.0;

/// Smallest height of a spike above its neighbours, in units of the noise.
const SPIKE: f64 = 8.0;

pub(super) fn run(view: &View<'_>, results: &mut FlagResults) {
    let what = "whether the loss comes back from jumps";
    let Some(loss) = view.loss.as_ref().filter(|loss| loss.len() >= 2 * WINDOW) else {
        return results.skip(what, format!("fewer than {} losses were recorded", 2 * WINDOW));
    };
    let values = loss.values();
    if values.iter().any(|&value| value < 0.0) {
        return results.skip(what, "loss is negative at some steps: no level to rise from");
    }
    results.looked();
    let n = values.len();
    // The smallest value from each step on.
    let mut least = vec![f64::INFINITY; n + 1];
    for i in (0..n).rev() {
        least[i] = least[i + 1].min(values[i]);
    }
    let levels: Vec<f64> = values.chunks_exact(WINDOW).map(median).collect();
    let wander = WANDER * noise(&levels);
    for index in WINDOW..=n - WINDOW {
        let before = &values[index - WINDOW..index];
        let highest = before.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if least[index] <= highest {
            continue;
        }
        // Only as many values as the median needs: using all would take time quadratic in the
        // steps.
        let after = &values[index..n.min(index + 10 * WINDOW)];
        let (low, high) = (median(before), median(after));
        if high > low * (1.0 + RISE) && high - low > wander {
            let step = loss.steps()[index];
            let evidence = format!(
                "loss jumps from {} to {} at step {step} and does not come back: all {} values \
                 from there on are above the {WINDOW} before",
                short(low),
                short(values[index]),
                n - index
            );
            let threshold = format!(
                "a rise of a tenth and of {} ({WANDER} times what the medians of {WINDOW} values \
                 wander by), and a chance of {:.0e} for that order at a step (1 / C({}, \
                 {WINDOW}))",
                short(wander),
                FALSE_ALARM.min(7.3e-12),
                2 * WINDOW
            );
            return results.raise(Place::at("loss", step), evidence, threshold);
        }
    }
    spikes(view, results);
}

/// Notes values far above those before, which came back.
fn spikes(view: &View<'_>, results: &mut FlagResults) {
    let loss = view.loss.as_ref().expect("looked at");
    let values = loss.values();
    let least = SPIKE * noise(values);
    let (mut spikes, mut inside) = (Vec::new(), false);
    for index in WINDOW..values.len() {
        let level = median(&values[index - WINDOW..index]);
        let above = values[index] > level + least && values[index] > level * (1.0 + RISE);
        if above && !inside {
            spikes.push((index, values[index], level));
        }
        inside = above;
    }
    let Some(&(index, value, level)) = spikes.first() else { return };
    let step = loss.steps()[index];
    let evidence = format!(
        "{} spikes of loss that came back, the first at step {step}: {} above a level of {}",
        spikes.len(),
        short(value - level),
        short(level),
    );
    let threshold = format!(
        "{SPIKE} times the noise from step to step ({}) and a tenth of the level",
        short(noise(values))
    );
    results.note(Place::at("loss", step), evidence, threshold);
}
