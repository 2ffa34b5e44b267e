//! Rounding of f32 values to the precisions that a policy declares.
//!
//! Integer round-to-nearest-even, bit for bit what the `half` crate does (NaN, inf
//! and subnormals included), in loops that vectorise. A rounded value stays in f32:
//! nothing here packs 16-bit storage.

use half::f16;

/// A floating-point format that some stage rounds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary64. Policies compute in f32, so rounding to it changes nothing.
    F64,
}

impl Precision {
    /// Half the spacing of the format's numbers at 1.
    pub fn unit_roundoff(self) -> f64 {
        let bits = match self {
            Precision::F32 => 24,
            Precision::Bf16 => 8,
            Precision::F16 => 11,
            Precision::F64 => 53,
        };
        f64::powi(2.0, -bits)
    }

    /// Whether rounding an f32 to it leaves every bit as it was.
    pub fn keeps_f32(self) -> bool {
        matches!(self, Precision::F32 | Precision::F64)
    }

    /// The nearest number of the format, ties to even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Precision::F32 | Precision::F64 => value,
            Precision::Bf16 => round_bf16(value),
            Precision::F16 => f16::from_f32(value).to_f32(),
        }
    }

    /// `round` of each element in place.
    pub fn round_slice(self, values: &mut [f32]) {
        match self {
            Precision::F32 | Precision::F64 => {}
            Precision::Bf16 => values.iter_mut().for_each(|value| *value = round_bf16(*value)),
            Precision::F16 => {
                values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32());
            }
        }
    }
}

/// Adds just under half a unit of the kept part, and one more when the kept part is
/// odd: the carry rounds to nearest even, and turns the largest values into inf. NaN
/// is kept apart, since the carry would run through its payload; like `half`, it
/// becomes quiet.
#[inline(always)]
fn round_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    f32::from_bits(if value.is_nan() { quiet } else { rounded } & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    fn same_as_half(value: f32) {
        let wanted = bf16::from_f32(value).to_f32();
        assert_eq!(Precision::Bf16.round(value).to_bits(), wanted.to_bits(), "bf16 of {value:e}");
        let wanted = f16::from_f32(value).to_f32();
        assert_eq!(Precision::F16.round(value).to_bits(), wanted.to_bits(), "f16 of {value:e}");
    }

    /// Every bf16 pattern, with the bit patterns next to it and next to the tie above
    /// it: all the places where a rounding rule can change its mind.
    #[test]
    fn rounding_equals_half_around_every_bf16_and_f16_number_and_tie() {
        for pattern in 0..=u16::MAX {
            let below = u32::from(pattern) << 16;
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                same_as_half(f32::from_bits(below | low));
            }
            let exact = f16::from_bits(pattern).to_f32().to_bits();
            // Ties of f16 lie 2^12 above its normal numbers; subnormal ones elsewhere.
            for near in [0u32, 1, 0x0fff, 0x1000, 0x1001, 0u32.wrapping_sub(1)] {
                same_as_half(f32::from_bits(exact.wrapping_add(near)));
            }
        }
    }

    #[test]
    fn unit_roundoff_is_half_the_spacing_at_one() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let u = precision.unit_roundoff();
            assert_eq!(precision.round((1.0 + 2.0 * u) as f32), (1.0 + 2.0 * u) as f32);
            // A tie goes to the even neighbour, 1; above the tie it goes up.
            assert_eq!(precision.round((1.0 + u) as f32), 1.0);
        }
        assert_eq!(1.0 + Precision::F64.unit_roundoff(), 1.0);
        assert!(1.0 + 1.5 * Precision::F64.unit_roundoff() > 1.0);
    }

    proptest! {
        #[test]
        fn rounding_equals_half_on_any_bits(bits in any::<u32>()) {
            same_as_half(f32::from_bits(bits));
        }

        #[test]
        fn a_slice_rounds_like_its_elements(bits in prop::collection::vec(any::<u32>(), 0..70)) {
            let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            for precision in [Precision::F32, Precision::Bf16, Precision::F16, Precision::F64] {
                let mut rounded = values.clone();
                precision.round_slice(&mut rounded);
                for (slice, &value) in rounded.iter().zip(&values) {
                    prop_assert_eq!(slice.to_bits(), precision.round(value).to_bits());
                }
            }
        }
    }
}
