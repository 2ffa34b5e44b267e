//! Several devices that share the reference's passes by tokens.
//!
//! Each walks its own range of the tokens on a thread of its own. Rows of a forward pass and of dq
//! need nobody else; the partial sums of dk are brought to the first device and added there in the
//! order of the devices, so the same devices give the same bits every time.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use super::arguments::Add;
use super::backward::{Lying, Slab, Walk};
use super::compare::{Comparison, Kept};
use super::cuda::Cuda;
use super::error::DeviceError;
use super::links::{Links, Nccl};
use super::machine::Machine;
use super::plane::KeptPlane;
use super::room::Room;
use super::user_kernel::launch::Launches;
use super::{BackwardWalk, Description, Device, Given, Kernel, Unit, forward, policy, user_kernel};
use crate::compare::RowTally;
use crate::compare::plane::PlaneStage;
use crate::kernels::policy::{DkParts, DqParts, PlaneTile as PolicyTile, Policy, PolicyForward};
use crate::kernels::reference::{
    self, Backward, DkSums, ForwardSums, LabelTerms, TermNoise, Upstream,
};
use crate::kernels::{Cotangents, HeadInputs, Progress, Tiles, span_of};

/// Some machines, and what joins them.
pub(super) struct Several<M, L> {
    description: Description,
    /// Dropped first: it holds on to what is the machines'.
    links: L,
    machines: Vec<M>,
    /// As errors call them.
    names: Vec<String>,
}

/// The GPUs of these numbers, joined by NCCL.
pub(super) fn open(ordinals: &[usize]) -> Result<Several<Cuda, Nccl>, DeviceError> {
    // Asked first: opening a GPU takes a second, and compiles.
    super::presence::need(super::presence::nccl)?;
    let names: Vec<_> = ordinals.iter().map(|ordinal| format!("cuda:{ordinal}")).collect();
    let open =
        |(&ordinal, name): (&usize, &String)| Cuda::open(ordinal).map_err(|error| error.on(name));
    let machines = ordinals.iter().zip(&names).map(open).collect::<Result<Vec<_>, _>>()?;
    // A library of another version may lack a symbol, which cudarc answers with a panic.
    let joined = catch_unwind(AssertUnwindSafe(|| Ok((Nccl::join(&machines)?, Nccl::name()?))));
    let (links, by) = joined.unwrap_or_else(|_| {
        Err(DeviceError::Absent("libnccl.so lacks what is called; NCCL 2.7 has it".into()))
    })?;
    Ok(Several::of(machines, names, (links, &by)))
}

impl<M: Machine, L: Links<M>> Several<M, L> {
    /// Of at least one machine.
    pub(super) fn of(machines: Vec<M>, names: Vec<String>, (links, by): (L, &str)) -> Self {
        let first = machines[0].description();
        let each = names.iter().zip(&machines);
        let each: Vec<_> =
            each.map(|(name, machine)| format!("{name} {}", machine.description().name)).collect();
        let description = Description {
            name: each.join(" + "),
            compiler: first.compiler.clone(),
            products: format!(
                "{}; sums of dk brought by {by}, added in the order of the devices",
                first.products
            ),
        };
        Several { description, links, machines, names }
    }

    /// Each machine with its name and its tokens; who has none is left out.
    fn shares(&self, tokens: usize) -> impl Iterator<Item = (&M, &str, Range<usize>)> {
        let each = tokens.div_ceil(self.machines.len()).max(1);
        let machines = self.machines.iter().zip(&self.names).enumerate();
        machines.filter_map(move |(nth, (machine, name))| {
            let range = (nth * each).min(tokens)..((nth + 1) * each).min(tokens);
            // Somebody walks a head without tokens.
            (nth == 0 || !range.is_empty()).then_some((machine, &name[..], range))
        })
    }
}

/// Runs each on a thread of its own, and gives what they gave in their order; what the first that
/// failed said is said of it.
fn together<T: Send, F>(all: Vec<(&str, F)>) -> Result<Vec<T>, DeviceError>
where
    F: FnOnce() -> Result<T, DeviceError> + Send,
{
    thread::scope(|scope| {
        let started = all.into_iter().map(|(name, run)| (name, scope.spawn(run)));
        // All of them: what comes after waits for every device.
        let started: Vec<_> = started.collect();
        let ended = started.into_iter().map(|(name, thread)| match thread.join() {
            Ok(result) => result.map_err(|error| error.on(name)),
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

impl<M: Launches, L: Links<M>> Device for Several<M, L> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn forward(
        &self,
        inputs: &HeadInputs,
        progress: &dyn Progress,
    ) -> Result<ForwardSums, DeviceError> {
        reference::check(inputs);
        let run = |(machine, name, tokens): (_, _, Range<usize>)| {
            (name, move || forward::forward(machine, &span_of(inputs, tokens), progress))
        };
        let parts = together(self.shares(inputs.q.rows).map(run).collect())?;
        let all = |field: fn(&ForwardSums) -> &Vec<f64>| {
            parts.iter().flat_map(|part| field(part).iter().copied()).collect()
        };
        Ok(ForwardSums {
            max: all(|part| &part.max),
            sum: all(|part| &part.sum),
            label_logits: all(|part| &part.label_logits),
            logit_sum: all(|part| &part.logit_sum),
            logit_squares: all(|part| &part.logit_squares),
        })
    }

    fn backward<'a>(
        &'a self,
        inputs: &HeadInputs,
        rows: usize,
        noise: &TermNoise,
    ) -> Result<Box<dyn BackwardWalk + 'a>, DeviceError> {
        let begin = |(machine, name, tokens): (&'a M, &'a str, Range<usize>)| {
            let walk = Walk::begin(machine, inputs, tokens.clone(), (rows, noise));
            let walk = walk.map_err(|error| error.on(name))?;
            Ok(Share { machine, name, tokens, walk })
        };
        let shares = self.shares(inputs.q.rows).map(begin).collect::<Result<_, DeviceError>>()?;
        Ok(Box::new(Shared { links: &self.links, shares, brought: Room::default() }))
    }

    /// Of the first.
    fn plane_bytes(&self) -> Result<usize, DeviceError> {
        self.machines[0].plane_bytes()
    }

    /// Of the first.
    fn plane<'a>(
        &'a self,
        inputs: &HeadInputs,
        upstream: Upstream,
        stage_and_progress: (PlaneStage, &dyn Progress),
    ) -> Result<Box<dyn KeptPlane + 'a>, DeviceError> {
        Device::plane(&self.machines[0], inputs, upstream, stage_and_progress)
    }

    /// Of the first.
    fn policy_forward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        tiles: (Tiles, &dyn Progress),
    ) -> Result<PolicyForward, DeviceError> {
        policy::forward(&self.machines[0], policy, inputs, tiles)
    }

    /// Of the first: a policy's sums go on from tile to tile.
    fn policy_backward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        tiles: (Tiles, &dyn Progress),
        on_dk: &mut dyn FnMut(DkParts),
    ) -> Result<DqParts, DeviceError> {
        policy::backward(&self.machines[0], policy, inputs, upstream, tiles, on_dk)
    }

    /// Of the first.
    fn policy_plane(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        tiles: (Tiles, &dyn Progress),
        on_tile: &mut dyn FnMut(PolicyTile),
    ) -> Result<(), DeviceError> {
        policy::plane(&self.machines[0], policy, inputs, upstream, tiles, on_tile)
    }

    /// On the first.
    fn user_kernel(&self, kernel: &Kernel, unit: &Unit) -> Result<Given, DeviceError> {
        user_kernel::run(&self.machines[0], kernel, unit)
    }
}

/// A machine's part of a backward pass.
struct Share<'a, M: Machine> {
    machine: &'a M,
    name: &'a str,
    tokens: Range<usize>,
    walk: Walk<'a, M>,
}

/// A backward pass that machines share.
struct Shared<'a, M: Machine, L> {
    links: &'a L,
    shares: Vec<Share<'a, M>>,
    /// On the first machine: the sums of another.
    brought: Room<M>,
}

impl<M: Machine, L: Links<M>> BackwardWalk for Shared<'_, M, L> {
    fn slab(
        &mut self,
        inputs: &HeadInputs,
        upstream: Upstream,
        (tiles, progress): (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<DkSums, DeviceError> {
        let (slabs, labels) = self.walked(inputs, upstream, progress, dq)?;
        let first = self.shares[0].name;
        let dense = slabs[0].dense(self.shares[0].machine).map_err(|error| error.on(first))?;
        Ok(DkSums::with_labels(inputs, upstream, tiles, (&dense, labels), dq))
    }

    fn slab_to_compare<'s>(
        &'s mut self,
        inputs: &'s HeadInputs,
        upstream: Upstream<'s>,
        (tiles, progress): (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<(DkSums, Box<dyn Kept + 's>), DeviceError> {
        let (mut slabs, labels) = self.walked(inputs, upstream, progress, dq)?;
        let (first, machine) = (self.shares[0].name, self.shares[0].machine);
        let dense = slabs[0].dense_kept(machine).map_err(|error| error.on(first))?;
        let sums = DkSums::with_labels(inputs, upstream, tiles, (&dense, labels), dq);
        Ok((sums, Box::new(slabs.swap_remove(0).kept(machine))))
    }

    fn dq_to_compare(&mut self) -> Option<Box<dyn Kept + '_>> {
        let mut all = Vec::new();
        for share in &self.shares {
            all.push((share.name, share.tokens.clone(), share.walk.held_dq()?));
        }
        Some(Box::new(Tokens(all)))
    }

    fn finish(mut self: Box<Self>, dq: &mut Backward) -> Result<(), DeviceError> {
        let shared_dq = Mutex::new(dq);
        let mut leave =
            |share: &mut Share<'_, M>| share.walk.leave(&shared_dq).map_err(|e| e.on(share.name));
        self.shares.iter_mut().try_for_each(&mut leave)
    }
}

/// Sums of dq, each machine's of its own tokens.
struct Tokens<'a, M: Machine>(Vec<(&'a str, Range<usize>, Lying<'a, M>)>);

impl<M: Machine> Kept for Tokens<'_, M> {
    fn compare(&mut self, comparison: &Comparison) -> Result<Vec<RowTally>, DeviceError> {
        let mut all = Vec::new();
        for (name, tokens, kept) in &mut self.0 {
            let part = comparison.part(tokens.clone());
            all.extend(kept.compare(&part).map_err(|error| error.on(name))?);
        }
        Ok(all)
    }
}

impl<M: Machine, L: Links<M>> Shared<'_, M, L> {
    /// A slab walked by all: those of each, the first with the sums of all, and the labels' columns.
    fn walked<'s>(
        &mut self,
        inputs: &'s HeadInputs,
        upstream: Upstream<'s>,
        progress: &dyn Progress,
        dq: &mut Backward,
    ) -> Result<(Vec<Slab<'s, M>>, LabelTerms), DeviceError> {
        reference::check(inputs);
        let shared_dq = &Mutex::new(&mut *dq);
        let started = self.shares.iter_mut().map(|share| {
            let walk = &mut share.walk;
            (share.name, move || walk.sums(inputs, upstream, progress, shared_dq))
        });
        // All have been told before the first sum travels.
        let slabs = together(started.collect())?;
        // On a GPU they were enqueued alone. Fetching the labels' columns waits for each and says what
        // failed there: a receive from a GPU that failed would wait for ever.
        let labels = self.labels(&slabs)?;
        self.add(&slabs).map_err(|error| error.on(self.shares[0].name))?;
        Ok((slabs, labels))
    }

    /// The sums of all onto those of the first, in the order of the machines.
    fn add(&mut self, slabs: &[Slab<'_, M>]) -> Result<(), DeviceError> {
        let Shared { links, shares, brought } = self;
        let machine = shares[0].machine;
        for (from, slab) in slabs.iter().enumerate().skip(1) {
            for ((sums, values), (addends, _)) in slabs[0].rooms().zip(slab.rooms()) {
                let room = brought.of(machine, values)?;
                let (Some(addends), Some(to)) = (addends.buffer(), brought.buffer_mut()) else {
                    continue; // no sums, of no values
                };
                links.bring((from, addends), to, values * size_of::<f64>())?;
                let threads = values as i64;
                let add = Add { threads, sums: sums.address(machine), addends: room };
                // SAFETY: both rooms have that many values.
                unsafe { machine.launch(&add)? };
            }
        }
        Ok(())
    }

    /// The labels' columns, each token's from the machine that walked it.
    fn labels(&self, slabs: &[Slab<'_, M>]) -> Result<LabelTerms, DeviceError> {
        let mut all = LabelTerms { slopes: Vec::new(), entries: Vec::new() };
        for (share, slab) in self.shares.iter().zip(slabs) {
            let labels = slab.labels(share.machine).map_err(|error| error.on(share.name))?;
            all.slopes.extend_from_slice(&labels.slopes[share.tokens.clone()]);
            all.entries.extend_from_slice(&labels.entries[share.tokens.clone()]);
        }
        Ok(all)
    }
}
