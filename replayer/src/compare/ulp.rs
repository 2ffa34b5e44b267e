//! Distances in units in the last place (ulp): how many steps between neighbouring numbers of a
//! dtype lie between two values.
//!
//! Floats of one dtype and sign are in the order of their bits: the distance is a difference of
//! integers, exact for every dtype and size, subnormals included. -0 counts as +0. Values of
//! different sign have no useful distance: 1e-30 and -1e-30 are 2·10⁹ f32 numbers apart, and what
//! matters is that the sign is wrong. Such pairs are counted separately.

use backtape::dtype::Dtype;

use crate::kernels::matrix::Values;

/// Buckets of a histogram of distances: 0, 1, 2, 3-4, 5-8, ... up to 2⁶³ and more.
pub const BUCKETS: usize = 66;

/// The bucket of a distance.
#[inline(always)]
pub fn bucket(distance: u64) -> usize {
    match distance {
        0 => 0,
        d => 1 + (u64::BITS - (d - 1).leading_zeros()) as usize,
    }
}

/// The distances that a bucket holds, in words: `3-4`.
pub fn bucket_name(bucket: usize) -> String {
    match bucket {
        0 => "0".into(),
        1 => "1".into(),
        2 => "2".into(),
        b => format!("{}-{}", (1u128 << (b - 2)) + 1, 1u128 << (b - 1)),
    }
}

/// A binary format: bits of the exponent and of the fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    exponent: u32,
    fraction: u32,
    /// The smallest bits of a magnitude that is not a finite number.
    beyond: u64,
}

impl Format {
    /// The format of a dtype, if a reference can be rounded to it. `None` for integers and for the
    /// 8-bit floats: what a value that overflows e4m3, which has no infinity, becomes depends on
    /// the framework.
    pub fn of(dtype: Dtype) -> Option<Format> {
        let wide = matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32 | Dtype::F64);
        wide.then(|| Format::stored(dtype))
    }

    /// The format that the elements of a matrix are stored in.
    pub fn of_values(values: &Values<'_>) -> Format {
        Format::stored(match values {
            Values::Bf16(_) => Dtype::Bf16,
            Values::F16(_) => Dtype::F16,
            Values::F32(_) => Dtype::F32,
            Values::F64(_) => Dtype::F64,
        })
    }

    /// The format of a floating-point dtype as it is stored.
    pub(super) const fn stored(dtype: Dtype) -> Format {
        let (exponent, fraction) = match dtype {
            Dtype::Bf16 => (8, 7),
            Dtype::F16 => (5, 10),
            Dtype::F32 => (8, 23),
            Dtype::F64 => (11, 52),
            Dtype::F8E5m2 => (5, 2),
            // Numbers use the largest exponent too; only all bits set is NaN.
            Dtype::F8E4m3 => return Format { exponent: 4, fraction: 3, beyond: 0x7f },
            _ => panic!("integers have no format"),
        };
        Format { exponent, fraction, beyond: ((1 << exponent) - 1) << fraction }
    }

    #[inline(always)]
    fn sign(self) -> u64 {
        1 << (self.exponent + self.fraction)
    }

    #[inline(always)]
    fn infinity(self) -> u64 {
        self.beyond
    }

    /// The bits of the nearest number of this format, ties to even. The f64 is rounded once:
    /// rounding to f32 first would be wrong where that makes a tie.
    pub fn round(self, x: f64) -> u64 {
        let sign = if x.is_sign_negative() { self.sign() } else { 0 };
        if self.fraction == 52 {
            return x.to_bits();
        }
        let x = x.abs();
        if x.is_nan() {
            return sign | self.infinity() | 1 << (self.fraction - 1);
        }
        if x.is_infinite() {
            return sign | self.infinity();
        }
        let least = 2 - (1i32 << (self.exponent - 1));
        // A subnormal f64 is far below half the least number of any other format.
        let exponent = ((x.to_bits() >> 52) as i32 - 1023).max(least);
        let spacing = exponent - self.fraction as i32;
        // A power of two: exact, and between 2^-971 and 2^149.
        let scaled = x * f64::from_bits(((1023 - spacing) as u64) << 52);
        let steps = scaled.round_ties_even() as u64;
        let above_least = (exponent - least) as u64;
        // A fraction that rounds up to 1 carries into the exponent, which gives the right number.
        sign | (above_least * (1 << self.fraction) + steps).min(self.infinity())
    }

    /// Distance of two numbers, given by their bits. `None` where their signs differ and neither is
    /// 0, where one is NaN, and where one is infinite and the other is not the same infinity.
    #[inline(always)]
    pub fn distance(self, a: u64, b: u64) -> Option<u64> {
        let magnitude = self.sign() - 1;
        let (left, right) = (a & magnitude, b & magnitude);
        let beyond = |bits: u64| bits >= self.infinity();
        if beyond(left) || beyond(right) {
            let infinite = left == self.infinity() && self.exponent != 4;
            return (a == b && infinite).then_some(0);
        }
        match (a ^ b) & self.sign() {
            0 => Some(left.abs_diff(right)),
            _ if left == 0 || right == 0 => Some(left + right),
            _ => None,
        }
    }

    /// The bits of a value that is a number of this format.
    pub fn bits(self, x: f64) -> u64 {
        self.round(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Every finite number of the 16-bit formats, the points half-way between
    /// neighbours, and the points just beside them: against the definition,
    /// which is a search over all numbers of the format.
    #[test]
    fn rounding_is_to_the_nearest_number_and_ties_go_to_the_even_one() {
        let value = |dtype, bits: u16| match dtype {
            Dtype::Bf16 => bf16::from_bits(bits).to_f64(),
            _ => f16::from_bits(bits).to_f64(),
        };
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let format = Format::of(dtype).unwrap();
            for bits in 0..format.infinity() as u16 - 1 {
                let (low, high) = (value(dtype, bits), value(dtype, bits + 1));
                let middle = (low + high) / 2.0;
                let even = if bits % 2 == 0 { bits } else { bits + 1 };
                for (x, wanted) in [
                    (low, bits),
                    (middle, even),
                    (middle.next_down(), bits),
                    (middle.next_up(), bits + 1),
                    (high, bits + 1),
                ] {
                    assert_eq!(format.round(x), u64::from(wanted), "{dtype} {x:e}");
                    let sign = u64::from(wanted) | format.sign();
                    assert_eq!(format.round(-x), sign, "{dtype} -{x:e}");
                }
            }
        }
    }

    #[test]
    fn rounding_to_f32_is_what_the_processor_does() {
        let format = Format::of(Dtype::F32).unwrap();
        let mut state = 1u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            for x in [f64::from_bits(state), f64::from(f32::from_bits((state >> 32) as u32)) * 1.5]
            {
                if !x.is_nan() {
                    assert_eq!(format.round(x), u64::from((x as f32).to_bits()), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn neighbours_are_one_apart_in_every_dtype_and_the_two_zeros_are_none() {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F64] {
            let format = Format::of(dtype).unwrap();
            let (bits_of_one, largest) = (format.round(1.0), format.infinity() - 1);
            let negative = |bits: u64| bits | format.sign();
            assert_eq!(format.distance(bits_of_one, bits_of_one + 1), Some(1), "{dtype}");
            assert_eq!(
                format.distance(negative(bits_of_one + 3), negative(bits_of_one)),
                Some(3),
                "{dtype}"
            );
            assert_eq!(format.distance(0, negative(0)), Some(0), "{dtype}");
            assert_eq!(format.distance(1, negative(0)), Some(1), "{dtype}");
            assert_eq!(format.distance(1, negative(1)), None, "{dtype}");
            assert_eq!(format.distance(largest, format.infinity()), None, "{dtype}");
            assert_eq!(format.distance(format.infinity(), format.infinity()), Some(0), "{dtype}");
            assert_eq!(format.distance(format.infinity() + 1, format.infinity() + 1), None);
        }
    }

    #[test]
    fn buckets_double_and_say_what_they_hold() {
        let buckets: Vec<usize> = (0..10).map(bucket).collect();
        assert_eq!(buckets, [0, 1, 2, 3, 3, 4, 4, 4, 4, 5]);
        let names: Vec<String> = (0..6).map(bucket_name).collect();
        assert_eq!(names, ["0", "1", "2", "3-4", "5-8", "9-16"]);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }
}
