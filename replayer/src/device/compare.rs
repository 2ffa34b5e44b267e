//! Captured rows of dq or dk against the sums that lie on a device.
//!
//! The captured values go there, and what is known of each row comes back: of the sums themselves
//! nothing travels. A row has the bits that `compare` gives it from the same sums, on the CPU.

#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;

use super::arguments::kernel;
use super::error::DeviceError;
use super::machine::{Arguments, Machine};
use super::room::{Room, put_rows};
use crate::compare::allowance::{Allowance, OfColumn, OfRow, Sums};
use crate::compare::row::PIECE;
use crate::compare::ulp::Format;
use crate::compare::{Allowed, Element, Look, RowTally};
use crate::kernels::Matrix;
use crate::kernels::matrix::rows_of;

/// Name of the kernel in `kernels/compare.cu`.
pub(super) const KERNELS: [&str; 3] = ["compare", "compare_plane", "plane_energy"];

kernel!(
    /// Rows against their sums: the struct of `kernels/compare.cu`, field for field.
    Compare, "compare",
    {
        columns: i64, pieces: i64, piece: i64, captured: u64, dtype: i64, dense: [u64; 5],
        label: [u64; 5], label_rows: u64, side: u64, side_dtype: i64, storage: u64, rows: u64,
        of_columns: u64, stage: Allowance, bound: f64, to: u64,
    }
);

/// Sums of the label part, `[rows, D]` each, empty where there are none: of the addends, of their
/// squares, of their variances, of the squares with those that round alike added first, and of the
/// entries that are rounded.
pub type LabelSums<'a> = [&'a [f64]; 5];

/// What is compared, and how.
#[derive(Clone, Copy, Debug)]
pub struct Comparison<'a> {
    /// Captured values, `[rows, D]`.
    pub captured: Matrix<'a>,
    /// What is allowed of the stage's elements, of each row, of each column.
    pub stage: &'a Allowance,
    /// See `stage`.
    pub rows: &'a [OfRow],
    /// See `stage`.
    pub columns: &'a [OfColumn],
    /// Sums of the label part: this process has summed them.
    pub label: LabelSums<'a>,
    /// The rows of k or q that the gradients are of, `[rows, D]`.
    pub side: Matrix<'a>,
    /// Variance of storing each element, `[rows, D]`; empty where the stage says it.
    pub storage: &'a [f64],
    /// The exponent of an element's bound.
    pub bound: f64,
}

/// Sums that lie on a device and can be compared there.
pub trait Kept {
    /// What is known of each row, in their order.
    fn compare(&mut self, comparison: &Comparison) -> Result<Vec<RowTally>, DeviceError>;
}

impl<'a> Comparison<'a> {
    /// Some of its rows.
    pub(super) fn part(&self, rows: Range<usize>) -> Comparison<'a> {
        let columns = self.captured.cols;
        let cut = |values: &'a [f64]| match values.is_empty() {
            true => values,
            false => &values[rows.start * columns..rows.end * columns],
        };
        Comparison {
            captured: rows_of(&self.captured, rows.clone()),
            rows: &self.rows[rows.clone()],
            label: self.label.map(cut),
            side: rows_of(&self.side, rows.clone()),
            storage: cut(self.storage),
            ..*self
        }
    }

    /// What a device must find where these dense sums lie, found by this process: what the tests
    /// of devices hold them to.
    pub fn here(&self, dense: [&[f64]; 5]) -> Vec<RowTally> {
        let columns = self.captured.cols;
        let format = Format::of_values(&self.captured.values);
        let row = |row: usize| {
            let elements = (0..columns).map(|column| self.element((row, column), dense));
            RowTally::of(elements, format, &Look::whole(self.bound))
        };
        (0..self.captured.rows).map(row).collect()
    }

    fn element(&self, (row, column): (usize, usize), dense: [&[f64]; 5]) -> Element {
        let index = row * self.captured.cols + column;
        let value = |values: &[f64]| values.get(index).copied().unwrap_or(0.0);
        let [x, squares, variance, dropped, confident] = dense.map(value);
        let [y, label_squares, label_variance, label_alike, label_whole] = self.label.map(value);
        let sums = Sums {
            x,
            squares,
            variance,
            dropped,
            confident,
            y,
            label_squares,
            label_variance,
            label_alike,
            label_whole,
            side: self.side.get_f64(index),
        };
        let inner = self.stage.of(&sums, &self.rows[row], &self.columns[column]);
        let reference = self.stage.reference(&sums);
        let allowed = match self.storage.get(index) {
            Some(variance) => Allowed { own: inner.own + variance, ..inner },
            None => Allowance::storing(&self.stage.stored, reference, 1.0, inner),
        };
        Element { captured: self.captured.get_f64(index), reference, allowed }
    }

    /// The rows that are a label, and where each row of the comparison lies among them. Most rows
    /// of a vocabulary are none: their sums would travel for nothing.
    fn labelled(&self) -> (Vec<usize>, Vec<i64>) {
        let mut labelled = Vec::new();
        let place = |(row, of): (usize, &OfRow)| match of.hits > 0.0 {
            true => {
                labelled.push(row);
                labelled.len() as i64 - 1
            }
            false => -1,
        };
        let places = self.rows.iter().enumerate().map(place).collect();
        (labelled, places)
    }
}

/// Rooms of a comparison, kept for the next.
pub(super) struct Rooms<M: Machine> {
    captured: Room<M>,
    side: Room<M>,
    label: [Room<M>; 5],
    label_rows: Room<M>,
    storage: Room<M>,
    rows: Room<M>,
    columns: Room<M>,
    tallies: Room<M>,
}

impl<M: Machine> Default for Rooms<M> {
    fn default() -> Self {
        let [captured, side, label_rows, storage, rows, columns, rows_room] =
            [(); 7].map(|()| Room::default());
        let label = [(); 5].map(|()| Room::default());
        Rooms { captured, side, label, label_rows, storage, rows, columns, tallies: rows_room }
    }
}

impl<M: Machine> Rooms<M> {
    /// Compares rows with the dense sums that lie at these addresses, `[rows, D]` each, 0 for
    /// those that were not asked for. Rows of a `vocabulary` have labels' sums where they are a
    /// label, tokens always.
    pub(super) fn compare(
        &mut self,
        machine: &M,
        comparison: &Comparison,
        (dense, vocabulary): ([u64; 5], bool),
    ) -> Result<Vec<RowTally>, DeviceError> {
        let (count, columns) = (comparison.captured.rows, comparison.captured.cols);
        let label_rows = match vocabulary {
            true => self.put_labelled(machine, comparison)?,
            false => self.put_label(machine, comparison.label)?,
        };
        let whole = |matrix| (matrix, 0..count);
        let (captured, dtype) = put_rows(machine, &mut self.captured, whole(&comparison.captured))?;
        let (side, side_dtype) = put_rows(machine, &mut self.side, whole(&comparison.side))?;
        let storage = match comparison.storage.is_empty() {
            true => 0,
            false => self.storage.put(machine, comparison.storage)?,
        };
        let pieces = RowTally::pieces(columns);
        let mut tallies = vec![<RowTally as bytemuck::Zeroable>::zeroed(); count * pieces];
        let compare = Compare {
            threads: tallies.len() as i64,
            columns: columns as i64,
            pieces: pieces as i64,
            piece: PIECE as i64,
            captured,
            dtype: dtype as i64,
            dense,
            label: self.label.each_ref().map(|room| room.address(machine)),
            label_rows,
            side,
            side_dtype: side_dtype as i64,
            storage,
            rows: self.rows.put(machine, comparison.rows)?,
            of_columns: self.columns.put(machine, comparison.columns)?,
            stage: *comparison.stage,
            bound: comparison.bound,
            to: self.tallies.put(machine, &tallies)?,
        };
        // SAFETY: every address holds a value for each element, row or column, as the caller says
        // of the dense sums; those of the label part for each row that `label_rows` names.
        unsafe { machine.launch(&compare)? };
        self.tallies.get(machine, &mut tallies)?;
        Ok(RowTally::joined(&tallies, pieces))
    }

    /// Sums of the label part as they are.
    fn put_label(&mut self, machine: &M, label: LabelSums) -> Result<u64, DeviceError> {
        self.label = [(); 5].map(|()| Room::default());
        for (room, values) in
            self.label.iter_mut().zip(label).filter(|(_, values)| !values.is_empty())
        {
            room.put(machine, values)?;
        }
        Ok(0)
    }

    /// Those of the rows that are a label, and where each row lies among them.
    fn put_labelled(&mut self, machine: &M, comparison: &Comparison) -> Result<u64, DeviceError> {
        let (columns, (labelled, places)) = (comparison.captured.cols, comparison.labelled());
        let gather = |values: &[f64]| -> Vec<f64> {
            let row = |&row: &usize| &values[row * columns..(row + 1) * columns];
            labelled.iter().flat_map(row).copied().collect()
        };
        let gathered = comparison.label.map(|values| match values.is_empty() {
            true => Vec::new(),
            false => gather(values),
        });
        self.put_label(machine, gathered.each_ref().map(|values| &values[..]))?;
        self.label_rows.put(machine, &places)
    }
}
