//! Products of the gradients with a few random columns X `[D, K]`, in f64: `dk X` and `dq X`,
//! without computing dk and dq themselves (Freivalds 1977, "Probabilistic machines can use less
//! running time").
//!
//! `(dk x)[v] = Σ_t e_tv (q_t·x)` and `(dq x)[t] = Σ_v e_tv (k_v·x)`, where e is the dense part of
//! dlogits. The logits are computed once, and the backward GEMMs have a few columns for each probe
//! in place of D. Beside one tile only `[T, K]` and `[V, K]` are in memory. Nothing is judged here.

use super::gemm::{Operand, multiply};
use super::panel::{load, squares};
use super::tile::{Panel, Terms, Upstream};
use super::{TermNoise, check};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use crate::kernels::tiles::{Progress, Tiles, spans};
use std::ops::Range;

/// GEMM columns for each probe: dk, dq, the variance of each, and the part of dk's variance that
/// comes from the tokens' own relative errors.
const COLUMNS: usize = 5;

/// What the gradients are computed from, and the probes X.
#[derive(Clone, Copy)]
pub struct Probing<'a> {
    /// `[T]`: the lse of the reference, or a captured one.
    pub lse: &'a [f64],
    /// `[T]`.
    pub cotangents: Cotangents<'a, f64>,
    /// Variances of the entries of dlogits.
    pub noise: &'a TermNoise,
    /// `[T]`: relative variance of the factors that multiply all entries of a token.
    pub token_rel_var: &'a [f64],
    /// `[D, K]`.
    pub x: &'a [f64],
}

/// The products of the dense part with the probes, and the sums that their rounding variances are
/// computed from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Probed {
    /// `q X`, `[T, K]`.
    pub qx: Vec<f64>,
    /// `k X`, `[V, K]`, 0 from the valid vocabulary on.
    pub kx: Vec<f64>,
    /// `dk_lse X`, `[V, K]`.
    pub dk_lse: Vec<f64>,
    /// `Σ_t copies_t var(e) (q_t·x)²`, `[V, K]`.
    pub dk_noise: Vec<f64>,
    /// `Σ_t copies_t token_rel_var_t e² (q_t·x)²`, `[V, K]`.
    pub dk_tokens: Vec<f64>,
    /// `Σ_t copies_t e² |q_t|²`, `[V]`.
    pub dk_sq: Vec<f64>,
    /// `Σ |e| |q_t·x|` over the entries that a gradient filter may have dropped,
    /// `[V, K]`; empty without a filter.
    pub dk_dropped: Vec<f64>,
    /// `dq_lse X`, `[T, K]`.
    pub dq_lse: Vec<f64>,
    /// `Σ_v var(e) (k_v·x)²`, `[T, K]`.
    pub dq_noise: Vec<f64>,
    /// `Σ_v e² |k_v|²`, `[T]`.
    pub dq_sq: Vec<f64>,
    /// `Σ |e| |k_v·x|` over the entries that a gradient filter may have dropped,
    /// `[T, K]`; empty without a filter.
    pub dq_dropped: Vec<f64>,
    /// `[T]`: derivative of the label's logit with respect to the product q k, and the variance of
    /// that derivative; zeros for an ignored token.
    pub label_slopes: Vec<(f64, f64)>,
}

/// Multiply-adds that `probe` will report for K probes: D for each logit, `COLUMNS` for each probe,
/// and two for sums of squares. Computing the gradients themselves takes `backward_work`.
pub fn probe_work(inputs: &HeadInputs, probes: usize) -> u64 {
    let plane = inputs.q.rows as u64 * inputs.valid_vocab as u64;
    plane * tile_depth(inputs.q.cols, probes)
}

fn tile_depth(depth: usize, probes: usize) -> u64 {
    (depth + COLUMNS * probes + 2) as u64
}

/// Multiplies dk and dq with the probes.
pub fn probe(
    inputs: &HeadInputs,
    by: &Probing<'_>,
    tiles: Tiles,
    progress: &dyn Progress,
) -> Probed {
    check(inputs);
    let (tokens, depth, rows) = (inputs.q.rows, inputs.q.cols, inputs.k.rows);
    let probes = by.x.len().checked_div(depth).unwrap_or(0);
    let upstream = Upstream::new(inputs, by.lse, by.cotangents, by.noise);
    let zeros = |n: usize| vec![0.0; n];
    let filtered = |n: usize| zeros(if by.noise.filter > 0.0 { n } else { 0 });
    let mut out = Probed {
        qx: through(&inputs.q, 0..tokens, by.x, probes, tiles.tokens),
        kx: through(&inputs.k, 0..inputs.valid_vocab, by.x, probes, tiles.vocab),
        dk_lse: zeros(rows * probes),
        dk_noise: zeros(rows * probes),
        dk_tokens: zeros(rows * probes),
        dk_sq: zeros(rows),
        dk_dropped: filtered(rows * probes),
        dq_lse: zeros(tokens * probes),
        dq_noise: zeros(tokens * probes),
        dq_sq: zeros(tokens),
        dq_dropped: filtered(tokens * probes),
        label_slopes: vec![(0.0, 0.0); tokens],
    };
    out.kx.resize(rows * probes, 0.0);
    let (mut query, mut key, mut terms) = (Side::default(), Side::default(), Terms::default());
    for cols in spans(inputs.valid_vocab, tiles.vocab) {
        key.load(&inputs.k, cols.clone(), &out.kx, probes);
        for span in spans(tokens, tiles.tokens) {
            query.load(&inputs.q, span.clone(), &out.qx, probes);
            terms.fill(inputs, &query.panel, &key.panel, upstream);
            let seen = terms.label_slopes.iter().enumerate();
            for (row, slope) in seen.filter_map(|(row, slope)| Some((row, (*slope)?))) {
                out.label_slopes[span.start + row] = slope;
            }
            accumulate(&mut out, &terms, (&query, &key), by.token_rel_var, probes);
            let plane = (span.len() * cols.len()) as u64;
            progress.advance(plane * tile_depth(depth, probes));
        }
    }
    // `terms` has every variance times the token's number of copies, as sums over tokens need it; a
    // row of dq belongs to one token, so the factor is taken out here.
    for (token, copies) in inputs.copies.unwrap_or_default().iter().enumerate() {
        let noise = &mut out.dq_noise[token * probes..(token + 1) * probes];
        noise.iter_mut().chain([&mut out.dq_sq[token]]).for_each(|of_all| *of_all /= copies);
    }
    out
}

/// `matrix X` for some rows of the matrix, `[rows, K]`.
fn through(matrix: &Matrix, rows: Range<usize>, x: &[f64], probes: usize, size: usize) -> Vec<f64> {
    let mut out = vec![0.0; rows.len() * probes];
    let mut panel = Vec::new();
    for span in spans(if probes == 0 { 0 } else { rows.len() }, size) {
        load(matrix, rows.start + span.start..rows.start + span.end, &mut panel);
        let target = &mut out[span.start * probes..span.end * probes];
        let (lhs, rhs) = (Operand::rows(&panel, matrix.cols), Operand::rows(x, probes));
        multiply(target, probes, false, lhs, rhs, matrix.cols);
    }
    out
}

/// Rows of q or k, their products with the probes, and the squares of these products.
#[derive(Default)]
struct Side {
    panel: Panel,
    probed: Vec<f64>,
    probed_sq: Vec<f64>,
}

impl Side {
    fn load(&mut self, matrix: &Matrix, rows: Range<usize>, probed: &[f64], probes: usize) {
        self.probed.clear();
        self.probed.extend_from_slice(&probed[rows.start * probes..rows.end * probes]);
        squares(&self.probed, &mut self.probed_sq);
        self.panel.load(matrix, rows);
    }

    fn magnitudes(&self) -> Vec<f64> {
        self.probed.iter().map(|x| x.abs()).collect()
    }
}

/// Adds one tile to the sums of the earlier tiles.
fn accumulate(
    out: &mut Probed,
    terms: &Terms,
    (query, key): (&Side, &Side),
    token_rel_var: &[f64],
    probes: usize,
) {
    let (span, cols) = (query.panel.rows.clone(), key.panel.rows.clone());
    let (height, width) = (span.len(), cols.len());
    let across = |values| Operand::rows(values, width);
    let columns = |values, n| Operand::rows(values, n);
    let dq = span.start * probes..span.end * probes;
    let dk = cols.start * probes..cols.end * probes;
    for (target, entries, probed, n) in [
        (&mut out.dq_lse[dq.clone()], &terms.dense, &key.probed, probes),
        (&mut out.dq_noise[dq.clone()], &terms.noisy, &key.probed_sq, probes),
        (&mut out.dq_sq[span.clone()], &terms.squared, &key.panel.norms, 1),
    ] {
        multiply(target, n, true, across(entries), columns(probed, n), width);
    }
    let weighted = query.probed_sq.iter().enumerate();
    let weight = |(at, square): (usize, &f64)| square * token_rel_var[span.start + at / probes];
    let weighted: Vec<f64> = weighted.map(weight).collect();
    for (target, entries, probed, n) in [
        (&mut out.dk_lse[dk.clone()], &terms.dense, &query.probed, probes),
        (&mut out.dk_noise[dk.clone()], &terms.noisy, &query.probed_sq, probes),
        (&mut out.dk_tokens[dk.clone()], &terms.squared, &weighted, probes),
        (&mut out.dk_sq[cols.clone()], &terms.squared, &query.panel.norms, 1),
    ] {
        multiply(target, n, true, across(entries).transposed(), columns(probed, n), height);
    }
    if !terms.dropped.is_empty() {
        let (of_q, of_k) = (query.magnitudes(), key.magnitudes());
        let (lost, n) = (across(&terms.dropped), probes);
        multiply(&mut out.dq_dropped[dq], n, true, lost, columns(&of_k, n), width);
        let lost = across(&terms.dropped).transposed();
        multiply(&mut out.dk_dropped[dk], n, true, lost, columns(&of_q, n), height);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::fixture::{Counter, Fixture, SMALL_TILES, with_threads};
    use crate::kernels::reference::{Keep, backward, backward_work, forward};
    use crate::kernels::tiles::NoProgress;
    use crate::kernels::transform::Transform;

    const NOISE: TermNoise = TermNoise {
        p_rel_var: 0.3,
        logit_rel_var: 0.02,
        dot_rel_var: 0.001,
        cap_rel_var: 0.05,
        logit_floor: 0.003,
        label_step: 0.0,
        filter: 0.02,
        whole: false,
        exp_rel_var: 0.0,
        confident: 0.0,
        log_p_rel_var: 0.004,
    };

    fn optioned() -> Fixture {
        let mut fixture = Fixture::usual().with_bias().with_smoothing();
        fixture.transform = Transform::new(0.8, Some(3.0));
        fixture.mask = Some(-1.0);
        fixture
    }

    fn run(fixture: &Fixture, x: &[f64], progress: &dyn Progress) -> Probed {
        let inputs = fixture.inputs();
        let lse = forward(&inputs, SMALL_TILES, &NoProgress).lse;
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let g = [wide(&fixture.g_lse), wide(&fixture.g_label), wide(&fixture.smooth)];
        let cotangents = Cotangents { lse: &g[0], label: &g[1], smooth: &g[2] };
        let token_rel_var = &vec![1.0; fixture.tokens];
        let by = Probing { lse: &lse, cotangents, noise: &NOISE, token_rel_var, x };
        probe(&inputs, &by, SMALL_TILES, progress)
    }

    fn signs(depth: usize, probes: usize) -> Vec<f64> {
        (0..depth * probes).map(|i| if i * 7 % 5 < 2 { 1.0 } else { -1.0 }).collect()
    }

    fn close(got: f64, wanted: f64, size: f64, what: &str) {
        assert!((got - wanted).abs() <= 1e-13 * size, "{what}: {got:e} {wanted:e}");
    }

    /// Goal: every sum is that of the gradient, under every option. Method: the probes are the
    /// columns of the unit matrix, and the results are compared with `backward`, which is itself
    /// tested against scalar loops.
    #[test]
    fn probes_along_the_axes_are_the_gradients_and_their_sums_element_by_element() {
        for fixture in [Fixture::usual(), optioned()] {
            let (inputs, d) = (fixture.inputs(), fixture.depth);
            let unit: Vec<f64> =
                (0..d * d).map(|at| if at % (d + 1) == 0 { 1.0 } else { 0.0 }).collect();
            let probed = run(&fixture, &unit, &NoProgress);
            let lse = forward(&inputs, SMALL_TILES, &NoProgress).lse;
            let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
            let g = [wide(&fixture.g_lse), wide(&fixture.g_label), wide(&fixture.smooth)];
            let g = Cotangents { lse: &g[0], label: &g[1], smooth: &g[2] };
            let all = |probed: &[f64], wanted: &[f64], what: &str| {
                assert_eq!(probed.len(), wanted.len(), "{what}");
                let size = wanted.iter().fold(1e-12, |most: f64, x| most.max(x.abs()));
                probed.iter().zip(wanted).for_each(|(x, y)| close(*x, *y, size, what));
            };
            let rows = |squares: &[f64]| {
                squares.chunks(d).map(|row| row.iter().sum()).collect::<Vec<f64>>()
            };
            let dq = backward(
                &inputs,
                &lse,
                &g,
                &NOISE,
                (SMALL_TILES, Keep::Both, &NoProgress),
                &mut |block| {
                    let span = block.rows.start * d..block.rows.end * d;
                    all(&probed.dk_lse[span.clone()], &block.dk_lse, "dk");
                    all(&probed.dk_noise[span.clone()], &block.dk_lse_var, "dk noise");
                    all(&probed.dk_tokens[span.clone()], &block.dk_lse_sq, "dk tokens");
                    all(&probed.dk_dropped[span], &block.dk_dropped, "dk dropped");
                    all(&probed.dk_sq[block.rows.clone()], &rows(&block.dk_lse_sq), "dk squares");
                },
            );
            all(&probed.dq_lse, &dq.dq_lse, "dq");
            all(&probed.dq_noise, &dq.dq_lse_var, "dq noise");
            all(&probed.dq_dropped, &dq.dq_dropped, "dq dropped");
            all(&probed.dq_sq, &rows(&dq.dq_lse_sq), "dq squares");
            for t in (0..fixture.tokens).filter(|&t| inputs.label(t).is_some()) {
                let (slope, variance) = probed.label_slopes[t];
                let k = inputs.k.get_f64(inputs.label(t).unwrap() * d);
                close(slope * g.label[t] * k, dq.dq_label[t * d], 1.0, "slope");
                close(variance, dq.dq_label_rel_var[t] * slope * slope, 1.0, "its variance");
            }
        }
    }

    #[test]
    fn a_probe_of_signs_is_the_sum_of_the_probes_along_the_axes() {
        let fixture = optioned();
        let d = fixture.depth;
        let x = signs(d, 3);
        let unit: Vec<f64> =
            (0..d * d).map(|at| if at % (d + 1) == 0 { 1.0 } else { 0.0 }).collect();
        let (by_signs, axes) = (run(&fixture, &x, &NoProgress), run(&fixture, &unit, &NoProgress));
        for row in 0..fixture.vocab {
            for probe in 0..3 {
                let wanted: f64 = (0..d).map(|i| axes.dk_lse[row * d + i] * x[i * 3 + probe]).sum();
                close(by_signs.dk_lse[row * 3 + probe], wanted, 1.0, "dk");
            }
        }
    }

    #[test]
    fn the_work_told_is_the_work_foretold_and_the_bits_do_not_depend_on_the_threads() {
        let fixture = Fixture::usual();
        let inputs = fixture.inputs();
        let (counter, x) = (Counter::default(), signs(fixture.depth, 3));
        let probed = run(&fixture, &x, &counter);
        assert_eq!(counter.total(), probe_work(&inputs, 3));
        assert!(probe_work(&inputs, 3) < backward_work(&inputs));
        let again = |threads| with_threads(threads, || run(&fixture, &x, &NoProgress));
        assert!(again(1) == probed && again(3) == probed);
    }
}
