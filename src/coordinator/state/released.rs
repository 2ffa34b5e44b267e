//! Releases the details of committed steps: a job may record every step for a month, and the
//! details of an old step, which are rarely needed again, are in its manifest.

use super::{AttemptState, StepState};
use crate::coordinator::recent::Taken;
use crate::coordinator::refusal::Refusal;
use crate::identity::Step;
use crate::manifest::Manifest;

impl AttemptState {
    /// True of a committed step of which only sums are in memory: it needs [`Self::recall`] before
    /// an event of it is checked.
    pub(crate) fn is_released(&self, step: Step) -> bool {
        self.released.contains_key(&step)
    }

    /// The memory that a committed step takes.
    pub(crate) fn taken_by(&self, step: Step) -> Taken {
        let Some(state) = self.steps.get(&step) else { return Taken::default() };
        let entries = state.sums.files.max(state.closed.len() as u64);
        Taken { entries, bytes: state.bytes_of_closes() }
    }

    /// Number of reported files of a step.
    pub(crate) fn files_of(&self, step: Step) -> u64 {
        self.steps.get(&step).map_or(0, |state| state.sums.files)
    }

    /// Keeps nothing but the sums of a committed step.
    pub(crate) fn release(&mut self, step: Step) {
        let committed = |state: &&StepState| state.committed;
        if let Some(sums) = self.steps.get(&step).filter(committed).map(|state| state.sums) {
            self.steps.remove(&step);
            self.released.insert(step, sums);
        }
    }

    /// Restores the details of a released step from its manifest; fails if the manifest is not that
    /// step's.
    pub(crate) fn recall(&mut self, step: Step, manifest: &Manifest) -> Result<(), String> {
        let Some(sums) = self.released.get(&step) else { return Ok(()) };
        let opened = &self.opened;
        let opened_as = (&opened.run, opened.attempt, step);
        if opened_as != (&manifest.run, manifest.attempt, manifest.step) {
            let (run, attempt, step) = (&manifest.run, manifest.attempt, manifest.step);
            return Err(format!("it is of run {run}, attempt {attempt}, step {step}"));
        }
        let state = StepState::recalled(manifest);
        if state.sums != *sums || manifest.world_size != opened.world_size {
            return Err(format!(
                "it lists {} files and {} shards of {} ranks, the journal {} and {} of {}",
                state.sums.files,
                state.sums.shards,
                manifest.world_size,
                sums.files,
                sums.shards,
                opened.world_size
            ));
        }
        self.released.remove(&step);
        self.steps.insert(step, state);
        Ok(())
    }

    /// Refuses an event of a released step: without a recall the event would begin a new, empty
    /// step.
    pub(super) fn check_known(&self, step: Step) -> Result<(), Refusal> {
        match self.is_released(step) {
            false => Ok(()),
            true => Err(Refusal::Malformed(format!(
                "step {step} is committed, and its manifest was not asked"
            ))),
        }
    }
}
