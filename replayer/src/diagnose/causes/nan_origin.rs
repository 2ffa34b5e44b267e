//! `nan-origin`: NaN or infinite values where the reference is finite: the first stage, microbatch,
//! rank and row in which they appear.
//!
//! Detector: captured values that are not finite. Emulation: NaN wherever NaN or infinity was
//! captured, and the reference elsewhere; later stages start from the captured values, or from the
//! reference.

use std::collections::{BTreeMap, BTreeSet};

use backtape::identity::Microbatch;

use super::tail_tile_unmasked::captured_lse;
use crate::diagnose::cause::{Cause, Hypothesis, Observed};
use crate::diagnose::data_worlds::OtherLse;
use crate::diagnose::detectors::nan::{NanWhere, Nans, nans};
use crate::diagnose::evidence::{Evidence, Key};
use crate::head::Stage;
use crate::kernels::matrix::{IGNORED, Matrix};

/// The catalogue's entry.
pub struct NanOrigin;

/// Counts as this many fitted numbers, so that a cause that explains where the same NaNs came from
/// is preferred.
const FITTED: usize = 8;

impl Cause for NanOrigin {
    fn id(&self) -> &str {
        "nan-origin"
    }

    fn about(&self) -> &str {
        "values that are no numbers appear where the reference has numbers, and spread from there"
    }

    fn cases(&self) -> &'static [&'static str] {
        &["any run whose loss became NaN"]
    }

    fn advice(&self) -> &str {
        "look at the named row's inputs and at the operation that makes the named stage: nothing before it is wrong"
    }

    /// Shows where a value of q or k is NaN or infinite: everything computed from it is NaN as
    /// well.
    fn observed(&self, evidence: &Evidence<'_>) -> Option<Observed> {
        let parameters = of_inputs(evidence)?;
        let broken = |mb: Option<Microbatch>| {
            let head = evidence.inputs_of(mb).and_then(|inputs| inputs.head(evidence.step));
            let whole =
                |matrix: &Matrix<'_>| (0..matrix.len()).all(|at| matrix.get_f64(at).is_finite());
            head.is_some_and(|head| !whole(&head.q) || !whole(&head.k))
        };
        let after = |key: &Key| {
            let sums = key.stage.is_sum();
            evidence.whole[key].nonfinite > 0 && (sums || broken(key.microbatch))
        };
        let failing = || evidence.failing.iter();
        let only = |stage: &Stage| failing().filter(|key| key.stage == *stage).all(after);
        let stages: BTreeSet<Stage> = failing().map(|key| key.stage).collect();
        let stages = stages.into_iter().filter(only).collect();
        let evidence = "the input holds a value that is no number, and the stages after it hold more where they are made of it".into();
        Some(Observed { evidence, stages, parameters })
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let overflown: Vec<Hypothesis> = overflown(evidence).into_iter().collect();
        let Some(first_nans) = nans(evidence) else { return overflown };
        // If no token counts, the NaN is a 0/0, which is `all-ignored`.
        let counts = |mb| {
            evidence.inputs_of(mb).is_none_or(|inputs| {
                let used = |t: &usize| inputs.labels[*t] != IGNORED && inputs.weights[*t] != 0.0;
                (0..inputs.tokens()).any(|t| used(&t))
            })
        };
        if !counts(first_nans.first.microbatch) {
            return Vec::new();
        }
        let parameters = of_inputs(evidence).unwrap_or_else(|| origin(&first_nans));
        let hypothesis_of = |distrusts: Vec<_>| {
            let world = NanWhere { masks: first_nans.masks.clone(), distrusts };
            Hypothesis::new(world, parameters.clone()).fitted(FITTED)
        };
        let mut all = overflown;
        all.extend([hypothesis_of(Vec::new()), hypothesis_of(vec![first_nans.first.stage])]);
        all
    }
}

/// The place of the first NaN or infinite value of q or k; none where there is none.
fn of_inputs(evidence: &Evidence<'_>) -> Option<Vec<(&'static str, String)>> {
    evidence.inputs.iter().find_map(|inputs| {
        let head = inputs.head(evidence.step)?;
        let first_nan = |(name, matrix): (&str, Matrix<'_>)| {
            let index = (0..matrix.len()).find(|&index| !matrix.get_f64(index).is_finite())?;
            let mut parameters = vec![("stage", name.to_string())];
            parameters.extend(inputs.microbatch.map(|mb| ("microbatch", mb.to_string())));
            parameters.push(("row", (index / matrix.cols.max(1)).to_string()));
            parameters.push(("column", (index % matrix.cols.max(1)).to_string()));
            Some(parameters)
        };
        [("q", head.q), ("k", head.k)].into_iter().find_map(first_nan)
    })
}

/// The largest number whose exponential is finite in f32.
const LARGEST: f64 = 88.722_84;

/// The hypothesis that exponentials were summed in f32 without subtracting the largest logit first:
/// lse is infinite where it is larger than the logarithm of f32's largest number.
fn overflown(evidence: &Evidence<'_>) -> Option<Hypothesis> {
    let reference = evidence.reference();
    let overflown_lse = |lse: &f64| if *lse > LARGEST { f64::INFINITY } else { *lse };
    let lse: BTreeMap<_, Vec<f64>> = reference
        .forward_lse
        .iter()
        .map(|(&mb, all)| (mb, all.iter().map(overflown_lse).collect()))
        .collect();
    let rows = lse.values().flatten().filter(|lse| lse.is_infinite()).count();
    let (&mb, all) = lse.iter().find(|(_, all)| all.iter().any(|lse| lse.is_infinite()))?;
    let row = all.iter().position(|lse| lse.is_infinite())?;
    let mut parameters = vec![("stage", "lse".to_string())];
    parameters.extend(mb.map(|mb| ("microbatch", mb.to_string())));
    parameters.push(("row", row.to_string()));
    parameters.push(("values", rows.to_string()));
    parameters.push(("operation", "exp overflows: the maximum is not taken off".to_string()));
    Some(Hypothesis::new(OtherLse { lse, captured: captured_lse(evidence) }, parameters))
}

fn origin(nans: &Nans) -> Vec<(&'static str, String)> {
    let first = nans.first;
    let mut parameters = vec![("stage", first.stage.name().to_string())];
    parameters.extend(first.microbatch.map(|mb| ("microbatch", mb.to_string())));
    parameters.extend(nans.rank.map(|rank| ("rank", rank.to_string())));
    parameters.push(("row", nans.row.to_string()));
    parameters.push(("column", nans.column.to_string()));
    let count: usize = nans.masks[&first].1.iter().filter(|&&bad| bad).count();
    parameters.push(("values", count.to_string()));
    parameters
}
