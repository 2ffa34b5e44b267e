//! `sync-wrong-microbatch`: gradients were reduced over ranks at the wrong microbatch, so
//! that the sum holds other microbatches of some ranks than of others.
//!
//! Detector: the reduced dk is solved for the weight of each microbatch on each rank; the weights
//! are whole numbers and depend on both. Emulation: those weights.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Rank;

use crate::diagnose::cause::{Cause, Hypothesis, Observed};
use crate::diagnose::detectors::addends::{Addend, Solved, solved};
use crate::diagnose::detectors::replicas::versions;
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;

/// The catalogue's entry.
pub struct SyncWrongMicrobatch;

impl Cause for SyncWrongMicrobatch {
    fn id(&self) -> &str {
        "sync-wrong-microbatch"
    }

    fn about(&self) -> &str {
        "the sum over ranks was taken at the wrong microbatch: it holds only some microbatches of some ranks"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["FunASR 3472", "picotron 5"]
    }

    fn advice(&self) -> &str {
        "synchronise gradients in the last microbatch of the accumulation window, and in that one only"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mixed = |solved: &Solved| {
            solved.key.stage == Stage::Reduce
                && solved
                    .addends
                    .iter()
                    .all(|addend| addend.microbatch.is_some() && addend.rank.is_some())
                && solved.by_microbatch().is_none()
                && solved.ranks_left_out().is_none()
        };
        let of_sum = |solved: Solved| {
            let out = solved.addends.iter().filter(|addend| addend.weight == 0.0);
            let out: Vec<String> = out
                .filter_map(|addend| {
                    Some(format!("{} of rank {}", addend.microbatch?, addend.rank?))
                })
                .collect();
            let parameters = vec![
                ("left out", if out.is_empty() { "none".into() } else { out.join(", ") }),
                ("scale", solved.scale_name()),
            ];
            Hypothesis::new(solved.world(), parameters).fitted(1)
        };
        solved(evidence).into_iter().filter(mixed).map(of_sum).collect()
    }

    /// Shows where ranks' copies of the reduced gradient are sums of different gradients.
    fn observed(&self, evidence: &Evidence<'_>) -> Option<Observed> {
        let all = versions(evidence);
        let (versions_of_sum, sums) = all.iter().find_map(|versions_of_sum| {
            Some((versions_of_sum, versions_of_sum.as_sums(evidence)?))
        })?;
        // Versions that contain all microbatches of some ranks and none of the others were not
        // reduced, which is `partial-not-reduced`.
        if sums.versions.iter().all(|(_, addends)| holds_ranks(addends)) {
            return None;
        }
        let word = |(ranks, addends): &(Vec<Rank>, Vec<Addend>)| {
            let counted = addends.iter().filter(|addend| addend.weight != 0.0);
            let names: Vec<String> = counted
                .map(|addend| {
                    let mb = addend.microbatch.map_or("all".into(), |mb| mb.to_string());
                    addend.rank.map_or(mb.clone(), |rank| format!("{mb} of rank {rank}"))
                })
                .collect();
            let rank_names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            format!("rank {} holds microbatches {}", rank_names.join(", "), names.join(", "))
        };
        let held_words: Vec<String> = sums.versions.iter().map(word).collect();
        let evidence = format!(
            "{} differs between ranks, and each version is the sum of other ranks' and microbatches' gradients",
            versions_of_sum.key
        );
        let parameters =
            vec![("tensor", versions_of_sum.key.to_string()), ("holds", held_words.join("; "))];
        let rows = Some(sums.place()).filter(|rows| !rows.is_empty()).map(|rows| ("where", rows));
        let parameters = parameters.into_iter().chain(rows).collect();
        Some(Observed { evidence, stages: vec![Stage::Reduce], parameters })
    }
}

/// Whether a sum contains all microbatches of some ranks (or of some devices of a rank) with one
/// weight, and none of the others.
pub(super) fn holds_ranks(addends: &[Addend]) -> bool {
    let mut weights_by_rank: BTreeMap<(Option<Rank>, &Option<String>), BTreeSet<u64>> =
        BTreeMap::new();
    for addend in addends {
        weights_by_rank
            .entry((addend.rank, &addend.device))
            .or_default()
            .insert(addend.weight.to_bits());
    }
    let whole = weights_by_rank.values().all(|weights| weights.len() == 1);
    whole && weights_by_rank.values().any(|weights| weights.contains(&0.0f64.to_bits()))
}
