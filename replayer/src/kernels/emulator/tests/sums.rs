//! Tests sums against results in closed form, or against a literal loop.

use crate::kernels::emulator::sum::Running;
use crate::kernels::policy::{Order, Sum};
use crate::kernels::round::Precision;
use half::{bf16, f16};
use proptest::prelude::*;

fn total(precision: Precision, order: Order, addends: impl IntoIterator<Item = f64>) -> f64 {
    let mut running = Running::new(Sum { precision, order }, precision, 1);
    addends.into_iter().for_each(|addend| running.push(addend));
    running.value()
}

#[test]
fn three_hundred_ones_in_bf16_stop_at_256_unless_they_meet_in_pairs_or_blocks() {
    let ones = || std::iter::repeat_n(1.0, 300);
    let sum = |order| total(Precision::Bf16, order, ones());
    assert_eq!(sum(Order::Native), 256.0);
    assert_eq!(sum(Order::Sequential), 256.0);
    assert_eq!(sum(Order::Pairwise), 300.0);
    assert_eq!(sum(Order::Blocked(16)), 300.0);
    assert_eq!(sum(Order::Blocked(1)), 256.0);
    assert_eq!(sum(Order::Kahan), 300.0);
    assert_eq!(sum(Order::Neumaier), 300.0);
}

/// 1 and n units of 2^-24: each is half a spacing at 1, so that a plain sum stays 1.
/// Kahan's bound is (2 u + O(n u^2)) sum |x| (Higham, Accuracy and Stability, 4.8).
#[test]
fn compensated_sums_keep_what_is_below_the_last_bit_however_many() {
    let u = Precision::F32.unit_roundoff();
    for n in [1 << 10, 1 << 14, 1 << 20] {
        let addends = || std::iter::once(1.0).chain(std::iter::repeat_n(u, n));
        let exact = 1.0 + n as f64 * u;
        assert_eq!(total(Precision::F32, Order::Sequential, addends()), 1.0);
        for order in [Order::Kahan, Order::Neumaier] {
            let error = (total(Precision::F32, order, addends()) - exact).abs();
            assert!(error <= (2.0 * u + n as f64 * u * u) * exact, "{order:?} of {n}: {error}");
        }
        let error = (total(Precision::F32, Order::Pairwise, addends()) - exact).abs();
        assert!(error <= f64::from(n.ilog2() + 1) * u * exact, "pairwise of {n}: {error}");
    }
}

#[test]
fn neumaier_keeps_a_one_that_kahan_loses() {
    for (precision, huge) in [(Precision::F64, 1e100), (Precision::F32, f64::from(1e30f32))] {
        let addends = [1.0, huge, 1.0, -huge];
        assert_eq!(total(precision, Order::Neumaier, addends), 2.0);
        assert_eq!(total(precision, Order::Kahan, addends), 0.0);
    }
}

#[test]
fn a_sum_of_nothing_is_zero_and_of_one_addend_is_that_addend_rounded() {
    for order in ORDERS {
        assert_eq!(total(Precision::Bf16, order, []), 0.0);
        let sum = total(Precision::Bf16, order, [f64::from(1.0f32 + f32::EPSILON)]);
        assert_eq!(sum, 1.0, "{order:?}");
    }
}

#[test]
fn sums_that_were_reset_have_forgotten_everything() {
    for order in ORDERS {
        let mut running = Running::new(Sum { precision: Precision::F32, order }, Precision::F32, 1);
        (0..11).for_each(|addend| running.push(f64::from(addend) + 0.1f32 as f64));
        running.reset();
        (0..5).for_each(|addend| running.push(f64::from(addend)));
        assert_eq!(running.value(), 10.0, "{order:?}");
    }
}

const ORDERS: [Order; 6] = [
    Order::Native,
    Order::Sequential,
    Order::Blocked(3),
    Order::Pairwise,
    Order::Kahan,
    Order::Neumaier,
];

/// Each summation order as textbooks define it, in the arithmetic of a type.
macro_rules! literal {
    ($name:ident, $type:ty, $zero:expr) => {
        fn $name(order: Order, x: &[$type]) -> $type {
            let zero = $zero;
            let abs = |x: $type| if x < zero { -x } else { x };
            match order {
                Order::Native | Order::Sequential => x.iter().fold(zero, |s, &x| s + x),
                Order::Blocked(n) => x
                    .chunks(n)
                    .map(|block| block.iter().fold(zero, |s, &x| s + x))
                    .fold(zero, |s, x| s + x),
                Order::Pairwise => {
                    let mut level = x.to_vec();
                    while level.len() > 1 {
                        let pair = |pair: &[$type]| match *pair {
                            [a, b] => a + b,
                            _ => pair[0],
                        };
                        level = level.chunks(2).map(pair).collect();
                    }
                    level.first().copied().unwrap_or(zero)
                }
                Order::Kahan => {
                    let (mut s, mut c) = (zero, zero);
                    for &x in x {
                        let y = x - c;
                        let t = s + y;
                        c = (t - s) - y;
                        s = t;
                    }
                    s
                }
                Order::Neumaier => {
                    let (mut s, mut c) = (zero, zero);
                    for &x in x {
                        let t = s + x;
                        c += if abs(s) >= abs(x) { (s - t) + x } else { (x - t) + s };
                        s = t;
                    }
                    s + c
                }
            }
        }
    };
}

literal!(in_f64, f64, 0.0);
literal!(in_f32, f32, 0.0);
literal!(in_bf16, bf16, bf16::ZERO);
literal!(in_f16, f16, f16::ZERO);

proptest! {
    #[test]
    fn every_order_is_its_textbook_loop_bit_for_bit(
        mantissas in prop::collection::vec((-1.0f64..1.0, -12i32..12), 0..40),
        block in 1usize..9,
    ) {
        let x: Vec<f64> = mantissas.iter().map(|&(x, power)| x * f64::powi(2.0, power)).collect();
        for order in ORDERS.into_iter().chain([Order::Blocked(block)]) {
            let same = |precision: Precision, wanted: f64| {
                let addends = x.iter().map(|&x| precision.round64(x));
                let got = total(precision, order, addends);
                assert_eq!(got, wanted, "{order:?} in {precision:?}");
            };
            same(Precision::F64, in_f64(order, &x));
            let narrow: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            same(Precision::F32, in_f32(order, &narrow).into());
            let half = |precision: Precision| x.iter().map(move |&x| precision.round64(x) as f32);
            let narrow: Vec<bf16> = half(Precision::Bf16).map(bf16::from_f32).collect();
            same(Precision::Bf16, in_bf16(order, &narrow).into());
            let narrow: Vec<f16> = half(Precision::F16).map(f16::from_f32).collect();
            same(Precision::F16, in_f16(order, &narrow).into());
        }
    }

    #[test]
    fn products_are_fused_in_one_rounding_or_rounded_on_their_own(
        factors in prop::collection::vec((any::<u32>(), any::<u32>()), 1..30),
    ) {
        // Numbers with exponents from -8 to 7, whose sums cancel or are not exact in f64.
        let near = |bits: u32| f32::from_bits(bits & 0x87ff_ffff | 0x3800_0000) * 16.0;
        let factors: Vec<_> = factors.iter().map(|&(a, b)| (near(a), near(b))).collect();
        let run = |product: Precision| {
            let mut running = Running::new(Sum::NATIVE, product, 1);
            for &(a, b) in &factors {
                running.add_products(a.into(), &[b.into()], &mut [0.0]);
            }
            running.value()
        };
        let fused = factors.iter().fold(0.0f32, |sum, &(a, b)| a.mul_add(b, sum));
        prop_assert_eq!(run(Precision::F64), f64::from(fused));
        let rounded = factors.iter().fold(0.0f32, |sum, &(a, b)| sum + a * b);
        prop_assert_eq!(run(Precision::F32), f64::from(rounded));
    }
}

/// 1 + 2^-23 + 2^-24 is a tie in f32, and (2^-12 + 2^-28) (2^-12 - 2^-28) is 2^-56 less than 2^-24,
/// so that the exact sum rounds down. f64 cannot represent the exact sum: rounded to f64 it becomes
/// the tie, which rounds up to the even neighbour.
#[test]
fn a_fused_product_breaks_a_tie_that_f64_cannot_see() {
    let start = 1.0 + f32::EPSILON;
    let (x, y) = (2f32.powi(-12) + 2f32.powi(-28), 2f32.powi(-12) - 2f32.powi(-28));
    assert_eq!(x.mul_add(y, start), start);
    assert_eq!((f64::from(start) + f64::from(x) * f64::from(y)) as f32, 1.0 + 2.0 * f32::EPSILON);
    for sign in [1.0, -1.0] {
        let mut running = Running::new(Sum::NATIVE, Precision::F64, 1);
        running.add_products(f64::from(start) * sign, &[1.0], &mut [0.0]);
        running.add_products(f64::from(x) * sign, &[y.into()], &mut [0.0]);
        assert_eq!(running.value(), f64::from(start) * sign);
    }
}
