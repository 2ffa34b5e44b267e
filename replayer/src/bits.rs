//! Reads single elements of any dtype from their bits, without converting the tensor.

use backtape::dtype::Dtype;
use half::{bf16, f16};

/// The kind of value that an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// 0 or -0.
    Zero,
    /// Any other finite number.
    Finite,
    /// An infinity; true for the negative one.
    Infinite(bool),
    /// NaN.
    Nan,
}

/// Exponent and fraction bits of a float dtype; `None` for integers.
pub(crate) fn format(dtype: Dtype) -> Option<(u32, u32)> {
    match dtype {
        Dtype::F8E4m3 => Some((4, 3)),
        Dtype::F8E5m2 => Some((5, 2)),
        Dtype::F16 => Some((5, 10)),
        Dtype::Bf16 => Some((8, 7)),
        Dtype::F32 => Some((8, 23)),
        Dtype::F64 => Some((11, 52)),
        _ => None,
    }
}

/// How many bits of an element are random in unrelated elements of similar size: those of the
/// fraction, or all bits of an integer.
pub(crate) fn random_bits(dtype: Dtype) -> u32 {
    format(dtype).map_or(8 * dtype.width() as u32, |(_, fraction)| fraction)
}

/// The bits of element `index`, in the low end.
///
/// Panics when the element lies beyond `bytes`.
pub(crate) fn bits(bytes: &[u8], width: usize, index: usize) -> u64 {
    let element = &bytes[index * width..(index + 1) * width];
    element.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))
}

/// The kind of an element, from its bits.
pub(crate) fn kind(dtype: Dtype, bits: u64) -> Kind {
    let Some((exponent, fraction)) = format(dtype) else {
        return if bits == 0 { Kind::Zero } else { Kind::Finite };
    };
    let magnitude = bits & !(1 << (exponent + fraction));
    let top = ((1u64 << exponent) - 1) << fraction;
    match magnitude {
        0 => Kind::Zero,
        // e4m3 has no infinity, and one NaN.
        _ if dtype == Dtype::F8E4m3 => {
            if magnitude == 0x7f {
                Kind::Nan
            } else {
                Kind::Finite
            }
        }
        m if m < top => Kind::Finite,
        m if m == top => Kind::Infinite(magnitude != bits),
        _ => Kind::Nan,
    }
}

/// Whether every element is finite, in one vectorised pass. Always false for the 8-bit floats and
/// for integers, whose elements must be examined one by one.
pub(crate) fn all_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    let Some((exponent, fraction)) = format(dtype).filter(|_| dtype.width() > 1) else {
        return false;
    };
    let top = ((1u64 << exponent) - 1) << fraction;
    // The loops do not stop early, so that the compiler can vectorise them.
    match dtype.width() {
        2 => {
            let is_finite = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & top as u16 != top as u16;
            bytes.as_chunks().0.iter().fold(true, |all, bytes| all & is_finite(bytes))
        }
        4 => {
            let is_finite = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) & top as u32 != top as u32;
            bytes.as_chunks().0.iter().fold(true, |all, bytes| all & is_finite(bytes))
        }
        _ => {
            let is_finite = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes) & top != top;
            bytes.as_chunks().0.iter().fold(true, |all, bytes| all & is_finite(bytes))
        }
    }
}

/// The value of an element, from its bits.
pub(crate) fn value(dtype: Dtype, bits: u64) -> f64 {
    match dtype {
        Dtype::Bool | Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => bits as f64,
        Dtype::I8 => f64::from(bits as u8 as i8),
        Dtype::I16 => f64::from(bits as u16 as i16),
        Dtype::I32 => f64::from(bits as u32 as i32),
        Dtype::I64 => bits as i64 as f64,
        // f16 has the exponent of e5m2 and eight more bits of fraction.
        Dtype::F8E5m2 => f16::from_bits((bits as u16) << 8).to_f64(),
        Dtype::F8E4m3 => e4m3(bits as u8),
        Dtype::F16 => f16::from_bits(bits as u16).to_f64(),
        Dtype::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Dtype::F32 => f64::from(f32::from_bits(bits as u32)),
        Dtype::F64 => f64::from_bits(bits),
    }
}

fn e4m3(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => fraction / 8.0 * (-6f64).exp2(),
        _ => (1.0 + fraction / 8.0) * f64::from(exponent - 7).exp2(),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

/// The value of an integer element; `None` for floats and bools, and for values beyond an i64.
pub(crate) fn integer(dtype: Dtype, bits: u64) -> Option<i64> {
    match dtype {
        Dtype::U8 | Dtype::U16 | Dtype::U32 => Some(bits as i64),
        Dtype::U64 => i64::try_from(bits).ok(),
        Dtype::I8 => Some(i64::from(bits as u8 as i8)),
        Dtype::I16 => Some(i64::from(bits as u16 as i16)),
        Dtype::I32 => Some(i64::from(bits as u32 as i32)),
        Dtype::I64 => Some(bits as i64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the classes by bits are those of the values, in every small format.
    #[test]
    fn every_pattern_of_the_small_formats_has_the_kind_of_its_value() {
        for dtype in [Dtype::F8E4m3, Dtype::F8E5m2, Dtype::F16, Dtype::Bf16] {
            for bits in 0..1u64 << (8 * dtype.width()) {
                let value = value(dtype, bits);
                let wanted = match value {
                    x if x.is_nan() => Kind::Nan,
                    x if x.is_infinite() => Kind::Infinite(x < 0.0),
                    0.0 => Kind::Zero,
                    _ => Kind::Finite,
                };
                assert_eq!(kind(dtype, bits), wanted, "{dtype} {bits:#x}");
            }
        }
        assert_eq!(value(Dtype::F8E4m3, 0x7e), 448.0);
        assert_eq!(value(Dtype::F8E4m3, 0x81), -(-9f64).exp2());
    }

    #[test]
    fn elements_are_read_low_byte_first() {
        assert_eq!(bits(&[1, 2, 3, 4], 2, 1), 0x0403);
        assert_eq!(integer(Dtype::I32, 0xffff_ff9c), Some(-100));
    }

    #[test]
    fn one_element_that_is_not_finite_is_seen_wherever_it_is() {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::F64] {
            let (exponent, fraction) = format(dtype).unwrap();
            let top = ((1u64 << exponent) - 1) << fraction;
            let (width, sign) = (dtype.width(), 1u64 << (exponent + fraction));
            let largest = (top - 1) | sign;
            let mut bytes: Vec<u8> =
                (0..50).flat_map(|_| largest.to_le_bytes()[..width].to_vec()).collect();
            assert!(all_finite(dtype, &bytes), "{dtype:?}");
            for (index, bad) in [(0, top), (17, top | sign), (49, top | 1), (31, top | sign | 3)] {
                let before = bytes.clone();
                bytes[index * width..][..width].copy_from_slice(&bad.to_le_bytes()[..width]);
                assert!(!all_finite(dtype, &bytes), "{dtype:?}: {bad:x}");
                bytes = before;
            }
        }
        assert!(!all_finite(Dtype::F8E4m3, &[0]) && !all_finite(Dtype::I32, &[0; 4]));
    }
}
