//! Compares captured values with the reference: how large the error is, how large rounding may make
//! it, and where it is worst. Nothing here knows a dump, a stage or an option of the head.

pub mod allowance;
pub mod bound;
pub mod chart;
pub(crate) mod lanes;
pub mod measures;
pub mod pair;
pub mod plane;
pub mod row;
pub mod tally;
pub mod ulp;

pub use bound::{Allowed, Bound, ONE_ROUNDING};
pub use chart::{Cell, Chart};
pub use row::{Element, Look, RowTally};
pub use tally::{Rows, SeenFrom, Tally, Worst, once};
