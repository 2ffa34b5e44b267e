//! The loss head as a training job may have computed it: the rounding points, the
//! sums and the order of the walk that a policy declares.
//!
//! A policy is judged by `reference` and shares no arithmetic with it. It emulates
//! rounding points and reduction structure, not one framework's exact kernel: its
//! error is of the right size and shape, its bits are its own.
//!
//! Policies whose sums are all f32 in no order of their own run on f32 GEMMs: one tile
//! kernel (`tile`) serves two walks over the token x vocabulary plane. `emulate` goes by
//! vocabulary blocks in bounded memory, `step` by token chunks at full speed; with the
//! same tiles they give the same bits. Every other policy runs in `emulator`, operation
//! by operation. `forward`, `backward` and `plane` choose on their own. `dense` is what
//! `emulate` and a device have in common.

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

/// What a device needs beside `dense`.
pub(crate) use dispatch::{Narrow, check, check_backward};
pub(crate) use softmax::Online;

/// What the emulator shares with the fast path: no arithmetic.
pub(super) mod internal {
    pub(in crate::kernels) use super::dense::PlaneBuffers;
    pub(in crate::kernels) use super::dispatch::Upstream;
    pub(in crate::kernels) use super::label::Hits;
    pub(in crate::kernels) use super::logits::columns;
}

use super::round::Precision;
