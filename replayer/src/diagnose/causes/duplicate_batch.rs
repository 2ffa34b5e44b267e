//! `duplicate-batch`: a microbatch's or a rank's gradients are those of another one's data,
//! or one microbatch is in the sum twice and another is not.
//!
//! Detectors: what was captured of one microbatch, or of one rank's tokens, equals what was
//! captured of another; the sum over microbatches solved for their weights.
//! Emulation: the other's inputs; those weights.

use std::collections::BTreeMap;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addends::{Solved, Weighted, solved};
use crate::diagnose::detectors::direct::{distance, energy};
use crate::diagnose::detectors::extents::of_ranks;
use crate::diagnose::evidence::{Evidence, GRADIENTS, Key};
use crate::diagnose::rearranged::Moved;
use crate::head::{MicrobatchInputs, Stage};

/// The catalogue's entry.
pub struct DuplicateBatch;

impl Cause for DuplicateBatch {
    fn id(&self) -> &str {
        "duplicate-batch"
    }

    fn about(&self) -> &str {
        "the gradients are of another microbatch's or rank's data: one was used twice"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["datasets 5360"]
    }

    fn advice(&self) -> &str {
        "draw every microbatch and every rank its own data: advance the iterator once each, seed or shard it by rank"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut found = of_microbatches(evidence);
        found.extend(of_ranks_data(evidence));
        found.extend(of_sums(evidence));
        found
    }
}

/// Whether two captured tensors are one but for rounding.
fn same(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && energy(a) > 0.0 && distance(a, b) <= 1e-6 * energy(a)
}

/// What fails of a microbatch was captured of another one too.
fn of_microbatches(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut from: BTreeMap<Option<Microbatch>, Option<Microbatch>> = BTreeMap::new();
    for inputs in evidence.inputs {
        let mut keys = evidence.failing.iter().filter(|key| {
            key.microbatch == inputs.microbatch
                && key.microbatch.is_some()
                && key.stage != Stage::Loss
        });
        let Some(&key) = keys.next() else { continue };
        let Some(own) = evidence.captured(key) else { continue };
        let is_other = |other: &&MicrobatchInputs| {
            let of = Key { microbatch: other.microbatch, ..key };
            let passes = evidence.residuals.get(&of).is_some_and(|found| found.passes);
            passes
                && other.tokens() == inputs.tokens()
                && evidence.captured(of).is_some_and(|found| same(&own.values, &found.values))
        };
        if let Some(other) = evidence.inputs.iter().find(is_other) {
            from.insert(inputs.microbatch, other.microbatch);
        }
    }
    if from.is_empty() {
        return Vec::new();
    }
    let word = |mb: &Option<Microbatch>| mb.map_or("the step".into(), |mb| mb.to_string());
    let pairs: Vec<String> =
        from.iter().map(|(to, from)| format!("{} has that of {}", word(to), word(from))).collect();
    let parameters = vec![("microbatch", pairs.join(", "))];
    vec![Hypothesis::new(Moved { from: BTreeMap::new(), microbatch: from }, parameters)]
}

/// Rows of dq of one rank's tokens are those of another rank's.
fn of_ranks_data(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let mut all: BTreeMap<Option<Microbatch>, Vec<usize>> = BTreeMap::new();
    let mut pairs: Vec<String> = Vec::new();
    for inputs in evidence.inputs {
        let ranks = of_ranks(evidence.step, inputs);
        let mut keys = evidence.failing_of(&GRADIENTS[..4]);
        let Some((key, _)) = keys.find(|(key, _)| key.microbatch == inputs.microbatch) else {
            continue;
        };
        let Some(captured) = evidence.captured(key) else { continue };
        let Some(table) = evidence.reference().stages.get(&key) else { continue };
        let rows = |of: &[usize]| -> Vec<f64> {
            of.iter().flat_map(|&t| captured.row(t)).copied().collect()
        };
        let right = |of: &[usize]| -> bool {
            let (mut off, mut all) = (0.0, 0.0);
            for t in of.iter().filter(|t| table.contains_key(t)) {
                off += distance(captured.row(*t), &table[t]);
                all += energy(&table[t]);
            }
            off <= 0.01 * all
        };
        let mut from: Vec<usize> = (0..inputs.tokens()).collect();
        for (to, wrong) in ranks.iter().enumerate().filter(|(_, of)| !right(of)) {
            let other = (0..ranks.len())
                .find(|&of| of != to && right(&ranks[of]) && same(&rows(wrong), &rows(&ranks[of])));
            if let Some(other) = other {
                wrong.iter().zip(&ranks[other]).for_each(|(&t, &other)| from[t] = other);
                pairs.push(format!("part {to} has that of part {other}"));
            }
        }
        if from.iter().enumerate().any(|(t, &from)| t != from) {
            all.insert(inputs.microbatch, from);
        }
    }
    if all.is_empty() {
        return Vec::new();
    }
    pairs.dedup();
    let parameters = vec![("tokens by rank", pairs.join(", "))];
    vec![Hypothesis::new(Moved { from: all, microbatch: BTreeMap::new() }, parameters)]
}

/// Sums in which one microbatch is twice and another is not.
fn of_sums(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let twice = |found: &Solved| {
        let weights: Vec<f64> = found.addends.iter().map(|of| of.weight).collect();
        let total: f64 = weights.iter().sum();
        weights.contains(&2.0) && weights.contains(&0.0) && total == weights.len() as f64
    };
    let of: Vec<Solved> = solved(evidence).into_iter().filter(twice).collect();
    let Some(first) = of.first() else { return Vec::new() };
    let named = |weight: f64| {
        let all = first.addends.iter().filter(|of| of.weight == weight);
        let one = |of: &crate::diagnose::detectors::addends::Addend| match (of.microbatch, of.rank)
        {
            (Some(mb), Some(rank)) => format!("{mb} of rank {rank}"),
            (Some(mb), None) => mb.to_string(),
            (None, rank) => rank.map_or("all".into(), |rank| format!("rank {rank}")),
        };
        all.map(one).collect::<Vec<String>>().join(", ")
    };
    let parameters = vec![("twice", named(2.0)), ("left out", named(0.0))];
    vec![Hypothesis::new(Weighted { of }, parameters)]
}
