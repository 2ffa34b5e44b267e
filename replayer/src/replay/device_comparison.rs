//! Comparisons of dq and dk that a device makes where their sums lie.

use std::ops::Range;

use super::captured_gradients::{Captured, Gradient};
use super::executor::failed;
use super::gradient_allowances::Allowances;
use super::judge::Judge;
use super::problem::Problem;
use super::slab::{Looked, Slab};
use crate::compare::RowTally;
use crate::device::{Comparison, Kept, LabelSums};
use crate::head::Stage;
use crate::head::step::{StepError, rows_of};
use crate::kernels::Matrix;
use crate::kernels::reference::Backward;

impl Judge<'_> {
    /// Whether a device is asked to compare. A drawing wants the elements, and what a swamped
    /// accumulator certainly loses, or a token at a clip bound may lack, is known here alone.
    pub(super) fn compares_there(&self, problem: &Problem<'_>) -> bool {
        self.plan.draw.is_none() && !self.plan.roundings.swamps() && !problem.any_uncertain()
    }

    /// The same of dk: what ranks rounded of their own parts, and what is allowed of a dk that was
    /// recorded as a sum alone, is told from the sums, which are then needed here.
    pub(super) fn compares_dk_there(&self, problem: &Problem<'_>, captured: &Captured) -> bool {
        let told = captured.of(&Stage::OF_K).any(|gradient| gradient.apart.is_some())
            || self.plan.kept_without_addends(problem.head.k.len()).is_some();
        self.compares_there(problem) && !told
    }

    /// What a device finds of a slab's rows.
    pub(super) fn look_at_dk(
        &self,
        problem: &Problem<'_>,
        slab: &Slab,
        captured: &Captured,
        kept: &mut dyn Kept,
    ) -> Result<Looked, StepError> {
        let label: LabelSums<'_> =
            [&slab.label, &slab.label_sq, &slab.label_var, &slab.label_alike, &slab.label_whole];
        let bound = self.bound(problem.head.k.rows, problem.head.q.cols).element;
        let side = rows_of(&problem.head.k, slab.range.clone());
        let forced = captured.parts(&Stage::OF_K, 0..0).is_some();
        let mut looked = Looked::new();
        for gradient in
            captured.of(&Stage::OF_K).filter(|gradient| gradient.stage != Stage::Dk || !forced)
        {
            let allowances = self.of_dk(problem, slab, gradient.stage);
            let compared =
                (gradient, slab.range.clone(), self.joined_by_ranks(slab, captured, gradient));
            let comparison = compare_there(compared, allowances, (label, side), bound, kept)?;
            looked.push((gradient.stage, comparison));
        }
        Ok(looked)
    }

    /// What it finds of the tokens; `captured` are their rows.
    pub(super) fn look_at_dq(
        &self,
        problem: &Problem<'_>,
        dq: &Backward,
        captured: &Captured,
        kept: &mut dyn Kept,
    ) -> Result<Looked, StepError> {
        let (tokens, d) = (problem.head.q.rows, problem.head.q.cols);
        let label: LabelSums<'_> = [&dq.dq_label, &[], &dq.dq_label_var, &[], &[]];
        let bound = self.bound(tokens, d).element;
        let forced = captured.parts(&Stage::OF_Q, 0..0).is_some();
        let mut looked = Looked::new();
        for gradient in
            captured.of(&Stage::OF_Q).filter(|gradient| gradient.stage != Stage::Dq || !forced)
        {
            let allowances = self.of_dq(problem, (dq, problem.head.copies), gradient.stage);
            let compared = (gradient, 0..tokens, Vec::new());
            let comparison =
                compare_there(compared, allowances, (label, problem.head.q), bound, kept)?;
            looked.push((gradient.stage, comparison));
        }
        Ok(looked)
    }
}

fn compare_there(
    (gradient, rows, joined): (&Gradient, Range<usize>, Vec<f64>),
    Allowances { mut stage, rows: of_rows, columns }: Allowances,
    (label, side): (LabelSums<'_>, Matrix<'_>),
    bound: f64,
    kept: &mut dyn Kept,
) -> Result<Vec<RowTally>, StepError> {
    stage.stored = gradient.rounding();
    let captured = rows_of(&gradient.matrix(), rows.clone());
    let mut storage = gradient.storages(rows, captured.cols).to_vec();
    storage.iter_mut().zip(joined).for_each(|(storage, joined)| *storage += joined);
    let comparison = Comparison {
        captured,
        stage: &stage,
        rows: &of_rows,
        columns: &columns,
        label,
        side,
        storage: &storage,
        bound,
    };
    kept.compare(&comparison).map_err(failed)
}
