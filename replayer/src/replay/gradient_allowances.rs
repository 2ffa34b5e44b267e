//! What is allowed of the elements of dq and of dk, in the numbers of their stage, rows and columns
//! (`compare::allowance`): whoever compares an element takes them from here.

use super::judge::Judge;
use super::problem::Problem;
use super::rounding_variance::{carried, summed_by};
use super::slab::Slab;
use crate::compare::allowance::FLUSH;
use crate::compare::allowance::{
    Allowance, DENSE, Dense, Joined, LABEL, Label, OfColumn, OfRow, Rounding, Sums,
};
use crate::compare::{Allowed, ONE_ROUNDING};
use crate::head::{Share, Stage};
use crate::kernels::matrix::HeadInputs;
use crate::kernels::policy::{Path, Policy};
use crate::kernels::reference::Backward;

const _: () =
    assert!(ONE_ROUNDING == 3.0, "a rounding's variance is a third of its largest square");

/// The numbers of a stage's elements.
pub(super) struct Allowances {
    pub(super) stage: Allowance,
    /// One a row.
    pub(super) rows: Vec<OfRow>,
    /// One a column.
    pub(super) columns: Vec<OfColumn>,
}

impl Allowances {
    /// What is allowed of an element before it was stored.
    pub(super) fn of(&self, row: usize, column: usize, sums: &Sums) -> Allowed {
        self.stage.of(sums, &self.rows[row], &self.columns[column])
    }
}

/// The parts of a gradient that a stage is.
fn parts(stage: Stage) -> i64 {
    match stage.share() {
        Share::Softmax => DENSE,
        Share::Label => LABEL,
        Share::Whole => DENSE | LABEL,
    }
}

/// An element of a list that may be empty.
fn at(values: &[f64], index: usize) -> f64 {
    values.get(index).copied().unwrap_or(0.0)
}

impl Judge<'_> {
    /// Of rows of dk.
    pub(super) fn of_dk(&self, problem: &Problem<'_>, slab: &Slab, stage: Stage) -> Allowances {
        let Policy { sums, path, label_grad, product, .. } = self.plan.roundings.widest;
        let (t, d) = (problem.head.q.rows, problem.head.q.cols);
        let parts = parts(stage);
        let (total, squares) = summed_by(sums.dk, t as f64);
        let tiles = t.div_ceil(self.plan.roundings.tiles.tokens.max(1));
        let (by_total, by_squares) = self.joined_by(tiles, path == Path::Chunked);
        let dense = Dense {
            total: total + by_total,
            squares: squares + by_squares + self.product_rel_var(),
            shared_total: problem.constants,
            shared_squares: problem.largest_scale() + self.narrowing() + problem.constants,
            ..self.dense(problem)
        };
        let scatter = if path == Path::Fused { sums.label_scatter } else { sums.dk };
        let carries = self.plan.roundings.carries_label(parts != LABEL);
        let constant = self.plan.roundings.shared_g() * self.one_constant();
        let shared_alike = problem.largest_variance() + self.narrowing() + problem.constants;
        let label = Label {
            carried: if carries { carried(sums.dk, t as f64, 1.0) } else { 0.0 },
            row_alike: self.label_row_scale(),
            shared_total: self.shared_scale(0.0),
            shared_whole: constant,
            shared_alike,
            bias: label_bias(problem, 1, parts),
            few_alike: label_grad.unit_roundoff().powi(2) / 3.0 + self.product_rel_var(),
            few_root: label_grad.unit_roundoff() + product.unit_roundoff(),
            // A sum in a low precision stops growing: what that loses is counted elsewhere.
            copies: scatter.precision.keeps_f32().into(),
            ..Label::default()
        };
        let tiny = label_grad.smallest_subnormal() / 2.0;
        let of_row = |(row, &hits): (usize, &u32)| {
            let (hits, norm) = (f64::from(hits), at(&slab.k_norms, row));
            let (label_total, label_squares) = summed_by(scatter, hits);
            OfRow {
                side: if norm > 0.0 { problem.sliced.1 / (norm * norm) } else { 0.0 },
                copies: 1.0,
                hits,
                label_total,
                label_squares,
                few: hits * tiny * tiny,
                most: hits * tiny,
                copied: scatter.unit() * hits,
                ..OfRow::default()
            }
        };
        let floor = problem.entry_floor;
        // Entries that all lie in a format's smallest numbers round alike.
        let of_column = |column: usize| OfColumn {
            own: floor.powi(2) * at(&slab.q_squares, column),
            row: 0.0,
            shared: (floor * at(&slab.q_sums, column)).powi(2),
        };
        Allowances {
            stage: self.stage(parts, dense, label),
            rows: slab.hits.iter().enumerate().map(of_row).collect(),
            columns: (0..d).map(of_column).collect(),
        }
    }

    /// Of the tokens of dq. `copies` where the variances are still those of all copies of a token.
    pub(super) fn of_dq(
        &self,
        problem: &Problem<'_>,
        (dq, copies): (&Backward, Option<&[f64]>),
        stage: Stage,
    ) -> Allowances {
        let Policy { sums, label_grad, .. } = self.plan.roundings.widest;
        let (v, d) = (problem.head.valid_vocab, problem.head.q.cols);
        let parts = parts(stage);
        let (total, squares) = summed_by(sums.dq, v as f64);
        let tiles = v.div_ceil(self.plan.roundings.tiles.vocab.max(1));
        let (by_total, by_squares) = self.joined_by(tiles, false);
        let dense = Dense {
            total: total + by_total,
            squares: squares + by_squares + self.product_rel_var(),
            shared_total: problem.constants,
            shared_squares: self.narrowing() + problem.constants,
            ..self.dense(problem)
        };
        let carries = self.plan.roundings.carries_label(parts != LABEL);
        let label = Label {
            carried: if carries { carried(sums.dq, v as f64, 1.0) } else { 0.0 },
            row_variance: 1,
            shared_total: self.shared_scale(0.0) + self.narrowing() + problem.constants,
            bias: label_bias(problem, 0, parts),
            few: if self.plan.whole_entries {
                Rounding::default()
            } else {
                Rounding::to(label_grad)
            },
            ..Label::default()
        };
        let constant = self.plan.roundings.shared_g() * self.one_constant();
        let of_row = |token: usize| {
            // Of a whole entry that much is rounded.
            let share = dq.dq_label_share[token];
            OfRow {
                side: problem.sliced.0[token],
                total: problem.scale[token] + problem.variance[token],
                copies: copies.map_or(1.0, |copies| copies[token]),
                label_row: self.label_row_scale() * share
                    + problem.variance[token]
                    + self.shared_scale(0.0),
                label_shared: constant * share,
                ..OfRow::default()
            }
        };
        let floor = problem.entry_floor;
        let of_column = |column: usize| OfColumn {
            own: floor.powi(2) * at(&problem.k_squares, column),
            row: (floor * at(&problem.k_sums, column)).powi(2),
            shared: 0.0,
        };
        Allowances {
            stage: self.stage(parts, dense, label),
            rows: (0..problem.head.q.rows).map(of_row).collect(),
            columns: (0..d).map(of_column).collect(),
        }
    }

    /// What the dense parts of dq and dk have in common.
    fn dense(&self, problem: &Problem<'_>) -> Dense {
        Dense {
            shared_whole: self.shared_scale(problem.few),
            shared_confident: self.one_constant(),
            bias: problem.dense_bias,
            whole: self.plan.whole_entries.into(),
            ..Dense::default()
        }
    }

    fn stage(&self, parts: i64, dense: Dense, label: Label) -> Allowance {
        Allowance { parts, dense, label, joined: self.adding(), stored: Rounding::default() }
    }

    /// What adding two parts may round, each of which may be rounded first: three roundings at
    /// most. Whole dlogits have no parts.
    pub(super) fn adding(&self) -> Joined {
        let compute = self.plan.roundings.compute();
        let (square, constant) = (compute * compute / 3.0, FLUSH * FLUSH);
        let sum = Rounding { square, constant, unit: 0.0, half: FLUSH };
        match self.plan.whole_entries {
            true => Joined { sum: Rounding { unit: compute, ..sum }, ..Joined::default() },
            false => {
                Joined { part: Rounding::to(self.plan.roundings.widest.parts), sum, apart: compute }
            }
        }
    }
}

impl Slab {
    /// What was summed for an element.
    pub(super) fn sums(&self, head: &HeadInputs<'_>, index: usize) -> Sums {
        Sums {
            x: at(&self.lse, index),
            squares: at(&self.lse_sq, index),
            variance: at(&self.lse_var, index),
            dropped: at(&self.dropped, index),
            confident: at(&self.confident, index),
            y: self.label[index],
            label_squares: self.label_sq[index],
            label_variance: self.label_var[index],
            label_alike: self.label_alike[index],
            label_whole: self.label_whole[index],
            side: head.k.get_f64(self.range.start * head.q.cols + index),
        }
    }
}

/// Of dq (0) or of dk (1): a label part that was captured is none of whole entries.
fn label_bias(problem: &Problem<'_>, token: usize, parts: i64) -> f64 {
    let bias = problem.label_bias[token];
    if parts == LABEL { bias } else { bias.max(problem.whole_bias) }
}

/// What was summed for an element of dq.
pub(super) fn dq_sums(dq: &Backward, head: &HeadInputs<'_>, index: usize) -> Sums {
    Sums {
        x: dq.dq_lse[index],
        squares: dq.dq_lse_sq[index],
        variance: dq.dq_lse_var[index],
        dropped: at(&dq.dq_dropped, index),
        confident: at(&dq.dq_confident, index),
        y: dq.dq_label[index],
        label_variance: at(&dq.dq_label_var, index),
        side: head.q.get_f64(index),
        ..Sums::default()
    }
}
