//! Solves dq for the factors of its three parts under label smoothing: the softmax part, the
//! label's part and the part that is spread over all classes. Factors that another number of
//! classes would give, in the formula of s or in the spread, are recognised.
//!
//! With s the share of the target that is spread and K the number of classes, a token's dlogits are
//! `g (A p - B (1 - s) onehot - C s / K)` and its loss `A lse - B (1 - s) z_y - C s mean(z)`; A, B
//! and C are 1 as declared.

use std::sync::Arc;

use super::smoothing_mismatch::{Means, cuts, means};
use crate::diagnose::cause::Hypothesis;
use crate::diagnose::detectors::dlogits_plane::{Plane, Rows};
use crate::diagnose::detectors::fitted_numbers::shown;
use crate::diagnose::detectors::least_squares::multiples;
use crate::diagnose::detectors::single_tokens::{distance, energy};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::{Read, UnitTokens, World};

/// Share of the squared error of dq that may be left to be worth a trial.
const LEFT: f64 = 0.02;
/// How far, relatively, a fitted factor may be from the one that a rule gives.
const NEAR: f64 = 0.01;
/// A factor must differ from 1 by more than this to be wrong.
const OFF: f64 = 1e-4;

/// The hypotheses: if a rule gives nearly these factors, those of the rule, else the fitted ones.
pub(super) fn hypotheses(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let Some(parts) = solved(evidence) else { return Vec::new() };
    let Some(head) = evidence.inputs.iter().find_map(|inputs| inputs.head(evidence.step)) else {
        return Vec::new();
    };
    let (rows, valid) = (head.k.rows, head.valid_vocab);
    let spread = evidence.step.options.smoothing(valid);
    let Some(means) = means(evidence, 0..valid).map(Arc::new) else { return Vec::new() };
    let with_factors =
        |[parts, of_loss]: [[f64; 3]; 2]| Parts { parts, of_loss, spread, means: means.clone() };
    let counts = cuts(evidence).into_iter().filter(|n| rows % n == 0).map(|n| rows / n);
    let counts: Vec<usize> = counts.chain([rows, valid]).filter(|&n| n > 1).collect();
    for &classes in &counts {
        for other in rules(evidence, [classes, valid], spread) {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= NEAR * (1.0 + b.abs());
            if other.iter().zip(&parts).all(near) && is_off(&other) {
                let mut parameters = words(&other);
                parameters.push(("as if the classes were", format!("{classes}, not {valid}")));
                // In the loss the factor of lse may differ from that of the softmax part in the
                // gradient.
                let [_, b, c] = other;
                let total = [b * (1.0 - spread) + c * spread, b, c];
                let losses = [other, [1.0, b, c], total].into_iter();
                let of_loss =
                    |loss| Hypothesis::new(with_factors([other, loss]), parameters.clone());
                return losses.map(of_loss).collect();
            }
        }
    }
    let fitted = parts.iter().filter(|x| (**x - 1.0).abs() > NEAR).count();
    vec![Hypothesis::new(with_factors([parts; 2]), words(&parts)).fitted(fitted.max(1))]
}

fn is_off(parts: &[f64; 3]) -> bool {
    parts.iter().any(|x| (x - 1.0).abs() > OFF)
}

fn words(parts: &[f64; 3]) -> Vec<(&'static str, String)> {
    let names = ["the softmax part is there", "the label's part is there", "ε/K is there"];
    let times = |x: &f64| format!("{} times", shown(*x));
    names.into_iter().zip(parts.iter().map(times)).collect()
}

/// A, B and C where another number of classes is used in the formula of s, in the spread, or in
/// both; each with A = 1, and with A the sum of the target that results.
fn rules(evidence: &Evidence<'_>, [classes, valid]: [usize; 2], spread: f64) -> Vec<[f64; 3]> {
    let formula = evidence.step.options.smoothing(classes);
    let k = [classes, valid].map(|n| n as f64);
    let mut factors = Vec::new();
    for s in [formula, spread] {
        for k_of_spread in k {
            let [b, c] = [(1.0 - s) / (1.0 - spread), s / k_of_spread / (spread / k[1])];
            let total = b * (1.0 - spread) + c * spread;
            factors.extend([[1.0, b, c], [total, b, c]]);
        }
    }
    factors
}

/// A, B and C by least squares; `None` where they leave more than [`LEFT`] of the error of dq, or
/// are all 1.
fn solved(evidence: &Evidence<'_>) -> Option<[f64; 3]> {
    let keys: Vec<Key> = evidence.failing_of(&[Stage::Dq]).map(|(key, _)| key).collect();
    let [mut softmax, mut label, mut spread, mut captured] = [(); 4].map(|()| Vec::new());
    for key in keys {
        let plane = evidence.plane(key)?;
        let parts = apart(evidence, &plane, key)?;
        let [a, b, c] = parts.map(|entries| entries.times(&plane.k).values);
        softmax.extend(a);
        label.extend(b);
        spread.extend(c);
        captured.extend(plane.dq(&*evidence.captured(key)?).values);
    }
    let all = [&softmax[..], &label[..], &spread[..]];
    let parts: [f64; 3] = multiples(&all, &captured)?.try_into().ok()?;
    let made = |times: [f64; 3]| -> Vec<f64> {
        let element = |at: usize| (0..3).map(|part| times[part] * all[part][at]).sum();
        (0..captured.len()).map(element).collect()
    };
    let left = distance(&captured, &made(parts));
    let explains = left <= LEFT * distance(&captured, &made([1.0; 3]));
    (explains && energy(&captured) > 0.0 && is_off(&parts)).then_some(parts)
}

/// Entries of dlogits of the softmax part, the label's part and the spread, `[n, V]` each.
fn apart(evidence: &Evidence<'_>, plane: &Plane, key: Key) -> Option<[Rows; 3]> {
    let of_key = |rank| rank == key.rank || key.rank.is_none();
    let mut units = evidence.units().iter();
    let unit = units.find(|unit| unit.microbatch == key.microbatch && of_key(unit.rank))?;
    let [a, _, c] = &unit.cotangents;
    let cols = plane.dense.cols;
    let mut spread = vec![0.0; plane.dense.values.len()];
    for (index, to) in spread.iter_mut().enumerate() {
        let row = index / cols.max(1);
        let whole = a[row] * plane.p.values[index] + c[row];
        // The quotient of the entry and `whole` is the derivative of the logit.
        *to = if whole == 0.0 { 0.0 } else { c[row] * plane.dense.values[index] / whole };
    }
    let softmax = plane.dense.values.iter().zip(&spread).map(|(x, c)| x - c).collect();
    let rows = |values: Vec<f64>| Rows { cols, values };
    Some([rows(softmax), plane.of_labels(), rows(spread)])
}

struct Parts {
    parts: [f64; 3],
    of_loss: [f64; 3],
    /// Declared share of the target that is spread.
    spread: f64,
    means: Arc<Means>,
}

impl World for Parts {
    fn cotangents(&self, _tokens: &UnitTokens<'_>, parts: [&mut [f64]; 3]) {
        for (values, times) in parts.into_iter().zip(self.parts) {
            values.iter_mut().for_each(|to| *to *= times);
        }
    }

    fn nll(&self, inputs: &MicrobatchInputs, read: &Read<'_>, nll: &mut [f64]) -> Vec<f64> {
        let [a, b, c] = self.of_loss.map(|times| times - 1.0);
        let s = self.spread;
        if let Some(means) = self.means.get(&inputs.microbatch) {
            let tokens = nll.iter_mut().zip(means).zip(read.lse.0.iter().zip(read.label.0));
            for ((nll, [mean, _]), (lse, label)) in tokens {
                *nll += a * lse - b * (1.0 - s) * label - c * s * mean;
            }
        }
        Vec::new()
    }
}
