//! Stages of the token x vocabulary plane: logits, log-probabilities of every class,
//! dlogits. They are read and judged a span of tokens at a time.

use std::ops::Range;

use backtape::identity::Microbatch;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::allowed::{relative, stored};
use super::forward::{ForwardState, few};
use super::gather::Gathered;
use super::loss::Upstream;
use super::members::{Member, members};
use super::outcome::{Comparison, MemberError, Outcome};
use super::tasks::PlanePart;
use super::ties::near_ties;
use super::world::{At, Expectation, UnitTokens};
use super::{Replay, Slice};
use crate::assemble;
use crate::compare::{Allowed, Rows, Tally};
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, unfit};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use crate::kernels::round::Precision;
use crate::kernels::{policy, reference, span_of};

/// Bytes of one f64 buffer over a span of tokens.
const SPAN_BYTES: usize = 32 << 20;

/// Given the tokens of a span, its captured values, and what they were stored in.
pub(super) type TakeSpan<'a> =
    dyn FnMut(Range<usize>, Matrix<'_>, Option<Precision>) -> Result<(), StepError> + 'a;

/// Reference values of a span, `[tokens, V]` each.
struct Plane {
    logits: Vec<f64>,
    logits_var: Vec<f64>,
    dlogits: Vec<f64>,
    dlogits_var: Vec<f64>,
}

/// A span of tokens with what its stages start from.
struct Span<'a> {
    head: HeadInputs<'a>,
    tokens: Range<usize>,
    lse: &'a [f64],
    cotangents: Cotangents<'a, f64>,
    /// How far a token's logits lie apart, as far as its softmax sees them.
    spread: &'a [f64],
    /// Share of the roundings of a token's entries that are one, 0 to 1, and the variance
    /// of its logits where they are nearly equal.
    alike: &'a [(f64, f64)],
    microbatch: Option<Microbatch>,
}

impl Span<'_> {
    /// Share of the roundings of a token's entries to a format that are one.
    fn alike(&self, row: usize, to: Precision) -> f64 {
        let (alike, variance) = self.alike[row];
        alike.max(few(variance.sqrt() / (2.0 * to.unit_roundoff())))
    }
}

impl Replay<'_> {
    /// Judges what was captured of the plane.
    pub(super) fn plane(
        &self,
        slice: &Slice,
        state: &ForwardState,
        upstream: &Upstream,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &slice.inputs;
        let Some(head) = inputs.head(self.step) else { return Ok(()) };
        let all: Vec<usize> = (0..inputs.tokens()).collect();
        let (lse, g) = (&state.lse[..], &upstream.g[..]);
        let tokens = UnitTokens { inputs, rows: &all, lse, g, rank: None };
        let [g_lse, g_label, g_smooth] = self.token_cotangents(&tokens);
        for stage in [Stage::Logits, Stage::Logprobs, Stage::Dlogits] {
            let role = stage.role().expect("all three have one");
            let Some(key) = self.step.find(role, inputs.microbatch) else { continue };
            // Logits that are the input have nothing before them to be judged by.
            let is_input = stage == Stage::Logits && head.given.is_some();
            let elements: u64 = self.step.tensors[key].shape.iter().product();
            let one_a_token = stage == Stage::Logprobs && elements == inputs.tokens() as u64;
            if !self.wants(stage) || is_input || one_a_token {
                continue;
            }
            let bound = self.bound(inputs.tokens(), head.k.rows);
            let mut tally = Tally::default();
            let mut energies: Vec<MemberError> = Vec::new();
            let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &g_smooth };
            let of = |tokens: Range<usize>| self.plane_part((stage, key), inputs, state, tokens);
            let mut put = |(found, part): (Tally, Vec<f64>)| {
                tally.merge(found);
                self.add_energies(&mut energies, &part);
            };
            if let Some(on) = self.on {
                let spans = self.spans(key, head.k.rows)?.into_iter().map(of).collect();
                let upstream = (&state.lse[..], &cotangents);
                self.planes_on(on, slice, &head, upstream, spans)?.into_iter().for_each(put);
            } else {
                self.each_span(key, head.k.rows, &mut |tokens, captured, precision| {
                    let part = of(tokens.clone());
                    let lse = &state.lse[tokens.clone()];
                    let of_head = span_of(&head, tokens.clone());
                    let given = (&of_head, lse, cotangents.of(tokens));
                    put(self.judge_plane_part(stage, &part, given, (captured, precision))?);
                    Ok(())
                })?;
            }
            let found = Comparison::new(inputs.microbatch, None, key.to_string(), tally, &bound);
            outcome.add(stage, Comparison { members: energies, ..found });
        }
        Ok(())
    }

    /// What a span of a stage's plane is judged by.
    fn plane_part(
        &self,
        (stage, key): (Stage, &TensorKey),
        inputs: &MicrobatchInputs,
        state: &ForwardState,
        tokens: Range<usize>,
    ) -> PlanePart {
        let of = |values: &[f64]| values[tokens.clone()].to_vec();
        let pairs = tokens.clone().map(|t| (state.alike[t], state.logit_variance[t]));
        PlanePart {
            stage: stage as usize,
            microbatch: inputs.microbatch.map(|microbatch| microbatch.0),
            spread: of(&state.spread),
            alike: pairs.collect(),
            scale: of(&state.scale),
            key: super::tasks::name(key),
            tokens: tokens.clone(),
        }
    }

    /// Compares a span with the reference; beside it the errors' energies of the members.
    pub(super) fn judge_plane_part(
        &self,
        stage: Stage,
        part: &PlanePart,
        (head, lse, cotangents): (&HeadInputs<'_>, &[f64], Cotangents<'_, f64>),
        (captured, precision): (Matrix<'_>, Option<Precision>),
    ) -> Result<(Tally, Vec<f64>), StepError> {
        let span = Span {
            head: *head,
            tokens: part.tokens.clone(),
            lse,
            cotangents,
            spread: &part.spread,
            alike: &part.alike,
            microbatch: part.microbatch.map(Microbatch),
        };
        let mut plane = self.exact_plane(&span)?;
        let ties = self.suppose_plane(stage, &span, &mut plane);
        let scale = |t: usize| part.scale[t];
        let found = self.judge_span(stage, &span, (&plane, &ties), captured, precision, &scale);
        Ok((found, self.emulate_span(stage, &span, &plane, precision)?))
    }

    /// The members that round most differently.
    fn ends(&self) -> Vec<Member> {
        let all = members(&self.roundings);
        let last = all.len() - 1;
        let ends = all.into_iter().enumerate().filter(|(at, _)| *at == 0 || *at == last);
        ends.map(|(_, member)| member).collect()
    }

    fn add_energies(&self, energies: &mut Vec<MemberError>, part: &[f64]) {
        for (number, (member, &energy)) in self.ends().into_iter().zip(part).enumerate() {
            match energies.get_mut(number) {
                Some(total) => total.energy += energy,
                None => energies.push(MemberError { name: member.name, energy }),
            }
        }
    }

    /// The spans of tokens that a captured `[..., V]` tensor is read by.
    pub(super) fn spans(
        &self,
        key: &TensorKey,
        vocab: usize,
    ) -> Result<Vec<Range<usize>>, StepError> {
        let shape = &self.step.tensors[key].shape;
        let (first, inner) = match shape.split_last() {
            Some((&columns, leading)) if columns == vocab as u64 && !leading.is_empty() => {
                (leading[0], leading[1..].iter().product::<u64>())
            }
            _ => {
                let tensor = self.step.assemble(key)?;
                return Err(unfit(&tensor, &format!("floats of shape [..., {vocab}]")));
            }
        };
        let step = (SPAN_BYTES / (inner as usize * vocab * 8).max(1)).max(1) as u64;
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
        let shape = &self.step.tensors[key].shape;
        for tokens in self.spans(key, vocab)? {
            let inner = shape[1..shape.len() - 1].iter().product::<u64>().max(1);
            let mut place = IndexBox::whole(shape);
            place.0[0] = (tokens.start as u64 / inner, tokens.end as u64 / inner);
            let tensor = assemble::assemble_box(self.step.dump, key, &place)
                .map_err(|source| StepError::Assemble { key: key.clone(), source })?;
            let values = matrix(&tensor).ok_or_else(|| unfit(&tensor, "floats"))?;
            take(tokens, values, precision_of(tensor.dtype))?;
        }
        Ok(())
    }

    fn exact_plane(&self, span: &Span<'_>) -> Result<Plane, StepError> {
        let (rows, vocab) = (span.tokens.len(), span.head.k.rows);
        let zeros = || vec![0.0; rows * vocab];
        let mut plane =
            Plane { logits: zeros(), logits_var: zeros(), dlogits: zeros(), dlogits_var: zeros() };
        let noise = self.term_noise(span.head.q.cols);
        let upstream = reference::Upstream::new(&span.head, span.lse, span.cotangents, &noise);
        self.reference_plane(&span.head, upstream, &mut |tile| {
            for (to, from) in [
                (&mut plane.logits, tile.logits),
                (&mut plane.logits_var, tile.logits_var),
                (&mut plane.dlogits, tile.dlogits),
                (&mut plane.dlogits_var, tile.dlogits_var),
            ] {
                place(to, vocab, &tile.tokens, &tile.cols, from);
            }
        })?;
        Ok(plane)
    }

    /// dlogits as the world's policy has them, in place of the reference; how far those
    /// near ties may be off, empty for not at all.
    fn suppose_plane(&self, stage: Stage, span: &Span<'_>, plane: &mut Plane) -> Vec<f64> {
        let Some((of, tiles)) = self.world.policy(&self.roundings) else { return Vec::new() };
        if stage != Stage::Dlogits {
            return Vec::new();
        }
        let vocab = span.head.k.rows;
        let emulated = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
            let mut found = vec![0.0; plane.dlogits.len()];
            let progress = self.progress;
            policy::plane(&of, head, lse, cotangents, tiles, progress, &mut |tile| {
                place(&mut found, vocab, &tile.tokens, &tile.cols, tile.dlogits);
            });
            found
        };
        let middle = emulated(&span.head, span.lse, &span.cotangents);
        if !self.world.at_ties() {
            plane.dlogits = middle;
            return Vec::new();
        }
        let ends = near_ties(self.roundings.compute(), &span.head, span.lse);
        let [a, b] = ends.map(|end| {
            let [lse, label, smooth] = &end.cotangents(&span.cotangents);
            emulated(&end.head, &end.lse, &Cotangents { lse, label, smooth })
        });
        let ties = distance(&a, &b);
        plane.dlogits = middle;
        ties
    }

    fn judge_span(
        &self,
        stage: Stage,
        span: &Span<'_>,
        (plane, ties): (&Plane, &[f64]),
        captured: Matrix<'_>,
        precision: Option<Precision>,
        scale: &dyn Fn(usize) -> f64,
    ) -> Tally {
        let vocab = span.head.k.rows;
        // What a job writes into masked logits is its own business; their gradient is not.
        let columns = if stage == Stage::Dlogits { vocab } else { span.head.valid_vocab };
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
        let scales: Vec<f64> = (0..span.tokens.len()).map(scale).collect();
        let compute = self.roundings.compute();
        let filter = self.step.options.declared.gradient_filter.unwrap_or(0.0);
        let shared = self.shared_scale(if stage == Stage::Dlogits { 1.0 } else { 0.0 });
        let transformed = self.transform_scale();
        let factor = self.step.options.transform.scale.abs();
        let allowed = |row: usize, column: usize, supposed: f64| {
            let own = variance[row * columns + column];
            let x = if world == 0.0 { 0.0 } else { supposed / world };
            let inner = match stage {
                Stage::Dlogits => {
                    let (a, b) = (span.cotangents.lse[row], span.cotangents.label[row]);
                    let is_label = span.head.labels[row] as usize == column;
                    let dense = x.abs() + if is_label { (factor * b).abs() } else { 0.0 };
                    let rounding = rounding_of_entry(self, x);
                    let dropped = filter > 0.0 && x.abs() < filter * (a * factor).abs();
                    let dropped = if dropped { x.abs() } else { 0.0 };
                    let tie = ties.get(row * vocab + column).copied().unwrap_or(0.0);
                    Allowed {
                        own: own + rounding,
                        row: scales[row] * dense * dense,
                        // A scale of the logits moves p by (z - E z) of itself.
                        shared: (shared + transformed * (1.0 + span.spread[row].powi(2))) * x * x,
                        certain: dropped + tie,
                        ..Allowed::default()
                    }
                }
                Stage::Logprobs => {
                    let lse = span.lse[row];
                    let own = own + relative(2.0 * compute, lse.abs() + x.abs());
                    // A softmax of its own: its lse errs as scale says, absolutely.
                    let shared = transformed * (lse.abs() + x.abs()).powi(2);
                    Allowed { own, row: scales[row], shared, ..Allowed::default() }
                }
                _ => Allowed { own, shared: transformed * x * x, ..Allowed::default() },
            }
            .times(world);
            let storage = stored(precision, supposed);
            // Entries that are alike are rounded alike as they are stored.
            let to = precision.filter(|_| stage == Stage::Dlogits);
            let alike = to.map_or(0.0, |to| span.alike(row, to) * storage);
            let inner = inner.stored(storage, super::dk::rounds(world));
            Allowed { shared: inner.shared + alike, ..inner }
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
        Tally::of(&rows, allowed, &bound)
    }

    /// Error of the members that round most differently, beside the captured one.
    fn emulate_span(
        &self,
        stage: Stage,
        span: &Span<'_>,
        exact: &Plane,
        precision: Option<Precision>,
    ) -> Result<Vec<f64>, StepError> {
        if stage == Stage::Logprobs || self.trial {
            return Ok(Vec::new()); // the floor is propagated
        }
        let vocab = span.head.k.rows;
        let energy = |member: Member| {
            let mut energy = 0.0;
            self.policy_plane(
                &member.policy,
                &span.head,
                (span.lse, &span.cotangents),
                &mut |tile| {
                    let values = if stage == Stage::Logits { tile.logits } else { tile.dlogits };
                    let exact = if stage == Stage::Logits { &exact.logits } else { &exact.dlogits };
                    let width = tile.cols.len().max(1);
                    for (row, values) in tile.tokens.clone().zip(values.chunks(width)) {
                        for (column, &x) in tile.cols.clone().zip(values) {
                            if stage == Stage::Dlogits || column < span.head.valid_vocab {
                                let x = precision.map_or(x, |p| p.round64(x));
                                energy += (x - exact[row * vocab + column]).powi(2);
                            }
                        }
                    }
                },
            )?;
            Ok(energy)
        };
        self.ends().into_iter().map(energy).collect()
    }
}

/// Rounding of one entry of dlogits as the job may hold it, label and smoothing added.
fn rounding_of_entry(replay: &Replay<'_>, x: f64) -> f64 {
    super::allowed::rounded(replay.roundings.widest.dlogits, x)
}

/// How far two emulations lie apart, element by element.
pub(super) fn distance(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(a, b)| (a - b).abs()).collect()
}

fn place(to: &mut [f64], width: usize, rows: &Range<usize>, cols: &Range<usize>, from: &[f64]) {
    for (row, values) in rows.clone().zip(from.chunks(cols.len().max(1))) {
        to[row * width + cols.start..row * width + cols.end].copy_from_slice(values);
    }
}

fn cut_columns(values: &[f64], width: usize, columns: usize) -> Vec<f64> {
    values.chunks(width.max(1)).flat_map(|row| &row[..columns]).copied().collect()
}
