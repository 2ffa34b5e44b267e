//! The loss head as a training job may have computed it. A policy declares what is rounded where,
//! how each sum is taken, and in which order the tiles are computed.
//!
//! A policy is compared with `reference` and shares no arithmetic with it. It emulates rounding
//! points and reduction structure, not one framework's exact kernel: its error has the size and the
//! distribution of that kernel's, but not its bits.
//!
//! Policies whose sums are all f32, in an order that they do not declare, run on f32 GEMMs: one
//! tile kernel (`tile`) serves two walks over the token x vocabulary plane. `emulate` goes by
//! vocabulary blocks in bounded memory, `step` by token chunks at full speed; with the same tiles
//! they give the same bits. Every other policy runs in `emulator`, operation by operation.
//! `forward`, `backward` and `plane` choose between the two. `dense` has the part of the walk that
//! `emulate` shares with a GPU.

mod cut;
mod declare;
pub(crate) mod dense;
mod dispatch;
mod emulate;
mod exp;
mod gemm;
mod label;
mod logits;
mod softmax;
mod step;
mod summed;
#[cfg(test)]
mod tests;
mod tile;

pub use cut::Cut;
pub use declare::{LogitRounding, Order, Path, Policy, Sum, Sums, Walk};
pub use dispatch::{
    DkParts, DqParts, PlaneTile, PolicyForward, backward, backward_work, forward, forward_work,
    plane, plane_work,
};
pub use step::{StepOutputs, Workspace, fused_step, plain_step, step_work};

/// What the code for a GPU needs beside `dense`.
pub(crate) use dispatch::{Narrow, check, check_backward};
pub(crate) use softmax::Online;

/// The types and lookups that the emulator shares with the GEMM path; none of them computes a
/// rounded number.
pub(super) mod internal {
    pub(in crate::kernels) use super::dense::PlaneBuffers;
    pub(in crate::kernels) use super::dispatch::Upstream;
    pub(in crate::kernels) use super::label::Hits;
    pub(in crate::kernels) use super::logits::columns;
}

use super::round::Precision;
