//! The divergence as it would look if the job had not recorded the parts of its gradients.
//!
//! A gradient whose parts were recorded is compared with their sum, so it agrees where a part is
//! wrong and the sum is taken correctly. A cause that reads its parameters off whole gradients then
//! sees no error. Here the wrong parts are left out of the dump, so the gradient is compared with
//! what the head's inputs give.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::role::Role;

use super::evidence::{Evidence, Key};
use super::search::Search;
use crate::head::{HeadStep, Stage};

/// Gradients that are compared with the sum of their recorded parts, and the stages of those parts.
const SUMS: [(Stage, &[Stage]); 3] = [
    (Stage::Dq, &[Stage::DqLse, Stage::DqLabel, Stage::Dlogits]),
    (Stage::Dk, &[Stage::DkLse, Stage::DkLabel, Stage::Dlogits]),
    (Stage::Dbias, &[Stage::Dlogits]),
];

/// The failing parts of gradients that agree.
fn hiding_parts(evidence: &Evidence<'_>) -> BTreeSet<Stage> {
    let agreeing = SUMS.iter().filter(|(sum, _)| evidence.agrees(*sum));
    let parts = agreeing.flat_map(|(_, parts)| parts.iter().copied());
    parts.filter(|&stage| evidence.fails(stage)).collect()
}

/// The step without the parts that hide a wrong gradient; `None` where nothing does.
pub(super) fn step<'a>(evidence: &Evidence<'a>) -> Option<HeadStep<'a>> {
    let hiding = hiding_parts(evidence);
    let hides = |role: Role| Stage::of_role(role).is_some_and(|stage| hiding.contains(&stage));
    (!hiding.is_empty()).then(|| evidence.step.without(&hides))
}

/// A search in that step, of the stages that it still has.
pub(super) fn search<'s>(step: &'s HeadStep<'s>, search: &Search<'s>) -> Search<'s> {
    let kept = |stage: &Stage| match stage.role() {
        Some(role) => step.tensors.values().any(|info| info.role == Some(role)),
        None => true,
    };
    Search { step, cache: Arc::default(), ..search.only(|stage| kept(&stage)) }
}

/// The divergence as that search sees it; `None` unless a gradient fails in it that agreed before.
pub(super) fn shown<'s>(search: &'s Search<'s>, declared: &Evidence<'s>) -> Option<Evidence<'s>> {
    let residuals = search.residuals(&[])?;
    let mut evidence =
        Evidence::new(search.step, declared.outcome, declared.inputs, residuals, Vec::new());
    evidence.whole = evidence.residuals.clone();
    let hidden =
        |key: &Key| SUMS.iter().any(|(sum, _)| *sum == key.stage) && declared.agrees(key.stage);
    let shows = evidence.failing.iter().any(hidden);
    shows.then(|| evidence.searched_by(search))
}
