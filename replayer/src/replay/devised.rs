//! The passes of the reference and of emulated policies, on a device where one computes.

use std::ops::Range;

use super::Replay;
use super::backward::Problem;
use super::findings::Captured;
use super::members::{Member, members};
use super::outcome::Multiplied;
use super::slab::Slab;
use crate::device::{BackwardWalk, DeviceError, products_of};
use crate::head::Stage;
use crate::head::step::StepError;
use crate::kernels::policy::{self, DkParts, DqParts, Policy, PolicyForward};
use crate::kernels::reference::{self, Backward, Forward, Upstream};
use crate::kernels::{Cotangents, HeadInputs};

/// The replay ends with what the device said.
pub(super) fn failed(error: DeviceError) -> StepError {
    StepError::Device { why: error.to_string() }
}

impl Replay<'_> {
    /// The emulated policies as the device multiplies for them.
    pub(super) fn multiplied(&self) -> Vec<Multiplied> {
        let of = |member: Member| {
            let [logits, gradients] = products_of(&member.policy);
            Multiplied { policy: member.name, logits, gradients }
        };
        let all = self.device.map(|_| members(&self.roundings));
        all.into_iter().flatten().map(of).collect()
    }

    /// The forward pass of a head.
    pub(super) fn reference_forward(&self, head: &HeadInputs<'_>) -> Result<Forward, StepError> {
        self.reference_forward_keeping(head, None)
    }

    /// The same; where this process computes it, the products `q kᵀ` are written to `products`.
    pub(super) fn reference_forward_keeping(
        &self,
        head: &HeadInputs<'_>,
        products: Option<&mut [f64]>,
    ) -> Result<Forward, StepError> {
        let Some(device) = self.device else {
            let how = (self.tiles, self.progress);
            return Ok(reference::forward_keeping(head, how, products));
        };
        let sums = device.forward(head, self.progress).map_err(failed)?;
        Ok(sums.finish(head.mask, head.k.rows - head.valid_vocab))
    }

    /// A policy's forward pass.
    pub(super) fn policy_forward(
        &self,
        of: &Policy,
        head: &HeadInputs<'_>,
    ) -> Result<PolicyForward, StepError> {
        let (tiles, progress) = (self.roundings.tiles, self.progress);
        match self.device {
            Some(device) => device.policy_forward(of, head, (tiles, progress)).map_err(failed),
            None => Ok(policy::forward(of, head, tiles, progress)),
        }
    }

    /// A policy's backward pass.
    pub(super) fn policy_backward(
        &self,
        of: &Policy,
        head: &HeadInputs<'_>,
        (lse, cotangents): (&[f64], &Cotangents<'_, f64>),
        on_dk: &mut dyn FnMut(DkParts<'_>),
    ) -> Result<DqParts, StepError> {
        let (tiles, progress) = (self.roundings.tiles, self.progress);
        match self.device {
            Some(device) => device
                .policy_backward(of, head, (lse, cotangents), (tiles, progress), on_dk)
                .map_err(failed),
            None => Ok(policy::backward(of, head, lse, cotangents, tiles, progress, on_dk)),
        }
    }

    /// A policy's token x vocabulary plane, tile by tile.
    pub(super) fn policy_plane(
        &self,
        of: &Policy,
        head: &HeadInputs<'_>,
        (lse, cotangents): (&[f64], &Cotangents<'_, f64>),
        on_tile: &mut dyn FnMut(policy::PlaneTile<'_>),
    ) -> Result<(), StepError> {
        let (tiles, progress) = (self.roundings.tiles, self.progress);
        match self.device {
            Some(device) => device
                .policy_plane(of, head, (lse, cotangents), (tiles, progress), on_tile)
                .map_err(failed),
            None => {
                policy::plane(of, head, lse, cotangents, tiles, progress, on_tile);
                Ok(())
            }
        }
    }

    /// A backward pass over slabs on the device; `None` without one.
    pub(super) fn device_walk(
        &self,
        problem: &Problem<'_>,
    ) -> Result<Option<Box<dyn BackwardWalk + '_>>, StepError> {
        let (head, d) = (&problem.head, problem.head.q.cols);
        let rows = self.slab_rows(d, head.k.rows).min(head.k.rows);
        let noise = self.term_noise(d);
        let walk = self.device.map(|device| device.backward(head, rows, &noise));
        walk.transpose().map_err(failed)
    }

    /// The next slab, compared there where the device does that.
    pub(super) fn device_slab(
        &self,
        (problem, captured): (&Problem<'_>, &Captured),
        (head, range): (&HeadInputs<'_>, Range<usize>),
        walk: &mut Box<dyn BackwardWalk + '_>,
        dq: &mut Backward,
    ) -> Result<Slab, StepError> {
        let noise = self.term_noise(head.q.cols);
        let upstream = Upstream::new(head, &problem.lse, problem.cotangents(), &noise);
        let tiles = (self.tiles, self.progress);
        // What ranks rounded of their own parts, and what is allowed of a dk that was recorded as
        // a sum alone, is told from the sums, which are then fetched.
        let told = captured.of(&Stage::OF_K).any(|of| of.apart.is_some())
            || self.kept_alone(problem.head.k.len()).is_some();
        if self.compares_there(problem) && !told {
            let (sums, mut kept) =
                walk.slab_to_compare(head, upstream, tiles, dq).map_err(failed)?;
            let mut slab = self.completed(problem, (head, range), sums);
            slab.looked = self.look_at_dk(problem, &slab, captured, &mut *kept)?;
            return Ok(slab);
        }
        let sums = walk.slab(head, upstream, tiles, dq).map_err(failed)?;
        Ok(self.completed(problem, (head, range), sums))
    }
}
