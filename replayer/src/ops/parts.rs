//! Compares the stages of a part of an op block by block, from programs that are made once for the
//! part: the formulas, bounds and sums of the walker, at the speed of memory.
//!
//! A part is one row of columns, or rows that are added up column by column. The walker takes what
//! has another form.

use super::expected::Source;
use super::program::{Block, Evaluation, Input, LANES, Place, Program, ZERO};
use super::reverse::{Asked, Errors};
use super::row_sums;
use super::table::{Op, Reduction, Shape, Stage};
use super::trace::{Given, program};
use super::walker::{Recorded, Span, Walk};
use crate::compare::Tally;
use crate::compare::lanes;
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;
use crate::kernels::uncertain::{LAST, Roundings};
use crate::kernels::vectorised;

/// Inputs that a stage may have.
pub(super) const INPUTS: usize = 16;
static EMPTY: Block = ZERO;
pub(super) const NONE: Input<'static> = Input { values: &EMPTY, variance: &EMPTY };

/// A stage and what was found of it.
pub(super) type Found = (&'static Stage, Result<Tally, String>);

/// Compares every stage of a part; `None` where it has another form.
pub(super) fn tallies<O: Op>(walk: &mut Walk<'_, O>, span: Span) -> Option<Vec<Found>> {
    let (rows, columns) = walk.extent?;
    if columns < 2 {
        return None;
    }
    if let [stage] = walk.op.stages()
        && stage.reduction == Reduction::OverRows
    {
        return Some(vec![(stage, row_sums::compared(walk, rows, columns, span)?)]);
    }
    if rows != 1 {
        return None;
    }
    let mut part = Part::of(walk)?;
    let bound = span.bound;
    for stage in &mut part.stages {
        stage.row = stage.captured.map(|at| {
            let stored = part.columns[at].stored;
            lanes::Row::new(stored, walk.largest(stored), &bound)
        });
    }
    part.run(columns, true, &mut |_, _, _| {});
    let row = span.first_row;
    let tally = |stage: Staged| {
        let tally = match (stage.program, stage.row) {
            (Err(why), _) => Err(why),
            (Ok(_), Some(of)) => Ok(Tally::of_row(of, row, &bound)),
            (Ok(_), None) => Err(format!("{} was not recorded", stage.stage.name)),
        };
        (stage.stage, tally)
    };
    Some(part.stages.into_iter().map(tally).collect())
}

/// The values of one stage of a part; `None` where it has another form.
pub(super) fn values<O: Op>(
    walk: &mut Walk<'_, O>,
    name: &str,
) -> Option<Result<Vec<f64>, String>> {
    let (rows, columns) = walk.extent?;
    if rows != 1 || columns < 2 {
        return None;
    }
    let mut part = Part::of(walk)?;
    let wanted = part.stages.iter().position(|stage| stage.stage.name == name)?;
    part.stages.truncate(wanted + 1);
    // It is asked for, whether or not a later stage takes it.
    part.stages[wanted].is_fed = true;
    part.mark_taken();
    if let Some(why) = part.stages.iter().find_map(|stage| stage.program.as_ref().err()) {
        return Some(Err(why.clone()));
    }
    let mut all = Vec::with_capacity(columns);
    part.run(columns, false, &mut |stage, values, count| {
        if stage == wanted {
            all.extend_from_slice(&values[..count]);
        }
    });
    Some(Ok(all))
}

/// A recorded tensor, and a block of it.
struct Column<'a> {
    name: &'static str,
    matrix: Matrix<'a>,
    /// What it was stored in, where it is compared.
    stored: Option<Precision>,
    /// What its elements are uncertain by, where they are an input.
    rounded: Option<Precision>,
    /// Whether anything that is computed takes it.
    is_taken: bool,
    values: Box<Block>,
    variance: Box<Block>,
}

/// Where an input of a program comes from.
enum Feed {
    /// The whole row has one number, which is in the program.
    Known,
    Column(usize),
    Stage(usize),
}

/// A stage of a part.
struct Staged {
    stage: &'static Stage,
    program: Result<Program, String>,
    feeds: Vec<Feed>,
    /// Its recorded tensor.
    captured: Option<usize>,
    /// Whether a later stage takes it as it was computed.
    is_fed: bool,
    row: Option<lanes::Row>,
    errors: Box<Errors>,
    values: Box<Block>,
    variance: Box<Block>,
}

/// The stages of an op over one row.
struct Part<'a> {
    columns: Vec<Column<'a>>,
    stages: Vec<Staged>,
}

impl<'a> Part<'a> {
    /// The programs of all stages; `None` where one has no program.
    fn of<O: Op>(walk: &mut Walk<'a, O>) -> Option<Part<'a>> {
        let mut part = Part { columns: Vec::new(), stages: Vec::new() };
        for (at, stage) in walk.op.stages().iter().enumerate() {
            let is_each = stage.reduction == Reduction::Each && stage.shape == Shape::Plane;
            if !is_each || stage.inputs.len() > INPUTS {
                return None;
            }
            let (mut feeds, program) = match part.program(walk, at) {
                Ok(found) => {
                    let (feeds, program) = found?;
                    (feeds, Ok(program))
                }
                Err(why) => (Vec::new(), Err(why)),
            };
            let captured = match walk.tensors.get(stage.name) {
                Some(recorded) if program.is_ok() => walk
                    .check(stage.name, stage.shape, recorded)
                    .map(|()| Some(part.column(stage.name, recorded, None))),
                _ => Ok(None),
            };
            let (captured, program) = match captured {
                Ok(captured) => (captured, program),
                Err(why) => (None, Err(why)),
            };
            if program.is_ok() {
                walk.computed.insert(stage.name, Default::default());
            } else {
                feeds.clear();
            }
            part.stages.push(Staged {
                stage,
                program,
                feeds,
                captured,
                is_fed: false,
                row: None,
                errors: Box::default(),
                values: Box::new(ZERO),
                variance: Box::new(ZERO),
            });
        }
        part.mark_taken();
        Some(part)
    }

    /// Marks the stages and tensors that are taken, so that what nobody takes is not computed.
    fn mark_taken(&mut self) {
        for at in (0..self.stages.len()).rev() {
            let (before, rest) = self.stages.split_at_mut(at);
            let stage = &rest[0];
            if stage.captured.is_none() && !stage.is_fed {
                continue;
            }
            for feed in &stage.feeds {
                match (feed, &stage.program) {
                    (Feed::Known, _) | (_, Err(_)) => {}
                    (Feed::Stage(of), _) => before[*of].is_fed = true,
                    (Feed::Column(of), _) => self.columns[*of].is_taken = true,
                }
            }
            if let Some(captured) = stage.captured {
                self.columns[captured].is_taken = true;
            }
        }
    }

    /// The program of a stage with what it takes; why it takes nothing, or `None` where it has no
    /// program.
    #[allow(clippy::type_complexity)]
    fn program<O: Op>(
        &mut self,
        walk: &Walk<'a, O>,
        at: usize,
    ) -> Result<Option<(Vec<Feed>, Program)>, String> {
        let stage = &walk.op.stages()[at];
        let inputs =
            stage.inputs.iter().map(|name| walk.input(name)).collect::<Result<Vec<_>, _>>()?;
        let roundings = walk.arithmetic().roundings().sharing(walk.op.shared_roundings(at));
        roundings.begin_row();
        let known: Vec<_> = inputs
            .iter()
            .map(|input| (input.column_stride == 0).then(|| input.number(0, &roundings)))
            .collect();
        roundings.reserve();
        roundings.share();
        roundings.begin_element();
        let (mut feeds, mut given) = (Vec::new(), Vec::new());
        for ((input, known), name) in inputs.iter().zip(known).zip(stage.inputs) {
            if let Some(known) = known {
                feeds.push(Feed::Known);
                given.push(Given::Known(known));
                continue;
            }
            let (feed, is_uncertain) = match input.source {
                Source::Given(_) => (self.input(walk, name, None), false),
                Source::Recorded(_, stored) => (self.input(walk, name, stored), stored.is_some()),
                Source::Computed(_) => {
                    let of = walk.op.stages().iter().position(|stage| stage.name == *name);
                    (Feed::Stage(of.expect("a stage that was computed")), true)
                }
            };
            feeds.push(feed);
            given.push(Given::Column(is_uncertain.then(|| place(&roundings))));
        }
        let made = program(&roundings, &given, |numbers| walk.op.element(at, numbers));
        Ok(made.map(|program| {
            // What the formula takes by its table alone need not be read.
            for (at, feed) in feeds.iter_mut().enumerate() {
                if !program.takes(at) {
                    *feed = Feed::Known;
                }
            }
            (feeds, program)
        }))
    }

    fn input<O: Op>(
        &mut self,
        walk: &Walk<'a, O>,
        name: &'static str,
        rounded: Option<Precision>,
    ) -> Feed {
        Feed::Column(self.column(name, &walk.tensors[name], rounded))
    }

    /// A recorded tensor, once.
    fn column(
        &mut self,
        name: &'static str,
        recorded: &Recorded<'a>,
        rounded: Option<Precision>,
    ) -> usize {
        let known = self.columns.iter().position(|column| column.name == name);
        let at = known.unwrap_or_else(|| {
            let Recorded { values: matrix, stored, .. } = *recorded;
            let [values, variance] = [(); 2].map(|()| Box::new(ZERO));
            let (rounded, is_taken) = (None, false);
            self.columns.push(Column { name, matrix, stored, rounded, is_taken, values, variance });
            self.columns.len() - 1
        });
        self.columns[at].rounded = self.columns[at].rounded.or(rounded);
        at
    }

    /// Evaluates all stages that are compared or taken, and compares them.
    fn run(&mut self, columns: usize, compares: bool, each: &mut dyn FnMut(usize, &Block, usize)) {
        let mut memory = Evaluation::default();
        for from in (0..columns).step_by(LANES) {
            let count = LANES.min(columns - from);
            for column in self.columns.iter_mut().filter(|column| column.is_taken) {
                column.read(from, count);
            }
            for at in 0..self.stages.len() {
                let (before, rest) = self.stages.split_at_mut(at);
                let stage = &mut rest[0];
                let Ok(program) = &stage.program else { continue };
                if compares && stage.row.is_none() && !stage.is_fed {
                    continue;
                }
                let mut inputs = [NONE; INPUTS];
                for (input, feed) in inputs.iter_mut().zip(&stage.feeds) {
                    *input = match feed {
                        Feed::Known => NONE,
                        Feed::Column(at) => {
                            let Column { values, variance, .. } = &self.columns[*at];
                            Input { values, variance }
                        }
                        Feed::Stage(at) => {
                            let Staged { values, variance, .. } = &before[*at];
                            Input { values, variance }
                        }
                    };
                }
                program.run(&inputs, &mut memory);
                let asked = Asked { shared: true, ..Asked::default() };
                if compares {
                    program.errors(&inputs, asked, &mut memory, &mut stage.errors);
                }
                let reference = program.result(&inputs, &memory);
                each(at, reference, count);
                let Errors { own, shared, .. } = &*stage.errors;
                if let (Some(row), Some(captured)) = (&mut stage.row, stage.captured) {
                    let captured = &self.columns[captured].values;
                    row.add(&lanes::Block {
                        captured: &captured[..count],
                        reference: &reference[..count],
                        own: &own[..count],
                        shared: &shared[..count],
                    });
                }
                if stage.is_fed || !compares {
                    *stage.values = *reference;
                    let sums = own.iter().zip(shared).map(|(own, shared)| own + shared * shared);
                    stage.variance.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum);
                }
            }
        }
    }
}

/// The place of the next rounding of an element.
pub(super) fn place(roundings: &Roundings) -> Place {
    match roundings.next() {
        LAST => Place::Last,
        _ => Place::Own,
    }
}

impl Column<'_> {
    fn read(&mut self, from: usize, count: usize) {
        read(&self.matrix, from, &mut self.values[..count]);
        self.values[count..].fill(0.0);
        if let Some(precision) = self.rounded {
            variances(precision, &self.values, &mut self.variance);
        }
    }
}

vectorised!(
    /// Widens consecutive elements of a matrix.
    read,
    read_body,
    (matrix: &Matrix<'_>, from: usize, values: &mut [f64]) -> ()
);

vectorised!(
    /// The variances of rounding values once.
    variances,
    variances_body,
    (precision: Precision, values: &Block, out: &mut Block) -> ()
);

#[inline(always)]
fn read_body(matrix: &Matrix<'_>, from: usize, values: &mut [f64]) {
    matrix.span_f64(from, values);
}

#[inline(always)]
fn variances_body(precision: Precision, values: &Block, out: &mut Block) {
    // As `Precision::deviation` has it.
    let tiny = precision.deviation(0.0);
    let unit = precision.unit_roundoff() / 3f64.sqrt();
    for (out, x) in out.iter_mut().zip(values) {
        let deviation = unit * x.abs() + tiny;
        *out = deviation * deviation;
    }
}
