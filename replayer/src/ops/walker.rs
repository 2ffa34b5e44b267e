//! Judges the stages of an op, whatever op it is: each recorded stage against what its formula makes
//! of the *recorded* stages before it where these were recorded (teacher forcing), so that one early
//! error does not paint all later stages red.

use std::collections::{BTreeMap, HashMap};

use super::expected::{Arithmetic, Evaluation, Expected, Input, Source};
use super::parts;
use super::table::{Op, Shape, Stage};
use crate::compare::allowance::{Allowance, Rounding};
use crate::compare::{Allowed, Bound, Rows, Tally, once};
use crate::kernels::matrix::Matrix;
use crate::kernels::policy::Sum;
use crate::kernels::round::Precision;
use crate::kernels::uncertain::SOURCES;

/// A recorded tensor.
#[derive(Clone, Copy, Debug)]
pub struct Recorded<'a> {
    /// Its values: one row of a `[C]`, one column of a `[R]`.
    pub values: Matrix<'a>,
    /// What it was stored in; `None` rounds nothing.
    pub stored: Option<Precision>,
    /// Of an input, what the job may have rounded it to before it used it.
    pub used_in: Option<Precision>,
}

/// The recorded tensors of one call of an op, by name.
pub type Tensors<'a> = BTreeMap<&'a str, Recorded<'a>>;

/// What a job says of how it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Declared {
    /// What single operations are done in.
    pub compute: Precision,
    /// What results of whole steps may be kept in; `None`: they are not rounded.
    pub between: Option<Precision>,
    /// How sums are taken.
    pub sum: Sum,
}

/// What was found of a stage.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The stage.
    pub stage: &'static Stage,
    /// What was found of it.
    pub judgement: Judgement,
}

/// What is known of a stage.
#[derive(Clone, Debug)]
pub enum Judgement {
    /// The recorded values are what the formula gives, within what rounding explains.
    Agreed(Box<Tally>),
    /// They are not, and why.
    Diverged(String, Box<Tally>),
    /// Nothing can be said, and why.
    Unchecked(String),
}

impl Judged {
    /// Whether it is more wrong than rounding explains.
    pub fn is_diverged(&self) -> bool {
        matches!(self.judgement, Judgement::Diverged(..))
    }
}

/// Judges the stages of an op in the order of its table.
pub fn walk<O: Op>(op: &O, tensors: &Tensors<'_>, declared: &Declared) -> Vec<Judged> {
    let judged = |(stage, compared): Compared| {
        let judgement = match compared {
            Err(why) => Judgement::Unchecked(why),
            Ok((tally, bound)) => match tally.excess(&bound) {
                Some(why) => Judgement::Diverged(why, Box::new(tally)),
                None => Judgement::Agreed(Box::new(tally)),
            },
        };
        Judged { stage, judgement }
    };
    compared(op, tensors, declared, None).into_iter().map(judged).collect()
}

/// A part of an op's planes that is compared by itself, as an op that is larger than memory is
/// walked in parts.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The bound of the whole comparison.
    pub bound: Bound,
    /// Which row of the whole the first row of the part is called.
    pub first_row: u64,
}

/// Compares the stages of an op, or of a part of its planes, without a judgement: the tallies of
/// all parts are merged before there is one.
pub fn tallies<O: Op>(
    op: &O,
    tensors: &Tensors<'_>,
    declared: &Declared,
    span: Span,
) -> Vec<(&'static Stage, Result<Tally, String>)> {
    let mut walk = Walk::new(op, tensors, declared, Some(span));
    // What the blocks of a part find wrong is looked at once more, number by number: only these know
    // which errors elements share from stage to stage, and which elements are alike.
    let is_settled = |(_, tally): &(&Stage, Result<Tally, String>)| match tally {
        Ok(tally) => tally.excess(&span.bound).is_none() || is_beyond_doubt(tally, &span.bound),
        Err(_) => true,
    };
    if let Some(found) = parts::tallies(&mut walk, span)
        && found.iter().all(is_settled)
    {
        return found;
    }
    let compared = compared(op, tensors, declared, Some(span)).into_iter();
    compared.map(|(stage, compared)| (stage, compared.map(|(tally, _)| tally))).collect()
}

/// Whether an element is so far off that no knowledge of shared errors can explain it: errors of
/// n sources that all have one sign are at most √n times what they are where they are independent.
fn is_beyond_doubt(tally: &Tally, bound: &Bound) -> bool {
    let score = tally.worst.as_ref().map_or(0.0, |worst| worst.score);
    score > bound.element * (SOURCES as f64).sqrt()
}

/// The same by the numbers that carry their errors alone, one element after the other.
#[cfg(test)]
pub(crate) fn tallies_by_numbers<O: Op>(
    op: &O,
    tensors: &Tensors<'_>,
    declared: &Declared,
    span: Span,
) -> Vec<(&'static Stage, Result<Tally, String>)> {
    let compared = compared(op, tensors, declared, Some(span)).into_iter();
    compared.map(|(stage, compared)| (stage, compared.map(|(tally, _)| tally))).collect()
}

/// Compares the stages of an op that was applied twice, without a judgement: `ops` are the op of the
/// first and of the second time, and `again` has each input that the second time takes over from
/// the first, with the stage that it was.
pub fn tallies_of_two<O: Op>(
    ops: [&O; 2],
    again: &[(&'static str, &'static str)],
    tensors: &Tensors<'_>,
    declared: &Declared,
    span: Span,
) -> Vec<(&'static Stage, Result<Tally, String>)> {
    let is_input = |name: &str| ops[0].inputs().iter().any(|input| input.name == name);
    let given = tensors.iter().filter(|(name, _)| is_input(name));
    let given: Tensors<'_> = given.map(|(name, recorded)| (*name, *recorded)).collect();
    let mut first = Walk::new(ops[0], &given, declared, None);
    let mut made = BTreeMap::new();
    for (at, stage) in ops[0].stages().iter().enumerate() {
        // A stage that lacks an input is none that the second time can take over.
        let Ok(mut expected) = first.expect(at) else { continue };
        // It is stored before anything is made of it.
        if let Some(stored) = tensors.get(stage.name).and_then(|recorded| recorded.stored) {
            let stored = |x: f64| stored.deviation(x).powi(2);
            expected.own.iter_mut().zip(&expected.values).for_each(|(own, x)| *own += stored(*x));
        }
        first.computed.insert(stage.name, expected);
    }
    for (input, stage) in again {
        if let Some(expected) = first.computed.remove(stage) {
            made.insert(*input, expected);
        }
    }
    tallies_from(ops[1], made, tensors, declared, span)
}

/// The same as [`tallies`] where some inputs were computed before, with the error that rounding may
/// have brought to them: those of `computed`, in place of tensors of their names.
pub fn tallies_from<O: Op>(
    op: &O,
    computed: BTreeMap<&'static str, Expected>,
    tensors: &Tensors<'_>,
    declared: &Declared,
    span: Span,
) -> Vec<(&'static Stage, Result<Tally, String>)> {
    let rest = tensors.iter().filter(|(name, _)| !computed.contains_key(*name));
    let rest: Tensors<'_> = rest.map(|(name, recorded)| (*name, *recorded)).collect();
    let mut walk = Walk::new(op, &rest, declared, Some(span));
    walk.computed = computed;
    let stages = op.stages().iter().enumerate().map(|(at, stage)| (stage, walk.stage(at)));
    stages.map(|(stage, compared)| (stage, compared.map(|(tally, _)| tally))).collect()
}

/// The exact values of a stage of an op, from what was recorded of the stages before it.
pub fn values<O: Op>(
    op: &O,
    tensors: &Tensors<'_>,
    declared: &Declared,
    stage: &str,
) -> Result<Vec<f64>, String> {
    if let Some(values) = parts::values(&mut Walk::new(op, tensors, declared, None), stage) {
        return values;
    }
    let mut walk = Walk::new(op, tensors, declared, None);
    for (at, row) in op.stages().iter().enumerate() {
        let expected = walk.expect(at)?;
        if row.name == stage {
            return Ok(expected.values);
        }
        walk.computed.insert(row.name, expected);
    }
    Err(format!("{} has no stage {stage}", O::NAME))
}

/// A stage, and its tally with the bound that it is held to.
type Compared = (&'static Stage, Result<(Tally, Bound), String>);

fn compared<O: Op>(
    op: &O,
    tensors: &Tensors<'_>,
    declared: &Declared,
    span: Option<Span>,
) -> Vec<Compared> {
    let mut walk = Walk::new(op, tensors, declared, span);
    op.stages().iter().enumerate().map(|(at, stage)| (stage, walk.stage(at))).collect()
}

/// A walk over the stages of an op.
pub(super) struct Walk<'a, O> {
    pub(super) op: &'a O,
    pub(super) tensors: &'a Tensors<'a>,
    declared: &'a Declared,
    /// Which part this is of a larger op; `None` for a whole op.
    span: Option<Span>,
    /// Rows and columns of the op's planes.
    pub(super) extent: Option<(usize, usize)>,
    /// What stages should be, by name.
    pub(super) computed: BTreeMap<&'static str, Expected>,
}

/// How often each value is among all of them.
fn copies_of(values: &[f64]) -> Vec<f64> {
    let mut counts: HashMap<u64, f64> = HashMap::new();
    for value in values {
        *counts.entry(value.to_bits()).or_default() += 1.0;
    }
    values.iter().map(|value| counts[&value.to_bits()]).collect()
}

/// Whether the sizes of all elements lie within a sixteenth of their mean, and so in two binades at
/// most: as those of parameters that were 0 before the first step of Adam.
fn are_of_one_size(values: &[f64]) -> bool {
    let mean = values.iter().map(|value| value.abs()).sum::<f64>() / values.len().max(1) as f64;
    values.iter().all(|value| (value.abs() - mean).abs() <= mean / 16.0)
}

impl<'a, O: Op> Walk<'a, O> {
    fn new(
        op: &'a O,
        tensors: &'a Tensors<'a>,
        declared: &'a Declared,
        span: Option<Span>,
    ) -> Walk<'a, O> {
        let computed = BTreeMap::new();
        let mut walk = Walk { op, tensors, declared, span, extent: None, computed };
        walk.extent = walk.find_extent();
        walk
    }

    /// What its arithmetic rounds.
    pub(super) fn arithmetic(&self) -> Arithmetic {
        let Declared { compute, between, sum } = *self.declared;
        Arithmetic { compute, between, sum }
    }

    /// The extent of the first recorded plane.
    fn find_extent(&self) -> Option<(usize, usize)> {
        let shapes = self.shapes();
        let planes = shapes.iter().filter(|(_, shape)| *shape == Shape::Plane);
        planes.into_iter().find_map(|(name, _)| {
            let values = &self.tensors.get(name)?.values;
            Some((values.rows, values.cols))
        })
    }

    /// Every name of the op, with its shape.
    fn shapes(&self) -> Vec<(&'static str, Shape)> {
        let inputs = self.op.inputs().iter().map(|input| (input.name, input.shape));
        inputs.chain(self.op.stages().iter().map(|stage| (stage.name, stage.shape))).collect()
    }

    fn stage(&mut self, at: usize) -> Result<(Tally, Bound), String> {
        let stage: &'static Stage = &self.op.stages()[at];
        let expected = self.expect(at)?;
        let compared = self.compare(stage, &expected);
        self.computed.insert(stage.name, expected);
        compared
    }

    /// What a stage should be.
    fn expect(&self, at: usize) -> Result<Expected, String> {
        let stage = &self.op.stages()[at];
        let inputs =
            stage.inputs.iter().map(|name| self.input(name)).collect::<Result<Vec<_>, _>>()?;
        let Some((rows, columns)) = self.extent else {
            return Err(format!("no [rows, columns] tensor of {} was recorded", O::NAME));
        };
        let arithmetic = self.arithmetic();
        Ok(Evaluation { op: self.op, stage: at, inputs: &inputs, arithmetic }
            .expected(rows, columns))
    }

    /// An input of a stage: recorded, or else computed before.
    pub(super) fn input(&self, name: &'static str) -> Result<Input<'_>, String> {
        let (_, shape) = *self.shapes().iter().find(|(of, _)| *of == name).expect("of the table");
        let is_given = self.op.inputs().iter().any(|input| input.name == name);
        let source = match (self.tensors.get(name), self.computed.get(name)) {
            (Some(recorded), _) => {
                self.check(name, shape, recorded)?;
                let Recorded { values, stored, used_in } = *recorded;
                match (is_given, used_in) {
                    (true, None) => Source::Given(values),
                    (true, used_in) => Source::Recorded(values, used_in),
                    (false, _) => Source::Recorded(values, stored),
                }
            }
            (None, Some(expected)) => Source::Computed(expected),
            (None, None) => return Err(format!("{name} was not recorded")),
        };
        let (row_stride, column_stride) = match shape {
            Shape::Plane => (self.extent.map_or(0, |(_, columns)| columns), 1),
            Shape::Rows => (1, 0),
            Shape::Columns => (0, 1),
        };
        Ok(Input { source, row_stride, column_stride })
    }

    /// Refuses a tensor of another extent than the op's planes have.
    pub(super) fn check(
        &self,
        name: &str,
        shape: Shape,
        recorded: &Recorded<'_>,
    ) -> Result<(), String> {
        let Some((rows, columns)) = self.extent else { return Ok(()) };
        let (rows, columns) = shape.extent(rows, columns);
        let Matrix { rows: found_rows, cols: found_columns, .. } = recorded.values;
        if (found_rows, found_columns) == (rows, columns) {
            return Ok(());
        }
        Err(format!(
            "{name} has {found_rows} x {found_columns} values, and as {} it should have {rows} x {columns}",
            shape.words()
        ))
    }

    fn compare(&self, stage: &Stage, expected: &Expected) -> Result<(Tally, Bound), String> {
        let recorded = self.tensors.get(stage.name);
        let recorded = recorded.ok_or_else(|| format!("{} was not recorded", stage.name))?;
        self.check(stage.name, stage.shape, recorded)?;
        let Recorded { values: captured, stored, .. } = *recorded;
        let rounding = stored.map_or(Rounding::default(), Rounding::to);
        let (columns, is_one_row) = (captured.cols, captured.rows == 1);
        let allowed = |row: usize, column: usize, x: f64| {
            let at = row * columns + column;
            let (own, row) = (expected.own[at], expected.row[at]);
            let mut shared = expected.shared.get(at).copied().unwrap_or(0.0);
            let mut inner = Allowed { own, row, ..Allowed::default() };
            // What a plane of one row shares along its row it shares with all other parts too.
            if is_one_row {
                shared += row;
                inner.row = 0.0;
            }
            inner.shared = shared;
            Allowance::storing(&rounding, x, 1.0, inner)
        };
        let bound = Bound::new(self.op.stages().len(), captured.rows, captured.rows * columns);
        let Span { bound, first_row } = self.span.unwrap_or(Span { bound, first_row: 0 });
        let overflown = bound.nan_is_meant.then(|| self.overflown(expected, stored));
        let reference = overflown.as_ref().unwrap_or(&expected.values);
        let rows =
            Rows { captured, reference, index: &|row| first_row + row as u64, repeats: &once };
        let mut tally = Tally::of(&rows, allowed, &bound);
        // Equal inputs round alike: where they are many, as in a norm's weights that are all 1,
        // their errors are one error. They are elements of one row, so each is a row here.
        if is_one_row && tally.excess(&bound).is_some() {
            let copies = copies_of(reference);
            let values = captured.values;
            let rows = Rows {
                captured: Matrix { rows: columns, cols: 1, values },
                repeats: &|row| copies[row],
                ..rows
            };
            let each = Bound { row: bound.element, ..bound };
            let alike = Tally::of(&rows, |column, _, x| allowed(0, column, x), &each);
            if alike.excess(&bound).is_none() {
                tally = alike;
            }
        }
        // So do inputs of nearly one size: where all lie near 1 or -1 and change by nearly the same,
        // each result lies at nearly the same place between two numbers of its format.
        if is_one_row && tally.excess(&bound).is_some() && are_of_one_size(reference) {
            let rows = Rows { captured, ..rows };
            let allowed = |row: usize, column: usize, x: f64| {
                let allowed = allowed(row, column, x);
                Allowed { shared: allowed.shared + allowed.own, ..allowed }
            };
            let alike = Tally::of(&rows, allowed, &bound);
            if alike.excess(&bound).is_none() {
                tally = alike;
            }
        }
        if let Some(stored) = stored {
            tally.stored_in(stored, reference);
        }
        Ok((tally, bound))
    }

    /// The largest number that a job has which sums in its format and stores in another one.
    pub(super) fn largest(&self, stored: Option<Precision>) -> f64 {
        let formats = stored.into_iter().chain([self.declared.sum.precision]);
        formats.map(Precision::largest_finite).fold(f64::MAX, f64::min)
    }

    /// What is expected, infinite where the format that sums or stores it has no such number.
    fn overflown(&self, expected: &Expected, stored: Option<Precision>) -> Vec<f64> {
        let largest = self.largest(stored);
        let overflow = |x: &f64| if x.abs() > largest { x * f64::INFINITY } else { *x };
        expected.values.iter().map(overflow).collect()
    }
}
