//! The loss head as a training job may have computed it: f32 arithmetic with the
//! rounding points that a policy declares.
//!
//! A policy is judged by `reference` and shares no arithmetic with it. It emulates
//! rounding points and reduction structure, not one framework's exact kernel: its
//! error is of the right size and shape, its bits are its own.
//!
//! One tile kernel (`tile`) serves two walks over the token x vocabulary plane:
//! `emulate` goes by vocabulary blocks in bounded memory, `step` by token chunks at
//! full speed. With the same tiles they give the same bits.

mod emulate;
mod exp;
mod gemm;
mod label;
mod softmax;
mod step;
#[cfg(test)]
mod tests;
mod tile;

use super::round::Precision;

pub use emulate::{
    DkParts, DqParts, PolicyForward, backward, backward_work, forward, forward_work,
};
pub use step::{StepOutputs, Workspace, fused_step, plain_step, step_work};

/// How dlogits reach dq and dk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Forms `dlogits = g_lse p + g_label onehot`, then two GEMMs.
    Plain,
    /// Softmax part by GEMMs, label part by gather and scatter-add, then their sum.
    Fused,
}

/// Rounding points of one implementation. Accumulators of GEMMs are f32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Which path the gradients take.
    pub path: Path,
    /// What q and k are rounded to before any GEMM.
    pub input: Precision,
    /// What the logits are rounded to as they leave their GEMM.
    pub logits: Precision,
    /// What dlogits (fused: `g_lse p` alone) are rounded to before the two GEMMs.
    pub dlogits: Precision,
    /// Fused: what the products `g_label q` and `g_label k[y]` are rounded to.
    pub label_grad: Precision,
    /// Fused: the accumulator of the scatter-add, `acc = round(acc + g q)` in token
    /// order.
    pub label_scatter: Precision,
    /// Fused: what the softmax and label parts are rounded to before they are added.
    pub parts: Precision,
    /// What dq and dk are rounded to at the end.
    pub output: Precision,
}

impl Policy {
    /// Plain path, nothing rounded below f32.
    pub fn plain_f32() -> Self {
        Policy { path: Path::Plain, ..Policy::fused_f32() }
    }

    /// Plain path of a bf16 job: bf16 inputs, dlogits and outputs.
    pub fn plain_bf16() -> Self {
        Policy { path: Path::Plain, ..Policy::fused_bf16() }
    }

    /// Fused path, nothing rounded below f32.
    pub fn fused_f32() -> Self {
        let full = Precision::F32;
        Policy {
            path: Path::Fused,
            input: full,
            logits: full,
            dlogits: full,
            label_grad: full,
            label_scatter: full,
            parts: full,
            output: full,
        }
    }

    /// Fused path of a bf16 job: bf16 inputs, dlogits, label products, parts and
    /// outputs; logits and every accumulator in f32.
    pub fn fused_bf16() -> Self {
        let half = Precision::Bf16;
        Policy {
            input: half,
            dlogits: half,
            label_grad: half,
            parts: half,
            output: half,
            ..Policy::fused_f32()
        }
    }
}
