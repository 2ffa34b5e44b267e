//! dq, dk and dbias from dlogits that were captured: two GEMMs and no softmax.
//!
//! Comparing a captured dq or dk with these products finds faults of its own GEMM: a fault of
//! dlogits is in both.

use super::gemm::{Operand, multiply};
use super::panel::{load, load_columns, squares};
use crate::kernels::matrix::{HeadInputs, Matrix};
use crate::kernels::tiles::{Progress, Tiles, spans};
use std::ops::Range;

/// Gradients with respect to q, `[T, D]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DqProducts {
    /// `dlogits k`.
    pub dq: Vec<f64>,
    /// Sum over v of `dlogits² k²`.
    pub dq_sq: Vec<f64>,
}

/// Gradients with respect to a block of rows of k, `[rows, D]`, and of the bias, `[rows]`.
#[derive(Debug, Clone)]
pub struct DkProducts<'a> {
    /// Rows of k.
    pub rows: Range<usize>,
    /// `dlogitsᵀ q`.
    pub dk: &'a [f64],
    /// Sum over t of `copies dlogits² q²`, with `copies` from `HeadInputs::copies`.
    pub dk_sq: &'a [f64],
    /// Sum over t of dlogits.
    pub dbias: &'a [f64],
    /// Sum over t of `copies dlogits²`.
    pub dbias_sq: &'a [f64],
}

/// Multiply-adds that `from_dlogits` will report.
pub fn from_dlogits_work(inputs: &HeadInputs) -> u64 {
    4 * inputs.gemm_work()
}

/// dq and dk of captured dlogits `[T, V]`. Vocabulary tiles are the outer loop; rows of
/// k beyond the valid vocabulary have no gradient and are not read.
pub fn from_dlogits(
    inputs: &HeadInputs,
    dlogits: &Matrix,
    tiles: Tiles,
    progress: &dyn Progress,
    on_dk: &mut dyn FnMut(DkProducts),
) -> DqProducts {
    let (tokens, depth) = (inputs.q.rows, inputs.q.cols);
    assert_eq!((dlogits.rows, dlogits.cols), (tokens, inputs.k.rows), "dlogits are [T, V]");
    let zeros = || vec![0.0; tokens * depth];
    let mut out = DqProducts { dq: zeros(), dq_sq: zeros() };
    let (mut q, mut q_sq, mut k, mut k_sq) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut tile, mut tile_sq) = (Vec::new(), Vec::new());
    for rows in spans(inputs.k.rows, tiles.vocab) {
        let valid = rows.start..rows.end.min(inputs.valid_vocab).max(rows.start);
        let (mut dk, mut dk_sq) = (vec![0.0; rows.len() * depth], vec![0.0; rows.len() * depth]);
        let (mut dbias, mut dbias_sq) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
        load(&inputs.k, valid.clone(), &mut k);
        squares(&k, &mut k_sq);
        let width = valid.len();
        for span in spans(if width == 0 { 0 } else { tokens }, tiles.tokens) {
            load(&inputs.q, span.clone(), &mut q);
            squares(&q, &mut q_sq);
            load_columns(dlogits, span.clone(), valid.clone(), &mut tile);
            squares(&tile, &mut tile_sq);
            let elements = span.start * depth..span.end * depth;
            for (target, tile, k) in [
                (&mut out.dq[elements.clone()], &tile, &k),
                (&mut out.dq_sq[elements], &tile_sq, &k_sq),
            ] {
                multiply(
                    target,
                    depth,
                    true,
                    Operand::rows(tile, width),
                    Operand::rows(k, depth),
                    width,
                );
            }
            weigh(&mut tile_sq, width, inputs.copies.map(|copies| &copies[span.clone()]));
            for (target, tile, q) in [
                (&mut dk[..width * depth], &tile, &q),
                (&mut dk_sq[..width * depth], &tile_sq, &q_sq),
            ] {
                let tile = Operand::rows(tile, width).transposed();
                multiply(target, depth, true, tile, Operand::rows(q, depth), span.len());
            }
            for (target, tile) in [(&mut dbias, &tile), (&mut dbias_sq, &tile_sq)] {
                for row in tile.chunks(width) {
                    target.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
            }
            progress.advance(4 * (span.len() * width * depth) as u64);
        }
        let (dk, dk_sq, dbias, dbias_sq) = (&dk[..], &dk_sq[..], &dbias[..], &dbias_sq[..]);
        on_dk(DkProducts { rows, dk, dk_sq, dbias, dbias_sq });
    }
    out
}

/// Multiplies each token's row of a tile by its number of copies.
fn weigh(tile: &mut [f64], width: usize, copies: Option<&[f64]>) {
    let Some(copies) = copies else { return };
    for (row, copies) in tile.chunks_mut(width.max(1)).zip(copies) {
        row.iter_mut().for_each(|x| *x *= copies);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::fixture::{Fixture, SMALL_TILES};
    use crate::kernels::matrix::Values;
    use crate::kernels::tiles::NoProgress;

    #[test]
    fn products_of_captured_dlogits_are_what_loops_give() {
        let fixture = Fixture::usual();
        let (tokens, depth, vocab) = (fixture.tokens, fixture.depth, fixture.vocab);
        let values: Vec<f64> = (0..tokens * vocab).map(|i| (i as f64 * 0.7).sin()).collect();
        let dlogits = Matrix { rows: tokens, cols: vocab, values: Values::F64(&values) };
        let inputs = fixture.inputs();
        let (mut dk, mut dbias) = (Vec::new(), Vec::new());
        let computed = from_dlogits(&inputs, &dlogits, SMALL_TILES, &NoProgress, &mut |block| {
            dk.extend_from_slice(block.dk);
            dbias.extend_from_slice(block.dbias);
        });
        let e = |t: usize, v: usize| if v < fixture.valid { values[t * vocab + v] } else { 0.0 };
        let close = |got: f64, wanted: f64| assert!((got - wanted).abs() < 1e-11, "{got} {wanted}");
        for index in 0..tokens * depth {
            let (t, d) = (index / depth, index % depth);
            let k = |v: usize| inputs.k.get_f64(v * depth + d);
            close(computed.dq[index], (0..fixture.valid).map(|v| e(t, v) * k(v)).sum());
            close(
                computed.dq_sq[index],
                (0..fixture.valid).map(|v| (e(t, v) * k(v)).powi(2)).sum(),
            );
        }
        assert_eq!((dk.len(), dbias.len()), (vocab * depth, vocab));
        for (index, &dk) in dk.iter().enumerate() {
            let (v, d) = (index / depth, index % depth);
            close(dk, (0..tokens).map(|t| e(t, v) * inputs.q.get_f64(t * depth + d)).sum());
        }
        for (v, &dbias) in dbias.iter().enumerate() {
            close(dbias, (0..tokens).map(|t| e(t, v)).sum());
        }
    }
}
