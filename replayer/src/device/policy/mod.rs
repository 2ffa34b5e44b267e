//! The policies of `kernels::policy` on a device: the tiles of the token x vocabulary plane there,
//! the label path here.
//!
//! Between the GEMMs every element has the bits that the CPU gives it; the GEMMs are cuBLAS', on
//! the types that the policy rounds its operands to, with sums in f32, as those of a job on GPUs.
//! Policies whose sums are of another kind are emulated operation by operation, by the CPU.

mod arguments;
mod backward;
mod forward;
mod head;
mod plane;
mod rows;
#[cfg(test)]
pub(super) mod tests;

use super::DeviceError;
use super::machine::{Compute, Machine};
use super::plan::{Plan, Sizes};
use super::room::Room;
use crate::kernels::policy::{Path, Policy};
use crate::kernels::round::Precision;
use crate::kernels::{HeadInputs, Tiles};

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use plane::{energy, plane};

/// Names of the kernels in `kernels/policy.cu`.
pub(super) const KERNELS: [&str; 8] = [
    "narrow",
    "policy_logits",
    "policy_maxima",
    "policy_lanes",
    "policy_fold",
    "policy_dlogits",
    "policy_joined",
    "policy_columns",
];

/// In which types a policy's GEMMs multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Products {
    pub(super) logits: Compute,
    pub(super) gradients: Compute,
}

impl Products {
    pub(super) fn of(policy: &Policy) -> Products {
        let operand = if policy.operand.keeps_f32() { policy.input } else { policy.operand };
        Products {
            logits: holding(policy.input, policy.input),
            gradients: holding(policy.dlogits, operand),
        }
    }
}

/// What multiplies a policy's logits, and what its gradients, for the report.
pub(super) fn words(policy: &Policy) -> [&'static str; 2] {
    if !policy.is_fast() || policy.keeps_log_p() {
        return ["the CPU, operation by operation"; 2];
    }
    let Products { logits, gradients } = Products::of(policy);
    [logits, gradients].map(|compute| match compute {
        Compute::F64 => "f64",
        Compute::F32 => "f32, pedantic",
        Compute::Tf32 => "tf32 operands, sums in f32",
        Compute::Bf16 => "bf16 operands, sums in f32",
        Compute::F16 => "f16 operands, sums in f32",
    })
}

/// The narrowest type that holds numbers of both formats.
fn holding(a: Precision, b: Precision) -> Compute {
    match (a, b) {
        (Precision::Bf16, Precision::Bf16) => Compute::Bf16,
        (Precision::F16, Precision::F16) => Compute::F16,
        // tf32 has the exponents of bf16 and the digits of f16.
        _ if !a.keeps_f32() && !b.keeps_f32() => Compute::Tf32,
        _ => Compute::F32,
    }
}

/// What an operand is stored as.
fn stored(compute: Compute) -> Precision {
    match compute {
        Compute::Bf16 => Precision::Bf16,
        Compute::F16 => Precision::F16,
        Compute::F64 | Compute::F32 | Compute::Tf32 => Precision::F32,
    }
}

/// A format as the kernels number it.
fn format(precision: Precision) -> i64 {
    precision as i64
}

/// The policy's own tiles where they show in its sums, else the largest that fit the device.
fn tiles<M: Machine>(
    machine: &M,
    (policy, inputs): (&Policy, &HeadInputs),
    own_tiles: Tiles,
) -> Result<Tiles, DeviceError> {
    let sizes = Sizes { tokens: inputs.q.rows, rows: 0, depth: inputs.q.cols, terms: 1 };
    let large = Plan::of(machine.free()?, sizes).tiles;
    Ok(Tiles {
        tokens: if policy.path == Path::Plain { large.tokens } else { own_tiles.tokens },
        vocab: if policy.path == Path::Fused { own_tiles.vocab } else { large.vocab },
    })
}

/// Values of 8 bytes that so many of 4 take.
fn halves(singles: usize) -> usize {
    singles.div_ceil(2)
}

/// Address of a room's value number `index` of 4 bytes.
fn at<M: Machine>(machine: &M, room: &Room<M>, index: usize) -> u64 {
    room.address(machine) + (index * size_of::<f32>()) as u64
}
