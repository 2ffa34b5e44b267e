//! `clipping`: gradients were recorded after they were clipped to a norm, as if they were
//! the raw ones.
//!
//! Detectors: D6, one factor below 1 in every gradient of a stage that fails. It must be
//! that of a clip: gradients of parameters alone have it, and the clipped norm is a round
//! number, or the reported grad_norm says so. Or each rank's or microbatch's part of the
//! reduced dk has a factor of its own, and all that are below 1 bring their parts to one norm.
//! Emulation: the factor, fitted.

use std::collections::BTreeSet;

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addends::{Addend, Part, Solved, Summed};
use crate::diagnose::detectors::direct::energy;
use crate::diagnose::detectors::fit::{rounded, shown};
use crate::diagnose::detectors::solve::multiples;
use crate::diagnose::detectors::uniform::informative;
use crate::diagnose::evidence::{Evidence, GRADIENTS, Key, Residual};
use crate::diagnose::worlds::Scaled;
use crate::head::Stage;
use crate::head::step::numbers;

/// The catalogue's entry.
pub struct Clipping;

/// How far measured factors of one clip may lie apart: rounding of bf16 values moves a
/// slope by less.
const ALIKE: f64 = 2e-3;
/// How near to a round number the norm of clipped gradients must lie. torch divides by
/// the norm plus 1e-6; a round number of two digits is met by chance once in 100 times.
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
        if let Some(found) = of_parts(evidence) {
            return vec![found];
        }
        let all = [&GRADIENTS[..], &[Stage::Accumulate, Stage::Reduce]].concat();
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

/// Parts of a reduced dk that were clipped to one norm before they were added: each rank's, each
/// microbatch's, or each addend.
fn of_parts(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let (key, _) = evidence.failing_of(&[Stage::Dk, Stage::Reduce]).next()?;
    let sum = Summed::of(evidence, key, true)?;
    type Whose = fn(&Addend) -> (Option<Microbatch>, Option<Rank>);
    let kinds: [(&str, Whose); 3] = [
        ("each rank's part", |of| (None, of.rank)),
        ("each microbatch's part", |of| (of.microbatch, None)),
        ("each rank's part of each microbatch", |of| (of.microbatch, of.rank)),
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
            let at = sums.keys().position(|of| *of == whose(addend));
            at.map_or(1.0, |at| factors[at])
        };
        let one = |(addend, _): &Part| Addend { weight: weight(addend), ..addend.clone() };
        let addends: Vec<Addend> = sum.parts.iter().map(one).collect();
        let parameters =
            vec![("clipped", format!("{words}, before the reduction")), ("max_norm", shown(to))];
        let solved = Solved::of(&sum, (key, 1.0), addends);
        // One norm makes all the factors.
        Some(Hypothesis::new(solved.world(), parameters).fitted(1))
    })
}

/// The norm that all parts with a factor below 1 have with it, where the others are no larger. One
/// such part alone was brought to a norm of its own by any factor, so that norm must be round.
fn clipped_to(norms: &[f64], factors: &[f64]) -> Option<f64> {
    let cut: Vec<usize> = (0..factors.len()).filter(|&at| factors[at] < 1.0 - ALIKE).collect();
    let to = norms[*cut.first()?] * factors[cut[0]];
    let alike = |x: f64| (x - to).abs() <= ALIKE * to;
    let one = |at: usize| match cut.contains(&at) {
        true => alike(norms[at] * factors[at]),
        false => (factors[at] - 1.0).abs() <= ALIKE && norms[at] <= to * (1.0 + ALIKE),
    };
    let told = cut.len() > 1 || round(to).is_some();
    (told && (0..factors.len()).all(one)).then_some(to)
}

/// The number of two digits that a norm is, if it is one.
fn round(norm: f64) -> Option<f64> {
    let found = rounded(norm, 2);
    ((norm - found).abs() <= ROUND * norm).then_some(found)
}

/// The one factor of comparisons: the mean of theirs, each counted as exactly as it is known.
pub(super) fn common(each: &[(Key, Residual)]) -> Option<f64> {
    let weight = |one: &Residual| one.reference / one.floor.max(f64::MIN_POSITIVE);
    let sum: f64 = each.iter().map(|(_, one)| weight(one)).sum();
    let mean = each.iter().map(|(_, one)| weight(one) * one.factor).sum::<f64>() / sum;
    let alike = |(_, one): &(Key, Residual)| {
        one.nonfinite == 0 && one.is_scaled() && (one.factor - mean).abs() <= ALIKE * mean
    };
    (mean > 0.0 && mean.is_finite() && each.iter().all(alike)).then_some(mean)
}

/// What shows that a factor is a clip's, in words, and the norm clipped to if known.
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

/// Norm of the captured dk that fails: the reduced one, or that of the only microbatch.
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
