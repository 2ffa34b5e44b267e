//! The backward of one unit: dq, dk and dbias, by the walk over the vocabulary or by what the
//! effort has in its place, and from captured dlogits where there are any.

use backtape::role::Role;

use super::context::Replay;
use super::forward::ForwardState;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Effort;
use crate::head::step::StepError;
use crate::head::{Scores, Stage, Unit};

impl Replay<'_> {
    pub(super) fn backward(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
        state: &ForwardState,
        upstream: &Upstream,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let Scores::Product { .. } = microbatch.inputs.scores else {
            if self.plan.step.find(Role::Dbias, microbatch.inputs.microbatch).is_some() {
                let why = "recorded, and judged only where the head starts from q and k; dlogits says what it is a sum of";
                outcome.skip(Stage::Dbias, why);
            }
            return Ok(());
        };
        let captured = self.judge.captured(microbatch, unit, outcome)?;
        if captured.gradients.is_empty() && self.plan.sums_without_addends.is_none() {
            return Ok(());
        }
        if let Effort::Tokens { count, seed } = self.plan.effort {
            let before = (state, upstream);
            return self.sampled((microbatch, unit), before, captured, (count, seed), outcome);
        }
        let dlogits = self.judge.usable_dlogits(microbatch, unit)?;
        self.try_problem(microbatch, unit, (state, upstream), &mut |problem| {
            let mut findings = match self.plan.effort {
                // Probes see sums over all classes, in which open tokens can't be told apart.
                Effort::Probes { count, seed }
                    if !self.plan.recomputes() && !problem.any_uncertain() =>
                {
                    self.probe(problem, &captured, unit, (count, seed), outcome)
                }
                _ => {
                    self.walk(problem, &captured, (microbatch, unit), (state, upstream), outcome)?
                }
            };
            let mut from_dlogits = Vec::new();
            if let Some(dlogits) = &dlogits {
                let stages = captured.without_parts();
                findings.forget(&stages);
                self.judge_from_dlogits(
                    problem,
                    (dlogits, &stages),
                    &captured,
                    unit,
                    &mut findings,
                );
                from_dlogits = stages;
            }
            let judged_stages = captured.all_but(&from_dlogits);
            let microbatch_unit = (microbatch, unit);
            self.plan.note_uncertain_tokens(
                microbatch_unit,
                problem,
                (&captured, &judged_stages),
                &mut findings,
                outcome,
            );
            self.plan.report(findings, &captured, &microbatch.inputs, unit, outcome);
            Ok(())
        })
    }
}
