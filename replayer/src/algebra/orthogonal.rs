//! A matrix made nearly orthogonal by Newton-Schulz iterations, and how far rounding brings it.
//!
//! The iteration multiplies small singular values by up to `a` each time, and with them whatever was
//! rounded off: no bound that holds for all matrices is of use. So it is computed again from
//! several draws of the roundings that a job's format makes, and what these differ by is what
//! rounding explains of this matrix.

use rayon::prelude::*;

use crate::draw::Draw;
use crate::kernels::round::Precision;

/// Multiplications of one product above which it is not computed.
const MOST_WORK: usize = 1 << 32;
/// Draws of the roundings: of a small matrix more, as fewer elements tell their size.
const DRAWS: [usize; 2] = [12, 4];
/// Elements from which a matrix is not small.
const MANY: usize = 1 << 14;
/// By how much a variance that was measured on so few draws may be too small.
const MEASURED: f64 = 1.5;

/// The iteration, as a job declares it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newton {
    /// Of `a X + b X Xᵀ X + c (X Xᵀ)² X`.
    pub coefficients: [f64; 3],
    /// How often it is applied.
    pub times: u32,
    /// Keeps the norm that divides the matrix from 0.
    pub eps: f64,
    /// Whether ε is added to the norm, and is not its least value.
    pub adds_eps: bool,
    /// What every result is kept in.
    pub format: Precision,
}

/// A matrix that was made orthogonal.
pub(super) struct Made {
    /// `[rows, columns]`, in exact arithmetic.
    pub values: Vec<f64>,
    /// Variance of each element's own error.
    pub variances: Vec<f64>,
    /// Relative deviation of the error that all elements share.
    pub alike: f64,
}

/// Rounding errors by chance; `None` makes none.
struct Noise(Option<Draw>, Precision);

impl Noise {
    /// A number as it may have been rounded to the format.
    fn rounded(&mut self, x: f64) -> f64 {
        let unit = self.1.unit_roundoff();
        self.0.as_mut().map_or(x, |draw| x + unit * x * (2.0 * draw.unit() - 1.0))
    }

    /// A sum of products as it may have been added up in f32, and rounded: its addends' sizes are
    /// those of two vectors of these norms.
    fn summed(&mut self, x: f64, size: f64) -> f64 {
        let unit = Precision::F32.unit_roundoff();
        let off = self.0.as_mut().map_or(0.0, |draw| unit * size * (2.0 * draw.unit() - 1.0));
        self.rounded(x + off)
    }
}

/// Makes a matrix nearly orthogonal.
pub(super) fn orthogonalised(
    matrix: &[f64],
    (rows, columns): (usize, usize),
    newton: &Newton,
) -> Result<Made, String> {
    let (short, long) = (rows.min(columns), rows.max(columns));
    if short.saturating_mul(short).saturating_mul(long) > MOST_WORK {
        return Err(format!(
            "a matrix of {rows} x {columns} is too large to be made orthogonal again here"
        ));
    }
    let is_tall = rows > columns;
    let flat = if is_tall { transposed(matrix, rows, columns) } else { matrix.to_vec() };
    let run = |noise| {
        let made = iterated(&flat, (short, long), newton, noise);
        if is_tall { transposed(&made, columns, rows) } else { made }
    };
    let exact = run(Noise(None, newton.format));
    let draws = DRAWS[usize::from(matrix.len() >= MANY)];
    let errors: Vec<Vec<f64>> = (0..draws)
        .into_par_iter()
        .map(|at| {
            let drawn = run(Noise(Some(Draw::new(at as u64 + 1)), newton.format));
            drawn.iter().zip(&exact).map(|(x, right)| x - right).collect()
        })
        .collect();
    Ok(measured(exact, &errors, columns))
}

/// The variances of an exact result, from the errors of several draws.
fn measured(exact: Vec<f64>, errors: &[Vec<f64>], columns: usize) -> Made {
    let count = errors.len().max(1) as f64;
    let rows = exact.len() / columns.max(1);
    let mut of_rows = vec![0.0; rows];
    let mut of_columns = vec![0.0; columns];
    let energy: f64 = exact.iter().map(|x| x * x).sum();
    let (mut most, mut alike) = (0.0f64, 0.0f64);
    for error in errors {
        let (mut own, mut along) = (0.0, 0.0);
        for (at, e) in error.iter().enumerate() {
            of_rows[at / columns] += e * e / count;
            of_columns[at % columns] += e * e / count;
            own += e * e;
            along += e * exact[at];
        }
        most = most.max(own);
        alike = alike.max((along / energy.max(f64::MIN_POSITIVE)).abs());
    }
    let total: f64 = of_rows.iter().sum();
    let mean = total / exact.len().max(1) as f64;
    // What is shared by a whole direction of the matrix varies more than independent errors do.
    let spread = MEASURED * (most / total.max(f64::MIN_POSITIVE)).max(1.0);
    let variance = |at: usize| {
        let product = of_rows[at / columns] * of_columns[at % columns];
        spread * (product / total.max(f64::MIN_POSITIVE)).max(mean)
    };
    let variances = (0..exact.len()).map(variance).collect();
    let of_all = (total / energy.max(f64::MIN_POSITIVE)).sqrt();
    // A quarter of the error of one element may be along the matrix beside what was drawn.
    Made { variances, values: exact, alike: (2.0 * alike).max(of_all / 4.0) }
}

/// The iteration on a matrix that is not higher than wide.
fn iterated(
    matrix: &[f64],
    (rows, columns): (usize, usize),
    newton: &Newton,
    mut noise: Noise,
) -> Vec<f64> {
    let mut x: Vec<f64> = matrix.iter().map(|x| noise.rounded(*x)).collect();
    let norm = noise.rounded(x.iter().map(|x| x * x).sum::<f64>().sqrt());
    let norm = if newton.adds_eps { norm + newton.eps } else { norm.max(newton.eps) };
    x.iter_mut().for_each(|x| *x = noise.rounded(*x / norm));
    let [a, b, c] = newton.coefficients;
    for _ in 0..newton.times {
        let turned = transposed(&x, rows, columns);
        let gram = product(&x, &turned, (rows, columns, rows), &mut noise);
        let squared = product(&gram, &gram, (rows, rows, rows), &mut noise);
        let both = gram.iter().zip(&squared).map(|(g, s)| noise.rounded(b * g + c * s));
        let both: Vec<f64> = both.collect();
        let moved = product(&both, &x, (rows, rows, columns), &mut noise);
        x = x.iter().zip(&moved).map(|(x, moved)| noise.rounded(a * x + moved)).collect();
    }
    x
}

fn transposed(matrix: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let at = |at: usize| matrix[at % rows * columns + at / rows];
    (0..matrix.len()).map(at).collect()
}

/// `[rows, depth]` times `[depth, columns]`.
fn product(
    left: &[f64],
    right: &[f64],
    (rows, depth, columns): (usize, usize, usize),
    noise: &mut Noise,
) -> Vec<f64> {
    let mut made = vec![0.0; rows * columns];
    made.par_chunks_mut(columns.max(1)).zip(left.par_chunks(depth.max(1))).for_each(
        |(made, left)| {
            for (x, right) in left.iter().zip(right.chunks(columns.max(1))) {
                made.iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y);
            }
        },
    );
    if noise.0.is_none() {
        return made;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let of_rows: Vec<f64> =
        left.chunks(depth.max(1)).map(|row| norm(&mut row.iter().copied())).collect();
    let mut of_columns = vec![0.0; columns];
    for row in right.chunks(columns.max(1)) {
        of_columns.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
    }
    for (at, x) in made.iter_mut().enumerate() {
        let size = of_rows[at / columns] * of_columns[at % columns].sqrt();
        *x = noise.summed(*x, size);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDARD: Newton = Newton {
        coefficients: [3.4445, -4.7750, 2.0315],
        times: 5,
        eps: 1e-7,
        adds_eps: false,
        format: Precision::Bf16,
    };

    /// Goal: the singular values of what is made lie in the band that the polynomial gives, and
    /// a tall matrix is the transposed of a wide one. Method: `Y Yᵀ` of a matrix by chance.
    #[test]
    fn a_matrix_becomes_nearly_orthogonal_and_its_transposed_the_transposed() {
        let mut draw = Draw::new(3);
        let (rows, columns) = (6, 40);
        let matrix: Vec<f64> = (0..rows * columns).map(|_| draw.normal()).collect();
        let made = orthogonalised(&matrix, (rows, columns), &STANDARD).unwrap();
        let turned = transposed(&made.values, rows, columns);
        let exact = &mut Noise(None, Precision::Bf16);
        let gram = product(&made.values, &turned, (rows, columns, rows), exact);
        for i in 0..rows {
            assert!((0.4..1.6).contains(&gram[i * rows + i]), "{gram:?}");
        }
        let tall = transposed(&matrix, rows, columns);
        let of_tall = orthogonalised(&tall, (columns, rows), &STANDARD).unwrap();
        let off = of_tall.values.iter().zip(&turned).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f64::max) < 1e-12);
    }

    /// Goal: the variances are those of a job that rounds every result to bf16. Method: the same
    /// iteration, rounded to nearest after each operation, is within six deviations everywhere and
    /// beyond half a deviation somewhere.
    #[test]
    fn what_rounding_to_nearest_changes_is_within_the_variances() {
        let mut draw = Draw::new(8);
        for (rows, columns) in [(8, 8), (12, 40), (48, 32)] {
            let matrix: Vec<f64> = (0..rows * columns).map(|_| draw.normal()).collect();
            let made = orthogonalised(&matrix, (rows, columns), &STANDARD).unwrap();
            let near = nearest(&matrix, rows, columns);
            let off = near.iter().zip(&made.values).zip(&made.variances);
            let off: Vec<f64> = off.map(|((x, y), v)| (x - y).abs() / v.sqrt()).collect();
            let most = off.iter().copied().fold(0.0, f64::max);
            assert!((0.5..6.0).contains(&most), "{rows} x {columns}: {most}");
        }
    }

    /// The iteration in bf16, each operation rounded to nearest, written on its own.
    fn nearest(matrix: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        let r = |x: f64| Precision::Bf16.round64(x);
        let (n, m) = (rows.min(columns), rows.max(columns));
        let at = |i: usize, j: usize| if rows <= columns { i * m + j } else { j * n + i };
        let norm = r(matrix.iter().map(|x| r(*x).powi(2)).sum::<f64>().sqrt());
        let mut x: Vec<f64> = (0..n * m).map(|k| r(r(matrix[at(k / m, k % m)]) / norm)).collect();
        for _ in 0..5 {
            let dot = |i: usize, j: usize| (0..m).map(|k| x[i * m + k] * x[j * m + k]).sum::<f64>();
            let g: Vec<f64> = (0..n * n).map(|k| r(dot(k / n, k % n))).collect();
            let square =
                |i: usize, j: usize| (0..n).map(|k| g[i * n + k] * g[k * n + j]).sum::<f64>();
            let u: Vec<f64> =
                (0..n * n).map(|k| r(-4.7750 * g[k] + 2.0315 * square(k / n, k % n))).collect();
            let moved =
                |i: usize, j: usize| (0..n).map(|k| u[i * n + k] * x[k * m + j]).sum::<f64>();
            x = (0..n * m).map(|k| r(3.4445 * x[k] + moved(k / m, k % m))).collect();
        }
        let mut made = vec![0.0; n * m];
        (0..n * m).for_each(|k| made[at(k / m, k % m)] = x[k]);
        made
    }
}
