//! A step of which ranks hold several versions: each group of ranks is judged by what it holds.

use super::error::RunError;
use super::settings::Settings;
use super::step::{causes, replay_step};
use super::summary::Opened;
use crate::diagnose::{self, CauseReport};
use crate::dump::versions::{HeldBy, disputed};
use crate::head::HeadStep;
use crate::replay::against::Asked;
use crate::replay::outcome::{Outcome, Passes};
use crate::replay::versions::joined;
use crate::report::drawings::drawings;
use crate::report::schema::Report;
use crate::report::step_checks;

/// The report of all groups together. A cluster would compute with other versions than a group
/// holds, so the tiles stay in this process.
pub(super) fn report(
    opened: Opened<'_>,
    versions_held: &[HeldBy],
    asked: &Asked,
    settings: &Settings<'_>,
) -> Result<Report, RunError> {
    let Opened { dump, proof, .. } = opened;
    let wrong = |source| opened.wrong(source);
    let disputed = disputed(dump, |key| proof.unusable(key).is_none());
    let mut all = opened.head(settings)?;
    all.disputed.clone_from(&disputed);
    let settings = &Settings { cluster: None, ..*settings };
    let mut judged: Vec<(HeadStep<'_>, Outcome)> = Vec::new();
    for version in versions_held {
        let mut step = Opened { dump: &version.dump, ..opened }.head(settings)?;
        step.only = Some(version.ranks.clone());
        let mut outcome = replay_step(opened, &step, &asked.roles, settings)?;
        // What the forward passes of many versions hold would add up.
        outcome.passes = Passes::default();
        judged.push((step, outcome));
    }
    let Some(whole) = joined(&judged, versions_held, &disputed) else {
        return Ok(opened.report(None));
    };
    let versions = diagnose::Versions::of(&all, &whole).map_err(wrong)?;
    let mut causes_of_versions: Vec<CauseReport> = Vec::new();
    let open = |(_, outcome): &&mut (HeadStep<'_>, Outcome)| !versions.explain_all_of(outcome);
    let open: Vec<_> = judged.iter_mut().filter(open).collect();
    let among = open.len() as u64;
    for (step, outcome) in open {
        let of_group = causes(step, outcome, settings.variants, (settings, among));
        for cause in of_group.map_err(wrong)? {
            if causes_of_versions.iter().all(|known| known.id != cause.id) {
                causes_of_versions.push(cause);
            }
        }
    }
    let mut outcome = joined(&judged, versions_held, &disputed).unwrap_or(whole);
    let step = judged.swap_remove(0).0;
    let causes = versions.with(causes_of_versions);
    let variants = diagnose::variants(&step, settings.variants).map_err(wrong)?;
    let drawings = settings.draws.then(|| drawings(dump, proof, std::mem::take(&mut outcome.maps)));
    let report = opened.report(Some((&step, &outcome)));
    let causes = step_checks::causes(dump, &report.checks, causes);
    Ok(Report { causes, variants, drawings, ..report })
}
