//! Tests rounding against the `half` crate, and against a search among all numbers of a format.

use super::*;
use half::bf16;
use proptest::prelude::*;

const ALL: [Precision; 7] = [
    Precision::F32,
    Precision::Tf32,
    Precision::Bf16,
    Precision::F16,
    Precision::F8E4m3,
    Precision::F8E5m2,
    Precision::F64,
];

const TABLED: [Precision; 5] =
    [Precision::Tf32, Precision::Bf16, Precision::F16, Precision::F8E4m3, Precision::F8E5m2];

/// Every finite number of a format that is not negative, by its bits.
fn numbers(precision: Precision) -> Vec<f64> {
    let e4m3 = |bits: u32| match (bits >> 3, f64::from(bits & 7)) {
        (0, mantissa) => mantissa * f64::powi(2.0, -9),
        (exponent, mantissa) => (8.0 + mantissa) * f64::powi(2.0, exponent as i32 - 10),
    };
    let value = |bits: u32| match precision {
        Precision::Tf32 => f64::from(f32::from_bits(bits << 13)),
        Precision::Bf16 => f64::from(f32::from_bits(bits << 16)),
        Precision::F16 => f16::from_bits(bits as u16).to_f64(),
        Precision::F8E4m3 => {
            if bits == 0x7f {
                f64::NAN
            } else {
                e4m3(bits)
            }
        }
        Precision::F8E5m2 => f16::from_bits((bits << 8) as u16).to_f64(),
        Precision::F32 | Precision::F64 => unreachable!("too many to list"),
    };
    (0..).map(value).take_while(|value| value.is_finite()).collect()
}

/// The number nearest to `value`, the one of even bits on a tie; above the largest what
/// would be the next number counts as overflow.
fn by_search(precision: Precision, numbers: &[f64], value: f64) -> f64 {
    let overflow = if precision == Precision::F8E4m3 { f64::NAN } else { f64::INFINITY };
    let last = numbers.len() - 1;
    let next = |index: usize| match index == last {
        true => 2.0 * numbers[last] - numbers[last - 1],
        false => numbers[index + 1],
    };
    let size = value.abs();
    let below = numbers.partition_point(|&number| number <= size).saturating_sub(1);
    let tie = (numbers[below] + next(below)) / 2.0;
    let up = size > tie || (size == tie && below % 2 == 1);
    let nearest = match below + usize::from(up) {
        _ if value.is_nan() => f64::NAN,
        index if index > last => overflow,
        index => numbers[index],
    };
    nearest.copysign(value)
}

fn assert_nearest(precision: Precision, numbers: &[f64], value: f64) {
    let wanted = by_search(precision, numbers, value);
    let same = |got: f64| got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan());
    let got = precision.round64(value);
    assert!(same(got), "{precision:?} of {value:e} is {wanted:e}, not {got:e}");
    if f64::from(value as f32) == value {
        assert!(same(precision.round(value as f32).into()), "{precision:?} of {value:e} as f32");
    }
}

/// Each number, each tie, and the f64 and f32 numbers next to them: an f64 just above a
/// tie is where rounding by way of f32 goes wrong.
#[test]
fn rounding_finds_the_nearest_of_all_numbers_and_the_even_one_on_ties() {
    for precision in TABLED {
        let numbers = numbers(precision);
        let largest = numbers[numbers.len() - 1];
        let ties = numbers.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let overflow = [1.0, 1.01, 1.03125, 1.0357142857142858, 1.04, 1.0714285714285714, 1.1, 2.0];
        let beyond = overflow.iter().map(|factor| factor * largest);
        let beyond = beyond.chain([1e39, 1e300, f64::MAX, f64::INFINITY]);
        for value in numbers.iter().copied().chain(ties).chain(beyond) {
            for near in [value, value.next_up(), value.next_down().abs()] {
                assert_nearest(precision, &numbers, near);
                assert_nearest(precision, &numbers, -near);
            }
            assert_nearest(precision, &numbers, (value as f32).next_up().into());
        }
        assert!(precision.round64(f64::NAN).is_nan() && precision.round(f32::NAN).is_nan());
        assert_eq!(precision.smallest_subnormal(), numbers[1]);
        assert_eq!(precision.largest_finite(), largest);
    }
    assert_eq!(Precision::F32.smallest_subnormal(), f64::from(f32::from_bits(1)));
    assert_eq!(Precision::F32.largest_finite(), f64::from(f32::MAX));
    assert_eq!(Precision::F64.smallest_subnormal(), f64::from_bits(1));
    assert_eq!(Precision::F64.largest_finite(), f64::MAX);
}

#[test]
fn eight_bits_overflow_as_those_of_ml_dtypes_do() {
    let e4m3 = |value| Precision::F8E4m3.round(value);
    assert_eq!((e4m3(464.0), e4m3(-464.0)), (448.0, -448.0));
    assert!(e4m3(464.1).is_nan() && e4m3(f32::INFINITY).is_nan() && e4m3(1e30).is_nan());
    let e5m2 = |value| Precision::F8E5m2.round(value);
    assert_eq!((e5m2(61_439.0), e5m2(61_440.0)), (57_344.0, f32::INFINITY));
}

/// python/tests/test_rounding.py has the same constants, from ml_dtypes.
#[test]
fn eight_bit_rounding_of_every_bf16_number_has_the_bits_that_ml_dtypes_gives() {
    let fnv1a = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    for (precision, infinite, wanted) in [
        (Precision::F8E4m3, 0x7f, 0xe990_f486_7348_3715_u64),
        (Precision::F8E5m2, 0x7c, 0xa701_dd20_1af2_79e5),
    ] {
        let numbers = numbers(precision);
        let byte = |pattern: u16| {
            let rounded = precision.round(bf16::from_bits(pattern).to_f32());
            let sign = u8::from(rounded.is_sign_negative()) << 7;
            let size = f64::from(rounded.abs());
            let code = numbers.partition_point(|&number| number < size) as u8;
            match rounded {
                _ if rounded.is_nan() => 0x7f,
                _ if rounded.is_infinite() => sign | infinite,
                _ => sign | code,
            }
        };
        let hash = (0..=u16::MAX).map(byte).fold(0xcbf2_9ce4_8422_2325, fnv1a);
        assert_eq!(hash, wanted, "{precision:?}");
    }
}

#[test]
fn every_precision_is_found_by_its_name_and_bears_that_of_its_dtype() {
    for precision in ALL {
        assert_eq!(Precision::from_name(precision.name()), Some(precision));
        let dtype = format!("\"{}\"", precision.name());
        let known = serde_json::from_str::<backtape::dtype::Dtype>(&dtype).is_ok();
        assert_eq!(known, precision != Precision::Tf32, "{dtype}");
    }
    assert_eq!(Precision::from_name("f8_e4m3"), Some(Precision::F8E4m3));
    assert_eq!(Precision::from_name("f8_e5m2"), Some(Precision::F8E5m2));
    assert_eq!(Precision::from_name("bf8"), None);
}

fn same_as_half(value: f32) {
    let wanted = bf16::from_f32(value).to_f32();
    assert_eq!(Precision::Bf16.round(value).to_bits(), wanted.to_bits(), "bf16 of {value:e}");
    let wanted = f16::from_f32(value).to_f32();
    assert_eq!(Precision::F16.round(value).to_bits(), wanted.to_bits(), "f16 of {value:e}");
}

/// Every bf16 pattern, with the bit patterns next to it and next to the tie above it: all places
/// where the rounded result changes.
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
    for precision in ALL.into_iter().filter(|&precision| precision != Precision::F64) {
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
    fn any_f64_is_rounded_once(bits in any::<u64>(), exponent in 0u64..512) {
        // Exponents where the formats end, or anywhere.
        let near = bits & !(0x7ff << 52) | (767 + exponent) << 52;
        for precision in TABLED {
            let numbers = numbers(precision);
            assert_nearest(precision, &numbers, f64::from_bits(bits));
            assert_nearest(precision, &numbers, f64::from_bits(near));
        }
    }

    #[test]
    fn a_slice_rounds_like_its_elements(bits in prop::collection::vec(any::<u32>(), 0..70)) {
        let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        for precision in ALL {
            let mut rounded = values.clone();
            precision.round_slice(&mut rounded);
            for (slice, &value) in rounded.iter().zip(&values) {
                prop_assert_eq!(slice.to_bits(), precision.round(value).to_bits());
                let wide = precision.round64(value.into());
                let same = f64::from(*slice).to_bits() == wide.to_bits();
                prop_assert!(same || (slice.is_nan() && wide.is_nan()), "{precision:?} {value:e}");
            }
        }
    }
}
