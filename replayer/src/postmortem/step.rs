//! From a step on disk to its report.

use std::path::Path;
use std::sync::Arc;

use backtape::role::Role;
use backtape::shard::TensorKey;

use super::defect::caught;
use super::error::RunError;
use super::pair;
use super::settings::{Settings, Work, proved};
use super::summary::Opened;
use super::versions;
use crate::algebra::{self, StepReport};
use crate::diagnose::{self, Budget, CauseReport, diagnose};
use crate::dump::{self, Selection, versions::versions};
use crate::head::HeadStep;
use crate::head::step::StepError;
use crate::kernels::Progress;
use crate::replay::against::Asked;
use crate::replay::outcome::{NotChecked, Outcome};
use crate::replay::variant::Variant;
use crate::replay::{self, Request};
use crate::report::drawings::drawings;
use crate::report::schema::Report;
use crate::report::step_checks;

/// The report of a step, and with `other` of the same step of two runs. It fails where there is
/// nothing to report on: no such dump, a head that cannot be replayed, words of `asked` that name
/// nothing.
pub fn report(
    path: &Path,
    selection: &Selection,
    asked: &Asked,
    other: Option<&Path>,
    settings: &Settings<'_>,
) -> Result<Report, RunError> {
    let dump = dump::open(path, selection)?;
    let proof = proved(&dump, settings.watch);
    let opened = Opened { path, dump: &dump, proof: &proof };
    if let Some(other) = other {
        return pair::report(opened, other, asked, settings);
    }
    if !dump.is_whole() {
        return Ok(opened.report(None));
    }
    let algebra = algebra_of(opened, asked, settings);
    if !asked.wants_head() || (dump.manifest.head.is_none() && algebra.is_some()) {
        let mut report = opened.report(None);
        if asked.wants_head() {
            report.say_why_no_head(&dump.manifest.omissions);
        }
        return Ok(report.with_algebra(algebra, asked.step));
    }
    if let Some(named) = asked.patterns.first() {
        let known: Vec<_> = Role::ALL.iter().map(|role| role.name()).collect();
        return Err(RunError::NotRole { word: named.to_string(), known: known.join(", ") });
    }
    let held = versions(&dump, |key| proof.unusable(key).is_none());
    if !held.is_empty() {
        return versions::report(opened, &held, asked, settings);
    }
    // A defect of ours costs what it was computing, and not what was found before it.
    let ended = |panicked, judged: Option<(&HeadStep<'_>, &Outcome)>| {
        let found = Some(Box::new(opened.report(judged)));
        RunError::Panicked { panicked, found }
    };
    let judged = caught(|| replay_one(opened, &asked.roles, settings));
    let (step, mut outcome) = judged.map_err(|panicked| ended(panicked, None))??;
    let before = outcome.clone();
    let whole = caught(|| explained(opened, (&step, &mut outcome), settings));
    let mut report = whole.map_err(|panicked| ended(panicked, Some((&step, &before))))??;
    if !asked.wants_step() && algebra::bytes(&dump) > 0 {
        let why = "what becomes of the gradients was recorded and not asked for: \
                   `--compare step` judges it";
        report.not_checked.push(NotChecked { what: "the step".into(), why: why.into() });
    }
    Ok(report.with_algebra(algebra, asked.step))
}

/// What became of every parameter's gradient, where that is asked for and was recorded.
pub(super) fn algebra_of(
    opened: Opened<'_>,
    asked: &Asked,
    settings: &Settings<'_>,
) -> Option<StepReport> {
    let (dump, watch) = (opened.dump, settings.watch);
    let bytes = algebra::bytes(dump);
    if !asked.wants_step() || bytes == 0 || !dump.is_whole() {
        return None;
    }
    let unusable = |key: &TensorKey| opened.proof.unusable(key).map(str::to_string);
    watch.begin("step", Work::Bytes, bytes);
    let step = algebra::judge(dump, &unusable, &|bytes| watch.advance(bytes));
    watch.begin("replay", Work::MultiplyAdds, 0);
    step
}

/// The report of a head that was replayed, with what explains it.
fn explained(
    opened: Opened<'_>,
    (step, outcome): (&HeadStep<'_>, &mut Outcome),
    settings: &Settings<'_>,
) -> Result<Report, RunError> {
    let Opened { dump, proof, .. } = opened;
    let wrong = |source| opened.wrong(source);
    let ran = settings.kernels.map(|kernels| kernels.run(step)).transpose().map_err(wrong)?;
    let (compiled, kernels) = ran.unwrap_or_default();
    let variants = [settings.variants, &compiled].concat();
    if let Some(show) = settings.show {
        show(opened.report(Some((step, &*outcome))));
    }
    let causes = causes(step, outcome, &variants, (settings, 1)).map_err(wrong)?;
    let variants = diagnose::variants(step, &variants).map_err(wrong)?;
    let drawings = settings.draws.then(|| drawings(dump, proof, std::mem::take(&mut outcome.maps)));
    let found = opened.report(Some((step, &*outcome)));
    let causes = step_checks::causes(dump, &found.checks, causes);
    Ok(Report { causes, variants, kernels, drawings, ..found })
}

/// The causes of what an outcome says, by a search that is one of `among` that share its work.
/// One that a tensor of no use ends takes no verdict with it.
pub(super) fn causes(
    step: &HeadStep<'_>,
    outcome: &mut Outcome,
    variants: &[Arc<Variant>],
    (settings, among): (&Settings<'_>, u64),
) -> Result<Vec<CauseReport>, StepError> {
    let begin = |work| settings.begin_search(work);
    let (causes, progress) = (settings.causes, settings.watch);
    let budget = Budget { causes, progress, begin: &begin, among };
    match diagnose(step, outcome, variants, &budget) {
        Err(error) if error.is_of_dump() => {
            let (what, why) = ("causes".into(), error.to_string());
            outcome.not_checked.push(NotChecked { what, why });
            Ok(Vec::new())
        }
        found => found,
    }
}

/// Reads the head of a dump and replays it.
pub(super) fn replay_one<'a>(
    opened: Opened<'a>,
    compare: &[Role],
    settings: &Settings<'_>,
) -> Result<(HeadStep<'a>, Outcome), RunError> {
    let step = opened.head(settings)?;
    let outcome = replay_step(opened, &step, compare, settings)?;
    Ok((step, outcome))
}

/// Replays a head.
pub(super) fn replay_step(
    opened: Opened<'_>,
    step: &HeadStep<'_>,
    compare: &[Role],
    settings: &Settings<'_>,
) -> Result<Outcome, RunError> {
    let effort = settings.effort(step);
    let Settings { draws, cluster, device, watch, .. } = *settings;
    let progress: &dyn Progress = watch;
    let total = &|work| watch.expect(work);
    let request = Request { compare, effort, progress, total, draws, cluster, device };
    match (cluster, device) {
        // In one of the threads that share the work: from outside each piece of it would be handed
        // over and waited for.
        (None, None) => rayon::scope(|_| replay::replay(step, &request)),
        _ => replay::replay(step, &request),
    }
    .map_err(|source| opened.wrong(source))
}
