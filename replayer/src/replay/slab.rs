//! What the reference says of one slab of k's rows: the sums behind dk and dbias, and what the
//! allowances take of q and k themselves.

use std::ops::Range;

use super::elementwise::sum;
use super::problem::Problem;
use super::rounding_variance::rounded;
use super::stage_values::value_of;
use crate::compare::RowTally;
use crate::head::Stage;
use crate::kernels::matrix::{HeadInputs, Matrix};
use crate::kernels::round::Precision;
use crate::kernels::{policy, reference};

/// What a device found of the rows of some stages.
pub(super) type Looked = Vec<(Stage, Vec<RowTally>)>;

/// Reference values over one slab of k's rows: `[rows, D]`, of the bias `[rows]`.
#[derive(Clone, Default)]
pub(super) struct Slab {
    pub(super) range: Range<usize>,
    pub(super) lse: Vec<f64>,
    pub(super) label: Vec<f64>,
    pub(super) lse_var: Vec<f64>,
    pub(super) lse_sq: Vec<f64>,
    pub(super) label_sq: Vec<f64>,
    pub(super) label_var: Vec<f64>,
    pub(super) label_alike: Vec<f64>,
    pub(super) dropped: Vec<f64>,
    /// Dense entries of confident p, and the label part as it is rounded.
    pub(super) confident: Vec<f64>,
    pub(super) label_whole: Vec<f64>,
    pub(super) hits: Vec<u32>,
    pub(super) dbias: Vec<f64>,
    pub(super) dbias_var: Vec<f64>,
    pub(super) dbias_sq: Vec<f64>,
    /// Sum of q² over the unit's tokens, a column each.
    pub(super) q_squares: Vec<f64>,
    pub(super) q_sums: Vec<f64>,
    /// |k|² of each row.
    pub(super) k_norms: Vec<f64>,
    /// dk of the member that rounds most, for the norm that the policy itself has.
    pub(super) emulated: Vec<f64>,
    /// What a swamped accumulator certainly loses, by stage, where one is declared.
    pub(super) lost: Vec<(Stage, Vec<f64>)>,
    /// What tokens whose gradient may be there or not may be of a stage.
    pub(super) open: Vec<(Stage, Vec<f64>)>,
    /// What a hypothesis says that a stage is, in place of the f64 values.
    pub(super) instead: Vec<(Stage, Vec<f64>)>,
    /// The classes that the rows are, where they are not those of the range.
    pub(super) classes: Option<Vec<usize>>,
    /// What a device found of the rows, which holds the sums that are empty here.
    pub(super) looked: Looked,
}

impl Slab {
    /// A slab of the label part alone, from the derivative of each label's logit and its
    /// variance, `[T]`: T·D multiply-adds, no GEMM.
    pub(super) fn of_labels(
        head: &HeadInputs<'_>,
        range: Range<usize>,
        g_label: &[f64],
        slopes: &[(f64, f64)],
    ) -> Slab {
        let d = head.q.cols;
        let zeros = || vec![0.0; range.len() * d];
        let mut slab = Slab {
            range: range.clone(),
            label: zeros(),
            label_sq: zeros(),
            label_var: zeros(),
            label_alike: zeros(),
            label_whole: zeros(),
            hits: vec![0; range.len()],
            ..Slab::default()
        };
        let inside = |&t: &usize| range.contains(&(head.labels[t] as usize));
        for t in (0..head.q.rows).filter(inside) {
            let row = head.labels[t] as usize - range.start;
            let copies = head.copies.map_or(1.0, |copies| copies[t]);
            let entry = slopes[t].0 * g_label[t];
            let entry_var = copies * slopes[t].1 * g_label[t].powi(2);
            slab.hits[row] += 1;
            for i in 0..d {
                let (element, q) = (row * d + i, head.q.get_f64(t * d + i));
                slab.label[element] += entry * q;
                slab.label_sq[element] += (entry * q).powi(2);
                slab.label_whole[element] += entry * q;
                slab.label_alike[element] += copies * (entry * q).powi(2);
                slab.label_var[element] += entry_var * q * q;
            }
        }
        slab
    }

    /// Variance of what each rank may have rounded its own part of dk to, of which the parts are
    /// not known: as large in squares as the whole, or as the tokens' addends where those cancel,
    /// and twice that where dense and label part do not.
    pub(super) fn rounded_by_ranks(&self, to: Precision) -> Vec<f64> {
        let each = |index: usize| {
            let dense = self.lse_sq[index].max(self.lse[index].powi(2));
            let label = self.label_sq[index].max(self.label[index].powi(2));
            rounded(to, (2.0 * (dense + label)).sqrt())
        };
        (0..self.lse_sq.len().min(self.lse.len())).map(each).collect()
    }

    /// A slab of which all tokens were walked.
    pub(super) fn completed(
        problem: &Problem<'_>,
        (head, range): (&HeadInputs<'_>, Range<usize>),
        sums: reference::DkSums,
    ) -> Slab {
        let mut slab = Slab { range, ..Slab::default() };
        sums.finish(&head.q, &problem.noise, &mut |block| slab.take(block));
        slab.describe(head, problem.entry_floor > 0.0);
        slab
    }

    /// Columns of dk.
    pub(super) fn columns(&self) -> usize {
        self.label.len() / self.range.len().max(1)
    }

    /// Takes the sums of the next rows. Where a block holds all rows, its arrays become the slab's
    /// without a copy.
    pub(super) fn take(&mut self, block: reference::DkBlock) {
        let part = Slab::of_sums(block);
        match self.hits.is_empty() {
            true => *self = Slab { range: self.range.clone(), ..part },
            false => self.append(part),
        }
    }

    fn of_sums(block: reference::DkBlock) -> Slab {
        Slab {
            range: block.rows,
            lse: block.dk_lse,
            label: block.dk_label,
            lse_var: block.dk_lse_var,
            lse_sq: block.dk_lse_sq,
            label_sq: block.dk_label_sq,
            label_var: block.dk_label_var,
            label_alike: block.dk_label_alike,
            dropped: block.dk_dropped,
            confident: block.dk_confident,
            label_whole: block.dk_label_whole,
            hits: block.hits,
            dbias: sum(&block.dbias_lse, &block.dbias_label),
            dbias_var: block.dbias_var,
            dbias_sq: block.dbias_sq,
            ..Slab::default()
        }
    }

    fn append(&mut self, more: Slab) {
        let (rows_held, all) = (self.hits.len(), self.range.len());
        for (to, from) in [
            (&mut self.lse, more.lse),
            (&mut self.label, more.label),
            (&mut self.lse_var, more.lse_var),
            (&mut self.lse_sq, more.lse_sq),
            (&mut self.label_sq, more.label_sq),
            (&mut self.label_var, more.label_var),
            (&mut self.label_alike, more.label_alike),
            (&mut self.dropped, more.dropped),
            (&mut self.confident, more.confident),
            (&mut self.label_whole, more.label_whole),
            (&mut self.dbias, more.dbias),
            (&mut self.dbias_var, more.dbias_var),
            (&mut self.dbias_sq, more.dbias_sq),
        ] {
            // The first time for all rows, so that later blocks move nothing.
            to.reserve_exact((to.len() / rows_held * all).saturating_sub(to.len()));
            to.extend(from);
        }
        self.hits.extend(more.hits);
    }

    /// Adds what the allowances take of q and k themselves.
    pub(super) fn describe(&mut self, head: &HeadInputs<'_>, small: bool) {
        self.k_norms = head.k.row_energies(0..head.valid_vocab);
        self.k_norms.resize(head.k.rows, 0.0);
        if small {
            self.q_squares = column_squares(&head.q, head.copies);
            self.q_sums = column_sums(&head.q);
        }
    }

    /// An emulated block's values of a stage, and what they should be.
    pub(super) fn of_block<'b>(
        &self,
        stage: Stage,
        block: &policy::DkParts<'b>,
    ) -> (&'b [f64], Vec<f64>) {
        let values = match stage {
            Stage::DkLse => block.dk_lse,
            Stage::DkLabel => block.dk_label,
            Stage::Dbias => block.dbias,
            _ => block.dk,
        };
        (values, self.reference(stage, block.rows.clone()))
    }

    /// What some rows of a stage should be.
    pub(super) fn reference(&self, stage: Stage, rows: Range<usize>) -> Vec<f64> {
        let d = self.lse.len() / self.range.len().max(1);
        let span = rows.start * d..rows.end * d;
        match stage {
            Stage::DkLse => self.lse[span].to_vec(),
            Stage::DkLabel => self.label[span].to_vec(),
            Stage::Dbias => self.dbias[rows].to_vec(),
            _ => sum(&self.lse[span.clone()], &self.label[span]),
        }
    }

    /// Takes in what one more member loses: the largest loss counts.
    pub(super) fn widen_lost(&mut self, lost: Vec<(Stage, Vec<f64>)>) {
        for (stage, more) in lost {
            match self.lost.iter_mut().find(|(of, _)| *of == stage) {
                Some((_, most)) => {
                    most.iter_mut().zip(more).for_each(|(most, x)| *most = most.max(x));
                }
                None => self.lost.push((stage, more)),
            }
        }
    }

    /// Takes the backward of those tokens, of the sizes of their q.
    pub(super) fn take_uncertain(&mut self, uncertain: &Slab) {
        let sizes = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<f64>>();
        let (lse, label) = (sizes(&uncertain.lse), sizes(&uncertain.label));
        let both = sum(&lse, &label);
        self.open = vec![
            (Stage::DkLse, lse),
            (Stage::DkLabel, label),
            (Stage::Dk, both),
            (Stage::Dbias, sizes(&uncertain.dbias)),
        ];
    }

    /// What the job certainly loses of an element, or may lack of it.
    pub(super) fn lost(&self, stage: Stage, element: usize) -> f64 {
        value_of(&self.lost, stage, element) + value_of(&self.open, stage, element)
    }

    pub(super) fn uncertain_squares(&self, stage: Stage) -> Option<f64> {
        let (_, open) = self.open.iter().find(|(of, _)| *of == stage)?;
        Some(open.iter().map(|x| x * x).sum())
    }
}

/// Sum of each column.
pub(super) fn column_sums(matrix: &crate::kernels::Matrix<'_>) -> Vec<f64> {
    matrix.column_totals(|_, x| x)
}

/// Sum of squares of each column, rows that are copies counted as they add up.
pub(super) fn column_squares(
    matrix: &crate::kernels::Matrix<'_>,
    copies: Option<&[f64]>,
) -> Vec<f64> {
    matrix.column_totals(|row, x| copies.map_or(1.0, |copies| copies[row]) * x.powi(2))
}

/// Sums of k and of k² over the rows, a column each.
pub(super) fn k_sums(k: &Matrix<'_>) -> (Vec<f64>, Vec<f64>) {
    (column_sums(k), column_squares(k, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of some rows, each of which holds its own number and its place.
    fn block(rows: Range<usize>, depth: usize) -> reference::DkBlock {
        let wide = |value: f64| {
            (rows.start * depth..rows.end * depth).map(|at| value + at as f64).collect()
        };
        let column = |value: f64| rows.clone().map(|row| value + row as f64).collect();
        reference::DkBlock {
            dk_lse: wide(0.1),
            dk_label: wide(0.2),
            dk_lse_var: wide(0.3),
            dk_lse_sq: wide(0.4),
            dk_label_sq: wide(0.5),
            dk_label_var: wide(0.6),
            dk_label_alike: wide(0.7),
            dk_dropped: Vec::new(),
            dk_confident: wide(0.8),
            dk_label_whole: wide(0.9),
            hits: rows.clone().map(|row| row as u32).collect(),
            dbias_lse: column(0.1),
            dbias_label: column(0.2),
            dbias_var: column(0.3),
            dbias_sq: column(0.4),
            rows,
        }
    }

    #[test]
    fn a_slab_of_several_blocks_is_that_of_all_their_rows() {
        let told = |borders: &[usize]| {
            let mut slab = Slab { range: 0..7, ..Slab::default() };
            borders.windows(2).for_each(|indices| slab.take(block(indices[0]..indices[1], 3)));
            let Slab { range, lse, label, lse_var, lse_sq, .. } = slab;
            let first = (range, lse, label, lse_var, lse_sq);
            let Slab { label_sq, label_var, label_alike, dropped, confident, .. } = slab;
            let second = (label_sq, label_var, label_alike, dropped, confident);
            let Slab { label_whole, hits, dbias, dbias_var, dbias_sq, .. } = slab;
            (first, second, (label_whole, hits, dbias, dbias_var, dbias_sq))
        };
        assert_eq!(told(&[0, 3, 6, 7]), told(&[0, 7]));
    }
}
