//! `all-ignored`: a microbatch, or a rank's part of it, has no token that counts, and its
//! mean is 0/0.
//!
//! Detectors: every comparison that fails has values that are no numbers, and each of
//! them is of tokens none of which counts, or a sum that such a gradient enters.
//! It is seen, not emulated.

use std::collections::BTreeSet;

use backtape::head::Scope;
use backtape::identity::{Microbatch, Rank};

use crate::diagnose::cause::{Cause, Observed};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::name;

/// The catalogue's entry.
pub struct AllIgnored;

impl Cause for AllIgnored {
    fn id(&self) -> &'static str {
        "all-ignored"
    }

    fn about(&self) -> &'static str {
        "a mean over tokens none of which counts is 0/0"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["OLMo-core 657", "torchtune 2341"]
    }

    fn advice(&self) -> &'static str {
        "divide by max(count, 1), or by the count of the whole step, so that a batch without labels adds zero"
    }

    fn observed(&self, evidence: &Evidence<'_>) -> Option<Observed> {
        let empty = empty(evidence);
        let none = |key: &Key| {
            let of = |(microbatch, _): &&Empty| *microbatch == key.microbatch;
            match key.rank {
                _ if is_sum(key.stage) => !empty.is_empty(),
                // A comparison of all tokens has the rank's among them.
                None => empty.iter().any(|one| of(&one)),
                Some(rank) => empty.iter().filter(of).any(|(_, ranks)| ranks.contains(&rank)),
            }
        };
        let sound = |key: &Key| {
            let one = &evidence.residuals[key];
            one.nonfinite > 0 && none(key) && rows_agree(evidence, key, &empty)
        };
        if empty.is_empty() || evidence.failing.is_empty() || !evidence.failing.iter().all(sound) {
            return None;
        }
        let stages: BTreeSet<Stage> = evidence.failing.iter().map(|key| key.stage).collect();
        let words: Vec<String> = empty.iter().map(words).collect();
        let listed = words.join("; ");
        Some(Observed {
            evidence: format!(
                "no token counts in {listed}, and what is not a number is of these tokens or a sum with their gradients: the mean over them is 0/0"
            ),
            stages: stages.into_iter().collect(),
            parameters: vec![("no token counts in", listed)],
        })
    }
}

/// A microbatch without tokens that count; ranks: those whose part has none, empty where
/// the whole has none.
type Empty = (Option<Microbatch>, Vec<Rank>);

fn words((microbatch, ranks): &Empty) -> String {
    let ranks: Vec<String> = ranks.iter().map(|rank| rank.to_string()).collect();
    match ranks.is_empty() {
        true => name(*microbatch),
        false => format!("{} of rank {}", name(*microbatch), ranks.join(", ")),
    }
}

fn empty(evidence: &Evidence<'_>) -> Vec<Empty> {
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let mut by_rank = evidence.step.clone();
    by_rank.options.scope = Scope::Rank;
    let of = |one: &MicrobatchInputs| {
        let silent = |&t: &usize| one.labels[t] == IGNORED || one.weights[t] == 0.0;
        let units = by_rank.denominators(&all, one).unwrap_or_default();
        let ranks: Vec<Rank> = units
            .iter()
            .filter(|(unit, _)| !unit.rows.is_empty() && unit.rows.iter().all(|t| silent(t)))
            .flat_map(|(unit, _)| unit.ranks.clone())
            .collect();
        let whole = (0..one.tokens()).all(|t| silent(&t));
        (whole || !ranks.is_empty()).then_some((one.microbatch, ranks))
    };
    evidence.inputs.iter().filter_map(of).collect()
}

fn is_sum(stage: Stage) -> bool {
    matches!(stage, Stage::Accumulate | Stage::Reduce)
}

/// Whether the first value that is no number lies in the row of a token that does not
/// count, for stages whose rows are tokens.
fn rows_agree(evidence: &Evidence<'_>, key: &Key, empty: &[Empty]) -> bool {
    let tokens = [Stage::Dq, Stage::DqLse, Stage::DqLabel, Stage::Dlogits, Stage::Dlogprobs];
    if !tokens.contains(&key.stage) {
        return true;
    }
    let inputs = evidence.inputs.iter().find(|one| one.microbatch == key.microbatch);
    let of = |one: &&crate::replay::outcome::Comparison| {
        one.microbatch == key.microbatch && one.rank == key.rank
    };
    let found = evidence.outcome.stage(key.stage).comparisons.iter().find(of);
    let first = found.and_then(|one| one.tally.first_nonfinite.as_ref());
    let Some((inputs, first)) = inputs.zip(first) else { return false };
    let row = first.index.0 as usize;
    let silent = inputs.labels.get(row).is_some_and(|&label| label == IGNORED)
        || inputs.weights.get(row) == Some(&0.0);
    silent && empty.iter().any(|(microbatch, _)| *microbatch == key.microbatch)
}
