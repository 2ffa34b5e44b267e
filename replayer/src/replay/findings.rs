//! What one unit's backward found: comparisons that grow slab by slab.

use super::comparison::HitClass;
use super::maps::{Draw, Drawn};
use super::sampled_floors::Floors;
use crate::compare::tally::relative;
use crate::compare::{Allowed, Bound, Chart, RowTally, Tally};
use crate::head::Stage;

/// Running comparisons of one unit.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) tallies: Vec<(Stage, Tally, Bound)>,
    pub(super) energies: Vec<(Stage, Vec<f64>)>,
    pub(super) hits: Vec<(Stage, Vec<HitClass>)>,
    /// Squares of what tokens that may be there or not may be of a stage's sums.
    pub(super) open: Vec<(Stage, f64)>,
    /// The rows whose policies are emulated, where those are not all.
    pub(super) floors: Option<Floors>,
    /// Stages whose energies are those of a sample.
    pub(super) sampled: Vec<Stage>,
    /// Worst elements by blocks, where a drawing was asked for.
    pub(super) charts: Vec<(Stage, Chart)>,
}

impl Findings {
    pub(super) fn merge(&mut self, stage: Stage, tally: Tally, bound: Bound) {
        match self.tallies.iter_mut().find(|(of, ..)| *of == stage) {
            Some((_, total, _)) => total.merge(tally),
            None => self.tallies.push((stage, tally, bound)),
        }
    }

    /// Takes in what is explained of rows of a stage from `first` on, where that is needed.
    pub(super) fn expect(&mut self, stage: Stage, first: usize, rows: &[RowTally]) {
        self.floors.iter_mut().for_each(|floors| floors.expect(stage, first, rows));
    }

    /// Adds squares of what tokens that may be there or not may be of a stage.
    pub(super) fn add_uncertain(&mut self, stage: Stage, squares: f64) {
        match self.open.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, total)) => *total += squares,
            None => self.open.push((stage, squares)),
        }
    }

    /// Their share of the stage's norm, where its sums hold any.
    pub(super) fn uncertain_share(&self, stage: Stage) -> Option<f64> {
        let (_, squares) = self.open.iter().find(|(of, _)| *of == stage)?;
        let (_, tally, _) = self.tallies.iter().find(|(of, ..)| *of == stage)?;
        Some(relative(*squares, tally.reference_energy))
    }

    /// Drops what was found of some stages: they are judged from later ones.
    pub(super) fn forget(&mut self, stages: &[Stage]) {
        self.tallies.retain(|(stage, ..)| !stages.contains(stage));
        self.energies.retain(|(stage, _)| !stages.contains(stage));
        self.hits.retain(|(stage, _)| !stages.contains(stage));
        self.charts.retain(|(stage, _)| !stages.contains(stage));
    }

    pub(super) fn emulated(&mut self, stage: Stage, member: usize, energy: f64) {
        let energies = entry(&mut self.energies, stage);
        energies.resize(energies.len().max(member + 1), 0.0);
        energies[member] += energy;
    }

    /// Error by label hits, in classes that double: 0, 1, 2, 4, 8, ...
    pub(super) fn count_hits(&mut self, stage: Stage, rows: &[RowTally], hits: &[u32]) {
        let classes = entry(&mut self.hits, stage);
        for (row, &n) in rows.iter().zip(hits) {
            let class = (u32::BITS - n.leading_zeros()) as usize;
            while classes.len() <= class {
                let hits_from = if classes.is_empty() { 0 } else { 1 << (classes.len() - 1) };
                classes.push(HitClass { hits_from, ..HitClass::default() });
            }
            // A row that holds what is no number has no energy.
            let energy = if row.nonfinite > 0 { f64::NAN } else { row.error };
            classes[class].rows += 1;
            classes[class].error_energy += energy;
            classes[class].expected_energy += row.budget().expected();
        }
    }
}

/// The list of a stage, made where there is none.
fn entry<T>(lists: &mut Vec<(Stage, Vec<T>)>, stage: Stage) -> &mut Vec<T> {
    let index = lists.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
        lists.push((stage, Vec::new()));
        lists.len() - 1
    });
    &mut lists[index].1
}

impl Findings {
    /// Notes the worst elements of some rows, where that is asked for.
    pub(super) fn draw<F>(&mut self, draw: Option<Draw>, drawn: &Drawn<'_, F>)
    where
        F: Fn(usize, usize, f64) -> Allowed + Sync,
    {
        let Some(draw) = draw else { return };
        let position = self.charts.iter().position(|(stage, _)| *stage == drawn.stage);
        let index = position.unwrap_or_else(|| {
            let shape = (drawn.all, drawn.rows.captured.cols);
            self.charts.push((drawn.stage, Chart::new(shape, draw.most(drawn.stage))));
            self.charts.len() - 1
        });
        self.charts[index].1.add(drawn.first, drawn.rows, drawn.allowed, drawn.bound);
    }
}
