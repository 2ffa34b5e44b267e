//! The reference and emulated policies on an NVIDIA GPU.
//!
//! The formulas, the walks over tiles and the label path are those of `kernels::reference`; the
//! entries come from kernels in CUDA C++ and the products from cuBLAS. The order of the sums is
//! fixed by the shapes and by the device's memory: the same device gives the same bits every time,
//! another, or the CPU, others in the last digits.

mod arguments;
mod backward;
mod blas;
mod compare;
mod compile;
mod cuda;
mod current;
mod error;
mod formulas;
mod forward;
mod head;
#[cfg(test)]
mod host;
mod links;
mod machine;
mod measure;
mod plan;
mod plane;
mod policy;
mod presence;
mod room;
mod several;
#[cfg(test)]
mod standin;
mod sums;
#[cfg(test)]
mod tests;
mod user_kernel;

pub use compare::{Comparison, Kept, LabelSums};
pub use error::DeviceError;
pub use measure::{Measured, Square, Taken};
pub use plane::{KeptPlane, PlaneComparison};
pub use user_kernel::{Given, Kernel, KernelError, Unit};

use crate::compare::plane::PlaneStage;
use crate::kernels::policy::{DkParts, DqParts, PlaneTile as PolicyTile, Policy, PolicyForward};
use crate::kernels::reference::{Backward, DkSums, ForwardSums, TermNoise, Upstream};
use crate::kernels::{Cotangents, HeadInputs, Progress, Tiles};
use user_kernel::launch::Launches;

/// Names of the kernels in `kernels/reference.cu`.
const KERNELS: [&str; 8] =
    ["widen", "row_sums", "magnitudes", "add", "absorb", "fold", "terms", "plane"];

/// What computes, for the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The device and its generation.
    pub name: String,
    /// Who compiled the kernels, for what, with which flags.
    pub compiler: String,
    /// Who multiplies, and in which type.
    pub products: String,
}

/// Something that computes the reference in the place of this process.
pub trait Device: Sync {
    /// What it is.
    fn description(&self) -> &Description;

    /// The sums of `ForwardSums::take` over all valid classes.
    fn forward(
        &self,
        inputs: &HeadInputs,
        progress: &dyn Progress,
    ) -> Result<ForwardSums, DeviceError>;

    /// Begins a backward pass over slabs of at most `rows` rows of k.
    fn backward<'a>(
        &'a self,
        inputs: &HeadInputs,
        rows: usize,
        noise: &TermNoise,
    ) -> Result<Box<dyn BackwardWalk + 'a>, DeviceError>;

    /// Bytes of f64 that a plane may take at a time.
    fn plane_bytes(&self) -> Result<usize, DeviceError>;

    /// A stage of `kernels::reference::plane`, whole, to be compared.
    fn plane<'a>(
        &'a self,
        inputs: &HeadInputs,
        upstream: Upstream,
        stage_and_progress: (PlaneStage, &dyn Progress),
    ) -> Result<Box<dyn KeptPlane + 'a>, DeviceError>;

    /// `kernels::policy::forward`; sums that are not in f32, or in an order of their own, are the
    /// CPU's.
    fn policy_forward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        tiles: (Tiles, &dyn Progress),
    ) -> Result<PolicyForward, DeviceError>;

    /// `kernels::policy::backward`, likewise.
    fn policy_backward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        tiles: (Tiles, &dyn Progress),
        on_dk: &mut dyn FnMut(DkParts),
    ) -> Result<DqParts, DeviceError>;

    /// `kernels::policy::plane`, likewise.
    fn policy_plane(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        tiles: (Tiles, &dyn Progress),
        on_tile: &mut dyn FnMut(PolicyTile),
    ) -> Result<(), DeviceError>;

    /// Runs a user's kernel on a unit's head, watched.
    fn user_kernel(&self, kernel: &Kernel, unit: &Unit) -> Result<Given, DeviceError>;
}

/// A backward pass over slabs of k, in their order.
pub trait BackwardWalk {
    /// The sums of k's gradient for one slab, a block for each tile. Those of q's gradient for
    /// the slabs up to here lie partly on the device: `dq` is what the walk before left.
    fn slab(
        &mut self,
        inputs: &HeadInputs,
        upstream: Upstream,
        tiles: (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<DkSums, DeviceError>;

    /// The same to be compared: of the dense sums of k's gradient only `dk_lse` is fetched, the rest
    /// of them is lent where it lies.
    fn slab_to_compare<'s>(
        &'s mut self,
        inputs: &'s HeadInputs,
        upstream: Upstream<'s>,
        tiles: (Tiles, &dyn Progress),
        dq: &mut Backward,
    ) -> Result<(DkSums, Box<dyn Kept + 's>), DeviceError>;

    /// What lies on the device of `dq`, to be compared, after the last slab; `None` where not all of
    /// it does.
    fn dq_to_compare(&mut self) -> Option<Box<dyn Kept + '_>>;

    /// Fetches what of `dq` lies on the device, after the last slab.
    fn finish(self: Box<Self>, dq: &mut Backward) -> Result<(), DeviceError>;
}

/// In which types a device multiplies for a policy: its logits, its gradients.
pub fn products_of(policy: &Policy) -> [&'static str; 2] {
    policy::words(policy)
}

/// The GPUs of these numbers, their kernels compiled; without any all that there are.
pub fn open(ordinals: &[usize]) -> Result<Box<dyn Device>, DeviceError> {
    let all;
    let ordinals = match ordinals {
        [] => {
            all = (0..cuda::Cuda::count()?).collect::<Vec<_>>();
            &all[..]
        }
        some => some,
    };
    match ordinals {
        &[one] => Ok(Box::new(cuda::Cuda::open(one)?)),
        several => Ok(Box::new(several::open(several)?)),
    }
}

impl<M: Launches> Device for M {
    fn description(&self) -> &Description {
        machine::Machine::description(self)
    }

    fn forward(
        &self,
        inputs: &HeadInputs,
        progress: &dyn Progress,
    ) -> Result<ForwardSums, DeviceError> {
        forward::forward(self, inputs, progress)
    }

    fn backward<'a>(
        &'a self,
        inputs: &HeadInputs,
        rows: usize,
        noise: &TermNoise,
    ) -> Result<Box<dyn BackwardWalk + 'a>, DeviceError> {
        Ok(Box::new(backward::Walk::begin(self, inputs, 0..inputs.q.rows, (rows, noise))?))
    }

    fn plane_bytes(&self) -> Result<usize, DeviceError> {
        Ok(plane::bytes(machine::Machine::free(self)?))
    }

    fn plane<'a>(
        &'a self,
        inputs: &HeadInputs,
        upstream: Upstream,
        stage_and_progress: (PlaneStage, &dyn Progress),
    ) -> Result<Box<dyn KeptPlane + 'a>, DeviceError> {
        Ok(Box::new(plane::plane(self, inputs, upstream, stage_and_progress)?))
    }

    fn policy_forward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        tiles: (Tiles, &dyn Progress),
    ) -> Result<PolicyForward, DeviceError> {
        policy::forward(self, policy, inputs, tiles)
    }

    fn policy_backward(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        tiles: (Tiles, &dyn Progress),
        on_dk: &mut dyn FnMut(DkParts),
    ) -> Result<DqParts, DeviceError> {
        policy::backward(self, policy, inputs, upstream, tiles, on_dk)
    }

    fn policy_plane(
        &self,
        policy: &Policy,
        inputs: &HeadInputs,
        upstream: (&[f64], &Cotangents<f64>),
        tiles: (Tiles, &dyn Progress),
        on_tile: &mut dyn FnMut(PolicyTile),
    ) -> Result<(), DeviceError> {
        policy::plane(self, policy, inputs, upstream, tiles, on_tile)
    }

    fn user_kernel(&self, kernel: &Kernel, unit: &Unit) -> Result<Given, DeviceError> {
        user_kernel::run(self, kernel, unit)
    }
}
