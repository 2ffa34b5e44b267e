//! Two dumps of the same step, tensor by tensor in global coordinates.
//!
//! Inputs come first: when they differ, the backward is not to blame yet. Then
//! every head tensor that both dumps hold, brought to one shape (`align`), so
//! that the two runs may be sharded, cut into microbatches and laid out in any
//! way. Two clean values differ from one reference by their own allowances, so
//! from each other by the sum of both at most. Tensors without a part in the
//! head are compared by name ([`named`]).
//!
//! One tensor at a time, in slabs: never a whole model in memory.

mod align;
mod asked;
pub mod error;
pub mod named;
mod products;
mod side;
mod stages;
mod tokens;
mod view;
mod walk;

use std::collections::BTreeSet;

use backtape::identity::Microbatch;
use backtape::part::Part;
use backtape::role::Role;
use backtape::shard::TensorKey;
use serde::Serialize;

use super::against::error::AgainstError;
use super::outcome::{NotChecked, Status};
use crate::algebra;
use crate::compare::measures::Summary;
use crate::head::Stage;

pub use super::against::asked::{Asked, Named, PatternError};
pub use super::against::named::NamedDifference;
pub use super::against::side::Side;

/// One stage in both dumps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The stage that made it.
    pub stage: Stage,
    /// Its microbatch; absent when it is of the whole step.
    pub microbatch: Option<Microbatch>,
    /// How it came out; `Skip` where nothing says how much may differ.
    pub status: Status,
    /// Why it fails; empty when the numbers say it.
    pub reason: String,
    /// How the two were brought to one shape; empty when they had it.
    pub aligned: String,
    /// Relative difference in the Frobenius norm.
    pub difference: f64,
    /// How much both runs' rounding explains together.
    pub allowed: Option<f64>,
    /// Elements whose bits differ, of sums those whose values do.
    pub unequal: u64,
    /// Norm in this dump.
    pub norm: f64,
    /// Norm in the other dump.
    pub other_norm: f64,
    /// Row and column of the largest difference, and both values.
    pub worst: Option<((u64, u64), f64, f64)>,
    /// The measures that other tools have too.
    pub measures: Summary,
}

/// The tensor at which two runs seem to part, where no bound says that they do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Likely {
    /// The tensor, with its microbatch and moment.
    pub tensor: String,
    /// Why it is taken for the first.
    pub why: String,
}

/// All that two dumps say of each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Differences {
    /// Stage by stage.
    pub stages: Vec<Difference>,
    /// What has no part in the head, in the order of capture.
    pub named: Vec<NamedDifference>,
    /// Where those tensors part, likely.
    pub likely: Option<Likely>,
    /// What is worth a sentence.
    pub findings: Vec<String>,
    /// What could not be compared, and why.
    pub not_checked: Vec<NotChecked>,
    /// Tensors that were asked for by name, or by asking for everything where
    /// there is no head, and that nothing could judge.
    pub unjudged: usize,
    /// How many of those both runs hold, and they differ.
    pub differing: usize,
}

/// Compares what both dumps hold, in the order of the stages, then by name.
pub fn against(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
    asked: &Asked,
) -> Result<Differences, AgainstError> {
    let empty = asked.patterns.iter().find(|named| {
        let mut keys = this_run.dump.tensors().keys().chain(other_run.dump.tensors().keys());
        !keys.any(|key| named.matches(key))
    });
    if let Some(named) = empty {
        let recorded = recorded_names(this_run, other_run);
        return Err(AgainstError::Nothing { pattern: named.to_string(), recorded });
    }
    let lacks = |role: &&Role| {
        let mut infos = this_run.dump.tensors().values().chain(other_run.dump.tensors().values());
        !infos.any(|info| info.role == Some(**role))
    };
    if let Some(role) = asked.roles.iter().find(lacks) {
        let recorded = recorded_names(this_run, other_run);
        return Err(AgainstError::Nothing { pattern: role.to_string(), recorded });
    }
    let mut differences = Differences::default();
    let mut seen = BTreeSet::new();
    if this_run.declared.is_some() && other_run.declared.is_some() {
        stages::compare(this_run, other_run, asked, &mut differences, &mut seen)?;
    }
    // The parts of a step are compared parameter by parameter (`algebra::against`); by name only
    // those that a pattern names, but for what a rank declares, which is text.
    let wanted = |key: &TensorKey| {
        let is_text = Part::declaring_rank(key.tensor.as_str()).is_some();
        let is_everything = asked.everything() && !algebra::is_part(key);
        let is_asked =
            is_everything || asked.names(key) || has_role(this_run, other_run, key, asked);
        is_asked && !is_text
    };
    let usable = |key: &TensorKey| {
        other_run.dump.tensors().contains_key(key) && !other_run.unusable.contains_key(key)
    };
    let by_name =
        |key: &TensorKey| wanted(key) && of_head(this_run, other_run, key).is_none() && usable(key);
    let keys = named::in_order(this_run, by_name);
    differences.named = named::compare(this_run, other_run, &keys)?;
    seen.extend(keys.into_iter().cloned());
    let likely = named::likely(&differences.named);
    differences.likely =
        likely.map(|(at, why)| Likely { tensor: differences.named[at].tensor.clone(), why });
    let left_out = left_out(this_run, other_run, &wanted, &seen);
    // Beside a head that was judged, other tensors are shown for information.
    if !asked.patterns.is_empty() || differences.stages.is_empty() {
        let warned = differences.named.iter().filter(|named| named.status == Status::Warn).count();
        differences.differing = warned;
        differences.unjudged = warned + left_out.len();
    }
    differences.not_checked.extend(left_out);
    Ok(differences)
}

/// The role under which the head compares a tensor; none without a head.
fn of_head(this_run: &Side<'_>, other_run: &Side<'_>, key: &TensorKey) -> Option<Role> {
    let heads = this_run.declared.is_some() && other_run.declared.is_some();
    let info = this_run.dump.tensors().get(key).or_else(|| other_run.dump.tensors().get(key))?;
    info.role.filter(|_| heads)
}

fn has_role(this_run: &Side<'_>, other_run: &Side<'_>, key: &TensorKey, asked: &Asked) -> bool {
    let info = this_run.dump.tensors().get(key).or_else(|| other_run.dump.tensors().get(key));
    info.and_then(|info| info.role).is_some_and(|role| asked.roles.contains(&role))
}

/// The stages that the request is about: roles, and what patterns name of them.
pub fn wanted_roles(dump: &crate::dump::StepDump, asked: &Asked) -> Vec<Role> {
    let mut roles = asked.roles.clone();
    for (key, info) in dump.tensors() {
        roles.extend(info.role.filter(|role| asked.names(key) && !asked.roles.contains(role)));
    }
    roles.sort_unstable();
    roles.dedup();
    roles
}

/// Tensors of the request that only one run holds, or that the runs hold for
/// different parts of the step.
fn left_out(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
    wanted: &impl Fn(&TensorKey) -> bool,
    seen: &BTreeSet<TensorKey>,
) -> Vec<NotChecked> {
    let mut not_checked = Vec::new();
    let sides = [(this_run, other_run, "this run"), (other_run, this_run, "the other run")];
    for (side, against, whose) in sides {
        for (key, why) in side.unusable.iter().filter(|(key, _)| wanted(key)) {
            let what = format!("{key} of {whose}");
            not_checked.push(NotChecked { what, why: why.clone() });
        }
        for (key, _) in side.tensors().filter(|(key, _)| wanted(key) && !seen.contains(*key)) {
            let is_recorded = against.dump.tensors().contains_key(key);
            let why = match (is_recorded, against.unusable.contains_key(key)) {
                (_, true) => continue,
                (true, false) => "the two runs hold it in shapes that cannot be aligned".into(),
                (false, false) => format!("only {whose} holds it"),
            };
            let item = NotChecked { what: key.to_string(), why };
            if !not_checked.contains(&item) {
                not_checked.push(item);
            }
        }
    }
    not_checked
}

/// Names of the tensors of both runs, once each.
pub(super) fn recorded_names(this_run: &Side<'_>, other_run: &Side<'_>) -> String {
    const SHOWN: usize = 40;
    let names = this_run.dump.tensors().keys().chain(other_run.dump.tensors().keys());
    let names: BTreeSet<&str> = names.map(|key| key.tensor.as_str()).collect();
    let shown: Vec<&str> = names.iter().copied().take(SHOWN).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
