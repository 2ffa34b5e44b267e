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
use crate::head::{MicrobatchInputs, Share, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::microbatch;

/// Share of the values that must be no numbers: a class that no product reaches, or an
/// exact zero, may keep one.
const MOST: f64 = 0.9;

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
                _ if key.stage.is_sum() => !empty.is_empty(),
                // A comparison of all tokens has the rank's among them.
                None => empty.iter().any(|one| of(&one)),
                Some(rank) => empty.iter().filter(of).any(|(_, ranks)| ranks.contains(&rank)),
            }
        };
        let sound = |key: &Key| {
            let one = &evidence.residuals[key];
            one.nonfinite > 0 && none(key) && all_of_them(evidence, key, &empty)
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
        true => microbatch::words(*microbatch),
        false => format!("{} of rank {}", microbatch::words(*microbatch), ranks.join(", ")),
    }
}

fn empty(evidence: &Evidence<'_>) -> Vec<Empty> {
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let mut by_rank = evidence.step.clone();
    by_rank.options.scope = Scope::Rank.into();
    let of = |one: &MicrobatchInputs| {
        let silent = |&t: &usize| one.labels[t] == IGNORED || one.weights[t] == 0.0;
        let units = by_rank.denominators(&all, one).unwrap_or_default();
        let ranks: Vec<Rank> = units
            .iter()
            .filter(|(unit, _)| !unit.rows.is_empty() && unit.rows.iter().all(&silent))
            .flat_map(|(unit, _)| unit.ranks.clone())
            .collect();
        let whole = (0..one.tokens()).all(|t| silent(&t));
        (whole || !ranks.is_empty()).then_some((one.microbatch, ranks))
    };
    evidence.inputs.iter().filter_map(of).collect()
}

/// Whether every value that such tokens have a part in is no number: one that is alone has
/// another origin. Label parts have none, and a sum over tokens has all of theirs.
fn all_of_them(evidence: &Evidence<'_>, key: &Key, empty: &[Empty]) -> bool {
    let found = &evidence.residuals[key];
    let share = found.nonfinite as f64 / found.elements.max(1) as f64;
    let inputs = evidence.inputs.iter().find(|one| one.microbatch == key.microbatch);
    match key.stage {
        of if of.share() == Share::Label => true,
        of if of.is_of_k() || of.is_sum() => share >= MOST * valid(&evidence.inputs[0], evidence),
        _ if key.rank.is_some() => share >= MOST,
        _ => inputs.is_some_and(|inputs| share >= MOST * silent_share(evidence, inputs, empty)),
    }
}

/// Share of the classes that are valid.
fn valid(inputs: &MicrobatchInputs, evidence: &Evidence<'_>) -> f64 {
    let all = inputs.head(evidence.step).map_or(1, |head| head.k.rows.max(1));
    inputs.valid_vocab.min(all) as f64 / all as f64
}

/// Share of a microbatch's tokens that are of ranks without one that counts.
fn silent_share(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, empty: &[Empty]) -> f64 {
    let of = empty.iter().find(|(microbatch, _)| *microbatch == inputs.microbatch);
    let Some((_, ranks)) = of else { return 1.0 };
    let mut step = evidence.step.clone();
    step.options.scope = Scope::Rank.into();
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let units = step.denominators(&all, inputs).unwrap_or_default();
    let theirs = units.iter().filter(|(unit, _)| unit.ranks.iter().any(|r| ranks.contains(r)));
    let rows: usize = theirs.map(|(unit, _)| unit.rows.len()).sum();
    let rows = if ranks.is_empty() { inputs.tokens() } else { rows };
    rows as f64 / inputs.tokens().max(1) as f64
}
