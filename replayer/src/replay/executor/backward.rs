//! Backward passes: of the reference over a slab or the whole vocabulary, and of a policy.

use std::ops::Range;
use std::sync::Arc;

use super::pass_cache::BackwardPass;
use super::{Executor, Place, failed};
use crate::head::step::StepError;
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::policy::{self, DkParts, DqParts, Policy};
use crate::kernels::reference::{self, DkSums, Keep};
use crate::replay::problem::Problem;
use crate::replay::slab::Slab;

impl Executor<'_> {
    /// The reference over a slab of k's rows; dq, where it is kept, goes on from the slabs
    /// before.
    pub(in crate::replay) fn reference_slab(
        &self,
        problem: &Problem<'_>,
        head: &HeadInputs<'_>,
        range: Range<usize>,
        (dq, keep): (&mut reference::Backward, Keep),
    ) -> Slab {
        // Of a trial the one that another had, if it was the same. What has several slabs is
        // more than is held.
        if matches!(self.place, Place::Cached(_)) && range.len() == problem.head.k.rows {
            let pass = self.reference_pass(problem, head, keep);
            dq.clone_from(&pass.dq);
            return Slab { range, ..pass.slab.clone() };
        }
        let (cotangents, noise) = (problem.cotangents(), &problem.noise);
        let mut sums = DkSums::zeros(head, noise, self.plan.tiles);
        let given = (&problem.lse[..], &cotangents, noise);
        let walking = (self.plan.tiles, keep, self.progress);
        reference::backward_onto((dq, &mut sums), (head, 0), given, walking);
        Slab::completed(problem, (head, range), sums)
    }

    /// One pass of the reference; in a trial the one that another had, if it was the same.
    pub(in crate::replay) fn reference_pass(
        &self,
        problem: &Problem<'_>,
        head: &HeadInputs<'_>,
        keep: Keep,
    ) -> Arc<BackwardPass> {
        let (cotangents, noise) = (problem.cotangents(), problem.noise);
        let small = problem.entry_floor > 0.0;
        let mut run = || {
            let mut slab = Slab { range: 0..head.k.rows, ..Slab::default() };
            let take = &mut |block: reference::DkBlock| {
                if keep != Keep::Dq {
                    slab.take(block);
                }
            };
            let walking = (self.plan.tiles, keep, self.progress);
            let dq = reference::backward(head, &problem.lse, &cotangents, &noise, walking, take);
            if keep != Keep::Dq {
                slab.describe(head, small);
            }
            BackwardPass { dq, slab }
        };
        match self.place {
            Place::Cached(cache) => {
                let inputs = (head, &problem.lse[..], &cotangents);
                cache.backward(inputs, (keep, &(noise, small)), &mut run)
            }
            _ => Arc::new(run()),
        }
    }

    /// A policy's backward pass.
    pub(in crate::replay) fn policy_backward(
        &self,
        policy: &Policy,
        head: &HeadInputs<'_>,
        (lse, cotangents): (&[f64], &Cotangents<'_, f64>),
        on_dk: &mut dyn FnMut(DkParts<'_>),
    ) -> Result<DqParts, StepError> {
        let (tiles, progress) = (self.plan.roundings.tiles, self.progress);
        match self.place {
            Place::Device(device) => device
                .policy_backward(policy, head, (lse, cotangents), (tiles, progress), on_dk)
                .map_err(failed),
            _ => Ok(policy::backward(policy, head, lse, cotangents, tiles, progress, on_dk)),
        }
    }

    /// Whether policies may be emulated in a sample of the rows. A sum in few bits needs the
    /// policies' rows themselves, and a cluster or a device has all of them at once.
    pub(in crate::replay) fn emulates_samples(&self) -> bool {
        let runs_here = matches!(self.place, Place::Here | Place::Cached(_));
        runs_here && !self.plan.roundings.declared && !self.plan.roundings.swamps()
    }
}
