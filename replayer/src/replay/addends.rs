//! Sums of what ranks recorded as addends, in global coordinates and in f64.

use backtape::identity::{Microbatch, Rank};
use backtape::placement::Reduction;
use backtape::role::Role;
use backtape::shard::TensorKey;

use super::elementwise::rounds;
use super::rounding_variance::stored;
use crate::assemble::{self, Tensor};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, addends_of_elements, matrix, unfit};
use crate::head::{HeadStep, Stage};
use crate::kernels::matrix::{Matrix, Values};

/// The sum of addends, with what its error depends on. All row-major, one value an
/// element of the whole tensor.
pub(crate) struct Sum {
    pub(crate) shape: Vec<u64>,
    pub(crate) total: Vec<f64>,
    /// Of the addends' squares.
    pub(super) squares: Vec<f64>,
    /// Variance that storing the addends brought.
    pub(super) storage: Vec<f64>,
    /// Addends of the element that has most.
    pub(super) count: f64,
    /// Whether a mean's constant, which rounds alike for all, is no power of two.
    pub(super) rounds: bool,
}

/// A sum of addends as a matrix, and what is known of them.
pub(super) struct Added {
    pub(super) cols: usize,
    pub(super) total: Vec<f64>,
    /// Variance that storing the addends brought.
    pub(super) storage: Vec<f64>,
    /// Of the addends' squares.
    pub(super) squares: Vec<f64>,
    /// How many addends there are.
    pub(super) count: f64,
}

impl Added {
    pub(super) fn matrix(&self) -> Matrix<'_> {
        let rows = self.total.len() / self.cols.max(1);
        Matrix { rows, cols: self.cols, values: Values::F64(&self.total) }
    }

    /// Some of its rows.
    pub(super) fn picked(&self, rows: &[usize]) -> Added {
        let row = |&row: &usize| row * self.cols..(row + 1) * self.cols;
        let chosen = |all: &[f64]| rows.iter().flat_map(|at| &all[row(at)]).copied().collect();
        let [total, storage, squares] =
            [&self.total, &self.storage, &self.squares].map(|values| chosen(values));
        Added { total, storage, squares, ..*self }
    }
}

impl Sum {
    /// What was added, with the last dimension as columns.
    pub(super) fn added(self) -> Added {
        let Sum { total, squares, storage, count, .. } = self;
        // A gradient of the bias has one number a class.
        let cols = match self.shape[..] {
            [.., _, columns] => columns as usize,
            _ => 1,
        };
        Added { cols, total, storage, squares, count }
    }

    pub(crate) fn new(shape: &[u64]) -> Sum {
        let zeros = || vec![0.0; shape.iter().product::<u64>() as usize];
        Sum {
            shape: shape.to_vec(),
            total: zeros(),
            squares: zeros(),
            storage: zeros(),
            count: 0.0,
            rounds: false,
        }
    }

    /// Every addend of a partial tensor, box by box; a mean divides each by their
    /// number.
    pub(crate) fn of_partial(step: &HeadStep<'_>, key: &TensorKey) -> Result<Sum, StepError> {
        let mut sum = Sum::new(&step.tensors[key].shape);
        sum.add_weighted(step, key, &|_| 1.0)?;
        Ok(sum)
    }

    /// The addends of a gradient of k as they are, whatever the reduction over ranks makes of them:
    /// together they are the gradient of all tokens.
    pub(crate) fn of_addends(step: &HeadStep<'_>, key: &TensorKey) -> Result<Sum, StepError> {
        let mut sum = Sum::new(&step.tensors[key].shape);
        sum.add_of(step, key, &assemble::holders(step.dump, key))?;
        Ok(sum)
    }

    /// The same in the layout of the formulas: gradients of k as `[V, D]`.
    pub(crate) fn oriented(self, step: &HeadStep<'_>, key: &TensorKey) -> Sum {
        let role = step.tensors[key].role;
        let of_k = matches!(role, Some(Role::Dk | Role::DkLse | Role::DkLabel));
        let ([rows, cols], true) = (&self.shape[..], step.options.transposed() && of_k) else {
            return self;
        };
        let (n, d) = (*rows as usize, *cols as usize);
        let turned = |values: &[f64]| -> Vec<f64> {
            (0..d).flat_map(|i| (0..n).map(move |v| v * d + i)).map(|at| values[at]).collect()
        };
        Sum {
            shape: vec![*cols, *rows],
            total: turned(&self.total),
            squares: turned(&self.squares),
            storage: turned(&self.storage),
            ..self
        }
    }

    /// Adds all that the ranks hold of a tensor: its addends, each rank's times its weight, or its
    /// one value.
    pub(crate) fn add_weighted(
        &mut self,
        step: &HeadStep<'_>,
        key: &TensorKey,
        weight: &dyn Fn(Option<Rank>) -> f64,
    ) -> Result<(), StepError> {
        let info = &step.tensors[key];
        let Some(reduction) = info.partial else {
            return self.add(&step.assemble(key)?, weight(None));
        };
        let counts = match reduction {
            Reduction::Sum => Vec::new(),
            Reduction::Mean => addends_of_elements(step, key),
        };
        let factor = |at: usize| counts.get(at).map_or(1.0, |&n| 1.0 / f64::from(n.max(1)));
        self.rounds |= (0..counts.len()).any(|at| rounds(factor(at)));
        let (before, ranks) = (self.count, assemble::holders(step.dump, key));
        for &rank in &ranks {
            let parts = assemble::addend_parts(step.dump, key, rank)
                .map_err(|source| StepError::Assemble { key: key.clone(), source })?;
            for part in parts {
                self.add_by(&part, &|at| factor(at) * weight(Some(rank)))?;
            }
        }
        // Boxes of one rank do not overlap: each rank adds once to an element that it holds.
        self.count = before + ranks.len() as f64;
        Ok(())
    }

    /// Adds what some ranks hold, each as it is; false where they hold none.
    pub(super) fn add_of(
        &mut self,
        step: &HeadStep<'_>,
        key: &TensorKey,
        ranks: &[Rank],
    ) -> Result<bool, StepError> {
        let holders = assemble::holders(step.dump, key);
        let holders_among: Vec<Rank> =
            holders.into_iter().filter(|rank| ranks.contains(rank)).collect();
        let before = self.count;
        for &rank in &holders_among {
            let parts = assemble::addend_parts(step.dump, key, rank)
                .map_err(|source| StepError::Assemble { key: key.clone(), source })?;
            parts.iter().try_for_each(|part| self.add(part, 1.0))?;
        }
        // Boxes of one rank do not overlap: each rank adds once to an element that it holds.
        self.count = before + holders_among.len() as f64;
        Ok(!holders_among.is_empty())
    }

    /// Adds a tensor, or one box of it, at its place.
    pub(super) fn add(&mut self, part: &Tensor, factor: f64) -> Result<(), StepError> {
        self.add_by(part, &|_| factor)
    }

    /// The same, each element times a factor by its place in the whole.
    fn add_by(&mut self, part: &Tensor, factor: &dyn Fn(usize) -> f64) -> Result<(), StepError> {
        let precision = precision_of(part.dtype);
        let values = matrix(part).ok_or_else(|| unfit(part, "floats"))?;
        let fits = part.place.check(&self.shape).is_ok();
        if !fits {
            return Err(unfit(part, &format!("a part of a tensor of shape {:?}", self.shape)));
        }
        for (row, start) in row_starts(&part.place.0, &self.shape).into_iter().enumerate() {
            for column in 0..values.cols {
                let element = start + column;
                let x = values.get_f64(row * values.cols + column) * factor(element);
                self.total[element] += x;
                self.squares[element] += x * x;
                self.storage[element] += stored(precision, x);
            }
        }
        self.count += 1.0;
        Ok(())
    }
}

/// An addend of a sum of dk: of which microbatch (none for what was summed over them already), whose
/// (none where it was recorded whole), and its values in f64.
pub(crate) type Read = (Option<Microbatch>, Option<Rank>, Vec<f64>);

/// The addends of a sum of dk as they were recorded: every microbatch's; with `summed` of the
/// reduction the sums over microbatches, where those were captured. `None` where one is missing.
pub(crate) fn read(
    step: &HeadStep<'_>,
    microbatches: &[Option<Microbatch>],
    (stage, own_rank): (Stage, Option<Rank>),
    summed: bool,
) -> Option<Vec<Read>> {
    let local = step.find_reduced(Role::Dk, false).filter(|_| stage == Stage::Reduce && summed);
    let sources: Vec<_> = match local {
        Some(local) => vec![(None, local)],
        None => microbatches
            .iter()
            .map(|&mb| Some((mb, step.find(Role::Dk, mb)?)))
            .collect::<Option<_>>()?,
    };
    let widened = |tensor: &Tensor| Some(matrix(tensor)?.to_f64());
    let mut addends = Vec::new();
    for (microbatch, key) in sources {
        match step.tensors[key].partial {
            None => addends.push((microbatch, None, widened(&step.assemble(key).ok()?)?)),
            Some(_) if stage == Stage::Accumulate => {
                let values = widened(&step.addend(key, &[own_rank?]).ok()?)?;
                addends.push((microbatch, own_rank, values));
            }
            Some(_) => {
                for rank in assemble::holders(step.dump, key) {
                    // In place: a rank may hold some boxes of the whole.
                    let mut sum = Sum::new(&step.tensors[key].shape);
                    let only = |of: Option<Rank>| f64::from(u8::from(of == Some(rank)));
                    sum.add_weighted(step, key, &only).ok()?;
                    addends.push((microbatch, Some(rank), sum.total));
                }
            }
        }
    }
    Some(addends)
}

/// Where each row of a box starts in the whole tensor, row-major.
fn row_starts(place: &[(u64, u64)], shape: &[u64]) -> Vec<usize> {
    let Some((&(first, _), leading)) = place.split_last() else { return vec![0] };
    let mut starts = vec![0usize];
    for (&(lo, hi), &n) in leading.iter().zip(shape) {
        let extend = |&base: &usize| (lo..hi).map(move |i| base * n as usize + i as usize);
        starts = starts.iter().flat_map(extend).collect();
    }
    let width = *shape.last().unwrap_or(&1) as usize;
    starts.iter().map(|row| row * width + first as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_box_start_where_they_lie_in_the_whole() {
        assert_eq!(row_starts(&[(1, 3), (2, 4)], &[4, 5]), [7, 12]);
        assert_eq!(row_starts(&[(0, 1), (1, 2), (0, 3)], &[2, 2, 3]), [3]);
        assert_eq!(row_starts(&[(2, 6)], &[9]), [2]);
        assert_eq!(row_starts(&[], &[]), [0]);
    }
}
