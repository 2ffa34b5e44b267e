//! exp in f64 over whole rows. Beside the GEMMs the reference spends most of its time here, so it
//! is written to be vectorised.

vectorised!(
    /// Replaces each x of a row by `exp(x - shift)`, within one unit in the last place of a normal
    /// result; NaN stays NaN.
    exp_row, exp_row_body, (row: &mut [f64], shift: f64) -> ()
);

#[inline(always)]
fn exp_row_body(row: &mut [f64], shift: f64) {
    for x in row {
        *x = exp(*x - shift);
    }
}

/// `exp(x)`, with the same bits as `exp_row`: `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and `exp(x)
/// = 2^n exp(r)`.
#[inline(always)]
pub(super) fn exp(x: f64) -> f64 {
    // Beyond these the result is 0 or inf. The comparisons are false for NaN, which stays NaN.
    let x = if x < -746.0 { -746.0 } else { x };
    let x = if x > 710.0 { 710.0 } else { x };
    // Adding 1.5 * 2^52 leaves the nearest integer to x / ln 2 in the low bits.
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let shifted = x.mul_add(std::f64::consts::LOG2_E, MAGIC);
    let exponent = (shifted.to_bits() as i64).wrapping_sub(MAGIC.to_bits() as i64);
    let whole = shifted - MAGIC;
    // ln 2 in two pieces, the first of 32 bits: its products with n are exact.
    let r = whole.mul_add(-6.931_471_803_691_238e-1, x);
    let r = whole.mul_add(-1.908_214_929_270_587_7e-10, r);
    // The Taylor series; the first term that is left out, r^14 / 14!, is below 2^-57.
    let p = TAYLOR[1..].iter().fold(TAYLOR[0], |p, &value| p.mul_add(r, value));
    let value = 1.0 + (r * r).mul_add(p, r);
    // Two factors, since no f64 power of two reaches 2^-1075 or 2^1024.
    let half = exponent >> 1;
    value * power_of_two(half) * power_of_two(exponent.wrapping_sub(half))
}

/// `1 / n!` for n from 13 down to 2.
const TAYLOR: [f64; 12] = {
    let mut all = [0.0; 12];
    let (mut n, mut factorial) = (2, 2.0);
    while n <= 13 {
        all[13 - n] = 1.0 / factorial;
        n += 1;
        factorial *= n as f64;
    }
    all
};

#[inline(always)]
fn power_of_two(exponent: i64) -> f64 {
    f64::from_bits((exponent.wrapping_add(1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    /// Distance from libm's exp in units of its last place; 0 where both are no number.
    fn ulps(x: f64) -> u64 {
        let mut row = [x];
        exp_row(&mut row, 0.0);
        let exact = libm::exp(x);
        if exact.is_nan() && row[0].is_nan() {
            0
        } else {
            exact.to_bits().abs_diff(row[0].to_bits())
        }
    }

    #[test]
    fn exp_is_the_next_number_to_libms_or_the_same() {
        let mut draw = Draw::new(3);
        let wide = (0..400_000).map(|_| 1460.0 * draw.unit() - 750.0).collect::<Vec<_>>();
        let near = (0..400_000).map(|_| 8.0 * draw.unit() - 6.0).collect::<Vec<_>>();
        for x in wide.into_iter().chain(near) {
            assert!(ulps(x) <= 1, "exp({x:e})");
        }
    }

    #[test]
    fn exp_has_its_limits() {
        let mut row = [0.0, -0.0, f64::NEG_INFINITY, f64::INFINITY, -1e300, 1e300, f64::NAN];
        exp_row(&mut row, 0.0);
        assert_eq!(&row[..6], &[1.0, 1.0, 0.0, f64::INFINITY, 0.0, f64::INFINITY]);
        assert!(row[6].is_nan());
        let largest = 709.782_712_893_384;
        let mut row = [largest, largest + 1e-12, -745.13, -745.14];
        exp_row(&mut row, 0.0);
        assert!(row[0].is_finite() && row[1].is_infinite() && row[2] > 0.0 && row[3] == 0.0);
    }

    #[test]
    fn vector_and_scalar_passes_give_the_same_bits() {
        for length in [0, 1, 3, 4, 7, 8, 9, 1000] {
            let row: Vec<f64> = (0..length).map(|i| (i * 37 % 101) as f64 / 3.0 - 30.0).collect();
            let (mut vector, mut scalar) = (row.clone(), row);
            exp_row(&mut vector, 0.37);
            exp_row_body(&mut scalar, 0.37);
            assert_eq!(vector, scalar);
        }
    }
}
