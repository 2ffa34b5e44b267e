//! Hypotheses of a user: functions whose values are tried as the catalogue's are.

use std::collections::BTreeSet;
use std::sync::Arc;

use backtape::nan::largest;
use serde::Serialize;

use super::cause::{Cause, Hypothesis};
use super::evidence::{Evidence, Residual, residuals};
use crate::head::step::StepError;
use crate::head::{HeadStep, Stage};
use crate::replay::comparison::Comparison;
use crate::replay::trial::trial;
use crate::replay::variant::{Explains, StandsIn, Variant};

/// A variant as an entry beside the catalogue's.
pub(super) struct Own(pub(super) Arc<Variant>);

impl Cause for Own {
    fn id(&self) -> &str {
        &self.0.name
    }

    fn about(&self) -> &str {
        "the job did what the function of this name does"
    }

    fn cases(&self) -> &'static [&'static str] {
        &[]
    }

    fn advice(&self) -> &str {
        "compare the function's formulas with the declared head: they are not the same"
    }

    /// A function may be the declared head, rounded as the job rounds it.
    fn may_be_right(&self) -> bool {
        true
    }

    fn hypotheses(&self, evidence: &Evidence<'_>) -> Vec<Hypothesis> {
        let stages: Vec<Stage> = self.0.stages().into_iter().collect();
        match evidence.fails_any(&stages) {
            true => vec![Hypothesis::new(Explains(self.0.clone()), Vec::new())],
            false => Vec::new(),
        }
    }
}

/// How one stage of a variant came out, over all microbatches and ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VariantStage {
    /// The variant.
    pub variant: String,
    /// The stage.
    pub stage: &'static str,
    /// True when in the place of what was captured it would pass: it is right.
    pub agrees: bool,
    /// Why it would not.
    pub reason: String,
    /// Its relative error against the f64 reference, the worst of all units.
    pub error: f64,
    /// What the declared precision is expected to bring.
    pub floor: f64,
    /// error over floor.
    pub ratio: f64,
    /// True when what was captured is this, but for rounding; none where the stage was
    /// not captured.
    pub explains: Option<bool>,
    /// Relative distance of what was captured from it; none where it was not captured.
    pub distance: Option<f64>,
    /// Comparisons made: units that the variant gave this stage for.
    pub comparisons: usize,
}

/// Judges every stage of a variant.
pub(super) fn judge(
    step: &HeadStep<'_>,
    variant: &Arc<Variant>,
) -> Result<Vec<VariantStage>, StepError> {
    let stages = variant.stages();
    let mut found = Vec::new();
    for stage in stages {
        // One stage at a time: what is upstream of it comes from the dump.
        let only = BTreeSet::from([stage]);
        let cured = trial(step, &only, &StandsIn(variant.clone()), (None, None))?;
        let explained = trial(step, &only, &Explains(variant.clone()), (None, None))?;
        let judged = cured.stage(stage);
        let Some(worst) = judged.worst() else { continue };
        let of_stage: Vec<Residual> = residuals(&explained).into_values().collect();
        found.push(VariantStage {
            variant: variant.name.clone(),
            stage: stage.name(),
            agrees: judged.failing().count() == 0,
            reason: judged.reason.clone(),
            error: largest(judged.comparisons.iter().map(error)),
            floor: worst.floor(),
            ratio: worst.ratio(),
            explains: whole(&of_stage, |all| all.iter().all(|one| one.passes)),
            distance: whole(&of_stage, |all| {
                largest(all.iter().map(|one| (one.energy / one.reference).sqrt()))
            }),
            comparisons: judged.comparisons.len(),
        });
    }
    Ok(found)
}

fn error(of: &Comparison) -> f64 {
    of.tally.error()
}

/// Something of all comparisons, where there is one.
fn whole<T>(all: &[Residual], of: impl Fn(&[Residual]) -> T) -> Option<T> {
    (!all.is_empty()).then(|| of(all))
}
