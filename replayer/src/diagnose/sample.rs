//! Which rows hypotheses are tried on, where all of them would take too long.
//!
//! Rows that the replay found worst come first: they are what must be explained. Rows of
//! frequent labels are next, because sums of many addends tell formats apart. The rest is
//! evenly spread, so that what is right everywhere else is seen to stay right.

use std::collections::{BTreeMap, BTreeSet};

use crate::head::{MicrobatchInputs, Scores, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::outcome::Outcome;
use crate::replay::trial::Rows;

/// Multiply-adds of one GEMM up to which all rows are looked at of what diverged.
const ALL: u64 = 1 << 24;
/// The same of what passes: how it was rounded shows in many rows together, and few causes are
/// asked.
const ALL_OF_PASSING: u64 = 1 << 26;
/// Rows of dk, and tokens of a microbatch, in a sample.
const KEPT: usize = 192;
/// The same for a glance.
const FEW: usize = 24;
/// Multiply-adds of one GEMM from which a glance is cheaper than a look at all rows.
const WORTH: u64 = 1 << 20;

/// A sample of rows; `None` where all of them can be looked at.
pub(super) fn rows(outcome: &Outcome, inputs: &[MicrobatchInputs]) -> Option<Rows> {
    let diverged = outcome.first_divergence().is_some();
    sampled(outcome, inputs, (if diverged { ALL } else { ALL_OF_PASSING }, KEPT))
}

/// The few rows that show at a glance that a hypothesis is no better than the declaration.
pub(super) fn few(outcome: &Outcome, inputs: &[MicrobatchInputs]) -> Option<Rows> {
    sampled(outcome, inputs, (WORTH, FEW))
}

/// Multiply-adds of one GEMM over all microbatches, and the rows of k; zeros where there are
/// no products.
pub(super) fn work(inputs: &[MicrobatchInputs]) -> (u64, usize) {
    let sizes = inputs.iter().filter_map(|one| match &one.scores {
        Scores::Product { q, k } => {
            let d = q.shape.last().copied().unwrap_or(1);
            Some((one.tokens() as u64 * k.shape[0] * d, k.shape[0] as usize))
        }
        _ => None,
    });
    sizes.fold((0, 0), |(work, _), (of, vocab)| (work + of, vocab))
}

fn sampled(
    outcome: &Outcome,
    inputs: &[MicrobatchInputs],
    (from, kept): (u64, usize),
) -> Option<Rows> {
    let (work, vocab) = work(inputs);
    if work <= from {
        return None;
    }
    let mut hits: BTreeMap<u32, u64> = BTreeMap::new();
    let labels = inputs.iter().flat_map(|one| &one.labels).filter(|&&label| label != IGNORED);
    labels.for_each(|&label| *hits.entry(label).or_default() += 1);
    let mut frequent: Vec<(u64, u32)> = hits.into_iter().map(|(label, n)| (n, label)).collect();
    frequent.sort_unstable_by(|a, b| b.cmp(a));
    let mut classes = worst(outcome, &Stage::OF_CLASSES, None, kept);
    classes.extend(frequent.iter().take(kept / 3).map(|&(_, label)| label as usize));
    spread(&mut classes, vocab, kept);
    let tokens = inputs.iter().map(|one| {
        let stages = Stage::OF_Q;
        let mut tokens = worst(outcome, &stages, Some(one.microbatch), kept);
        spread(&mut tokens, one.tokens(), kept);
        (one.microbatch, tokens.into_iter().collect())
    });
    Some(Rows { tokens: tokens.collect(), classes: classes.iter().copied().collect() })
}

/// Rows that the replay names of some stages.
fn worst(
    outcome: &Outcome,
    stages: &[Stage],
    microbatch: Option<Option<backtape::identity::Microbatch>>,
    kept: usize,
) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    for &stage in stages {
        for one in &outcome.stage(stage).comparisons {
            if microbatch.is_some_and(|of| of != one.microbatch) {
                continue;
            }
            found.extend(one.tally.worst_rows.iter().map(|row| row.row as usize));
            let single = [&one.tally.worst, &one.tally.first, &one.tally.first_nonfinite];
            found.extend(single.into_iter().flatten().map(|worst| worst.index.0 as usize));
        }
    }
    found.into_iter().take(kept / 3).collect()
}

/// Fills up with rows that lie evenly, both ends among them.
fn spread(rows: &mut BTreeSet<usize>, of: usize, kept: usize) {
    rows.retain(|&row| row < of);
    let more = kept.saturating_sub(rows.len()).max(1);
    if of > 0 {
        rows.extend(
            (0..more)
                .map(|i| i * (of - 1) / more.max(2).saturating_sub(1))
                .map(|row| row.min(of - 1)),
        );
    }
}
