//! The token x vocabulary plane: captured spans of it, and what the reference and policies have.

use std::ops::Range;

use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::{Executor, Place, failed};
use crate::assemble;
use crate::compare::plane::PlaneStage;
use crate::compare::{RowTally, Tally};
use crate::device::{KeptPlane, PlaneComparison};
use crate::head::Stage;
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, unfit};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use crate::kernels::policy::{self, Policy};
use crate::kernels::reference::{self, TermNoise};
use crate::kernels::round::Precision;
use crate::kernels::span_of;
use crate::replay::microbatch::HeadMicrobatch;
use crate::replay::tasks::task::PlanePart;

/// Bytes of one f64 buffer over a span of tokens.
const SPAN_BYTES: usize = 32 << 20;

/// Captured values, and what they were stored in.
pub(in crate::replay) type Stored<'a> = (Matrix<'a>, Option<Precision>);

/// Given the tokens of a span, and its captured values.
type TakeSpan<'a> =
    dyn FnMut(Range<usize>, Matrix<'_>, Option<Precision>) -> Result<(), StepError> + 'a;

/// What was found of a span: the comparison, and the errors' energies of the members.
pub(in crate::replay) type JudgedSpan = (Tally, Vec<f64>);

/// Judges the captured values of a span.
pub(in crate::replay) type JudgeSpan<'a> =
    dyn FnMut(&PlanePart, SpanUpstream<'_>, Stored<'_>) -> Result<JudgedSpan, StepError> + 'a;

/// A captured plane, and what its reference starts from.
pub(in crate::replay) struct CapturedPlane<'a> {
    pub(in crate::replay) key: &'a TensorKey,
    pub(in crate::replay) microbatch: &'a HeadMicrobatch,
    pub(in crate::replay) upstream: SpanUpstream<'a>,
}

/// What the reference of some tokens starts from.
#[derive(Clone, Copy)]
pub(in crate::replay) struct SpanUpstream<'a> {
    pub(in crate::replay) head: HeadInputs<'a>,
    pub(in crate::replay) lse: &'a [f64],
    pub(in crate::replay) cotangents: Cotangents<'a, f64>,
}

/// Reference values of a span, `[tokens, V]` each.
pub(in crate::replay) struct Plane {
    pub(in crate::replay) logits: Vec<f64>,
    pub(in crate::replay) logits_var: Vec<f64>,
    pub(in crate::replay) dlogits: Vec<f64>,
    pub(in crate::replay) dlogits_var: Vec<f64>,
}

/// The reference of a span, where it lies.
pub(in crate::replay) struct PlaneSums<'a> {
    executor: &'a Executor<'a>,
    stage: Stage,
    upstream: SpanUpstream<'a>,
    values: PlaneValues<'a>,
}

enum PlaneValues<'a> {
    Here(Plane),
    /// On a device; the values once they were fetched.
    There(Box<dyn KeptPlane + 'a>, Option<Vec<f64>>),
}

impl<'a> Executor<'a> {
    /// Judges a captured plane, span by span: `part` is what a span is judged by, `judge` judges
    /// it if no other process does, and `put` is given what was found, in the spans' order.
    pub(in crate::replay) fn planes(
        &self,
        plane: &CapturedPlane<'_>,
        part: &dyn Fn(Range<usize>) -> PlanePart,
        judge: &mut JudgeSpan<'_>,
        put: &mut dyn FnMut(JudgedSpan),
    ) -> Result<(), StepError> {
        let SpanUpstream { head, lse, cotangents } = plane.upstream;
        if let Place::Cluster(driver) = &self.place {
            let spans = self.spans(plane.key, head.k.rows)?.into_iter().map(part).collect();
            let judged = driver.planes(plane.microbatch, &head, (lse, &cotangents), spans)?;
            judged.into_iter().for_each(put);
            return Ok(());
        }
        self.each_span(plane.key, head.k.rows, &mut |tokens, captured, precision| {
            let part = part(tokens.clone());
            let upstream = SpanUpstream {
                head: span_of(&head, tokens.clone()),
                lse: &lse[tokens.clone()],
                cotangents: cotangents.of(tokens),
            };
            put(judge(&part, upstream, (captured, precision))?);
            Ok(())
        })
    }

    /// The spans of tokens that a captured `[..., V]` tensor is read by.
    pub(super) fn spans(
        &self,
        key: &TensorKey,
        vocab: usize,
    ) -> Result<Vec<Range<usize>>, StepError> {
        let shape = &self.plan.step.tensors[key].shape;
        let (first, inner) = match shape.split_last() {
            Some((&columns, leading)) if columns == vocab as u64 && !leading.is_empty() => {
                (leading[0], leading[1..].iter().product::<u64>())
            }
            _ => {
                let tensor = self.plan.step.assemble(key)?;
                return Err(unfit(&tensor, &format!("floats of shape [..., {vocab}]")));
            }
        };
        let bytes = match self.place {
            Place::Device(device) => device.plane_bytes().map_err(failed)?,
            _ => SPAN_BYTES,
        };
        let step = (bytes / (inner as usize * vocab * 8).max(1)).max(1) as u64;
        let span =
            |start: u64| (start * inner) as usize..((start + step).min(first) * inner) as usize;
        Ok((0..first).step_by(step as usize).map(span).collect())
    }

    /// A captured `[..., V]` tensor, some tokens at a time.
    pub(super) fn each_span(
        &self,
        key: &TensorKey,
        vocab: usize,
        take: &mut TakeSpan<'_>,
    ) -> Result<(), StepError> {
        let shape = &self.plan.step.tensors[key].shape;
        for tokens in self.spans(key, vocab)? {
            let inner = shape[1..shape.len() - 1].iter().product::<u64>().max(1);
            let mut place = IndexBox::whole(shape);
            place.0[0] = (tokens.start as u64 / inner, tokens.end as u64 / inner);
            let tensor = assemble::assemble_box(self.plan.step.dump, key, &place)
                .map_err(|source| StepError::Assemble { key: key.clone(), source })?;
            let values = matrix(&tensor).ok_or_else(|| unfit(&tensor, "floats"))?;
            take(tokens, values, precision_of(tensor.dtype))?;
        }
        Ok(())
    }

    /// The reference of a span of a stage.
    pub(in crate::replay) fn plane(
        &'a self,
        stage: Stage,
        upstream: SpanUpstream<'a>,
        noise: &TermNoise,
    ) -> Result<PlaneSums<'a>, StepError> {
        let SpanUpstream { head, lse, cotangents } = upstream;
        let values = match self.place {
            Place::Device(device) => {
                let upstream = reference::Upstream::new(&head, lse, cotangents, noise);
                let kept = device.plane(&head, upstream, (of_plane(stage), self.progress));
                PlaneValues::There(kept.map_err(failed)?, None)
            }
            _ => PlaneValues::Here(self.plane_here(&upstream, noise)),
        };
        Ok(PlaneSums { executor: self, stage, upstream, values })
    }

    fn plane_here(&self, upstream: &SpanUpstream<'_>, noise: &TermNoise) -> Plane {
        let SpanUpstream { head, lse, cotangents } = upstream;
        let (rows, vocab) = (lse.len(), head.k.rows);
        let zeros = || vec![0.0; rows * vocab];
        let mut plane =
            Plane { logits: zeros(), logits_var: zeros(), dlogits: zeros(), dlogits_var: zeros() };
        let on_tile = &mut |tile: reference::PlaneTile<'_>| {
            for (to, from) in [
                (&mut plane.logits, tile.logits),
                (&mut plane.logits_var, tile.logits_var),
                (&mut plane.dlogits, tile.dlogits),
                (&mut plane.dlogits_var, tile.dlogits_var),
            ] {
                place_tile(to, vocab, &tile.tokens, &tile.cols, from);
            }
        };
        let (tiles, progress) = (self.plan.tiles, self.progress);
        reference::plane(head, lse, cotangents, noise, tiles, progress, on_tile);
        plane
    }

    /// A policy's plane of a span, tile by tile.
    fn policy_plane(
        &self,
        policy: &Policy,
        upstream: &SpanUpstream<'_>,
        on_tile: &mut dyn FnMut(policy::PlaneTile<'_>),
    ) -> Result<(), StepError> {
        let SpanUpstream { head, lse, cotangents } = upstream;
        let (tiles, progress) = (self.plan.roundings.tiles, self.progress);
        match self.place {
            Place::Device(device) => device
                .policy_plane(policy, head, (lse, cotangents), (tiles, progress), on_tile)
                .map_err(failed),
            _ => {
                policy::plane(policy, head, lse, cotangents, tiles, progress, on_tile);
                Ok(())
            }
        }
    }

    /// Squared errors of a policy's entries, stored in this precision.
    fn energy_of(
        &self,
        policy: &Policy,
        (stage, upstream): (Stage, &SpanUpstream<'_>),
        (exact, precision): (&[f64], Option<Precision>),
    ) -> Result<f64, StepError> {
        let (vocab, valid) = (upstream.head.k.rows, upstream.head.valid_vocab);
        let mut energy = 0.0;
        self.policy_plane(policy, upstream, &mut |tile| {
            let values = if stage == Stage::Logits { tile.logits } else { tile.dlogits };
            let width = tile.cols.len().max(1);
            for (row, values) in tile.tokens.clone().zip(values.chunks(width)) {
                for (column, &x) in tile.cols.clone().zip(values) {
                    if stage == Stage::Dlogits || column < valid {
                        let x = precision.map_or(x, |p| p.round64(x));
                        energy += (x - exact[row * vocab + column]).powi(2);
                    }
                }
            }
        })?;
        Ok(energy)
    }
}

impl PlaneSums<'_> {
    /// What is known of each token: compared where the values lie, by `here` in this process.
    pub(in crate::replay) fn looked(
        &mut self,
        comparison: &PlaneComparison<'_>,
        here: &mut dyn FnMut(&mut Plane) -> Vec<RowTally>,
    ) -> Result<Vec<RowTally>, StepError> {
        match &mut self.values {
            PlaneValues::Here(plane) => Ok(here(plane)),
            PlaneValues::There(kept, _) => kept.compare(comparison).map_err(failed),
        }
    }

    /// Squared errors of a policy's entries, stored in this precision.
    pub(in crate::replay) fn energy(
        &mut self,
        policy: &Policy,
        precision: Option<Precision>,
    ) -> Result<f64, StepError> {
        let (executor, stage, upstream) = (self.executor, self.stage, &self.upstream);
        let exact = match &mut self.values {
            PlaneValues::Here(plane) if stage == Stage::Dlogits => &plane.dlogits,
            PlaneValues::Here(plane) => &plane.logits,
            PlaneValues::There(kept, fetched) => {
                let SpanUpstream { head, lse, cotangents } = upstream;
                let stored = (precision, executor.progress);
                let there = kept.energy(policy, head, (lse, cotangents), stored);
                if let Some(energy) = there.map_err(failed)? {
                    return Ok(energy);
                }
                match fetched {
                    Some(values) => values,
                    None => fetched.insert(kept.values().map_err(failed)?),
                }
            }
        };
        executor.energy_of(policy, (stage, upstream), (exact, precision))
    }
}

/// A stage of the plane as allowances and devices call it.
pub(in crate::replay) fn of_plane(stage: Stage) -> PlaneStage {
    match stage {
        Stage::Dlogits => PlaneStage::Dlogits,
        Stage::Logprobs => PlaneStage::Logprobs,
        _ => PlaneStage::Logits,
    }
}

/// Writes a tile's values to their place in rows of `width` columns.
pub(in crate::replay) fn place_tile(
    to: &mut [f64],
    width: usize,
    rows: &Range<usize>,
    cols: &Range<usize>,
    from: &[f64],
) {
    for (row, values) in rows.clone().zip(from.chunks(cols.len().max(1))) {
        to[row * width + cols.start..row * width + cols.end].copy_from_slice(values);
    }
}
