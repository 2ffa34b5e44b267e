//! The stages of one microbatch in the order in which they are computed.

use super::context::Replay;
use super::forward::ForwardState;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use crate::head::step::StepError;
use crate::head::{Stage, Unit};

/// The stages of a microbatch that need more than the forward pass.
const AFTER_FORWARD: &[Stage] = &[
    Stage::Logits,
    Stage::Loss,
    Stage::Dlogprobs,
    Stage::Dlogits,
    Stage::DqLse,
    Stage::DqLabel,
    Stage::Dq,
    Stage::DkLse,
    Stage::DkLabel,
    Stage::Dk,
    Stage::Dbias,
];

/// Given a unit, and what its backward starts from.
type EachUnit<'a> =
    dyn FnMut(&Unit, (&ForwardState, &Upstream), &mut Outcome) -> Result<(), StepError> + 'a;

impl Replay<'_> {
    /// Judges the stages of one microbatch; `backward` those of each unit. What cannot be used
    /// of the dump costs the stages that need it.
    pub(super) fn microbatch(
        &self,
        head_microbatch: &HeadMicrobatch,
        outcome: &mut Outcome,
        backward: &mut EachUnit<'_>,
    ) -> Result<(), StepError> {
        let microbatch = head_microbatch.inputs.microbatch;
        let state = self.forward(head_microbatch, outcome);
        let all = Stage::ALL.iter().copied().filter(|stage| !stage.is_input());
        let all: Vec<Stage> = all.collect();
        let Some(state) = outcome.spared(state, (&all, microbatch))? else { return Ok(()) };
        let upstream = self.judge.upstream(head_microbatch, &state, outcome);
        let Some(upstream) = outcome.spared(upstream, (AFTER_FORWARD, microbatch))? else {
            return Ok(());
        };
        self.judge.loss(head_microbatch, &state, outcome)?;
        self.plane(head_microbatch, &state, &upstream, outcome)?;
        for unit in &head_microbatch.units {
            let result = backward(unit, (&state, &upstream), outcome);
            outcome.spared(result, (&AFTER_FORWARD[4..], microbatch))?;
        }
        Ok(())
    }
}
