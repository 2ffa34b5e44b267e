//! The gap between the grad_norms of two runs, shared out as `grad_norm` does it.

use backtape::identity::Microbatch;
use backtape::role::Role;
use backtape::shard::TensorKey;
use serde::Serialize;

use super::addends::Sum;
use super::norm_shares::{Cut, Share, gradients, reported};
use crate::head::HeadStep;
use crate::head::step::{StepError, matrix};

/// How far the norms of two runs are apart, and whose doing it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NormGap {
    /// This run's norm minus the other's: as reported, else over the shared gradients.
    pub gap: f64,
    /// The shares of `tensor` add up to the gap; those of the other kinds to that of dk.
    pub shares: Vec<Share>,
}

/// The gap between two runs; `None` where they share no gradient.
pub fn between(
    this_run: &HeadStep<'_>,
    other_run: &HeadStep<'_>,
) -> Result<Option<NormGap>, StepError> {
    let theirs = gradients(other_run);
    let shared: Vec<(&TensorKey, &TensorKey)> = gradients(this_run)
        .into_iter()
        .filter_map(|key| {
            Some((key, *theirs.iter().find(|of| matches(this_run, other_run, key, of))?))
        })
        .collect();
    let mut parts = Vec::new();
    let (mut ours, mut others) = (0.0, 0.0);
    let mut dk = None;
    for (key, their_key) in shared {
        let (a, b) = (this_run.oriented(key, None)?, other_run.oriented(their_key, None)?);
        let (Some(values), Some(other_values)) = (matrix(&a), matrix(&b)) else { continue };
        if values.len() != other_values.len() {
            continue;
        }
        let (x, y) = (values.energy(), other_values.energy());
        (ours, others) = (ours + x, others + y);
        parts.push((key.to_string(), x - y));
        if this_run.tensors[key].role == Some(Role::Dk) {
            dk = Some((a, b));
        }
    }
    if parts.is_empty() {
        return Ok(None);
    }
    let (x, y) = match (reported(this_run)?, reported(other_run)?) {
        (Some(x), Some(y)) => (x, y),
        _ => (ours.sqrt(), others.sqrt()),
    };
    let (gap, norms) = (x - y, x + y);
    let rest = gap * norms - parts.iter().map(|(_, apart)| apart).sum::<f64>();
    if rest.abs() > 1e-9 * (ours + others) {
        parts.push(("gradients that were not dumped".into(), rest));
    }
    let share = |(of, apart): (String, f64)| {
        let part = apart / norms;
        Share { kind: "tensor", of, gap: part, share: if gap == 0.0 { 0.0 } else { part / gap } }
    };
    let mut shares: Vec<Share> = parts.into_iter().map(share).collect();
    if let Some((Some(values), Some(other_values))) =
        dk.as_ref().map(|(a, b)| (matrix(a), matrix(b)))
    {
        let theirs = other_values.to_f64();
        let mut cut = Cut { ours: values, theirs: &theirs, norms, gap: 0.0 };
        cut.gap = cut.both().map(|(a, b)| (a - b) * (a + b)).sum::<f64>() / norms;
        shares.extend(cut.by_place(&[], crate::kernels::Tiles::default().vocab));
        shares.extend(by_microbatch(this_run, other_run, &cut)?);
    }
    Ok(Some(NormGap { gap, shares }))
}

/// The same gradient in both runs: by role, else by name and moment.
fn matches(
    this_run: &HeadStep<'_>,
    other_run: &HeadStep<'_>,
    key: &TensorKey,
    other_key: &TensorKey,
) -> bool {
    match (this_run.tensors[key].role, other_run.tensors[other_key].role) {
        (None, None) => key == other_key,
        (a, b) => a == b,
    }
}

/// Shares of the microbatches, where both runs have the same and recorded their dk.
fn by_microbatch(
    this_run: &HeadStep<'_>,
    other_run: &HeadStep<'_>,
    cut: &Cut<'_>,
) -> Result<Vec<Share>, StepError> {
    let same = this_run.microbatches == other_run.microbatches && this_run.microbatches.len() > 1;
    let mut shares = Vec::new();
    for &microbatch in this_run.microbatches.iter().filter(|_| same) {
        let sum = |step: &HeadStep<'_>| -> Result<Option<Sum>, StepError> {
            let key = step.find(Role::Dk, microbatch).filter(|key| key.microbatch == microbatch);
            key.filter(|_| !step.options.transposed())
                .map(|key| Sum::of_partial(step, key))
                .transpose()
        };
        let (Some(a), Some(b)) = (sum(this_run)?, sum(other_run)?) else { return Ok(Vec::new()) };
        if a.total.len() != cut.ours.len() || b.total.len() != cut.ours.len() {
            return Ok(Vec::new());
        }
        let along = a.total.iter().zip(&b.total).zip(cut.both());
        let along: f64 = along.map(|((a, b), (x, y))| (a - b) * (x + y)).sum();
        shares.push((microbatch.map_or(String::new(), |mb: Microbatch| mb.to_string()), along));
    }
    let divided = shares.into_iter().map(|(name, along)| (name, along / cut.norms));
    Ok(cut.grouped("microbatch", divided))
}
