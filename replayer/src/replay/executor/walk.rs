//! A backward walk of one unit over the vocabulary, slab by slab.

use std::ops::Range;

use super::{Executor, Place, failed};
use crate::device::{BackwardWalk, Kept};
use crate::head::Unit;
use crate::head::step::StepError;
use crate::kernels::matrix::HeadInputs;
use crate::kernels::policy::{DkParts, DqParts};
use crate::kernels::reference::{Backward, Keep, Upstream};
use crate::replay::microbatch::HeadMicrobatch;
use crate::replay::plausible_policies::Member;
use crate::replay::problem::Problem;
use crate::replay::slab::{Looked, Slab};
use crate::replay::tasks::drive::ClusterWalk;

/// Compares the rows of a slab where their sums lie.
pub(in crate::replay) type LookAtDk<'l> =
    dyn Fn(&Slab, &mut dyn Kept) -> Result<Looked, StepError> + 'l;

/// Compares the rows of dq where their sums lie.
pub(in crate::replay) type LookAtDq<'l> =
    dyn Fn(&Backward, &mut dyn Kept) -> Result<Looked, StepError> + 'l;

/// A walk that goes on.
pub(in crate::replay) struct Walk<'a> {
    executor: &'a Executor<'a>,
    problem: &'a Problem<'a>,
    by: By<'a>,
}

enum By<'a> {
    Here,
    Cluster(Box<ClusterWalk<'a>>),
    Device(Box<dyn BackwardWalk + 'a>),
}

impl<'a> Executor<'a> {
    /// Begins a walk over the slabs of the plan. `members` policies are emulated in each.
    pub(in crate::replay) fn walk(
        &'a self,
        problem: &'a Problem<'a>,
        (microbatch, unit): (&HeadMicrobatch, &'a Unit),
        members: &[Member],
    ) -> Result<Walk<'a>, StepError> {
        let head = &problem.head;
        let by = match &self.place {
            // Nothing to compute is no task.
            Place::Cluster(driver) if head.q.rows > 0 && head.k.rows > 0 => By::Cluster(Box::new(
                ClusterWalk::new(driver, problem, (microbatch, unit), members),
            )),
            Place::Device(device) => {
                let rows = self.plan.slab_rows(head.q.cols, head.k.rows).min(head.k.rows);
                By::Device(device.backward(head, rows, &problem.noise).map_err(failed)?)
            }
            _ => By::Here,
        };
        Ok(Walk { executor: self, problem, by })
    }
}

impl Walk<'_> {
    /// The next slab; dq goes on from the slabs before. With `look` its rows are compared where
    /// the sums lie, if they do not lie in this process: these sums stay there.
    pub(in crate::replay) fn slab(
        &mut self,
        (head, range): (&HeadInputs<'_>, Range<usize>),
        dq: &mut Backward,
        look: Option<&LookAtDk<'_>>,
    ) -> Result<Slab, StepError> {
        let (executor, problem) = (self.executor, self.problem);
        let walk = match &mut self.by {
            By::Here => {
                return Ok(executor.reference_slab(problem, head, range, (dq, Keep::Both)));
            }
            By::Cluster(walked) => {
                return Ok(Slab::completed(problem, (head, range), walked.slab()?));
            }
            By::Device(walk) => walk,
        };
        let upstream = Upstream::new(head, &problem.lse, problem.cotangents(), &problem.noise);
        let tiles = (executor.plan.tiles, executor.progress);
        let Some(look) = look else {
            let sums = walk.slab(head, upstream, tiles, dq).map_err(failed)?;
            return Ok(Slab::completed(problem, (head, range), sums));
        };
        let (sums, mut kept) = walk.slab_to_compare(head, upstream, tiles, dq).map_err(failed)?;
        let mut slab = Slab::completed(problem, (head, range), sums);
        slab.looked = look(&slab, &mut *kept)?;
        Ok(slab)
    }

    /// What the next of the members makes of the slab, in their order.
    pub(in crate::replay) fn emulated(
        &mut self,
        member: &Member,
        head: &HeadInputs<'_>,
        on_dk: &mut dyn FnMut(DkParts<'_>),
    ) -> Result<DqParts, StepError> {
        if let By::Cluster(walked) = &mut self.by {
            return walked.emulated(on_dk);
        }
        let upstream = (&self.problem.lse[..], &self.problem.cotangents());
        self.executor.policy_backward(&member.policy, head, upstream, on_dk)
    }

    /// Leaves the slab.
    pub(in crate::replay) fn leave_slab(&mut self) {
        if let By::Cluster(walked) = &mut self.by {
            walked.next();
        }
    }

    /// Ends the walk: `dq` is complete. With `look` its rows are compared where the sums lie, if
    /// all of them lie there.
    pub(in crate::replay) fn finish(
        self,
        dq: &mut Backward,
        look: Option<&LookAtDq<'_>>,
    ) -> Result<Looked, StepError> {
        match self.by {
            By::Here => Ok(Looked::new()),
            By::Cluster(walked) => {
                *dq = walked.finish()?;
                Ok(Looked::new())
            }
            By::Device(mut walk) => {
                let mut looked = Looked::new();
                if let (Some(look), Some(mut kept)) = (look, walk.dq_to_compare()) {
                    looked = look(dq, &mut *kept)?;
                }
                walk.finish(dq).map_err(failed)?;
                Ok(looked)
            }
        }
    }
}
