//! `--tokens N`: rows of dq judged on a stratified sample of the tokens, dk estimated
//! from it.
//!
//! dq has a row a token, so that the sampled rows are judged as they always are. dk and
//! dbias are sums over all tokens: dk is estimated and gets no verdict, dbias none at all.

use super::captured_gradients::Captured;
use super::context::Replay;
use super::estimate::Estimated;
use super::forward::ForwardState;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::problem::Problem;
use super::stratified_sample::{Sample, stratified};
use crate::head::step::StepError;
use crate::head::{Stage, Unit};

/// Tokens of a unit that its share of a sample comes to: N is that of the microbatch.
pub(super) fn share(count: usize, unit: usize, all: usize) -> usize {
    (count * unit).div_ceil(all.max(1)).min(unit)
}

impl Replay<'_> {
    pub(super) fn sampled(
        &self,
        (microbatch, unit): (&HeadMicrobatch, &Unit),
        (state, upstream): (&ForwardState, &Upstream),
        captured: Captured,
        (count, seed): (usize, u64),
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let labels: Vec<u32> = unit.rows.iter().map(|&t| microbatch.inputs.labels[t]).collect();
        let n = share(count, unit.rows.len(), microbatch.inputs.tokens());
        let sample = stratified(&labels, &state.confidence(unit), n, seed);
        if captured.stage(Stage::Dbias).is_some() {
            let why = "a sum over all tokens, of which --tokens takes some: leave it out to have dbias judged";
            outcome.skip(Stage::Dbias, why);
        }
        self.with_problem(microbatch, unit, state, upstream, &mut |problem| {
            self.estimate(problem, &captured, &sample, outcome);
        });
        let drawn: Vec<usize> = sample.rows.iter().map(|&row| unit.rows[row]).collect();
        let drawn = Unit { ranks: unit.ranks.clone(), rows: drawn };
        let gradients = captured.gradients.into_iter().filter(|gradient| gradient.stage.is_of_q());
        let captured = Captured { gradients: gradients.collect() };
        if captured.gradients.is_empty() {
            return Ok(());
        }
        self.try_problem(microbatch, &drawn, (state, upstream), &mut |problem| {
            let findings =
                self.walk(problem, &captured, (microbatch, &drawn), (state, upstream), outcome)?;
            self.plan.report(findings, &captured, &microbatch.inputs, &drawn, outcome);
            Ok(())
        })
    }

    fn estimate(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        sample: &Sample,
        outcome: &mut Outcome,
    ) {
        // A part of dk is a dk whose other cotangents are zero.
        for gradient in captured.of(&Stage::OF_K) {
            let none = vec![0.0; problem.head.q.rows];
            let mut cotangents = problem.cotangents();
            match gradient.stage {
                Stage::DkLse => cotangents.label = &none,
                Stage::DkLabel => (cotangents.lse, cotangents.smooth) = (&none, &none),
                _ => {}
            }
            let estimated = Estimated::new(problem.head, &problem.lse, cotangents);
            let sampled = estimated.against(&gradient.matrix(), sample, self.executor.progress());
            outcome.estimated(gradient.stage, sampled);
        }
    }
}
