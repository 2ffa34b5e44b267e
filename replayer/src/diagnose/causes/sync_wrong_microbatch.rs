//! `sync-wrong-microbatch`: gradients were reduced over ranks at the wrong microbatch, so
//! that the sum holds other microbatches of some ranks than of others.
//!
//! Detector: the reduced dk solved for the weights of every rank's every microbatch, where
//! those are whole and depend on both.
//! Emulation: those weights.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::addends::{Solved, solved};
use crate::diagnose::evidence::Evidence;
use crate::head::Stage;

/// The catalogue's entry.
pub struct SyncWrongMicrobatch;

impl Cause for SyncWrongMicrobatch {
    fn id(&self) -> &'static str {
        "sync-wrong-microbatch"
    }

    fn about(&self) -> &'static str {
        "the sum over ranks was taken at the wrong microbatch: it holds only some microbatches of some ranks"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["FunASR 3472", "picotron 5"]
    }

    fn advice(&self) -> &'static str {
        "synchronise gradients in the last microbatch of the accumulation window, and in that one only"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let mixed = |found: &Solved| {
            found.key.stage == Stage::Reduce
                && found.addends.iter().all(|of| of.microbatch.is_some() && of.rank.is_some())
                && found.by_microbatch().is_none()
                && found.ranks_left_out().is_none()
        };
        let one = |found: Solved| {
            let out = found.addends.iter().filter(|of| of.weight == 0.0);
            let out: Vec<String> = out
                .filter_map(|of| Some(format!("{} of rank {}", of.microbatch?, of.rank?)))
                .collect();
            let parameters = vec![
                ("left out", if out.is_empty() { "none".into() } else { out.join(", ") }),
                ("scale", found.scale_name()),
            ];
            Hypothesis::new(found.world(), parameters).fitted(1)
        };
        solved(evidence).into_iter().filter(mixed).map(one).collect()
    }
}
