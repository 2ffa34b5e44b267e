//! Computes the error that rounding may make in an element of dq or dk, from the sums that the
//! reference took for the element, its row and its column.
//!
//! Every variance of `replay::allowed` is a polynomial in these sums, so it is described by its
//! coefficients: some for the stage, some for each row, some for each column. The structs are plain
//! memory: `device/kernels/compare.cu` reads the same structs and does the same operations in the
//! same order, so the CPU and a GPU compute the same bits.
//!
//! An element is `x + y`: `x` is its dense part (softmax and smoothing), `y` its label part.
//! [`Allowance::parts`] says which of the two a stage has.

use super::bound::Allowed;
use crate::kernels::round::Precision;

/// Below the smallest normal f32 (and bf16) hardware may flush to zero.
pub const FLUSH: f64 = 1.175_494_350_822_287_5e-38;

/// The root of the smallest normal f64. Errors below it have squares that the comparison, which is in
/// f64 itself, does not have: of values that small in f64 it says nothing.
const SQUARED: f64 = 1.491_668_146_240_041_3e-154;

/// The stage has the dense part.
pub const DENSE: i64 = 1;
/// The stage has the label part.
pub const LABEL: i64 = 2;

/// Rounding a value x to one or two formats: the variance of its error is `square x² + constant`,
/// and the largest error is `unit |x| + half`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Rounding {
    /// See the type.
    pub square: f64,
    /// See the type.
    pub constant: f64,
    /// See the type.
    pub unit: f64,
    /// See the type.
    pub half: f64,
}

/// Coefficients of the dense part `x`; `s` is the sum of its squared addends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Dense {
    /// Variance that is independent for each element: `total x² + squares s`.
    pub total: f64,
    /// See `total`.
    pub squares: f64,
    /// Variance of an error that the whole stage shares: `shared_total x² + shared_squares s +
    /// shared_whole w² + shared_confident c²`, where `w` is the value that the job rounds and `c`
    /// the part of `x` from confident probabilities.
    pub shared_total: f64,
    /// See `shared_total`.
    pub shared_squares: f64,
    /// See `shared_total`.
    pub shared_whole: f64,
    /// See `shared_total`.
    pub shared_confident: f64,
    /// Error that the job is known to make: `bias |x|`.
    pub bias: f64,
    /// 1 where the job adds the label part before it rounds, so that `w = x + y`; else 0, and `w =
    /// x`.
    pub whole: i64,
}

/// Coefficients of the label part `y`. `s` is the sum of its squared addends, `a` the same where
/// addends that round alike are added before they are squared.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Label {
    /// Variance that is independent for each element, beside that of [`OfRow`]: `carried max(s,
    /// y²)`.
    pub carried: f64,
    /// 1 where the error of the entries of dlogits is shared by the row, 0 where it is independent
    /// for each element.
    pub row_variance: i64,
    /// Variance of an error that the row shares: `row_alike a`.
    pub row_alike: f64,
    /// Variance of an error that the whole stage shares: `shared_total y² + shared_whole w² +
    /// shared_alike a`, where `w` is the sum of the whole entries that the job rounds, times q or
    /// k.
    pub shared_total: f64,
    /// See `shared_total`.
    pub shared_whole: f64,
    /// See `shared_total`.
    pub shared_alike: f64,
    /// Error that the job is known to make: `bias |y|`.
    pub bias: f64,
    /// Few roundings, whose largest sum is known: their variance is `few_alike a` plus that of
    /// `few`, their largest error `few_root √(hits s)` plus that of `few`.
    pub few_alike: f64,
    /// See `few_alike`.
    pub few_root: f64,
    /// See `few_alike`.
    pub few: Rounding,
    /// 1 where the errors of adding equal addends are equal, else 0.
    pub copies: i64,
}

/// The roundings of adding the two parts: `part` of each part, `sum` of their sum, and a largest
/// error that is larger by `apart (|x| + |y|)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Joined {
    /// See the type.
    pub part: Rounding,
    /// See the type.
    pub sum: Rounding,
    /// See the type.
    pub apart: f64,
}

/// The coefficients of a stage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Allowance {
    /// [`DENSE`], [`LABEL`], or the sum of both constants where the stage holds the sum of both
    /// parts.
    pub parts: i64,
    /// See the type.
    pub dense: Dense,
    /// See the type.
    pub label: Label,
    /// Used where the stage has both parts.
    pub joined: Joined,
    /// Rounding to the format that the element was stored in.
    pub stored: Rounding,
}

/// The coefficients of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct OfRow {
    /// Dense part: variance of an error that the row shares, `side m² + total x²`, where `m` is the
    /// element of the row's own q or k at this place.
    pub side: f64,
    /// See `side`.
    pub total: f64,
    /// The factor by which the reference's variances and squares of the dense part are too large
    /// (the token's number of copies in a row of dq).
    pub copies: f64,
    /// Tokens whose label the row is.
    pub hits: f64,
    /// Label part: variance that is independent for each element, `label_total y² + label_squares
    /// s`.
    pub label_total: f64,
    /// See `label_total`.
    pub label_squares: f64,
    /// Label part: variance of an error that the row shares, `label_row y²`, and of one that the
    /// stage shares, `label_shared y²`.
    pub label_row: f64,
    /// See `label_row`.
    pub label_shared: f64,
    /// Further variance of few roundings, and their largest error.
    pub few: f64,
    /// See `few`.
    pub most: f64,
    /// Largest error of adding equal addends: `copied √(hits s)`.
    pub copied: f64,
}

/// The variances that a column adds to the dense part.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct OfColumn {
    /// Variance that is independent for each element.
    pub own: f64,
    /// Variance of an error that the row shares.
    pub row: f64,
    /// Variance of an error that the stage shares.
    pub shared: f64,
}

/// The reference's sums for an element; those that a stage does not have are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// The dense part, the sum of its squared addends, and the variance that the errors of its
    /// entries of dlogits give it.
    pub x: f64,
    /// See `x`.
    pub squares: f64,
    /// See `x`.
    pub variance: f64,
    /// The magnitude that a gradient filter may have dropped from `x`, and the part of `x` from
    /// confident probabilities.
    pub dropped: f64,
    /// See `dropped`.
    pub confident: f64,
    /// The label part, the sum of its squared addends, and the variance that the errors of its
    /// entries give it.
    pub y: f64,
    /// See `y`.
    pub label_squares: f64,
    /// See `y`.
    pub label_variance: f64,
    /// The squares where addends that round alike are added before they are squared, and the sum
    /// of the whole entries that the job rounds.
    pub label_alike: f64,
    /// See `label_alike`.
    pub label_whole: f64,
    /// The element of q or k at this place, for dq and dk.
    pub side: f64,
}

impl Rounding {
    /// One rounding to a precision.
    pub fn to(precision: Precision) -> Rounding {
        let (unit, half) = (precision.unit_roundoff(), precision.smallest_subnormal() / 2.0);
        // f64 has its own smallest normal number, whose square is 0.
        let flush = if precision == Precision::F64 { SQUARED } else { FLUSH };
        let constant = flush * flush + half * half;
        Rounding { square: unit * unit / 3.0, constant, unit, half: half + flush }
    }

    /// Its variance.
    pub fn variance(&self, x: f64) -> f64 {
        self.square * x * x + self.constant
    }

    /// Largest rounding error of `x`.
    pub fn most(&self, x: f64) -> f64 {
        self.unit * x.abs() + self.half
    }

    /// Both roundings, one after the other.
    pub fn and(self, other: Rounding) -> Rounding {
        Rounding {
            square: self.square + other.square,
            constant: self.constant + other.constant,
            unit: self.unit + other.unit,
            half: self.half + other.half,
        }
    }
}

impl Allowance {
    /// The error allowed in an element before it is stored.
    pub fn of(&self, sums: &Sums, row: &OfRow, column: &OfColumn) -> Allowed {
        match self.parts {
            DENSE => self.dense.of(sums, row, column),
            LABEL => self.label.of(sums, row),
            _ => {
                let dense = self.dense.of(sums, row, column);
                dense + self.label.of(sums, row) + self.joined.of(sums.x, sums.y)
            }
        }
    }

    /// The element's value in the reference.
    pub fn reference(&self, sums: &Sums) -> f64 {
        match self.parts {
            DENSE => sums.x,
            LABEL => sums.y,
            _ => sums.x + sums.y,
        }
    }

    /// Adds the rounding of storing an element, `times` its variance and largest error. Its
    /// reference is `x`, and its error so far is within `inner`: the job rounds a value that may be
    /// as large as `size`, not x itself.
    pub fn storing(stored: &Rounding, x: f64, times: f64, inner: Allowed) -> Allowed {
        let size = x.abs() + inner.most + inner.certain + 8.0 * inner.total().sqrt();
        inner.with_few(times * stored.variance(x), times * stored.most(size))
    }
}

impl Dense {
    fn of(&self, sums: &Sums, row: &OfRow, column: &OfColumn) -> Allowed {
        let Sums { x, squares, variance, dropped, confident, side, .. } = *sums;
        let whole = if self.whole == 1 { x + sums.y } else { x };
        let squares = squares / row.copies;
        Allowed {
            own: self.total * x * x + self.squares * squares + column.own,
            row: variance / row.copies + row.side * side * side + column.row + row.total * x * x,
            shared: self.shared_squares * squares
                + self.shared_whole * whole * whole
                + self.shared_confident * confident * confident
                + self.shared_total * x * x
                + column.shared,
            certain: dropped + self.bias * x.abs(),
            ..Allowed::default()
        }
    }
}

impl Label {
    fn of(&self, sums: &Sums, row: &OfRow) -> Allowed {
        let Sums { y, label_squares: squares, label_variance: variance, .. } = *sums;
        let Sums { label_alike: alike, label_whole: whole, .. } = *sums;
        // Most rows of dk are the label of no token, and all their sums are 0.
        if [y, squares, variance, alike, whole] == [0.0; 5] {
            let (few, most) = (self.few.constant + row.few, self.few.half + row.most);
            return Allowed::default().with_few(few, most);
        }
        let (in_row, in_element) =
            if self.row_variance == 1 { (variance, 0.0) } else { (0.0, variance) };
        let summed = row.label_total * y * y + row.label_squares * squares;
        // Whether errors are equal or not, each addend errs by half a spacing at most, and Σ|a| ≤
        // √(n Σa²).
        let root = (row.hits * squares).sqrt();
        let few = self.few_alike * alike + self.few.variance(y) + row.few;
        let most = self.few_root * root + self.few.most(y) + row.most;
        let allowed = Allowed {
            own: in_element + summed + self.carried * squares.max(y * y),
            row: self.row_alike * alike + row.label_row * y * y + in_row,
            shared: (self.shared_total + row.label_shared) * y * y
                + self.shared_whole * whole * whole
                + self.shared_alike * alike,
            certain: self.bias * y.abs(),
            ..Allowed::default()
        }
        .with_few(few, most);
        // Adding `m` copies of an addend within one binade makes the same error each time, and `m`
        // equal errors of variance `v` sum to a variance of `m² v`, not `m v`. So the variance is
        // `m` times that of independent errors, with `m = alike / squares` the mean number of
        // copies. Each addition errs by `u |s_k|` at most, and no partial sum `s_k` is larger than
        // `Σ|a| ≤ √(n Σa²)`. Nothing is added where no addend has a copy.
        match self.copies == 1 && alike > squares && squares > 0.0 {
            true => allowed.with_few((alike / squares - 1.0) * summed, row.copied * root),
            false => allowed,
        }
    }
}

impl Joined {
    /// The error allowed in adding two parts.
    pub fn of(&self, first: f64, other: f64) -> Allowed {
        let sum = first + other;
        let variance = self.part.variance(first) + self.part.variance(other);
        let most = self.part.most(first) + self.part.most(other);
        let apart = self.apart * (first.abs() + other.abs());
        let most = most + apart + self.sum.most(sum);
        Allowed::default().with_few(variance + self.sum.variance(sum), most)
    }

    /// The same for `n` ranks that each add two parts of their own, from the sums over the ranks of
    /// the parts' squares.
    pub fn of_addends(&self, n: f64, squares: [f64; 2]) -> Allowed {
        let n = n.max(1.0);
        // All ranks' parts are taken as equal, for which the sum of their errors is largest.
        let [first, other] = squares.map(|square| (square / n).sqrt());
        let each = self.of(first, other);
        Allowed { own: n * each.own, few: n * each.few, most: n * each.most, ..each }
    }
}
