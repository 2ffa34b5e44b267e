//! What the report says about a cause: plain data.

use std::collections::{BTreeMap, BTreeSet};

use backtape::nan::largest;
use serde::Serialize;

use super::cause::{Cause, Observed};
use super::decision::Decision;
use super::evidence::{Evidence, Key, Residuals};
use super::search::{Tried, left_of};
use crate::compare::tally::relative;
use crate::head::{Kind, Stage};
use crate::replay::plausible_policies;

/// How sure the report is of a cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// It explains the divergence, and no other cause does.
    Named,
    /// Others explain it as well.
    Tied,
    /// Nothing in the catalogue explains it.
    Unknown,
}

/// One cause as the report tells it, or `unknown`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CauseReport {
    /// Its id in the catalogue, or `unknown`.
    pub id: String,
    /// How sure this is.
    pub standing: Standing,
    /// Share of the squared error above the floor that vanishes when the reference has this cause.
    pub explained: f64,
    /// Share of the difference between the squared norms of captured and reference dk that
    /// vanishes; none where no dk diverges.
    pub norm_gap_explained: Option<f64>,
    /// How many times as much energy the next best cause leaves as this one; none where there is no
    /// other cause, or where this one leaves no error at all.
    pub beats_next_by: Option<f64>,
    /// The id of the next best cause.
    pub next: Option<String>,
    /// True when the reference with this cause equals the captured tensors in every bit.
    pub bit_equal: bool,
    /// Its parameters.
    pub parameters: BTreeMap<String, String>,
    /// Stages that it explains.
    pub stages: Vec<&'static str>,
    /// The error of each stage before and after this cause is put into the reference; empty where
    /// the cause was observed without a trial.
    pub residuals: Vec<StageResidual>,
    /// What shows this cause, in one sentence.
    pub evidence: String,
    /// How to fix it, in one sentence.
    pub advice: String,
}

/// Errors of one stage before and after a cause is put into the reference, over the comparisons
/// that the cause is to explain. Relative: root of the squared errors over the norm of the
/// reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageResidual {
    /// The stage.
    pub stage: &'static str,
    /// How many comparisons were counted together.
    pub comparisons: usize,
    /// The error against the declared head.
    pub before: f64,
    /// The error against the head with the cause.
    pub after: f64,
    /// The error that rounding in the declared precision is expected to cause.
    pub floor: f64,
    /// True when only a sample of the rows was compared.
    pub sampled: bool,
}

impl CauseReport {
    /// A cause that was observed without a trial.
    pub fn seen(
        id: &str,
        stages: Vec<&'static str>,
        evidence: String,
        advice: String,
    ) -> CauseReport {
        CauseReport {
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
) -> Vec<CauseReport> {
    let standing = if decision.winners.len() == 1 { Standing::Named } else { Standing::Tied };
    let next = decision.next.map(|(at, by)| (tried[at].cause.id(), by));
    let of_place = |&at: &usize| of_one(&tried[at], standing, next, keys, evidence);
    decision.winners.iter().map(of_place).collect()
}

fn of_one(
    tried: &Tried<'_>,
    standing: Standing,
    next: Option<(&str, f64)>,
    keys: &BTreeSet<Key>,
    evidence: &Evidence<'_>,
) -> CauseReport {
    let before = if tried.full { &evidence.whole } else { &evidence.residuals };
    let explained = explained(before, &tried.residuals, keys);
    let about = tried.cause.about();
    let exact = tried.exact(keys);
    let equal = if exact {
        "equals what was captured in every bit"
    } else {
        "leaves no more than rounding explains"
    };
    let comparisons = match keys.len() {
        1 => "the comparison that fails".to_string(),
        n => format!("all {n} comparisons that fail"),
    };
    CauseReport {
        id: tried.cause.id().into(),
        standing,
        explained,
        norm_gap_explained: norm_gap(before, &tried.residuals, keys),
        beats_next_by: next.map(|(_, by)| by).filter(|by| by.is_finite()),
        next: next.map(|(id, _)| id.to_string()),
        bit_equal: exact,
        parameters: parameters(&tried.hypothesis.parameters),
        stages: stages(keys),
        residuals: by_stage(before, tried, keys),
        evidence: format!(
            "{about}: emulated so, the reference {equal} in {comparisons}{}",
            against(tried)
        ),
        advice: tried.cause.advice().into(),
    }
}

/// A clause that names the parts of the step that agree and would not if the cause were in all of
/// it; empty where there are none.
fn against(tried: &Tried<'_>) -> String {
    let parts: Vec<&str> = tried.against.parts.iter().map(|part| part.words()).collect();
    if parts.is_empty() {
        return String::new();
    }
    format!("; it is in what fails alone, as {} would not agree with it", parts.join(" and "))
}

/// The first cause of a pair, which together explain what neither explains alone.
pub(super) fn partner(tried: &Tried<'_>, left: f64, evidence: &Evidence<'_>) -> CauseReport {
    let before = left_of(&evidence.residuals, &evidence.failing);
    let mut finding = of_one(tried, Standing::Named, None, &evidence.failing, evidence);
    finding.explained = ((before - tried.left) / (before - left)).clamp(0.0, 1.0);
    finding.bit_equal = false;
    finding.evidence = format!(
        "{}: it explains a part, and together with the other cause nothing is left that rounding does not explain",
        tried.cause.about()
    );
    finding
}

/// `unknown`, for comparisons that no hypothesis explains; its evidence names the hypothesis that
/// comes nearest.
pub(super) fn unknown(
    evidence: &Evidence<'_>,
    tried: &[Tried<'_>],
    keys: &BTreeSet<Key>,
) -> CauseReport {
    let left = |trial: &Tried<'_>| trial.left_of(keys);
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

/// The largest error that a hypothesis leaves in a comparison it does not explain, as a multiple of
/// the bound of that comparison.
fn beyond(near: &Tried<'_>, keys: &BTreeSet<Key>) -> String {
    let overshoot =
        |key: &Key| near.residuals.get(key).map_or(f64::INFINITY, |residual| residual.overshoot);
    let rest = keys.iter().filter(|key| !near.explains.contains(key)).map(overshoot);
    match largest(rest).sqrt() {
        times if times < 1e4 => format!("{times:.1}"),
        times => format!("{times:.0e}"),
    }
}

/// A clause with the stages that the nearest hypothesis explains and those it does not; empty where
/// it explains none.
fn partly(near: &Tried<'_>, keys: &BTreeSet<Key>) -> String {
    let names = |explained: bool| {
        let chosen = keys.iter().filter(|key| near.explains.contains(key) == explained);
        let mut all: Vec<&str> = chosen.map(|key| key.stage.name()).collect();
        all.dedup();
        all.join(", ")
    };
    match (names(true), names(false)) {
        (some, _) if some.is_empty() => String::new(),
        (some, rest) => format!(": it explains {some}, and not {rest}"),
    }
}

/// `unknown`, for comparisons that fail by so little that many causes bring them within their
/// bounds, while no cause reproduces their errors.
pub(super) fn unproved(evidence: &Evidence<'_>) -> CauseReport {
    let keys = &evidence.failing;
    let over = |key: &Key| evidence.residuals.get(key).map_or(0.0, |residual| residual.overshoot);
    let most = largest(keys.iter().map(over)).sqrt();
    let (kind, more) = match evidence
        .roundings()
        .map(|roundings| plausible_policies::open(&roundings))
    {
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
) -> CauseReport {
    let words = match one_factor(evidence, keys) {
        None => words,
        Some(factor) => format!(
            "{words}; one factor, {}, is all of it, and it is none that the dump's counts give",
            seven_digits(factor)
        ),
    };
    nameless(words, next, keys)
}

fn nameless(words: String, next: Option<String>, keys: &BTreeSet<Key>) -> CauseReport {
    CauseReport {
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

/// The one factor by which every one of these comparisons is off, where there is one.
fn one_factor(evidence: &Evidence<'_>, keys: &BTreeSet<Key>) -> Option<f64> {
    let all: Vec<_> = keys.iter().map(|key| evidence.residuals.get(key)).collect::<Option<_>>()?;
    let factor = all.first()?.factor;
    let same = |value: &f64| (value / factor - 1.0).abs() < 1e-3;
    all.iter().all(|residual| residual.is_scaled() && same(&residual.factor)).then_some(factor)
}

/// The causes of the catalogue that show without a trial.
pub(super) fn observed(catalogue: &[&dyn Cause], evidence: &Evidence<'_>) -> Vec<CauseReport> {
    let of_cause = |cause: &&dyn Cause| {
        let Observed { evidence: words, stages, parameters: named_values } =
            cause.observed(evidence)?;
        let stages = stages.into_iter().map(Stage::name).collect();
        let parameters = parameters(&named_values);
        Some(CauseReport {
            parameters,
            ..CauseReport::seen(cause.id(), stages, words, cause.advice().into())
        })
    };
    catalogue.iter().filter_map(of_cause).collect()
}

fn parameters(named_values: &[(&'static str, String)]) -> BTreeMap<String, String> {
    named_values.iter().map(|(name, value)| (name.to_string(), value.clone())).collect()
}

fn stages(keys: &BTreeSet<Key>) -> Vec<&'static str> {
    let stages: BTreeSet<Stage> = keys.iter().map(|key| key.stage).collect();
    stages.into_iter().map(Stage::name).collect()
}

/// The errors of each stage before and after, in the order of the stages.
fn by_stage(before: &Residuals, tried: &Tried<'_>, keys: &BTreeSet<Key>) -> Vec<StageResidual> {
    let stages: BTreeSet<Stage> = keys.iter().map(|key| key.stage).collect();
    let of_stage = |stage: Stage| {
        let keys = keys.iter().filter(|key| key.stage == stage);
        let pairs = keys.filter_map(|key| Some((before.get(key)?, tried.residuals.get(key)?)));
        let (mut sums, mut norm, mut comparisons) = ([0.0; 3], 0.0, 0);
        for (before, after) in pairs {
            let energies = [before.energy, after.energy, before.floor];
            sums.iter_mut().zip(energies).for_each(|(sum, x)| *sum += x);
            norm += before.reference;
            comparisons += 1;
        }
        let [before, after, floor] = sums.map(|energy| relative(energy, norm));
        let (stage, sampled) = (stage.name(), !tried.full);
        StageResidual { stage, comparisons, before, after, floor, sampled }
    };
    stages.into_iter().map(of_stage).filter(|residual| residual.comparisons > 0).collect()
}

/// Share of the energy above the floor that the cause removes. The floor of a comparison is the
/// energy that rounding is expected to cause, or the energy that it has where that is less.
fn explained(before: &Residuals, after: &Residuals, keys: &BTreeSet<Key>) -> f64 {
    let (mut gone, mut all) = (0.0, 0.0);
    for key in keys {
        let (Some(declared), Some(other)) = (before.get(key), after.get(key)) else { continue };
        let floor = declared.floor.min(declared.energy).max(f64::MIN_POSITIVE);
        if declared.energy.is_finite() {
            all += declared.energy / floor - 1.0;
            gone +=
                (declared.energy - other.energy.max(declared.floor).min(declared.energy)) / floor;
        }
    }
    if all > 0.0 { (gone / all).clamp(0.0, 1.0) } else { 1.0 }
}

/// Share of the difference of squared norms that the cause removes, over the failing comparisons of
/// dk.
fn norm_gap(before: &Residuals, after: &Residuals, keys: &BTreeSet<Key>) -> Option<f64> {
    let of_dk = |key: &&Key| key.stage.kind() == Kind::ClassRows;
    let (mut gone, mut all) = (0.0, 0.0);
    for key in keys.iter().filter(of_dk) {
        let (declared, other) = (before.get(key)?, after.get(key)?);
        all += declared.captured - declared.reference;
        gone += other.reference - declared.reference;
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
