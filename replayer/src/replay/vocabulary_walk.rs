//! The backward walk of one unit over the vocabulary, slab by slab.
//!
//! What is held beyond the inputs and the `[T, D]` outputs is a few slabs of 32 MiB, whatever V
//! is. dq goes from slab to slab: each goes on from the sums that the one before left.

use super::captured_gradients::{Captured, error_energy, picked};
use super::context::Replay;
use super::dq_state::DqState;
use super::elementwise::add;
use super::executor::walk::Walk;
use super::findings::Findings;
use super::forward::ForwardState;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plausible_policies::{Member, members};
use super::problem::Problem;
use super::slab::Slab;
use crate::device::Kept;
use crate::head::step::{StepError, vocabulary_slab};
use crate::head::{Stage, Unit};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::{policy, reference};

impl Replay<'_> {
    pub(super) fn walk(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        (microbatch, unit): (&HeadMicrobatch, &Unit),
        before: (&ForwardState, &Upstream),
        outcome: &mut Outcome,
    ) -> Result<Findings, StepError> {
        let (d, v) = (problem.head.q.cols, problem.head.k.rows);
        let members = members(&self.plan.roundings);
        let floors = self.floors(problem, unit, before.0, &members)?;
        let mut findings = Findings { floors, ..Findings::default() };
        let mut dq = DqState::zeros(problem);
        let look_at_dk =
            |slab: &Slab, kept: &mut dyn Kept| self.judge.look_at_dk(problem, slab, captured, kept);
        let look_at_dk =
            self.judge.compares_dk_there(problem, captured).then_some(&look_at_dk as _);
        let mut walk = self.executor.walk(problem, (microbatch, unit), &members)?;
        for range in self.plan.slabs(d, v) {
            let mut labels = Vec::new();
            let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
            let mut slab = walk.slab((&head, range.clone()), &mut dq.exact, look_at_dk)?;
            self.plan.allow_uncertain_tokens(problem, (&head, range), &mut slab);
            match &mut findings.floors {
                Some(floors) => floors.of_slab(&mut slab, captured),
                None => {
                    let results = (&mut slab, &mut dq, &mut findings);
                    self.emulate_slab((&mut walk, &head), &members, captured, results)?;
                }
            }
            self.judge.judge_dk(problem, &slab, (captured, &Stage::OF_K), &mut findings);
            self.judge.judge_dbias(problem, &slab, captured, &mut findings);
            if self.plan.recomputes() {
                self.judge.keep_reference(problem, &slab, (microbatch, unit), outcome);
            }
            walk.leave_slab();
        }
        let look_at_dq = |dq: &reference::Backward, kept: &mut dyn Kept| {
            self.judge.look_at_dq(problem, dq, &picked(captured, &unit.rows), kept)
        };
        let look_at_dq = self.judge.compares_there(problem).then_some(&look_at_dq as _);
        dq.looked = walk.finish(&mut dq.exact, look_at_dq)?;
        dq.once_a_row(problem.head.copies);
        self.judge.judge_dq(problem, &dq, (captured, &Stage::OF_Q), unit, &mut findings);
        let exact_and_captured = (&dq.exact, captured);
        self.finish_floors(
            (microbatch, unit),
            before,
            &members,
            exact_and_captured,
            &mut findings,
        )?;
        Ok(findings)
    }

    fn emulate_slab(
        &self,
        (walk, head): (&mut Walk<'_>, &HeadInputs<'_>),
        members: &[Member],
        captured: &Captured,
        (slab, dq, findings): (&mut Slab, &mut DqState, &mut Findings),
    ) -> Result<(), StepError> {
        let forced = captured.parts(&Stage::OF_K, 0..0).is_some();
        let depth = head.q.cols;
        for (number, member) in members.iter().enumerate() {
            let widest = number + 1 == members.len();
            let mut most = std::mem::take(&mut slab.emulated);
            most.resize(head.k.rows * depth, 0.0);
            let mut lost: Vec<(Stage, Vec<f64>)> = Vec::new();
            let mut take = |block: policy::DkParts<'_>| {
                if widest {
                    let span = block.rows.start * depth..block.rows.end * depth;
                    most[span].copy_from_slice(block.dk);
                }
                for gradient in captured.of(&Stage::OF_CLASSES) {
                    let stage = gradient.stage;
                    if stage == Stage::Dk && forced {
                        continue;
                    }
                    let (values, reference) = slab.of_block(stage, &block);
                    if values.is_empty() {
                        continue; // plain never tells the parts apart
                    }
                    let energy = error_energy(values, &reference, gradient.stored);
                    findings.emulated(stage, number, energy);
                    if self.plan.roundings.swamps() {
                        let width = reference.len() / block.rows.len().max(1);
                        let offset = block.rows.start * width;
                        note_lost(&mut lost, stage, offset, values, &reference);
                    }
                }
            };
            let part = walk.emulated(member, head, &mut take)?;
            slab.emulated = most;
            slab.widen_lost(lost);
            match dq.emulated.get_mut(number) {
                Some(total) => {
                    add(&mut total.dq_lse, &part.dq_lse);
                    add(&mut total.dq_label, &part.dq_label);
                    add(&mut total.dq, &part.dq);
                }
                None => dq.emulated.push(part),
            }
        }
        Ok(())
    }
}

/// Keeps the largest loss of each element over the blocks of one member.
fn note_lost(
    lost: &mut Vec<(Stage, Vec<f64>)>,
    stage: Stage,
    offset: usize,
    values: &[f64],
    reference: &[f64],
) {
    let index = lost.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
        lost.push((stage, Vec::new()));
        lost.len() - 1
    });
    let lost_values = &mut lost[index].1;
    lost_values.resize(lost_values.len().max(offset + values.len()), 0.0);
    for (to, (x, r)) in lost_values[offset..].iter_mut().zip(values.iter().zip(reference)) {
        *to = (x - r).abs();
    }
}
