//! What is known of one row of a comparison after each of its elements was compared, from the left.
//!
//! The struct is plain memory: `device/kernels/compare.cu` fills the same struct with the same
//! bits, so a report does not depend on whether the CPU or a GPU compared a row.

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

    fn keep(&mut self, spot: Spot) {
        if !self.is_some() {
            *self = spot;
        }
    }

    /// Replaces the element by a later one if there was none before, or if the later one is larger.
    fn keep_larger(&mut self, spot: Spot, size: fn(&Spot) -> f64) {
        if spot.is_some() && (!self.is_some() || size(&spot) > size(self)) {
            *self = spot;
        }
    }

    fn error(&self) -> f64 {
        (self.captured - self.reference).abs()
    }

    fn relative(&self) -> f64 {
        self.error() / self.reference.abs()
    }

    /// The element with its place in the tensor, if there is one.
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

/// Counts and sums of a row; over its finite elements unless a field says `all`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowTally {
    /// Elements that are not finite, or whose reference is not.
    pub nonfinite: u64,
    /// Elements above their bound.
    pub exceeding: u64,
    /// Over all elements: those whose bits are not those of the rounded reference.
    pub mismatches: u64,
    /// Those that are not 0 where the reference is.
    pub from_zero: u64,
    /// Over all elements: those of the wrong sign, overflown, or NaN.
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
    /// For the bound of the slope: sums of `own ref²`, `√row |ref|`, `√shared |ref|` and `certain
    /// |ref|`, with the fields of `Allowed`.
    pub slope: [f64; 4],
    /// Over all elements: sums of their allowed errors.
    pub allowed: AllowedSums,
    /// The first element that is not finite, the first above its bound, the one of the largest
    /// score.
    pub spots: [Spot; 3],
    /// Over all elements: the first whose bits differ, the one of the largest absolute difference,
    /// and the one of the largest relative difference.
    pub measured: [Spot; 3],
    /// Elements by |error| in allowed standard deviations.
    pub scores: [u32; 6],
    /// All elements by distance in units in the last place.
    pub ulps: [u32; BUCKETS],
}

/// Sums over a row of the fields of `Allowed`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct AllowedSums {
    /// `own`: sum, sum of squares, largest.
    pub own: [f64; 3],
    /// `own - few`, the same three.
    pub many: [f64; 3],
    /// Sum of `most²`.
    pub most: f64,
    /// Sum of `row`; below, of `shared` and of `certain²`.
    pub row: f64,
    /// See `row`.
    pub shared: f64,
    /// See `row`.
    pub certain: f64,
}

// SAFETY: every field is a number or an array of numbers, for which all zero bits are valid.
unsafe impl bytemuck::Zeroable for RowTally {}
// SAFETY: `repr(C)`, numbers of 8 bytes and then an even count of 4: no padding.
unsafe impl bytemuck::Pod for RowTally {}

const _: () = assert!((BUCKETS + 6).is_multiple_of(2), "no padding at the end of a row");

/// Columns of one piece of a row. A GPU compares each piece in a thread of its own, and the row is
/// the sum of its pieces, from the left. Rows of dq and dk usually have one piece.
pub const PIECE: usize = 4096;

/// An element to compare, and its allowed error.
#[derive(Clone, Copy, Debug)]
pub struct Element {
    /// The value in the dump.
    pub captured: f64,
    /// The value recomputed in f64.
    pub reference: f64,
    /// The error that rounding may make in it.
    pub allowed: Allowed,
}

/// How an element is compared, a part of [`Bound`].
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
    /// The part of a bound that a row needs.
    pub fn of(bound: &Bound) -> Look {
        let Bound { element, nan_is_meant, measured, .. } = *bound;
        Look { bound: element, nan_is_meant, measured }
    }

    /// Everything is computed, at this exponent of an element's bound.
    pub fn whole(bound: f64) -> Look {
        Look { bound, nan_is_meant: false, measured: true }
    }
}

impl RowTally {
    pub(super) const NONE: RowTally = RowTally {
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

    /// Compares a row's elements, which are stored in this format.
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

    /// Joins pieces to rows: each row is the next `of_row` pieces, from the left.
    pub fn joined(pieces: &[RowTally], of_row: usize) -> Vec<RowTally> {
        let row = |pieces: &[RowTally]| {
            let mut row = RowTally::NONE;
            pieces.iter().for_each(|piece| row.join(piece));
            row
        };
        pieces.chunks(of_row.max(1)).map(row).collect()
    }

    /// How many pieces a row of so many columns has.
    pub fn pieces(columns: usize) -> usize {
        columns.div_ceil(PIECE).max(1)
    }

    /// Compares one element.
    pub(super) fn look_at(&mut self, column: usize, element: Element, format: Format, look: &Look) {
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
        self.slope.iter_mut().zip(next.slope).for_each(|(sum, value)| *sum += value);
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

    /// Counts the element in the measures that other tools have too, and returns it with its score.
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

    /// Adds a finite element to the sums, and tests its error against its bound at the exponent
    /// `x`.
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

    /// Keeps a finite element if its score is the largest so far.
    pub(super) fn rank(&mut self, column: usize, element: Element) {
        let Element { captured, reference, allowed } = element;
        if !(captured.is_finite() && reference.is_finite()) {
            return;
        }
        let error = (captured - reference).abs();
        let score = if error == 0.0 { 0.0 } else { error / allowed.total().sqrt() };
        self.keep_best(Spot { column: column as i64, captured, reference, score });
    }

    fn score(&mut self, spot: Spot) {
        self.scores[score_class(spot.score)] += 1;
        self.keep_best(spot);
    }

    fn keep_best(&mut self, spot: Spot) {
        if !self.spots[2].is_some() || spot.score > self.spots[2].score {
            self.spots[2] = spot;
        }
    }

    /// The row's allowed variances, from which its energy is bounded.
    pub fn budget(&self) -> Budget {
        Budget::of_sums(&self.allowed)
    }

    /// The measures that other tools have too, for row `row` of the tensor, which has so many
    /// elements.
    pub(super) fn measures(&self, row: u64, elements: u64) -> Measures {
        let [first_mismatch, worst, relative] = &self.measured;
        let max_rel =
            relative.point(row).map(|point| (point.error() / point.reference.abs(), point));
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

    /// Adds the sums of the next piece.
    fn join(&mut self, next: &AllowedSums) {
        for (sums, more) in [(&mut self.own, &next.own), (&mut self.many, &next.many)] {
            *sums = [sums[0] + more[0], sums[1] + more[1], sums[2].max(more[2])];
        }
        self.most += next.most;
        self.row += next.row;
        self.shared += next.shared;
        self.certain += next.certain;
    }

    /// The sums over a row's elements.
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

    /// A row that is compared in several pieces equals one that is compared element by element:
    /// counts and kept elements are the same, and sums differ only by their order.
    #[test]
    fn a_row_of_several_pieces_is_the_row() {
        let mut draw = Draw::new(7);
        let elements: Vec<Element> = (0..2 * PIECE + 77)
            .map(|index| {
                let reference = if index % 41 == 0 { 0.0 } else { 2.0 * draw.unit() - 1.0 };
                let captured = match index % 1000 {
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
            let counts = [row.nonfinite, row.exceeding, row.mismatches, row.from_zero];
            (counts, row.sign_or_overflow, row.scores, row.ulps, row.spots, row.measured)
        };
        assert_eq!(format!("{:?}", counts(&whole)), format!("{:?}", counts(&flat)));
        assert!(flat.exceeding > 10 && flat.nonfinite == 8, "{flat:?}");
        assert_eq!((whole.max_abs, whole.beyond), (flat.max_abs, flat.beyond));
        let sums = |row: &RowTally| [row.error, row.captured, row.allowed.own[0], row.slope[0]];
        for (sum, wanted) in sums(&whole).into_iter().zip(sums(&flat)) {
            assert!((sum - wanted).abs() <= 1e-12 * wanted, "{sum:e}, not {wanted:e}");
        }
        assert_eq!(RowTally::pieces(elements.len()), 3);
        let pieces: Vec<RowTally> = elements
            .chunks(PIECE)
            .zip((0..).step_by(PIECE))
            .map(|(elements, first)| {
                let mut piece = RowTally::NONE;
                for (index, element) in elements.iter().enumerate() {
                    piece.look_at(first + index, *element, format, &Look::whole(9.0));
                }
                piece
            })
            .collect();
        let joined = RowTally::joined(&pieces, 3);
        assert_eq!(format!("{joined:?}"), format!("[{whole:?}]"));
    }
}
