//! Maps of rows that wrong index arithmetic produces: for each row, which row is read or written in
//! its place.

use crate::assemble::Row;

/// What is read beyond the last row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beyond {
    /// The array is padded with zeros to whole blocks, and a block that reaches beyond its end is
    /// moved back to end there.
    BlockMovedBack,
    /// The same without padding: such a block is moved back to end with the last row.
    BlockAtEnd,
    /// The last row, repeated.
    LastRow,
    /// Zeros.
    Zeros,
    /// NaN.
    Nans,
    /// Rows from the start again (index modulo the number of rows).
    Wraps,
}

impl Beyond {
    /// What is read beyond the end, in words.
    pub fn name(self) -> &'static str {
        match self {
            Beyond::BlockMovedBack => "the last block",
            Beyond::BlockAtEnd => "the block of the last rows",
            Beyond::LastRow => "the last row",
            Beyond::Zeros => "zeros",
            Beyond::Nans => "no numbers",
            Beyond::Wraps => "the rows from the start",
        }
    }
}

/// For each row, the row that wrong index arithmetic addresses instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// Block i starts at row `i * size * size`: its index was multiplied by the block size twice.
    BlockTwice {
        /// Rows of a block.
        size: usize,
        /// What is read beyond the end.
        beyond: Beyond,
    },
    /// In the place of row t, row `t * step` is read.
    Strided {
        /// Rows from one to the next.
        step: usize,
        /// What is read beyond the end.
        beyond: Beyond,
    },
    /// The view leaves out one row of the buffer after every `row` rows, but the buffer is read as
    /// if the view's rows were contiguous. The content of the left-out row is not in the dump; the
    /// first row of its run stands in for it.
    Unsliced {
        /// Rows of the view before one is left out.
        row: usize,
    },
    /// `[rows, columns]` read as `[columns, rows]`.
    Transposed {
        /// The leading of two dimensions.
        rows: usize,
    },
}

impl Map {
    /// The row that is read in the place of `row`, of `n`; `None` where the map does not fit `n`
    /// rows.
    pub fn at(self, row: usize, n: usize) -> Option<Row> {
        let within = |row_read: usize, beyond: Beyond| match beyond {
            _ if row_read < n => Row::From(row_read),
            Beyond::LastRow | Beyond::BlockMovedBack | Beyond::BlockAtEnd => Row::From(n - 1),
            Beyond::Zeros => Row::Zeros,
            Beyond::Nans => Row::Nans,
            Beyond::Wraps => Row::From(row_read % n),
        };
        Some(match self {
            Map::BlockTwice { size, beyond } => {
                let (block, inside) = (row / size, row % size);
                let start = block * size * size;
                match beyond {
                    // The array was filled up with zeros to whole blocks before.
                    Beyond::BlockMovedBack => {
                        let padded = n.div_ceil(size) * size;
                        within(start.min(padded - size) + inside, Beyond::Zeros)
                    }
                    Beyond::BlockAtEnd => {
                        within(start.min(n.saturating_sub(size)) + inside, Beyond::LastRow)
                    }
                    beyond => within(start + inside, beyond),
                }
            }
            Map::Strided { step, beyond } => within(row * step, beyond),
            Map::Unsliced { row: length } => {
                let (run, inside) = (row / (length + 1), row % (length + 1));
                let row_read = run * length + inside;
                match inside == length {
                    true => within(run * length, Beyond::Zeros),
                    false => within(row_read, Beyond::Zeros),
                }
            }
            Map::Transposed { rows } => {
                let columns = n / rows;
                if rows * columns != n {
                    return None;
                }
                Row::From((row % rows) * columns + row / rows)
            }
        })
    }

    /// The map of all `n` rows; `None` where it does not fit, or moves no row.
    pub fn rows(self, n: usize) -> Option<Vec<Row>> {
        let rows: Vec<Row> = (0..n).map(|row| self.at(row, n)).collect::<Option<_>>()?;
        let moved = rows.iter().enumerate().any(|(row, of)| *of != Row::From(row));
        moved.then_some(rows)
    }

    /// The same inside each run of rows: each rank's kernel indexes only its own rows.
    pub fn in_runs(self, n: usize, runs: &[Vec<usize>]) -> Option<Vec<Row>> {
        let mut all: Vec<Row> = (0..n).map(Row::From).collect();
        let mut moved = false;
        for run in runs {
            for (position, &row) in run.iter().enumerate() {
                all[row] = match self.at(position, run.len())? {
                    Row::From(from) => Row::From(run[from]),
                    other => other,
                };
                moved |= all[row] != Row::From(row);
            }
        }
        moved.then_some(all)
    }
}

/// Block sizes that kernels use.
pub const BLOCKS: [usize; 19] =
    [4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 100, 128, 160, 192, 256, 512, 1024];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_block_is_right_and_the_next_is_squares_away() {
        let map = Map::BlockTwice { size: 2, beyond: Beyond::Nans };
        let rows = map.rows(7).unwrap();
        let from = [0, 1, 4, 5].map(Row::From);
        assert_eq!(rows[..4], from);
        assert_eq!(rows[4..], [Row::Nans; 3]);
        let back = Map::BlockTwice { size: 2, beyond: Beyond::BlockMovedBack }.rows(7).unwrap();
        assert_eq!(back[4..], [Row::From(6), Row::Zeros, Row::From(6)]);
    }

    #[test]
    fn a_view_that_leaves_rows_out_is_read_one_row_later_after_every_run() {
        let rows = Map::Unsliced { row: 2 }.rows(6).unwrap();
        assert_eq!(rows, [0, 1, 0, 2, 3, 2].map(Row::From));
        assert_eq!(Map::Transposed { rows: 2 }.rows(6).unwrap(), [0, 3, 1, 4, 2, 5].map(Row::From));
        assert_eq!(Map::Transposed { rows: 4 }.rows(6), None);
    }
}
