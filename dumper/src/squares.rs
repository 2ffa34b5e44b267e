//! The sum of the squares of a gradient and a sum of its bits, in one pass over its memory.
//!
//! A sampled step declares the first of every gradient that is not recorded whole, and sees by the
//! second whether a gradient was changed since. torch takes a pass for each, and the first of these
//! several times as long: it widens every number into memory before it adds.

/// Numbers that are summed side by side. The order of the additions is the same on every machine:
/// a square of an f32 is exact in f64, so it does not matter whether it is fused with the addition.
const LANES: usize = 16;

/// What the sums of the bits of neighbouring lanes differ by, so that numbers that change places are
/// seen: an odd number with bits everywhere.
const WEIGHT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The two sums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// The sum of the squares, in f64.
    pub squares: f64,
    /// The sum of the bits as integers of the numbers' width, with a weight for each lane, modulo
    /// 2⁶⁴.
    pub bits: u64,
}

/// The sums of f32 numbers, as the bytes lie on this machine; they need not be aligned.
pub fn of_f32(bytes: &[u8]) -> Sums {
    of(bytes, |word| {
        let bits = u32::from_ne_bytes(word);
        (f32::from_bits(bits), bits)
    })
}

/// The sums of bf16 numbers, which are the upper halves of f32 numbers.
pub fn of_bf16(bytes: &[u8]) -> Sums {
    of(bytes, |word| {
        let bits = u32::from(u16::from_ne_bytes(word));
        (f32::from_bits(bits << 16), bits)
    })
}

fn of<const WIDTH: usize>(bytes: &[u8], read: impl Fn([u8; WIDTH]) -> (f32, u32)) -> Sums {
    let (numbers, _) = bytes.as_chunks::<WIDTH>();
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide<T: Copy>(numbers: &[T], read: impl Fn(T) -> (f32, u32)) -> Sums {
            by_lanes(numbers, read)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature it is compiled for was just detected.
            return unsafe { wide(numbers, read) };
        }
    }
    by_lanes(numbers, read)
}

#[inline(always)]
fn by_lanes<T: Copy>(numbers: &[T], read: impl Fn(T) -> (f32, u32)) -> Sums {
    let (mut squares, mut bits) = ([0.0f64; LANES], [0u64; LANES]);
    let (whole, rest) = numbers.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, &number) in chunk.iter().enumerate() {
            let (value, word) = read(number);
            squares[lane] += f64::from(value) * f64::from(value);
            bits[lane] = bits[lane].wrapping_add(u64::from(word));
        }
    }
    for (lane, &number) in rest.iter().enumerate() {
        let (value, word) = read(number);
        squares[lane] += f64::from(value) * f64::from(value);
        bits[lane] = bits[lane].wrapping_add(u64::from(word));
    }
    Sums {
        squares: squares.iter().sum(),
        bits: bits.iter().fold(0, |sum: u64, &lane| sum.wrapping_mul(WEIGHT).wrapping_add(lane)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
    }

    #[test]
    fn the_sums_are_those_of_one_number_after_the_other() {
        for count in [0, 1, 15, 16, 17, 1000] {
            let numbers: Vec<f32> = (0..count).map(|i| (i * 37 % 251) as f32 - 125.0).collect();
            let sums = of_f32(&bytes(&numbers));
            // Whole numbers, so that every order gives the same.
            let squares: f64 = numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            assert_eq!(sums.squares, squares);
            let halves: Vec<u16> = numbers.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
            let halves: Vec<u8> = halves.iter().flat_map(|half| half.to_ne_bytes()).collect();
            assert_eq!(of_bf16(&halves).squares, squares);
        }
    }

    #[test]
    fn numbers_that_change_and_that_change_places_change_the_sum_of_the_bits() {
        let numbers: Vec<f32> = (0..100).map(|i| (i * 37 % 251) as f32 - 125.0).collect();
        let first = of_f32(&bytes(&numbers)).bits;
        for at in 0..99 {
            let mut other = numbers.clone();
            other.swap(at, at + 1);
            assert_ne!(of_f32(&bytes(&other)).bits, first, "{at}");
            other = numbers.clone();
            other[at] = -other[at];
            other[at + 1] = -other[at + 1];
            assert_ne!(of_f32(&bytes(&other)).bits, first, "{at}");
        }
    }

    #[test]
    fn a_number_that_is_none_and_one_that_is_large_are_seen() {
        let of = |numbers: &[f32]| of_f32(&bytes(numbers));
        assert!(of(&[1.0, f32::NAN]).squares.is_nan());
        assert_eq!(of(&[f32::INFINITY; 20]).squares, f64::INFINITY);
        assert!(of(&[f32::MAX; 20]).squares.is_finite());
        assert_ne!(of(&[0.0]).bits, of(&[-0.0]).bits);
    }
}
