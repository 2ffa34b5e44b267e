//! Rounding to the precisions that a policy declares, of f32 and of f64 values.
//!
//! Round-to-nearest-even, bit for bit what the `half` crate and ml_dtypes do (NaN, inf,
//! subnormals and overflow included), in loops that vectorise. A rounded value stays in
//! its f32 or f64: nothing here packs narrow storage. An f64 is rounded once, never by
//! way of f32: `half` drops the low half of an f64, and its result may be off by one.

use half::f16;

/// A floating-point format that some stage rounds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE binary32.
    F32,
    /// NVIDIA's TensorFloat-32: the range of binary32, 10 bits after the point.
    Tf32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 4 exponent and 3 mantissa bits, ml_dtypes' `float8_e4m3fn`: no inf, and NaN where
    /// it would be.
    F8E4m3,
    /// 5 exponent and 2 mantissa bits, IEEE-like: ml_dtypes' `float8_e5m2`.
    F8E5m2,
    /// IEEE binary64. Rounding an f32 or f64 to it changes nothing.
    F64,
}

/// What tells one format from another.
struct Format {
    precision: Precision,
    /// As `backtape::dtype` spells it; tf32 is not a storage format and has no dtype there.
    name: &'static str,
    /// Bits of the significand, the leading one included.
    bits: i32,
    /// Exponent of the smallest normal number.
    least: i32,
    largest: f64,
}

/// `(2 - 2^(1 - bits)) 2^exponent`: the number whose significand has all bits set.
const fn largest(bits: i32, exponent: i32) -> f64 {
    (2.0 - power(1 - bits)) * power(exponent)
}

/// `2^exponent`, for normal numbers.
const fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

const FORMATS: [Format; 7] = [
    format(Precision::F32, "f32", 24, -126, largest(24, 127)),
    format(Precision::Tf32, "tf32", 11, -126, largest(11, 127)),
    format(Precision::Bf16, "bf16", 8, -126, largest(8, 127)),
    format(Precision::F16, "f16", 11, -14, largest(11, 15)),
    // All bits set is NaN in this format: its largest number is the one before.
    format(Precision::F8E4m3, "f8e4m3", 4, -6, 448.0),
    format(Precision::F8E5m2, "f8e5m2", 3, -14, largest(3, 15)),
    format(Precision::F64, "f64", 53, -1022, f64::MAX),
];

const fn format(
    precision: Precision,
    name: &'static str,
    bits: i32,
    least: i32,
    largest: f64,
) -> Format {
    Format { precision, name, bits, least, largest }
}

impl Precision {
    const fn format(self) -> &'static Format {
        &FORMATS[self as usize]
    }

    /// The format of a name such as `bf16`; the 8-bit formats are also known as `f8_e4m3` and
    /// `f8_e5m2`.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = match name {
            "f8_e4m3" => "f8e4m3",
            "f8_e5m2" => "f8e5m2",
            other => other,
        };
        FORMATS.iter().find(|format| format.name == name).map(|format| format.precision)
    }

    /// The name that dumps and declarations call it by.
    pub fn name(self) -> &'static str {
        self.format().name
    }

    /// Half the spacing of the format's numbers at 1.
    pub fn unit_roundoff(self) -> f64 {
        power(-self.format().bits)
    }

    /// The smallest positive number, which is also the spacing of the subnormal numbers.
    pub fn smallest_subnormal(self) -> f64 {
        let Format { least, bits, .. } = *self.format();
        power(least) * power(1 - bits)
    }

    /// The largest finite number.
    pub fn largest_finite(self) -> f64 {
        self.format().largest
    }

    /// Whether rounding to this format leaves every f32 as it is.
    pub const fn keeps_f32(self) -> bool {
        matches!(self, Precision::F32 | Precision::F64)
    }

    /// The nearest number of the format, ties to even.
    #[inline]
    pub fn round(self, value: f32) -> f32 {
        match self {
            Precision::F32 | Precision::F64 => value,
            Precision::Tf32 => drop_bits::<13>(value),
            Precision::Bf16 => drop_bits::<16>(value),
            Precision::F16 => f16::from_f32(value).to_f32(),
            Precision::F8E4m3 => round_e4m3(value.into()) as f32,
            Precision::F8E5m2 => round_e5m2(value.into()) as f32,
        }
    }

    /// `round` of each element in place.
    pub fn round_slice(self, values: &mut [f32]) {
        match self {
            Precision::F32 | Precision::F64 => {}
            Precision::Tf32 => each(values, drop_bits::<13>),
            Precision::Bf16 => each(values, drop_bits::<16>),
            Precision::F16 => each(values, |value| f16::from_f32(value).to_f32()),
            Precision::F8E4m3 => each(values, |value| round_e4m3(value.into()) as f32),
            Precision::F8E5m2 => each(values, |value| round_e5m2(value.into()) as f32),
        }
    }

    /// The nearest number of the format to an f64, ties to even, in one rounding.
    #[inline(always)]
    pub fn round64(self, value: f64) -> f64 {
        match self {
            Precision::F64 => value,
            Precision::F32 => f64::from(value as f32),
            Precision::Tf32 => round_tf32(value),
            Precision::Bf16 => round_bf16(value),
            Precision::F16 => round_f16(value),
            Precision::F8E4m3 => round_e4m3(value),
            Precision::F8E5m2 => round_e5m2(value),
        }
    }

    /// `round64` of each element in place.
    pub fn round_slice64(self, values: &mut [f64]) {
        match self {
            Precision::F64 => {}
            Precision::F32 => each(values, |value| f64::from(value as f32)),
            Precision::Tf32 => each(values, round_tf32),
            Precision::Bf16 => each(values, round_bf16),
            Precision::F16 => each(values, round_f16),
            Precision::F8E4m3 => each(values, round_e4m3),
            Precision::F8E5m2 => each(values, round_e5m2),
        }
    }
}

#[inline(always)]
fn each<F: Copy>(values: &mut [F], round: impl Fn(F) -> F) {
    values.iter_mut().for_each(|value| *value = round(*value));
}

/// Rounds an f32 to one without its lowest `DROPPED` bits: adds just under half a unit of the kept
/// part, and one more when the kept part is odd. The carry rounds to nearest even, and turns the
/// largest values into inf. NaN is treated apart, since the carry would run through its payload; as
/// in `half`, it becomes quiet.
#[inline(always)]
fn drop_bits<const DROPPED: u32>(value: f32) -> f32 {
    let bits = value.to_bits();
    let half = (1 << (DROPPED - 1)) - 1;
    let rounded = bits.wrapping_add(half + ((bits >> DROPPED) & 1));
    let quiet = bits | 0x0040_0000;
    f32::from_bits(if value.is_nan() { quiet } else { rounded } & (u32::MAX << DROPPED))
}

macro_rules! rounded_once {
    ($($name:ident: $precision:ident),*) => {$(
        #[inline(always)]
        fn $name(value: f64) -> f64 {
            const FORMAT: &Format = Precision::$precision.format();
            nearest(FORMAT, value)
        }
    )*};
}

rounded_once!(
    round_tf32: Tf32,
    round_bf16: Bf16,
    round_f16: F16,
    round_e4m3: F8E4m3,
    round_e5m2: F8E5m2
);

/// Rounds by adding and subtracting 1.5 · 2^52 spacings of the format's numbers around the value:
/// f64 numbers as large as that sum are one such spacing apart, so the addition rounds to a
/// multiple of the spacing, ties to even. The spacing is that of the value's binade, or of the
/// smallest normal number if that is larger.
#[inline(always)]
fn nearest(format: &Format, value: f64) -> f64 {
    // Beyond the largest number of every format, and small enough for the shift to be finite.
    const BEYOND: f64 = power(200);
    let size = value.abs();
    // This comparison is false for NaN, which therefore stays NaN.
    let size = if size > BEYOND { BEYOND } else { size };
    let own_power = f64::from_bits(size.to_bits() & 0x7ff0_0000_0000_0000);
    let least = power(format.least);
    let shift = if own_power > least { own_power } else { least } * (1.5 * power(53 - format.bits));
    let rounded = (size + shift) - shift;
    let overflow = match format.precision {
        Precision::F8E4m3 => f64::NAN,
        _ => f64::INFINITY,
    };
    if rounded > format.largest { overflow } else { rounded }.copysign(value)
}

#[cfg(test)]
mod tests;
