//! dq of one unit while the vocabulary is walked: the reference, and what emulated policies make of it.

use super::problem::Problem;
use super::slab::Looked;
use crate::head::Stage;
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::policy::DqParts;
use crate::kernels::reference;

/// The reference and the emulated members of dq, `[T, D]` each.
pub(super) struct DqState {
    pub(super) exact: reference::Backward,
    pub(super) emulated: Vec<DqParts>,
    /// What a hypothesis says that dq is, in place of the f64 values.
    pub(super) instead: Option<DqParts>,
    /// How far values of it that lie near ties may be off.
    pub(super) ties: Option<DqParts>,
    /// What a device found of its rows.
    pub(super) looked: Looked,
}

impl DqState {
    /// dq of a walk that has not begun.
    pub(super) fn zeros(problem: &Problem<'_>) -> DqState {
        DqState::of(reference::Backward::zeros(&problem.head, &problem.noise))
    }

    pub(super) fn new(tokens: usize, d: usize) -> DqState {
        let zeros = || vec![0.0; tokens * d];
        let exact = reference::Backward {
            dq_lse: zeros(),
            dq_label: zeros(),
            dq_lse_var: zeros(),
            dq_lse_sq: zeros(),
            dq_label_rel_var: vec![0.0; tokens],
            dq_label_share: vec![1.0; tokens],
            ..reference::Backward::default()
        };
        DqState::of(exact)
    }

    /// The reference alone.
    pub(super) fn of(exact: reference::Backward) -> DqState {
        DqState { exact, emulated: Vec::new(), instead: None, ties: None, looked: Vec::new() }
    }

    /// Ends a walk: the reference multiplies variances and squares by a token's copies for the
    /// sake of dk, and a row of dq has one.
    pub(super) fn once_a_row(&mut self, copies: Option<&[f64]>) {
        let Some(copies) = copies else { return };
        for of_all in [&mut self.exact.dq_lse_var, &mut self.exact.dq_lse_sq] {
            let d = of_all.len() / copies.len().max(1);
            for (row, copies) in of_all.chunks_mut(d.max(1)).zip(copies) {
                row.iter_mut().for_each(|of_all| *of_all /= copies);
            }
        }
    }

    /// The label part alone, from the derivative of each label's logit and its variance.
    pub(super) fn of_labels(
        head: &HeadInputs<'_>,
        g_label: &[f64],
        slopes: &[(f64, f64)],
    ) -> DqState {
        let (tokens, d) = (head.q.rows, head.q.cols);
        let mut state = DqState::new(tokens, d);
        state.exact.dq_label_var = vec![0.0; tokens * d];
        for t in (0..tokens).filter(|&t| head.labels[t] != IGNORED) {
            for i in 0..d {
                let k = head.k.get_f64(head.labels[t] as usize * d + i);
                state.exact.dq_label[t * d + i] = slopes[t].0 * g_label[t] * k;
                state.exact.dq_label_var[t * d + i] = slopes[t].1 * (g_label[t] * k).powi(2);
            }
        }
        state
    }

    /// What a swamped accumulator certainly loses of an element.
    pub(super) fn lost(&self, stage: Stage, reference: &[f64]) -> Vec<f64> {
        let mut lost = vec![0.0; reference.len()];
        for member in &self.emulated {
            let values = member_values(member, stage);
            for (lost, (x, r)) in lost.iter_mut().zip(values.iter().zip(reference)) {
                *lost = f64::max(*lost, (x - r).abs());
            }
        }
        lost
    }
}

pub(super) fn member_values(member: &DqParts, stage: Stage) -> &[f64] {
    match stage {
        Stage::DqLse => &member.dq_lse,
        Stage::DqLabel => &member.dq_label,
        _ => &member.dq,
    }
}
