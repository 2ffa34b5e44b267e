//! The same divergence where the job recorded the parts of its gradients.
//!
//! A gradient whose parts were recorded is judged as their sum, so it agrees where a part is wrong
//! and the sum is taken rightly. Causes that are read off whole gradients would not see what is
//! wrong. Here those parts are left out: a gradient is what its inputs make of it.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::role::Role;

use super::evidence::{Evidence, Key};
use super::search::Search;
use crate::head::{HeadStep, Stage};

/// Gradients that are judged as the sum of what was recorded of them, with those stages.
const SUMS: [(Stage, &[Stage]); 3] = [
    (Stage::Dq, &[Stage::DqLse, Stage::DqLabel, Stage::Dlogits]),
    (Stage::Dk, &[Stage::DkLse, Stage::DkLabel, Stage::Dlogits]),
    (Stage::Dbias, &[Stage::Dlogits]),
];

/// Stages that fail and that gradients which agree were judged from.
fn hiding(evidence: &Evidence<'_>) -> BTreeSet<Stage> {
    let agreeing = SUMS.iter().filter(|(sum, _)| evidence.agrees(*sum));
    let of = agreeing.flat_map(|(_, from)| from.iter().copied());
    of.filter(|&stage| evidence.fails(stage)).collect()
}

/// The step without what hides the failure of its gradients; `None` where nothing does.
pub(super) fn step<'a>(evidence: &Evidence<'a>) -> Option<HeadStep<'a>> {
    let hiding = hiding(evidence);
    let hides = |role: Role| Stage::of_role(role).is_some_and(|stage| hiding.contains(&stage));
    (!hiding.is_empty()).then(|| evidence.step.without(&hides))
}

/// A search of that step.
pub(super) fn search<'s>(step: &'s HeadStep<'s>, of: &Search<'s>) -> Search<'s> {
    let kept = |stage: &Stage| match stage.role() {
        Some(role) => step.tensors.values().any(|info| info.role == Some(role)),
        None => true,
    };
    Search { step, cache: Arc::default(), ..of.only(|stage| kept(&stage)) }
}

/// What that search shows; `None` where no gradient fails in it that agreed before.
pub(super) fn shown<'s>(search: &'s Search<'s>, of: &Evidence<'s>) -> Option<Evidence<'s>> {
    let residuals = search.residuals(&[])?;
    let mut found = Evidence::new(search.step, of.outcome, of.inputs, residuals, Vec::new());
    found.whole = found.residuals.clone();
    let hidden = |key: &Key| SUMS.iter().any(|(sum, _)| *sum == key.stage) && of.agrees(key.stage);
    let shows = found.failing.iter().any(hidden);
    shows.then(|| found.searched_by(search))
}
