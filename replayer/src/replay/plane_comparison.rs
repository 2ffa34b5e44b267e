//! What is allowed of a captured span of the token x vocabulary plane, and its comparison with a
//! reference that lies in this process.

use backtape::nan::largest;

use super::executor::plane::{Plane, of_plane};
use super::gathered_rows::Gathered;
use super::judge::Judge;
use super::plane_span::Span;

use super::world::{Expectation, StagePlace};
use crate::compare::allowance::FLUSH;
use crate::compare::allowance::Rounding;
use crate::compare::plane::{OfToken, PlaneAllowance};
use crate::compare::{Allowed, RowTally, Rows, once};
use crate::device::PlaneComparison;
use crate::head::Stage;
use crate::kernels::round::Precision;

impl Judge<'_> {
    /// What is allowed of a span's entries: the numbers of the stage, and of each token.
    pub(super) fn plane_allowances(
        &self,
        stage: Stage,
        span: &Span<'_>,
        stored: Option<Precision>,
    ) -> (PlaneAllowance, Vec<OfToken>) {
        let compute = 2.0 * self.plan.roundings.compute();
        let square = compute * compute / 3.0;
        let dlogits = stage == Stage::Dlogits;
        let factor = self.plan.step.options.transform.scale.abs();
        // A p that hardware flushed to zero is missing g times, and g may be large: a loss scale.
        let largest = largest(span.cotangents.lse.iter().map(|g| g.abs()));
        let flushed = FLUSH * largest * factor.max(1.0);
        let entry = Rounding::to(self.plan.roundings.widest.dlogits);
        let allowance = PlaneAllowance {
            stage: of_plane(stage) as i64,
            entry: Rounding { constant: entry.constant + flushed * flushed, ..entry },
            subtracted: Rounding { square, constant: FLUSH * FLUSH, ..Rounding::default() },
            stored: stored.map_or(Rounding::default(), Rounding::to),
            filter: self.plan.step.options.declared.gradient_filter.unwrap_or(0.0),
            factor,
            shared: self.shared_scale(if dlogits { 1.0 } else { 0.0 }),
            transformed: self.transform_scale(),
        };
        let token = |row: usize| OfToken {
            lse: span.lse[row],
            upstream: span.cotangents.lse[row],
            label_upstream: span.cotangents.label[row],
            scale: span.scale[row],
            spread: span.spread[row],
            alike: stored.filter(|_| dlogits).map_or(0.0, |to| span.alike(row, to)),
            label: i64::from(span.head.labels[row]),
        };
        (allowance, (0..span.tokens.len()).map(token).collect())
    }

    /// Columns of a span that are compared.
    pub(super) fn compared_columns(&self, stage: Stage, span: &Span<'_>) -> usize {
        // What a job writes into masked logits is its own business; their gradient is not.
        if stage == Stage::Dlogits { span.head.k.rows } else { span.head.valid_vocab }
    }

    /// What is known of each token of a span whose reference lies in this process.
    pub(super) fn look_at_span(
        &self,
        stage: Stage,
        span: &Span<'_>,
        (plane, ties): (&Plane, &[f64]),
        comparison: &PlaneComparison<'_>,
    ) -> Vec<RowTally> {
        let (vocab, columns) = (span.head.k.rows, comparison.columns);
        let (allowance, tokens) = (comparison.stage, comparison.tokens);
        let kept = Gathered::cut(&comparison.captured, columns);
        let cut = |values: &[f64]| cut_columns(values, vocab, columns);
        let (mut reference, variance) = match stage {
            Stage::Dlogits => (cut(&plane.dlogits), cut(&plane.dlogits_var)),
            _ => (cut(&plane.logits), cut(&plane.logits_var)),
        };
        if stage == Stage::Logprobs {
            for (row, lse) in reference.chunks_mut(columns.max(1)).zip(span.lse) {
                row.iter_mut().for_each(|x| *x -= lse);
            }
        }
        let rows: Vec<usize> = span.tokens.clone().collect();
        let place = StagePlace { stage, microbatch: span.microbatch, rank: None };
        let world = self.world.scale(place);
        reference.iter_mut().for_each(|x| *x *= world);
        let values = &mut reference[..];
        self.world.expected(&mut Expectation { place, rows: &rows, columns, values });
        let again = super::elementwise::rounds(world);
        let allowed = |row: usize, column: usize, supposed: f64| {
            let x = if world == 0.0 { 0.0 } else { supposed / world };
            let inner = allowance.of(&tokens[row], column, x, variance[row * columns + column]);
            let tie = ties.get(row * vocab + column).copied().unwrap_or(0.0);
            let inner = Allowed { certain: inner.certain + tie, ..inner }.times(world);
            allowance.storing(&tokens[row], supposed, again, inner)
        };
        let (index, captured) = (|row: usize| row as u64, kept.matrix());
        let rows = Rows { captured, reference: &reference, index: &index, repeats: &once };
        rows.looked_at(allowed, &self.bound(span.tokens.len(), vocab))
    }
}

fn cut_columns(values: &[f64], width: usize, columns: usize) -> Vec<f64> {
    values.chunks(width.max(1)).flat_map(|row| &row[..columns]).copied().collect()
}
