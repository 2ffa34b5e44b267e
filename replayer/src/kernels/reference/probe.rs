//! The gradients seen through random probes, in f64: `dk X` and `dq X` for a few
//! columns X `[D, K]`, without the gradients (Freivalds 1977, "Probabilistic machines
//! can use less running time").
//!
//! `(dk x)[v] = Σ_t e_tv (q_t·x)` and `(dq x)[t] = Σ_v e_tv (k_v·x)`, e the logits'
//! gradient: the logits are formed once, and of the two backward GEMMs of depth D only
//! K columns each are left. Beyond one tile `[T, K]` and `[V, K]` are held. It judges
//! nothing.

use super::gemm::{Operand, multiply};
use super::panel::{load, squares};
use super::{Progress, TermNoise, Tiles, spans};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use rayon::prelude::*;
use std::ops::Range;

/// What the probes say of the softmax part, and what its rounding variance is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct Probed {
    /// `q X`, `[T, K]`.
    pub qx: Vec<f64>,
    /// `k X`, `[V, K]`, 0 from the valid vocabulary on.
    pub kx: Vec<f64>,
    /// `dk_lse X`, `[V, K]`.
    pub dk_lse: Vec<f64>,
    /// `Σ_t (g_lse p)² noise(t, v) (q_t·x)²`, `[V, K]`.
    pub dk_noise: Vec<f64>,
    /// `Σ_t (g_lse p)² |q_t|²`, `[V]`.
    pub dk_sq: Vec<f64>,
    /// `dq_lse X`, `[T, K]`.
    pub dq_lse: Vec<f64>,
    /// `Σ_v (g_lse p)² noise(t, v) (k_v·x)²`, `[T, K]`.
    pub dq_noise: Vec<f64>,
    /// `Σ_v (g_lse p)² |k_v|²`, `[T]`.
    pub dq_sq: Vec<f64>,
    /// `[T]`: derivative of the label's logit by its raw logit; 1 without a transform,
    /// 0 for an ignored token.
    pub label_slope: Vec<f64>,
}

/// Multiply-adds that `probe` will report for K probes: the logits, and for each probe
/// dk, dq and their variances. The recomputation needs `backward_work`.
pub fn probe_work(inputs: &HeadInputs, probes: usize) -> u64 {
    let plane = inputs.q.rows as u64 * inputs.valid_vocab as u64;
    plane * tile_depth(inputs.q.cols, probes)
}

fn tile_depth(depth: usize, probes: usize) -> u64 {
    (depth + 4 * probes) as u64
}

/// The probes `x` `[D, K]` of dk and dq at a given lse and cotangents, `[T]`.
pub fn probe(
    inputs: &HeadInputs,
    lse: &[f64],
    cotangents: Cotangents<'_, f64>,
    noise: &TermNoise,
    x: &[f64],
    tiles: Tiles,
    progress: &dyn Progress,
) -> Probed {
    inputs.check();
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    let probes = x.len().checked_div(depth).unwrap_or(0);
    assert_eq!(lse.len(), tokens, "one lse a token");
    let zeros = |n: usize| vec![0.0; n];
    let mut out = Probed {
        qx: through(&inputs.q, 0..tokens, x, probes, tiles.tokens),
        kx: through(&inputs.k, 0..inputs.valid_vocab, x, probes, tiles.vocab),
        dk_lse: zeros(inputs.k.rows * probes),
        dk_noise: zeros(inputs.k.rows * probes),
        dk_sq: zeros(inputs.k.rows),
        dq_lse: zeros(tokens * probes),
        dq_noise: zeros(tokens * probes),
        dq_sq: zeros(tokens),
        label_slope: zeros(tokens),
    };
    out.kx.resize(inputs.k.rows * probes, 0.0);
    let (mut query, mut key) = (Panel::default(), Panel::default());
    let mut tile = Tile::default();
    for rows in spans(inputs.valid_vocab, tiles.vocab) {
        key.load(&inputs.k, rows.clone(), &out.kx, probes);
        for span in spans(tokens, tiles.tokens) {
            query.load(&inputs.q, span.clone(), &out.qx, probes);
            tile.fill(inputs, (&query, &key), (&span, &rows), (lse, cotangents), noise);
            tile.label_slopes(inputs, &span, &rows, &mut out.label_slope);
            accumulate(&mut out, &tile, (&query, &key), (&span, &rows), probes);
            let plane = (span.len() * rows.len()) as u64;
            progress.advance(plane * tile_depth(depth, probes));
        }
    }
    out
}

/// `matrix X` for some rows, `[rows, K]`.
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

/// Rows of q or k, their squared norms, their probes and the squares of these.
#[derive(Default)]
struct Panel {
    values: Vec<f64>,
    norms: Vec<f64>,
    probed: Vec<f64>,
    probed_sq: Vec<f64>,
}

impl Panel {
    fn load(&mut self, matrix: &Matrix, rows: Range<usize>, probed: &[f64], probes: usize) {
        load(matrix, rows.clone(), &mut self.values);
        let depth = matrix.cols;
        let norm = |row: usize| {
            self.values[row * depth..(row + 1) * depth].iter().map(|x| x * x).sum::<f64>()
        };
        self.norms = (0..rows.len()).map(norm).collect();
        self.probed.clear();
        self.probed.extend_from_slice(&probed[rows.start * probes..rows.end * probes]);
        squares(&self.probed, &mut self.probed_sq);
    }
}

/// One tile of the softmax part of the logits' gradient, of its square, of its square
/// times the noise, and of the slope of the transform.
#[derive(Default)]
struct Tile {
    terms: Vec<f64>,
    squared: Vec<f64>,
    noisy: Vec<f64>,
    slopes: Vec<f64>,
}

impl Tile {
    fn fill(
        &mut self,
        inputs: &HeadInputs,
        (query, key): (&Panel, &Panel),
        (span, rows): (&Range<usize>, &Range<usize>),
        (lse, cotangents): (&[f64], Cotangents<'_, f64>),
        noise: &TermNoise,
    ) {
        let (width, depth) = (rows.len(), inputs.q.cols);
        for buffer in [&mut self.terms, &mut self.squared, &mut self.noisy, &mut self.slopes] {
            buffer.resize(span.len() * width, 0.0);
        }
        let keys = Operand::rows(&key.values, depth).transposed();
        multiply(&mut self.terms, width, false, Operand::rows(&query.values, depth), keys, depth);
        let rows_of = (
            self.terms.par_chunks_mut(width),
            self.squared.par_chunks_mut(width),
            self.noisy.par_chunks_mut(width),
            self.slopes.par_chunks_mut(width),
        );
        rows_of.into_par_iter().enumerate().for_each(|(row, (terms, squared, noisy, slopes))| {
            let token = span.start + row;
            for v in 0..width {
                let bias = inputs.bias.map_or(0.0, |bias| bias[rows.start + v]);
                let (logit, slope) = transformed(inputs, terms[v] + bias);
                let softmax = cotangents.lse[token] * libm::exp(logit - lse[token]);
                let size = (softmax.abs() + cotangents.smooth[token].abs()) * slope;
                let relative = noise.p_rel_var
                    + noise.logit_rel_var * logit * logit
                    + noise.dot_rel_var * query.norms[row] * key.norms[v];
                terms[v] = (softmax + cotangents.smooth[token]) * slope;
                squared[v] = size * size;
                noisy[v] = size * size * relative;
                slopes[v] = slope;
            }
        });
    }

    fn label_slopes(
        &self,
        inputs: &HeadInputs,
        span: &Range<usize>,
        rows: &Range<usize>,
        slopes: &mut [f64],
    ) {
        for token in span.clone() {
            if let Some(label) = inputs.label(token).filter(|label| rows.contains(label)) {
                let at = (token - span.start) * rows.len() + label - rows.start;
                slopes[token] = self.slopes[at];
            }
        }
    }
}

/// A logit and its derivative by the raw logit: `c tanh(s x / c)`, `s (1 - tanh²)`.
fn transformed(inputs: &HeadInputs, raw: f64) -> (f64, f64) {
    let scale = inputs.transform.scale;
    match inputs.transform.softcap {
        None => (scale * raw, scale),
        Some(cap) => {
            let bend = libm::tanh(scale * raw / cap);
            (cap * bend, scale * (1.0 - bend * bend))
        }
    }
}

/// Adds one tile to what the earlier ones left.
fn accumulate(
    out: &mut Probed,
    tile: &Tile,
    (query, key): (&Panel, &Panel),
    (span, rows): (&Range<usize>, &Range<usize>),
    probes: usize,
) {
    let (height, width) = (span.len(), rows.len());
    let across = |values| Operand::rows(values, width);
    let columns = |values, n| Operand::rows(values, n);
    let dq = span.start * probes..span.end * probes;
    let dk = rows.start * probes..rows.end * probes;
    for (target, terms, probed, n) in [
        (&mut out.dq_lse[dq.clone()], &tile.terms, &key.probed, probes),
        (&mut out.dq_noise[dq], &tile.noisy, &key.probed_sq, probes),
        (&mut out.dq_sq[span.clone()], &tile.squared, &key.norms, 1),
    ] {
        multiply(target, n, true, across(terms), columns(probed, n), width);
    }
    for (target, terms, probed, n) in [
        (&mut out.dk_lse[dk.clone()], &tile.terms, &query.probed, probes),
        (&mut out.dk_noise[dk], &tile.noisy, &query.probed_sq, probes),
        (&mut out.dk_sq[rows.clone()], &tile.squared, &query.norms, 1),
    ] {
        multiply(target, n, true, across(terms).transposed(), columns(probed, n), height);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::fixture::{Counter, Fixture, SMALL_TILES, with_threads};
    use crate::kernels::matrix::Transform;
    use crate::kernels::reference::{backward, forward};
    use crate::kernels::tiles::NoProgress;

    const PROBES: usize = 3;
    const NOISE: TermNoise = TermNoise { p_rel_var: 0.3, logit_rel_var: 0.02, dot_rel_var: 0.001 };

    fn signs(depth: usize) -> Vec<f64> {
        (0..depth * PROBES).map(|i| if i * 7 % 5 < 2 { 1.0 } else { -1.0 }).collect()
    }

    fn run(fixture: &Fixture, inputs: &HeadInputs, progress: &dyn Progress) -> Probed {
        let lse = forward(inputs, SMALL_TILES, &NoProgress).lse;
        let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
        let smooth = vec![0.0; fixture.tokens];
        let g = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
        probe(inputs, &lse, g, &NOISE, &signs(fixture.depth), SMALL_TILES, progress)
    }

    fn close(found: f64, wanted: f64, size: f64, what: &str) {
        assert!((found - wanted).abs() <= 1e-13 * size, "{what}: {found:e} {wanted:e}");
    }

    /// Method: the gradients themselves, times the probes.
    #[test]
    fn a_probe_is_the_gradient_times_the_probe() {
        let fixture = Fixture::usual();
        let inputs = fixture.inputs();
        let found = run(&fixture, &inputs, &NoProgress);
        let (x, d) = (signs(fixture.depth), fixture.depth);
        let lse = forward(&inputs, SMALL_TILES, &NoProgress).lse;
        let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
        let check_row = |row: &[f64], probed: &[f64], what: &str| {
            for probe in 0..PROBES {
                let wanted: f64 = (0..d).map(|i| row[i] * x[i * PROBES + probe]).sum();
                let size: f64 = row.iter().map(|x| x.abs()).sum();
                close(probed[probe], wanted, size.max(1e-6), what);
            }
        };
        let dq = backward(
            &inputs,
            &lse,
            &g_lse,
            &g_label,
            &NOISE,
            SMALL_TILES,
            &NoProgress,
            &mut |block| {
                for (row, v) in block.rows.clone().enumerate() {
                    let at = row * d..(row + 1) * d;
                    let probed = &found.dk_lse[v * PROBES..(v + 1) * PROBES];
                    check_row(&block.dk_lse[at.clone()], probed, "dk");
                    let energy: f64 = block.dk_lse_sq[at].iter().sum();
                    close(found.dk_sq[v], energy, energy.max(1e-12), "dk_sq");
                }
            },
        );
        for t in 0..fixture.tokens {
            let at = t * d..(t + 1) * d;
            let probed = &found.dq_lse[t * PROBES..(t + 1) * PROBES];
            check_row(&dq.dq_lse[at.clone()], probed, "dq");
            let energy: f64 = dq.dq_lse_sq[at].iter().sum();
            close(found.dq_sq[t], energy, energy.max(1e-12), "dq_sq");
        }
    }

    /// Method: element by element, every option set, from formulas and not from tiles.
    #[test]
    fn terms_noise_and_slopes_hold_under_every_option() {
        let fixture = Fixture::new(9, 5, 23, 20);
        let bias: Vec<f64> = (0..23).map(|v| f64::from(v) / 20.0).collect();
        let transform = Transform { scale: 0.8, softcap: Some(1.5) };
        let inputs = HeadInputs { bias: Some(&bias), transform, ..fixture.inputs() };
        let x = signs(5);
        let lse: Vec<f64> = (0..9).map(|t| 2.0 + t as f64 / 9.0).collect();
        let (g_lse, g_label) = (fixture.g_lse_f64(), fixture.g_label_f64());
        let smooth = vec![-3e-5; 9];
        let g = Cotangents { lse: &g_lse, label: &g_label, smooth: &smooth };
        let found = probe(&inputs, &lse, g, &NOISE, &x, SMALL_TILES, &NoProgress);
        let wide = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let column: Vec<f64> = (0..5).map(|i| x[i * PROBES + 1]).collect();
        for v in 0..23 {
            let k = wide(fixture.k(v));
            let (mut value, mut noisy) = (0.0, 0.0);
            for t in (0..9).filter(|_| v < 20) {
                let q = wide(fixture.q(t));
                let bend = (0.8 * (dot(&q, &k) + bias[v]) / 1.5).tanh();
                let (logit, slope) = (1.5 * bend, 0.8 * (1.0 - bend * bend));
                let p = g_lse[t] * (logit - lse[t]).exp();
                value += (p - 3e-5) * slope * dot(&q, &column);
                let relative = 0.3 + 0.02 * logit * logit + 0.001 * dot(&q, &q) * dot(&k, &k);
                let size = (p.abs() + 3e-5) * slope * dot(&q, &column);
                noisy += size * size * relative;
                if fixture.labels[t] as usize == v {
                    close(found.label_slope[t], slope, 1.0, "slope");
                }
            }
            close(found.dk_lse[v * PROBES + 1], value, 1.0, "dk");
            close(found.dk_noise[v * PROBES + 1], noisy, noisy.max(1e-12), "noise");
        }
    }

    #[test]
    fn the_work_told_is_the_work_foretold_and_the_bits_do_not_depend_on_the_threads() {
        let fixture = Fixture::usual();
        let inputs = fixture.inputs();
        let counter = Counter::default();
        let found = run(&fixture, &inputs, &counter);
        assert_eq!(counter.total(), probe_work(&inputs, PROBES));
        let again = |threads| with_threads(threads, || run(&fixture, &inputs, &NoProgress));
        assert!(again(1) == found && again(3) == found);
    }
}
