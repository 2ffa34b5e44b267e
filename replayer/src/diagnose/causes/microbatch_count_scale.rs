//! `microbatch-count-scale`: gradients of microbatches are M or 1/M of what they should
//! be, because their mean was declared and their sum was taken, or the other way round,
//! or twice.
//!
//! Detectors: D6, one factor explains each failing comparison.
//! Emulation: the factor.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::evidence::{Evidence, GRADIENTS};
use crate::head::Stage;
use crate::replay::world::{Expectation, World};

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
        let stages = [&GRADIENTS[..], &[Stage::Accumulate, Stage::Reduce]].concat();
        if count < 2.0 || !evidence.all_scaled(&stages) {
            return Vec::new();
        }
        let of = |(factor, words): (f64, &str)| {
            let parameters =
                vec![("factor", words.to_string()), ("microbatches", count.to_string())];
            Hypothesis::new(Scaled { factor }, parameters)
        };
        [(count, "M"), (1.0 / count, "1/M")].into_iter().map(of).collect()
    }
}

struct Scaled {
    factor: f64,
}

impl World for Scaled {
    fn expected(&self, of: &mut Expectation<'_>) {
        if GRADIENTS.contains(&of.at.stage)
            || matches!(of.at.stage, Stage::Accumulate | Stage::Reduce)
        {
            of.values.iter_mut().for_each(|x| *x *= self.factor);
        }
    }
}
