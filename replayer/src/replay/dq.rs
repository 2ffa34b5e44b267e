//! dq of one unit: allowance and comparison, once the whole vocabulary was walked.

use super::captured_gradients::{Captured, Gradient, error_energy, picked, reference_of};
use super::dq_state::{DqState, member_values};
use super::findings::Findings;
use super::gradient_allowances::dq_sums;
use super::judge::Judge;
use super::label_counts::tokens_of_label;
use super::maps::Drawn;
use super::problem::Problem;
use super::world::{Expectation, StagePlace};
use crate::compare::{Allowed, Rows};
use crate::head::{Stage, Unit};

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
        let place = StagePlace { stage, microbatch: problem.microbatch, rank: problem.rank };
        let (rows, columns) = (&unit.rows[..], problem.head.q.cols);
        if let Some(emulated) = emulated.filter(|values| !values.is_empty() && !forced) {
            self.put_emulated((place, rows), emulated, &mut values);
            values.iter_mut().for_each(|x| *x = store(x));
        }
        let factor = self.world.scale(place);
        values.iter_mut().for_each(|x| *x *= factor);
        self.world.expected(&mut Expectation { place, rows, columns, values: &mut values });
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
        let sure: Vec<usize> =
            all.iter().copied().filter(|&row| !problem.is_uncertain(row)).collect();
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
                let element = row * d + column;
                let inner = match &parts {
                    Some(parts) if forced => parts.allowed(&adding, element),
                    _ => allowances.of(row, column, &dq_sums(dq, &problem.head, element)),
                };
                let certain = inner.certain + lost.get(element).copied().unwrap_or(0.0);
                let inner = Allowed { certain, ..inner }.times(factor);
                gradient.storing(element, x, again, inner)
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
            let drawn =
                |row: usize, column: usize, x: f64| match problem.is_uncertain(row) && !forced {
                    true => Allowed { certain: f64::INFINITY, ..Allowed::default() },
                    false => allowed(row, column, x),
                };
            let (allowed, bound) = (&drawn, &bound);
            findings.draw(self.plan.draw, &Drawn { stage, first, all, rows, allowed, bound });
            if forced {
                continue; // judged from captured parts: the floor is propagated
            }
            note_members(state, gradient, &reference, findings);
        }
    }
}

/// Notes the errors of the emulated policies, those that have values of the stage.
fn note_members(state: &DqState, gradient: &Gradient, reference: &[f64], findings: &mut Findings) {
    let stage = gradient.stage;
    for (number, member) in state.emulated.iter().enumerate() {
        let values = member_values(member, stage);
        if !values.is_empty() {
            let energy = error_energy(values, reference, gradient.stored);
            findings.emulated(stage, number, energy);
        }
    }
}
