//! The worst element of each block of a comparison, from which a report draws a heat map.
//!
//! A chart has a limited number of blocks, however large the tensor is. One thread fills one row of
//! blocks from its first row of elements on, so that the chart does not depend on the number of
//! threads.

use std::ops::Range;

use rayon::prelude::*;

use super::bound::{Allowed, Bound};
use super::tally::{Rows, Worst};

/// One block of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The first element that is not finite, else the element of the largest score.
    pub worst: Worst,
    /// Elements of the block that were compared.
    pub elements: u64,
    /// Elements beyond their bound.
    pub exceeding: u64,
    /// Elements that are not finite, or whose reference is not.
    pub nonfinite: u64,
    /// Number of the comparison that the worst element is from, where charts of several were
    /// merged.
    pub source: u32,
}

impl Cell {
    /// Whether this block is worse than another. A value that is not finite is worse than any
    /// error.
    pub fn is_worse_than(&self, other: &Cell) -> bool {
        match (self.nonfinite > 0, other.nonfinite > 0) {
            (true, false) => true,
            (false, true) | (true, true) => false,
            (false, false) => self.score() > other.score(),
        }
    }

    /// The score, and infinity for NaN: the allowed error is then NaN too, and no error is within
    /// it.
    fn score(&self) -> f64 {
        if self.worst.score.is_nan() { f64::INFINITY } else { self.worst.score }
    }

    /// Adds another part of the same block, or the same block of another comparison.
    fn merge(&mut self, other: &Cell) {
        if other.is_worse_than(self) {
            (self.worst, self.source) = (other.worst.clone(), other.source);
        }
        self.elements += other.elements;
        self.exceeding += other.exceeding;
        self.nonfinite += other.nonfinite;
    }
}

/// A comparison cut into blocks of rows and columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Rows and columns of the comparison.
    pub shape: (usize, usize),
    /// Rows and columns of one block.
    pub block: (usize, usize),
    /// Blocks down and across.
    pub size: (usize, usize),
    /// The blocks, row after row; `None` where nothing was compared.
    pub cells: Vec<Option<Cell>>,
}

impl Chart {
    /// An empty chart of so many rows and columns, in at most so many blocks.
    pub fn new(shape: (usize, usize), most: (usize, usize)) -> Chart {
        let block = |n: usize, most: usize| n.div_ceil(most.max(1)).max(1);
        let block = (block(shape.0, most.0), block(shape.1, most.1));
        let size = (shape.0.div_ceil(block.0), shape.1.div_ceil(block.1));
        Chart { shape, block, size, cells: vec![None; size.0 * size.1] }
    }

    /// Adds rows of the comparison, the first of which is row `first` of it.
    pub fn add(
        &mut self,
        first: usize,
        rows: &Rows<'_>,
        allowed: &(impl Fn(usize, usize, f64) -> Allowed + Sync),
        bound: &Bound,
    ) {
        let (height, count) = (self.block.0, rows.captured.rows);
        let bands = first / height..(first + count).div_ceil(height).min(self.size.0);
        let shape = &*self;
        let of_band = |band: usize| {
            let reach = (band * height).max(first)..((band + 1) * height).min(first + count);
            shape.band(rows, reach.start - first..reach.end - first, allowed, bound)
        };
        let filled: Vec<_> = bands.clone().into_par_iter().map(of_band).collect();
        for (band, cells) in bands.zip(filled) {
            let start = band * self.size.1;
            self.cells[start..].iter_mut().zip(&cells).for_each(|(to, from)| put(to, from));
        }
    }

    fn band(
        &self,
        rows: &Rows<'_>,
        range: Range<usize>,
        allowed: &impl Fn(usize, usize, f64) -> Allowed,
        bound: &Bound,
    ) -> Vec<Option<Cell>> {
        let columns = rows.captured.cols;
        let mut cells: Vec<Option<Cell>> = vec![None; self.size.1];
        for row in range {
            for column in 0..columns {
                let flat = row * columns + column;
                let (captured, reference) = (rows.captured.get_f64(flat), rows.reference[flat]);
                let index = ((rows.index)(row), column as u64);
                let allowed = allowed(row, column, reference);
                let cell = element(index, (captured, reference), &allowed, bound);
                put(&mut cells[column / self.block.1], &Some(cell));
            }
        }
        cells
    }

    /// Adds the chart of another comparison of the same shape; its cells are marked as those of
    /// comparison `source`.
    pub fn merge(&mut self, other: &Chart, source: u32) {
        for (to, from) in self.cells.iter_mut().zip(&other.cells) {
            put(to, &from.clone().map(|cell| Cell { source, ..cell }));
        }
    }

    /// The worst block, the first of equals.
    pub fn worst(&self) -> Option<&Cell> {
        let mut worst: Option<&Cell> = None;
        for cell in self.cells.iter().flatten() {
            if worst.is_none_or(|most| cell.is_worse_than(most)) {
                worst = Some(cell);
            }
        }
        worst
    }

    /// The same comparison in blocks of twice as many rows and columns.
    pub fn halved(&self) -> Chart {
        let half = (self.size.0.div_ceil(2), self.size.1.div_ceil(2));
        let mut chart = Chart {
            block: (2 * self.block.0, 2 * self.block.1),
            size: half,
            cells: vec![None; half.0 * half.1],
            ..*self
        };
        for (index, cell) in self.cells.iter().enumerate() {
            let (row, column) = (index / self.size.1, index % self.size.1);
            put(&mut chart.cells[row / 2 * half.1 + column / 2], cell);
        }
        chart
    }
}

fn element(
    index: (u64, u64),
    (captured, reference): (f64, f64),
    allowed: &Allowed,
    bound: &Bound,
) -> Cell {
    let error = (captured - reference).abs();
    let finite = captured.is_finite() && reference.is_finite();
    // The same score as that of the tally, so that the worst block holds the worst element of the
    // report.
    let score = if error == 0.0 { 0.0 } else { error / allowed.total().sqrt() };
    let beyond = finite && !(error <= allowed.reach(bound.element));
    Cell {
        worst: Worst { index, captured, reference, score },
        elements: 1,
        exceeding: u64::from(beyond),
        nonfinite: u64::from(!finite),
        source: 0,
    }
}

fn put(to: &mut Option<Cell>, from: &Option<Cell>) {
    match (to, from) {
        (_, None) => {}
        (Some(to), Some(from)) => to.merge(from),
        (to, Some(from)) => *to = Some(from.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Tally, once};
    use crate::kernels::matrix::{Matrix, Values};

    const ROWS: usize = 301;
    const COLUMNS: usize = 17;

    fn values() -> (Vec<f64>, Vec<f64>) {
        let reference: Vec<f64> = (0..ROWS * COLUMNS).map(|i| (i as f64).sin()).collect();
        let captured = reference.iter().enumerate().map(|(i, x)| x + 1e-3 * (i as f64 * 0.7).cos());
        let mut captured: Vec<f64> = captured.collect();
        captured[123 * COLUMNS + 5] += 1.0;
        (captured, reference)
    }

    fn rows<'a>(
        (captured, reference): &'a (Vec<f64>, Vec<f64>),
        part: Range<usize>,
        index: &'a (dyn Fn(usize) -> u64 + Sync),
    ) -> Rows<'a> {
        let span = part.start * COLUMNS..part.end * COLUMNS;
        let values = Values::F64(&captured[span.clone()]);
        let captured = Matrix { rows: part.len(), cols: COLUMNS, values };
        Rows { captured, reference: &reference[span], index, repeats: &once }
    }

    fn allowed(_: usize, _: usize, _: f64) -> Allowed {
        Allowed { own: 1e-6, ..Allowed::default() }
    }

    fn chart(values: &(Vec<f64>, Vec<f64>), parts: &[Range<usize>]) -> Chart {
        let bound = Bound::new(1, ROWS, ROWS * COLUMNS);
        let mut chart = Chart::new((ROWS, COLUMNS), (10, 4));
        for part in parts {
            let index = |row: usize| (part.start + row) as u64;
            chart.add(part.start, &rows(values, part.clone(), &index), &allowed, &bound);
        }
        chart
    }

    fn whole(values: &(Vec<f64>, Vec<f64>)) -> Chart {
        chart(values, std::slice::from_ref(&(0..ROWS)))
    }

    /// Goal: a map agrees with the report. Method: its worst block holds the tally's worst element,
    /// and its counts add up to the tally's.
    #[test]
    fn the_worst_block_holds_the_worst_element_and_no_element_is_lost() {
        let values = values();
        let chart = whole(&values);
        let index = |row: usize| row as u64;
        let bound = Bound::new(1, ROWS, ROWS * COLUMNS);
        let tally = Tally::of(&rows(&values, 0..ROWS, &index), allowed, &bound);
        assert_eq!(Some(&chart.worst().unwrap().worst), tally.worst.as_ref());
        assert_eq!(chart.worst().unwrap().worst.index, (123, 5));
        let sum = |of: fn(&Cell) -> u64| chart.cells.iter().flatten().map(of).sum::<u64>();
        assert_eq!(sum(|cell| cell.elements), tally.elements);
        assert_eq!(sum(|cell| cell.exceeding), tally.exceeding);
        // Every block names an element of its own.
        for (index, cell) in chart.cells.iter().enumerate() {
            let (row, column) = cell.as_ref().unwrap().worst.index;
            let place = (row as usize / chart.block.0, column as usize / chart.block.1);
            assert_eq!(place, (index / chart.size.1, index % chart.size.1));
        }
    }

    #[test]
    fn slabs_and_threads_change_nothing() {
        let values = values();
        let all = whole(&values);
        assert_eq!(chart(&values, &[0..40, 40..41, 41..200, 200..ROWS]), all);
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| whole(&values)), all);
        }
    }

    #[test]
    fn what_is_no_number_is_worse_than_any_error_and_halving_keeps_it() {
        let mut values = values();
        values.0[40 * COLUMNS + 3] = f64::NAN;
        values.0[200 * COLUMNS] = f64::INFINITY;
        let mut chart = whole(&values);
        loop {
            let worst = chart.worst().unwrap();
            assert_eq!((worst.worst.index, worst.worst.captured.is_nan()), ((40, 3), true));
            let bad = chart.cells.iter().flatten().map(|cell| cell.nonfinite).sum::<u64>();
            assert_eq!(bad, 2);
            if chart.size == (1, 1) {
                break;
            }
            chart = chart.halved();
        }
    }

    #[test]
    fn a_score_that_is_no_number_is_worse_than_any_that_is_one() {
        let cell = |score| Cell {
            worst: Worst { index: (0, 0), captured: 1.0, reference: 1.0, score },
            elements: 1,
            exceeding: 0,
            nonfinite: 0,
            source: 0,
        };
        assert!(cell(f64::NAN).is_worse_than(&cell(1e9)));
        assert!(!cell(1e9).is_worse_than(&cell(f64::NAN)));
        assert!(!cell(f64::NAN).is_worse_than(&cell(f64::INFINITY)));
    }

    #[test]
    fn merging_says_whose_the_worst_element_is() {
        let values_of_one = values();
        let mut two = values();
        two.0[7] += 3.0;
        let (a, b) = (whole(&values_of_one), whole(&two));
        let mut both = a.clone();
        both.merge(&b, 1);
        assert_eq!((both.worst().unwrap().worst.index, both.worst().unwrap().source), ((0, 7), 1));
        let of_spike = both.cells.iter().flatten().find(|cell| cell.worst.index == (123, 5));
        assert_eq!(of_spike.unwrap().source, 0, "the first of equals");
    }
}
