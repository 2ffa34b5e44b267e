//! The backward walk of one unit over the vocabulary, slab by slab.
//!
//! What is held beyond the inputs and the `[T, D]` outputs is a few slabs of `SLAB_BYTES`,
//! whatever V is. dq goes from slab to slab: each goes on from the sums that the one before left.

use std::ops::Range;

use super::backward::Problem;
use super::devised::failed;
use super::dq::{DqState, add, picked};
use super::findings::{Captured, Findings, error_energy};
use super::forward::ForwardState;
use super::loss::Upstream;
use super::members::{Member, members};
use super::outcome::Outcome;
use super::slab::Slab;
use super::tasks::Walked;
use super::{Replay, Slice};
use crate::head::step::{StepError, vocabulary_slab};
use crate::head::{Stage, Unit};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::reference::Keep;
use crate::kernels::{policy, reference};

/// Bytes of one f64 buffer over a slab of k's rows.
const SLAB_BYTES: usize = 32 << 20;
/// The same where a declared policy's sums over the vocabulary must not be cut.
const WHOLE_BYTES: usize = 1 << 30;

impl Replay<'_> {
    pub(super) fn walk(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        (slice, unit): (&Slice, &Unit),
        before: (&ForwardState, &Upstream),
        outcome: &mut Outcome,
    ) -> Result<Findings, StepError> {
        let (d, v) = (problem.head.q.cols, problem.head.k.rows);
        let members = members(&self.roundings);
        let floors = self.floors(problem, unit, before.0, &members)?;
        let mut findings = Findings { floors, ..Findings::default() };
        let mut dq = self.dq_zeros(problem);
        // Nothing to compute is no task.
        let on = self.on.filter(|_| problem.head.q.rows > 0 && v > 0);
        let mut walked = on.map(|on| Walked::new(self, on, problem, (slice, unit), &members));
        let mut device = self.device_walk(problem)?;
        for range in self.slabs(d, v) {
            let mut labels = Vec::new();
            let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
            let mut slab = match (&mut walked, &mut device) {
                (Some(walked), _) => {
                    self.completed(problem, (&head, range.clone()), walked.slab()?)
                }
                (None, Some(device)) => {
                    let of = (problem, captured);
                    self.device_slab(of, (&head, range.clone()), device, &mut dq.exact)?
                }
                (None, None) => {
                    self.reference_slab(problem, &head, range.clone(), (&mut dq.exact, Keep::Both))
                }
            };
            self.allow_open(problem, (&head, range), &mut slab);
            match &mut findings.floors {
                Some(floors) => floors.of_slab(&mut slab, captured),
                None => {
                    let found = (&mut slab, &mut dq, &mut findings);
                    self.emulate_slab(
                        (problem, &head),
                        &members,
                        captured,
                        walked.as_mut(),
                        found,
                    )?;
                }
            }
            self.judge_dk(problem, &slab, (captured, &Stage::OF_K), &mut findings);
            self.judge_dbias(problem, &slab, captured, &mut findings);
            if self.recomputes() {
                self.keep_reference(problem, &slab, (slice, unit), outcome);
            }
            walked.iter_mut().for_each(Walked::next);
        }
        if let Some(walked) = walked {
            dq.exact = walked.finish()?;
        }
        if let Some(mut device) = device {
            if let Some(mut kept) = device.dq_to_compare().filter(|_| self.compares_there(problem))
            {
                let captured = picked(captured, &unit.rows);
                dq.looked = self.look_at_dq(problem, &dq.exact, &captured, &mut *kept)?;
            }
            device.finish(&mut dq.exact).map_err(failed)?;
        }
        dq.once_a_row(problem.head.copies);
        self.judge_dq(problem, &dq, (captured, &Stage::OF_Q), unit, &mut findings);
        let of = (&dq.exact, captured);
        self.finish_floors((slice, unit), before, &members, of, &mut findings)?;
        Ok(findings)
    }

    /// dq of a walk that has not begun.
    pub(super) fn dq_zeros(&self, problem: &Problem<'_>) -> DqState {
        let noise = self.term_noise(problem.head.q.cols);
        DqState::of(reference::Backward::zeros(&problem.head, &noise))
    }

    /// The slabs of a vocabulary, in order.
    pub(super) fn slabs(&self, d: usize, v: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let rows = self.slab_rows(d, v);
        (0..v).step_by(rows).map(move |start| start..(start + rows).min(v))
    }

    /// Rows of k in one slab. A declared order of summation is emulated over the
    /// whole vocabulary where that fits: cut in slabs, its sums would be others.
    pub(super) fn slab_rows(&self, d: usize, v: usize) -> usize {
        let exact = self.roundings.declared || self.roundings.swamps();
        let bytes = if exact && v * d * 8 <= WHOLE_BYTES { WHOLE_BYTES } else { SLAB_BYTES };
        (bytes / (8 * d.max(1))).max(self.tiles.vocab)
    }

    fn emulate_slab(
        &self,
        (problem, head): (&Problem<'_>, &HeadInputs<'_>),
        members: &[Member],
        captured: &Captured,
        mut walked: Option<&mut Walked<'_>>,
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
                    let at = block.rows.start * depth..block.rows.end * depth;
                    most[at].copy_from_slice(block.dk);
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
                    if self.roundings.swamps() {
                        let width = reference.len() / block.rows.len().max(1);
                        let at = block.rows.start * width;
                        note_lost(&mut lost, stage, at, values, &reference);
                    }
                }
            };
            let part = match &mut walked {
                Some(walked) => walked.emulated(&mut take)?,
                None => {
                    let upstream = (&problem.lse[..], &problem.cotangents());
                    self.policy_backward(&member.policy, head, upstream, &mut take)?
                }
            };
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
    at: usize,
    values: &[f64],
    reference: &[f64],
) {
    let index = lost.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
        lost.push((stage, Vec::new()));
        lost.len() - 1
    });
    let of = &mut lost[index].1;
    of.resize(of.len().max(at + values.len()), 0.0);
    for (to, (x, r)) in of[at..].iter_mut().zip(values.iter().zip(reference)) {
        *to = (x - r).abs();
    }
}
