//! Running sums in a declared precision and order. Many independent sums (lanes) are computed side
//! by side.
//!
//! A sum gets its addends one at a time, whatever its order, so that it can continue over tile
//! boundaries; a pairwise sum keeps one partial sum for each level of its tree.

use crate::kernels::policy::{Order, Sum};
use crate::kernels::round::Precision;

/// Rounds the exact result of one operation: to f32 and then to the precision, as hardware does, or
/// not at all where the precision is f64.
#[inline(always)]
pub(super) fn operation(precision: Precision, exact: f64) -> f64 {
    match precision {
        Precision::F64 => exact,
        Precision::F32 => f64::from(exact as f32),
        narrow => narrow.round64(f64::from(exact as f32)),
    }
}

/// `a + b` rounded to odd: where f64 cannot hold the sum, the neighbour with an odd last bit.
/// Rounding this further gives the same number as rounding the exact sum (Boldo and Melquiond
/// 2008).
#[inline(always)]
fn add_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let from_b = sum - a;
    let error = (a - (sum - from_b)) + (b - from_b);
    let bits = sum.to_bits();
    let away = (error > 0.0) == (sum > 0.0);
    let toward = if away { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    // Not `error != 0`: the error of an infinite sum is NaN.
    let inexact = error.abs() > 0.0 && bits & 1 == 0;
    f64::from_bits(if inexact { toward } else { bits })
}

/// Defines a loop over lanes that is compiled for every precision, with AVX2 and without.
macro_rules! lanes {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*), |$round:ident| $body:block) => {
        $(#[$doc])*
        fn $name(precision: Precision, $($arg: $type),*) {
            #[inline(always)]
            fn body($round: impl Fn(f64) -> f64 + Copy, $($arg: $type),*) $body
            #[inline(always)]
            fn chosen(precision: Precision, $($arg: $type),*) {
                use Precision::*;
                match precision {
                    F64 => body(|x| operation(F64, x), $($arg),*),
                    F32 => body(|x| operation(F32, x), $($arg),*),
                    Tf32 => body(|x| operation(Tf32, x), $($arg),*),
                    Bf16 => body(|x| operation(Bf16, x), $($arg),*),
                    F16 => body(|x| operation(F16, x), $($arg),*),
                    F8E4m3 => body(|x| operation(F8E4m3, x), $($arg),*),
                    F8E5m2 => body(|x| operation(F8E5m2, x), $($arg),*),
                }
            }
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn vectorised(precision: Precision, $($arg: $type),*) {
                    chosen(precision, $($arg),*);
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the feature it is compiled for was just detected.
                    return unsafe { vectorised(precision, $($arg),*) };
                }
            }
            chosen(precision, $($arg),*);
        }
    };
}

lanes!(
    /// `s = round(s + x)`
    add(sums: &mut [f64], addends: &[f64]), |round| {
        for (sum, &x) in sums.iter_mut().zip(addends) {
            *sum = round(*sum + x);
        }
    }
);
lanes!(
    /// `s = round(s + x)` where x is an exact product, so that f64 may not hold `s + x` exactly.
    add_wide(sums: &mut [f64], addends: &[f64]), |round| {
        for (sum, &x) in sums.iter_mut().zip(addends) {
            *sum = round(add_to_odd(*sum, x));
        }
    }
);
lanes!(
    /// One step of Kahan's sum: the compensation is the rounding error of the last addition, the
    /// amount by which the sum is too large.
    add_kahan(sums: &mut [f64], compensations: &mut [f64], addends: &[f64]), |round| {
        for ((sum, c), &x) in sums.iter_mut().zip(compensations).zip(addends) {
            let y = round(x - *c);
            let t = round(*sum + y);
            *c = round(round(t - *sum) - y);
            *sum = t;
        }
    }
);
lanes!(
    /// One step of Neumaier's sum: the compensation is the total of what all additions lost by
    /// rounding.
    add_neumaier(sums: &mut [f64], compensations: &mut [f64], addends: &[f64]), |round| {
        for ((sum, c), &x) in sums.iter_mut().zip(compensations).zip(addends) {
            let x = round(x);
            let t = round(*sum + x);
            let (large, small) = if sum.abs() >= x.abs() { (*sum, x) } else { (x, *sum) };
            *c = round(*c + round(round(large - t) + small));
            *sum = t;
        }
    }
);
lanes!(
    /// `product = round(factor x)`
    multiply(factor: f64, values: &[f64], products: &mut [f64]), |round| {
        for (product, &x) in products.iter_mut().zip(values) {
            *product = round(factor * x);
        }
    }
);

/// `sums += more`, each addition in `base` (f32 or f64) and then rounded to `rounding`.
pub(super) fn add_rounded(rounding: Precision, base: Precision, sums: &mut [f64], more: &[f64]) {
    if base == Precision::F64 {
        add(Precision::F64, sums, more);
        rounding.round_slice64(sums);
    } else {
        add(if rounding == Precision::F64 { base } else { rounding }, sums, more);
    }
}

/// Running sums of `lanes` outputs.
#[derive(Debug, Clone)]
pub(super) struct Running {
    sum: Sum,
    /// What products are rounded to.
    product: Precision,
    /// Addends so far.
    count: usize,
    /// The sums so far; where blocked, those of the current block.
    sums: Vec<f64>,
    /// Compensations, or where blocked the sums of the earlier blocks. Empty in other orders.
    beside: Vec<f64>,
    /// Pairwise: `levels[l]` is a sum of `2^l` addends, valid where bit l of `count` is set.
    levels: Vec<Vec<f64>>,
}

impl Running {
    /// Empty sums. Only `add_products` uses `product`.
    pub(super) fn new(sum: Sum, product: Precision, lanes: usize) -> Self {
        let beside = match sum.order {
            Order::Blocked(_) | Order::Kahan | Order::Neumaier => lanes,
            _ => 0,
        };
        // Only an accumulator to which the product itself is added can be fused with it.
        let fusible = matches!(sum.order, Order::Native | Order::Sequential | Order::Blocked(_));
        let wide = product == Precision::F64 && sum.precision != Precision::F64;
        let product = if wide && !fusible { Precision::F32 } else { product };
        let (sums, beside) = (vec![0.0; lanes], vec![0.0; beside]);
        Running { sum, product, count: 0, sums, beside, levels: Vec::new() }
    }

    /// Empties the sums.
    pub(super) fn reset(&mut self) {
        self.count = 0;
        self.sums.fill(0.0);
        self.beside.fill(0.0);
    }

    /// Adds `factor values`, each product rounded. `scratch` has one element a lane.
    pub(super) fn add_products(&mut self, factor: f64, values: &[f64], scratch: &mut [f64]) {
        multiply(self.product, factor, values, scratch);
        if self.product == Precision::F64 && self.sum.precision != Precision::F64 {
            self.take(scratch, add_wide);
        } else {
            self.take(scratch, add);
        }
    }

    /// Adds one addend to each sum; `addends` is overwritten with intermediate results.
    pub(super) fn add(&mut self, addends: &mut [f64]) {
        self.take(addends, add);
    }

    fn take(&mut self, addends: &mut [f64], add_one: fn(Precision, &mut [f64], &[f64])) {
        let Running { sum: Sum { precision, order }, count, sums, beside, levels, .. } = self;
        debug_assert_eq!(addends.len(), sums.len(), "one addend a lane");
        match *order {
            Order::Native | Order::Sequential => add_one(*precision, sums, addends),
            Order::Kahan => add_kahan(*precision, sums, beside, addends),
            Order::Neumaier => add_neumaier(*precision, sums, beside, addends),
            Order::Blocked(block) => {
                add_one(*precision, sums, addends);
                if (*count + 1).is_multiple_of(block) {
                    add(*precision, beside, sums);
                    sums.fill(0.0);
                }
            }
            Order::Pairwise => {
                let level = count.trailing_ones() as usize;
                for waiting in &levels[..level] {
                    add(*precision, addends, waiting);
                }
                match levels.get_mut(level) {
                    Some(free) => free.copy_from_slice(addends),
                    None => levels.push(addends.to_vec()),
                }
            }
        }
        *count += 1;
    }

    /// Writes the sums so far to `out`.
    pub(super) fn finish(&self, out: &mut [f64]) {
        let Running { sum: Sum { precision, order }, count, sums, beside, levels, .. } = self;
        out.copy_from_slice(sums);
        match *order {
            Order::Native | Order::Sequential | Order::Kahan => {}
            Order::Neumaier => add(*precision, out, beside),
            Order::Blocked(block) => {
                if count.is_multiple_of(block) {
                    out.copy_from_slice(beside);
                } else {
                    add(*precision, out, beside);
                }
            }
            Order::Pairwise => {
                for (level, waiting) in levels.iter().enumerate() {
                    if count >> level & 1 == 1 {
                        add(*precision, out, waiting);
                    }
                }
            }
        }
    }

    /// The sum, where there is one lane.
    pub(super) fn value(&self) -> f64 {
        let mut result = [0.0];
        self.finish(&mut result);
        result[0]
    }

    /// Adds an addend, where there is one lane.
    pub(super) fn push(&mut self, addend: f64) {
        self.add(&mut [addend]);
    }
}
