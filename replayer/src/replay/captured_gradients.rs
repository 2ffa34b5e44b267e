//! Captured gradients of one unit: their values, and what storing them may have changed.

use std::ops::Range;

use super::addends::Added;
use super::elementwise::sum;
use super::gathered_rows::Gathered;
use super::rounding_variance::stored;
use crate::assemble::Tensor;
use crate::compare::Allowed;
use crate::compare::allowance::{Allowance, Joined, Rounding};
use crate::head::roundings::F32;
use crate::head::step::{matrix, rows_of};
use crate::head::{Share, Stage};
use crate::kernels::matrix::Matrix;
use crate::kernels::round::Precision;

/// One captured gradient.
pub(super) struct Gradient {
    pub(super) stage: Stage,
    pub(super) values: GradientValues,
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
pub(super) enum GradientValues {
    /// As one tensor.
    Whole(Tensor),
    /// As some rows of one.
    Picked(Gathered),
    /// As the sum of the addends that ranks recorded.
    Summed(Added),
}

/// The captured tensors of one unit, by stage.
#[derive(Default)]
pub(super) struct Captured {
    pub(super) gradients: Vec<Gradient>,
}

/// Captured parts of a sum, widened, with the variance that storing them brought.
pub(super) struct Parts {
    pub(super) lse: Vec<f64>,
    pub(super) label: Vec<f64>,
    storage: Vec<f64>,
    /// Where each is a sum of addends: what is known of these.
    pub(super) squares: Option<(Squares, Squares)>,
}

/// How many addends some values have, and the sum of the squares of each value's.
pub(super) type Squares = (f64, Vec<f64>);

impl Gradient {
    /// Variance of storing some rows, where it is known element by element.
    pub(super) fn storages(&self, rows: Range<usize>, columns: usize) -> &[f64] {
        match &self.values {
            GradientValues::Summed(added) => {
                &added.storage[rows.start * columns..rows.end * columns]
            }
            _ => &[],
        }
    }

    /// Its rows: of tokens or of the vocabulary.
    pub(super) fn matrix(&self) -> Matrix<'_> {
        let values = match &self.values {
            GradientValues::Whole(tensor) => matrix(tensor).expect("checked when it was captured"),
            GradientValues::Picked(rows) => rows.matrix(),
            GradientValues::Summed(added) => added.matrix(),
        };
        // The bias's `[V]` is a column: one number a row of the vocabulary.
        match self.stage {
            Stage::Dbias => Matrix { rows: values.len(), cols: 1, ..values },
            _ => values,
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
            GradientValues::Summed(added) => GradientValues::Summed(added.picked(rows)),
            _ => GradientValues::Picked(Gathered::new(&self.matrix(), rows)),
        };
        let (stage, stored, source) = (self.stage, self.stored, self.source.clone());
        Gradient { stage, values, stored, rounded: self.rounded, apart: self.apart, source }
    }

    /// Of some elements of a sum of addends: how many these are, and the sums of their squares.
    pub(super) fn squares(&self, elements: Range<usize>) -> Option<Squares> {
        match &self.values {
            GradientValues::Summed(added) => Some((added.count, added.squares[elements].to_vec())),
            GradientValues::Whole(_) | GradientValues::Picked(_) => None,
        }
    }

    /// Variance of storing this element, whose value should be `x`.
    pub(super) fn storage(&self, element: usize, x: f64) -> f64 {
        match &self.values {
            GradientValues::Whole(_) | GradientValues::Picked(_) => {
                stored(self.stored, x) + stored(self.rounded, x)
            }
            GradientValues::Summed(added) => added.storage[element],
        }
    }

    /// What storing this element, which should be `x` and errs within `inner` so far, adds
    /// to it; `again`: as the product with a factor, which was stored before, and the factor
    /// is rounded too, alike for all.
    pub(super) fn storing(&self, element: usize, x: f64, again: bool, inner: Allowed) -> Allowed {
        self.storing_joined(element, x, (again, 0.0), inner)
    }

    /// The same where ranks joined parts of their own, which brought such a variance.
    pub(super) fn storing_joined(
        &self,
        element: usize,
        x: f64,
        (again, joined): (bool, f64),
        inner: Allowed,
    ) -> Allowed {
        let (times, alike) = if again { (2.0, 1.0) } else { (1.0, 0.0) };
        let storage = self.storage(element, x) + joined;
        let inner = Allowed { shared: inner.shared + alike * storage, ..inner };
        match self.values {
            GradientValues::Summed(_) => Allowed { own: inner.own + times * storage, ..inner },
            _ => {
                let inner = Allowed { own: inner.own + times * joined, ..inner };
                Allowance::storing(&self.rounding(), x, times, inner)
            }
        }
    }

    /// Whether it is a sum of what was stored in fewer bits than f32, each addend for itself.
    pub(super) fn is_stored_apart(&self) -> bool {
        let GradientValues::Summed(added) = &self.values else { return false };
        let [storage, squares] =
            [&added.storage, &added.squares].map(|values| values.iter().sum::<f64>());
        added.count > 1.0 && storage > F32 * F32 * squares
    }

    /// What its elements were rounded to when they were stored, in numbers.
    pub(super) fn rounding(&self) -> Rounding {
        let rounding_to = |to: Option<Precision>| to.map_or(Rounding::default(), Rounding::to);
        rounding_to(self.stored).and(rounding_to(self.rounded))
    }
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
        for gradient in self.gradients.iter_mut().filter(|gradient| gradient.stage.is_of_k()) {
            *gradient = gradient.picked(classes);
        }
        self
    }

    /// Bytes of all values.
    pub(super) fn bytes(&self) -> usize {
        let bytes_of = |gradient: &Gradient| match &gradient.values {
            GradientValues::Whole(tensor) => tensor.bytes().len(),
            GradientValues::Picked(_) => gradient.matrix().len() * size_of::<f32>(),
            GradientValues::Summed(added) => 3 * added.total.len() * size_of::<f64>(),
        };
        self.gradients.iter().map(bytes_of).sum()
    }

    /// The stages of all that are not among these.
    pub(super) fn all_but(&self, others: &[Stage]) -> Vec<Stage> {
        let stages = self.gradients.iter().map(|gradient| gradient.stage);
        stages.filter(|stage| !others.contains(stage)).collect()
    }

    pub(super) fn stage(&self, stage: Stage) -> Option<&Gradient> {
        self.gradients.iter().find(|gradient| gradient.stage == stage)
    }

    /// Both captured parts of some rows, when both are there.
    pub(super) fn parts(&self, stages: &[Stage; 3], rows: Range<usize>) -> Option<Parts> {
        let (lse_part, other) = self.stage(stages[0]).zip(self.stage(stages[1]))?;
        let wide = |gradient: &Gradient| {
            let part = rows_of(&gradient.matrix(), rows.clone());
            let first = rows.start * part.cols;
            let values = part.to_f64();
            let storage = |(i, &x): (usize, &f64)| gradient.storage(first + i, x);
            let storage = values.iter().enumerate().map(storage).collect::<Vec<f64>>();
            (values, storage, gradient.squares(first..first + part.len()))
        };
        let ((lse, mut storage, a), (label, more, b)) = (wide(lse_part), wide(other));
        storage.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
        Some(Parts { lse, label, storage, squares: a.zip(b) })
    }
}

impl Parts {
    /// The job may have added the parts before it rounded them to what was
    /// captured, or after.
    pub(super) fn allowed(&self, joined: &Joined, element: usize) -> Allowed {
        let own = self.storage[element];
        let joined = match &self.squares {
            // Each rank has added its own parts.
            Some(((n, lse), (m, label))) if n.max(*m) > 1.0 => {
                joined.of_addends(n.max(*m), [lse[element], label[element]])
            }
            _ => joined.of(self.lse[element], self.label[element]),
        };
        joined + Allowed { own, ..Allowed::default() }
    }
}

/// What a stage should be: a part, or the sum of the captured parts, or of both.
pub(super) fn reference_of(
    stage: Stage,
    lse: &[f64],
    label: &[f64],
    parts: Option<&Parts>,
) -> Vec<f64> {
    match (stage.share(), parts) {
        (Share::Softmax, _) => lse.to_vec(),
        (Share::Label, _) => label.to_vec(),
        (Share::Whole, Some(parts)) => sum(&parts.lse, &parts.label),
        (Share::Whole, None) => sum(lse, label),
    }
}

/// The unit's own rows of every captured dq.
pub(super) fn picked(captured: &Captured, rows: &[usize]) -> Captured {
    let pick = |gradient: &Gradient| {
        let values = match &gradient.values {
            GradientValues::Whole(_) | GradientValues::Picked(_) => {
                GradientValues::Picked(Gathered::new(&gradient.matrix(), rows))
            }
            GradientValues::Summed(added) => GradientValues::Summed(added.picked(rows)),
        };
        let (stage, stored, source) = (gradient.stage, gradient.stored, gradient.source.clone());
        let (rounded, apart) = (gradient.rounded, gradient.apart);
        Gradient { stage, values, stored, rounded, apart, source }
    };
    Captured { gradients: captured.of(&Stage::OF_Q).map(pick).collect() }
}

/// Squared error of emulated values once they are stored as what was captured is.
pub(super) fn error_energy(values: &[f64], reference: &[f64], stored: Option<Precision>) -> f64 {
    let squared_error = |(&x, r): (&f64, &f64)| {
        let x = stored.map_or(x, |precision| precision.round64(x));
        (x - r).powi(2)
    };
    values.iter().zip(reference).map(squared_error).sum()
}
