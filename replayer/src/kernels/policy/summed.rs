//! What a sum errs by, from what is declared of it.
//!
//! A sum of `n` addends in an accumulator of unit roundoff `u` rounds every partial sum `s_k` once;
//! for addends in an order that does not know them, `E s_k² = (k/n)² r² + k/n (1 - k/n) S` with `r`
//! the total and `S` the sum of squares, so `Σ_k s_k² ≤ n/3 r² + n/6 S` and the variance is `u²/3` of
//! that (Higham and Mary 2019 derive the √n law). Sequential summation is the worst order in use.

use super::{Order, Sum};
use crate::kernels::round::Precision;

impl Sum {
    /// Unit roundoff of an addition. Where the job sums in f64 the reference errs as much as it
    /// does, so both count.
    pub fn unit(self) -> f64 {
        match self.precision {
            Precision::F64 => 2.0 * Precision::F64.unit_roundoff(),
            other => other.unit_roundoff(),
        }
    }

    /// Variance of the sum of `n` addends of total `total` and sum of squares `squares`.
    ///
    /// Blocked sums are sequential twice; of a pairwise one every level holds partial
    /// sums of squares `2^l/n r² + S`; a compensated one errs by `2u|r|` (Higham 2002,
    /// chapter 4). An order that is not known is taken for the worst, sequential.
    pub fn variance(self, n: f64, total: f64, squares: f64) -> f64 {
        let u = self.unit();
        let sequential = |n: f64| n / 3.0 * total * total + n / 6.0 * squares;
        let partial_sums = match self.order {
            Order::Native | Order::Sequential => sequential(n),
            Order::Blocked(block) if (block as f64) < n => {
                let b = block.max(1) as f64;
                // Inside the blocks, then over the n/b sums of blocks.
                let inside = b * b / (3.0 * n) * total * total + b / 2.0 * squares;
                inside + sequential(n / b) + total * total / 6.0
            }
            Order::Blocked(_) => sequential(n),
            Order::Pairwise => 2.0 * total * total + n.max(2.0).log2().ceil() * squares,
            Order::Kahan | Order::Neumaier => 4.0 * total * total + (n * u).powi(2) * n * squares,
        };
        u * u / 3.0 * partial_sums
    }
}
