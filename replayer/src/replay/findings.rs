//! What one unit's backward found: the captured tensors, and the comparisons
//! that grow slab by slab.

use super::Replay;
use super::allowed::rounded;
use super::outcome::HitClass;
use crate::assemble::Tensor;
use crate::compare::{Allowed, Bound, Rows, Tally};
use crate::head::Stage;
use crate::head::roundings::{F32, precision, unit_of};
use crate::head::step::matrix;
use crate::kernels::matrix::Matrix;

pub(super) const DQ: [Stage; 3] = [Stage::DqLse, Stage::DqLabel, Stage::Dq];
pub(super) const DK: [Stage; 3] = [Stage::DkLse, Stage::DkLabel, Stage::Dk];

/// The captured tensors of one unit, by stage.
#[derive(Default)]
pub(super) struct Captured {
    pub(super) tensors: Vec<(Stage, Tensor, String)>,
}

/// Running comparisons of one unit.
pub(super) struct Findings {
    pub(super) bounds: (Bound, Bound),
    pub(super) tallies: Vec<(Stage, Tally)>,
    pub(super) energies: Vec<(Stage, Vec<f64>)>,
    pub(super) hits: Vec<(Stage, Vec<HitClass>)>,
}

impl Captured {
    pub(super) fn of<'c>(
        &'c self,
        stages: &'c [Stage],
    ) -> impl Iterator<Item = &'c (Stage, Tensor, String)> {
        self.tensors.iter().filter(|(stage, _, _)| stages.contains(stage))
    }

    pub(super) fn source(&self, stage: Stage) -> String {
        let found = self.tensors.iter().find(|(of, _, _)| *of == stage);
        found.map(|(_, _, source)| source.clone()).unwrap_or_default()
    }

    /// Both captured parts, when both are there.
    pub(super) fn parts(
        &self,
        one: Stage,
        other: Stage,
        cut: impl for<'m> Fn(&Matrix<'m>) -> Matrix<'m>,
    ) -> Option<Parts> {
        let find = |stage| self.tensors.iter().find(|(of, _, _)| *of == stage);
        let (one, other) = find(one).zip(find(other))?;
        let (a, b) = matrix(&one.1).zip(matrix(&other.1))?;
        Some(Parts::new(&cut(&a), &cut(&b), unit_of(one.1.dtype), unit_of(other.1.dtype)))
    }
}

/// Captured parts of a sum, widened, with the unit roundoffs of their dtypes.
pub(super) struct Parts {
    pub(super) lse: Vec<f64>,
    pub(super) label: Vec<f64>,
    pub(super) units: (f64, f64),
}

impl Parts {
    pub(super) fn new(
        lse: &Matrix<'_>,
        label: &Matrix<'_>,
        lse_unit: f64,
        label_unit: f64,
    ) -> Parts {
        let wide = |m: &Matrix<'_>| (0..m.len()).map(|i| m.get_f64(i)).collect();
        Parts { lse: wide(lse), label: wide(label), units: (lse_unit, label_unit) }
    }

    /// The job may have added the parts before it rounded them to what was
    /// captured, or after.
    pub(super) fn allowed(&self, replay: &Replay<'_>, at: usize) -> Allowed {
        let (x, y) = (self.lse[at], self.label[at]);
        let captured = rounded(self.units.0, x) + rounded(self.units.1, y);
        Allowed { own: captured + replay.added(x, y), ..Allowed::default() }
    }
}

impl Findings {
    pub(super) fn merge(&mut self, stage: Stage, tally: Tally) {
        match self.tallies.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, total)) => total.merge(tally),
            None => self.tallies.push((stage, tally)),
        }
    }

    pub(super) fn emulated(&mut self, stage: Stage, member: usize, energy: f64) {
        let at = match self.energies.iter().position(|(of, _)| *of == stage) {
            Some(at) => at,
            None => {
                self.energies.push((stage, Vec::new()));
                self.energies.len() - 1
            }
        };
        let energies = &mut self.energies[at].1;
        energies.resize(energies.len().max(member + 1), 0.0);
        energies[member] += energy;
    }

    /// Error by label hits, in classes that double: 0, 1, 2, 4, 8, ...
    pub(super) fn count_hits(
        &mut self,
        stage: Stage,
        rows: &Rows<'_>,
        allowed: &dyn Fn(usize, usize, f64) -> Allowed,
        hits: &[u32],
    ) {
        let at = match self.hits.iter().position(|(of, _)| *of == stage) {
            Some(at) => at,
            None => {
                self.hits.push((stage, Vec::new()));
                self.hits.len() - 1
            }
        };
        let classes = &mut self.hits[at].1;
        for (row, &n) in hits.iter().enumerate() {
            let class = (u32::BITS - n.leading_zeros()) as usize;
            while classes.len() <= class {
                let hits_from = if classes.is_empty() { 0 } else { 1 << (classes.len() - 1) };
                classes.push(HitClass { hits_from, ..HitClass::default() });
            }
            classes[class].rows += 1;
            for column in 0..rows.captured.cols {
                let at = row * rows.captured.cols + column;
                let x = rows.reference[at];
                let inner = allowed(row, column, x);
                classes[class].error_energy += (rows.captured.get_f64(at) - x).powi(2);
                classes[class].expected_energy += inner.total();
            }
        }
    }
}

/// Squared error of emulated values once they are rounded to the captured dtype.
pub(super) fn error_energy(values: &[f64], reference: &[f64], output: f64) -> f64 {
    let precision = precision(output.max(F32));
    let one = |(&x, r): (&f64, &f64)| (precision.round64(x) - r).powi(2);
    values.iter().zip(reference).map(one).sum()
}
