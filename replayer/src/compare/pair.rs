//! Compares two byte slices of one dtype, element by element: every measure in one pass, at the
//! speed of memory.
//!
//! The bytes are row-major, with any alignment, as in a mapped file. A block of `BLOCK` elements is
//! widened to f64 in the first-level cache, where the sums are taken in `LANES` independent chains.
//! The elements of a block are searched one by one for the largest differences only if the block
//! holds a larger one than the blocks before. The order of every sum is fixed by the block, so that
//! results depend neither on the thread count nor on how the bytes were cut on disk.

use backtape::dtype::Dtype;
use half::f16;

use super::measures::{Energies, Measures, Point, Summary};
use super::ulp::Format;

/// Elements widened at a time.
const BLOCK: usize = 1024;
/// Independent chains of sums.
const LANES: usize = 4;

/// The result of comparing two sets of values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compared {
    /// Counts and extremes of the elements.
    pub measures: Measures,
    /// Sums over finite elements.
    pub energies: Energies,
    /// Elements that are NaN in one of the two, or infinite in one alone.
    pub nonfinite: u64,
    /// The first of them.
    pub first_nonfinite: Option<Point>,
}

/// Where the first element of the bytes lies in its tensor.
#[derive(Clone, Copy, Debug)]
pub struct FirstElement {
    /// Row-major index.
    pub start: u64,
    /// Elements of a row.
    pub columns: u64,
}

impl FirstElement {
    fn point(self, offset: usize, captured: f64, reference: f64) -> Point {
        let (flat, columns) = (self.start + offset as u64, self.columns.max(1));
        Point { index: (flat / columns, flat % columns), captured, reference }
    }

    fn later(self, offset: usize) -> FirstElement {
        FirstElement { start: self.start + offset as u64, ..self }
    }
}

impl Compared {
    /// Relative difference in the Frobenius norm; NaN where a value is not finite.
    pub fn difference(&self) -> f64 {
        match self.nonfinite {
            0 => super::tally::relative(self.energies.error, self.energies.reference),
            _ => f64::NAN,
        }
    }

    /// The measures for a report.
    pub fn summary(&self) -> Summary {
        let cosine = if self.nonfinite > 0 { f64::NAN } else { self.energies.cosine() };
        self.measures.summary(cosine, self.nonfinite)
    }

    /// Adds the comparison of later elements.
    pub fn merge(&mut self, other: Compared) {
        self.measures.merge(other.measures);
        self.energies.merge(&other.energies);
        self.nonfinite += other.nonfinite;
        self.first_nonfinite = self.first_nonfinite.or(other.first_nonfinite);
    }

    /// Adds one element, given in f64, with the format that both sides are stored in.
    pub fn add(&mut self, point: Point, format: Option<Format>) {
        self.measures.add(point, format);
        self.finite(point);
    }

    fn finite(&mut self, point: Point) {
        let Point { captured, reference, .. } = point;
        if captured.is_finite() && reference.is_finite() {
            self.energies.add(captured, reference);
        } else if captured != reference {
            self.nonfinite += 1;
            self.first_nonfinite.get_or_insert(point);
        }
    }
}

/// Compares bytes of one dtype and of equal length.
pub fn compare(dtype: Dtype, captured: &[u8], reference: &[u8], place: FirstElement) -> Compared {
    assert_eq!(captured.len(), reference.len(), "both sides hold the same elements");
    match dtype {
        Dtype::Bf16 => blocks::<Bf16>(captured, reference, place),
        Dtype::F16 => blocks::<F16>(captured, reference, place),
        Dtype::F32 => blocks::<f32>(captured, reference, place),
        Dtype::F64 => blocks::<f64>(captured, reference, place),
        Dtype::F8E4m3 => blocks::<E4m3>(captured, reference, place),
        Dtype::F8E5m2 => blocks::<E5m2>(captured, reference, place),
        Dtype::Bool | Dtype::U8 => blocks::<u8>(captured, reference, place),
        Dtype::I8 => blocks::<i8>(captured, reference, place),
        Dtype::U16 => blocks::<u16>(captured, reference, place),
        Dtype::I16 => blocks::<i16>(captured, reference, place),
        Dtype::U32 => blocks::<u32>(captured, reference, place),
        Dtype::I32 => blocks::<i32>(captured, reference, place),
        Dtype::U64 => blocks::<u64>(captured, reference, place),
        Dtype::I64 => blocks::<i64>(captured, reference, place),
    }
}

/// Appends the elements of `bytes` as f64; integers above 2⁵³ lose their last digits.
pub fn widen(dtype: Dtype, bytes: &[u8], values: &mut Vec<f64>) {
    match dtype {
        Dtype::Bf16 => values.extend(elements::<Bf16>(bytes).map(Element::value)),
        Dtype::F16 => values.extend(elements::<F16>(bytes).map(Element::value)),
        Dtype::F32 => values.extend(elements::<f32>(bytes).map(Element::value)),
        Dtype::F64 => values.extend(elements::<f64>(bytes).map(Element::value)),
        Dtype::F8E4m3 => values.extend(elements::<E4m3>(bytes).map(Element::value)),
        Dtype::F8E5m2 => values.extend(elements::<E5m2>(bytes).map(Element::value)),
        Dtype::Bool | Dtype::U8 => values.extend(elements::<u8>(bytes).map(Element::value)),
        Dtype::I8 => values.extend(elements::<i8>(bytes).map(Element::value)),
        Dtype::U16 => values.extend(elements::<u16>(bytes).map(Element::value)),
        Dtype::I16 => values.extend(elements::<i16>(bytes).map(Element::value)),
        Dtype::U32 => values.extend(elements::<u32>(bytes).map(Element::value)),
        Dtype::I32 => values.extend(elements::<i32>(bytes).map(Element::value)),
        Dtype::U64 => values.extend(elements::<u64>(bytes).map(Element::value)),
        Dtype::I64 => values.extend(elements::<i64>(bytes).map(Element::value)),
    }
}

fn blocks<E: Element>(captured: &[u8], reference: &[u8], place: FirstElement) -> Compared {
    let mut compared = Compared::default();
    let bytes = BLOCK * size_of::<E>();
    let pairs = captured.chunks(bytes).zip(reference.chunks(bytes));
    for (index, (ours, theirs)) in pairs.enumerate() {
        block::<E>(&mut compared, ours, theirs, place.later(index * BLOCK));
    }
    compared
}

fn block<E: Element>(compared: &mut Compared, ours: &[u8], theirs: &[u8], place: FirstElement) {
    let (mut x, mut y) = ([0.0; BLOCK], [0.0; BLOCK]);
    let count = ours.len() / size_of::<E>();
    x.iter_mut().zip(elements::<E>(ours)).for_each(|(x, e)| *x = e.value());
    y.iter_mut().zip(elements::<E>(theirs)).for_each(|(y, e)| *y = e.value());
    let sums = sums(&x, &y);
    if !(sums.energies.error.is_finite() && sums.largest.is_finite()) {
        return one_by_one::<E>(compared, ours, theirs, place);
    }
    compared.energies.merge(&sums.energies);
    compared.measures.elements += count as u64;
    if ours == theirs {
        compared.measures.ulps[0] += count as u64;
        return;
    }
    compared.measures.from_zero += sums.from_zero;
    let known = compared.measures.max_rel.map_or(0.0, |(most, _)| most);
    if sums.largest > compared.measures.max_abs() || any_relative_above(&x, &y, known) {
        let from_zero = compared.measures.from_zero;
        for i in 0..count {
            compared.measures.extremes(place.point(i, x[i], y[i]));
        }
        compared.measures.from_zero = from_zero;
    }
    let mut differ = 0;
    for (a, b) in elements::<E>(ours).zip(elements::<E>(theirs)) {
        differ += u64::from(a.differs(b));
        compared.measures.count(a.distance(b));
    }
    if compared.measures.first_mismatch.is_none() {
        let pairs = elements::<E>(ours).zip(elements::<E>(theirs));
        let first = pairs.enumerate().find(|(_, (a, b))| a.differs(*b));
        compared.measures.first_mismatch = first.map(|(i, _)| place.point(i, x[i], y[i]));
    }
    compared.measures.mismatches += differ;
}

/// Compares a block with elements that are not finite, or whose squares overflow, one element after
/// the other.
#[cold]
fn one_by_one<E: Element>(
    compared: &mut Compared,
    ours: &[u8],
    theirs: &[u8],
    place: FirstElement,
) {
    for (i, (a, b)) in elements::<E>(ours).zip(elements::<E>(theirs)).enumerate() {
        let point = place.point(i, a.value(), b.value());
        compared.measures.elements += 1;
        compared.measures.count(a.distance(b));
        compared.measures.mismatch(a.differs(b), point);
        compared.measures.extremes(point);
        compared.finite(point);
    }
}

struct Sums {
    energies: Energies,
    largest: f64,
    from_zero: u64,
}

/// The sums of a block. A block that is not full is padded with 0 on both sides, which adds
/// nothing.
#[inline(always)]
fn sums(x: &[f64; BLOCK], y: &[f64; BLOCK]) -> Sums {
    let zero = [0.0f64; LANES];
    let (mut error, mut captured, mut reference, mut dot) = (zero, zero, zero, zero);
    let (mut largest, mut from_zero) = (zero, [0u64; LANES]);
    for (x, y) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
        for lane in 0..LANES {
            let (x, y) = (x[lane], y[lane]);
            let apart = x - y;
            error[lane] += apart * apart;
            captured[lane] += x * x;
            reference[lane] += y * y;
            dot[lane] += x * y;
            let size = apart.abs();
            largest[lane] = if size > largest[lane] { size } else { largest[lane] };
            from_zero[lane] += u64::from((y == 0.0) & (x != 0.0));
        }
    }
    let sum = |lanes: [f64; LANES]| lanes.iter().sum::<f64>();
    Sums {
        energies: Energies {
            error: sum(error),
            captured: sum(captured),
            reference: sum(reference),
            dot: sum(dot),
        },
        largest: largest.into_iter().fold(0.0, f64::max),
        from_zero: from_zero.iter().sum(),
    }
}

/// Whether some relative difference is larger than `known`.
#[inline(always)]
fn any_relative_above(x: &[f64; BLOCK], y: &[f64; BLOCK], known: f64) -> bool {
    let mut any = [false; LANES];
    for (x, y) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
        for lane in 0..LANES {
            let size = y[lane].abs();
            any[lane] |= ((x[lane] - y[lane]).abs() > known * size) & (size > 0.0);
        }
    }
    any.iter().any(|&above| above)
}

/// A number as it is stored in a file.
trait Element: Copy {
    fn read(bytes: &[u8]) -> Self;
    fn value(self) -> f64;
    fn differs(self, other: Self) -> bool;
    fn distance(self, other: Self) -> Option<u64>;
}

fn elements<E: Element>(bytes: &[u8]) -> impl Iterator<Item = E> {
    bytes.chunks_exact(size_of::<E>()).map(E::read)
}

macro_rules! integers {
    ($($type:ty)*) => { $(
        impl Element for $type {
            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("chunks of this width"))
            }
            #[inline(always)]
            fn value(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn differs(self, other: Self) -> bool {
                self != other
            }
            #[inline(always)]
            fn distance(self, other: Self) -> Option<u64> {
                #[allow(clippy::unnecessary_cast)]
                Some(self.abs_diff(other) as u64)
            }
        }
    )* };
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);

#[derive(Clone, Copy)]
struct Bf16(u16);
#[derive(Clone, Copy)]
struct F16(u16);
#[derive(Clone, Copy)]
struct E5m2(u8);
#[derive(Clone, Copy)]
struct E4m3(u8);

macro_rules! floats {
    ($($type:ty, $bits:ty, $read:expr, $to_bits:expr, $dtype:expr, $value:expr;)*) => { $(
        impl Element for $type {
            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                $read(<$bits>::from_le_bytes(bytes.try_into().expect("chunks of this width")))
            }
            #[inline(always)]
            fn value(self) -> f64 {
                $value(self)
            }
            #[inline(always)]
            fn differs(self, other: Self) -> bool {
                $to_bits(self) != $to_bits(other)
            }
            #[inline(always)]
            fn distance(self, other: Self) -> Option<u64> {
                const { Format::stored($dtype) }.distance($to_bits(self).into(), $to_bits(other).into())
            }
        }
    )* };
}

floats! {
    Bf16, u16, Bf16, (|x: Bf16| x.0), Dtype::Bf16, (|x: Bf16| f32::from_bits(u32::from(x.0) << 16).into());
    F16, u16, F16, (|x: F16| x.0), Dtype::F16, (|x: F16| f16::from_bits(x.0).to_f64());
    E5m2, u8, E5m2, (|x: E5m2| x.0), Dtype::F8E5m2, (|x: E5m2| f16::from_bits(u16::from(x.0) << 8).to_f64());
    E4m3, u8, E4m3, (|x: E4m3| x.0), Dtype::F8E4m3, (|x: E4m3| e4m3(x.0));
    f32, u32, f32::from_bits, f32::to_bits, Dtype::F32, f64::from;
    f64, u64, f64::from_bits, f64::to_bits, Dtype::F64, (|x: f64| x);
}

/// The value of e4m3 bits: four bits of exponent, three of fraction, no infinity, one NaN of each
/// sign.
fn e4m3(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => fraction * f64::powi(2.0, -9),
        _ => (8.0 + fraction) * f64::powi(2.0, exponent - 10),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: FirstElement = FirstElement { start: 70, columns: 7 };

    fn bytes(dtype: Dtype, count: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut out = Vec::new();
        for i in 0..count {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(97);
            let x = (state >> 40) as f64 / f64::from(1 << 20) - 8.0;
            let x = if i % 50 == 7 { 0.0 } else { x };
            match dtype {
                Dtype::Bf16 => out.extend(half::bf16::from_f64(x).to_le_bytes()),
                Dtype::F16 => out.extend(f16::from_f64(x).to_le_bytes()),
                Dtype::F64 => out.extend(x.to_le_bytes()),
                _ => out.extend((x as f32).to_le_bytes()),
            }
        }
        out
    }

    /// Goal: comparing by blocks gives the same result as comparing element by element. Method: the
    /// latter is `Measures::add` on widened values.
    #[test]
    fn blocks_find_what_a_plain_loop_finds() {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F64] {
            for count in [1, 5, 1023, 1024, 5000] {
                let (ours, mut theirs) = (bytes(dtype, count, 1), bytes(dtype, count, 1));
                let other = bytes(dtype, count, 2);
                let changed = theirs.chunks_mut(dtype.width()).zip(other.chunks(dtype.width()));
                let some = changed.enumerate().filter(|(i, _)| i % 3 == 1);
                some.for_each(|(_, (to, from))| to.copy_from_slice(from));
                let fast = compare(dtype, &ours, &theirs, AT);
                let (mut x, mut y) = (Vec::new(), Vec::new());
                widen(dtype, &ours, &mut x);
                widen(dtype, &theirs, &mut y);
                let mut plain = Compared::default();
                for i in 0..count {
                    plain.add(AT.point(i, x[i], y[i]), Format::of(dtype));
                }
                assert_eq!(fast.measures, plain.measures, "{dtype} {count}");
                let apart = fast.energies.error / plain.energies.error.max(1e-300) - 1.0;
                assert!(plain.energies.error == 0.0 || apart.abs() < 1e-12);
                assert!((fast.energies.cosine() - plain.energies.cosine()).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_counted_and_equal_infinities_are_equal() {
        let x = [1.0f32, f32::NAN, f32::INFINITY, f32::INFINITY, 2.0, f32::NAN];
        let y = [1.0f32, 1.0, f32::INFINITY, 3.0, 2.5, f32::NAN];
        let raw = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let compared = compare(Dtype::F32, &raw(&x), &raw(&y), AT);
        assert_eq!((compared.nonfinite, compared.measures.mismatches), (3, 3));
        assert_eq!(compared.first_nonfinite.unwrap().index, (10, 1));
        assert_eq!(compared.energies.error, 0.25);
        assert_eq!(compared.measures.worst.unwrap().index, (10, 4));
    }

    #[test]
    fn every_eight_bit_float_has_its_value_and_its_neighbour_is_one_apart() {
        assert_eq!((e4m3(0x7e), e4m3(0x01), e4m3(0x38)), (448.0, f64::powi(2.0, -9), 1.0));
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        for bits in 0..0x7e {
            assert!(e4m3(bits + 1) > e4m3(bits));
            assert_eq!(E4m3(bits).distance(E4m3(bits + 1)), Some(1));
        }
        assert_eq!(E5m2(0x3c).value(), 1.0);
        assert_eq!(E5m2(0x7b).distance(E5m2(0x7c)), None);
        assert_eq!(E4m3(0x7f).distance(E4m3(0x7e)), None);
    }
}
