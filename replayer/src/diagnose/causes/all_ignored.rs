//! `all-ignored`: a microbatch, or a rank's part of it, has no token that counts, and its
//! mean is 0/0.
//!
//! Detectors: every failing comparison has NaNs, and is one of tokens none of which counts, or a
//! sum that contains such a gradient. It is observed without a trial.

use std::collections::BTreeSet;

use backtape::head::Scope;
use backtape::identity::{Microbatch, Rank};

use crate::diagnose::cause::{Cause, Observed};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::{MicrobatchInputs, Share, Stage};
use crate::kernels::matrix::IGNORED;
use crate::replay::microbatch;

/// At least this share of the values must be NaN: an element may stay finite where no product
/// reaches its class.
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
            let is_of_microbatch = |(microbatch, _): &&Empty| *microbatch == key.microbatch;
            match key.rank {
                _ if key.stage.is_sum() => !empty.is_empty(),
                // A comparison over all ranks includes that rank's tokens.
                None => empty.iter().any(|one| is_of_microbatch(&one)),
                Some(rank) => {
                    empty.iter().filter(is_of_microbatch).any(|(_, ranks)| ranks.contains(&rank))
                }
            }
        };
        let sound = |key: &Key| {
            let residual = &evidence.residuals[key];
            residual.nonfinite > 0 && none(key) && are_all_nan(evidence, key, &empty)
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

/// A microbatch in which no token counts on some ranks, and those ranks; no ranks where no token of
/// the whole microbatch counts.
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
    let empty_part = |inputs: &MicrobatchInputs| {
        let silent = |&t: &usize| inputs.labels[t] == IGNORED || inputs.weights[t] == 0.0;
        let units = by_rank.denominators(&all, inputs).unwrap_or_default();
        let ranks: Vec<Rank> = units
            .iter()
            .filter(|(unit, _)| !unit.rows.is_empty() && unit.rows.iter().all(&silent))
            .flat_map(|(unit, _)| unit.ranks.clone())
            .collect();
        let whole = (0..inputs.tokens()).all(|t| silent(&t));
        (whole || !ranks.is_empty()).then_some((inputs.microbatch, ranks))
    };
    evidence.inputs.iter().filter_map(empty_part).collect()
}

/// Whether nearly every value that such tokens contribute to is NaN: a single NaN has another
/// origin. A label part is not checked, as ignored tokens contribute nothing to it.
fn are_all_nan(evidence: &Evidence<'_>, key: &Key, empty: &[Empty]) -> bool {
    let residual = &evidence.residuals[key];
    let share = residual.nonfinite as f64 / residual.elements.max(1) as f64;
    let inputs = evidence.inputs.iter().find(|inputs| inputs.microbatch == key.microbatch);
    match key.stage {
        stage if stage.share() == Share::Label => true,
        stage if stage.is_of_k() || stage.is_sum() => {
            share >= MOST * valid(&evidence.inputs[0], evidence)
        }
        _ if key.rank.is_some() => share >= MOST,
        _ => inputs.is_some_and(|inputs| share >= MOST * silent_share(evidence, inputs, empty)),
    }
}

/// Share of the classes that are valid.
fn valid(inputs: &MicrobatchInputs, evidence: &Evidence<'_>) -> f64 {
    let all = inputs.head(evidence.step).map_or(1, |head| head.k.rows.max(1));
    inputs.valid_vocab.min(all) as f64 / all as f64
}

/// Share of a microbatch's tokens that belong to ranks on which no token counts.
fn silent_share(evidence: &Evidence<'_>, inputs: &MicrobatchInputs, empty: &[Empty]) -> f64 {
    let empty_part = empty.iter().find(|(microbatch, _)| *microbatch == inputs.microbatch);
    let Some((_, ranks)) = empty_part else { return 1.0 };
    let mut step = evidence.step.clone();
    step.options.scope = Scope::Rank.into();
    let all: Vec<&MicrobatchInputs> = evidence.inputs.iter().collect();
    let units = step.denominators(&all, inputs).unwrap_or_default();
    let theirs = units.iter().filter(|(unit, _)| unit.ranks.iter().any(|r| ranks.contains(r)));
    let rows: usize = theirs.map(|(unit, _)| unit.rows.len()).sum();
    let rows = if ranks.is_empty() { inputs.tokens() } else { rows };
    rows as f64 / inputs.tokens().max(1) as f64
}
