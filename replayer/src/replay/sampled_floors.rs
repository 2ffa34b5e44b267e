//! The errors of the emulated policies over a sample of the rows, where all would take long.
//!
//! A policy emulates one way to compute the head in few bits, and there are up to six of them.
//! Each makes four matrix products in f32; the reference makes eight in f64, once. So policies
//! over all rows would take longer than the reference. Only the size of their errors is wanted,
//! which some rows tell as well as all: rows of dq of some tokens against all classes, and rows
//! of dk of some classes over all tokens, each with the same bits as in the whole. Tokens are
//! drawn by the size of their entries of dlogits, classes by how often they are a label. Rows
//! differ much in size and little in how their error compares with what the declared precision
//! explains, so the energy of all is taken as (a ratio estimate) `Σ x · Σ w e / Σ w x`, `x` what
//! is explained of a row, `e` its error's energy and `w` how many rows a drawn one stands for.

use std::ops::Range;

use super::captured_gradients::{Captured, error_energy};
use super::elementwise::sum;
use super::slab::Slab;
use super::stage_values::ValuesByStage;
use crate::compare::RowTally;
use crate::head::Stage;

/// Some rows, ascending, and how many each stands for.
pub(super) struct DrawnRows {
    pub(super) rows: Vec<usize>,
    pub(super) weights: Vec<f64>,
}

/// What is gathered of one stage.
#[derive(Default)]
pub(super) struct Sums {
    /// What is explained of all rows.
    pub(super) all: f64,
    /// The same of the drawn ones, each for those that it stands for.
    pub(super) drawn: f64,
    /// Errors of each member in the drawn rows, likewise.
    pub(super) energies: Vec<f64>,
}

/// The drawn rows of one unit, and what was found of them so far.
pub(super) struct Floors {
    pub(super) tokens: DrawnRows,
    pub(super) classes: DrawnRows,
    pub(super) depth: usize,
    /// Rows of the drawn classes as each member has them.
    pub(super) emulated: Vec<ValuesByStage>,
    pub(super) sums: Vec<(Stage, Sums)>,
}

impl DrawnRows {
    /// Those in a range: place among the drawn, row from the range's start on, weight.
    fn within(&self, range: &Range<usize>) -> Vec<(usize, usize, f64)> {
        let [from, to] =
            [range.start, range.end].map(|end| self.rows.partition_point(|&r| r < end));
        (from..to)
            .map(|place| (place, self.rows[place] - range.start, self.weights[place]))
            .collect()
    }
}

impl Floors {
    pub(super) fn of(&mut self, stage: Stage) -> &mut Sums {
        let index = self.sums.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
            self.sums.push((stage, Sums::default()));
            self.sums.len() - 1
        });
        &mut self.sums[index].1
    }

    pub(super) fn add(&mut self, stage: Stage, member: usize, energy: f64) {
        let energies = &mut self.of(stage).energies;
        energies.resize(energies.len().max(member + 1), 0.0);
        energies[member] += energy;
    }

    /// Takes in what is explained of rows of a stage from `first` on.
    pub(super) fn expect(&mut self, stage: Stage, first: usize, rows: &[RowTally]) {
        let drawn = if stage.is_of_q() { &self.tokens } else { &self.classes };
        let drawn = drawn.within(&(first..first + rows.len()));
        let explained = |row: &RowTally| row.budget().expected();
        let sums = self.of(stage);
        sums.all += rows.iter().map(explained).sum::<f64>();
        sums.drawn += drawn.iter().map(|&(_, row, w)| w * explained(&rows[row])).sum::<f64>();
    }

    /// Compares the drawn classes of a slab, and gives the slab's `emulated` the norm that the
    /// member which rounds most is expected to have.
    pub(super) fn of_slab(&mut self, slab: &mut Slab, captured: &Captured) {
        let forced = captured.parts(&Stage::OF_K, 0..0).is_some();
        slab.emulated = sum(&slab.lse, &slab.label);
        let emulated = std::mem::take(&mut self.emulated);
        for (place, row, weight) in self.classes.within(&slab.range) {
            for (number, lists) in emulated.iter().enumerate() {
                for (stage, values) in lists {
                    let width = if *stage == Stage::Dbias { 1 } else { self.depth };
                    let values = &values[place * width..(place + 1) * width];
                    let reference = slab.reference(*stage, row..row + 1);
                    if *stage == Stage::Dk && number + 1 == emulated.len() {
                        let to = &mut slab.emulated[row * width..(row + 1) * width];
                        stand_for(to, values, weight);
                    }
                    let judged = captured.stage(*stage).filter(|_| *stage != Stage::Dk || !forced);
                    if let Some(gradient) = judged {
                        let energy = error_energy(values, &reference, gradient.stored);
                        self.add(*stage, number, weight * energy);
                    }
                }
            }
        }
        self.emulated = emulated;
    }

    /// The errors of all rows, by stage and member.
    pub(super) fn estimates(self) -> impl Iterator<Item = (Stage, Vec<f64>)> {
        self.sums.into_iter().filter(|(_, sums)| !sums.energies.is_empty()).map(|(stage, sums)| {
            let ratio = sums.all / sums.drawn;
            // What is explained of a row may be infinite, and nothing.
            let ratio = if ratio.is_finite() { ratio } else { 1.0 };
            (stage, sums.energies.into_iter().map(|energy| ratio * energy).collect())
        })
    }
}

/// Makes the squares of a row those of the emulated values, and of as many others as the row
/// stands for whose squares are off by as much.
fn stand_for(row: &mut [f64], emulated: &[f64], weight: f64) {
    let square = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
    let (exact, emulated) = (square(row), square(emulated));
    if exact > 0.0 {
        let factor = (1.0 + weight * (emulated / exact - 1.0)).max(0.0).sqrt();
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::stand_for;

    #[test]
    fn a_row_that_stands_for_two_has_what_both_are_off_by() {
        let square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
        let (mut drawn, other) = ([3.0, -4.0], [3.0, -4.0]);
        stand_for(&mut drawn, &[3.3, -4.4], 2.0);
        assert!((square(&drawn) + square(&other) - 2.0 * 1.21 * 25.0).abs() < 1e-12);
        let mut nothing = [0.0, 0.0];
        stand_for(&mut nothing, &[1.0, 0.0], 9.0);
        assert_eq!(nothing, [0.0, 0.0]);
    }
}
