//! Two dumps of the same step, tensor by tensor in global coordinates.
//!
//! Inputs come first: when they differ, the backward is not to blame yet. Then
//! every head tensor that both dumps hold; a tensor of addends is summed over
//! its ranks, so that the two runs may be sharded in any way. Two clean values
//! differ from one reference by their own allowances, so from each other by the
//! sum of both at most.

use backtape::identity::{Microbatch, Rank};
use backtape::role::Role;
use backtape::shard::TensorKey;
use serde::Serialize;

use super::outcome::{Outcome, Status};
use crate::assemble;
use crate::compare::bound::Budget;
use crate::compare::tally::relative;
use crate::head::step::{StepError, matrix};
use crate::head::{HeadStep, Stage};

/// One tensor in both dumps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The stage that made it.
    pub stage: Stage,
    /// Its microbatch.
    pub microbatch: Option<Microbatch>,
    /// How it came out; `Skip` where nothing says how much may differ.
    pub status: Status,
    /// Relative difference in the Frobenius norm.
    pub difference: f64,
    /// How much both runs' rounding explains together.
    pub allowed: Option<f64>,
    /// Elements whose bits differ; sums of addends have none.
    pub unequal: u64,
    /// Norm in this dump.
    pub norm: f64,
    /// Norm in the other dump.
    pub other_norm: f64,
    /// Row and column of the largest difference, and both values.
    pub worst: Option<((u64, u64), f64, f64)>,
}

/// A value in global coordinates, widened.
struct Value {
    shape: Vec<u64>,
    columns: usize,
    values: Vec<f64>,
}

/// One side: its head and what its own replay found.
pub struct Side<'a> {
    /// The head's tensors.
    pub step: &'a HeadStep<'a>,
    /// Against the reference.
    pub outcome: &'a Outcome,
}

/// Compares what both dumps hold, in the order of the stages.
pub fn against(
    one: &Side<'_>,
    other: &Side<'_>,
    compare: &[Role],
) -> Result<Vec<Difference>, StepError> {
    let mut found = Vec::new();
    for &stage in Stage::ALL {
        let asked = |role: &Role| Stage::of_role(*role).is_some_and(|asked| stage.serves(asked));
        let wanted = compare.is_empty() || stage == Stage::GradNorm || compare.iter().any(asked);
        if !wanted {
            continue;
        }
        for (microbatch, key, other_key) in pairs(one.step, other.step, stage) {
            let (ours, theirs) = (value(one.step, key)?, value(other.step, other_key)?);
            let allowed = allowed(one, other, stage, microbatch, &theirs);
            found.push(difference(stage, microbatch, &ours, &theirs, allowed));
        }
    }
    Ok(found)
}

type Pair<'a> = (Option<Microbatch>, &'a TensorKey, &'a TensorKey);

/// The tensors of a stage that both dumps hold.
fn pairs<'a>(one: &'a HeadStep<'_>, other: &'a HeadStep<'_>, stage: Stage) -> Vec<Pair<'a>> {
    if matches!(stage, Stage::Accumulate | Stage::Reduce) {
        let reduced = stage == Stage::Reduce;
        let find = |step: &'a HeadStep<'_>| step.find_reduced(Role::Dk, reduced);
        return find(one).zip(find(other)).map(|(a, b)| (None, a, b)).into_iter().collect();
    }
    let Some(role) = stage.role() else {
        return Vec::new();
    };
    let mut microbatches = one.microbatches.clone();
    if !microbatches.contains(&None) {
        microbatches.push(None);
    }
    let reduced = |key: &TensorKey| Some(key) == one.find_reduced(Role::Dk, true);
    let pair = |&microbatch: &Option<Microbatch>| {
        let (a, b) = one.find(role, microbatch).zip(other.find(role, microbatch))?;
        (!reduced(a)).then_some((microbatch, a, b))
    };
    microbatches.iter().filter_map(pair).collect()
}

fn value(step: &HeadStep<'_>, key: &TensorKey) -> Result<Value, StepError> {
    let info = &step.tensors[key];
    let mut ranks: Vec<Option<Rank>> = match info.partial {
        None => vec![None],
        Some(_) => info.shards.iter().map(|shard| Some(step.dump.record(shard).rank)).collect(),
    };
    ranks.sort_unstable();
    ranks.dedup();
    let mut total: Option<Value> = None;
    for rank in ranks {
        let tensor = match rank {
            None => step.assemble(key)?,
            Some(rank) => assemble::addend(step.dump, key, rank)
                .map_err(|source| StepError::Assemble { key: key.clone(), source })?,
        };
        let values: Vec<f64> = match (matrix(&tensor), crate::head::step::integers(&tensor)) {
            (Some(m), _) => (0..m.len()).map(|i| m.get_f64(i)).collect(),
            (None, Some(all)) => all.iter().map(|&n| n as f64).collect(),
            (None, None) => return Err(crate::head::step::unfit(&tensor, "numbers")),
        };
        match &mut total {
            Some(total) => total.values.iter_mut().zip(&values).for_each(|(sum, x)| *sum += x),
            None => {
                let columns = match tensor.shape.len() {
                    0 | 1 => 1,
                    _ => tensor.shape[tensor.shape.len() - 1] as usize,
                };
                total = Some(Value { shape: tensor.shape.clone(), columns, values });
            }
        }
    }
    Ok(total.expect("a tensor has a holder"))
}

/// How much both runs' rounding explains, relative to the value.
fn allowed(
    one: &Side<'_>,
    other: &Side<'_>,
    stage: Stage,
    microbatch: Option<Microbatch>,
    value: &Value,
) -> Option<f64> {
    if stage.is_input() {
        return Some(0.0);
    }
    let norm: f64 = value.values.iter().map(|x| x * x).sum();
    let reach = |side: &Side<'_>| {
        let mut budget = Budget::default();
        let mut any = false;
        for &of in sources(stage) {
            let comparisons = &side.outcome.stage(of).comparisons;
            let every = matches!(stage, Stage::Accumulate | Stage::Reduce);
            for found in comparisons.iter().filter(|c| every || c.microbatch == microbatch) {
                budget.merge(&found.tally.budget);
                any |= of == stage;
            }
        }
        any.then(|| budget.energy(BOUND).sqrt())
    };
    Some((reach(one)? + reach(other)?) / norm.sqrt())
}

/// One false alarm in e^16 for each of the few dozen pairs of a report.
const BOUND: f64 = 16.0;

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

fn difference(
    stage: Stage,
    microbatch: Option<Microbatch>,
    ours: &Value,
    theirs: &Value,
    allowed: Option<f64>,
) -> Difference {
    let (mut error, mut norm, mut other_norm, mut unequal) = (0.0, 0.0, 0.0, 0);
    let mut worst: Option<(usize, f64)> = None;
    for (at, (&x, &y)) in ours.values.iter().zip(&theirs.values).enumerate() {
        let apart = (x - y).abs();
        unequal += u64::from(x.to_bits() != y.to_bits());
        error += apart * apart;
        norm += x * x;
        other_norm += y * y;
        if !(apart <= worst.map_or(0.0, |(_, most)| most)) {
            worst = Some((at, apart));
        }
    }
    let same_shape = ours.shape == theirs.shape;
    let difference = if same_shape { relative(error, other_norm) } else { f64::INFINITY };
    let status = match allowed {
        Some(allowed) if difference <= allowed => Status::Pass,
        Some(_) => Status::Fail,
        None if difference == 0.0 => Status::Pass,
        None => Status::Skip,
    };
    let columns = ours.columns.max(1);
    let worst = worst.map(|(at, _)| {
        (((at / columns) as u64, (at % columns) as u64), ours.values[at], theirs.values[at])
    });
    let (norm, other_norm) = (norm.sqrt(), other_norm.sqrt());
    Difference { stage, microbatch, status, difference, allowed, unequal, norm, other_norm, worst }
}
