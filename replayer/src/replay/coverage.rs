//! How much a replay has judged of what a dump holds, or of what was asked for.

use std::collections::BTreeSet;

use backtape::identity::Microbatch;
use backtape::role::Role;
use serde::Serialize;

use crate::head::Stage;

/// Something of a stage that has no verdict.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// Of which stage.
    pub stage: Stage,
    /// Of which microbatch; `None` for all of it.
    pub microbatch: Option<Microbatch>,
    /// Why.
    pub why: String,
}

/// Stages that were judged, of those that were recorded or asked for. Inputs do not count:
/// nothing says what they should be.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// How many were judged, in part at least.
    pub judged: usize,
    /// Of how many.
    pub of: usize,
    /// Which.
    #[serde(skip)]
    pub(super) counted: BTreeSet<Stage>,
    /// What was left out of them.
    pub left_out: Vec<LeftOut>,
    /// Stages of which some tokens could not be judged, or some of the error: it is said which
    /// and why, and the rest was judged.
    pub narrowed: BTreeSet<Stage>,
    /// Why this is no agreement though nothing diverged: what was asked for by name is left out,
    /// or no gradient that was recorded could be judged.
    #[serde(skip)]
    pub lacks: Vec<String>,
}

/// The stages of some roles.
pub(super) fn stages_of(roles: &[Role]) -> BTreeSet<Stage> {
    roles
        .iter()
        .filter_map(|&role| Stage::of_role(role))
        .filter(|stage| !stage.is_input())
        .collect()
}
