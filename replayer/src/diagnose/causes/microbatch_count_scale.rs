//! `microbatch-count-scale`: gradients are M or 1/M of what they should be, because their
//! mean was declared and their sum was taken, or the other way round, or twice.
//!
//! Detectors: one factor in every microbatch and on every rank of a stage: of the losses and
//! gradients of microbatches, of their sum, or of the reduced gradient. Emulation: the factor, on
//! the loss or on the result of the backward.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::common_factor::{SCALED, sets_times};
use crate::diagnose::evidence::Evidence;
use crate::diagnose::worlds::{Scaled, scaled};

/// The catalogue's entry.
pub struct MicrobatchCountScale;

impl Cause for MicrobatchCountScale {
    fn id(&self) -> &str {
        "microbatch-count-scale"
    }

    fn about(&self) -> &str {
        "gradients are off by exactly the number of microbatches"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["transformers 35203", "transformers 37197", "transformers 40052"]
    }

    fn advice(&self) -> &str {
        "divide by the number of microbatches exactly once: in the loss or when gradients are summed"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let count = evidence.step.options.declared.microbatches as usize;
        let count = count.max(evidence.microbatches()) as f64;
        if count < 2.0 {
            return Vec::new();
        }
        let times = |(factor, words): (f64, &str)| {
            let hypothesis_of = move |stages| {
                let parameters =
                    vec![("factor", words.to_string()), ("microbatches", count.to_string())];
                scaled(evidence, Scaled { factor, stages }, parameters)
            };
            sets_times(evidence, factor, &SCALED)
                .into_iter()
                .flat_map(hypothesis_of)
                .collect::<Vec<_>>()
        };
        [(count, "M"), (1.0 / count, "1/M")].into_iter().flat_map(times).collect()
    }
}
