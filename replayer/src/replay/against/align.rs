//! The same stage of two runs as two views of one shape, whatever each run's
//! microbatches, layout of k and order of tokens are.
//!
//! - A value with a row for each token is joined over microbatches, in order.
//! - A gradient of k, and the loss, are summed over microbatches, divided by
//!   their number where the job averages.
//! - k is transposed where the two runs declare different layouts.
//! - Leading dimensions are flattened: `[B, S, D]` is `[T, D]`.
//!
//! Where both runs split the step alike, microbatches are compared one by one.

use backtape::head::KLayout;
use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::side::Side;
use super::view::{Combine, View, matrix_of};
use crate::head::Stage;

/// One value in both runs.
pub(super) struct Pairing<'a> {
    pub(super) stage: Stage,
    /// Its microbatch; none when it is of the whole step.
    pub(super) microbatch: Option<Microbatch>,
    /// True when every microbatch went into it.
    pub(super) joined: bool,
    /// What each run's sum over microbatches was multiplied by.
    pub(super) factors: (f64, f64),
    pub(super) ours: View<'a>,
    pub(super) theirs: View<'a>,
    pub(super) keys: (Vec<&'a TensorKey>, Vec<&'a TensorKey>),
    /// How it was brought to one shape, as words; empty when it already was.
    pub(super) how: String,
}

/// What is known of the two runs before any value is compared.
pub(super) struct Plan {
    /// True when both runs cut the step into the same microbatches.
    pub(super) same_split: bool,
    /// Which of the other run's tokens each of ours is; none when the order is
    /// the same, or not known.
    pub(super) order: Option<Vec<u64>>,
}

impl Plan {
    pub(super) fn new(this_run: &Side<'_>, other_run: &Side<'_>, order: Option<Vec<u64>>) -> Plan {
        let microbatches = this_run.microbatches();
        let same = microbatches == other_run.microbatches()
            && microbatches.iter().all(|&mb| this_run.tokens(mb) == other_run.tokens(mb));
        Plan { same_split: same, order }
    }
}

/// True for what has a row, or a number, for each token.
pub(super) fn per_token(role: Role, shape: &[u64]) -> bool {
    match role {
        Role::Loss => !shape.is_empty() && shape != [1],
        Role::K | Role::Bias | Role::DkLse | Role::DkLabel | Role::Dk => false,
        Role::Dbias | Role::GradNorm => false,
        _ => true,
    }
}

fn summed(role: Role) -> bool {
    matches!(role, Role::DkLse | Role::DkLabel | Role::Dk | Role::Dbias | Role::Loss)
}

fn in_layout_of_k(role: Role) -> bool {
    matches!(role, Role::K | Role::DkLse | Role::DkLabel | Role::Dk)
}

/// Every pair of values of a stage that both runs hold.
pub(super) fn pairings<'a>(
    this_run: &Side<'a>,
    other_run: &Side<'a>,
    stage: Stage,
    plan: &Plan,
) -> Vec<Pairing<'a>> {
    if stage.is_sum() {
        let reduced = stage == Stage::Reduce;
        let keys = this_run.reduced(Role::Dk, reduced).zip(other_run.reduced(Role::Dk, reduced));
        let keys = keys.map(|(a, b)| (vec![a], vec![b]));
        let pair = |keys| pair(this_run, other_run, stage, Role::Dk, None, keys, plan);
        return keys.and_then(pair).into_iter().collect();
    }
    let Some(role) = stage.role() else {
        return Vec::new();
    };
    let mut pairings = Vec::new();
    let shape = |side: &Side<'_>, key: &TensorKey| side.dump.tensors()[key].shape.clone();
    let of_tokens =
        this_run.all(role).first().is_some_and(|key| per_token(role, &shape(this_run, key)));
    if plan.same_split && !(of_tokens && plan.order.is_some()) {
        let mut microbatches = this_run.microbatches();
        if !microbatches.contains(&None) {
            microbatches.push(None);
        }
        for mb in microbatches {
            let keys = this_run.find(role, mb).zip(other_run.find(role, mb));
            let keys = keys.map(|(a, b)| (vec![a], vec![b]));
            pairings.extend(
                keys.and_then(|keys| pair(this_run, other_run, stage, role, mb, keys, plan)),
            );
        }
    }
    if pairings.is_empty() {
        let (mut ours, mut theirs) = (this_run.all(role), other_run.all(role));
        if !of_tokens && !summed(role) {
            // The same in every microbatch: the first stands for all.
            ours.truncate(1);
            theirs.truncate(1);
        }
        if !ours.is_empty() && !theirs.is_empty() {
            pairings.extend(pair(this_run, other_run, stage, role, None, (ours, theirs), plan));
        }
    }
    pairings
}

fn pair<'a>(
    this_run: &Side<'a>,
    other_run: &Side<'a>,
    stage: Stage,
    role: Role,
    microbatch: Option<Microbatch>,
    keys: (Vec<&'a TensorKey>, Vec<&'a TensorKey>),
    plan: &Plan,
) -> Option<Pairing<'a>> {
    let joined = keys.0.len() > 1 || keys.1.len() > 1;
    let shape = &this_run.dump.tensors()[keys.0[0]].shape;
    let of_tokens = per_token(role, shape);
    let factors = match summed(role) && !of_tokens && joined {
        true => (share(this_run, &keys.0), share(other_run, &keys.1)),
        false => (1.0, 1.0),
    };
    let mut how = Vec::new();
    let mut view = |side: &Side<'a>, keys: &[&'a TensorKey], factor: f64, whose: &str| {
        let shape = &side.dump.tensors()[keys[0]].shape;
        let combine = match summed(role) && !of_tokens && keys.len() > 1 {
            true => Combine::Sum(factor),
            false => Combine::Join,
        };
        let columns = if of_tokens { token_columns(side, role, keys, microbatch) } else { None };
        let view = View::new(side.dump, keys, combine, columns)?;
        let turn = in_layout_of_k(role)
            && this_run.layout() != other_run.layout()
            && side.layout() == KLayout::Dv
            && shape.len() == 2;
        if turn {
            how.push(format!("{whose} transposed"));
            return view.transposed();
        }
        Some(view)
    };
    let ours = view(this_run, &keys.0, factors.0, "this run's")?;
    let mut theirs = view(other_run, &keys.1, factors.1, "the other run's")?;
    if joined {
        let verb = if of_tokens { "joined" } else { "summed" };
        how.push(format!("{} and {} microbatches {verb}", keys.0.len(), keys.1.len()));
    }
    let fits = |order: &&Vec<u64>| of_tokens && order.len() as u64 == theirs.rows;
    if let Some(order) = plan.order.as_ref().filter(fits) {
        theirs = theirs.ordered(order.clone());
        how.push("tokens matched by token_order".into());
    }
    let how = how.join(", ");
    Some(Pairing { stage, microbatch, joined, factors, ours, theirs, keys, how })
}

/// A job that averages its microbatches recorded each one's own gradient.
fn share(side: &Side<'_>, keys: &[&TensorKey]) -> f64 {
    let each = keys.iter().all(|key| key.microbatch.is_some());
    if each { side.share(keys.len()) } else { 1.0 }
}

/// Columns of a value with one row for each token: `[B, S]` labels have one.
fn token_columns(
    side: &Side<'_>,
    role: Role,
    keys: &[&TensorKey],
    microbatch: Option<Microbatch>,
) -> Option<u64> {
    let tokens = match keys {
        [key] if key.microbatch.is_some() => side.tokens(microbatch.or(key.microbatch)),
        _ => side.all_tokens(),
    };
    let elements: u64 =
        keys.iter().map(|key| side.dump.tensors()[*key].shape.iter().product::<u64>()).sum();
    let whole = tokens.filter(|&n| n > 0 && elements.is_multiple_of(n)).map(|n| elements / n);
    // A matrix says its columns itself; a vector has one number for each token.
    let shape = &side.dump.tensors()[keys[0]].shape;
    let matrix = matches!(
        role,
        Role::Q | Role::Dq | Role::DqLse | Role::DqLabel | Role::Logits | Role::Dlogits
    );
    if matrix { Some(matrix_of(shape).1) } else { whole }
}
