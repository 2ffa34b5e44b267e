//! The report of two runs, and its verdict.
//!
//! A stage that leaves its reference or the other run by more than rounding
//! explains diverges; so does a tensor that is NaN, of another shape, or no longer
//! the product of its recorded operands. Where something outside the head differs
//! and nothing that was recorded says how much it may, the runs differ, which is a
//! verdict of its own: neither agreed nor diverged.

use std::path::Path;

use backtape::role::Role;
use backtape::shard::TensorKey;

use super::error::RunError;
use super::settings::{Settings, proved};
use super::step::{algebra_of, causes, replay_one};
use super::summary::Opened;
use crate::algebra::against::{Mapping, Run, StepsApart, against as against_step};
use crate::algebra::{self, StepReport};
use crate::diagnose::CauseReport;
use crate::dump::{self, StepDump};
use crate::head::{HeadStep, Stage};
use crate::number::plural;
use crate::replay::against::{Asked, Differences, Side, against, wanted_roles};
use crate::replay::norm_gap::between;
use crate::replay::outcome::{NotChecked, Outcome, Status};
use crate::report::drawings::drawings;
use crate::report::schema::{AgainstReport, FirstDivergence, Reason, Report};
use crate::report::step_checks;
use crate::report::verdict::verdict;
use crate::verify::Verification;

/// A head that was replayed, and why it leaves its reference.
type Judged<'a> = Option<(HeadStep<'a>, Outcome, Vec<CauseReport>)>;

/// The report of a run against another.
pub(super) fn report(
    opened: Opened<'_>,
    other_path: &Path,
    asked: &Asked,
    settings: &Settings<'_>,
) -> Result<Report, RunError> {
    let Opened { dump, proof, .. } = opened;
    let other_dump = dump::open_other(other_path, dump.step)?;
    let other_proof = proved(&other_dump, settings.watch);
    let another = Opened { path: other_path, dump: &other_dump, proof: &other_proof };
    let roles = wanted_roles(dump, asked);
    let ours = judge(opened, asked, &roles, settings)?;
    // The other run may lack a role: what it holds is replayed.
    let is_recorded = |role: &Role| other_dump.tensors().values().any(|t| t.role == Some(*role));
    let shared: Vec<Role> = roles.iter().copied().filter(is_recorded).collect();
    let theirs = judge(another, asked, &shared, settings)?;
    let two = (side(dump, proof, &ours), side(&other_dump, &other_proof, &theirs));
    let differences = against(&two.0, &two.1, asked)?;
    let steps = (algebra_of(opened, asked, settings), algebra_of(another, asked, settings));
    let apart = steps_apart((opened, &steps.0), (another, &steps.1), settings)?;
    let parts = |judged| Option::as_ref(judged).map(|(step, outcome, _)| (step, outcome));
    let causes =
        |judged: &Judged<'_>| judged.as_ref().map_or(Vec::new(), |(.., causes)| causes.clone());
    let lacks_one = steps.0.is_some() != steps.1.is_some();
    let mut report = opened.report(parts(&ours)).with_algebra(steps.0, asked.step);
    let mut other = another.report(parts(&theirs)).with_algebra(steps.1, asked.step);
    if lacks_one && !asked.step {
        let whose = if report.algebra.is_some() { "this run" } else { "the other run" };
        let (what, why) = ("the step".into(), format!("only {whose} recorded it"));
        report.not_checked.push(NotChecked { what, why });
    }
    report.causes = step_checks::causes(dump, &report.checks, causes(&ours));
    other.causes = step_checks::causes(&other_dump, &other.checks, causes(&theirs));
    if settings.draws {
        let maps = |judged: &Judged<'_>| {
            judged.as_ref().map_or(Vec::new(), |(_, outcome, _)| outcome.maps.clone())
        };
        report.drawings = Some(drawings(dump, proof, maps(&ours)));
        other.drawings = Some(drawings(&other_dump, &other_proof, maps(&theirs)));
    }
    if dump.step != other_dump.step {
        let (own, other) = (dump.step, other_dump.step);
        let what = format!("step {own} of this run is compared with step {other} of the other");
        report.findings.push(what);
    }
    join(&mut report, other, differences, apart);
    if let (Some((step, ..)), Some((other_step, ..)), Some(against)) =
        (&ours, &theirs, &mut report.against)
    {
        let gap = between(step, other_step);
        against.norm_gap = gap.map_err(|source| another.wrong(source))?;
    }
    Ok(report)
}

/// The steps of two runs against each other, where both hold one.
fn steps_apart(
    (this_run, ours): (Opened<'_>, &Option<StepReport>),
    (other_run, theirs): (Opened<'_>, &Option<StepReport>),
    settings: &Settings<'_>,
) -> Result<Option<StepsApart>, RunError> {
    let (Some(ours), Some(theirs)) = (ours, theirs) else { return Ok(None) };
    let ours_unusable = |key: &TensorKey| this_run.proof.unusable(key).map(str::to_string);
    let theirs_unusable = |key: &TensorKey| other_run.proof.unusable(key).map(str::to_string);
    let this_run = Run { dump: this_run.dump, unusable: &ours_unusable, report: ours };
    let other_run = Run { dump: other_run.dump, unusable: &theirs_unusable, report: theirs };
    let by_name = Mapping::default();
    Ok(against_step(this_run, other_run, settings.mapping.unwrap_or(&by_name))?)
}

/// Replays the head where there is one and the request is about it.
fn judge<'a>(
    opened: Opened<'a>,
    asked: &Asked,
    roles: &[Role],
    settings: &Settings<'_>,
) -> Result<Judged<'a>, RunError> {
    let dump = opened.dump;
    let about = asked.everything() || !roles.is_empty();
    // Of a part of a step nothing is judged; its report says so.
    let replayed = dump.manifest.head.is_some() && about && dump.is_whole();
    if !replayed {
        return Ok(None);
    }
    let (step, mut outcome) = replay_one(opened, roles, settings)?;
    let causes = causes(&step, &mut outcome, &[], (settings, 1));
    let causes = causes.map_err(|source| opened.wrong(source))?;
    Ok(Some((step, outcome, causes)))
}

fn side<'a>(dump: &'a StepDump, proof: &Verification, judged: &'a Judged<'_>) -> Side<'a> {
    let unusable = |key: &_| proof.unusable(key).map(str::to_string);
    let outcome = judged.as_ref().map(|(_, outcome, _)| outcome);
    Side { outcome, ..Side::new(dump, unusable) }
}

/// Adds the other run: the earliest place at which either leaves its reference
/// or the two leave each other is the first divergence.
fn join(report: &mut Report, other: Report, differences: Differences, apart: Option<StepsApart>) {
    let runs = format!("{} and {}", report.dump.run, other.dump.run);
    let of_pair = first_of(&differences, runs);
    let order = |first: &FirstDivergence| {
        if algebra::Stage::named(&first.stage).is_some() {
            return usize::MAX;
        }
        let stage = Stage::ALL.iter().position(|stage| stage.name() == first.stage);
        // Layers come before the head in the forward and after it in the backward.
        let named = differences.named.iter().find(|named| named.tensor == first.stage);
        match (stage, named.is_some_and(|named| named.gradient)) {
            (Some(stage), _) => stage + 1,
            (None, false) => 0,
            (None, true) => usize::MAX - 1,
        }
    };
    let own_first = report.first_divergence.take();
    let all = own_first.into_iter().chain(other.first_divergence.clone()).chain(of_pair);
    report.first_divergence = all.min_by_key(order);
    let own_reasons = std::mem::take(&mut report.reasons);
    report.reasons = reasons((own_reasons, other.reasons), &differences, apart.as_ref());
    report.verdict = verdict(&report.reasons);
    report.findings.extend(differences.findings);
    report.findings.extend(other.findings.iter().map(|finding| format!("other run: {finding}")));
    let here = report.not_checked.clone();
    let named: Vec<&str> = differences.named.iter().map(|named| named.tensor.as_str()).collect();
    // What this comparison did look at is no longer unchecked.
    report.not_checked.retain(|item| !named.contains(&item.what.as_str()));
    let more = other.not_checked.into_iter().filter(|item| !here.contains(item));
    let more: Vec<NotChecked> = more
        .filter(|item| !named.contains(&item.what.as_str()))
        .map(|item| NotChecked { what: format!("other run, {}", item.what), why: item.why })
        .collect();
    report.not_checked.extend(more);
    report.not_checked.extend(differences.not_checked);
    let apart_from = apart.iter().flat_map(|apart| &apart.not_compared);
    report.not_checked.extend(
        apart_from
            .map(|(what, why)| NotChecked { what: format!("both runs, {what}"), why: why.clone() }),
    );
    report.against = Some(AgainstReport {
        dump: other.dump,
        stages: other.stages,
        causes: other.causes,
        differences: differences.stages,
        tensors: differences.named,
        likely: differences.likely,
        unjudged: differences.unjudged,
        checks: other.checks,
        grad_norm: other.grad_norm,
        norm_gap: None,
        algebra: other.algebra,
        step: apart,
        drawings: other.drawings,
    });
}

/// Why the two runs do not agree: what speaks against either, and what parts them.
fn reasons(
    (ours, theirs): (Vec<Reason>, Vec<Reason>),
    differences: &Differences,
    apart: Option<&StepsApart>,
) -> Vec<Reason> {
    let mut all = ours;
    let other = |reason: Reason| Reason { what: format!("other run: {}", reason.what), ..reason };
    all.extend(theirs.into_iter().map(other));
    let stages = differences.stages.iter().filter(|stage| stage.status == Status::Fail);
    all.extend(
        stages.map(|difference| Reason::diverged(format!("both runs: {}", difference.stage))),
    );
    let named = differences.named.iter().filter(|named| named.status == Status::Fail);
    all.extend(
        named.map(|difference| Reason::diverged(format!("both runs: {}", difference.tensor))),
    );
    if let Some(apart) = apart {
        all.extend(apart.differs.iter().map(|what| Reason::differs(format!("both runs: {what}"))));
        all.extend(apart.lacking.iter().map(|what| Reason::incomplete(what.clone())));
    }
    if differences.stages.is_empty() && differences.named.is_empty() && apart.is_none() {
        all.push(Reason::incomplete("nothing that was asked for could be compared"));
    }
    if differences.differing > 0 {
        let tensors = plural(differences.differing as u64, "tensor");
        all.push(Reason::differs(format!(
            "{tensors} outside the head differ, and nothing recorded says how much they may"
        )));
    }
    if differences.unjudged > differences.differing {
        let tensors = plural((differences.unjudged - differences.differing) as u64, "tensor");
        all.push(Reason::incomplete(format!("{tensors} could not be compared")));
    }
    all
}

/// Where the two runs leave each other first.
fn first_of(differences: &Differences, run: String) -> Option<FirstDivergence> {
    let of_stage = |apart: &crate::replay::against::Difference| FirstDivergence {
        stage: apart.stage.name().into(),
        tensor: apart.stage.name().into(),
        microbatch: apart.microbatch.map(|mb| mb.0),
        rank: None,
        run: run.clone(),
        reason: match (apart.stage.is_input(), apart.reason.as_str()) {
            (true, "") => format!(
                "the inputs differ in {}, so the backward is not to blame yet",
                plural(apart.unequal, "element")
            ),
            (true, why) => {
                format!("the inputs differ, so the backward is not to blame yet: {why}")
            }
            (false, "") => "the two runs differ by more than both runs' rounding explains".into(),
            (false, why) => why.into(),
        },
    };
    let of_name = |apart: &crate::replay::against::NamedDifference| FirstDivergence {
        stage: apart.tensor.clone(),
        tensor: apart.tensor.clone(),
        microbatch: None,
        rank: None,
        run: run.clone(),
        reason: apart.reason.clone(),
    };
    let named = differences.named.iter().find(|named| named.status == Status::Fail);
    let stage = differences.stages.iter().find(|stage| stage.status == Status::Fail);
    match (named, stage) {
        (Some(named), Some(stage)) if named.gradient => Some(of_stage(stage)),
        (Some(named), _) => Some(of_name(named)),
        (None, stage) => stage.map(of_stage),
    }
}
