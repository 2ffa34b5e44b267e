//! Policies operation by operation: every product, addition and exponential in an f64
//! register, rounded at once to what the policy computes in, in the order it declares.
//!
//! An f32 `+ - * /` of f32 numbers computed in f64 and rounded once is exactly the IEEE
//! f32 operation, since 53 >= 2 * 24 + 2 (Figueroa 1995, "When is double rounding
//! innocuous?"). An accumulator below f32 adds as hardware does: in f32, then rounded.
//! Policies in f64 round nothing on the way.
//!
//! This is orders of magnitude slower than the GEMMs of the fast path, which can only sum in f32 in
//! the order of its GEMM. Outputs are independent of one another: inner loops compute many of them
//! side by side, and the thread count changes no bit.

mod backward;
mod forward;
mod label;
mod plane;
mod rounded;
mod sum;

pub(super) use backward::backward;
pub(super) use forward::forward;
pub(super) use plane::plane;

#[cfg(test)]
mod tests;
