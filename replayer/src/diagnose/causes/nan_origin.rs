//! `nan-origin`: values that are no numbers, where the reference has numbers: the first
//! stage, microbatch, rank and row in which they appear.
//!
//! Detector: captured values that are not finite.
//! Emulation: no number wherever none was captured, and all else as it should be; stages
//! that follow start from what was captured, or from the reference.

use crate::diagnose::cause::{Cause, Hypothesis};
use crate::diagnose::detectors::nan::{NanWhere, Nans, nans};
use crate::diagnose::evidence::Evidence;
use crate::kernels::matrix::IGNORED;

/// The catalogue's entry.
pub struct NanOrigin;

/// Whoever explains the same NaN by what made them is to be preferred.
const FITTED: usize = 8;

impl Cause for NanOrigin {
    fn id(&self) -> &'static str {
        "nan-origin"
    }

    fn about(&self) -> &'static str {
        "values that are no numbers appear where the reference has numbers, and spread from there"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["any run whose loss became NaN"]
    }

    fn advice(&self) -> &'static str {
        "look at the named row's inputs and at the operation that makes the named stage: nothing before it is wrong"
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let Some(found) = nans(evidence) else { return Vec::new() };
        // Nothing counts: 0/0 has a name of its own.
        let counts = |mb| {
            evidence.inputs_of(mb).is_none_or(|one| {
                let used = |t: &usize| one.labels[*t] != IGNORED && one.weights[*t] != 0.0;
                (0..one.tokens()).any(|t| used(&t))
            })
        };
        if !counts(found.first.microbatch) {
            return Vec::new();
        }
        let parameters = origin(&found);
        let one = |distrusts: Vec<_>| {
            let world = NanWhere { of: found.of.clone(), distrusts };
            Hypothesis::new(world, parameters.clone()).fitted(FITTED)
        };
        vec![one(Vec::new()), one(vec![found.first.stage])]
    }
}

fn origin(found: &Nans) -> Vec<(&'static str, String)> {
    let first = found.first;
    let mut parameters = vec![("stage", first.stage.name().to_string())];
    parameters.extend(first.microbatch.map(|mb| ("microbatch", mb.to_string())));
    parameters.extend(found.rank.map(|rank| ("rank", rank.to_string())));
    parameters.push(("row", found.row.to_string()));
    parameters.push(("column", found.column.to_string()));
    let count: usize = found.of[&first].1.iter().filter(|&&bad| bad).count();
    parameters.push(("values", count.to_string()));
    parameters
}
