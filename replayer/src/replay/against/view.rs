//! A value of one run, seen as the other run lays it out: one matrix in global
//! coordinates, whatever it was cut, split, transposed or permuted into.
//!
//! A view reads any part of that matrix and holds none of it.

use std::borrow::Cow;
use std::ops::Range;

use backtape::dtype::Dtype;
use backtape::index_box::IndexBox;
use backtape::placement::Reduction;
use backtape::shard::TensorKey;

use crate::assemble::{self, AssembleError, slab};
use crate::compare::pair::widen;
use crate::dump::{StepDump, TensorInfo};

/// How several tensors are one value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Combine {
    /// Rows of the first, then rows of the second.
    Join,
    /// Element by element, times a factor.
    Sum(f64),
}

/// One value.
pub(super) struct View<'a> {
    dump: &'a StepDump,
    parts: Vec<Part<'a>>,
    combine: Combine,
    transposed: bool,
    /// Which row of the value each row of the view is.
    order: Option<Vec<u64>>,
    /// Rows of the value.
    pub(super) rows: u64,
    /// Columns of it: the last dimension.
    pub(super) columns: u64,
    /// The dtype of all parts, when they share one.
    pub(super) dtype: Option<Dtype>,
}

struct Part<'a> {
    key: &'a TensorKey,
    info: &'a TensorInfo,
    elements: u64,
}

/// Rows and columns of a shape: the last dimension is columns.
pub(super) fn matrix_of(shape: &[u64]) -> (u64, u64) {
    match shape.split_last() {
        None => (1, 1),
        Some((&n, [])) => (n, 1),
        Some((&columns, leading)) => (leading.iter().product(), columns),
    }
}

impl<'a> View<'a> {
    /// The parts as one value of this many columns, of the last dimension when
    /// it is not said; none when their shapes do not allow it.
    pub(super) fn new(
        dump: &'a StepDump,
        keys: &[&'a TensorKey],
        combine: Combine,
        columns: Option<u64>,
    ) -> Option<View<'a>> {
        let part = |&key: &&'a TensorKey| {
            let info = &dump.tensors()[key];
            Part { key, info, elements: info.shape.iter().product() }
        };
        let parts: Vec<Part<'a>> = keys.iter().map(part).collect();
        let first = parts.first()?;
        let columns = columns.unwrap_or(matrix_of(&first.info.shape).1);
        let fits = |part: &Part<'_>| match combine {
            Combine::Join => part.elements.checked_rem(columns).unwrap_or(0) == 0,
            Combine::Sum(_) => part.info.shape == first.info.shape,
        };
        parts.iter().all(fits).then_some(())?;
        let elements = match combine {
            Combine::Join => parts.iter().map(|part| part.elements).sum(),
            Combine::Sum(_) => first.elements,
        };
        let rows = elements.checked_div(columns).unwrap_or(0);
        let dtype = parts.iter().all(|part| part.info.dtype == first.info.dtype);
        let dtype = dtype.then_some(first.info.dtype);
        let (transposed, order) = (false, None);
        Some(View { dump, parts, combine, transposed, order, rows, columns, dtype })
    }

    /// One tensor as it is.
    pub(super) fn of(dump: &'a StepDump, key: &'a TensorKey) -> View<'a> {
        View::new(dump, &[key], Combine::Join, None).expect("one tensor is a value")
    }

    /// Rows as columns; none for what is no matrix.
    pub(super) fn transposed(self) -> Option<View<'a>> {
        let matrix = self.parts.iter().all(|part| part.info.shape.len() == 2);
        let (rows, columns) = (self.columns, self.rows);
        matrix.then_some(View { rows, columns, transposed: true, ..self })
    }

    /// The same rows in another order.
    pub(super) fn ordered(self, order: Vec<u64>) -> View<'a> {
        View { order: Some(order), ..self }
    }

    /// The parts' dtype, when the elements are bits of it that the job held.
    pub(super) fn stored(&self) -> Option<Dtype> {
        let summed = self.combine != Combine::Join
            || self.parts.iter().any(|part| part.info.partial.is_some());
        self.dtype.filter(|_| !summed)
    }

    /// True when elements lie on disk in the order of the view.
    pub(super) fn is_plain(&self) -> bool {
        self.order.is_none() && !self.transposed && self.stored().is_some()
    }

    /// Where one part ends and the next begins, in elements.
    pub(super) fn seams(&self) -> Vec<u64> {
        let mut end = 0;
        let ends = self.parts.iter().map(|part| {
            end += part.elements;
            end
        });
        if self.is_plain() { ends.collect() } else { Vec::new() }
    }

    /// Elements of the view.
    pub(super) fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// Bytes of some elements of a plain view, inside one part.
    pub(super) fn bytes(&self, range: Range<u64>) -> Result<Cow<'a, [u8]>, AssembleError> {
        let mut start = 0;
        for part in &self.parts {
            let inside = range.start >= start && range.end <= start + part.elements;
            if inside {
                let local = range.start - start..range.end - start;
                return slab::elements(self.dump, part.key, local);
            }
            start += part.elements;
        }
        unreachable!("slabs are cut at the seams")
    }

    /// Some elements by row-major index: whole rows unless the view is plain.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<f64>, AssembleError> {
        let Some(order) = &self.order else {
            return self.read_in_place(range);
        };
        let columns = self.columns.max(1);
        let rows = &order[(range.start / columns) as usize..(range.end / columns) as usize];
        let mut values = Vec::new();
        // Rows that were neighbours stay neighbours in most orders: sequences
        // and the chunks of context parallelism move as one.
        for run in rows.chunk_by(|a, b| a + 1 == *b) {
            let (first, last) = (run[0], run[run.len() - 1] + 1);
            values.extend(self.read_in_place(first * columns..last * columns)?);
        }
        Ok(values)
    }

    fn read_in_place(&self, range: Range<u64>) -> Result<Vec<f64>, AssembleError> {
        let mut values = Vec::new();
        match self.combine {
            Combine::Join => {
                let mut start = 0;
                for part in &self.parts {
                    let (lo, hi) = (range.start.max(start), range.end.min(start + part.elements));
                    if lo < hi {
                        values.extend(self.part(part, lo - start..hi - start)?);
                    }
                    start += part.elements;
                }
            }
            Combine::Sum(factor) => {
                values.resize((range.end - range.start) as usize, 0.0);
                for part in &self.parts {
                    let addend = self.part(part, range.clone())?;
                    values.iter_mut().zip(addend).for_each(|(sum, x)| *sum += x);
                }
                values.iter_mut().for_each(|sum| *sum *= factor);
            }
        }
        Ok(values)
    }

    fn part(&self, part: &Part<'_>, range: Range<u64>) -> Result<Vec<f64>, AssembleError> {
        if !self.transposed {
            let mut values = Vec::new();
            for place in slab::boxes_of(&part.info.shape, range) {
                values.extend(self.region(part, &place)?);
            }
            return Ok(values);
        }
        // Stored [columns, rows]: some rows of the view are a band of columns.
        let rows = (range.start / self.columns, range.end / self.columns);
        let place = IndexBox(vec![(0, self.columns), rows]);
        let values = self.region(part, &place)?;
        let (height, width) = ((rows.1 - rows.0) as usize, self.columns as usize);
        let value = |i: usize| values[(i % width) * height + i / width];
        Ok((0..values.len()).map(value).collect())
    }

    /// The values of a box, summed over ranks where they hold addends.
    fn region(&self, part: &Part<'_>, place: &IndexBox) -> Result<Vec<f64>, AssembleError> {
        let mut values = Vec::new();
        let Some(reduction) = part.info.partial else {
            let tensor = assemble::assemble_box(self.dump, part.key, place)?;
            widen(tensor.dtype, tensor.bytes(), &mut values);
            return Ok(values);
        };
        let count = place.elements().unwrap_or(0) as usize;
        let mut addends = vec![0u32; count];
        values.resize(count, 0.0);
        for addend in slab::addends_in(self.dump, part.key, place)? {
            for tensor in addend {
                let mut widened = Vec::new();
                widen(tensor.dtype, tensor.bytes(), &mut widened);
                let inside = positions(&tensor.place, place);
                for (index, x) in inside.zip(widened) {
                    values[index] += x;
                    addends[index] += 1;
                }
            }
        }
        if reduction == Reduction::Mean {
            let counted = values.iter_mut().zip(&addends);
            counted.for_each(|(sum, &n)| *sum /= f64::from(n.max(1)));
        }
        Ok(values)
    }
}

/// Where the elements of a box stand in a box around it, row-major.
fn positions(inner: &IndexBox, around: &IndexBox) -> impl Iterator<Item = usize> {
    let extent = inner.extent();
    let dims: Vec<(u64, u64, u64)> = inner
        .0
        .iter()
        .zip(&around.0)
        .zip(extent)
        .map(|((part, whole), n)| (part.0 - whole.0, n, whole.1 - whole.0))
        .collect();
    let count: u64 = dims.iter().map(|(_, n, _)| n).product();
    (0..count).map(move |flat| {
        let (mut rest, mut position, mut stride) = (flat, 0, 1);
        for &(shift, n, size) in dims.iter().rev() {
            position += (rest % n + shift) * stride;
            rest /= n;
            stride *= size;
        }
        position as usize
    })
}
