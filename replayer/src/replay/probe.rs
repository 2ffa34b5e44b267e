//! dk and dq checked with random probes instead of recomputed (Freivalds 1977).
//!
//! For x of random signs, `dk x` and `dq x` cost one GEMM where the gradients cost
//! seven and every emulated member more. A row whose error is Δ shows in one probe as `Δ·x`: never larger than noise
//! with probability 1/2 at most in exact arithmetic, so K probes miss it with 2^-K.
//!
//! With rounding, `Δ·x` must rise above what the declared precision explains. Signs
//! make the errors of a row's elements add like independent ones, whatever their
//! correlation: the probe's variance is the sum over the row of the elements'
//! variances. What multiplies a whole term (p, g, lse) is not averaged over the row but
//! multiplies the term's own probe: `Σ_t var (g p)² (q_t·x)²`, computed as such.
//!
//! The variances are those of `gradient_allowances`, summed over the row. Bounded from
//! above, not computed: the size of the dense part of a row is taken from what was
//! captured less the exact label part; a token's lse and g count both as independent of
//! the other tokens' (a tail) and as alike in all rows of dk (their errors add).
//!
//! Power: `E (Δ·x)² = |Δ|²` and `E (Δ·x)⁴ ≤ 3|Δ|⁴`, so by Paley and Zygmund (1932)
//! `P(|Δ·x| > θ|Δ|) ≥ (1 - θ²)²/3` for every Δ. Rounding may hide what is below the
//! tolerance T once and take T away: `|Δ| ≥ 2T/θ` is missed by K probes with
//! `(1 - (1 - θ²)²/3)^K` at most. An error in one element is `|Δ·x| = |Δ|`, always.

use backtape::nan::{larger, largest};
use rayon::prelude::*;
use serde::Serialize;

use super::label_counts::tokens_of_label;
use super::rounding_variance::{carried, relative, rounded};
use crate::compare::{Allowed, Bound, Rows, Tally, once};
use crate::draw::Draw;
use crate::head::Stage;
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED, Matrix, Values};
use crate::kernels::policy::{Path, Policy, Sum};
use crate::kernels::reference::{Probed, Probing, TermNoise, probe};
use crate::kernels::round::Precision;
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
    /// Relative variance that lse and g bring to the whole row of a token.
    pub token_rel_var: &'a [f64],
    /// The part of it that is g's: the label part has no lse.
    pub g_rel_var: &'a [f64],
    /// Upstream of each token.
    pub cotangents: Cotangents<'a, f64>,
}

/// What the job may have rounded.
#[derive(Clone, Debug)]
pub struct Model {
    /// Of one softmax term.
    pub noise: TermNoise,
    /// The largest plausible rounding at each point.
    pub widest: Policy,
    /// Tiles of the job.
    pub tiles: Tiles,
    /// Unit roundoff of what is done element by element.
    pub compute: f64,
    /// What narrowing q or k costs, as a unit roundoff.
    pub input: f64,
    /// Half the smallest step of an entry, where that is coarse.
    pub entry_floor: f64,
    /// Whether the label's term may be one of the whole sum.
    pub carries_label: bool,
    /// Relative variance of a label gradient's scalar.
    pub label_row: f64,
    /// Relative variance of one constant in all softmax terms.
    pub alike: f64,
    /// Relative variance of one constant in all label gradients.
    pub label_alike: f64,
    /// Relative variance that all addends share: narrowed inputs, the logits' constants.
    pub addends_alike: f64,
    /// For each token, variance along q over q²; for the rows of k, along k over `k²/|k|⁴`.
    pub sliced: (Vec<f64>, f64),
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

/// A captured gradient `[T, D]` or `[V, D]`.
#[derive(Clone, Copy)]
pub struct CapturedGradient<'a> {
    /// Which one.
    pub stage: Stage,
    /// Its values.
    pub values: Matrix<'a>,
    /// Variance of storing element `at`, whose value is `x`.
    pub storage: &'a (dyn Fn(usize, f64) -> f64 + Sync),
}

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
    let share = 1.0 - MISSED.powf(1.0 / probes.max(1) as f64);
    let square = 1.0 - (3.0 * share).sqrt();
    (square > 0.0).then(|| square.sqrt())
}

/// Random signs, `[D, K]`.
pub fn signs(depth: usize, plan: &Plan<'_>) -> Vec<f64> {
    let mut draw = Draw::new(plan.seed);
    (0..depth * plan.probes).map(|_| draw.sign()).collect()
}

/// Checks captured gradients of one unit; only q's and k's own are known here. Beside them
/// the derivative of each label's logit with its variance, for the label parts themselves.
pub fn check(
    backward: &Backward<'_>,
    captured: &[CapturedGradient<'_>],
    model: &Model,
    plan: &Plan<'_>,
) -> (Vec<ProbedStage>, Vec<(f64, f64)>) {
    let head = &backward.head;
    let x = signs(head.q.cols, plan);
    let (tiles, progress) = (plan.tiles, plan.progress);
    let by = Probing {
        lse: backward.lse,
        cotangents: backward.cotangents,
        noise: &model.noise,
        token_rel_var: backward.token_rel_var,
        x: &x,
    };
    let probed = probe(head, &by, tiles, progress);
    let labels = Labels::of(backward, &probed, plan.probes);
    let judge = Judge { backward, model, plan, probed: &probed, labels: &labels, x: &x };
    let known = |stage: Stage| judge.side(stage).is_some();
    let gradients = captured.iter().filter(|gradient| known(gradient.stage));
    let stages = gradients.map(|gradient| judge.stage(gradient)).collect();
    (stages, probed.label_slopes)
}

/// The label parts of dk and dq, exactly.
struct Labels {
    /// `dk_label X`, `[V, K]`.
    dk: Vec<f64>,
    /// `Σ (e_label q·x)²` over the hits, `[V, K]`.
    dk_squares: Vec<f64>,
    /// `Σ (e_label)² |q|²` over the hits, `[V]`.
    dk_sq: Vec<f64>,
    /// `Σ var (q·x)²` over the hits, var that of the logit's derivative, `[V, K]`.
    dk_slopes: Vec<f64>,
    /// `Σ var (e_label q·x)²` over the hits, var that of the token's g, `[V, K]`.
    dk_tokens: Vec<f64>,
    /// Variance of the entry that the logit's derivative brings, `[T]`.
    slope_var: Vec<f64>,
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
            _ => backward.cotangents.label[t] * probed.label_slopes[t].0,
        });
        let slope_var = |t: usize| backward.cotangents.label[t].powi(2) * probed.label_slopes[t].1;
        let mut hits: Vec<(usize, usize)> = (0..tokens)
            .filter(|&t| head.labels[t] != IGNORED)
            .map(|t| (head.labels[t] as usize, t))
            .collect();
        hits.sort_unstable();
        let mut labels = Labels {
            dk: zeros(rows * probes),
            dk_squares: zeros(rows * probes),
            dk_sq: zeros(rows),
            dk_slopes: zeros(rows * probes),
            dk_tokens: zeros(rows * probes),
            slope_var: (0..tokens).map(slope_var).collect(),
            dq: zeros(tokens * probes),
            hits,
            entries: entries.collect(),
        };
        for &(row, token) in &labels.hits {
            let entry = labels.entries[token];
            let norm: f64 =
                (token * depth..(token + 1) * depth).map(|at| head.q.get_f64(at).powi(2)).sum();
            let copies = head.copies.map_or(1.0, |copies| copies[token]);
            labels.dk_sq[row] += copies * entry * entry * norm;
            for probe in 0..probes {
                let (element, qx) = (row * probes + probe, probed.qx[token * probes + probe]);
                // Tokens that are copies round alike: their errors add.
                let copies = head.copies.map_or(1.0, |copies| copies[token]);
                let addend = entry * qx;
                labels.dk[element] += addend;
                labels.dk_squares[element] += copies * addend * addend;
                labels.dk_slopes[element] += copies * labels.slope_var[token] * qx * qx;
                labels.dk_tokens[element] += copies * backward.g_rel_var[token] * addend * addend;
                labels.dq[token * probes + probe] = entry * probed.kx[row * probes + probe];
            }
        }
        labels
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
    /// Variance of storing the row.
    storage: f64,
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
        let CapturedGradient { stage, values: matrix, .. } = captured;
        let stage = *stage;
        let (side, parts) = self.side(stage).expect("only gradients come here");
        let probes = self.plan.probes;
        let (values, energies) = self.captured(captured, side, parts);
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
            self.allowed((side, parts), row, probe, energies[row])
        };
        let repeats = tokens_of_label(self.backward.head.labels);
        let copies = self.backward.head.copies;
        let of_token =
            |row: usize| f64::max(repeats[row], copies.map_or(1.0, |copies| copies[row]));
        let probed = Matrix { rows: matrix.rows, cols: probes, values: Values::F64(&values) };
        let rows = Rows {
            captured: probed,
            reference: &reference,
            index: &|row| row as u64,
            repeats: if side == Side::Q { &of_token } else { &once },
        };
        let tally = Tally::of(&rows, allowed, &bound);
        let reach = |row: usize, probe: usize| allowed(row, probe, 0.0).reach(bound.element);
        let limit = |row: usize| largest((0..probes).map(|n| 2.0 * reach(row, n)));
        let limits: Vec<f64> = (0..matrix.rows).map(limit).collect();
        let size = |row: usize| energies[row].captured.sqrt();
        let filled = (0..matrix.rows).filter(|&row| size(row) > 0.0);
        let single = median(filled.map(|row| limits[row] / size(row)).collect());
        let any = theta(probes).map(|theta| single / theta);
        let reach = Reach { probes, any, single, scale: 2.0 * tally.allowed_slope(&bound) };
        ProbedStage { stage, tally, bound, reach, limits }
    }

    /// The captured rows times the probes, `[rows, K]`, and the energies of the rows.
    fn captured(
        &self,
        captured: &CapturedGradient<'_>,
        side: Side,
        parts: Parts,
    ) -> (Vec<f64>, Vec<Energies>) {
        let matrix = &captured.values;
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
            let stored = |(i, &x): (usize, &f64)| (captured.storage)(row * depth + i, x);
            let storage = values.iter().enumerate().map(stored).sum();
            let (captured, label) = (square(&values), square(&label));
            (probed, Energies { captured, storage, lse: rest, label })
        };
        let projected: Vec<(Vec<f64>, Energies)> =
            (0..matrix.rows).into_par_iter().map(row).collect();
        let energies = projected.iter().map(|one| one.1).collect();
        (projected.into_iter().flat_map(|one| one.0).collect(), energies)
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
                let label_hits = hits[first..].iter().take_while(|hit| hit.0 == row);
                label_hits.for_each(|&(_, token)| add(self.labels.entries[token], &head.q, token));
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
    ) -> Allowed {
        let element = row * self.plan.probes + probe;
        let Policy { parts: part, output, .. } = self.model.widest;
        let mut allowed = Allowed::default();
        allowed.row += energies.storage + self.each(output, energies.captured);
        if parts.lse {
            allowed = allowed + self.lse_part(side, row, element, energies.lse);
        }
        if parts.label {
            allowed = allowed + self.label_part((side, parts.lse), row, element, energies.label);
        }
        if parts.lse && parts.label {
            allowed.row += self.each(part, energies.lse) + self.each(part, energies.label);
            allowed.row += relative(self.model.compute, energies.captured.sqrt());
        }
        allowed
    }

    /// Variance of rounding each element of a row of this energy.
    fn each(&self, precision: Precision, energy: f64) -> f64 {
        let depth = self.backward.head.q.cols.max(1) as f64;
        depth * rounded(precision, (energy / depth).sqrt())
    }

    /// Rounding of each product of a row, and of the factor that is not its entry.
    fn product(&self) -> f64 {
        (self.model.widest.product.unit_roundoff().powi(2) + self.model.input.powi(2)) / 3.0
    }

    fn lse_part(&self, side: Side, row: usize, element: usize, energy: f64) -> Allowed {
        let (probed, head, model) = (self.probed, &self.backward.head, self.model);
        let Policy { sums, path, tile_add, chunk_add, .. } = model.widest;
        let (n, tile, sum_model, join) = match (side, path) {
            (Side::Q, _) => (head.valid_vocab, model.tiles.vocab, sums.dq, tile_add),
            (Side::K, Path::Chunked) => (head.q.rows, model.tiles.tokens, sums.dk, chunk_add),
            (Side::K, _) => (head.q.rows, model.tiles.tokens, sums.dk, tile_add),
        };
        let sum = |squares: f64| {
            let (tiles, total) = (n.div_ceil(tile.max(1)) as f64, energy.sqrt());
            sum_model.variance(n as f64, total, squares)
                + Sum::of(join).variance(tiles, total, squares)
                + self.product() * squares
        };
        let floor = |probed: &[f64]| match model.entry_floor {
            0.0 => 0.0,
            floor => {
                // Entries in a format's smallest numbers round alike, or each for itself.
                let column =
                    || probed.iter().skip(element % self.plan.probes).step_by(self.plan.probes);
                let copies = |row: usize| match (side, head.copies) {
                    (Side::K, Some(copies)) => copies[row],
                    _ => 1.0,
                };
                let each = column().enumerate().map(|(row, x)| copies(row) * x * x).sum::<f64>();
                floor * floor * (each + column().sum::<f64>().powi(2))
            }
        };
        let certain = |dropped: &[f64]| dropped.get(element).copied().unwrap_or(0.0);
        match side {
            Side::Q => {
                let value = probed.dq_lse[element].powi(2);
                Allowed {
                    row: sum(probed.dq_sq[row])
                        + model.addends_alike * probed.dq_sq[row]
                        + model.sliced.0[row] * probed.qx[element].powi(2)
                        + probed.dq_noise[element]
                        + floor(&probed.kx)
                        + self.backward.token_rel_var[row] * value,
                    shared: model.alike * value,
                    certain: certain(&probed.dq_dropped),
                    ..Allowed::default()
                }
            }
            Side::K => Allowed {
                row: sum(probed.dk_sq[row])
                    + model.sliced.1 * self.along_k(row, element)
                    + probed.dk_noise[element]
                    + floor(&probed.qx)
                    + probed.dk_tokens[element],
                shared: probed.dk_tokens[element] + model.alike * probed.dk_lse[element].powi(2),
                certain: certain(&probed.dk_dropped),
                ..Allowed::default()
            },
        }
    }

    /// `(k·x)²/|k|⁴` of a row of k.
    fn along_k(&self, row: usize, element: usize) -> f64 {
        let k = &self.backward.head.k;
        let square = |i: usize| k.get_f64(row * k.cols + i).powi(2);
        match self.model.sliced.1 > 0.0 && row < self.backward.head.valid_vocab {
            false => 0.0,
            true => match (0..k.cols).map(square).sum::<f64>() {
                norm if norm > 0.0 => (self.probed.kx[element] / norm).powi(2),
                _ => 0.0,
            },
        }
    }

    fn label_part(
        &self,
        (side, whole): (Side, bool),
        row: usize,
        element: usize,
        energy: f64,
    ) -> Allowed {
        let (model, labels, probes) = (self.model, self.labels, self.plan.probes);
        let Policy { sums, path, label_grad, .. } = model.widest;
        let inside = |sum: Sum, n: usize, squares: f64| match whole && model.carries_label {
            false => 0.0,
            true => carried(sum, n as f64, squares),
        };
        let head = &self.backward.head;
        match side {
            Side::Q => {
                let value = labels.dq[element].powi(2);
                let kx = match self.backward.head.labels[row] {
                    IGNORED => 0.0,
                    label => self.probed.kx[label as usize * probes + element % probes],
                };
                Allowed {
                    row: self.each(label_grad, energy)
                        + inside(sums.dq, head.valid_vocab, energy)
                        + model.addends_alike * energy
                        + model.input * model.input / 3.0 * energy
                        + (model.label_row + self.backward.g_rel_var[row]) * value
                        + labels.slope_var[row] * kx * kx,
                    shared: model.label_alike * value,
                    ..Allowed::default()
                }
            }
            Side::K => {
                let first = labels.hits.partition_point(|hit| hit.0 < row);
                let hits = labels.hits[first..].iter().take_while(|hit| hit.0 == row).count();
                let (hits, squares) = (hits as f64, labels.dk_sq[row]);
                let scatter = if path == Path::Fused { sums.label_scatter } else { sums.dk };
                let tiny = label_grad.smallest_subnormal() / 2.0;
                let depth = self.backward.head.q.cols as f64;
                Allowed {
                    row: (label_grad.unit_roundoff().powi(2) / 3.0 + self.product()) * squares
                        + depth * hits * tiny * tiny
                        + scatter.variance(hits, energy.sqrt(), squares)
                        + inside(sums.dk, head.q.rows, squares + energy)
                        + model.label_row * labels.dk_squares[element]
                        + labels.dk_slopes[element]
                        + labels.dk_tokens[element],
                    shared: model.label_alike * labels.dk[element].powi(2)
                        + labels.dk_tokens[element],
                    ..Allowed::default()
                }
            }
        }
    }
}

impl Reach {
    /// What both promise.
    pub(super) fn worse(self, other: Reach) -> Reach {
        let any = self.any.zip(other.any).map(|(value, other)| larger(value, other));
        let (single, scale) = (larger(self.single, other.single), larger(self.scale, other.scale));
        Reach { any, single, scale, ..self }
    }

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
            "{any}, one wrong element from {single:.1e} of its row, a common scale from {scale:.1e}; columns and values shown are those of the probes"
        )
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests;
