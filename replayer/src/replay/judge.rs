//! What may differ: the bounds of every comparison, and the world that is compared with.

use super::elementwise::rounds;
use super::plan::Plan;
use super::problem::Problem;
use super::world::{StagePlace, World};
use crate::compare::Bound;
use crate::head::Stage;

/// Says what may differ between what was captured and what was computed.
#[derive(Clone, Copy)]
pub(crate) struct Judge<'a> {
    pub(super) plan: &'a Plan<'a>,
    /// What the job is supposed to have done.
    pub(super) world: &'a dyn World,
}

impl Judge<'_> {
    /// The bound of a comparison of so many rows and columns.
    pub(super) fn bound(&self, rows: usize, columns: usize) -> Bound {
        let nan_is_meant = self.plan.trial && self.world.has_nan();
        let measured = !self.plan.trial;
        Bound { nan_is_meant, measured, ..Bound::new(self.plan.comparisons, rows, rows * columns) }
    }

    /// The world's factor of a stage, and whether its product is rounded.
    pub(super) fn factor(&self, problem: &Problem<'_>, stage: Stage) -> (f64, bool) {
        let place = StagePlace { stage, microbatch: problem.microbatch, rank: problem.rank };
        let factor = self.world.scale(place);
        (factor, rounds(factor))
    }

    /// Puts what a policy gives in the place of the rows that the world means by it.
    pub(super) fn put_emulated(
        &self,
        (place, rows): (StagePlace, &[usize]),
        emulated: &[f64],
        values: &mut [f64],
    ) {
        let width = (values.len() / rows.len().max(1)).max(1);
        for ((to, from), &row) in values.chunks_mut(width).zip(emulated.chunks(width)).zip(rows) {
            if self.world.emulates(place, row) {
                to.copy_from_slice(from);
            }
        }
    }
}
