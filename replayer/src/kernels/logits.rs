//! Rows of final logits in f32 or f64, from q and k where they lie or moved a step
//! along a direction, with all that the head's options make of them.
//!
//! Dot products are summed in eight lanes that are added at the end. The vocabulary
//! is taken in blocks of `BLOCK` rows of k: beside the result no copy of k is held.

use std::ops::Range;

use rayon::prelude::*;

use crate::draw::Draw;
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix};
use crate::kernels::number::Number;
use crate::kernels::round::Precision;

/// Rows of k that one thread takes at a time.
const BLOCK: usize = 64;
/// Partial sums of a dot product.
const LANES: usize = 8;

/// What the loss is computed in.
pub trait Real: Number + Copy + Send + Sync + PartialOrd + From<f32> {
    /// The nearest number.
    fn of(x: f64) -> Self;
    /// The number as f64, exactly.
    fn wide(self) -> f64;
    /// The number as a job stores it; f64 is kept, it stands for no rounding at all.
    fn stored(self, as_a: Precision) -> Self;
    /// Rows of a matrix.
    fn panel(matrix: &Matrix, rows: Range<usize>, panel: &mut Vec<Self>);
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn wide(self) -> f64 {
        self.into()
    }
    fn stored(self, as_a: Precision) -> f32 {
        as_a.round(self)
    }
    fn panel(matrix: &Matrix, rows: Range<usize>, panel: &mut Vec<f32>) {
        panel.resize(rows.len() * matrix.cols, 0.0);
        matrix.panel_f32(rows, panel);
    }
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }
    fn wide(self) -> f64 {
        self
    }
    fn stored(self, _as_a: Precision) -> f64 {
        self
    }
    fn panel(matrix: &Matrix, rows: Range<usize>, panel: &mut Vec<f64>) {
        panel.resize(rows.len() * matrix.cols, 0.0);
        matrix.panel_f64(rows, panel);
    }
}

/// A direction along which q or k moves; its elements have a root mean square of 1.
#[derive(Clone, Debug)]
pub enum Direction {
    /// Of q: `[tokens, D]`, for the tokens asked for.
    Q(Vec<f64>),
    /// Of k: `sign(v) row[d]`, signs from the seed. A direction of full rank would be
    /// a second k in memory.
    K {
        /// Of the signs.
        seed: u64,
        /// `[D]`.
        row: Vec<f64>,
    },
}

impl Direction {
    fn sign(seed: u64, row: usize) -> f64 {
        Draw::new(seed ^ (row as u64).wrapping_mul(0xd6e8_feb8_6659_fd93)).sign()
    }
}

/// The columns of a row of logits: the valid ones, then those of a finite mask.
pub fn columns(head: &HeadInputs) -> usize {
    match head.mask {
        Some(mask) if mask > f64::NEG_INFINITY => head.k.rows,
        _ => head.valid_vocab,
    }
}

/// Final logits `[tokens, columns]` at `q + step direction` or `k + step direction`,
/// rounded to what the job stores them as.
pub fn logits<F: Real>(
    head: &HeadInputs,
    tokens: &[usize],
    moved: Option<(f64, &Direction)>,
    stored: Precision,
) -> Vec<F> {
    let mut q = rows::<F>(&head.q, tokens);
    let step = F::of(moved.map_or(0.0, |moved| moved.0));
    let by = moved.map(|moved| moved.1);
    if let Some(Direction::Q(direction)) = by {
        q.iter_mut().zip(direction).for_each(|(q, &d)| *q = *q + step * F::of(d));
    }
    let along = by.filter(|by| matches!(by, Direction::K { .. }));
    let finish = |raw: F, _token: usize, v: usize| {
        let biased = raw + F::of(head.bias.map_or(0.0, |bias| bias[v]));
        head.transform.value(biased).stored(stored)
    };
    products(head, (&q, tokens.len()), along.map(|by| (step, by)), finish)
}

/// How fast each logit `[tokens, columns]` changes along a direction, from the logits
/// there.
pub fn slopes(
    head: &HeadInputs,
    tokens: &[usize],
    logits: &[f64],
    direction: &Direction,
) -> Vec<f64> {
    let width = columns(head);
    let slope =
        |raw: f64, token: usize, v: usize| raw * head.transform.slope_at(logits[token * width + v]);
    let mut slopes = match direction {
        Direction::Q(direction) => products(head, (direction, tokens.len()), None, slope),
        Direction::K { seed, row } => {
            let q = rows::<f64>(&head.q, tokens);
            let along: Vec<f64> = q.chunks(head.q.cols.max(1)).map(|q| dot(q, row)).collect();
            let slope_of =
                |token: usize, v: usize| slope(Direction::sign(*seed, v) * along[token], token, v);
            let all = (0..tokens.len()).flat_map(|t| (0..width).map(move |v| (t, v)));
            all.map(|(t, v)| if v < head.valid_vocab { slope_of(t, v) } else { 0.0 }).collect()
        }
    };
    for row in slopes.chunks_mut(width.max(1)) {
        row[head.valid_vocab.min(width)..].fill(0.0);
    }
    slopes
}

/// `finish(q kᵀ)`, `[tokens, columns]`, the columns of a mask filled with it.
fn products<F: Real>(
    head: &HeadInputs,
    (q, count): (&[F], usize),
    moved: Option<(F, &Direction)>,
    finish: impl Fn(F, usize, usize) -> F + Sync,
) -> Vec<F> {
    let (depth, width) = (head.q.cols, columns(head));
    let starts: Vec<usize> = (0..head.valid_vocab).step_by(BLOCK).collect();
    let blocks: Vec<Vec<F>> = starts
        .par_iter()
        .map(|&start| {
            let range = start..(start + BLOCK).min(head.valid_vocab);
            let mut k = Vec::new();
            F::panel(&head.k, range.clone(), &mut k);
            if let Some((step, Direction::K { seed, row })) = moved {
                for (key, v) in k.chunks_mut(depth.max(1)).zip(range.clone()) {
                    let signed = step * F::of(Direction::sign(*seed, v));
                    key.iter_mut().zip(row).for_each(|(k, &d)| *k = *k + signed * F::of(d));
                }
            }
            let mut block = Vec::with_capacity(count * range.len());
            for token in 0..count {
                let query = &q[token * depth..(token + 1) * depth];
                for v in range.clone() {
                    let start_of_class = (v - start) * depth;
                    block.push(finish(
                        dot(query, &k[start_of_class..start_of_class + depth]),
                        token,
                        v,
                    ));
                }
            }
            block
        })
        .collect();
    let mut out = vec![F::of(head.mask.unwrap_or(0.0)); count * width];
    for (&start, block) in starts.iter().zip(&blocks) {
        let size = BLOCK.min(head.valid_vocab - start);
        for (token, values) in block.chunks(size).enumerate() {
            out[token * width + start..][..size].copy_from_slice(values);
        }
    }
    out
}

/// Rows picked out of a matrix.
fn rows<F: Real>(matrix: &Matrix, rows: &[usize]) -> Vec<F> {
    let (mut all, mut panel) = (Vec::with_capacity(rows.len() * matrix.cols), Vec::new());
    for &row in rows {
        F::panel(matrix, row..row + 1, &mut panel);
        all.extend_from_slice(&panel);
    }
    all
}

fn dot<F: Real>(a: &[F], b: &[F]) -> F {
    let mut lanes = [F::of(0.0); LANES];
    let (head_a, rest_a) = a.as_chunks::<LANES>();
    let (head_b, rest_b) = b.as_chunks::<LANES>();
    for (a, b) in head_a.iter().zip(head_b) {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane] + a[lane] * b[lane];
        }
    }
    let rest = rest_a.iter().zip(rest_b).fold(F::of(0.0), |sum, (&a, &b)| sum + a * b);
    lanes.into_iter().fold(rest, |sum, lane| sum + lane)
}

/// The column of a token's label.
pub fn label(head: &HeadInputs, token: usize) -> Option<usize> {
    Some(head.labels[token]).filter(|&label| label != IGNORED).map(|label| label as usize)
}
