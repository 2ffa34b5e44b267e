//! How many bits of evidence the equality of two rows is, given how often rows of the tensor are
//! equal in each column.
//!
//! Two unrelated rows are equal in a column as often as other rows of the tensor are: where the
//! softmax is nearly uniform, all rows have one of two or three numbers there. So an element counts
//! -log2 of the share of pairs of rows that are equal in its column, and at most the bits of its
//! fraction.

use backtape::dtype::Dtype;

use super::pieces::Piece;
use crate::bits::{Kind, bits, kind};

/// How many rows are compared in pairs, evenly spread over the piece.
const ROWS: usize = 256;

/// Bits of evidence in each column of a piece.
pub(super) struct Columns {
    dtype: Dtype,
    each: Vec<f64>,
}

impl Columns {
    /// `most` is the largest number of bits of an element.
    pub(super) fn new(dtype: Dtype, piece: &Piece<'_>, most: u32) -> Self {
        let (width, rows) = (dtype.width(), piece.rows());
        let step = rows.div_ceil(ROWS).max(1);
        let sampled_rows: Vec<&[u8]> =
            (0..rows).step_by(step).map(|row| piece.row_bytes(row)).collect();
        let columns = sampled_rows.first().map_or(0, |row| row.len() / width);
        let column = |at: usize| {
            let values = sampled_rows.iter().map(|row| bits(row, width, at));
            (-share_equal(values.collect()).log2()).min(f64::from(most))
        };
        Columns { dtype, each: (0..columns).map(column).collect() }
    }

    /// Bits of evidence in a row, over its finite elements that differ from the one before.
    pub(super) fn evidence(&self, row: &[u8]) -> f64 {
        let (width, mut last) = (self.dtype.width(), 0);
        let tells = |(at, share): (usize, &f64)| {
            let bits = bits(row, width, at);
            let tells = kind(self.dtype, bits) == Kind::Finite && bits != last;
            last = bits;
            if tells { *share } else { 0.0 }
        };
        self.each.iter().enumerate().map(tells).sum()
    }
}

/// The share of pairs of values that are equal, where one more equal pair is counted so that it is
/// never 0.
fn share_equal(mut values: Vec<u64>) -> f64 {
    let pairs = |n: usize| (n * n.saturating_sub(1) / 2) as f64;
    let all = pairs(values.len());
    values.sort_unstable();
    let equal: f64 = values.chunk_by(|a, b| a == b).map(|same| pairs(same.len())).sum();
    (equal + 1.0) / (all + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_that_are_equal_are_counted_and_one_more() {
        assert_eq!(share_equal(vec![1, 1, 1]), 1.0);
        assert_eq!(share_equal(vec![3, 1, 3, 2]), 2.0 / 7.0);
        assert_eq!(share_equal(vec![]), 1.0);
    }
}
