//! Values that lie so near a tie of their rounding that the job may have rounded them the
//! other way: a hypothesis that emulates a rounding is not refuted by them.

use super::context::Replay;
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use crate::kernels::policy::{self, Policy};
use crate::kernels::span_of;
use crate::kernels::tiles::Tiles;

/// Tokens whose entries are held at a time.
const SPAN: usize = 256;
/// Entries that are further apart at the two ends, relatively, were rounded to different
/// values: coarser formats have spacings of 2⁻¹¹ or more, and the ends differ by less
/// than 2⁻¹⁵ without rounding.
const FLIPPED: f64 = 1.0 / 8192.0;

/// A head as far off to one side as its job's own arithmetic may bring it.
pub(crate) struct End<'h> {
    pub(crate) head: HeadInputs<'h>,
    pub(crate) lse: Vec<f64>,
    /// Factors of the cotangents of lse, of the label and of smoothing.
    factors: [f64; 3],
}

impl End<'_> {
    /// Cotangents at this end.
    pub(super) fn cotangents(&self, cotangents: &Cotangents<'_, f64>) -> [Vec<f64>; 3] {
        let times = |values: &[f64], by: f64| values.iter().map(|x| x * by).collect();
        let [lse, label, smooth] = self.factors;
        [
            times(cotangents.lse, lse),
            times(cotangents.label, label),
            times(cotangents.smooth, smooth),
        ]
    }
}

/// The head as far off as arithmetic of unit roundoff `u` may bring it, either way: what is
/// rounded to one side in one and to the other in the other lies near a tie, and the job may
/// have rounded it either way.
///
/// A logit errs by its dot product, `u |q| |k| √(D/6)/√D` and `u |z| √(D/9)`, and by the
/// bias, scale and lse that follow, a rounding each; [`SIGMAS`] standard deviations of it, as a
/// factor of the logits and as a step of lse. An entry errs by the few products that make
/// it of p and g, in whatever order they are taken: [`PRODUCTS`] roundings.
pub(crate) fn near_ties<'h>(u: f64, head: &HeadInputs<'h>, lse: &[f64]) -> [End<'h>; 2] {
    let d = head.q.cols;
    let largest = head.k.row_energies(0..head.valid_vocab).into_iter().fold(0.0, f64::max);
    let scale = head.transform.scale.abs();
    let factor = SIGMAS * u * (1.0 + (d as f64 / 9.0).sqrt());
    let step = |t: usize| {
        let dot = (head.q.row_energy(t) * largest / 6.0).sqrt() * scale;
        SIGMAS * u * (dot + 4.0 + 2.0 * lse[t].abs())
    };
    let steps: Vec<f64> = (0..lse.len()).map(step).collect();
    [-1.0, 1.0].map(|sign| {
        let mut off = *head;
        off.transform.scale *= 1.0 + sign * factor;
        let moved = lse.iter().zip(&steps).map(|(lse, step)| lse - sign * step).collect();
        let more = sign * PRODUCTS * u;
        // The label's part has the other sign: both ends move away from each other.
        End { head: off, lse: moved, factors: [1.0 + more, 1.0 - more, 1.0 - more] }
    })
}

/// Of some 10⁵ entries near a tie none is further off.
const SIGMAS: f64 = 5.0;
/// Products between p and an entry: g, a cotangent, the transform's derivative.
const PRODUCTS: f64 = 4.0;

/// Entries of dlogits that may have been rounded the other way.
pub(super) struct Flips {
    /// Token, class and how far it jumps.
    entries: Vec<(usize, usize, f64)>,
}

impl Flips {
    /// How far the rows of dk may be off, `[V, D]`: every jump may be to either side.
    pub(super) fn of_dk(&self, head: &HeadInputs<'_>) -> Vec<f64> {
        jumps(self.entries.iter().map(|&(t, v, by)| (v, t, by)), head.k.rows, &head.q)
    }

    /// The same of dq, `[T, D]`.
    pub(super) fn of_dq(&self, head: &HeadInputs<'_>) -> Vec<f64> {
        jumps(self.entries.iter().copied(), head.q.rows, &head.k)
    }
}

/// Sums of jumps times magnitudes of the other factor's rows.
fn jumps(
    entries: impl Iterator<Item = (usize, usize, f64)>,
    rows: usize,
    other: &Matrix<'_>,
) -> Vec<f64> {
    let d = other.cols;
    let mut jumps = vec![0.0; rows * d];
    for (row, row_of_other, by) in entries {
        for (i, x) in jumps[row * d..(row + 1) * d].iter_mut().enumerate() {
            *x += by * other.get_f64(row_of_other * d + i).abs();
        }
    }
    jumps
}

impl Replay<'_> {
    /// Entries that a policy rounds to different values at the two ends. The gradients of
    /// the ends do not do: jumps to opposite sides cancel in them.
    pub(super) fn flips(
        &self,
        policy: &Policy,
        tiles: Tiles,
        ends: &[End<'_>; 2],
        cotangents: &Cotangents<'_, f64>,
    ) -> Flips {
        let (tokens, classes) = (ends[0].head.q.rows, ends[0].head.k.rows);
        let mut entries = Vec::new();
        for first in (0..tokens).step_by(SPAN) {
            let span = first..(first + SPAN).min(tokens);
            let [low, high] = [&ends[0], &ends[1]].map(|end| {
                let [lse, label, smooth] = end.cotangents(cotangents);
                let part = |all: &[f64]| all[span.clone()].to_vec();
                let [a, b, c] = [&lse, &label, &smooth].map(|all| part(all));
                let upstream = Cotangents { lse: &a, label: &b, smooth: &c };
                let (head, lse) = (span_of(&end.head, span.clone()), part(&end.lse));
                let mut values_of_end = vec![0.0; span.len() * classes];
                policy::plane(
                    policy,
                    &head,
                    &lse,
                    &upstream,
                    tiles,
                    self.executor.progress(),
                    &mut |tile| {
                        let width = tile.cols.len().max(1);
                        for (row, values) in tile.tokens.clone().zip(tile.dlogits.chunks(width)) {
                            values_of_end[row * classes..][tile.cols.clone()]
                                .copy_from_slice(values);
                        }
                    },
                );
                values_of_end
            });
            for (element, (a, b)) in low.iter().zip(&high).enumerate() {
                let by = (a - b).abs();
                if by > FLIPPED * a.abs().max(b.abs()) {
                    entries.push((first + element / classes.max(1), element % classes.max(1), by));
                }
            }
        }
        Flips { entries }
    }
}
