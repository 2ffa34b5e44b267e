//! Ops of a training step as tables of stages, and the walker that judges any of them.
//!
//! A table is a program: each stage has a formula, written once over numbers of any kind, and says
//! how its elements are reduced. The walker reads it with numbers that carry their rounding error,
//! so an op brings no allowance of its own.

pub mod expected;
mod parts;
mod program;
mod reverse;
pub mod rms_norm;
mod row_sums;
pub mod table;
mod trace;
pub mod walker;

pub use table::{Op, Reduction, Shape, Side, Stage, Tensor};
#[cfg(test)]
pub(crate) use walker::tallies_by_numbers;
pub use walker::{
    Declared, Judged, Judgement, Recorded, Span, Tensors, tallies, tallies_from, tallies_of_two,
    values, walk,
};
