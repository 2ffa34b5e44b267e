//! `dropped-batch`: the gradients of a microbatch, or of one rank's part of it, are zero or missing
//! from the sum, although its tokens count in the loss.
//!
//! Detectors: every failing gradient of the microbatch is all zeros; or the sum over ranks and
//! microbatches, solved for the weights of its addends, lacks exactly one. Emulation: upstream
//! gradients of zero; or the sum with those weights.

use std::collections::BTreeSet;

use backtape::identity::Microbatch;

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addends::{Solved, Weighted, solved};
use crate::diagnose::detectors::captured::unit;
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::replay::world::World;

/// The catalogue's entry.
pub struct DroppedBatch;

impl Cause for DroppedBatch {
    fn id(&self) -> &str {
        "dropped-batch"
    }

    fn about(&self) -> &str {
        "a microbatch, or one rank's part of it, left no gradient though its tokens count"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["exhausted iterators", "datasets 5360"]
    }

    fn advice(&self) -> &str {
        "run the backward of every microbatch on every rank, and stop all ranks together when an iterator ends"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mut hypotheses: Vec<Hypothesis> = silent(evidence).into_iter().collect();
        hypotheses.extend(lacking(evidence));
        hypotheses
    }
}

/// The hypothesis that the microbatches, or ranks' tokens, whose failing gradients are all zeros
/// had no upstream gradient.
fn silent(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let mut silent: BTreeSet<Key> = BTreeSet::new();
    for (key, residual) in evidence.failing_of(&Stage::GRADIENTS) {
        if residual.captured != 0.0 || residual.nonfinite > 0 || residual.reference == 0.0 {
            continue;
        }
        silent.insert(key);
    }
    // A single stage of zeros was not written; a dropped batch has no gradient at all, so several
    // stages must be zero.
    let all = |mb: Option<Microbatch>| {
        let mut failing =
            evidence.failing_of(&Stage::GRADIENTS).filter(|(key, _)| key.microbatch == mb);
        let stages: BTreeSet<_> =
            silent.iter().filter(|key| key.microbatch == mb).map(|key| key.stage).collect();
        stages.len() > 1 && failing.all(|(key, _)| silent.contains(&key))
    };
    let microbatches: BTreeSet<Option<Microbatch>> =
        silent.iter().map(|key| key.microbatch).filter(|&mb| all(mb)).collect();
    if microbatches.is_empty() {
        return None;
    }
    let words: Vec<String> =
        microbatches.iter().map(|mb| mb.map_or("all".into(), |mb| mb.to_string())).collect();
    let parts: BTreeSet<Key> =
        silent.into_iter().filter(|key| microbatches.contains(&key.microbatch)).collect();
    let tokens = parts
        .iter()
        .filter_map(|&key| Some((key.microbatch, unit(evidence.step, evidence.inputs, key)?.rows)))
        .collect();
    let parameters = vec![("microbatch", words.join(", "))];
    Some(Hypothesis::new(Silent { tokens }, parameters))
}

struct Silent {
    tokens: Vec<(Option<Microbatch>, Vec<usize>)>,
}

impl World for Silent {
    fn upstream(&self, inputs: &MicrobatchInputs, g: &mut [f64]) {
        for (_, rows) in self.tokens.iter().filter(|(mb, _)| *mb == inputs.microbatch) {
            rows.iter().for_each(|&t| g[t] = 0.0);
        }
    }
}

/// The hypothesis that sums lack one addend and contain all others once.
fn lacking(evidence: &Evidence<'_>) -> Vec<Hypothesis> {
    let lacks_one = |solved: &Solved| {
        let out = solved.addends.iter().filter(|addend| addend.weight == 0.0).count();
        let once = solved.addends.iter().filter(|addend| addend.weight == 1.0).count();
        out == 1 && once + out == solved.addends.len() && once > 1 && solved.scale == 1.0
    };
    let sums: Vec<Solved> = solved(evidence).into_iter().filter(lacks_one).collect();
    let Some(first) = sums.first() else { return Vec::new() };
    let Some(out) =
        first.addends.iter().find(|addend| addend.weight == 0.0 && addend.microbatch.is_some())
    else {
        return Vec::new(); // A whole rank is missing: it was not reduced, another cause.
    };
    // If every rank's sum lacks the same microbatch, the accumulation window is wrong, which is
    // another cause.
    let same = |solved: &Solved| {
        solved
            .addends
            .iter()
            .any(|addend| addend.weight == 0.0 && addend.microbatch == out.microbatch)
    };
    if sums.len() > 1 && sums.iter().all(same) {
        return Vec::new();
    }
    let mb = out.microbatch.map_or(String::new(), |mb| mb.to_string());
    let rank = out.rank.map_or("all".into(), |rank| rank.to_string());
    let parameters = vec![("microbatch", mb), ("rank", rank)];
    vec![Hypothesis::new(Weighted { sums }, parameters)]
}
