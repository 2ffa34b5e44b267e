//! What is said of a cause: plain data for the report.

use std::collections::{BTreeMap, BTreeSet};

use backtape::nan::largest;
use serde::Serialize;

use super::cause::{Cause, Observed};
use super::decide::Decision;
use super::evidence::{Evidence, Key, Residuals};
use super::search::{Tried, left_of};
use crate::compare::tally::relative;
use crate::head::{Kind, Stage};
use crate::replay::plausible_policies;

/// How sure the report is of a cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// It explains the divergence and nothing else does.
    Named,
    /// Others explain it as well.
    Tied,
    /// Nothing in the catalogue explains it.
    Unknown,
}

/// One cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// Its id in the catalogue, or `unknown`.
    pub id: String,
    /// How sure this is.
    pub standing: Standing,
    /// Share of the squared error beyond the floor that the emulation removes.
    pub explained: f64,
    /// Share of the difference of squared norms of dk that it removes; none where no dk
    /// diverges.
    pub norm_gap_explained: Option<f64>,
    /// Energy that the next cause leaves, over what this one leaves; none where there is
    /// no other, or where this one leaves nothing at all.
    pub beats_next_by: Option<f64>,
    /// The next cause.
    pub next: Option<String>,
    /// True when the emulation equals the captured tensors in every bit.
    pub bit_equal: bool,
    /// Its parameters.
    pub parameters: BTreeMap<String, String>,
    /// Stages that it explains.
    pub stages: Vec<&'static str>,
    /// What is left of the divergence when it is emulated, stage by stage; empty where
    /// the cause was seen and not computed.
    pub residuals: Vec<StageResidual>,
    /// What shows it, in one sentence.
    pub evidence: String,
    /// What cures it, in one sentence.
    pub advice: String,
}

/// Errors of one stage before and after a cause is emulated, over the comparisons that it is
/// to explain; relative to the reference as a stage's error is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageResidual {
    /// The stage.
    pub stage: &'static str,
    /// How many comparisons these are over.
    pub comparisons: usize,
    /// The error against the declared head.
    pub before: f64,
    /// The error against the head with the cause.
    pub after: f64,
    /// The error that the declared precision explains.
    pub floor: f64,
    /// True when a sample of the rows was looked at.
    pub sampled: bool,
}

impl Found {
    /// A cause that is seen rather than computed.
    pub fn seen(id: &str, stages: Vec<&'static str>, evidence: String, advice: String) -> Found {
        Found {
            id: id.into(),
            standing: Standing::Named,
            explained: 1.0,
            norm_gap_explained: None,
            beats_next_by: None,
            next: None,
            bit_equal: false,
            parameters: BTreeMap::new(),
            stages,
            residuals: Vec::new(),
            evidence,
            advice,
        }
    }
}

/// The causes of a decision: one named, or several tied.
pub(super) fn of_decision(
    tried: &[Tried<'_>],
    decision: &Decision,
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> Vec<Found> {
    let standing = if decision.winners.len() == 1 { Standing::Named } else { Standing::Tied };
    let next = decision.next.map(|(at, by)| (tried[at].cause.id(), by));
    let one = |&at: &usize| of_one(&tried[at], standing, next, keys, evidence);
    decision.winners.iter().map(one).collect()
}

fn of_one(
    of: &Tried<'_>,
    standing: Standing,
    next: Option<(&str, f64)>,
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> Found {
    let before = if of.full { &evidence.whole } else { &evidence.residuals };
    let explained = explained(before, &of.residuals, keys);
    let about = of.cause.about();
    let exact = of.exact(keys);
    let equal = if exact {
        "equals what was captured in every bit"
    } else {
        "leaves no more than rounding explains"
    };
    let comparisons = match keys.len() {
        1 => "the comparison that fails".to_string(),
        n => format!("all {n} comparisons that fail"),
    };
    Found {
        id: of.cause.id().into(),
        standing,
        explained,
        norm_gap_explained: norm_gap(before, &of.residuals, keys),
        beats_next_by: next.map(|(_, by)| by).filter(|by| by.is_finite()),
        next: next.map(|(id, _)| id.to_string()),
        bit_equal: exact,
        parameters: parameters(&of.hypothesis.parameters),
        stages: stages(keys),
        residuals: by_stage(before, of, keys),
        evidence: format!(
            "{about}: emulated so, the reference {equal} in {comparisons}{}",
            against(of)
        ),
        advice: of.cause.advice().into(),
    }
}

/// What agrees and would not if a cause were everywhere, as a clause.
fn against(of: &Tried<'_>) -> String {
    let parts: Vec<&str> = of.against.parts.iter().map(|part| part.words()).collect();
    if parts.is_empty() {
        return String::new();
    }
    format!("; it is in what fails alone, as {} would not agree with it", parts.join(" and "))
}

/// The first of two causes that together explain what neither does alone.
pub(super) fn partner(of: &Tried<'_>, left: f64, evidence: &Evidence<'_>) -> Found {
    let before = left_of(&evidence.residuals, &evidence.failing);
    let mut found = of_one(of, Standing::Named, None, &evidence.failing, evidence);
    found.explained = ((before - of.left) / (before - left)).clamp(0.0, 1.0);
    found.bit_equal = false;
    found.evidence = format!(
        "{}: it explains a part, and together with the other cause nothing is left that rounding does not explain",
        of.cause.about()
    );
    found
}

/// Nothing explains these comparisons; the evidence says what comes nearest.
pub(super) fn unknown(evidence: &Evidence<'_>, tried: &[Tried<'_>], keys: &BTreeSet<Key>) -> Found {
    let left = |of: &Tried<'_>| of.left_of(keys);
    let nearest = tried.iter().min_by(|a, b| left(a).total_cmp(&left(b)));
    let before = left_of(&evidence.residuals, keys);
    let words = match nearest {
        None => "no cause of the catalogue fits what the detectors see".to_string(),
        Some(near) if left(near) >= before => format!(
            "{} hypotheses were emulated, and none comes nearer to what was captured than the declared head",
            tried.len()
        ),
        Some(near) => format!(
            "{} hypotheses were emulated; the nearest, {}, leaves {:.1e} times the energy that the declared head leaves, an error {} times as large as rounding explains{}",
            tried.len(),
            near.cause.id(),
            left(near) / before,
            beyond(near, keys),
            partly(near, keys)
        ),
    };
    unexplained(words, nearest.map(|near| near.cause.id().to_string()), (evidence, keys))
}

/// How many times as large as its bound the error is that a hypothesis leaves at most.
fn beyond(near: &Tried<'_>, keys: &BTreeSet<Key>) -> String {
    let over = |key: &Key| near.residuals.get(key).map_or(f64::INFINITY, |of| of.overshoot);
    let rest = keys.iter().filter(|key| !near.explains.contains(key)).map(over);
    match largest(rest).sqrt() {
        times if times < 1e4 => format!("{times:.1}"),
        times => format!("{times:.0e}"),
    }
}

/// What the nearest hypothesis explains and what not, where it explains some comparisons.
fn partly(near: &Tried<'_>, keys: &BTreeSet<Key>) -> String {
    let names = |explained: bool| {
        let of = keys.iter().filter(|key| near.explains.contains(key) == explained);
        let mut all: Vec<&str> = of.map(|key| key.stage.name()).collect();
        all.dedup();
        all.join(", ")
    };
    match (names(true), names(false)) {
        (some, _) if some.is_empty() => String::new(),
        (some, rest) => format!(": it explains {some}, and not {rest}"),
    }
}

/// What fails by so little that many causes bring it within its bounds, and none reproduces it.
pub(super) fn unproved(evidence: &Evidence<'_>) -> Found {
    let keys = &evidence.failing;
    let over = |key: &Key| evidence.residuals.get(key).map_or(0.0, |of| of.overshoot);
    let most = largest(keys.iter().map(over)).sqrt();
    let (kind, more) = match evidence.roundings().map(|of| plausible_policies::open(&of)) {
        Some(open) if !open.is_empty() => (
            "undeclared roundings",
            format!("; declared dtypes of {} would have it judged more closely", open.join(", ")),
        ),
        _ => ("the declared roundings", String::new()),
    };
    let words = format!(
        "the error is {most:.2} times the largest that {kind} may make, so near that a wrong cause would pass as well, and with no cause does the emulated head reproduce what was captured{more}"
    );
    nameless(words, None, keys)
}

fn unexplained(
    words: String,
    next: Option<String>,
    (evidence, keys): (&Evidence<'_>, &BTreeSet<Key>),
) -> Found {
    let words = match one_factor(evidence, keys) {
        None => words,
        Some(factor) => format!(
            "{words}; one factor, {}, is all of it, and it is none that the dump's counts give",
            seven_digits(factor)
        ),
    };
    nameless(words, next, keys)
}

fn nameless(words: String, next: Option<String>, keys: &BTreeSet<Key>) -> Found {
    Found {
        id: "unknown".into(),
        standing: Standing::Unknown,
        explained: 0.0,
        norm_gap_explained: None,
        beats_next_by: None,
        next,
        bit_equal: false,
        parameters: BTreeMap::new(),
        stages: stages(keys),
        residuals: Vec::new(),
        evidence: words,
        advice: "look at the rows, tiles, ranks and microbatches that the report names; a hypothesis of your own can be tried with backtape.replay(..., variants={\"mine\": fn})".into(),
    }
}

/// A factor as people read it, whatever its size.
fn seven_digits(x: f64) -> String {
    if (1e-3..1e7).contains(&x.abs()) { format!("{x:.6}") } else { format!("{x:.6e}") }
}

/// The factor that explains every one of these comparisons, where there is one.
fn one_factor(evidence: &Evidence<'_>, keys: &BTreeSet<Key>) -> Option<f64> {
    let all: Vec<_> = keys.iter().map(|key| evidence.residuals.get(key)).collect::<Option<_>>()?;
    let factor = all.first()?.factor;
    let same = |of: &f64| (of / factor - 1.0).abs() < 1e-3;
    all.iter().all(|of| of.is_scaled() && same(&of.factor)).then_some(factor)
}

/// Causes that are seen rather than computed.
pub(super) fn observed(catalogue: &[&dyn Cause], evidence: &Evidence<'_>) -> Vec<Found> {
    let one = |cause: &&dyn Cause| {
        let Observed { evidence: words, stages, parameters: of } = cause.observed(evidence)?;
        let stages = stages.into_iter().map(Stage::name).collect();
        let parameters = parameters(&of);
        Some(Found { parameters, ..Found::seen(cause.id(), stages, words, cause.advice().into()) })
    };
    catalogue.iter().filter_map(one).collect()
}

fn parameters(of: &[(&'static str, String)]) -> BTreeMap<String, String> {
    of.iter().map(|(name, value)| (name.to_string(), value.clone())).collect()
}

fn stages(keys: &BTreeSet<Key>) -> Vec<&'static str> {
    let stages: BTreeSet<Stage> = keys.iter().map(|key| key.stage).collect();
    stages.into_iter().map(Stage::name).collect()
}

/// What is left of each stage, in the order of the stages.
fn by_stage(before: &Residuals, of: &Tried<'_>, keys: &BTreeSet<Key>) -> Vec<StageResidual> {
    let stages: BTreeSet<Stage> = keys.iter().map(|key| key.stage).collect();
    let one = |stage: Stage| {
        let keys = keys.iter().filter(|key| key.stage == stage);
        let pairs = keys.filter_map(|key| Some((before.get(key)?, of.residuals.get(key)?)));
        let (mut sums, mut norm, mut comparisons) = ([0.0; 3], 0.0, 0);
        for (before, after) in pairs {
            let energies = [before.energy, after.energy, before.floor];
            sums.iter_mut().zip(energies).for_each(|(sum, x)| *sum += x);
            norm += before.reference;
            comparisons += 1;
        }
        let [before, after, floor] = sums.map(|energy| relative(energy, norm));
        let (stage, sampled) = (stage.name(), !of.full);
        StageResidual { stage, comparisons, before, after, floor, sampled }
    };
    stages.into_iter().map(one).filter(|found| found.comparisons > 0).collect()
}

/// Share of the energy beyond the floor that is gone. The floor of a comparison is what
/// rounding is expected to leave, or what is left where that is less.
fn explained(before: &Residuals, after: &Residuals, keys: &BTreeSet<Key>) -> f64 {
    let (mut gone, mut all) = (0.0, 0.0);
    for key in keys {
        let (Some(one), Some(other)) = (before.get(key), after.get(key)) else { continue };
        let floor = one.floor.min(one.energy).max(f64::MIN_POSITIVE);
        if one.energy.is_finite() {
            all += one.energy / floor - 1.0;
            gone += (one.energy - other.energy.max(one.floor).min(one.energy)) / floor;
        }
    }
    if all > 0.0 { (gone / all).clamp(0.0, 1.0) } else { 1.0 }
}

/// The same of the difference of squared norms, over the failing dk.
fn norm_gap(before: &Residuals, after: &Residuals, keys: &BTreeSet<Key>) -> Option<f64> {
    let of_dk = |key: &&Key| key.stage.kind() == Kind::ClassRows;
    let (mut gone, mut all) = (0.0, 0.0);
    for key in keys.iter().filter(of_dk) {
        let (one, other) = (before.get(key)?, after.get(key)?);
        all += one.captured - one.reference;
        gone += other.reference - one.reference;
    }
    let share = gone / all;
    Some(share).filter(|share| share.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_is_short_whatever_its_size() {
        assert_eq!(seven_digits(1024.003), "1024.003000");
        assert_eq!(seven_digits(3.4e38), "3.400000e38");
        assert_eq!(seven_digits(-1e-9), "-1.000000e-9");
    }
}
