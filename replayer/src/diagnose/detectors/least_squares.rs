//! Least squares: which of its addends a sum contains, and how often.

use std::ops::Range;

use rayon::prelude::*;

use super::dlogits_plane::Rows;
use super::single_tokens::{dot, energy, multiple};

/// A sum of more addends than this is not solved: the work grows with their cube.
const MOST: usize = 2048;
/// A solved weight must be this near to a whole number.
const WHOLE: f64 = 0.25;
/// The largest weight that is looked for.
const LARGEST: f64 = 16.0;
/// Share of the squared error that whole weights may leave to be worth a trial.
const LEFT: f64 = 0.1;
/// Ridge, as a share of the diagonal: it keeps the weights of nearly dependent addends from
/// growing.
const RIDGE: f64 = 1e-9;
/// An addend is too small to show its weight if rounding of the sum moves the weight by more than
/// this standard deviation: among thousands some are off by five times as much.
const UNSURE: f64 = 0.05;

/// The whole-number weights of the addends `a_i b_iᵀ` in a captured sum. `error`: captured minus
/// the sum with every weight 1; `rounding`: the squared error that rounding causes. `None` where
/// whole numbers do not explain the sum, or all are 1. `spend` counts the work, and returns true
/// when no more may be done.
pub fn whole_weights(
    (a, b): (&Rows, &Rows),
    (error, rounding): (&Rows, f64),
    spend: &dyn Fn(usize) -> bool,
) -> Option<Vec<f64>> {
    let n = a.count();
    let work = || n * n * (a.cols + b.cols) / 2 + n * n * n / 3 + n * a.cols * b.cols;
    if n == 0 || n > MOST || n > a.cols * b.cols || spend(work()) {
        return None;
    }
    let gram: Vec<Vec<f64>> = (0..n)
        .into_par_iter()
        .map(|i| (0..=i).map(|j| dot(a.row(i), a.row(j)) * dot(b.row(i), b.row(j))).collect())
        .collect();
    let towards = a.times(error);
    let right: Vec<f64> = (0..n).map(|i| dot(towards.row(i), b.row(i))).collect();
    let more = Cholesky::of(&gram).solution(&right)?;
    let noise = rounding / error.values.len().max(1) as f64;
    let sure = |i: usize| is_sure(gram[i][i], noise);
    let mut whole = Vec::with_capacity(n);
    for (i, x) in more.iter().enumerate() {
        if !sure(i) {
            // It takes its neighbour's weight: faults leave out blocks, not single addends.
            whole.push(whole.last().copied().unwrap_or(0.0));
            continue;
        }
        let near = x.round();
        if (x - near).abs() > WHOLE || near.abs() > LARGEST {
            return None;
        }
        whole.push(near);
    }
    let first = (0..n).find(|&i| sure(i))?;
    let as_first = whole[first];
    whole[..first].fill(as_first);
    let products: f64 = (0..n)
        .map(|i| {
            let before: f64 = (0..i).map(|j| gram[i][j] * whole[j]).sum();
            whole[i] * (2.0 * before + gram[i][i] * whole[i])
        })
        .sum();
    let before = energy(&error.values);
    let left = before - 2.0 * dot(&whole, &right) + products;
    let explains = whole.iter().any(|&x| x != 0.0) && left <= LEFT * before;
    explains.then(|| whole.iter().map(|x| 1.0 + x).collect())
}

/// Whether the weight of an addend with this squared norm shows in spite of rounding. `noise`: the
/// variance of one element.
pub fn is_sure(addend: f64, noise: f64) -> bool {
    noise <= UNSURE * UNSURE * addend
}

/// The factors of some vectors whose sum is nearest to another vector; none where two of them are
/// nearly parallel.
pub fn multiples(vectors: &[&[f64]], sum: &[f64]) -> Option<Vec<f64>> {
    let gram = vectors.iter().map(|a| vectors.iter().map(|b| dot(a, b)).collect()).collect();
    solution(gram, vectors.iter().map(|a| dot(a, sum)).collect())
}

/// The solution of `a x = b` for a symmetric positive matrix; `None` where it is nearly singular.
pub fn solution(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Option<Vec<f64>> {
    let n = b.len();
    let size = (0..n).map(|i| a[i][i]).fold(0.0, f64::max);
    for step in 0..n {
        let best = (step..n).max_by(|&i, &j| a[i][step].abs().total_cmp(&a[j][step].abs()))?;
        a.swap(step, best);
        b.swap(step, best);
        if !(a[step][step].abs() > 1e-9 * size) {
            return None;
        }
        for row in step + 1..n {
            let factor = a[row][step] / a[step][step];
            let (above, below) = a.split_at_mut(row);
            let pairs = below[0][step..].iter_mut().zip(&above[step][step..]);
            pairs.for_each(|(x, pivot)| *x -= factor * pivot);
            b[row] -= factor * b[step];
        }
    }
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|i| a[row][i] * b[i]).sum();
        b[row] = (b[row] - known) / a[row][row];
    }
    Some(b)
}

/// The rows `x`, `[n, D]`, with which `aᵀ x` is nearest to `sum`, `[V, D]`; `a` is `[n, V]`. `None`
/// where `a` has more rows than columns, or too many. `spend` as in [`whole_weights`].
pub fn factors(a: &Rows, sum: &Rows, spend: &dyn Fn(usize) -> bool) -> Option<Rows> {
    let n = a.count();
    let work = || n * n * a.cols / 2 + n * n * n / 3 + n * sum.cols * (a.cols + n);
    if n == 0 || n > MOST || n > a.cols || spend(work()) {
        return None;
    }
    let gram: Vec<Vec<f64>> = (0..n)
        .into_par_iter()
        .map(|i| (0..=i).map(|j| dot(a.row(i), a.row(j))).collect())
        .collect();
    let factor = Cholesky::of(&gram);
    let right = a.times(sum).transposed();
    let columns: Option<Vec<Vec<f64>>> =
        (0..right.count()).into_par_iter().map(|at| factor.solution(right.row(at))).collect();
    Some(Rows { cols: n, values: columns?.concat() }.transposed())
}

/// The lower triangular Cholesky factor of a symmetric positive matrix.
struct Cholesky {
    lower: Vec<Vec<f64>>,
}

impl Cholesky {
    /// Factorises a matrix given by its lower triangle.
    fn of(gram: &[Vec<f64>]) -> Cholesky {
        let mut lower: Vec<Vec<f64>> = Vec::with_capacity(gram.len());
        for (i, given) in gram.iter().enumerate() {
            let mut row: Vec<f64> = Vec::with_capacity(i + 1);
            for j in 0..i {
                row.push((given[j] - dot(&row[..j], &lower[j][..j])) / lower[j][j]);
            }
            let whole = given[i].max(f64::MIN_POSITIVE);
            let rest = whole * (1.0 + RIDGE) - energy(&row);
            row.push(rest.max(whole * RIDGE).sqrt());
            lower.push(row);
        }
        Cholesky { lower }
    }

    /// Solves the system for this right-hand side.
    fn solution(&self, right: &[f64]) -> Option<Vec<f64>> {
        let (l, n) = (&self.lower, right.len());
        let mut x = right.to_vec();
        for i in 0..n {
            x[i] = (x[i] - dot(&l[i][..i], &x[..i])) / l[i][i];
        }
        for i in (0..n).rev() {
            let below: f64 = (i + 1..n).map(|j| l[j][i] * x[j]).sum();
            x[i] = (x[i] - below) / l[i][i];
        }
        x.iter().all(|x| x.is_finite()).then_some(x)
    }
}

/// The whole number by which each row of `reference` must be multiplied to give the captured row;
/// `None` where whole numbers do not explain them, or all are 1.
pub fn whole_factors(captured: &Rows, reference: &Rows) -> Option<Vec<f64>> {
    let mut all = Vec::with_capacity(reference.count());
    let (mut before, mut left) = (0.0, 0.0);
    for index in 0..reference.count() {
        let (c, r) = (captured.row(index), reference.row(index));
        let of_row = multiple(c, r);
        let whole = of_row.times.round();
        let off: f64 = c.iter().zip(r).map(|(c, r)| (c - whole * r).powi(2)).sum();
        before += of_row.before;
        left += off.min(of_row.before);
        all.push(if off < of_row.before { whole } else { 1.0 });
    }
    let whole = all.iter().all(|x| x.abs() <= LARGEST);
    (whole && all.iter().any(|&x| x != 1.0) && left <= LEFT * before).then_some(all)
}

/// Runs of equal weights that are not 1.
pub fn runs(weights: &[f64]) -> Vec<(Range<usize>, f64)> {
    let mut runs: Vec<(Range<usize>, f64)> = Vec::new();
    for (index, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 1.0) {
        match runs.last_mut() {
            Some((run, value)) if run.end == index && *value == weight => run.end += 1,
            _ => runs.push((index..index + 1, weight)),
        }
    }
    runs
}

/// Ascending rows as runs of consecutive ones.
pub fn runs_of(rows: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &row in rows {
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Draw;

    fn drawn(rows: usize, cols: usize, seed: u64) -> Rows {
        let mut draw = Draw::new(seed);
        Rows { cols, values: (0..rows * cols).map(|_| draw.normal()).collect() }
    }

    /// Solves a sum of 40 products with these weights and noise of this standard deviation.
    fn solved(weights: &dyn Fn(usize) -> f64, noise: f64) -> Option<Vec<f64>> {
        let (a, b) = (drawn(40, 30, 1), drawn(40, 12, 2));
        let mut draw = Draw::new(3);
        let more = Rows {
            cols: 30,
            values: (0..40 * 30).map(|at| (weights(at / 30) - 1.0) * a.values[at]).collect(),
        };
        let mut error = more.transposed_times(&b);
        error.values.iter_mut().for_each(|x| *x += noise * draw.normal());
        let rounding = noise * noise * error.values.len() as f64;
        whole_weights((&a, &b), (&error, rounding), &|_| false)
    }

    #[test]
    fn a_block_that_is_left_out_and_one_that_counts_twice_are_found_beside_noise() {
        let weights = |i: usize| match i {
            33..40 => 0.0,
            10..14 => 2.0,
            _ => 1.0,
        };
        let solution = solved(&weights, 0.2).unwrap();
        assert_eq!(runs(&solution), [(10..14, 2.0), (33..40, 0.0)]);
    }

    #[test]
    fn the_rows_that_a_sum_was_made_with_are_found() {
        let (a, x) = (drawn(20, 50, 5), drawn(20, 7, 6));
        let solution = factors(&a, &a.transposed_times(&x), &|_| false).unwrap();
        let off: f64 = solution.values.iter().zip(&x.values).map(|(a, b)| (a - b).powi(2)).sum();
        assert!(off < 1e-12 * energy(&x.values), "{off}");
        assert!(factors(&a.transposed(), &x, &|_| false).is_none(), "more rows than columns");
    }

    #[test]
    fn weights_that_are_no_whole_numbers_and_noise_alone_are_not_explained() {
        assert!(solved(&|i| 1.0 + 0.4 * (i as f64).sin(), 0.01).is_none());
        assert!(solved(&|_| 1.0, 0.2).is_none());
    }

    #[test]
    fn a_system_of_equations_is_solved_and_a_singular_one_is_not() {
        let a = vec![vec![4.0, 1.0, 0.0], vec![1.0, 3.0, 1.0], vec![0.0, 1.0, 2.0]];
        let solved = solution(a, vec![6.0, 10.0, 8.0]).unwrap();
        let wanted = [1.0, 2.0, 3.0];
        assert!(solved.iter().zip(wanted).all(|(x, y)| (x - y).abs() < 1e-12), "{solved:?}");
        assert_eq!(solution(vec![vec![1.0, 1.0], vec![1.0, 1.0]], vec![1.0, 1.0]), None);
    }

    #[test]
    fn rows_that_were_written_twice_or_not_at_all_are_found() {
        let reference = drawn(9, 5, 4);
        let value = |at: usize| [1.0, 2.0, 0.0][at / 5 / 3] * reference.values[at];
        let captured = Rows { cols: 5, values: (0..45).map(value).collect() };
        let solution = whole_factors(&captured, &reference).unwrap();
        assert_eq!(runs(&solution), [(3..6, 2.0), (6..9, 0.0)]);
        assert!(whole_factors(&reference, &reference).is_none());
    }
}
