//! Numbers that are fitted to captured values.

use std::collections::BTreeSet;

use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::replay::world::World;

/// A number is fitted to at least this many captured values.
const FEWEST: u64 = 3;
/// A number fitted to fewer values than this is believed only if it is near a round one.
const MANY: u64 = 12;
/// How far, relatively, a round number may lie from the fitted one: in bf16 a small term is not
/// known better.
const ROUND: f64 = 0.04;
/// A number that leaves more than this share of the energy is dropped. The share is large because
/// another fault may make up nearly all of the energy.
const USELESS: f64 = 0.999;
/// A number that leaves more than this share of the energy explains a part of it.
const HALF: f64 = 0.5;
/// The number explains a part only if it leaves more than [`HALF`] of the energy and also more than
/// this many times the floor. Both are chosen, far from what passes, and not derived.
const GROSS: f64 = 100.0;

/// How much of an error a fitted number has to explain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A part of it, as there may be other faults too.
    Part,
    /// All of it, as another declaration must: a number that explains only a part is not returned.
    All,
}

/// The value at which a parameter explains the failing comparisons of some stages best,
/// where the stages are linear in it: their squared error is then a parabola, and three
/// points give its lowest. `from`: the parameter as declared, of which the comparisons are
/// known; `step`: a usual size of it, away from there.
pub fn linear(
    evidence: &Evidence<'_>,
    (stages, wanted): (&[Stage], Wanted),
    (from, step): (f64, f64),
    world: &dyn Fn(f64) -> Box<dyn World>,
) -> Option<Vec<f64>> {
    let keys: BTreeSet<Key> = evidence
        .failing_of(stages)
        .filter(|(_, residual)| residual.nonfinite == 0)
        .map(|of| of.0)
        .collect();
    let values: u64 = keys.iter().map(|key| evidence.residuals[key].elements).sum();
    if values < FEWEST {
        return None;
    }
    let mut step = step;
    // The fit is made twice: first on the few rows of a glance, then with steps as large as the
    // answer, where least precision is lost to cancellation.
    for glances in [true, false] {
        let energy = |x: Option<f64>| energy(evidence, &keys, x.map(world), glances);
        let (middle, high) = (energy(Some(from + step))?, energy(Some(from + 2.0 * step))?);
        let low = energy(None)?;
        let bend = low - 2.0 * middle + high;
        let slope = (high - low) / 2.0;
        if !(bend > 0.0) || !slope.is_finite() {
            return None;
        }
        let best = from + step - step * slope / bend;
        let lowest = middle - slope * slope / (2.0 * bend);
        // The parameter is too small to have a visible effect, or explains nothing.
        if !((best - from).abs() > 1e-9 * step.abs()) || lowest > USELESS * low {
            return None;
        }
        let is_part = lowest > HALF * low && lowest > GROSS * keys.len() as f64;
        if wanted == Wanted::All && is_part {
            return None;
        }
        step = (best - from) / 2.0;
    }
    Some(readings(from + 2.0 * step, values))
}

/// Squared errors of some comparisons in a world, or as declared, each divided by its floor,
/// summed.
fn energy(
    evidence: &Evidence<'_>,
    keys: &BTreeSet<Key>,
    world: Option<Box<dyn World>>,
    glances: bool,
) -> Option<f64> {
    let glance = match &world {
        _ if !glances => None,
        Some(world) => evidence.glance_in(&**world),
        None => evidence.glance().cloned(),
    };
    let residuals = match (glance, &world) {
        (Some(residuals), _) => residuals,
        (None, Some(world)) => evidence.residuals_in(&**world)?,
        (None, None) => evidence.residuals.clone(),
    };
    let of_key = |key: &Key| {
        let floor = evidence.residuals[key].floor.max(f64::MIN_POSITIVE);
        residuals.get(key).map(|residual| residual.energy / floor)
    };
    keys.iter().map(of_key).sum::<Option<f64>>().filter(|sum| sum.is_finite())
}

/// A fitted number and the round numbers that it may stand for. `values`: how many values it was
/// fitted to.
pub fn readings(fitted: f64, values: u64) -> Vec<f64> {
    let mut readings: Vec<f64> = (1..=2).map(|digits| rounded(fitted, digits)).collect();
    readings.retain(|x| (x - fitted).abs() <= ROUND * fitted.abs());
    readings.dedup();
    if values >= MANY {
        readings.push(fitted);
    }
    readings
}

/// Rounds to this many significant digits.
pub fn rounded(x: f64, digits: i32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let unit = 10f64.powi(x.abs().log10().floor() as i32 - digits + 1);
    // Rounded through text, because 3 * 0.1 is not 0.3.
    let text = format!("{:e}", (x / unit).round() * unit);
    let short = format!("{:.*e}", (digits - 1) as usize, text.parse::<f64>().unwrap_or(x));
    short.parse().unwrap_or(x)
}

/// A fitted number for the report, with four significant digits.
pub fn shown(x: f64) -> String {
    format!("{}", rounded(x, 4))
}

/// The minimum of a function of one positive number between two bounds: the best point of a
/// logarithmic grid, refined by golden-section search. None where it is at an end of the grid.
pub fn least(function: &dyn Fn(f64) -> f64, (low, high): (f64, f64)) -> Option<f64> {
    const STEPS: i32 = 48;
    const SECTIONS: i32 = 48;
    let (from, to) = (low.ln(), high.ln());
    let place = |i: i32| from + (to - from) * f64::from(i) / f64::from(STEPS);
    let values: Vec<f64> = (0..=STEPS).map(|i| function(place(i).exp())).collect();
    let best = (0..=STEPS).filter(|&i| values[i as usize].is_finite());
    let best = best.min_by(|&a, &b| values[a as usize].total_cmp(&values[b as usize]))?;
    if best == 0 || best == STEPS {
        return None;
    }
    let (mut a, mut b) = (place(best - 1), place(best + 1));
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    for _ in 0..SECTIONS {
        let (c, d) = (b - golden * (b - a), a + golden * (b - a));
        if function(c.exp()) < function(d.exp()) { b = d } else { a = c }
    }
    Some(((a + b) / 2.0).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fitted_number_near_a_round_one_is_read_as_it_too() {
        assert_eq!(readings(1.0003e-4, 100), [1e-4, 1.0003e-4]);
        assert_eq!(readings(0.3, 5), [0.3]);
        assert_eq!(readings(0.3456, 5), [0.35]);
        assert_eq!(rounded(0.012_345, 2), 0.012);
        assert_eq!((rounded(0.0, 3), shown(-29.999_99)), (0.0, "-30".to_string()));
    }

    #[test]
    fn the_least_of_a_valley_is_found_and_none_where_it_falls_to_the_end() {
        let minimum = least(&|x: f64| (x.ln() - 2.0).powi(2), (0.1, 100.0)).unwrap();
        assert!((minimum - 2f64.exp()).abs() < 1e-6, "{minimum}");
        assert_eq!(least(&|x: f64| x, (0.1, 100.0)), None);
    }
}
