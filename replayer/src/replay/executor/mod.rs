//! Who computes a replay: this process, this process with passes that trials share, the tasks of
//! a cluster, or a device.
//!
//! A stage says what it needs: the forward pass of a head, the pass of an emulated policy, a walk
//! over the vocabulary, a captured tensor. It never asks who computes. Each such operation is one
//! function of `Executor`, and where it matters who computes, one `match` over `Place`. An
//! operation takes a head, or tensors, and returns sums: so a stage of another parameter, or of an
//! op that is given as a function, brings an operation of its own and needs no place of its own.
//!
//! Who computes changes no bit of a report, but for a device, whose sums are of another order.

mod backward;
mod forward;
pub mod pass_cache;
pub(super) mod plane;
mod shared;
pub(super) mod walk;

use super::executor::pass_cache::PassCache;
use super::outcome::Multiplied;
use super::plan::Plan;
use super::plausible_policies::{Member, members};
use super::tasks::Cluster;
use super::tasks::drive::Driver;
use crate::device::{Device, DeviceError, products_of};
use crate::head::step::StepError;
use crate::kernels::Progress;

/// Computes what the stages of one replay need.
pub(crate) struct Executor<'a> {
    plan: &'a Plan<'a>,
    place: Place<'a>,
    /// The forward passes that this replay has in common with others.
    passes: Option<&'a PassCache>,
    progress: &'a dyn Progress,
}

/// Where the products of a head are multiplied.
enum Place<'a> {
    /// In this process.
    Here,
    /// In this process, once for all trials that need the same.
    Cached(&'a PassCache),
    /// In tasks on other machines.
    Cluster(Driver<'a>),
    /// On a device.
    Device(&'a dyn Device),
}

impl<'a> Executor<'a> {
    /// Of a replay of what was declared, on a cluster or a device where one is given. It leaves
    /// its forward passes in `passes` for the trials that follow.
    pub(super) fn of_replay(
        plan: &'a Plan<'a>,
        (cluster, device): (Option<&'a Cluster<'a>>, Option<&'a dyn Device>),
        passes: &'a PassCache,
        progress: &'a dyn Progress,
    ) -> Executor<'a> {
        // What a device computed has not the bits that a trial's passes have.
        let passes = device.is_none().then_some(passes);
        let place = match (cluster, device) {
            (Some(cluster), _) => Place::Cluster(Driver::new(cluster, plan, progress)),
            (None, Some(device)) => Place::Device(device),
            (None, None) => Place::Here,
        };
        Executor { plan, place, passes, progress }
    }

    /// Of a trial, which computes in this process, and nothing that `cache` holds already.
    pub(super) fn of_trial(
        plan: &'a Plan<'a>,
        cache: Option<&'a PassCache>,
        progress: &'a dyn Progress,
    ) -> Executor<'a> {
        let place = cache.map_or(Place::Here, Place::Cached);
        Executor { plan, place, passes: cache, progress }
    }

    /// Of a task, which computes in the worker's process.
    pub(super) fn of_task(plan: &'a Plan<'a>, progress: &'a dyn Progress) -> Executor<'a> {
        Executor { plan, place: Place::Here, passes: None, progress }
    }

    /// Told how much work was done, by whoever multiplies.
    pub(super) fn progress(&self) -> &'a dyn Progress {
        self.progress
    }

    /// The emulated policies as a device multiplies for them; empty where none does.
    pub(super) fn multiplied(&self) -> Vec<Multiplied> {
        let Place::Device(_) = &self.place else { return Vec::new() };
        let multiplied_by = |member: Member| {
            let [logits, gradients] = products_of(&member.policy);
            Multiplied { policy: member.name, logits, gradients }
        };
        members(&self.plan.roundings).into_iter().map(multiplied_by).collect()
    }
}

/// The replay ends with what the device said.
pub(super) fn failed(error: DeviceError) -> StepError {
    StepError::Device { why: error.to_string() }
}
