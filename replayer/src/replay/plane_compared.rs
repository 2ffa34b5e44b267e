//! A captured span of the token x vocabulary plane against the reference: here, and on a device.

use backtape::nan::largest;

use super::Replay;
use super::allowed::{FLUSH, rounding};
use super::devised::failed;
use super::gather::Gathered;
use super::plane::{Plane, Span};
use super::world::{At, Expectation};
use crate::compare::allowance::Rounding;
use crate::compare::plane::{OfToken, PlaneAllowance, PlaneStage};
use crate::compare::{Allowed, Rows, Tally};
use crate::device::{Device, PlaneComparison};
use crate::head::Stage;
use crate::head::step::StepError;
use crate::kernels::matrix::Matrix;
use crate::kernels::reference;
use crate::kernels::round::Precision;

/// Captured values, and what they were stored in.
type Captured<'a> = (Matrix<'a>, Option<Precision>);

fn of_plane(stage: Stage) -> PlaneStage {
    match stage {
        Stage::Dlogits => PlaneStage::Dlogits,
        Stage::Logprobs => PlaneStage::Logprobs,
        _ => PlaneStage::Logits,
    }
}

impl Replay<'_> {
    /// What is allowed of a span's entries: the numbers of the stage, and of each token.
    fn plane_allowances(
        &self,
        stage: Stage,
        span: &Span<'_>,
        stored: Option<Precision>,
    ) -> (PlaneAllowance, Vec<OfToken>) {
        let compute = 2.0 * self.roundings.compute();
        let square = compute * compute / 3.0;
        let dlogits = stage == Stage::Dlogits;
        let factor = self.step.options.transform.scale.abs();
        // A p that hardware flushed to zero is missing g times, and g may be large: a loss scale.
        let largest = largest(span.cotangents.lse.iter().map(|g| g.abs()));
        let flushed = FLUSH * largest * factor.max(1.0);
        let entry = rounding(self.roundings.widest.dlogits);
        let allowance = PlaneAllowance {
            stage: of_plane(stage) as i64,
            entry: Rounding { constant: entry.constant + flushed * flushed, ..entry },
            subtracted: Rounding { square, constant: FLUSH * FLUSH, ..Rounding::default() },
            stored: stored.map_or(Rounding::default(), rounding),
            filter: self.step.options.declared.gradient_filter.unwrap_or(0.0),
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
    fn compared_columns(&self, stage: Stage, span: &Span<'_>) -> usize {
        // What a job writes into masked logits is its own business; their gradient is not.
        if stage == Stage::Dlogits { span.head.k.rows } else { span.head.valid_vocab }
    }

    pub(super) fn judge_span(
        &self,
        stage: Stage,
        span: &Span<'_>,
        (plane, ties): (&Plane, &[f64]),
        (captured, precision): Captured<'_>,
    ) -> Tally {
        let (vocab, columns) = (span.head.k.rows, self.compared_columns(stage, span));
        let kept = Gathered::cut(&captured, columns);
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
        let at = At { stage, microbatch: span.microbatch, rank: None };
        let world = self.world.scale(at);
        reference.iter_mut().for_each(|x| *x *= world);
        let values = &mut reference[..];
        self.world.expected(&mut Expectation { at, rows: &rows, columns, values });
        let (allowance, tokens) = self.plane_allowances(stage, span, precision);
        let again = super::dk::rounds(world);
        let allowed = |row: usize, column: usize, supposed: f64| {
            let x = if world == 0.0 { 0.0 } else { supposed / world };
            let inner = allowance.of(&tokens[row], column, x, variance[row * columns + column]);
            let tie = ties.get(row * vocab + column).copied().unwrap_or(0.0);
            let inner = Allowed { certain: inner.certain + tie, ..inner }.times(world);
            allowance.storing(&tokens[row], supposed, again, inner)
        };
        let index = |row: usize| (span.tokens.start + row) as u64;
        let repeats = |row: usize| span.head.copies.map_or(1.0, |copies| copies[row]);
        let rows = Rows {
            captured: kept.matrix(),
            reference: &reference,
            index: &index,
            repeats: &repeats,
        };
        let bound = self.bound(span.tokens.len(), vocab);
        rows.tally_of(span.sure, &rows.looked_at(allowed, &bound), &bound)
    }

    /// The same where a device holds the reference, which is nobody's hypothesis; beside it the
    /// errors' energies of the members.
    pub(super) fn judge_span_there(
        &self,
        device: &dyn Device,
        stage: Stage,
        span: &Span<'_>,
        (captured, precision): Captured<'_>,
    ) -> Result<(Tally, Vec<f64>), StepError> {
        let noise = self.term_noise(span.head.q.cols);
        let upstream = reference::Upstream::new(&span.head, span.lse, span.cotangents, &noise);
        let of = (of_plane(stage), self.progress);
        let mut kept = device.plane(&span.head, upstream, of).map_err(failed)?;
        let (allowance, tokens) = self.plane_allowances(stage, span, precision);
        let bound = self.bound(span.tokens.len(), span.head.k.rows);
        let columns = self.compared_columns(stage, span);
        let comparison = PlaneComparison {
            captured,
            columns,
            stage: &allowance,
            tokens: &tokens,
            bound: bound.element,
        };
        let looked = kept.compare(&comparison).map_err(failed)?;
        let index = |row: usize| (span.tokens.start + span.sure[row]) as u64;
        let repeats = |row: usize| span.head.copies.map_or(1.0, |copies| copies[span.sure[row]]);
        let looked: Vec<_> = span.sure.iter().map(|&row| looked[row]).collect();
        let tally = Tally::of_looked((&looked, columns), &index, &repeats, &bound);
        let mut exact = None;
        let energies = self.emulate_span(stage, &mut |policy| {
            let upstream = (span.lse, &span.cotangents);
            let there = kept.energy(policy, &span.head, upstream, (precision, self.progress));
            if let Some(energy) = there.map_err(failed)? {
                return Ok(energy);
            }
            if exact.is_none() {
                exact = Some(kept.values().map_err(failed)?);
            }
            let exact = exact.as_deref().expect("just fetched");
            self.energy_of(policy, (stage, span), (exact, precision))
        })?;
        Ok((tally, energies))
    }
}

fn cut_columns(values: &[f64], width: usize, columns: usize) -> Vec<f64> {
    values.chunks(width.max(1)).flat_map(|row| &row[..columns]).copied().collect()
}
