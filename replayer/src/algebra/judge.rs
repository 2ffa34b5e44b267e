//! Compares a stage of a parameter, in parts that fit into memory, by the walker of `ops`.

use backtape::identity::Rank;
use backtape::index_box::IndexBox;
use rayon::prelude::*;

use super::elements::Elements;
use super::inventory::Inventory;
use crate::assemble::pieces;
use crate::compare::{Bound, Tally};
use crate::kernels::policy::Sum;
use crate::kernels::round::Precision;
use crate::ops::{Declared, Op, Recorded, Span, Stage, Tensors, tallies};

/// Bytes of an element while it is computed with.
pub(super) const WIDTH: usize = 8;

/// Parts that are compared before their tallies are merged, so that a tensor of any size leaves
/// only as many.
const AT_ONCE: usize = 64;

/// A tensor of a part of a stage.
pub(crate) struct Operand<'a> {
    /// Its name in the op's table.
    pub name: &'static str,
    /// Rows that it has.
    pub rows: usize,
    /// Its elements, row-major.
    pub values: Elements<'a>,
    /// Of a stage, what it was stored in; of an input, what the job may have rounded it to before
    /// it used it. `None` rounds nothing.
    pub rounded: Option<Precision>,
}

impl<'a> Operand<'a> {
    /// One row of numbers.
    pub(crate) fn row(
        name: &'static str,
        values: Vec<f64>,
        rounded: Option<Precision>,
    ) -> Operand<'a> {
        Operand::part(name, Elements::of(values), rounded)
    }

    /// One row of elements of a part.
    pub(crate) fn part(
        name: &'static str,
        values: Elements<'a>,
        rounded: Option<Precision>,
    ) -> Operand<'a> {
        Operand { name, rows: 1, values, rounded }
    }
}

/// A stage as it came out: what its op calls it, and its tally or why it has none.
pub(crate) type Compared = (&'static str, Result<Tally, String>);

/// Compares the stages of a part.
type Tallies<'f> =
    dyn Fn(&Tensors<'_>, Span) -> Vec<(&'static Stage, Result<Tally, String>)> + Sync + 'f;

/// How the stages of a step are compared.
#[derive(Clone, Copy)]
pub(crate) struct Judge<'a> {
    /// What the dump holds.
    pub inventory: &'a Inventory<'a>,
    /// Comparisons of the whole step, which share the probability of a false alarm.
    pub comparisons: usize,
    /// Whether values may be not finite where the reference is not either: the gradients of a step
    /// that the job left out for them.
    pub nan_is_meant: bool,
    /// Whether what is compared is a supposition, of which a part that is wrong says enough: then
    /// the other parts are not read, and the tallies are those of the parts before.
    pub is_trial: bool,
}

/// What a job is taken to compute in.
pub(crate) fn arithmetic(stored: Option<Precision>, sum: Option<Precision>) -> Declared {
    let stored = stored.unwrap_or(Precision::F32);
    let compute = if stored == Precision::F64 { Precision::F64 } else { Precision::F32 };
    let between = (!stored.keeps_f32()).then_some(stored);
    let accumulator = sum.unwrap_or(compute);
    Declared { compute, between, sum: Sum { precision: accumulator, ..Sum::NATIVE } }
}

impl Judge<'_> {
    /// The same for a supposition.
    pub(crate) fn trial(&self) -> Self {
        Judge { is_trial: true, ..*self }
    }

    /// The bound of a comparison over a box.
    pub(crate) fn bound(&self, place: &IndexBox) -> Bound {
        let elements = place.elements().unwrap_or(0) as usize;
        let bound = Bound::new(self.comparisons, pieces(place, WIDTH).len(), elements);
        Bound { nan_is_meant: self.nan_is_meant, ..bound }
    }

    /// Compares the stages of an op over a box; `operands` makes what the op takes of a part of it.
    pub(crate) fn compare<'o, O: Op>(
        &self,
        op: &O,
        declared: &Declared,
        place: &IndexBox,
        operands: &(dyn Fn(&IndexBox) -> Result<Vec<Operand<'o>>, String> + Sync),
    ) -> Result<Vec<Compared>, String> {
        self.compare_by(place, operands, &|tensors, span| tallies(op, tensors, declared, span))
    }

    /// The same where `tallies` compares the stages of a part.
    pub(crate) fn compare_by<'o>(
        &self,
        place: &IndexBox,
        operands: &(dyn Fn(&IndexBox) -> Result<Vec<Operand<'o>>, String> + Sync),
        tallies: &Tallies<'_>,
    ) -> Result<Vec<Compared>, String> {
        let (parts, bound) = (pieces(place, WIDTH), self.bound(place));
        let part = |(at, part): (usize, &IndexBox)| {
            let operands = operands(part)?;
            let columns = part.elements().unwrap_or(0) as usize;
            let tensors: Tensors<'_> = operands.iter().map(|own| own.recorded(columns)).collect();
            let span = Span { bound, first_row: at as u64 };
            Ok(tallies(&tensors, span))
        };
        let mut whole: Vec<Compared> = Vec::new();
        let mut first = 0;
        while first < parts.len() {
            let count = if self.is_trial && first == 0 { 1 } else { AT_ONCE };
            let batch = &parts[first..parts.len().min(first + count)];
            let numbered = batch.par_iter().enumerate();
            let tallies = numbered.map(|(at, own)| part((first + at, own)));
            let tallies: Vec<Result<_, String>> = tallies.collect();
            for part in tallies {
                merge(&mut whole, part?);
            }
            if self.is_trial && whole.iter().any(is_refuted) {
                break;
            }
            first += batch.len();
        }
        Ok(whole)
    }

    /// The index, in the whole tensor, of an element that a tally names by part and column.
    pub(crate) fn index(&self, place: &IndexBox, (part, column): (u64, u64)) -> Vec<u64> {
        let parts = pieces(place, WIDTH);
        let Some(part) = parts.get(part as usize) else { return Vec::new() };
        let mut left = column;
        let mut index: Vec<u64> = Vec::new();
        for (low, high) in part.0.iter().rev() {
            let extent = (high - low).max(1);
            index.push(low + left % extent);
            left /= extent;
        }
        index.reverse();
        index
    }
}

/// Whether a part was wrong by an element or a row, which no other part can make up for.
pub(crate) fn is_refuted((_, tally): &Compared) -> bool {
    tally.as_ref().is_ok_and(|of| of.nonfinite + of.exceeding + of.exceeding_rows > 0)
}

/// Adds the tallies of a later part.
fn merge(whole: &mut Vec<Compared>, part: Vec<(&'static Stage, Result<Tally, String>)>) {
    if whole.is_empty() {
        whole.extend(part.into_iter().map(|(stage, tally)| (stage.name, tally)));
        return;
    }
    for ((_, whole), (_, part)) in whole.iter_mut().zip(part) {
        match (whole.as_mut(), part) {
            (Ok(whole), Ok(part)) => whole.merge(part),
            (Ok(_), Err(why)) => *whole = Err(why),
            (Err(_), _) => {}
        }
    }
}

impl Operand<'_> {
    pub(super) fn recorded(&self, columns: usize) -> (&'static str, Recorded<'_>) {
        let cols = if self.values.len() == self.rows * columns { columns } else { 1 };
        let values = self.values.matrix(self.rows, cols);
        (self.name, Recorded { values, stored: self.rounded, used_in: self.rounded })
    }
}

/// Names ranks in a sentence.
pub(crate) fn ranks(ranks: &[Rank]) -> String {
    crate::dump::name_ranks(ranks)
}
