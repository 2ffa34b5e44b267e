//! The arithmetic of the loss head: a reference in f64, and the policies (plain,
//! fused and chunked) that emulate what a training job may have computed, on GEMMs
//! (`policy`) or operation by operation (`emulator`).
//!
//! It is not a tensor library: it knows one head, softmax cross-entropy on q and
//! k. Kernels do no I/O, know no dump and no head options, and give the same bits
//! whatever the number of rayon threads. The caller has validated the shapes;
//! a wrong shape here is a programming error and panics.
//!
//! `reference` and `policy` share the data types of this module and the formulas (`transform`,
//! `formula`), never the rounding: an oracle that rounds with what it judges agrees with it.

#[macro_use]
mod vectorised;

mod emulator;
pub mod formula;
pub mod logits;
pub mod matrix;
pub mod number;
pub mod policy;
pub mod reference;
pub mod round;
pub mod surrogate;
pub mod text;
pub mod tiles;
pub mod transform;
pub mod uncertain;

#[cfg(test)]
pub(crate) mod fixture;

pub(crate) use matrix::span_of;
pub use matrix::{Cotangents, HeadInputs, IGNORED, Matrix, TokenCotangents, Values, rows_of};
pub use policy::Policy;
pub use round::Precision;
pub use tiles::{NoProgress, Progress, Tiles};
pub use transform::Transform;
pub(crate) use vectorised::vectorised;
