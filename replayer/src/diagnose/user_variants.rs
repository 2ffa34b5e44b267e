//! Hypotheses of a user: the values that a Python function returns are tried as the catalogue's
//! causes are.

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

/// A user's variant as a cause.
pub(super) struct UserVariant(pub(super) Arc<Variant>);

impl Cause for UserVariant {
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

    /// A user's function may be the declared head, rounded as the job rounds it, so explaining a
    /// comparison that passes proves no fault.
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

/// How the values of one stage that a variant returned compare with the reference and with the
/// captured ones, over all microbatches and ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VariantStage {
    /// The variant.
    pub variant: String,
    /// The stage.
    pub stage: &'static str,
    /// True when the variant's values would pass in the place of the captured ones: they are right.
    pub agrees: bool,
    /// Why they would not pass.
    pub reason: String,
    /// Relative error of the variant's values against the f64 reference, in the worst unit.
    pub error: f64,
    /// The relative error that rounding in the declared precision is expected to cause.
    pub floor: f64,
    /// error over floor.
    pub ratio: f64,
    /// True when the captured values are the variant's, but for rounding; none where the stage was
    /// not captured.
    pub explains: Option<bool>,
    /// Relative distance between the captured values and the variant's; none where the stage was
    /// not captured.
    pub distance: Option<f64>,
    /// In how many units the variant returned this stage.
    pub comparisons: usize,
}

/// Judges every stage that a variant returns.
pub(super) fn judge(
    step: &HeadStep<'_>,
    variant: &Arc<Variant>,
) -> Result<Vec<VariantStage>, StepError> {
    let stages = variant.stages();
    let mut judged_stages = Vec::new();
    for stage in stages {
        // One stage at a time, so that what is upstream of it comes from the dump.
        let only = BTreeSet::from([stage]);
        let cured = trial(step, &only, &StandsIn(variant.clone()), (None, None))?;
        let explained = trial(step, &only, &Explains(variant.clone()), (None, None))?;
        let judged = cured.stage(stage);
        let Some(worst) = judged.worst() else { continue };
        let of_stage: Vec<Residual> = residuals(&explained).into_values().collect();
        judged_stages.push(VariantStage {
            variant: variant.name.clone(),
            stage: stage.name(),
            agrees: judged.failing().count() == 0,
            reason: judged.reason.clone(),
            error: largest(judged.comparisons.iter().map(error)),
            floor: worst.floor(),
            ratio: worst.ratio(),
            explains: of_all(&of_stage, |all| all.iter().all(|residual| residual.passes)),
            distance: of_all(&of_stage, |all| {
                largest(all.iter().map(|residual| (residual.energy / residual.reference).sqrt()))
            }),
            comparisons: judged.comparisons.len(),
        });
    }
    Ok(judged_stages)
}

fn error(comparison: &Comparison) -> f64 {
    comparison.tally.error()
}

/// Applies a function to all comparisons; none where there are none.
fn of_all<T>(all: &[Residual], function: impl Fn(&[Residual]) -> T) -> Option<T> {
    (!all.is_empty()).then(|| function(all))
}
