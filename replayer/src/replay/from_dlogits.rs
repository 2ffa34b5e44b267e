//! dq, dk and dbias judged from captured dlogits: what dlogits hold is not blamed on
//! the two products that follow.

use backtape::role::Role;

use super::captured_gradients::{Captured, Gradient, picked};
use super::context::Replay;
use super::dlogits_rounding::SharedErrors;
use super::findings::Findings;
use super::gathered_rows::Gathered;
use super::judge::Judge;
use super::maps::Drawn;
use super::microbatch::HeadMicrobatch;
use super::problem::Problem;
use super::rounding_variance::{carried, relative};
use super::slab::column_squares;
use super::world::{Expectation, StagePlace};
use crate::compare::{Allowed, Rows, Tally};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, rows_of, unfit};
use crate::head::{Stage, Unit};
use crate::kernels::matrix::{HeadInputs, Matrix, Values};
use crate::kernels::policy::{Path, Policy};
use crate::kernels::reference;
use crate::kernels::round::Precision;

/// The captured dlogits of a unit, `[T, V]`.
pub(super) struct Dlogits {
    values: Gathered,
    stored: Option<Precision>,
}

/// One gradient that follows from dlogits, some rows of it.
struct Product<'a> {
    first: usize,
    values: &'a [f64],
    squares: &'a [f64],
    /// Addends of each sum.
    length: usize,
    /// True for sums over tokens.
    tokens: bool,
    /// Sum of the other factor's squares, a column each, where entries may lie in the
    /// smallest numbers of their format.
    floor: &'a [f64],
    /// The world's factor, and whether its product is rounded.
    factor: (f64, bool),
    /// What rounding the entries once more does to all of them.
    alike: SharedErrors,
}

/// Operands of the products as a hypothesis has them.
struct Operands {
    entries: Wide,
    q: Wide,
    k: Wide,
}

impl Operands {
    fn head<'h>(&'h self, head: &HeadInputs<'h>) -> HeadInputs<'h> {
        HeadInputs { q: self.q.matrix(), k: self.k.matrix(), ..*head }
    }
}

struct Wide {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

impl Wide {
    fn matrix(&self) -> Matrix<'_> {
        Matrix { rows: self.rows, cols: self.cols, values: Values::F64(&self.values) }
    }
}

/// A matrix whose values are rounded to a format.
fn narrowed(matrix: &Matrix<'_>, precision: Precision) -> Wide {
    let values = (0..matrix.len()).map(|at| precision.round64(matrix.get_f64(at))).collect();
    Wide { rows: matrix.rows, cols: matrix.cols, values }
}

/// The format of few bits that holds all of these entries exactly, whatever they are stored in: a
/// job may have rounded them and stored them as f32.
fn held_in(entries: &Matrix<'_>) -> Option<Precision> {
    let holds = |format: &Precision| {
        let mut values = (0..entries.len()).map(|at| entries.get_f64(at));
        values.all(|entry| format.round64(entry) == entry)
    };
    [Precision::Bf16, Precision::F16].into_iter().find(holds)
}

impl Judge<'_> {
    /// The same; none where what was captured cannot be used, which is said where it is judged.
    pub(super) fn usable_dlogits(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
    ) -> Result<Option<Dlogits>, StepError> {
        match self.dlogits(microbatch, unit) {
            Err(error) if error.is_of_dump() => Ok(None),
            dlogits => dlogits,
        }
    }

    /// The dlogits that the unit's products should be made of, if they were captured.
    pub(super) fn dlogits(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
    ) -> Result<Option<Dlogits>, StepError> {
        // A fused path never forms them: what it recorded was made for the record.
        let formed = self.plan.roundings.widest.path != Path::Fused;
        let key = self.plan.step.find(Role::Dlogits, microbatch.inputs.microbatch);
        let trusted = self.world.trusts(Stage::Dlogits, microbatch.inputs.microbatch);
        let Some(key) = key.filter(|_| formed && self.plan.wants(Stage::Dlogits) && trusted) else {
            return Ok(None);
        };
        let tensor = self.plan.step.assemble(key)?;
        let whole = matrix(&tensor).filter(|m| m.rows == microbatch.inputs.tokens());
        let whole = whole.ok_or_else(|| unfit(&tensor, "floats of shape [..., V]"))?;
        let values = Gathered::new(&whole, &unit.rows);
        let stored = match precision_of(tensor.dtype) {
            Some(few) if !few.keeps_f32() => Some(few),
            wide => held_in(&values.matrix()).or(wide),
        };
        Ok(Some(Dlogits { values, stored }))
    }
}

impl Replay<'_> {
    pub(super) fn judge_from_dlogits(
        &self,
        problem: &Problem<'_>,
        (dlogits, stages): (&Dlogits, &[Stage]),
        captured: &Captured,
        unit: &Unit,
        findings: &mut Findings,
    ) {
        use Stage::{Dbias, Dk, Dq};
        let (t, v) = (problem.head.q.rows, problem.head.valid_vocab);
        let place = StagePlace { stage: Dq, microbatch: problem.microbatch, rank: problem.rank };
        let whole = unit.rows.iter().all(|&row| self.judge.world.emulates(place, row));
        let policy =
            self.judge.world.policy_of(&self.plan.roundings, problem.unit()).filter(|_| whole);
        let supposed = policy.map(|(policy, _)| Operands {
            entries: narrowed(&dlogits.values.matrix(), policy.dlogits),
            q: narrowed(&problem.head.q, policy.input),
            k: narrowed(&problem.head.k, policy.input),
        });
        let (entries, head): (Matrix<'_>, HeadInputs<'_>) = match &supposed {
            Some(operands) => (operands.entries.matrix(), operands.head(&problem.head)),
            None => (dlogits.values.matrix(), problem.head),
        };
        let formats = [self.plan.roundings.narrowest.dlogits, self.plan.roundings.widest.dlogits];
        let stored = dlogits.stored.unwrap_or(Precision::F64);
        let alike = SharedErrors::of(&entries, stored, formats, problem.cotangents().label);
        let tiles = self.plan.tiles;
        let coarse = self.judge.entry_floor(0.0) > 0.0;
        let q = |_| column_squares(&problem.head.q, problem.head.copies);
        let q_squares = Some(()).filter(|()| coarse).map(q).unwrap_or_default();
        let ones = [t as f64];
        let dq =
            reference::from_dlogits(&head, &entries, tiles, self.executor.progress(), &mut |b| {
                for (stage, values, squares) in [(Dk, b.dk, b.dk_sq), (Dbias, b.dbias, b.dbias_sq)]
                {
                    let gradient = captured.stage(stage).filter(|_| stages.contains(&stage));
                    if let Some(gradient) = gradient {
                        let first = b.rows.start;
                        let floor = if stage == Dbias { &ones[..] } else { &q_squares[..] };
                        let rows: Vec<usize> = b.rows.clone().collect();
                        let values =
                            &self.judge.supposed_product(problem, stage, &rows, values)[..];
                        let (length, factor) = (t, self.judge.factor(problem, stage));
                        let product = Product {
                            first,
                            values,
                            squares,
                            length,
                            tokens: true,
                            floor,
                            factor,
                            alike,
                        };
                        let index = |row: usize| row as u64;
                        self.judge.judge_product(
                            dlogits,
                            gradient,
                            &product,
                            (&index, None),
                            findings,
                        );
                    }
                }
            });
        let of_unit = picked(captured, &unit.rows);
        if let Some(gradient) = of_unit.stage(Dq).filter(|_| stages.contains(&Dq)) {
            let (values, squares) = (&dq.dq[..], &dq.dq_sq[..]);
            let floor = &problem.k_squares[..];
            let values = &self.judge.supposed_product(problem, Dq, &unit.rows, values)[..];
            let factor = self.judge.factor(problem, Dq);
            let (first, length, tokens) = (0, v, false);
            let product = Product { first, values, squares, length, tokens, floor, factor, alike };
            let index = |row: usize| unit.rows[row] as u64;
            let copies = problem.head.copies;
            self.judge.judge_product(dlogits, gradient, &product, (&index, copies), findings);
        }
    }
}

impl Judge<'_> {
    /// What the world says of a product's rows.
    fn supposed_product(
        &self,
        problem: &Problem<'_>,
        stage: Stage,
        rows: &[usize],
        exact: &[f64],
    ) -> Vec<f64> {
        let mut values = exact.to_vec();
        let place = StagePlace { stage, microbatch: problem.microbatch, rank: problem.rank };
        let columns = values.len() / rows.len().max(1);
        let factor = self.world.scale(place);
        values.iter_mut().for_each(|x| *x *= factor);
        self.world.expected(&mut Expectation { place, rows, columns, values: &mut values });
        values
    }

    /// Judges a captured product by the sum of captured entries times exact factors.
    fn judge_product(
        &self,
        dlogits: &Dlogits,
        gradient: &Gradient,
        product: &Product<'_>,
        (index, copies): (&(dyn Fn(usize) -> u64 + Sync), Option<&[f64]>),
        findings: &mut Findings,
    ) {
        let Policy { sums, path, dlogits: entry, .. } = self.plan.roundings.widest;
        let whole = gradient.matrix();
        let columns = whole.cols;
        let rows = product.values.len() / columns.max(1);
        let sum = if product.tokens { sums.dk } else { sums.dq };
        let size = match product.tokens {
            true => self.plan.roundings.tiles.tokens,
            false => self.plan.roundings.tiles.vocab,
        };
        let parts = product.length.div_ceil(size.max(1));
        // The job may have gone on with entries that were not yet stored, or rounded
        // them once more for its GEMM.
        let unit = |p: Precision| p.unit_roundoff().powi(2) / 3.0;
        let each = dlogits.stored.map_or(0.0, unit) + unit(entry) + self.product_rel_var();
        let length = product.length as f64;
        let (factor, again) = product.factor;
        let allowed = |row: usize, column: usize, supposed: f64| {
            let element = row * columns + column;
            let x = if factor == 0.0 { 0.0 } else { supposed / factor };
            let squares = product.squares[element];
            let joined = self.joined(parts, product.tokens && path == Path::Chunked, x, squares);
            // The label's entry is the largest: met first, every later sum carries it.
            let label = carried(sum, length, squares);
            let inner = sum.variance(length, x, squares) + label + joined + each * squares;
            let floor = product.floor.get(column).copied().unwrap_or(0.0);
            let own = inner
                + self.entry_floor(0.0).powi(2) * floor
                + relative(self.plan.roundings.compute(), x);
            let shared = self.narrowing() * squares + product.alike.shared * x * x;
            let certain = product.alike.certain * x.abs();
            let inner = Allowed { own, shared, certain, ..Allowed::default() }.times(factor);
            gradient.storing(product.first * columns + element, supposed, again, inner)
        };
        let captured = rows_of(&whole, product.first..product.first + rows);
        let place = |row: usize| index(product.first + row);
        let bound = self.bound(whole.rows, columns);
        let repeats = |row: usize| copies.map_or(1.0, |copies| copies[row]);
        let compared =
            Rows { captured, reference: product.values, index: &place, repeats: &repeats };
        let stage = gradient.stage;
        let mut tally = Tally::of(&compared, allowed, &bound);
        if let Some(stored) = gradient.stored {
            tally.stored_in(stored, product.values);
        }
        findings.merge(stage, tally, bound);
        if stage != Stage::Dbias {
            let (first, all, rows) = (product.first, whole.rows, &compared);
            let (allowed, bound) = (&allowed, &bound);
            findings.draw(self.plan.draw, &Drawn { stage, first, all, rows, allowed, bound });
        }
    }
}
