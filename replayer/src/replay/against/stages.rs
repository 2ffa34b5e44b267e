//! The head's stages in two runs: how much they differ, and how much both runs'
//! rounding explains.

use std::collections::BTreeSet;

use backtape::role::Role;
use backtape::shard::TensorKey;

use super::align::{Pairing, Plan, pairings, per_token};
use super::error::AgainstError;
use super::side::Side;
use super::tokens::{TokenOrder, same_rows, token_order};
use super::walk::walk;
use super::{Asked, Difference, Differences, wanted_roles};
use crate::compare::bound::Budget;
use crate::compare::pair::Compared;
use crate::head::Stage;
use crate::replay::outcome::{NotChecked, Status};

/// One false alarm in e^16 for each of the few dozen pairs of a report.
const BOUND: f64 = 16.0;

/// Compares every stage that both runs hold and the request is about.
pub(super) fn compare(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
    asked: &Asked,
    differences: &mut Differences,
    seen: &mut BTreeSet<TensorKey>,
) -> Result<(), AgainstError> {
    let (order, broken) = aligned_tokens(this_run, other_run)?;
    let plan = Plan::new(this_run, other_run, order);
    let roles = wanted_roles(this_run.dump, asked);
    for &stage in Stage::ALL {
        let serves = |role: &Role| Stage::of_role(*role).is_some_and(|asked| stage.serves(asked));
        let norm = stage == Stage::GradNorm && !roles.is_empty();
        if !(asked.everything() || norm || roles.iter().any(serves)) {
            continue;
        }
        for pairing in pairings(this_run, other_run, stage, &plan) {
            let keys = pairing.keys.0.iter().chain(&pairing.keys.1);
            seen.extend(keys.map(|&key| key.clone()));
            let shape = &this_run.dump.tensors()[pairing.keys.0[0]].shape;
            let of_tokens = stage.role().is_some_and(|role| per_token(role, shape));
            match &broken {
                Some(why) if of_tokens && stage != Stage::TokenOrder => {
                    let what = format!("{stage} of one run against the other");
                    differences.not_checked.push(NotChecked { what, why: why.clone() });
                }
                _ => differences.stages.push(compare_one(
                    this_run,
                    other_run,
                    &pairing,
                    broken.as_deref(),
                )?),
            }
        }
    }
    differences.findings.extend(broken);
    other_order(this_run, other_run, differences)
}

type Aligned = (Option<Vec<u64>>, Option<String>);

fn aligned_tokens(this_run: &Side<'_>, other_run: &Side<'_>) -> Result<Aligned, AgainstError> {
    let order = token_order(this_run, other_run)
        .map_err(|source| unreadable(this_run, Role::TokenOrder, source))?;
    Ok(match order {
        TokenOrder::Permuted(order) => (Some(order), None),
        TokenOrder::Broken(why) => (None, Some(why)),
        TokenOrder::Same | TokenOrder::Unknown => (None, None),
    })
}

fn unreadable(side: &Side<'_>, role: Role, source: crate::assemble::AssembleError) -> AgainstError {
    let key = side.all(role).first().map(|&key| key.clone());
    AgainstError::Assemble { key: key.expect("it was read, so it is there"), source }
}

/// The same tokens in another order look like other data: say so.
fn other_order(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
    differences: &mut Differences,
) -> Result<(), AgainstError> {
    let of_q = |d: &&mut Difference| d.stage == Stage::Q && d.status == Status::Fail;
    let Some(q) = differences.stages.iter_mut().find(of_q) else {
        return Ok(());
    };
    if same_rows(this_run, other_run).map_err(|source| unreadable(this_run, Role::Q, source))? {
        let why =
            "q holds the same tokens in another order: record token_order to have them aligned";
        q.reason = why.into();
        differences.findings.push(why.into());
    }
    Ok(())
}

fn compare_one(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
    pairing: &Pairing<'_>,
    broken: Option<&str>,
) -> Result<Difference, AgainstError> {
    let (ours, theirs) = (&pairing.ours, &pairing.theirs);
    let key = pairing.keys.0[0];
    let fits = (ours.columns, ours.elements()) == (theirs.columns, theirs.elements());
    let compared = match fits {
        true => walk(ours, theirs)
            .map_err(|source| AgainstError::Assemble { key: key.clone(), source })?,
        false => Compared::default(),
    };
    let norm = compared.energies.reference.sqrt();
    let allowed = allowed(this_run, other_run, pairing, norm);
    let difference = if fits { compared.difference() } else { f64::INFINITY };
    let mut reason = String::new();
    if !fits {
        let shape = |view: &super::view::View<'_>| format!("[{}, {}]", view.rows, view.columns);
        reason = format!("{} here, {} in the other run", shape(ours), shape(theirs));
    } else if compared.nonfinite > 0 {
        reason = format!("{} values are NaN, or infinite in one run alone", compared.nonfinite);
    }
    if let (Stage::TokenOrder, Some(why)) = (pairing.stage, broken) {
        reason = why.into();
    }
    let status = match allowed {
        _ if !reason.is_empty() => Status::Fail,
        Some(allowed) if difference <= allowed => Status::Pass,
        Some(_) => Status::Fail,
        None if difference == 0.0 => Status::Pass,
        None => Status::Skip,
    };
    let worst = compared.first_nonfinite.or(compared.measures.worst);
    Ok(Difference {
        stage: pairing.stage,
        microbatch: pairing.microbatch,
        status,
        reason,
        aligned: pairing.how.clone(),
        difference,
        allowed,
        unequal: compared.measures.mismatches,
        norm: compared.energies.captured.sqrt(),
        other_norm: norm,
        worst: worst.map(|point| (point.index, point.captured, point.reference)),
        measures: compared.summary(),
    })
}

/// How much both runs' rounding explains, relative to the value.
fn allowed(
    this_run: &Side<'_>,
    other_run: &Side<'_>,
    pairing: &Pairing<'_>,
    norm: f64,
) -> Option<f64> {
    let stage = pairing.stage;
    if stage.is_input() {
        return Some(0.0);
    }
    // What has no microbatch of its own has the errors of all of them.
    let every = pairing.joined || stage.is_sum();
    let reach = |side: &Side<'_>, factor: f64| {
        let mut budget = Budget::default();
        let mut any = false;
        for &source in sources(stage) {
            let comparisons = &side.outcome?.stage(source).comparisons;
            let ours = |mb| every || mb == pairing.microbatch;
            for comparison in comparisons.iter().filter(|c| ours(c.microbatch)) {
                budget.merge(&comparison.tally.budget);
                any |= source == stage;
            }
        }
        any.then(|| budget.energy(BOUND).sqrt() * factor)
    };
    let (ours, theirs) = pairing.factors;
    let reach = reach(this_run, ours)? + reach(other_run, theirs)?;
    // As `relative` does it: absolute where there is no norm. No bound that is no number is one.
    Some(if norm == 0.0 { reach } else { reach / norm }).filter(|most| most.is_finite())
}

/// The stages whose allowances add up in a stage that was judged from them.
fn sources(stage: Stage) -> &'static [Stage] {
    use Stage::{Accumulate, Dk, DkLabel, DkLse, Dq, DqLabel, DqLse, Reduce};
    match stage {
        Dq => &[Dq, DqLse, DqLabel],
        Dk => &[Dk, DkLse, DkLabel],
        Accumulate => &[Accumulate, Dk, DkLse, DkLabel],
        Reduce => &[Reduce, Accumulate, Dk, DkLse, DkLabel],
        Stage::Lse => &[Stage::Lse],
        Stage::LabelLogits => &[Stage::LabelLogits],
        DqLse => &[DqLse],
        DqLabel => &[DqLabel],
        DkLse => &[DkLse],
        DkLabel => &[DkLabel],
        _ => &[],
    }
}
