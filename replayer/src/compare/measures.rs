//! The measures that people know from other tools, for any two sets of values:
//! largest absolute and relative difference, cosine, ULP histogram, the first
//! and the worst element with both values.
//!
//! They describe and do not judge: none of them knows how much rounding can explain, and with any
//! fixed tolerance nearly all elements pass for every known bug. The verdict comes from
//! [`super::bound`] (docs/decisions/numerics.md).

use serde::{Deserialize, Serialize};

use super::ulp::{BUCKETS, Format, bucket, bucket_name};

/// One element with both values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Row and column.
    pub index: (u64, u64),
    /// The captured value.
    pub captured: f64,
    /// What it is compared with.
    pub reference: f64,
}

/// What is counted and kept while elements are added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    /// Elements compared, finite or not.
    pub elements: u64,
    /// Elements whose bits are not those of the reference, rounded to the
    /// captured dtype.
    pub mismatches: u64,
    /// The first of them.
    pub first_mismatch: Option<Point>,
    /// The element of the largest absolute difference.
    pub worst: Option<Point>,
    /// The largest difference relative to its reference, and where. Elements
    /// whose reference is 0 are apart, in `from_zero`.
    pub max_rel: Option<(f64, Point)>,
    /// Elements that are not 0 where the reference is.
    pub from_zero: u64,
    /// Elements by distance in units in the last place.
    #[serde(with = "crate::parcel::array")]
    pub ulps: [u64; BUCKETS],
    /// Elements of the wrong sign, and finite ones that should be infinite or
    /// the reverse; NaN too.
    pub sign_or_overflow: u64,
}

impl Default for Measures {
    fn default() -> Measures {
        Measures {
            elements: 0,
            mismatches: 0,
            first_mismatch: None,
            worst: None,
            max_rel: None,
            from_zero: 0,
            ulps: [0; BUCKETS],
            sign_or_overflow: 0,
        }
    }
}

impl Measures {
    /// Counts one element that was captured in this format. Without a format, for sums that were
    /// never stored, no distance in bits is counted.
    pub fn add(&mut self, point: Point, format: Option<Format>) {
        self.elements += 1;
        let Point { captured, reference, .. } = point;
        match format {
            Some(format) => {
                let (bits, wanted) = (format.bits(captured), format.round(reference));
                self.count(format.distance(bits, wanted));
                self.mismatch(bits != wanted, point);
            }
            None => self.mismatch(captured != reference, point),
        }
        self.extremes(point);
    }

    #[inline(always)]
    pub(super) fn count(&mut self, distance: Option<u64>) {
        match distance {
            Some(distance) => self.ulps[bucket(distance)] += 1,
            None => self.sign_or_overflow += 1,
        }
    }

    pub(super) fn mismatch(&mut self, differs: bool, point: Point) {
        if differs {
            self.mismatches += 1;
            self.first_mismatch.get_or_insert(point);
        }
    }

    /// Keeps the element if its absolute or relative difference is the largest; differences that
    /// are not finite are ignored.
    pub(super) fn extremes(&mut self, point: Point) {
        let error = point.error();
        if !error.is_finite() || error == 0.0 {
            return;
        }
        if error > self.max_abs() {
            self.worst = Some(point);
        }
        if point.reference == 0.0 {
            self.from_zero += 1;
        } else {
            let relative = error / point.reference.abs();
            if relative > self.max_rel.map_or(0.0, |(most, _)| most) {
                self.max_rel = Some((relative, point));
            }
        }
    }

    /// The largest absolute difference.
    pub fn max_abs(&self) -> f64 {
        self.worst.map_or(0.0, |worst| worst.error())
    }

    /// Adds the counts of later elements.
    pub fn merge(&mut self, other: Measures) {
        self.elements += other.elements;
        self.mismatches += other.mismatches;
        self.first_mismatch = self.first_mismatch.or(other.first_mismatch);
        if other.max_abs() > self.max_abs() {
            self.worst = other.worst;
        }
        let most = self.max_rel.map_or(0.0, |(most, _)| most);
        self.max_rel = other.max_rel.filter(|(theirs, _)| *theirs > most).or(self.max_rel);
        self.from_zero += other.from_zero;
        self.ulps.iter_mut().zip(other.ulps).for_each(|(sum, n)| *sum += n);
        self.sign_or_overflow += other.sign_or_overflow;
    }
}

/// The measures as a report shows them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Largest absolute difference; NaN (in JSON null) where a value is no number.
    pub max_abs: f64,
    /// Largest difference relative to a reference that is not 0.
    pub max_rel: f64,
    /// Where it is.
    pub max_rel_index: Option<(u64, u64)>,
    /// Elements that are not 0 and whose reference is.
    pub from_zero: u64,
    /// Cosine of the angle between the two.
    pub cosine: f64,
    /// Elements whose bits are not those of the rounded reference.
    pub mismatches: u64,
    /// The first of them.
    pub first_mismatch: Option<Point>,
    /// The element of the largest absolute difference.
    pub worst: Option<Point>,
    /// Elements by distance in units in the last place: the name of a bucket, such as `3-4`, and
    /// its count; empty where the values were never stored in a format.
    pub ulps: Vec<(String, u64)>,
    /// Elements of the wrong sign, overflown, or NaN.
    pub sign_or_overflow: u64,
}

impl Measures {
    /// The measures for a report. With `nonfinite` values that are not finite, no largest
    /// difference is known, and NaN stands in its place.
    pub fn summary(&self, cosine: f64, nonfinite: u64) -> Summary {
        let known = |size: f64| if nonfinite > 0 { f64::NAN } else { size };
        let last = self.ulps.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
        let ulps = self.ulps[..last].iter().enumerate();
        Summary {
            max_abs: known(self.max_abs()),
            max_rel: known(self.max_rel.map_or(0.0, |(most, _)| most)),
            max_rel_index: self.max_rel.map(|(_, point)| point.index),
            from_zero: self.from_zero,
            cosine,
            mismatches: self.mismatches,
            first_mismatch: self.first_mismatch,
            worst: self.worst,
            ulps: ulps.map(|(bucket, &n)| (bucket_name(bucket), n)).collect(),
            sign_or_overflow: self.sign_or_overflow,
        }
    }
}

impl Point {
    /// The absolute difference.
    pub fn error(&self) -> f64 {
        (self.captured - self.reference).abs()
    }
}

/// Sums of squares and products of finite elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Energies {
    /// Sum of squared differences.
    pub error: f64,
    /// Sum of squared captured values.
    pub captured: f64,
    /// Sum of squared reference values.
    pub reference: f64,
    /// Sum of captured times reference values.
    pub dot: f64,
}

impl Energies {
    /// Adds one element.
    pub fn add(&mut self, captured: f64, reference: f64) {
        let error = captured - reference;
        self.error += error * error;
        self.captured += captured * captured;
        self.reference += reference * reference;
        self.dot += captured * reference;
    }

    /// Adds the sums of other elements.
    pub fn merge(&mut self, other: &Energies) {
        self.error += other.error;
        self.captured += other.captured;
        self.reference += other.reference;
        self.dot += other.dot;
    }

    /// Cosine of the angle between the two; 1 where both are zero.
    pub fn cosine(&self) -> f64 {
        cosine(self.dot, self.captured, self.reference)
    }
}

/// Cosine from a dot product and two sums of squares; 1 where both are zero,
/// 0 where one is.
pub fn cosine(dot: f64, captured: f64, reference: f64) -> f64 {
    match captured.sqrt() * reference.sqrt() {
        0.0 if captured == reference => 1.0,
        0.0 => 0.0,
        norms => (dot / norms).clamp(-1.0, 1.0),
    }
}

/// Upper ends of the classes of |score|, an error in allowed standard deviations; the last class
/// has no end.
pub const SCORE_ENDS: [f64; 5] = [1.0, 2.0, 3.0, 4.0, 6.0];

/// The share of a normal distribution in each class of |score|.
pub const NORMAL_SHARES: [f64; 6] = [
    0.682_689_492_137_085_9,
    0.271_810_243_966_555_73,
    0.042_800_467_833_098_245,
    0.002_636_453_579_593_951_4,
    6.334_051_049_094_986e-5,
    1.973_175_290_075_402_4e-9,
];

/// The class of a score. NaN counts in the last class.
pub fn score_class(score: f64) -> usize {
    SCORE_ENDS.iter().position(|&end| score < end).unwrap_or(SCORE_ENDS.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use backtape::dtype::Dtype;

    fn of(pairs: &[(f64, f64)], dtype: Dtype) -> Measures {
        let mut measures = Measures::default();
        for (i, &(captured, reference)) in pairs.iter().enumerate() {
            measures.add(Point { index: (i as u64, 0), captured, reference }, Format::of(dtype));
        }
        measures
    }

    #[test]
    fn an_element_that_is_the_rounded_reference_does_not_count_as_a_mismatch() {
        let third = 1.0 / 3.0;
        let measures = of(&[(half::bf16::from_f64(third).to_f64(), third)], Dtype::Bf16);
        assert_eq!((measures.mismatches, measures.ulps[0]), (0, 1));
        assert!(measures.max_abs() > 0.0);
    }

    #[test]
    fn the_first_and_the_worst_are_named_with_both_values_and_zero_references_are_apart() {
        let measures =
            of(&[(1.0, 1.0), (1e-9, 0.0), (2.0, 4.0), (9.0, 10.0), (2.5, 2.0)], Dtype::F32);
        assert_eq!(measures.first_mismatch.unwrap().index.0, 1);
        assert_eq!(measures.worst.unwrap().index.0, 2);
        let (most, point) = measures.max_rel.unwrap();
        assert_eq!((most, point.index.0, measures.from_zero), (0.5, 2, 1));
    }

    #[test]
    fn a_wrong_sign_and_an_overflow_have_a_bucket_of_their_own() {
        let measures = of(
            &[(1.0, -1.0), (f64::INFINITY, 1.0), (f64::NAN, 1.0), (0.0, -0.0), (1e39, 1e39)],
            Dtype::F32,
        );
        assert_eq!((measures.sign_or_overflow, measures.ulps[0]), (3, 2));
        assert_eq!(measures.elements, 5);
    }

    #[test]
    fn the_shares_of_a_normal_are_those_of_its_distribution() {
        assert!((NORMAL_SHARES.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let tail = |x: f64| libm::erfc(x / 2f64.sqrt());
        let mut from = 0.0;
        for (&end, share) in SCORE_ENDS.iter().zip(NORMAL_SHARES) {
            assert!((tail(from) - tail(end) - share).abs() < 1e-12, "{end}");
            from = end;
        }
        assert!((tail(6.0) / NORMAL_SHARES[5] - 1.0).abs() < 1e-6);
        let classes = [0.0, 0.99, 1.0, 3.5, 5.9, 6.0, f64::NAN].map(score_class);
        assert_eq!(classes, [0, 0, 1, 3, 4, 5, 5]);
    }

    #[test]
    fn the_order_of_merging_keeps_the_first_and_the_worst() {
        let pairs: Vec<(f64, f64)> =
            (0..40).map(|i| (f64::from(i % 7), f64::from(i % 5))).collect();
        let whole = of(&pairs, Dtype::F64);
        let mut parts = Measures::default();
        for (chunk_index, chunk) in pairs.chunks(6).enumerate() {
            let mut part = Measures::default();
            for (i, &(captured, reference)) in chunk.iter().enumerate() {
                let index = ((chunk_index * 6 + i) as u64, 0);
                part.add(Point { index, captured, reference }, Format::of(Dtype::F64));
            }
            parts.merge(part);
        }
        assert_eq!(parts, whole);
    }
}
