//! Sums over the rows of a part, one for each column, block by block.

use super::expected::{Arithmetic, Source, lost_near_zero};
use super::parts::{INPUTS, NONE, place, read, variances};
use super::program::{Block, Evaluation, Input, LANES, Place, Program, ZERO};
use super::reverse::{Asked, Errors};
use super::table::Op;
use super::trace::{Given, program};
use super::walker::{Recorded, Span, Walk};
use crate::compare::{Tally, lanes};
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;
use crate::kernels::vectorised;

/// A row that is added: the program of its addends, and the matrices of its inputs.
struct AddedRow<'a> {
    program: Program,
    /// By input, where it has a number for each column: with what it may have been rounded to.
    inputs: Vec<Option<(Matrix<'a>, Option<Precision>)>>,
    /// Which row of the matrices it is.
    row: usize,
}

/// What becomes of a sum: with its errors, and without.
struct Finish {
    uncertain: Program,
    exact: Program,
}

/// What the sums should be.
struct Expected {
    values: Vec<f64>,
    own: Vec<f64>,
    /// Variance of the errors that all columns share.
    row: Vec<f64>,
    /// The factor, less 1, that the elements of an emulated sum have in common.
    factor: f64,
}

/// Compares an op's only stage, which adds up rows; `None` where it has no program.
pub(super) fn compared<O: Op>(
    walk: &Walk<'_, O>,
    rows: usize,
    columns: usize,
    span: Span,
) -> Option<Result<Tally, String>> {
    let stage = &walk.op.stages()[0];
    let rows = match (0..rows).map(|row| added_row(walk, row)).collect::<Result<Vec<_>, _>>() {
        Ok(rows) => rows.into_iter().collect::<Option<Vec<_>>>()?,
        Err(why) => return Some(Err(why)),
    };
    let arithmetic = walk.arithmetic();
    let shares = |known: &super::program::Known| known.shared.most > 0.0 || !known.kept.is_empty();
    let has_shared = rows.iter().any(|row| row.program.known.iter().any(shares));
    let finish = finish(walk.op, &arithmetic, rows.len() as f64, has_shared)?;
    let recorded = walk.tensors.get(stage.name);
    let recorded = recorded.ok_or_else(|| format!("{} was not recorded", stage.name));
    Some(recorded.and_then(|recorded| {
        walk.check(stage.name, stage.shape, recorded)?;
        let expected = expected(&rows, &finish, &arithmetic, (columns, has_shared));
        let row = lanes::Row::new(recorded.stored, walk.largest(recorded.stored), &span.bound);
        Ok(tally(row, recorded, &expected, &span))
    }))
}

fn added_row<'a, O: Op>(walk: &Walk<'a, O>, row: usize) -> Result<Option<AddedRow<'a>>, String> {
    let names = walk.op.stages()[0].inputs;
    let sources = names.iter().map(|name| walk.input(name)).collect::<Result<Vec<_>, _>>()?;
    let roundings = walk.arithmetic().roundings();
    roundings.begin_row();
    let known = sources.iter().map(|input| {
        let at = row * input.row_stride;
        (input.column_stride == 0).then(|| input.number(at, &roundings))
    });
    let known: Vec<_> = known.collect();
    roundings.reserve();
    roundings.share();
    roundings.begin_element();
    let (mut given, mut inputs) = (Vec::new(), Vec::new());
    for ((input, known), name) in sources.iter().zip(known).zip(names) {
        let stored = match (known, input.source) {
            (Some(known), _) => {
                given.push(Given::Known(known));
                inputs.push(None);
                continue;
            }
            (None, Source::Given(_)) => None,
            (None, Source::Recorded(_, stored)) => stored,
            (None, Source::Computed(_)) => return Ok(None),
        };
        if inputs.len() == INPUTS || input.row_stride == 0 {
            return Ok(None);
        }
        given.push(Given::Column(stored.map(|_| place(&roundings))));
        inputs.push(Some((walk.tensors[name].values, stored)));
    }
    let made = program(&roundings, &given, |numbers| walk.op.element(0, numbers));
    Ok(made.map(|program| AddedRow { program, inputs, row }))
}

/// A sum, whose errors that all columns share are its first input's, and those of adding up its
/// second one's.
fn finish<O: Op>(op: &O, arithmetic: &Arithmetic, count: f64, has_shared: bool) -> Option<Finish> {
    let roundings = arithmetic.roundings();
    let total = Given::Column(has_shared.then(|| {
        roundings.next();
        Place::Shared
    }));
    roundings.reserve();
    roundings.share();
    let rounding = Given::Column(Some(place(&roundings)));
    let uncertain = program(&roundings, &[total, rounding], |numbers| {
        op.finish(0, numbers[0].clone() + numbers[1].clone(), count)
    })?;
    let roundings = arithmetic.roundings();
    let total = [Given::Column(None)];
    let exact = program(&roundings, &total, |numbers| op.finish(0, numbers[0].clone(), count))?;
    Some(Finish { uncertain, exact })
}

/// The sums of a block of columns.
pub(super) struct Sums {
    sum: Block,
    /// What the additions rounded off (Neumaier 1974).
    lost: Block,
    squares: Block,
    own: Block,
    shared: Block,
    /// The sum in a job's accumulator, one addend after the other.
    emulated: Block,
}

const NO_SUMS: Sums =
    Sums { sum: ZERO, lost: ZERO, squares: ZERO, own: ZERO, shared: ZERO, emulated: ZERO };

vectorised!(
    /// Adds a row to the sums: values, own variances, and those that all columns share.
    add,
    add_body,
    (sums: &mut Sums, row: &Block, errors: &Errors, shares: bool, accumulator: Precision) -> ()
);

#[inline(always)]
fn add_body(sums: &mut Sums, row: &Block, errors: &Errors, shares: bool, accumulator: Precision) {
    for (i, x) in row.iter().copied().enumerate() {
        let before = sums.sum[i];
        let sum = before + x;
        let is_larger = before.abs() >= x.abs();
        let (large, small) = if is_larger { (before, x) } else { (x, before) };
        // Where the sum is infinite what was lost is NaN, and so is the total.
        sums.lost[i] += (large - sum) + small;
        sums.sum[i] = sum;
        sums.squares[i] += x * x;
        sums.own[i] += errors.own[i];
    }
    if shares {
        sums.shared.iter_mut().zip(&errors.row).for_each(|(sum, row)| *sum += row);
    }
    // A format that is known when this is compiled is rounded to in all lanes at once.
    macro_rules! emulate {
        ($($precision:ident)*) => {
            match accumulator {
                $(Precision::$precision => {
                    for (sum, x) in sums.emulated.iter_mut().zip(row) {
                        *sum = Precision::$precision.round64(*sum + x);
                    }
                })*
            }
        };
    }
    emulate!(F32 Tf32 Bf16 F16 F8E4m3 F8E5m2 F64);
}

fn expected(
    rows: &[AddedRow<'_>],
    finish: &Finish,
    arithmetic: &Arithmetic,
    (columns, has_shared): (usize, bool),
) -> Expected {
    let [values, own, row] = [(); 3].map(|()| Vec::with_capacity(columns));
    let mut expected = Expected { values, own, row, factor: 0.0 };
    let mut fit = [0.0; 2];
    // The variance of adding up is linear in the squared total and in the sum of squares.
    let count = rows.len() as f64;
    let of_total = arithmetic.sum.variance(count, 1.0, 0.0);
    let of_squares = arithmetic.sum.variance(count, 0.0, 1.0);
    let near_zero = lost_near_zero(count, 1.0, arithmetic);
    let inputs = rows.iter().map(|row| row.inputs.len()).max().unwrap_or(0);
    let mut memory = Memory {
        evaluation: Evaluation::default(),
        errors: Box::default(),
        sums: Box::new(NO_SUMS),
        held: vec![ZERO; inputs],
        variance: vec![ZERO; inputs],
    };
    let asked = Asked { row: true, ..Asked::default() };
    for from in (0..columns).step_by(LANES) {
        let here = LANES.min(columns - from);
        add_up(rows, arithmetic, (from, here, has_shared), &mut memory);
        let Memory { evaluation, errors, sums, .. } = &mut memory;
        let (mut total, mut variance) = (ZERO, ZERO);
        for i in 0..LANES {
            total[i] = sums.sum[i] + sums.lost[i];
            let adding = of_total * total[i] * total[i] + of_squares * sums.squares[i];
            variance[i] = sums.own[i] + adding;
        }
        let inputs = [
            Input { values: &total, variance: &sums.shared },
            Input { values: &ZERO, variance: &variance },
        ];
        finish.uncertain.run(&inputs, evaluation);
        finish.uncertain.errors(&inputs, asked, evaluation, errors);
        let values = *finish.uncertain.result(&inputs, evaluation);
        let emulated = [Input { values: &sums.emulated, variance: &ZERO }];
        finish.exact.run(&emulated, evaluation);
        let emulated = finish.exact.result(&emulated, evaluation);
        regress(&values[..here], &emulated[..here], &mut fit);
        expected.values.extend_from_slice(&values[..here]);
        expected.own.extend(errors.own[..here].iter().map(|own| own + near_zero));
        expected.row.extend_from_slice(&errors.row[..here]);
    }
    let [along, energy] = fit;
    expected.factor = if energy > 0.0 { along / energy } else { 0.0 };
    expected
}

vectorised!(
    /// Adds to the scalar products of what was emulated, less the values, and of the values with
    /// the values.
    regress,
    regress_body,
    (values: &[f64], emulated: &[f64], fit: &mut [f64; 2]) -> ()
);

#[inline(always)]
fn regress_body(values: &[f64], emulated: &[f64], fit: &mut [f64; 2]) {
    const AT_ONCE: usize = 4;
    let (mut along, mut energy) = ([0.0; AT_ONCE], [0.0; AT_ONCE]);
    let (chunks, others) = (values.chunks_exact(AT_ONCE), emulated.chunks_exact(AT_ONCE));
    let rest = chunks.remainder().iter().zip(others.remainder());
    let mut add = |lane: usize, x: f64, y: f64| {
        let is_finite = x.is_finite() & y.is_finite();
        along[lane] += if is_finite { (y - x) * x } else { 0.0 };
        energy[lane] += if is_finite { x * x } else { 0.0 };
    };
    rest.for_each(|(x, y)| add(0, *x, *y));
    for (x, y) in chunks.zip(others) {
        for lane in 0..AT_ONCE {
            add(lane, x[lane], y[lane]);
        }
    }
    fit[0] += along.iter().sum::<f64>();
    fit[1] += energy.iter().sum::<f64>();
}

/// Memory for a block of columns.
struct Memory {
    evaluation: Evaluation,
    errors: Box<Errors>,
    sums: Box<Sums>,
    /// By input.
    held: Vec<Block>,
    variance: Vec<Block>,
}

/// Adds up some columns.
fn add_up(
    rows: &[AddedRow<'_>],
    arithmetic: &Arithmetic,
    (from, here, has_shared): (usize, usize, bool),
    memory: &mut Memory,
) {
    let Memory { evaluation, errors, sums, held, variance } = memory;
    **sums = NO_SUMS;
    let asked = Asked { row: has_shared, ..Asked::default() };
    for AddedRow { program, inputs, row } in rows {
        for (at, input) in inputs.iter().enumerate() {
            let Some((matrix, stored)) = input else { continue };
            read(matrix, row * matrix.cols + from, &mut held[at][..here]);
            held[at][here..].fill(0.0);
            if let Some(precision) = stored {
                variances(*precision, &held[at], &mut variance[at]);
            }
        }
        let mut given = [NONE; INPUTS];
        for (at, given) in given.iter_mut().enumerate().take(inputs.len()) {
            *given = Input { values: &held[at], variance: &variance[at] };
        }
        program.run(&given, evaluation);
        program.errors(&given, asked, evaluation, errors);
        let addends = program.result(&given, evaluation);
        add(sums, addends, errors, has_shared, arithmetic.sum.precision);
    }
}

fn tally(mut row: lanes::Row, recorded: &Recorded<'_>, expected: &Expected, span: &Span) -> Tally {
    let (mut captured, mut shared) = (ZERO, ZERO);
    let columns = expected.values.len();
    for from in (0..columns).step_by(LANES) {
        let here = LANES.min(columns - from);
        let range = from..from + here;
        read(&recorded.values, from, &mut captured[..here]);
        let (reference, of_row) = (&expected.values[range.clone()], &expected.row[range.clone()]);
        // What a plane of one row shares along its row it shares with all other parts too.
        for ((shared, x), row) in shared.iter_mut().zip(reference).zip(of_row) {
            let emulated = expected.factor * x;
            *shared = (emulated * emulated + row).sqrt();
        }
        row.add(&lanes::Block {
            captured: &captured[..here],
            reference,
            own: &expected.own[range],
            shared: &shared[..here],
        });
    }
    Tally::of_row(row, span.first_row, &span.bound)
}
