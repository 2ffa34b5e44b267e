//! `clipping`: gradients were recorded after they were clipped to a norm, as if they were
//! the raw ones.
//!
//! Detectors: one factor below 1 in every gradient of a failing stage. It is a clip's if only
//! gradients of parameters have it, and the clipped norm, or the reported grad_norm times the
//! factor, is a round number. Or each rank's or microbatch's part of the reduced dk has a factor of
//! its own, and all that are below 1 bring their parts to one norm. Or a sum over microbatches is
//! what a clip to its own norm after each of them makes. Emulation: the factor, fitted.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addends::{Addend, Part, Solved, Summed, Weighted};
use crate::diagnose::detectors::common_factor::informative;
use crate::diagnose::detectors::fitted_numbers::{rounded, shown};
use crate::diagnose::detectors::least_squares::multiples;
use crate::diagnose::detectors::single_tokens::{distance, energy};
use crate::diagnose::evidence::{Evidence, Key, Residual};
use crate::diagnose::worlds::Scaled;
use crate::head::Stage;
use crate::head::step::numbers;

/// The catalogue's entry.
pub struct Clipping;

/// How far apart measured factors of one clip may be, relatively, beside what rounding explains.
const ALIKE: f64 = 2e-3;
/// Factors that are further apart, relatively, are two, whatever rounding explains.
const APART: f64 = 0.05;
/// How near, relatively, to a number of two digits the norm of clipped gradients must be. torch
/// divides by the norm plus 1e-6; by chance a norm is this near once in 100 times.
const ROUND: f64 = 2e-4;

impl Cause for Clipping {
    fn id(&self) -> &'static str {
        "clipping"
    }

    fn about(&self) -> &'static str {
        "gradients were clipped to a norm before they were recorded"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["norm-clipped gradients recorded as raw ones"]
    }

    fn advice(&self) -> &'static str {
        "record gradients before they are clipped, or compare runs that clip alike"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        if let Some(hypothesis) = of_parts(evidence).or_else(|| of_repeated_clips(evidence)) {
            return vec![hypothesis];
        }
        let all = [&Stage::GRADIENTS[..], &Stage::SUMS].concat();
        let failing: BTreeSet<Stage> =
            evidence.failing_of(&all).map(|(key, _)| key.stage).collect();
        let each: Vec<(Key, Residual)> =
            failing.iter().flat_map(|&stage| informative(evidence, stage)).collect();
        let Some(factor) = common(&each).filter(|&factor| factor < 1.0) else {
            return Vec::new();
        };
        let Some(support) = support(evidence, &failing, factor) else { return Vec::new() };
        let mut parameters = vec![("factor", shown(factor)), ("supported by", support.0)];
        parameters.extend(support.1.map(|norm| ("max_norm", norm.to_string())));
        vec![Hypothesis::new(Scaled { factor, stages: failing }, parameters).fitted(1)]
    }
}

/// The hypothesis that parts of a reduced dk were clipped to one norm before they were added: each
/// rank's part, each microbatch's, or each rank's part of each microbatch.
fn of_parts(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let (key, _) = evidence.failing_of(&[Stage::Dk, Stage::Reduce]).next()?;
    let sum = Summed::of(evidence, key, true)?;
    type Whose = fn(&Addend) -> (Option<Microbatch>, Option<Rank>);
    let kinds: [(&str, Whose); 3] = [
        ("each rank's part", |addend| (None, addend.rank)),
        ("each microbatch's part", |addend| (addend.microbatch, None)),
        ("each rank's part of each microbatch", |addend| (addend.microbatch, addend.rank)),
    ];
    kinds.into_iter().find_map(|(words, whose)| {
        let sums = sum.by(whose);
        let elements = sum.captured.values.len();
        if sums.len() < 2 || evidence.spend(sums.len().pow(2) * elements) {
            return None;
        }
        let each: Vec<&[f64]> = sums.values().map(|sum| &sum[..]).collect();
        let factors = multiples(&each, &sum.captured.values)?;
        let norms: Vec<f64> = each.iter().map(|sum| energy(sum).sqrt()).collect();
        let to = clipped_to(&norms, &factors)?;
        let weight = |addend: &Addend| {
            let position = sums.keys().position(|of| *of == whose(addend));
            position.map_or(1.0, |at| factors[at])
        };
        let of_part = |(addend, _): &Part| Addend { weight: weight(addend), ..addend.clone() };
        let addends: Vec<Addend> = sum.parts.iter().map(of_part).collect();
        let parameters =
            vec![("clipped", format!("{words}, before the reduction")), ("max_norm", shown(to))];
        let solved = Solved::of(&sum, (key, 1.0), addends);
        // A single norm gives all the factors, so one number was fitted.
        Some(Hypothesis::new(solved.world(), parameters).fitted(1))
    })
}

/// At least this many microbatches must have falling factors to recognise a clip after each of
/// them.
const FEWEST: usize = 3;
/// A sum is explained by one norm if its squared error is at most this many times the floor.
const ROUNDING: f64 = 16.0;

/// The hypothesis that the sum over microbatches was clipped to one norm after each of them was
/// added: the norm is that of the captured sum.
fn of_repeated_clips(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let (mut solved_sums, mut to, mut fitted) = (Vec::new(), BTreeSet::new(), 1);
    for (key, _) in evidence.failing_of(&Stage::SUMS) {
        let sum = Summed::of(evidence, key, false)?;
        let norm = energy(&sum.captured.values).sqrt();
        let mut order: BTreeMap<Option<Microbatch>, Vec<usize>> = BTreeMap::new();
        for (index, (addend, _)) in sum.parts.iter().enumerate() {
            order.entry(addend.microbatch).or_default().push(index);
        }
        let mut total = vec![0.0; sum.captured.values.len()];
        let mut weights = vec![0.0; sum.parts.len()];
        for indices in order.values() {
            for &index in indices {
                total.iter_mut().zip(&sum.parts[index].1).for_each(|(sum, x)| *sum += x);
                weights[index] = 1.0;
            }
            let factor = (norm / energy(&total).sqrt()).min(1.0);
            total.iter_mut().chain(&mut weights).for_each(|x| *x *= factor);
        }
        let off = distance(&sum.captured.values, &total);
        if order.len() < 2 {
            return None;
        }
        if off <= ROUNDING * evidence.residuals.get(&key)?.floor {
            to.insert(shown(norm));
        } else {
            // The norm may include other parameters' gradients; then each microbatch's clip has a
            // factor of its own.
            weights = falling(evidence, &sum, &order)?;
            fitted = fitted.max(order.len());
        }
        // If all microbatches have one factor, no earlier one was clipped more often.
        let differ = weights.iter().any(|x| (x - weights[0]).abs() > ALIKE * weights[0].abs());
        if !differ {
            return None;
        }
        let parts = sum.parts.iter().zip(weights);
        let addends =
            parts.map(|((addend, _), weight)| Addend { weight, ..addend.clone() }).collect();
        solved_sums.push(Solved::of(&sum, (key, 1.0), addends));
    }
    let mut parameters = vec![("clipped", "the sum, after every microbatch".to_string())];
    let to: Vec<String> = to.into_iter().collect();
    parameters.extend((!to.is_empty()).then(|| ("max_norm", to.join(", "))));
    (!solved_sums.is_empty())
        .then(|| Hypothesis::new(Weighted { sums: solved_sums }, parameters).fitted(fitted))
}

/// The weights of a sum's addends, if those of each microbatch are no larger than those of the next
/// and none is above 1: earlier microbatches are clipped more often.
fn falling(
    evidence: &Evidence<'_>,
    sum: &Summed,
    order: &BTreeMap<Option<Microbatch>, Vec<usize>>,
) -> Option<Vec<f64>> {
    let sums = sum.by(|addend| addend.microbatch);
    let elements = sum.captured.values.len();
    if sums.len() < FEWEST || evidence.spend(sums.len().pow(2) * elements) {
        return None;
    }
    let each: Vec<&[f64]> = sums.values().map(|sum| &sum[..]).collect();
    let factors = multiples(&each, &sum.captured.values)?;
    let falls = factors.windows(2).all(|pair| pair[0] <= pair[1] * (1.0 + ALIKE));
    let (first, last) = (*factors.first()?, *factors.last()?);
    if !falls || !(first > 0.0) || first >= 1.0 - ALIKE || last > 1.0 + ALIKE {
        return None;
    }
    let mut weights = vec![1.0; sum.parts.len()];
    for (indices, factor) in order.values().zip(factors) {
        indices.iter().for_each(|&at| weights[at] = factor);
    }
    Some(weights)
}

/// The one norm that all parts with a factor below 1 were brought to, if the others are no larger
/// than it. A single clipped part proves nothing unless that norm is a round number.
fn clipped_to(norms: &[f64], factors: &[f64]) -> Option<f64> {
    let cut: Vec<usize> = (0..factors.len()).filter(|&at| factors[at] < 1.0 - ALIKE).collect();
    let to = norms[*cut.first()?] * factors[cut[0]];
    let alike = |x: f64| (x - to).abs() <= ALIKE * to;
    let of_place = |index: usize| match cut.contains(&index) {
        true => alike(norms[index] * factors[index]),
        false => (factors[index] - 1.0).abs() <= ALIKE && norms[index] <= to * (1.0 + ALIKE),
    };
    let told = cut.len() > 1 || round(to).is_some();
    (told && (0..factors.len()).all(of_place)).then_some(to)
}

/// The number of two digits that a norm is near, if there is one.
fn round(norm: f64) -> Option<f64> {
    let two_digits = rounded(norm, 2);
    ((norm - two_digits).abs() <= ROUND * norm).then_some(two_digits)
}

/// The one factor of all comparisons: the mean of theirs, weighted by their precision; none where
/// they differ.
pub(super) fn common(each: &[(Key, Residual)]) -> Option<f64> {
    let weight = |residual: &Residual| residual.reference / residual.floor.max(f64::MIN_POSITIVE);
    let sum: f64 = each.iter().map(|(_, residual)| weight(residual)).sum();
    let mean =
        each.iter().map(|(_, residual)| weight(residual) * residual.factor).sum::<f64>() / sum;
    // Rounding errors of the energy that is expected change a measured factor, relatively, by no
    // more than the root of their share in the reference's energy (Cauchy-Schwarz).
    let alike = |(_, residual): &(Key, Residual)| {
        let rounding = (residual.floor / residual.reference).sqrt();
        residual.nonfinite == 0
            && (residual.passes || residual.is_scaled())
            && (residual.factor - mean).abs() <= (ALIKE + rounding.min(APART)) * mean
    };
    (mean > 0.0 && mean.is_finite() && each.iter().all(alike)).then_some(mean)
}

/// In words, what shows that a factor is a clip's, and the norm that was clipped to, if known.
fn support(
    evidence: &Evidence<'_>,
    failing: &BTreeSet<Stage>,
    factor: f64,
) -> Option<(String, Option<f64>)> {
    let norm = &evidence.outcome.grad_norm;
    let parameters = [Stage::DkLse, Stage::DkLabel, Stage::Dk, Stage::Accumulate, Stage::Reduce];
    // Only gradients of parameters are clipped, so only they may fail.
    if failing.iter().all(|stage| parameters.contains(stage)) {
        let reported = norm.captured.filter(|norm| *norm > 0.0);
        if let Some(to) = reported.and_then(|norm| round(norm * factor)) {
            let words = "the reported grad_norm times the factor is a round number";
            return Some((words.into(), Some(to)));
        }
        let clipped = last(evidence, failing).filter(|norm| *norm > 0.0);
        if let Some(to) = clipped.and_then(round) {
            return Some(("the norm of the recorded dk is a round number".into(), Some(to)));
        }
    }
    None
}

/// The norm of the failing captured dk: the reduced one, or that of the only microbatch.
fn last(evidence: &Evidence<'_>, failing: &BTreeSet<Stage>) -> Option<f64> {
    let step = evidence.step;
    let reduced = failing.contains(&Stage::Reduce);
    let single = evidence.microbatches() == 1 && failing.contains(&Stage::Dk);
    let key = match (reduced, single) {
        (true, _) => step.find_reduced(Role::Dk, true)?,
        (false, true) => step.find(Role::Dk, evidence.inputs[0].microbatch)?,
        _ => return None,
    };
    if step.tensors[key].partial.is_some() {
        return None;
    }
    let values = numbers(&step.assemble(key).ok()?)?;
    Some(values.iter().map(|x| x * x).sum::<f64>().sqrt())
}
