//! A tensor outside the head that is the product of two others which were recorded around it:
//! it is recognised by its values, and then it has a bound.
//!
//! In one run, elements all over the tensor are held against the dot products of two recorded
//! tensors, `x wᵀ`, `x w` or `xᵀ y`. All of them come out within rounding by no accident, so the
//! tensor is that product. Each run is then held against its own operands: K products summed in
//! f32 in any order, stored in the tensor's dtype, err by
//!
//! ```text
//! (K + 2) u32 Σ|a b|  +  u |Σ a b|        u32 = 2⁻²⁴, u: half a step of the dtype
//! ```
//!
//! at most (f64 operands: u64 in place of u32). Beyond that no order of summation comes, so the
//! run diverges there; within it, whatever the two runs differ by came in with the operands.

use std::collections::BTreeMap;

use backtape::dtype::Dtype;
use backtape::shard::TensorKey;

use super::side::Side;
use super::view::{View, matrix_of};
use crate::head::roundings::{F32, unit_of};

/// Elements of a tensor that is read whole for this.
const MOST: u64 = 1 << 24;
/// Multiply-adds of all elements of a product; beyond it some elements are looked at, which
/// can show that a run is wrong and not that it is right.
const WORK: u64 = 1 << 28;
/// Elements that recognise a product: each agrees by chance once in 2⁷ at most.
const SHOWN: u64 = 48;
/// Pairs of operands that are tried for one tensor.
const PAIRS: usize = 4096;
const F64: f64 = 1.0 / (1u64 << 53) as f64;

/// How the two operands are read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// `[R, K]` and `[N, K]`.
    RowsByRows,
    /// `[R, K]` and `[K, N]`.
    RowsByColumns,
    /// `[K, R]` and `[K, N]`.
    ColumnsByColumns,
}

/// A matrix in f64.
struct Values {
    rows: u64,
    columns: u64,
    dtype: Dtype,
    values: Vec<f64>,
}

/// What the operands of a tensor say of it.
pub(super) enum Judged {
    /// Each run has what its own operands give.
    Explained(String),
    /// A run has not.
    Wrong(String),
}

/// One run's tensors, read once each.
pub(super) struct Products<'a> {
    side: &'a Side<'a>,
    read: BTreeMap<&'a TensorKey, Option<Values>>,
}

impl<'a> Products<'a> {
    pub(super) fn of(side: &'a Side<'a>) -> Products<'a> {
        Products { side, read: BTreeMap::new() }
    }

    /// The shapes of what may be an operand in a microbatch.
    fn candidates(&self, product: &TensorKey) -> Vec<(&'a TensorKey, u64, u64)> {
        let fits = |key: &TensorKey| {
            *key != *product && (key.microbatch == product.microbatch || key.microbatch.is_none())
        };
        let floats = self.side.tensors().filter(|(key, info)| fits(key) && info.dtype.is_float());
        let shaped = floats.filter(|(_, info)| info.shape.len() > 1 && info.partial.is_none());
        let with = shaped.map(|(key, info)| {
            let (rows, columns) = matrix_of(&info.shape);
            (key, rows, columns)
        });
        with.filter(|(_, rows, columns)| rows * columns <= MOST).collect()
    }

    fn load(&mut self, key: &'a TensorKey) {
        let side = self.side;
        self.read.entry(key).or_insert_with(|| {
            let info = side.dump.tensors().get(key)?;
            let view = View::of(side.dump, key);
            let values = view.read(0..view.elements()).ok()?;
            Some(Values { rows: view.rows, columns: view.columns, dtype: info.dtype, values })
        });
    }

    fn get(&self, key: &TensorKey) -> Option<&Values> {
        self.read.get(key)?.as_ref()
    }
}

/// A recognised product of this many terms.
struct Product<'a> {
    operands: (&'a TensorKey, &'a TensorKey),
    form: Form,
    terms: u64,
}

impl Product<'_> {
    /// `Σ a b` and `Σ |a b|` of an element.
    fn terms(&self, (a, b): (&Values, &Values), row: u64, column: u64) -> (f64, f64) {
        let (mut sum, mut sizes) = (0.0, 0.0);
        for k in 0..self.terms {
            let (index, by) = match self.form {
                Form::RowsByRows => (row * a.columns + k, column * b.columns + k),
                Form::RowsByColumns => (row * a.columns + k, k * b.columns + column),
                Form::ColumnsByColumns => (k * a.columns + row, k * b.columns + column),
            };
            let term = a.values[index as usize] * b.values[by as usize];
            sum += term;
            sizes += term.abs();
        }
        (sum, sizes)
    }

    /// How many times its bound an element is off; NaN is off.
    fn off(&self, x: &Values, operands: (&Values, &Values), element: u64) -> f64 {
        let (row, column) = (element / x.columns, element % x.columns);
        let (sum, sizes) = self.terms(operands, row, column);
        let wide = [x.dtype, operands.0.dtype, operands.1.dtype].contains(&Dtype::F64);
        // The sum here errs by its own roundings, too.
        let unit = if wide { 2.0 * F64 } else { F32 + F64 };
        let bound = (self.terms as f64 + 2.0) * unit * sizes + unit_of(x.dtype) * sum.abs();
        let off = (x.values[element as usize] - sum).abs();
        let tiny = smallest(x.dtype);
        if off <= bound + tiny {
            off / (bound + tiny)
        } else {
            (off / (bound + tiny)).max(1.0 + F32)
        }
    }

    fn words(&self) -> String {
        let (a, b) = (self.operands.0.tensor.as_str(), self.operands.1.tensor.as_str());
        match self.form {
            Form::RowsByRows => format!("{a} · {b}ᵀ"),
            Form::RowsByColumns => format!("{a} · {b}"),
            Form::ColumnsByColumns => format!("{a}ᵀ · {b}"),
        }
    }
}

/// The smallest step of a dtype.
fn smallest(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 2f64.powi(-24),
        Dtype::F8E4m3 => 2f64.powi(-9),
        Dtype::F8E5m2 => 2f64.powi(-16),
        Dtype::F64 => f64::MIN_POSITIVE,
        // Of bf16 and f32: what flushes subnormals to zero loses as much.
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// Judges a tensor of two runs by what it is a product of; `None` where nothing that was
/// recorded makes it.
pub(super) fn judge<'a>(
    ours: &mut Products<'a>,
    theirs: &mut Products<'a>,
    key: &'a TensorKey,
) -> Option<Judged> {
    ours.load(key);
    let their_key = theirs.side.dump.tensors().get_key_value(key)?.0;
    theirs.load(their_key);
    let product = recognised(ours, key).or_else(|| recognised(theirs, their_key))?;
    let mut all = true;
    let sides = [(ours, "this run"), (theirs, "the other run")];
    for (side, whose) in sides {
        for operand in [product.operands.0, product.operands.1] {
            let operand_of_side = side.side.dump.tensors().get_key_value(operand)?.0;
            side.load(operand_of_side);
        }
        let x = side.get(key)?;
        let operands = (side.get(product.operands.0)?, side.get(product.operands.1)?);
        let elements = x.rows * x.columns;
        let step = (elements * product.terms).div_ceil(WORK).max(1);
        all &= step == 1;
        let looked = (0..elements).step_by(step as usize);
        let off = looked.map(|at| (at, product.off(x, operands, at)));
        let worst = off.max_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((element, times)) = worst.filter(|(_, times)| !(*times <= 1.0)) {
            return Some(Judged::Wrong(format!(
                "it is {}, and in {whose} element [{}, {}] is {:.1} times as far from it as {} \
                 products summed in any order and stored in {} can be",
                product.words(),
                element / x.columns,
                element % x.columns,
                times,
                product.terms,
                x.dtype,
            )));
        }
    }
    all.then(|| Judged::Explained(format!("in each run what its own {} gives", product.words())))
}

/// The product that a run's tensor is.
fn recognised<'a>(products: &mut Products<'a>, key: &'a TensorKey) -> Option<Product<'a>> {
    let x = products.get(key)?;
    let (rows, columns) = (x.rows, x.columns);
    let elements = rows * columns;
    if elements == 0 || elements > MOST || unit_of(x.dtype) == 0.0 {
        return None;
    }
    let candidates = products.candidates(key);
    let mut tried = 0;
    for &(a, a_rows, a_columns) in &candidates {
        for &(b, b_rows, b_columns) in candidates.iter().filter(|(b, ..)| *b != a) {
            let fits = [
                (Form::RowsByRows, (rows, columns, a_columns) == (a_rows, b_rows, b_columns)),
                (Form::RowsByColumns, (rows, columns, a_columns) == (a_rows, b_columns, b_rows)),
                (Form::ColumnsByColumns, (rows, columns, a_rows) == (a_columns, b_columns, b_rows)),
            ];
            for (form, _) in fits.into_iter().filter(|(_, fits)| *fits) {
                tried += 1;
                if tried > PAIRS {
                    return None;
                }
                products.load(a);
                products.load(b);
                let terms = if form == Form::ColumnsByColumns { a_rows } else { a_columns };
                let product = Product { operands: (a, b), form, terms };
                if shows(products, key, &product).unwrap_or(false) {
                    return Some(product);
                }
            }
        }
    }
    None
}

/// Whether elements all over a tensor, enough of them not zero, are the product's.
fn shows(products: &Products<'_>, key: &TensorKey, product: &Product<'_>) -> Option<bool> {
    let x = products.get(key)?;
    let operands = (products.get(product.operands.0)?, products.get(product.operands.1)?);
    let elements = x.rows * x.columns;
    // A stride that shares no factor with the rows looks at every column too.
    let step = (elements / SHOWN).max(1) | 1;
    let mut told = 0;
    for element in (0..elements).step_by(step as usize) {
        if !(product.off(x, operands, element) <= 1.0) {
            return Some(false);
        }
        told += u64::from(x.values[element as usize] != 0.0);
    }
    Some(told >= SHOWN.min(elements) / 3 && told >= 4)
}
