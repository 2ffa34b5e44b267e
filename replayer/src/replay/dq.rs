//! dq of one unit: allowance and comparison, once the whole vocabulary was walked.

use super::allowances::dq_sums;
use super::backward::Problem;
use super::dk::reference_of;
use super::findings::{Captured, Findings, Gradient, Held, error_energy};
use super::gather::Gathered;
use super::judge::Judge;
use super::maps::Drawn;
use super::slab::{Looked, column_squares, column_sums};
use super::world::{At, Expectation};
use crate::compare::{Allowed, Rows};
use crate::head::{Stage, Unit};
use crate::kernels::matrix::{HeadInputs, IGNORED, Matrix};
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

    fn new(tokens: usize, d: usize) -> DqState {
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
    fn lost(&self, stage: Stage, reference: &[f64]) -> Vec<f64> {
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

pub(super) fn add(total: &mut [f64], part: &[f64]) {
    total.iter_mut().zip(part).for_each(|(total, &part)| *total += part);
}

impl Judge<'_> {
    /// What the world says of a stage's rows, as `supposed` does for dk.
    fn supposed_dq(
        &self,
        problem: &Problem<'_>,
        state: &DqState,
        (gradient, forced): (&Gradient, bool),
        unit: &Unit,
        exact: Vec<f64>,
    ) -> Vec<f64> {
        let stage = gradient.stage;
        let emulated = state.instead.as_ref().map(|parts| member_values(parts, stage));
        let store = |&x: &f64| gradient.stored.map_or(x, |precision| precision.round64(x));
        let mut values = exact;
        let at = At { stage, microbatch: problem.microbatch, rank: problem.rank };
        let (rows, columns) = (&unit.rows[..], problem.head.q.cols);
        if let Some(emulated) = emulated.filter(|values| !values.is_empty() && !forced) {
            self.put_emulated((at, rows), emulated, &mut values);
            values.iter_mut().for_each(|x| *x = store(x));
        }
        let factor = self.world.scale(at);
        values.iter_mut().for_each(|x| *x *= factor);
        self.world.expected(&mut Expectation { at, rows, columns, values: &mut values });
        values
    }

    pub(super) fn judge_dq(
        &self,
        problem: &Problem<'_>,
        state: &DqState,
        (captured, stages): (&Captured, &[Stage]),
        unit: &Unit,
        findings: &mut Findings,
    ) {
        let (dq, d) = (&state.exact, problem.head.q.cols);
        // Tokens of one label and weight take the same row of k times the same g:
        // their label parts are copies, rounding included.
        let of_label = tokens_of_label(problem.head.labels);
        let picked = picked(captured, &unit.rows);
        let parts = picked.parts(&Stage::OF_Q, 0..unit.rows.len());
        // A captured sum of captured parts is judged whatever the parts are.
        let all: Vec<usize> = (0..unit.rows.len()).collect();
        let sure: Vec<usize> = all.iter().copied().filter(|&row| !problem.is_open(row)).collect();
        let adding = self.adding();
        let bound = self.bound(unit.rows.len(), d);
        for gradient in picked.of(stages) {
            let stage = gradient.stage;
            let exact = reference_of(stage, &dq.dq_lse, &dq.dq_label, parts.as_ref());
            let forced = parts.is_some() && stage == Stage::Dq;
            let reference = self.supposed_dq(problem, state, (gradient, forced), unit, exact);
            let (factor, again) = self.factor(problem, stage);
            let lost = match &state.ties {
                Some(ties) if !forced => member_values(ties, stage).to_vec(),
                _ if self.plan.roundings.swamps() && !forced => state.lost(stage, &reference),
                _ => Vec::new(),
            };
            let allowances = self.of_dq(problem, (dq, None), stage);
            let allowed = |row: usize, column: usize, x: f64| {
                let at = row * d + column;
                let inner = match &parts {
                    Some(parts) if forced => parts.allowed(&adding, at),
                    _ => allowances.of(row, column, &dq_sums(dq, &problem.head, at)),
                };
                let certain = inner.certain + lost.get(at).copied().unwrap_or(0.0);
                let inner = Allowed { certain, ..inner }.times(factor);
                gradient.storing(at, x, again, inner)
            };
            let index = |row: usize| unit.rows[row] as u64;
            let copies = problem.head.copies;
            let repeats =
                |row: usize| f64::max(of_label[row], copies.map_or(1.0, |copies| copies[row]));
            let compared = Rows {
                captured: gradient.matrix(),
                reference: &reference,
                index: &index,
                repeats: &repeats,
            };
            let there = state.looked.iter().find(|(of, _)| *of == stage);
            let mut tally = match there {
                Some((_, looked)) => compared.tally(looked, &bound),
                None => {
                    let looked = compared.looked_at(allowed, &bound);
                    findings.expect(stage, 0, &looked);
                    compared.tally_of(if forced { &all } else { &sure }, &looked, &bound)
                }
            };
            if let (Some(stored), None) = (gradient.stored, there) {
                tally.stored_in(stored, &reference);
            }
            findings.merge(stage, tally, bound);
            let (first, all, rows) = (0, unit.rows.len(), &compared);
            // A row that is not judged is no fault in a drawing either.
            let drawn = |row: usize, column: usize, x: f64| match problem.is_open(row) && !forced {
                true => Allowed { certain: f64::INFINITY, ..Allowed::default() },
                false => allowed(row, column, x),
            };
            let (allowed, bound) = (&drawn, &bound);
            findings.draw(self.plan.draw, &Drawn { stage, first, all, rows, allowed, bound });
            if forced {
                continue; // judged from captured parts: the floor is propagated
            }
            for (number, member) in state.emulated.iter().enumerate() {
                let values = member_values(member, stage);
                if !values.is_empty() {
                    let energy = error_energy(values, &reference, gradient.stored);
                    findings.emulated(stage, number, energy);
                }
            }
        }
    }
}

/// The unit's own rows of every captured dq.
pub(super) fn picked(captured: &Captured, rows: &[usize]) -> Captured {
    let pick = |gradient: &Gradient| {
        let values = match &gradient.values {
            Held::Whole(_) | Held::Picked(_) => {
                Held::Picked(Gathered::new(&gradient.matrix(), rows))
            }
            Held::Summed(added) => Held::Summed(added.picked(rows)),
        };
        let (stage, stored, source) = (gradient.stage, gradient.stored, gradient.source.clone());
        let (rounded, apart) = (gradient.rounded, gradient.apart);
        Gradient { stage, values, stored, rounded, apart, source }
    };
    Captured { gradients: captured.of(&Stage::OF_Q).map(pick).collect() }
}

/// For each token, how many tokens have its label.
pub(super) fn tokens_of_label(labels: &[u32]) -> Vec<f64> {
    let mut counts = std::collections::HashMap::new();
    labels.iter().for_each(|label| *counts.entry(label).or_insert(0.0) += 1.0);
    labels.iter().map(|label| counts[label]).collect()
}

/// Sums of k and of k² over the rows, a column each.
pub(super) fn k_sums(k: &Matrix<'_>) -> (Vec<f64>, Vec<f64>) {
    (column_sums(k), column_squares(k, None))
}
