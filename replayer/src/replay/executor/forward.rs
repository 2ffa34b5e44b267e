//! Forward passes: of a head, from captured logits, and as a policy rounds it.

use std::ops::Range;

use backtape::shard::TensorKey;

use super::{Executor, Place, failed};
use crate::head::step::StepError;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::reference::{self, Forward, WIDE};
use crate::kernels::{policy, span_of};
use crate::replay::microbatch::HeadMicrobatch;
use crate::replay::plan::Effort;
use crate::replay::plausible_policies::Member;
use crate::replay::qk_products::{Products, SHARE};
use crate::spill::memory;

impl Executor<'_> {
    /// The forward pass of a microbatch's head. Where this process multiplies, the products
    /// `q kᵀ` are written to `products`, as far as there is room.
    pub(in crate::replay) fn forward(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
        products: &mut Products,
    ) -> Result<Forward, StepError> {
        let mut run = || match &self.place {
            Place::Cluster(driver) => driver.forward(microbatch, head),
            _ => products.filled(|room| self.forward_of(head, room)),
        };
        match self.passes {
            Some(cache) => cache.forward(head, run),
            None => run(),
        }
    }

    fn forward_of(
        &self,
        head: &HeadInputs<'_>,
        products: Option<&mut [f64]>,
    ) -> Result<Forward, StepError> {
        match &self.place {
            Place::Device(device) => {
                let sums = device.forward(head, self.progress).map_err(failed)?;
                Ok(sums.finish(head.mask, head.k.rows - head.valid_vocab))
            }
            _ => Ok(reference::forward_keeping(head, (self.plan.tiles, self.progress), products)),
        }
    }

    /// The forward pass from captured logits: `put` is given spans of tokens in their order.
    /// `head` has neither q nor k.
    pub(in crate::replay) fn forward_of_logits(
        &self,
        key: &TensorKey,
        head: &HeadInputs<'_>,
        put: &mut dyn FnMut(Range<usize>, Forward),
    ) -> Result<(), StepError> {
        if let Place::Cluster(driver) = &self.place {
            let spans = self.spans(key, head.k.rows)?;
            let sums = driver.forward_of_logits((key, &spans), head)?;
            let masked = head.k.rows - head.valid_vocab;
            spans.into_iter().zip(sums).for_each(|(rows, sums)| {
                put(rows, sums.finish(head.mask, masked));
            });
            return Ok(());
        }
        self.each_span(key, head.k.rows, &mut |rows, logits, _| {
            let part = HeadInputs { given: Some(logits), ..span_of(head, rows.clone()) };
            put(rows, self.forward_of(&part, None)?);
            Ok(())
        })
    }

    /// lse and label logits as a member of the plausible policies has them; `number` is its place
    /// among all of them.
    pub(in crate::replay) fn emulated_forward(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
        (number, member): (usize, &Member),
    ) -> Result<(Vec<f64>, Vec<f64>), StepError> {
        let (policy, tiles) = (&member.policy, self.plan.roundings.tiles);
        let pass = match &self.place {
            Place::Cluster(driver) => return driver.emulated_forward(microbatch, head, number),
            Place::Device(device) => {
                device.policy_forward(policy, head, (tiles, self.progress)).map_err(failed)?
            }
            Place::Here | Place::Cached(_) => policy::forward(policy, head, tiles, self.progress),
        };
        Ok((pass.lse, pass.label_logits))
    }

    /// Room for the products of a microbatch whose gradients this process recomputes, if it is
    /// worth it.
    pub(in crate::replay) fn room_for_products(
        &self,
        head: &HeadInputs<'_>,
        inputs: &MicrobatchInputs,
    ) -> Products {
        let here = matches!(self.place, Place::Here) && !self.plan.trial;
        let plain = head.given.is_none() && head.reads.is_none();
        // With fewer columns the whole change, squares in f32 and this, made a replay slower.
        let plain = plain && head.q.cols >= WIDE;
        // A label beyond the valid classes has no column.
        let inside = |&label: &u32| label == IGNORED || (label as usize) < head.valid_vocab;
        let of_gradients = Stage::OF_Q.iter().chain(&Stage::OF_CLASSES).any(|stage| {
            let role = stage.role();
            role.is_some_and(|role| self.plan.step.find(role, inputs.microbatch).is_some())
        });
        let elements = head.q.rows.saturating_mul(head.valid_vocab);
        let fits = elements.saturating_mul(size_of::<f64>()) <= memory() / SHARE;
        let wanted = here && plain && of_gradients && self.plan.effort == Effort::All;
        let kept = wanted && fits && head.labels.iter().all(inside);
        Products::new(if kept { elements } else { 0 })
    }
}
