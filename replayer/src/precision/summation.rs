//! Ways to add up f32 numbers, with bounds of their errors.
//!
//! The addends are the exponentials of a softmax denominator. They are all positive, so that the
//! error bounds are relative to the sum. The bounds are those of Higham, Accuracy and Stability of
//! Numerical Algorithms, 2nd ed., chapter 4: `γ_m = m u / (1 - m u)`, where `m` is the largest
//! number of additions that one addend takes part in. The probabilistic bound is `λ √m u` (Higham
//! and Mary 2019, theorem 2.4).

/// Unit roundoff of f32.
pub const F32: f64 = 5.960_464_477_539_063e-8;
/// Unit roundoff of f64.
pub const F64: f64 = 1.110_223_024_625_156_5e-16;

/// Block size of `Blocked`: the number of lanes in a GPU's warp.
const BLOCK: usize = 32;

/// How a sum is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// In order, in f32.
    Sequential,
    /// By recursive halving, in f32.
    Pairwise,
    /// Blocks of 32 addends in order, then the blocks' sums in order, in f32.
    Blocked,
    /// In order in f32, where the rounding error of each addition is added with the next addend
    /// (Kahan 1965).
    Kahan,
    /// In order in f32, where the rounding errors are summed separately and added at the end
    /// (Neumaier 1974).
    Neumaier,
    /// In order, in f64.
    Double,
}

impl Method {
    /// All methods, in the order in which they are shown.
    pub const ALL: [Method; 6] = [
        Method::Sequential,
        Method::Pairwise,
        Method::Blocked,
        Method::Kahan,
        Method::Neumaier,
        Method::Double,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Method::Sequential => "naive f32",
            Method::Pairwise => "pairwise f32",
            Method::Blocked => "blocked(32) f32",
            Method::Kahan => "Kahan f32",
            Method::Neumaier => "Neumaier f32",
            Method::Double => "naive f64",
        }
    }

    /// The sum.
    pub fn sum(self, addends: &[f32]) -> f64 {
        match self {
            Method::Sequential => addends.iter().fold(0.0f32, |sum, x| sum + x).into(),
            Method::Pairwise => pairwise(addends).into(),
            Method::Blocked => {
                let blocks = addends.chunks(BLOCK);
                let sums = blocks.map(|block| block.iter().fold(0.0f32, |sum, x| sum + x));
                sums.fold(0.0f32, |sum, x| sum + x).into()
            }
            Method::Kahan => kahan(addends).into(),
            Method::Neumaier => neumaier(addends).into(),
            Method::Double => addends.iter().fold(0.0, |sum, &x| sum + f64::from(x)),
        }
    }

    /// The largest number of rounded additions that one of `n` addends takes part in.
    fn depth(self, n: usize) -> f64 {
        let n = n.max(1);
        let depth = match self {
            Method::Pairwise => n.next_power_of_two().ilog2() as usize,
            Method::Blocked => BLOCK.min(n) - 1 + n.div_ceil(BLOCK) - 1,
            _ => n - 1,
        };
        depth as f64
    }

    /// The relative error that cannot be exceeded for `n` addends of one sign.
    pub fn worst(self, n: usize) -> f64 {
        let gamma = |u: f64| {
            let mu = self.depth(n) * u;
            if mu < 1.0 { mu / (1.0 - mu) } else { f64::INFINITY }
        };
        match self {
            // Higham, (4.8): 2u + O(n u²). The constant is not stated there and taken
            // as 2: the term is below a hundredth of the first up to n = 10^5.
            Method::Kahan => 2.0 * F32 + 2.0 * n as f64 * F32 * F32,
            // Ogita, Rump and Oishi 2005, proposition 4.5: u + γ².
            Method::Neumaier => F32 + gamma(F32).powi(2),
            Method::Double => gamma(F64),
            _ => gamma(F32),
        }
    }

    /// The relative error that is exceeded with the probability that belongs to `lambda`.
    pub fn probable(self, n: usize, lambda: f64) -> f64 {
        let size = |u: f64| (lambda * self.depth(n).sqrt() * u).min(self.worst(n));
        match self {
            Method::Kahan | Method::Neumaier => self.worst(n),
            Method::Double => size(F64),
            _ => size(F32),
        }
    }
}

/// The `λ` for which one of `rows` sums of `n` addends exceeds `λ √n u` with at most this
/// probability: the union bound of `2 exp(-λ²/2)` over the rows and their partial sums.
pub fn lambda(rows: usize, n: usize, probability: f64) -> f64 {
    (2.0 * (2.0 * rows.max(1) as f64 * n.max(1) as f64 / probability).ln()).sqrt()
}

fn pairwise(addends: &[f32]) -> f32 {
    match addends {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (low, high) = addends.split_at(addends.len().next_power_of_two() / 2);
            pairwise(low) + pairwise(high)
        }
    }
}

fn kahan(addends: &[f32]) -> f32 {
    let (mut sum, mut lost) = (0.0f32, 0.0f32);
    for &x in addends {
        let addend = x - lost;
        let next = sum + addend;
        lost = (next - sum) - addend;
        sum = next;
    }
    sum
}

fn neumaier(addends: &[f32]) -> f32 {
    let (mut sum, mut lost) = (0.0f32, 0.0f32);
    for &x in addends {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    sum + lost
}

/// The sum as an unevaluated pair of f64, by the error-free sum of two numbers (Knuth, TAOCP 2,
/// 4.2.2). For addends of one sign its relative error is below `n² 2^-106`, which is negligible
/// beside that of any method.
pub fn exact(addends: &[f32]) -> (f64, f64) {
    let (mut high, mut low) = (0.0f64, 0.0f64);
    for &x in addends {
        let (sum, rest) = two_sum(high, x.into());
        (high, low) = two_sum(sum, low + rest);
    }
    (high, low)
}

fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// Relative error of a sum against the exact pair; NaN where either is NaN.
pub fn relative_error(computed: f64, (high, low): (f64, f64)) -> f64 {
    ((computed - high) - low).abs() / high.abs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    fn exponentials(seed: u64, n: usize) -> Vec<f32> {
        let mut draw = Draw::new(seed);
        (0..n).map(|_| libm::expf(-4.0 * draw.unit() as f32)).collect()
    }

    #[test]
    fn every_method_stays_below_its_bound_and_close_to_its_probable_size() {
        for (seed, n) in (0..300).zip([1, 2, 31, 32, 33, 34, 1000, 4097].into_iter().cycle()) {
            let addends = exponentials(seed, n);
            let exact = exact(&addends);
            for method in Method::ALL {
                let error = relative_error(method.sum(&addends), exact);
                assert!(error <= method.worst(n), "{method:?} of {n}: {error:e}");
                let probable = method.probable(n, lambda(300, n, 1e-4));
                assert!(error <= probable, "{method:?} of {n}: {error:e} over {probable:e}");
            }
        }
    }

    /// The sum of 2^k ones and of as many u is known without arithmetic.
    #[test]
    fn addends_that_naive_summation_swallows_are_kept_by_the_compensated_and_by_the_exact_sum() {
        let n = 1 << 16;
        let addends: Vec<f32> = std::iter::once(1.0).chain(vec![F32 as f32; n]).collect();
        let truth = 1.0 + n as f64 * F32;
        assert_eq!(exact(&addends), (truth, 0.0));
        assert_eq!(Method::Sequential.sum(&addends), 1.0);
        for method in [Method::Kahan, Method::Neumaier] {
            let error = relative_error(method.sum(&addends), (truth, 0.0));
            assert!(error <= 2.0 * F32, "{method:?}: {error:e}");
        }
    }

    #[test]
    fn the_pair_holds_what_one_f64_cannot() {
        let sum = exact(&[1.0, 1e-30, 1e-30]);
        assert_eq!(sum.0, 1.0);
        assert!((sum.1 / (2.0 * f64::from(1e-30f32)) - 1.0).abs() < 1e-15);
    }

    #[test]
    fn nan_is_the_error_of_a_sum_with_nan() {
        for method in Method::ALL {
            let addends = [1.0, f32::NAN];
            assert!(relative_error(method.sum(&addends), exact(&addends)).is_nan());
        }
    }
}
