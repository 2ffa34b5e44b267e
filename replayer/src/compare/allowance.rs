//! How what is allowed of an element of dq or dk follows from the sums of its row and column.
//!
//! Every variance of `replay::allowed` is a polynomial in what the reference summed, so a stage is
//! told in numbers: those of the stage, of each row, of each column. They are plain memory:
//! `device/kernels/compare.cu` takes the same structs and does the same operations in the same
//! order, so an element is allowed the same bits wherever it is looked at.
//!
//! An element is `x + y`: `x` its dense part, `y` its label part (NUMERICS 2). Which of the two
//! there are is said by [`Allowance::parts`].

use super::bound::Allowed;
use crate::kernels::round::Precision;

/// Below the smallest normal f32 (and bf16) hardware may flush to zero.
pub const FLUSH: f64 = 1.175_494_350_822_287_5e-38;

/// The dense part is looked at.
pub const DENSE: i64 = 1;
/// The label part is looked at.
pub const LABEL: i64 = 2;

/// Roundings to one or two formats: their variance is `square x² + constant`, their largest error
/// `unit |x| + half`.
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

/// Of the dense part: `x` is it, `s` the sum of its squared addends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Dense {
    /// Its own: `total x² + squares s`.
    pub total: f64,
    /// See `total`.
    pub squares: f64,
    /// Shared by the stage: `shared_total x² + shared_squares s + shared_whole w² +
    /// shared_confident c²`, `w` the entry that is rounded, `c` its confident part.
    pub shared_total: f64,
    /// See `shared_total`.
    pub shared_squares: f64,
    /// See `shared_total`.
    pub shared_whole: f64,
    /// See `shared_total`.
    pub shared_confident: f64,
    /// Certain: `bias |x|`.
    pub bias: f64,
    /// 1 where the entry that is rounded holds the label's part too, else 0.
    pub whole: i64,
}

/// Of the label part: `y` is it, `s` the sum of its squared addends, `a` the same with those that
/// round alike added first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Label {
    /// Its own, beside the row's: `carried max(s, y²)`.
    pub carried: f64,
    /// 1 where the variance of its entry is shared by the row, 0 where it is its own.
    pub row_variance: i64,
    /// Shared by the row: `row_alike a`.
    pub row_alike: f64,
    /// Shared by the stage: `shared_total y² + shared_whole w² + shared_alike a`.
    pub shared_total: f64,
    /// See `shared_total`.
    pub shared_whole: f64,
    /// See `shared_total`.
    pub shared_alike: f64,
    /// Certain: `bias |y|`.
    pub bias: f64,
    /// Of few roundings: `few_alike a` and those of `few`, at most
    /// `few_root √(hits s)` and those of `few`.
    pub few_alike: f64,
    /// See `few_alike`.
    pub few_root: f64,
    /// See `few_alike`.
    pub few: Rounding,
    /// 1 where additions of equal addends err alike, else 0.
    pub copies: i64,
}

/// What adding the parts may round: each of them to `part`, their sum by `sum u²/3`; at most `apart`
/// of their sizes and `together` of their sum's.
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

/// The numbers of a stage.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Allowance {
    /// [`DENSE`], [`LABEL`], or both, which are then added.
    pub parts: i64,
    /// See the type.
    pub dense: Dense,
    /// See the type.
    pub label: Label,
    /// Of a stage with both parts.
    pub joined: Joined,
    /// What the element was stored as.
    pub stored: Rounding,
}

/// The numbers of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct OfRow {
    /// Of the dense part, shared by the row: `side m²`, `m` the row's own element of k or q.
    pub side: f64,
    /// The same: `total x²`.
    pub total: f64,
    /// By how much the variances and the squares of the dense part are too large.
    pub copies: f64,
    /// Tokens whose label the row is.
    pub hits: f64,
    /// Of the label part, its own: `label_total y² + label_squares s`.
    pub label_total: f64,
    /// See `label_total`.
    pub label_squares: f64,
    /// The same, shared by the row: `label_row y²`, and by the stage: `label_shared y²`.
    pub label_row: f64,
    /// See `label_row`.
    pub label_shared: f64,
    /// Of few roundings: a variance, and a largest error.
    pub few: f64,
    /// See `few`.
    pub most: f64,
    /// Of additions of equal addends, the largest error: `copied √(hits s)`.
    pub copied: f64,
}

/// The numbers of a column, of the dense part.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct OfColumn {
    /// Its own variance.
    pub own: f64,
    /// The variance that a row shares.
    pub row: f64,
    /// The variance that the stage shares.
    pub shared: f64,
}

/// What was summed for an element: 0 where nothing was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// The dense part, the sum of its squared addends, and the variance of its entries.
    pub x: f64,
    /// See `x`.
    pub squares: f64,
    /// See `x`.
    pub variance: f64,
    /// What a gradient filter may have dropped of it, and its confident part.
    pub dropped: f64,
    /// See `dropped`.
    pub confident: f64,
    /// The label part, the sum of its squared addends, the variance of its entries.
    pub y: f64,
    /// See `y`.
    pub label_squares: f64,
    /// See `y`.
    pub label_variance: f64,
    /// The squares with addends that round alike added first, and the whole entry that is rounded.
    pub label_alike: f64,
    /// See `label_alike`.
    pub label_whole: f64,
    /// The element of k or of q at this place.
    pub side: f64,
}

impl Rounding {
    /// One rounding to a precision.
    pub fn to(precision: Precision) -> Rounding {
        let (unit, half) = (precision.unit_roundoff(), precision.smallest_subnormal() / 2.0);
        Rounding { square: unit * unit / 3.0, constant: FLUSH * FLUSH + half * half, unit, half }
    }

    /// Its variance.
    pub fn variance(&self, x: f64) -> f64 {
        self.square * x * x + self.constant
    }

    /// Its largest error.
    pub fn most(&self, x: f64) -> f64 {
        self.unit * x.abs() + self.half
    }

    /// Both of two.
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
    /// What is allowed of an element before it was stored.
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

    /// What the element should be.
    pub fn reference(&self, sums: &Sums) -> f64 {
        match self.parts {
            DENSE => sums.x,
            LABEL => sums.y,
            _ => sums.x + sums.y,
        }
    }

    /// What storing an element adds, which should be `x` and errs within `inner` so far. What is
    /// rounded is not x but what the job had in its place.
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
        // Most rows of dk are the label of no token: nothing was summed there.
        if [y, squares, variance, alike, whole] == [0.0; 5] {
            let (few, most) = (self.few.constant + row.few, self.few.half + row.most);
            return Allowed::default().with_few(few, most);
        }
        let (in_row, own) = if self.row_variance == 1 { (variance, 0.0) } else { (0.0, variance) };
        let summed = row.label_total * y * y + row.label_squares * squares;
        // Alike or not, each addend errs within half a spacing; Σ|a| ≤ √(n Σa²).
        let root = (row.hits * squares).sqrt();
        let few = self.few_alike * alike + self.few.variance(y) + row.few;
        let most = self.few_root * root + self.few.most(y) + row.most;
        let allowed = Allowed {
            own: own + summed + self.carried * squares.max(y * y),
            row: self.row_alike * alike + row.label_row * y * y + in_row,
            shared: (self.shared_total + row.label_shared) * y * y
                + self.shared_whole * whole * whole
                + self.shared_alike * alike,
            certain: self.bias * y.abs(),
            ..Allowed::default()
        }
        .with_few(few, most);
        // The additions of `m` copies in one binade err by one error, and `m` equal errors of
        // variance `a` sum to `m² a`, not `m a`: the variance of the sum is `m` times what it is of
        // others, `m` their mean in squares. Each is off by `u |s_k|` at most, and no partial sum
        // is larger than `Σ|a| ≤ √(n Σa²)`. Nothing is added where no addend has a copy.
        match self.copies == 1 && alike > squares && squares > 0.0 {
            true => allowed.with_few((alike / squares - 1.0) * summed, row.copied * root),
            false => allowed,
        }
    }
}

impl Joined {
    /// Of two parts that are added.
    pub fn of(&self, one: f64, other: f64) -> Allowed {
        let sum = one + other;
        let variance = self.part.variance(one) + self.part.variance(other);
        let most = self.part.most(one) + self.part.most(other);
        let apart = self.apart * (one.abs() + other.abs());
        let most = most + apart + self.sum.most(sum);
        Allowed::default().with_few(variance + self.sum.variance(sum), most)
    }

    /// Of `n` ranks that each add two parts of their own, of which the sums of squares are known.
    pub fn of_addends(&self, n: f64, squares: [f64; 2]) -> Allowed {
        let n = n.max(1.0);
        // As large as one of them may be if all are alike: then their sum is largest.
        let [one, other] = squares.map(|of| (of / n).sqrt());
        let each = self.of(one, other);
        Allowed { own: n * each.own, few: n * each.few, most: n * each.most, ..each }
    }
}
