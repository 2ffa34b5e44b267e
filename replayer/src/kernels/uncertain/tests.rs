//! Tests of the numbers that carry their rounding error.

use super::*;
use crate::draw::Draw;

/// `a b / (a + b)`, in any numbers.
fn harmonic<N: Number>(a: N, b: N) -> N {
    a.clone() * b.clone() / (a + b)
}

/// Goal: in f64 a factor that is made of settings may err as one in f32, and in f32 that is no
/// error of its own. Method: parameters that decay by `1 - d`, with d from 1e-9 to 1e-2.
#[test]
fn a_factor_of_settings_errs_as_in_f32_where_the_rest_is_in_f64() {
    let mut draw = Draw::new(7);
    for _ in 0..1000 {
        let (before, decay) = (draw.normal(), 10f64.powf(-9.0 + 7.0 * draw.unit()));
        let off = |unit: f64| {
            let roundings = Roundings::new(unit, None);
            roundings.begin_row();
            roundings.reserve();
            let [p, factor] = [before, 1.0 - decay].map(|x| roundings.exact(x));
            let (own, row) = roundings.exact(0.0).by_settings(p, factor).variances();
            own + row
        };
        let made = before * (f64::from((1.0 - decay) as f32) - (1.0 - decay));
        assert!(made.abs() <= 2.0 * off(Precision::F64.unit_roundoff()).sqrt());
        assert_eq!(off(Precision::F32.unit_roundoff()), 0.0);
    }
}

/// Goal: what vanishes in a quotient by a large number is allowed for, and nothing where the
/// number is small. Method: a number below the smallest one of f32 times that number.
#[test]
fn a_number_that_vanished_on_the_way_may_be_missing() {
    let roundings = Roundings::new(Precision::F32.unit_roundoff(), None)
        .above(Precision::F32.smallest_subnormal());
    let allowed = |by: f64| {
        roundings.begin_row();
        roundings.reserve();
        let by = roundings.exact(by);
        let (own, row) = roundings.exact(0.0).vanishing(by).variances();
        (own + row).sqrt()
    };
    let lost = f64::from(1e-38f32) - f64::from(1e-38f32 / 1e9 * 1e9);
    assert!(lost > 0.0 && lost <= 2.0 * allowed(1e9), "{lost:e}");
    assert_eq!(allowed(0.5), 0.0);
}

/// Goal: the propagated error is as large as the one that is made. Method: the formula in f32
/// on 100,000 draws, against f64.
#[test]
fn the_propagated_error_covers_that_of_f32_arithmetic_and_is_not_far_above_it() {
    let (mut draw, mut made, mut propagated) = (Draw::new(3), 0.0, 0.0);
    let roundings = Roundings::new(Precision::F32.unit_roundoff(), None);
    for _ in 0..100_000 {
        let [a, b] = [(); 2].map(|()| (1.0 + draw.unit()) as f32);
        let exact = harmonic(f64::from(a), f64::from(b));
        made += (f64::from(harmonic(a, b)) - exact).powi(2);
        roundings.begin_row();
        let [a, b] = [a, b].map(|x| roundings.exact(x.into()));
        propagated += harmonic(a, b).variances().0;
    }
    let ratio = propagated / made;
    assert!((1.0..4.0).contains(&ratio), "{ratio}");
}

#[test]
fn an_error_that_enters_twice_adds_up_or_cancels() {
    let roundings = Roundings::new(0.0, None);
    let x = roundings.with_variance(2.0, 0.01);
    let twice = x.clone() + x.clone();
    assert!((twice.variances().0 - 0.04).abs() < 1e-15);
    assert_eq!((x.clone() - x.clone()).variances().0, 0.0);
    assert!(((x.clone() / x.clone()).variances().0).abs() < 1e-30);
    roundings.share();
    assert_eq!(x.variances().0, 0.0, "all of its error is the row's");
    let own_error = roundings.with_variance(1.0, 0.25);
    let (own_variance, row) = (own_error * x).variances();
    assert!((own_variance - 1.0).abs() < 1e-12 && (row - 0.01).abs() < 1e-12);
}

#[test]
fn a_choice_is_uncertain_only_where_rounding_can_turn_it() {
    let roundings = Roundings::new(0.0, None);
    let with_error = |value| roundings.with_variance(value, 1e-4);
    assert_eq!(with_error(1.0).sign().variances().0, 0.0);
    assert_eq!(with_error(-0.01).sign().variances().0, 4.0, "the other side is 2 away");
    assert_eq!(with_error(0.0).sign().variances().0, 1.0);
    assert_eq!(roundings.exact(0.0).sign().variances().0, 0.0);
    let apart = with_error(2.0).larger(roundings.with_variance(1.0, 1e-2));
    assert!((apart.variances().0 - 1e-4).abs() < 1e-12);
    let one_of = |at: f64| with_error(at).chosen(false, with_error(3.0), with_error(1.0));
    assert!(one_of(1.0).value == 3.0 && (one_of(1.0).variances().0 - 1e-4).abs() < 1e-12);
    assert!(one_of(-1e-3).value == 1.0 && one_of(-1e-3).variances().0 >= 4.0);
    let near = roundings.with_variance(1.9, 1e-2).larger(with_error(2.0));
    assert!(near.value == 2.0 && near.variances().0 >= 1e-2, "{near:?}");
    assert!(roundings.exact(f64::NAN).larger(with_error(2.0)).value.is_nan());
    assert!(with_error(2.0).larger(roundings.exact(f64::NAN)).value.is_nan());
}

#[test]
fn numbers_that_all_elements_share_err_in_all_of_them_alike() {
    let roundings = Roundings::new(Precision::F32.unit_roundoff(), Some(Precision::Bf16));
    roundings.begin_row();
    roundings.reserve();
    roundings.share();
    for _ in 0..100 {
        roundings.begin_element();
        let (own, shared) = roundings.exact(0.99).scalar().variances();
        let most = (0.99 - Precision::Bf16.round64(0.99)).abs();
        assert!(own == 0.0 && ((3.0 * shared).sqrt() - most).abs() < 1e-12);
        let (own, shared) = roundings.exact(0.5).scalar().variances();
        assert!(own == 0.0 && shared == 0.0, "0.5 is not rounded");
        let product = roundings.exact(3.0).scaled(roundings.exact(0.5));
        let most = 1.5 * Precision::Bf16.unit_roundoff();
        assert!(((3.0 * product.variances().1).sqrt() - most).abs() < 1e-12);
        let small = roundings.exact(1.0).changed(roundings.exact(1e-3));
        assert!(((3.0 * small.variances().1).sqrt() - 1e-3).abs() < 1e-12);
    }
}

/// Goal: a product that f32 has no number for may be 0 in the job, and so is its sign.
#[test]
fn a_result_below_the_smallest_number_may_have_vanished() {
    let roundings = Roundings::new(Precision::F32.unit_roundoff(), None);
    let roundings = roundings.above(Precision::F32.smallest_subnormal());
    let [small, factor] = [1e-45, 0.1].map(|x| roundings.exact(x));
    let product = small * factor;
    assert!(product.variances().0.sqrt() >= product.value);
    assert_eq!(product.sign().variances().0, 4.0);
    assert_eq!((roundings.exact(0.0) * roundings.exact(0.1)).variances().0, 0.0);
}

#[test]
fn powers_of_zero_have_an_error_that_is_a_number() {
    let roundings = Roundings::new(Precision::F32.unit_roundoff(), None);
    let power = |exponent| {
        let power = roundings.with_variance(0.0, 1e-90).power(exponent);
        (power.value, power.variances().0)
    };
    assert_eq!(power(1.0), (0.0, 1e-90));
    assert!((power(0.5).1 - 1e-45).abs() < 1e-50, "that of a root is the root of it");
    assert_eq!(power(3.0), (0.0, 0.0));
    assert_eq!(0f64.power(3.0), 0.0);
    assert_eq!(0f32.power(3.0), 0.0);
}

#[test]
fn more_roundings_than_are_told_apart_are_overstated_not_lost() {
    let roundings = Roundings::new(1e-3, None);
    let exact_one = roundings.exact(1.0);
    let many = (0..100).fold(exact_one.clone(), |x, _| x * exact_one.clone());
    assert!(many.variances().0 >= 100.0 * 1e-6 / 3.0);
}
