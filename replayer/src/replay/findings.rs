//! What one unit's backward found: the captured tensors, and the comparisons
//! that grow slab by slab.

use std::ops::Range;

use super::addends::Added;
use super::allowed::{rounding, stored};
use super::floors::Floors;
use super::gather::Gathered;
use super::outcome::HitClass;
use crate::assemble::Tensor;
use crate::compare::allowance::{Allowance, Joined, Rounding};
use crate::compare::tally::relative;
use crate::compare::{Allowed, Bound, Chart, RowTally, Tally};
use crate::head::Stage;
use crate::head::roundings::F32;
use crate::head::step::{matrix, rows_of};
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;

/// One captured gradient.
pub(super) struct Gradient {
    pub(super) stage: Stage,
    pub(super) values: Held,
    /// What it was stored in; `None` for a sum of addends.
    pub(super) stored: Option<Precision>,
    /// What it was rounded to before it was stored in more bits, where its values show
    /// it.
    pub(super) rounded: Option<Precision>,
    /// What each rank may have rounded its own part to, of a sum over ranks that was stored in
    /// more bits.
    pub(super) apart: Option<Precision>,
    pub(super) source: String,
}

/// The values of a captured gradient.
pub(super) enum Held {
    /// As one tensor.
    Whole(Tensor),
    /// As some rows of one.
    Picked(Gathered),
    /// As the sum of the addends that ranks recorded.
    Summed(Added),
}

impl Gradient {
    /// Its rows: of tokens or of the vocabulary.
    pub(super) fn matrix(&self) -> Matrix<'_> {
        let found = match &self.values {
            Held::Whole(tensor) => matrix(tensor).expect("checked when it was captured"),
            Held::Picked(rows) => rows.matrix(),
            Held::Summed(added) => added.matrix(),
        };
        // The bias's `[V]` is a column: one number a row of the vocabulary.
        match self.stage {
            Stage::Dbias => Matrix { rows: found.len(), cols: 1, ..found },
            _ => found,
        }
    }

    /// The coarser format that all values lie in, if they do: whether a job rounded a
    /// gradient before it widened it again is not known, but it shows in the bits. Of a
    /// part it would show a low-precision sum just as well, so there it explains nothing.
    pub(super) fn coarser(&self, output: Precision) -> Option<Precision> {
        let finer = self.stored.is_some_and(|p| p.unit_roundoff() < output.unit_roundoff());
        let part =
            [Stage::OF_Q[0], Stage::OF_Q[1], Stage::OF_K[0], Stage::OF_K[1]].contains(&self.stage);
        let values = self.matrix();
        let lies = |x: f64| !x.is_finite() || output.round64(x) == x;
        let all = finer && !part && (0..values.len()).all(|at| lies(values.get_f64(at)));
        all.then_some(output)
    }

    /// Some of its rows.
    fn picked(&self, rows: &[usize]) -> Gradient {
        let values = match &self.values {
            Held::Summed(added) => Held::Summed(added.picked(rows)),
            _ => Held::Picked(Gathered::new(&self.matrix(), rows)),
        };
        let (stage, stored, source) = (self.stage, self.stored, self.source.clone());
        Gradient { stage, values, stored, rounded: self.rounded, apart: self.apart, source }
    }

    /// Of some elements of a sum of addends: how many these are, and the sums of their squares.
    pub(super) fn squares(&self, elements: Range<usize>) -> Option<Squares> {
        match &self.values {
            Held::Summed(added) => Some((added.count, added.squares[elements].to_vec())),
            Held::Whole(_) | Held::Picked(_) => None,
        }
    }

    /// Variance of storing element `at`, whose value should be `x`.
    pub(super) fn storage(&self, at: usize, x: f64) -> f64 {
        match &self.values {
            Held::Whole(_) | Held::Picked(_) => stored(self.stored, x) + stored(self.rounded, x),
            Held::Summed(added) => added.storage[at],
        }
    }

    /// What storing element `at`, which should be `x` and errs within `inner` so far, adds
    /// to it; `again`: as the product with a factor, which was stored before, and the factor
    /// is rounded too, alike for all.
    pub(super) fn storing(&self, at: usize, x: f64, again: bool, inner: Allowed) -> Allowed {
        self.storing_joined(at, x, (again, 0.0), inner)
    }

    /// The same where ranks joined parts of their own, which brought such a variance.
    pub(super) fn storing_joined(
        &self,
        at: usize,
        x: f64,
        (again, joined): (bool, f64),
        inner: Allowed,
    ) -> Allowed {
        let (times, alike) = if again { (2.0, 1.0) } else { (1.0, 0.0) };
        let storage = self.storage(at, x) + joined;
        let inner = Allowed { shared: inner.shared + alike * storage, ..inner };
        match self.values {
            Held::Summed(_) => Allowed { own: inner.own + times * storage, ..inner },
            _ => {
                let inner = Allowed { own: inner.own + times * joined, ..inner };
                Allowance::storing(&self.rounding(), x, times, inner)
            }
        }
    }

    /// Whether it is a sum of what was stored in fewer bits than f32, each addend for itself.
    pub(super) fn is_stored_apart(&self) -> bool {
        let Held::Summed(added) = &self.values else { return false };
        let [storage, squares] = [&added.storage, &added.squares].map(|of| of.iter().sum::<f64>());
        added.count > 1.0 && storage > F32 * F32 * squares
    }

    /// What its elements were rounded to when they were stored, in numbers.
    pub(super) fn rounding(&self) -> Rounding {
        let of = |to: Option<Precision>| to.map_or(Rounding::default(), rounding);
        of(self.stored).and(of(self.rounded))
    }
}

/// The captured tensors of one unit, by stage.
#[derive(Default)]
pub(super) struct Captured {
    pub(super) gradients: Vec<Gradient>,
}

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

impl Captured {
    pub(super) fn of<'c>(&'c self, stages: &'c [Stage]) -> impl Iterator<Item = &'c Gradient> {
        self.gradients.iter().filter(|gradient| stages.contains(&gradient.stage))
    }

    /// Gradients that nothing nearer than dlogits was captured of.
    pub(super) fn without_parts(&self) -> Vec<Stage> {
        let parts = |stages: &[Stage; 3]| stages[..2].iter().all(|&s| self.stage(s).is_some());
        let open = [
            (Stage::Dq, parts(&Stage::OF_Q)),
            (Stage::Dk, parts(&Stage::OF_K)),
            (Stage::Dbias, false),
        ];
        open.into_iter().filter(|(_, parts)| !parts).map(|(stage, _)| stage).collect()
    }

    /// Some classes' rows of every captured dk and dbias.
    pub(super) fn of_classes(&self, classes: &[usize]) -> Captured {
        let all = self.of(&Stage::OF_CLASSES);
        Captured { gradients: all.map(|gradient| gradient.picked(classes)).collect() }
    }

    /// All gradients, those of k and of the bias at some classes only.
    pub(super) fn with_classes(mut self, classes: &[usize]) -> Captured {
        for one in self.gradients.iter_mut().filter(|one| one.stage.is_of_k()) {
            *one = one.picked(classes);
        }
        self
    }

    /// Bytes of all values.
    pub(super) fn bytes(&self) -> usize {
        let of = |gradient: &Gradient| match &gradient.values {
            Held::Whole(tensor) => tensor.bytes().len(),
            Held::Picked(_) => gradient.matrix().len() * size_of::<f32>(),
            Held::Summed(added) => 3 * added.total.len() * size_of::<f64>(),
        };
        self.gradients.iter().map(of).sum()
    }

    /// The stages of all that are not among these.
    pub(super) fn all_but(&self, others: &[Stage]) -> Vec<Stage> {
        let own = self.gradients.iter().map(|gradient| gradient.stage);
        own.filter(|stage| !others.contains(stage)).collect()
    }

    pub(super) fn stage(&self, stage: Stage) -> Option<&Gradient> {
        self.gradients.iter().find(|gradient| gradient.stage == stage)
    }

    /// Both captured parts of some rows, when both are there.
    pub(super) fn parts(&self, stages: &[Stage; 3], rows: Range<usize>) -> Option<Parts> {
        let (one, other) = self.stage(stages[0]).zip(self.stage(stages[1]))?;
        let wide = |gradient: &Gradient| {
            let part = rows_of(&gradient.matrix(), rows.clone());
            let first = rows.start * part.cols;
            let values = part.to_f64();
            let storage = |(i, &x): (usize, &f64)| gradient.storage(first + i, x);
            let storage = values.iter().enumerate().map(storage).collect::<Vec<f64>>();
            (values, storage, gradient.squares(first..first + part.len()))
        };
        let ((lse, mut storage, a), (label, more, b)) = (wide(one), wide(other));
        storage.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
        Some(Parts { lse, label, storage, squares: a.zip(b) })
    }
}

/// Captured parts of a sum, widened, with the variance that storing them brought.
pub(super) struct Parts {
    pub(super) lse: Vec<f64>,
    pub(super) label: Vec<f64>,
    storage: Vec<f64>,
    /// Where each is a sum of addends: what is known of these.
    squares: Option<(Squares, Squares)>,
}

/// How many addends some values have, and the sum of the squares of each value's.
pub(super) type Squares = (f64, Vec<f64>);

impl Parts {
    /// The job may have added the parts before it rounded them to what was
    /// captured, or after.
    pub(super) fn allowed(&self, joined: &Joined, at: usize) -> Allowed {
        let own = self.storage[at];
        let joined = match &self.squares {
            // Each rank has added its own parts.
            Some(((n, lse), (m, label))) if n.max(*m) > 1.0 => {
                joined.of_addends(n.max(*m), [lse[at], label[at]])
            }
            _ => joined.of(self.lse[at], self.label[at]),
        };
        joined + Allowed { own, ..Allowed::default() }
    }
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
    pub(super) fn add_open(&mut self, stage: Stage, squares: f64) {
        match self.open.iter_mut().find(|(of, _)| *of == stage) {
            Some((_, total)) => *total += squares,
            None => self.open.push((stage, squares)),
        }
    }

    /// Their share of the stage's norm, where its sums hold any.
    pub(super) fn open_share(&self, stage: Stage) -> Option<f64> {
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
    let at = lists.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
        lists.push((stage, Vec::new()));
        lists.len() - 1
    });
    &mut lists[at].1
}

/// Squared error of emulated values once they are stored as what was captured is.
pub(super) fn error_energy(values: &[f64], reference: &[f64], stored: Option<Precision>) -> f64 {
    let one = |(&x, r): (&f64, &f64)| {
        let x = stored.map_or(x, |precision| precision.round64(x));
        (x - r).powi(2)
    };
    values.iter().zip(reference).map(one).sum()
}
