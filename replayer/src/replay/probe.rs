//! dk and dq checked with random probes instead of recomputed (Freivalds 1977).
//!
//! For x of random signs, `dk x` and `dq x` cost one GEMM where the gradients cost
//! seven. A row whose error is Δ shows in one probe as `Δ·x`: never larger than noise
//! with probability 1/2 at most in exact arithmetic, so K probes miss it with 2^-K.
//!
//! With rounding, `Δ·x` must rise above what the declared precision explains. Signs
//! make the errors of a row's elements add like independent ones, whatever their
//! correlation: the probe's variance is the sum over the row of the elements'
//! variances. What multiplies a whole term (p, g, lse) is not averaged over the row but
//! multiplies the term's own probe: `Σ_t var (g p)² (q_t·x)²`, computed as such.
//!
//! Power: `E (Δ·x)² = |Δ|²` and `E (Δ·x)⁴ ≤ 3|Δ|⁴`, so by Paley and Zygmund (1932)
//! `P(|Δ·x| > θ|Δ|) ≥ (1 - θ²)²/3` for every Δ. Rounding may hide what is below the
//! tolerance T once and take T away: `|Δ| ≥ 2T/θ` is missed by K probes with
//! `(1 - (1 - θ²)²/3)^K` at most. An error in one element is `|Δ·x| = |Δ|`, always.

use rayon::prelude::*;
use serde::Serialize;

use super::allowed::{rounded, summed};
use crate::compare::{Allowed, Bound, Rows, Tally, once};
use crate::draw::Draw;
use crate::head::roundings::F32;
use crate::head::{Roundings, Stage};
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED, Matrix, Values};
use crate::kernels::reference::{Probed, TermNoise, probe};
use crate::kernels::tiles::{Progress, Tiles};

/// Probability with which an error above the limit may go unseen.
pub const MISSED: f64 = 1e-6;

/// The head whose gradients are checked, where its backward starts.
#[derive(Clone, Copy)]
pub struct Backward<'a> {
    /// q, k and labels of the unit.
    pub head: HeadInputs<'a>,
    /// lse of each token.
    pub lse: &'a [f64],
    /// Relative variance that this lse brings to the whole row of a token.
    pub lse_scale: &'a [f64],
    /// Upstream of each token.
    pub cotangents: Cotangents<'a, f64>,
}

/// What the job may have rounded.
#[derive(Clone, Debug)]
pub struct Model {
    /// Of one softmax term.
    pub noise: TermNoise,
    /// Of everything else.
    pub roundings: Roundings,
    /// Relative variance of a label gradient's scalar.
    pub label_row: f64,
    /// Relative variance of one constant in all softmax terms.
    pub alike: f64,
    /// Relative variance of one constant in all label gradients.
    pub label_alike: f64,
}

/// How the check is made.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    /// Probes, K.
    pub probes: usize,
    /// What they are drawn from.
    pub seed: u64,
    /// Comparisons of the whole report, which share the false alarms.
    pub comparisons: usize,
    /// How the plane is walked.
    pub tiles: Tiles,
    /// Told of the work.
    pub progress: &'a dyn Progress,
}

/// A captured gradient `[T, D]` or `[V, D]`, and the unit roundoff of its dtype.
pub type CapturedGradient<'a> = (Stage, Matrix<'a>, f64);

/// What the probes of one gradient say.
#[derive(Clone, Debug)]
pub struct ProbedStage {
    /// Which gradient.
    pub stage: Stage,
    /// Probed values against probed reference; columns are probes.
    pub tally: Tally,
    /// What the tally is held against.
    pub bound: Bound,
    /// What the probes can see.
    pub reach: Reach,
    /// For each row, the size of an error in one of its elements that is always found;
    /// over θ, that of any error of the row.
    pub limits: Vec<f64>,
}

/// The smallest errors that are found, relative to the row (its median) or the whole.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reach {
    /// Number of probes.
    pub probes: usize,
    /// Any error of a row, with probability 1 - 10^-6; too few probes promise none.
    pub any: Option<f64>,
    /// An error in one element of a row, with certainty.
    pub single: f64,
    /// A common scale of the whole.
    pub scale: f64,
}

/// The largest θ at which K probes miss an error with `MISSED` at most.
pub fn theta(probes: usize) -> Option<f64> {
    let found = 1.0 - MISSED.powf(1.0 / probes.max(1) as f64);
    let square = 1.0 - (3.0 * found).sqrt();
    (square > 0.0).then(|| square.sqrt())
}

/// Random signs, `[D, K]`.
pub fn signs(depth: usize, plan: &Plan<'_>) -> Vec<f64> {
    let mut draw = Draw::new(plan.seed);
    (0..depth * plan.probes).map(|_| draw.sign()).collect()
}

/// Checks captured gradients of one unit; only q's and k's own are known here.
pub fn check(
    backward: &Backward<'_>,
    captured: &[CapturedGradient<'_>],
    model: &Model,
    plan: &Plan<'_>,
) -> Vec<ProbedStage> {
    let head = &backward.head;
    let x = signs(head.q.cols, plan);
    let (tiles, progress) = (plan.tiles, plan.progress);
    let probed = probe(head, backward.lse, backward.cotangents, &model.noise, &x, tiles, progress);
    let labels = Labels::of(backward, &probed, plan.probes);
    let judge = Judge { backward, model, plan, probed: &probed, labels: &labels, x: &x };
    let known = |stage: Stage| judge.side(stage).is_some();
    captured.iter().filter(|one| known(one.0)).map(|one| judge.stage(one)).collect()
}

/// The label parts of dk and dq, exactly.
struct Labels {
    /// `dk_label X`, `[V, K]`.
    dk: Vec<f64>,
    /// `Σ (e_label q·x)²` over the hits, `[V, K]`.
    dk_squares: Vec<f64>,
    /// `Σ (e_label)² |q|²` over the hits, `[V]`.
    dk_sq: Vec<f64>,
    /// `dq_label X`, `[T, K]`.
    dq: Vec<f64>,
    /// Tokens of each label, ascending by label and token.
    hits: Vec<(usize, usize)>,
    /// `e_label` of each token, 0 where ignored.
    entries: Vec<f64>,
}

impl Labels {
    fn of(backward: &Backward<'_>, probed: &Probed, probes: usize) -> Labels {
        let head = &backward.head;
        let (tokens, rows, depth) = (head.q.rows, head.k.rows, head.q.cols);
        let zeros = |n: usize| vec![0.0; n];
        let entries = (0..tokens).map(|t| match head.labels[t] {
            IGNORED => 0.0,
            _ => backward.cotangents.label[t] * probed.label_slope[t],
        });
        let mut hits: Vec<(usize, usize)> = (0..tokens)
            .filter(|&t| head.labels[t] != IGNORED)
            .map(|t| (head.labels[t] as usize, t))
            .collect();
        hits.sort_unstable();
        let mut found = Labels {
            dk: zeros(rows * probes),
            dk_squares: zeros(rows * probes),
            dk_sq: zeros(rows),
            dq: zeros(tokens * probes),
            hits,
            entries: entries.collect(),
        };
        for &(row, token) in &found.hits {
            let entry = found.entries[token];
            let norm: f64 =
                (token * depth..(token + 1) * depth).map(|at| head.q.get_f64(at).powi(2)).sum();
            found.dk_sq[row] += entry * entry * norm;
            for probe in 0..probes {
                let addend = entry * probed.qx[token * probes + probe];
                found.dk[row * probes + probe] += addend;
                found.dk_squares[row * probes + probe] += addend * addend;
                found.dq[token * probes + probe] = entry * probed.kx[row * probes + probe];
            }
        }
        found
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Q,
    K,
}

/// Which parts of a gradient a stage holds.
#[derive(Clone, Copy)]
struct Parts {
    lse: bool,
    label: bool,
}

struct Judge<'a> {
    backward: &'a Backward<'a>,
    model: &'a Model,
    plan: &'a Plan<'a>,
    probed: &'a Probed,
    labels: &'a Labels,
    x: &'a [f64],
}

/// One row's energies: of what was captured, and of its parts.
#[derive(Clone, Copy, Default)]
struct Energies {
    captured: f64,
    lse: f64,
    label: f64,
}

impl Judge<'_> {
    fn side(&self, stage: Stage) -> Option<(Side, Parts)> {
        let parts = |lse, label| Parts { lse, label };
        match stage {
            Stage::Dq => Some((Side::Q, parts(true, true))),
            Stage::DqLse => Some((Side::Q, parts(true, false))),
            Stage::DqLabel => Some((Side::Q, parts(false, true))),
            Stage::Dk => Some((Side::K, parts(true, true))),
            Stage::DkLse => Some((Side::K, parts(true, false))),
            Stage::DkLabel => Some((Side::K, parts(false, true))),
            _ => None,
        }
    }

    fn stage(&self, captured: &CapturedGradient<'_>) -> ProbedStage {
        let &(stage, ref matrix, output) = captured;
        let (side, parts) = self.side(stage).expect("only gradients come here");
        let probes = self.plan.probes;
        let (values, energies) = self.captured(matrix, side, parts);
        let (lse, label) = match side {
            Side::Q => (&self.probed.dq_lse, &self.labels.dq),
            Side::K => (&self.probed.dk_lse, &self.labels.dk),
        };
        let part = |on: bool, x: f64| if on { x } else { 0.0 };
        let reference: Vec<f64> = lse
            .iter()
            .zip(label)
            .map(|(a, b)| part(parts.lse, *a) + part(parts.label, *b))
            .collect();
        let bound = Bound::new(self.plan.comparisons, matrix.rows, matrix.rows * probes);
        let allowed = |row: usize, probe: usize, _x: f64| {
            self.allowed((side, parts), row, probe, energies[row], output, &bound)
        };
        let repeats = tokens_of_label(self.backward.head.labels);
        let of_token = |row: usize| repeats[row];
        let probed = Matrix { rows: matrix.rows, cols: probes, values: Values::F64(&values) };
        let rows = Rows {
            captured: probed,
            reference: &reference,
            index: &|row| row as u64,
            repeats: if side == Side::Q { &of_token } else { &once },
        };
        let tally = Tally::of(&rows, allowed, &bound);
        let reach = |row: usize, probe: usize| allowed(row, probe, 0.0).reach(bound.element);
        let limit = |row: usize| (0..probes).map(|n| 2.0 * reach(row, n)).fold(0.0, f64::max);
        let limits: Vec<f64> = (0..matrix.rows).map(limit).collect();
        let size = |row: usize| energies[row].captured.sqrt();
        let filled = (0..matrix.rows).filter(|&row| size(row) > 0.0);
        let single = median(filled.map(|row| limits[row] / size(row)).collect());
        let any = theta(probes).map(|theta| single / theta);
        let reach = Reach { probes, any, single, scale: 2.0 * tally.allowed_slope(&bound) };
        ProbedStage { stage, tally, bound, reach, limits }
    }

    /// The captured rows times the probes, `[rows, K]`, and the energies of the rows.
    fn captured(&self, matrix: &Matrix<'_>, side: Side, parts: Parts) -> (Vec<f64>, Vec<Energies>) {
        let (depth, probes) = (matrix.cols, self.plan.probes);
        let row = |row: usize| {
            let mut values = vec![0.0; depth];
            matrix.panel_f64(row..row + 1, &mut values);
            let mut probed = vec![0.0; probes];
            for (value, signs) in values.iter().zip(self.x.chunks(probes.max(1))) {
                probed.iter_mut().zip(signs).for_each(|(sum, sign)| *sum += value * sign);
            }
            let label = self.label_row(side, row, depth);
            let square = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
            // The softmax part is known only by its probes: what was captured less the
            // exact label part has its size, and u² times a size need not be exact.
            let rest: f64 = match parts.label {
                true => values.iter().zip(&label).map(|(x, y)| (x - y).powi(2)).sum(),
                false => square(&values),
            };
            (probed, Energies { captured: square(&values), lse: rest, label: square(&label) })
        };
        let found: Vec<(Vec<f64>, Energies)> = (0..matrix.rows).into_par_iter().map(row).collect();
        let energies = found.iter().map(|one| one.1).collect();
        (found.into_iter().flat_map(|one| one.0).collect(), energies)
    }

    /// The exact label part of one row.
    fn label_row(&self, side: Side, row: usize, depth: usize) -> Vec<f64> {
        let head = &self.backward.head;
        let mut sum = vec![0.0; depth];
        let mut add = |entry: f64, matrix: &Matrix<'_>, of: usize| {
            for (d, sum) in sum.iter_mut().enumerate() {
                *sum += entry * matrix.get_f64(of * depth + d);
            }
        };
        match side {
            Side::Q if head.labels[row] != IGNORED => {
                add(self.labels.entries[row], &head.k, head.labels[row] as usize);
            }
            Side::Q => {}
            Side::K => {
                let hits = &self.labels.hits;
                let first = hits.partition_point(|hit| hit.0 < row);
                let own = hits[first..].iter().take_while(|hit| hit.0 == row);
                own.for_each(|&(_, token)| add(self.labels.entries[token], &head.q, token));
            }
        }
        sum
    }

    /// Variance of one probed value. All of it counts as alike over the row: the probes
    /// of a row see the same errors.
    fn allowed(
        &self,
        (side, parts): (Side, Parts),
        row: usize,
        probe: usize,
        energies: Energies,
        output: f64,
        bound: &Bound,
    ) -> Allowed {
        let depth = self.backward.head.q.cols as f64;
        let at = row * self.plan.probes + probe;
        let r = &self.model.roundings;
        let each = |u: f64, energy: f64| depth * rounded(u, (energy / depth).sqrt());
        let mut found = Allowed { row: each(output, energies.captured), ..Allowed::default() };
        if parts.lse {
            found = found + self.lse_part(side, row, at, energies.lse, bound);
        }
        if parts.label {
            found = found + self.label_part(side, row, at, energies.label);
        }
        if parts.lse && parts.label {
            found.row += each(r.parts, energies.lse) + each(r.parts, energies.label);
            found.row += each(F32, energies.captured);
        }
        found
    }

    fn lse_part(&self, side: Side, row: usize, at: usize, energy: f64, bound: &Bound) -> Allowed {
        let (probed, head) = (self.probed, &self.backward.head);
        let accumulate = self.model.roundings.accumulate;
        let sum = |n: usize, squares: f64| summed(accumulate, n as f64, energy.sqrt(), squares);
        match side {
            Side::Q => {
                let value = probed.dq_lse[at].powi(2);
                Allowed {
                    row: sum(head.valid_vocab, probed.dq_sq[row])
                        + probed.dq_noise[at]
                        + self.backward.lse_scale[row] * value,
                    shared: self.model.alike * value,
                    ..Allowed::default()
                }
            }
            Side::K => {
                // A token's lse multiplies its term: its probe (q·x)² is below 2x |q|²
                // but with probability 2 exp(-x).
                let scale = self.backward.lse_scale.iter().copied().fold(0.0, f64::max);
                Allowed {
                    row: sum(head.q.rows, probed.dk_sq[row]) + probed.dk_noise[at],
                    shared: 2.0 * bound.element * scale * probed.dk_sq[row]
                        + self.model.alike * probed.dk_lse[at].powi(2),
                    ..Allowed::default()
                }
            }
        }
    }

    fn label_part(&self, side: Side, row: usize, at: usize, energy: f64) -> Allowed {
        let (r, depth) = (&self.model.roundings, self.backward.head.q.cols as f64);
        let labels = self.labels;
        match side {
            Side::Q => {
                let value = labels.dq[at].powi(2);
                Allowed {
                    row: depth * rounded(r.label_grad, (energy / depth).sqrt())
                        + self.model.label_row * value,
                    shared: self.model.label_alike * value,
                    ..Allowed::default()
                }
            }
            Side::K => {
                let first = labels.hits.partition_point(|hit| hit.0 < row);
                let hits = labels.hits[first..].iter().take_while(|hit| hit.0 == row).count();
                let squares = labels.dk_sq[row];
                Allowed {
                    row: r.label_grad * r.label_grad * squares / 3.0
                        + summed(r.label_scatter, hits as f64, energy.sqrt(), squares)
                        + self.model.label_row * labels.dk_squares[at],
                    shared: self.model.label_alike * labels.dk[at].powi(2),
                    ..Allowed::default()
                }
            }
        }
    }
}

impl Reach {
    /// What the probes saw and what they cannot see, as a clause.
    pub fn sentence(&self, stage: Stage) -> String {
        let (probes, single, scale) = (self.probes, self.single, self.scale);
        let any = match self.any {
            Some(any) => format!(
                "{probes} probes find an error of {any:.1e} of a row of {stage} with probability 1 - 1e-6"
            ),
            None => format!(
                "{probes} probes miss an error of a row of {stage} with probability {:.1e}; 35 are the fewest that promise 1e-6",
                (2f64 / 3.0).powi(probes as i32)
            ),
        };
        format!(
            "{any}, one wrong element from {single:.1e} of its row, a common scale from {scale:.1e}"
        )
    }
}

/// For each token, how many tokens have its label: their label parts are copies.
fn tokens_of_label(labels: &[u32]) -> Vec<f64> {
    let mut counts = std::collections::HashMap::new();
    labels.iter().for_each(|label| *counts.entry(label).or_insert(0.0) += 1.0);
    labels.iter().map(|label| counts[label]).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests;
