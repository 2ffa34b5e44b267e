//! The sample of rows that hypotheses are tried on where all rows would take too long.
//!
//! First come the rows with the largest errors, which must be explained. Next come the rows of the
//! most frequent labels: their gradients are sums of many summands, which show the format of the
//! accumulator. The rest is spread evenly, so that a hypothesis that breaks rows which agree is
//! noticed.

use std::collections::{BTreeMap, BTreeSet};

use crate::head::{MicrobatchInputs, Scores, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::outcome::Outcome;
use crate::replay::trial::Rows;

/// Where the replay diverged: up to this many multiply-adds of one GEMM, trials compare all rows.
const ALL: u64 = 1 << 24;
/// The same where every comparison passes: a rounding policy shows only in many rows together, and
/// few causes are tried there.
const ALL_OF_PASSING: u64 = 1 << 26;
/// Rows of dk, and tokens of a microbatch, in a sample.
const KEPT: usize = 192;
/// The same for a glance.
const FEW: usize = 24;
/// From this many multiply-adds of one GEMM on, a glance saves more than it costs.
const WORTH: u64 = 1 << 20;

/// The sample that trials compare; `None` where they compare all rows.
pub(super) fn rows(outcome: &Outcome, inputs: &[MicrobatchInputs]) -> Option<Rows> {
    let diverged = outcome.first_divergence().is_some();
    sampled(outcome, inputs, (if diverged { ALL } else { ALL_OF_PASSING }, KEPT))
}

/// The few rows of a glance; `None` where the head is so small that a glance saves nothing.
pub(super) fn few(outcome: &Outcome, inputs: &[MicrobatchInputs]) -> Option<Rows> {
    sampled(outcome, inputs, (WORTH, FEW))
}

/// Multiply-adds of one GEMM over all microbatches, and the number of rows of k; zeros where the
/// logits were recorded and there is no GEMM.
pub(super) fn work(inputs: &[MicrobatchInputs]) -> (u64, usize) {
    let sizes = inputs.iter().filter_map(|inputs| match &inputs.scores {
        Scores::Product { q, k } => {
            let d = q.shape.last().copied().unwrap_or(1);
            Some((inputs.tokens() as u64 * k.shape[0] * d, k.shape[0] as usize))
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
    let labels = inputs.iter().flat_map(|inputs| &inputs.labels).filter(|&&label| label != IGNORED);
    labels.for_each(|&label| *hits.entry(label).or_default() += 1);
    let mut frequent: Vec<(u64, u32)> = hits.into_iter().map(|(label, n)| (n, label)).collect();
    frequent.sort_unstable_by(|a, b| b.cmp(a));
    let mut classes = worst(outcome, &Stage::OF_CLASSES, None, kept);
    classes.extend(frequent.iter().take(kept / 3).map(|&(_, label)| label as usize));
    spread(&mut classes, vocab, kept);
    let tokens = inputs.iter().map(|inputs| {
        let stages = Stage::OF_Q;
        let mut tokens = worst(outcome, &stages, Some(inputs.microbatch), kept);
        spread(&mut tokens, inputs.tokens(), kept);
        (inputs.microbatch, tokens.into_iter().collect())
    });
    Some(Rows { tokens: tokens.collect(), classes: classes.iter().copied().collect() })
}

/// The rows with the largest errors in some stages, up to a third of the sample.
fn worst(
    outcome: &Outcome,
    stages: &[Stage],
    microbatch: Option<Option<backtape::identity::Microbatch>>,
    kept: usize,
) -> BTreeSet<usize> {
    let mut rows = BTreeSet::new();
    for &stage in stages {
        for comparison in &outcome.stage(stage).comparisons {
            if microbatch.is_some_and(|microbatch| microbatch != comparison.microbatch) {
                continue;
            }
            rows.extend(comparison.tally.worst_rows.iter().map(|row| row.row as usize));
            let single = [
                &comparison.tally.worst,
                &comparison.tally.first,
                &comparison.tally.first_nonfinite,
            ];
            rows.extend(single.into_iter().flatten().map(|worst| worst.index.0 as usize));
        }
    }
    rows.into_iter().take(kept / 3).collect()
}

/// Fills the sample with evenly spaced rows, the first and the last among them.
fn spread(rows: &mut BTreeSet<usize>, count: usize, kept: usize) {
    rows.retain(|&row| row < count);
    let more = kept.saturating_sub(rows.len()).max(1);
    if count > 0 {
        rows.extend(
            (0..more)
                .map(|i| i * (count - 1) / more.max(2).saturating_sub(1))
                .map(|row| row.min(count - 1)),
        );
    }
}
