//! The captured gradients of one unit, as they are read from the dump.

use backtape::shard::When;

use super::addends::{Added, Sum};
use super::captured_gradients::{Captured, Gradient, GradientValues};
use super::judge::Judge;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::world::StagePlace;
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, unfit};
use crate::head::{Scores, Stage, Unit};
use crate::kernels::round::Precision;

impl Judge<'_> {
    /// What the dump holds of this unit's gradients.
    pub(super) fn captured(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
        outcome: &mut Outcome,
    ) -> Result<Captured, StepError> {
        let mut captured = Captured::default();
        let stages = Stage::OF_Q.into_iter().chain(Stage::OF_K).chain([Stage::Dbias]);
        for stage in stages.filter(|&stage| self.plan.wants(stage)) {
            // What cannot be used of one gradient says nothing of the others.
            let gradient = self.captured_of(stage, (microbatch, unit), outcome);
            let gradient = outcome.spared(gradient, (&[stage], microbatch.inputs.microbatch))?;
            captured.gradients.extend(gradient.flatten());
        }
        Ok(captured)
    }

    /// What the dump holds of one of this unit's gradients, if it holds any that can be
    /// judged by the unit's tokens.
    fn captured_of(
        &self,
        stage: Stage,
        (microbatch, unit): (&HeadMicrobatch, &Unit),
        outcome: &mut Outcome,
    ) -> Result<Option<Gradient>, StepError> {
        let role = stage.role().expect("gradients have roles");
        let place =
            StagePlace { stage, microbatch: microbatch.inputs.microbatch, rank: unit.rank() };
        let columns = if stage == Stage::Dbias { 1 } else { microbatch.inputs.width() };
        if let Some((values, stored)) = self.stand_in(&place, columns) {
            let source = format!("a variant's {stage}");
            let (rounded, apart) = (None, None);
            return Ok(Some(Gradient { stage, values, stored, rounded, apart, source }));
        }
        let Some(key) = self.plan.step.find(role, microbatch.inputs.microbatch) else {
            return Ok(None);
        };
        if stage == Stage::Dk && self.plan.step.options.declared.tied_embedding {
            let why = "tied_embedding=True: dk holds the input embedding's part too, which the head does not know; record dk_lse and dk_label to have the head's part judged";
            outcome.skip(stage, why);
            return Ok(None);
        }
        let partial = self.plan.step.tensors[key].partial.is_some();
        let of_tokens = stage.is_of_q();
        if let Some(why) = microbatch.blocked.as_ref().filter(|_| partial && !of_tokens) {
            outcome.leave(stage, microbatch.inputs.microbatch, why.clone());
            return Ok(None);
        }
        let values = match (partial, of_tokens) {
            (true, true) => {
                let sum = Sum::of_partial(self.plan.step, key)?.oriented(self.plan.step, key);
                GradientValues::Summed(sum.added())
            }
            (true, _) if unit.ranks.is_empty() => {
                if let Err(why) = self.plan.step.all_added(key, &microbatch.inputs) {
                    outcome.leave(stage, microbatch.inputs.microbatch, why);
                    return Ok(None);
                }
                let sum = Sum::of_addends(self.plan.step, key)?.oriented(self.plan.step, key);
                GradientValues::Summed(sum.added())
            }
            (true, _) => GradientValues::Whole(self.plan.step.oriented(key, Some(&unit.ranks))?),
            // A gradient over all tokens cannot be judged by some ranks' tokens.
            (_, false) if !unit.ranks.is_empty() => return Ok(None),
            _ => GradientValues::Whole(self.plan.step.oriented(key, None)?),
        };
        let stored = match &values {
            GradientValues::Whole(tensor) => precision_of(tensor.dtype),
            _ => None,
        };
        let source = key.to_string();
        let mut gradient = Gradient { stage, values, stored, rounded: None, apart: None, source };
        self.plan.check_shape(&gradient, microbatch)?;
        let output = self.plan.roundings.widest.output;
        gradient.rounded = gradient.coarser(output);
        let summed = stage == Stage::Dk
            && !partial
            && key.when != Some(When::PreReduce)
            && self.plan.step.devices_with_tokens(&microbatch.inputs) > 1;
        let finer =
            stored.is_some_and(|precision| precision.unit_roundoff() < output.unit_roundoff());
        gradient.apart = (summed && finer && gradient.rounded.is_none()).then_some(output);
        Ok(Some(gradient))
    }
}

impl Plan<'_> {
    fn check_shape(
        &self,
        gradient: &Gradient,
        microbatch: &HeadMicrobatch,
    ) -> Result<(), StepError> {
        let Scores::Product { q, k } = &microbatch.inputs.scores else { return Ok(()) };
        let like = match gradient.stage {
            Stage::Dbias => &k.shape[..1],
            stage if stage.is_of_q() => &q.shape[..],
            _ => &k.shape[..],
        };
        match &gradient.values {
            GradientValues::Whole(tensor) if tensor.shape != like || matrix(tensor).is_none() => {
                Err(unfit(tensor, &format!("floats of shape {like:?}")))
            }
            _ => Ok(()),
        }
    }
}

impl Judge<'_> {
    /// What stands in for a captured gradient, where something does.
    pub(super) fn stand_in(
        &self,
        place: &StagePlace,
        columns: usize,
    ) -> Option<(GradientValues, Option<Precision>)> {
        let supplied = self.world.captured(place)?;
        let storage = |&x: &f64| super::rounding_variance::stored(supplied.precision, x);
        let storage = supplied.values.iter().map(storage).collect();
        let squares = supplied.values.iter().map(|x| x * x).collect();
        let total = supplied.values.clone();
        let added = Added { cols: columns, total, storage, squares, count: 1.0 };
        Some((GradientValues::Summed(added), supplied.precision))
    }
}
