//! One row of a comparison, once every element of it was looked at, from the left.
//!
//! It is plain memory: `device/kernels/compare.cu` fills the same struct, field for field and bit
//! for bit, so who looked at a row changes nothing of a report.

use super::bound::{Allowed, Bound, Budget};
use super::measures::{Measures, Point, score_class};
use super::tally::Worst;
use super::ulp::{BUCKETS, Format, bucket};

/// One element of the row that stands out.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Spot {
    /// Its column; negative where there is no such element.
    pub column: i64,
    /// Its value in the dump.
    pub captured: f64,
    /// What it is compared with.
    pub reference: f64,
    /// |captured - reference| over the allowed standard deviation.
    pub score: f64,
}

impl Spot {
    const NONE: Spot = Spot { column: -1, captured: 0.0, reference: 0.0, score: 0.0 };

    fn is_some(&self) -> bool {
        self.column >= 0
    }

    fn keep(&mut self, one: Spot) {
        if !self.is_some() {
            *self = one;
        }
    }

    /// Takes a later one where there was none, or where it is larger.
    fn keep_larger(&mut self, one: Spot, size: fn(&Spot) -> f64) {
        if one.is_some() && (!self.is_some() || size(&one) > size(self)) {
            *self = one;
        }
    }

    fn error(&self) -> f64 {
        (self.captured - self.reference).abs()
    }

    fn relative(&self) -> f64 {
        self.error() / self.reference.abs()
    }

    /// With its place in the tensor.
    pub(super) fn worst(&self, row: u64) -> Option<Worst> {
        let Spot { column, captured, reference, score } = *self;
        let index = (row, column as u64);
        self.is_some().then_some(Worst { index, captured, reference, score })
    }

    fn point(&self, row: u64) -> Option<Point> {
        let Spot { column, captured, reference, .. } = *self;
        self.is_some().then_some(Point { index: (row, column as u64), captured, reference })
    }
}

/// What is known of a row; sums are over its finite elements but where said otherwise.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowTally {
    /// Elements that are not finite, or whose reference is not.
    pub nonfinite: u64,
    /// Elements above their bound.
    pub exceeding: u64,
    /// Of all elements: whose bits are not those of the rounded reference.
    pub mismatches: u64,
    /// Those that are not 0 and should be.
    pub from_zero: u64,
    /// Of all elements: of the wrong sign, overflown, or no number.
    pub sign_or_overflow: u64,
    /// Sum of squared errors.
    pub error: f64,
    /// Sum of squared reference values.
    pub reference: f64,
    /// Sum of squared captured values.
    pub captured: f64,
    /// Sum of errors times reference values.
    pub dot: f64,
    /// Largest absolute error.
    pub max_abs: f64,
    /// Error energy over its bound, of the element that is furthest beyond.
    pub beyond: f64,
    /// Of the slope: sums of `own ref²`, `√row |ref|`, `√shared |ref|` and `certain |ref|`.
    pub slope: [f64; 4],
    /// Of all elements: sums of what is allowed of them.
    pub allowed: AllowedSums,
    /// The first that is not finite, the first above its bound, the one of the largest score.
    pub spots: [Spot; 3],
    /// Of all: the first that differs; the largest difference, absolute and relative.
    pub measured: [Spot; 3],
    /// Elements by |error| in allowed standard deviations.
    pub scores: [u32; 6],
    /// Of all: by distance in units in the last place.
    pub ulps: [u32; BUCKETS],
}

/// Sums over the allowances of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct AllowedSums {
    /// Of `own`: sum, sum of squares, largest.
    pub own: [f64; 3],
    /// The same without what is of few roundings.
    pub many: [f64; 3],
    /// Sum of the squared largest errors of those.
    pub most: f64,
    /// Sums of `row`, of `shared`, and of squared `certain`.
    pub row: f64,
    /// See `row`.
    pub shared: f64,
    /// See `row`.
    pub certain: f64,
}

// SAFETY: all zeros are numbers.
unsafe impl bytemuck::Zeroable for RowTally {}
// SAFETY: `repr(C)`, numbers of 8 bytes and then an even count of 4: no padding.
unsafe impl bytemuck::Pod for RowTally {}

const _: () = assert!((BUCKETS + 6).is_multiple_of(2), "no padding at the end of a row");

/// Columns of a row that are looked at together: a device has a thread for each such piece, and the
/// row is the pieces' sums, from the left. Rows of dq and dk have one, as a rule.
pub const PIECE: usize = 4096;

/// An element to compare, and what is allowed of it.
#[derive(Clone, Copy, Debug)]
pub struct Element {
    /// The value in the dump.
    pub captured: f64,
    /// The value recomputed in f64.
    pub reference: f64,
    /// What rounding may make of it.
    pub allowed: Allowed,
}

/// What is looked at of an element.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// The exponent of an element's bound.
    bound: f64,
    /// As in [`Bound`].
    nan_is_meant: bool,
    /// As in [`Bound`].
    measured: bool,
}

impl Look {
    /// What a bound asks for.
    pub fn of(bound: &Bound) -> Look {
        let Bound { element, nan_is_meant, measured, .. } = *bound;
        Look { bound: element, nan_is_meant, measured }
    }

    /// All of it, at this exponent of an element's bound.
    pub fn whole(bound: f64) -> Look {
        Look { bound, nan_is_meant: false, measured: true }
    }
}

impl RowTally {
    const NONE: RowTally = RowTally {
        nonfinite: 0,
        exceeding: 0,
        mismatches: 0,
        from_zero: 0,
        sign_or_overflow: 0,
        error: 0.0,
        reference: 0.0,
        captured: 0.0,
        dot: 0.0,
        max_abs: 0.0,
        beyond: 0.0,
        slope: [0.0; 4],
        allowed: AllowedSums {
            own: [0.0; 3],
            many: [0.0; 3],
            most: 0.0,
            row: 0.0,
            shared: 0.0,
            certain: 0.0,
        },
        spots: [Spot::NONE; 3],
        measured: [Spot::NONE; 3],
        scores: [0; 6],
        ulps: [0; BUCKETS],
    };

    /// Looks at a row's elements, stored in this format.
    pub fn of(elements: impl Iterator<Item = Element>, format: Format, look: &Look) -> RowTally {
        let mut row = RowTally::NONE;
        let mut piece = RowTally::NONE;
        for (column, element) in elements.enumerate() {
            if column > 0 && column.is_multiple_of(PIECE) {
                row.join(&std::mem::replace(&mut piece, RowTally::NONE));
            }
            piece.look_at(column, element, format, look);
        }
        row.join(&piece);
        row
    }

    /// The rows whose pieces these are, so many of each row, from the left.
    pub fn joined(pieces: &[RowTally], of_row: usize) -> Vec<RowTally> {
        let row = |pieces: &[RowTally]| {
            let mut row = RowTally::NONE;
            pieces.iter().for_each(|piece| row.join(piece));
            row
        };
        pieces.chunks(of_row.max(1)).map(row).collect()
    }

    /// Pieces of a row of so many columns.
    pub fn pieces(columns: usize) -> usize {
        columns.div_ceil(PIECE).max(1)
    }

    fn look_at(&mut self, column: usize, element: Element, format: Format, look: &Look) {
        let Element { captured, reference, .. } = element;
        let meant = look.nan_is_meant && !reference.is_finite();
        if !meant {
            self.allowed.add(&element.allowed);
        }
        let spot = match look.measured {
            true => self.measure(column, element, format),
            false => Spot { column: column as i64, captured, reference, score: 0.0 },
        };
        if meant && !element.captured.is_finite() {
            return;
        }
        match element.captured.is_finite() && element.reference.is_finite() {
            true => {
                self.add(element, spot, look.bound);
                if look.measured {
                    self.score(spot);
                }
            }
            false => {
                self.nonfinite += 1;
                self.spots[0].keep(spot);
            }
        }
    }

    /// Adds the next piece of the row.
    fn join(&mut self, next: &RowTally) {
        self.nonfinite += next.nonfinite;
        self.exceeding += next.exceeding;
        self.mismatches += next.mismatches;
        self.from_zero += next.from_zero;
        self.sign_or_overflow += next.sign_or_overflow;
        self.error += next.error;
        self.reference += next.reference;
        self.captured += next.captured;
        self.dot += next.dot;
        self.max_abs = self.max_abs.max(next.max_abs);
        self.beyond = self.beyond.max(next.beyond);
        self.slope.iter_mut().zip(next.slope).for_each(|(sum, of)| *sum += of);
        self.allowed.join(&next.allowed);
        self.spots[0].keep(next.spots[0]);
        self.spots[1].keep(next.spots[1]);
        self.spots[2].keep_larger(next.spots[2], |spot| spot.score);
        self.measured[0].keep(next.measured[0]);
        self.measured[1].keep_larger(next.measured[1], Spot::error);
        self.measured[2].keep_larger(next.measured[2], Spot::relative);
        self.scores.iter_mut().zip(next.scores).for_each(|(sum, of)| *sum += of);
        self.ulps.iter_mut().zip(next.ulps).for_each(|(sum, of)| *sum += of);
    }

    /// What other tools count of an element, too.
    fn measure(&mut self, column: usize, element: Element, format: Format) -> Spot {
        let Element { captured, reference, allowed } = element;
        let error = (captured - reference).abs();
        let score = if error == 0.0 { 0.0 } else { error / allowed.total().sqrt() };
        let spot = Spot { column: column as i64, captured, reference, score };
        let (bits, wanted) = (format.round(captured), format.round(reference));
        match format.distance(bits, wanted) {
            Some(distance) => self.ulps[bucket(distance)] += 1,
            None => self.sign_or_overflow += 1,
        }
        if bits != wanted {
            self.mismatches += 1;
            self.measured[0].keep(spot);
        }
        if error.is_finite() && error != 0.0 {
            if !self.measured[1].is_some() || error > self.measured[1].error() {
                self.measured[1] = spot;
            }
            let worst = &mut self.measured[2];
            let before = if worst.is_some() { worst.relative() } else { 0.0 };
            if reference == 0.0 {
                self.from_zero += 1;
            } else if spot.relative() > before {
                *worst = spot;
            }
        }
        spot
    }

    /// A finite element.
    fn add(&mut self, element: Element, spot: Spot, x: f64) {
        let Element { captured, reference, allowed } = element;
        let error = captured - reference;
        self.error += error * error;
        self.reference += reference * reference;
        self.captured += captured * captured;
        self.max_abs = self.max_abs.max(error.abs());
        self.dot += error * reference;
        self.slope[0] += allowed.own * reference * reference;
        self.slope[1] += allowed.row.sqrt() * reference.abs();
        self.slope[2] += allowed.shared.sqrt() * reference.abs();
        self.slope[3] += allowed.certain * reference.abs();
        let reach = allowed.reach(x);
        if !(error.abs() <= reach) {
            self.exceeding += 1;
            self.spots[1].keep(spot);
            self.beyond = self.beyond.max((error / reach).powi(2));
        }
    }

    fn score(&mut self, spot: Spot) {
        self.scores[score_class(spot.score)] += 1;
        if !self.spots[2].is_some() || spot.score > self.spots[2].score {
            self.spots[2] = spot;
        }
    }

    /// What rounding may make of the row.
    pub fn budget(&self) -> Budget {
        Budget::of_sums(&self.allowed)
    }

    /// What other tools count of it, at its place in the tensor, of so many elements.
    pub(super) fn measures(&self, row: u64, elements: u64) -> Measures {
        let [first_mismatch, worst, relative] = &self.measured;
        let max_rel = relative.point(row).map(|at| (at.error() / at.reference.abs(), at));
        Measures {
            elements,
            mismatches: self.mismatches,
            first_mismatch: first_mismatch.point(row),
            worst: worst.point(row),
            max_rel,
            from_zero: self.from_zero,
            ulps: self.ulps.map(u64::from),
            sign_or_overflow: self.sign_or_overflow,
        }
    }
}

impl AllowedSums {
    fn add(&mut self, allowed: &Allowed) {
        let spread = |sums: &mut [f64; 3], variance: f64| {
            sums[0] += variance;
            sums[1] += variance * variance;
            sums[2] = sums[2].max(variance);
        };
        spread(&mut self.own, allowed.own);
        spread(&mut self.many, (allowed.own - allowed.few).max(0.0));
        self.most += allowed.most * allowed.most;
        self.shared += allowed.shared;
        self.certain += allowed.certain * allowed.certain;
        self.row += allowed.row;
    }

    /// Adds those of the next piece.
    fn join(&mut self, next: &AllowedSums) {
        for (sums, of) in [(&mut self.own, &next.own), (&mut self.many, &next.many)] {
            *sums = [sums[0] + of[0], sums[1] + of[1], sums[2].max(of[2])];
        }
        self.most += next.most;
        self.row += next.row;
        self.shared += next.shared;
        self.certain += next.certain;
    }

    /// Of a row's elements.
    #[cfg(test)]
    pub(super) fn of(elements: impl Iterator<Item = Allowed>) -> AllowedSums {
        let mut sums = AllowedSums::default();
        elements.for_each(|allowed| sums.add(&allowed));
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;
    use backtape::dtype::Dtype;

    /// A row of several pieces is what an element after the other says of it: what is counted is
    /// the same, what stands out is the same, and sums differ by their order alone.
    #[test]
    fn a_row_of_several_pieces_is_the_row() {
        let mut draw = Draw::new(7);
        let elements: Vec<Element> = (0..2 * PIECE + 77)
            .map(|at| {
                let reference = if at % 41 == 0 { 0.0 } else { 2.0 * draw.unit() - 1.0 };
                let captured = match at % 1000 {
                    999 => f64::NAN,
                    _ => reference + 3e-3 * (2.0 * draw.unit() - 1.0),
                };
                let allowed = Allowed { own: 1e-8 + 1e-6 * draw.unit(), ..Allowed::default() };
                Element { captured, reference, allowed }
            })
            .collect();
        let format = Format::of(Dtype::F32).unwrap();
        let whole = RowTally::of(elements.iter().copied(), format, &Look::whole(9.0));
        let mut flat = RowTally::NONE;
        for (column, element) in elements.iter().enumerate() {
            flat.look_at(column, *element, format, &Look::whole(9.0));
        }
        let counts = |row: &RowTally| {
            let of = [row.nonfinite, row.exceeding, row.mismatches, row.from_zero];
            (of, row.sign_or_overflow, row.scores, row.ulps, row.spots, row.measured)
        };
        assert_eq!(format!("{:?}", counts(&whole)), format!("{:?}", counts(&flat)));
        assert!(flat.exceeding > 10 && flat.nonfinite == 8, "{flat:?}");
        assert_eq!((whole.max_abs, whole.beyond), (flat.max_abs, flat.beyond));
        let sums = |row: &RowTally| [row.error, row.captured, row.allowed.own[0], row.slope[0]];
        for (found, wanted) in sums(&whole).into_iter().zip(sums(&flat)) {
            assert!((found - wanted).abs() <= 1e-12 * wanted, "{found:e}, not {wanted:e}");
        }
        assert_eq!(RowTally::pieces(elements.len()), 3);
        let pieces: Vec<RowTally> = elements
            .chunks(PIECE)
            .zip((0..).step_by(PIECE))
            .map(|(of, first)| {
                let mut piece = RowTally::NONE;
                for (at, element) in of.iter().enumerate() {
                    piece.look_at(first + at, *element, format, &Look::whole(9.0));
                }
                piece
            })
            .collect();
        let joined = RowTally::joined(&pieces, 3);
        assert_eq!(format!("{joined:?}"), format!("[{whole:?}]"));
    }
}
