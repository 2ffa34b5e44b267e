//! The checks of a step in the report of its replay: how severe their findings are, which stages
//! they belong to, which causes they name, and their lines of text.
//!
//! A check infers faults from other tensors. Where the replay compared a stage with the reference
//! and found it right, a finding that infers the opposite becomes a note.

use super::schema::FirstDivergence;
use super::text::{place, wrap};
use crate::checks::{Checked, Finding, Place, Severity, Status};
use crate::diagnose::{CauseReport, Standing};
use crate::dump::{StepDump, TensorInfo};
use crate::head::Stage;
use crate::replay::outcome::Outcome;
use backtape::role::Role;
use backtape::shard::{TensorKey, When};

/// Checks whose findings about a gradient or the loss are overruled by a comparison with the
/// reference.
const INFERRED: [&str; 2] = ["zeros", "counts"];
/// Causes that make no later stage diverge, since the replay starts from the recorded data.
const OF_DATA: [&str; 2] = ["duplicate-batch", "label-shift"];

/// Lowers the severity of findings that the replay of the head disproves.
pub fn weighed(dump: &StepDump, mut checked: Checked, outcome: Option<&Outcome>) -> Checked {
    let Some(outcome) = outcome else { return checked };
    let inferred = |finding: &&mut Finding| {
        finding.severity == Severity::Fail && INFERRED.contains(&finding.check)
    };
    for finding in checked.findings.iter_mut().filter(inferred) {
        let right = stage_of(dump, &finding.place).is_some_and(|stage| {
            let compared = &outcome.stage(stage).comparisons;
            let mut here = compared.iter().filter(|comparison| {
                comparison.microbatch.map(|mb| mb.0) == finding.place.microbatch
            });
            !compared.is_empty() && here.all(|comparison| comparison.excess.is_none())
        });
        if right {
            finding.severity = Severity::Note;
            finding.evidence += "; the reference, which knows more, has the same";
        }
    }
    checked.findings.sort_by_key(|finding| finding.severity);
    checked.settle();
    checked
}

/// The stage that a finding is about; `None` for a tensor outside the head.
fn stage_of(dump: &StepDump, place: &Place) -> Option<Stage> {
    let name = place.tensor.as_deref()?;
    let named = |(key, _): &(&TensorKey, &TensorInfo)| key.tensor.as_str() == name;
    let exact = |(key, _): &(&TensorKey, &TensorInfo)| {
        key.microbatch.map(|mb| mb.0) == place.microbatch && key.when == place.when
    };
    let all = || dump.tensors().iter().filter(named);
    let (key, info) = all().find(exact).or_else(|| all().next())?;
    match (info.role?, key.microbatch) {
        (Role::Dk, None) if info.partial.is_some() || key.when == Some(When::PreReduce) => {
            Some(Stage::Accumulate)
        }
        (Role::Dk, None) => Some(Stage::Reduce),
        (role, _) => Stage::of_role(role),
    }
}

fn failing(checked: &Checked) -> impl Iterator<Item = &Finding> {
    checked.findings.iter().filter(|finding| finding.severity == Severity::Fail)
}

/// The first divergence of the replay or of a failing check, whichever is at the earlier stage; at
/// the same stage that of the replay, which has numbers.
pub fn first_of(
    dump: &StepDump,
    checked: &Checked,
    replayed: Option<FirstDivergence>,
) -> Option<FirstDivergence> {
    let stage_named = |name: &str| Stage::ALL.iter().copied().find(|stage| stage.name() == name);
    let own_stage = replayed.as_ref().map(|first| stage_named(&first.stage));
    let earliest = failing(checked).min_by_key(|finding| stage_of(dump, &finding.place));
    let Some(earliest) = earliest else { return replayed };
    let stage = stage_of(dump, &earliest.place);
    match own_stage {
        Some(own_stage) if own_stage <= stage => replayed,
        _ => Some(diverges(dump, earliest, stage)),
    }
}

fn diverges(dump: &StepDump, finding: &Finding, stage: Option<Stage>) -> FirstDivergence {
    let tensor = finding.place.tensor.clone().unwrap_or_else(|| finding.check.into());
    FirstDivergence {
        stage: stage.map_or(tensor.clone(), |stage| stage.name().into()),
        tensor,
        microbatch: finding.place.microbatch,
        rank: one_rank(finding),
        run: dump.run.to_string(),
        reason: finding.evidence.clone(),
    }
}

/// The rank of a finding, if it is about a single one.
fn one_rank(finding: &Finding) -> Option<u32> {
    match finding.place.ranks.as_slice() {
        [rank] => Some(*rank),
        _ => None,
    }
}

/// Joins the causes that the search found with those that the checks found. A named cause stays. An
/// unknown cause is removed where a check found a fault at the same or an earlier stage, which is
/// then the cause.
pub fn causes(dump: &StepDump, checked: &Checked, searched: Vec<CauseReport>) -> Vec<CauseReport> {
    let mut seen: Vec<CauseReport> = Vec::new();
    let mut leads: Option<Option<Stage>> = None;
    for finding in failing(checked) {
        let Some(id) = finding.cause else { continue };
        let stage = stage_of(dump, &finding.place);
        let named = |cause: &&CauseReport| cause.standing != Standing::Unknown;
        let explained = searched.iter().filter(named).any(|cause| {
            cause.id == id || stage.is_some_and(|stage| cause.stages.contains(&stage.name()))
        });
        if explained && !OF_DATA.contains(&id) || searched.iter().any(|cause| cause.id == id) {
            continue;
        }
        if !OF_DATA.contains(&id) {
            leads = Some(leads.map_or(stage, |least| least.min(stage)));
        }
        if seen.iter().all(|cause| cause.id != id) {
            let stages = stage.map(Stage::name).into_iter().collect();
            let evidence = format!("{}{}", place_prefix(finding), finding.evidence);
            let advice = finding.advice.trim_end_matches('.').into();
            seen.push(CauseReport::seen(id, stages, evidence, advice));
        }
    }
    let position = |name: &&'static str| Stage::ALL.iter().find(|stage| stage.name() == *name);
    let follows = |cause: &CauseReport| {
        let first = cause.stages.iter().filter_map(position).min();
        leads.is_some_and(|leads| leads.as_ref() <= first)
    };
    let kept =
        searched.into_iter().filter(|cause| cause.standing != Standing::Unknown || !follows(cause));
    seen.into_iter().chain(kept).collect()
}

fn place_prefix(finding: &Finding) -> String {
    match place(finding.place.microbatch, one_rank(finding)) {
        text if text.is_empty() => text,
        text => format!("{text}: "),
    }
}

/// The results of the checks, one line each; every line begins with `whose`.
pub(super) fn lines(checked: &Checked, whose: &str) -> Vec<String> {
    let names = |wanted: Status| -> Vec<&str> {
        let checks = checked.checks.iter().filter(|check| check.status == wanted);
        checks.map(|check| check.check).collect()
    };
    let mut all = Vec::new();
    for finding in checked.findings.iter().filter(|finding| finding.severity != Severity::Note) {
        let word = if finding.severity == Severity::Fail { "FAIL" } else { "warn" };
        let cause = finding.cause.map(|cause| format!(" [{cause}]")).unwrap_or_default();
        all.push(format!(
            "{whose}{word} {}{cause}: {}{}",
            finding.check,
            place_prefix(finding),
            finding.evidence
        ));
    }
    match names(Status::Pass) {
        passed if passed.is_empty() => {}
        passed => all.push(format!("{whose}pass: {}", passed.join(", "))),
    }
    match names(Status::NotChecked) {
        idle if idle.is_empty() => {}
        idle => {
            all.push(format!("{whose}unchecked: {} (`replay checks` says why)", idle.join(", ")))
        }
    }
    all
}

/// Writes these lines.
pub(super) fn render(out: &mut String, checked: &Checked, whose: &str) {
    for line in lines(checked, whose) {
        wrap(out, "checks    ", &line);
    }
}
