//! Stages of the token x vocabulary plane: logits, log-probabilities of every class,
//! dlogits. They are read and judged a span of tokens at a time.

use std::ops::Range;

use backtape::identity::Microbatch;
use backtape::index_box::IndexBox;
use backtape::shard::TensorKey;

use super::devised::failed;
use super::forward::{ForwardState, few};
use super::loss::Upstream;
use super::members::{Member, members};
use super::outcome::{Comparison, MemberError, Outcome};
use super::tasks::PlanePart;
use super::ties::near_ties;
use super::world::{At, UnitTokens};
use super::{Replay, Slice};
use crate::assemble;
use crate::compare::Tally;
use crate::head::roundings::precision_of;
use crate::head::step::{StepError, matrix, unfit};
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{Cotangents, HeadInputs, Matrix};
use crate::kernels::policy::{self, Policy};
use crate::kernels::round::Precision;
use crate::kernels::{reference, span_of};

/// Bytes of one f64 buffer over a span of tokens.
const SPAN_BYTES: usize = 32 << 20;

/// Given the tokens of a span, its captured values, and what they were stored in.
pub(super) type TakeSpan<'a> =
    dyn FnMut(Range<usize>, Matrix<'_>, Option<Precision>) -> Result<(), StepError> + 'a;

/// Reference values of a span, `[tokens, V]` each.
pub(super) struct Plane {
    pub(super) logits: Vec<f64>,
    pub(super) logits_var: Vec<f64>,
    pub(super) dlogits: Vec<f64>,
    pub(super) dlogits_var: Vec<f64>,
}

/// A span of tokens with what its stages start from.
pub(super) struct Span<'a> {
    pub(super) head: HeadInputs<'a>,
    pub(super) tokens: Range<usize>,
    pub(super) lse: &'a [f64],
    pub(super) cotangents: Cotangents<'a, f64>,
    /// How far a token's logits lie apart, as far as its softmax sees them.
    pub(super) spread: &'a [f64],
    /// Share of the roundings of a token's entries that are one, 0 to 1, and the variance
    /// of its logits where they are nearly equal.
    pub(super) alike: &'a [(f64, f64)],
    /// Variance that a token's row shares.
    pub(super) scale: &'a [f64],
    /// Rows that are judged.
    pub(super) sure: &'a [usize],
    pub(super) microbatch: Option<Microbatch>,
}

impl Span<'_> {
    /// Share of the roundings of a token's entries to a format that are one.
    pub(super) fn alike(&self, row: usize, to: Precision) -> f64 {
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
            if self.step.judged(inputs).is_some() {
                let why = "ranks hold several versions of what it is computed from, and it is judged over all tokens at once";
                outcome.leave(stage, inputs.microbatch, why);
                continue;
            }
            let before = (state, upstream);
            let found = self.judge_plane((stage, key), (slice, &head), before, outcome);
            outcome.spared(found, (&[stage], inputs.microbatch))?;
        }
        Ok(())
    }

    fn judge_plane(
        &self,
        (stage, key): (Stage, &TensorKey),
        (slice, head): (&Slice, &HeadInputs<'_>),
        (state, upstream): (&ForwardState, &Upstream),
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &slice.inputs;
        let all: Vec<usize> = (0..inputs.tokens()).collect();
        let (lse, g) = (&state.lse[..], &upstream.g[..]);
        let tokens = UnitTokens { inputs, rows: &all, lse, g, rank: None };
        let [g_lse, g_label, g_smooth] = self.token_cotangents(&tokens);
        let bound = self.bound(inputs.tokens(), head.k.rows);
        let mut tally = Tally::default();
        let mut energies: Vec<MemberError> = Vec::new();
        let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &g_smooth };
        let before = (state, upstream);
        let of = |tokens: Range<usize>| self.plane_part((stage, key), inputs, before, tokens);
        let mut put = |(found, part): (Tally, Vec<f64>)| {
            tally.merge(found);
            self.add_energies(&mut energies, &part);
        };
        if let Some(on) = self.on {
            let spans = self.spans(key, head.k.rows)?.into_iter().map(of).collect();
            let upstream = (&state.lse[..], &cotangents);
            self.planes_on(on, slice, head, upstream, spans)?.into_iter().for_each(put);
        } else {
            self.each_span(key, head.k.rows, &mut |tokens, captured, precision| {
                let part = of(tokens.clone());
                let lse = &state.lse[tokens.clone()];
                let of_head = span_of(head, tokens.clone());
                let given = (&of_head, lse, cotangents.of(tokens));
                put(self.judge_plane_part(stage, &part, given, (captured, precision))?);
                Ok(())
            })?;
        }
        if stage == Stage::Dlogits && self.note_open_rows(slice, upstream, outcome) {
            return Ok(());
        }
        let found = Comparison::new(inputs.microbatch, None, key.to_string(), tally, &bound);
        outcome.add(stage, Comparison { members: energies, ..found });
        Ok(())
    }

    /// What a span of a stage's plane is judged by.
    fn plane_part(
        &self,
        (stage, key): (Stage, &TensorKey),
        inputs: &MicrobatchInputs,
        (state, upstream): (&ForwardState, &Upstream),
        tokens: Range<usize>,
    ) -> PlanePart {
        let of = |values: &[f64]| values[tokens.clone()].to_vec();
        let mut scale = of(&state.scale);
        if stage == Stage::Dlogits {
            let g = &upstream.variance[tokens.clone()];
            scale.iter_mut().zip(g).for_each(|(scale, g)| *scale += g);
        }
        let pairs = tokens.clone().map(|t| (state.alike[t], state.logit_variance[t]));
        let open = |t: usize| stage == Stage::Dlogits && upstream.is_open(t);
        let sure = tokens.clone().filter(|&t| !open(t)).map(|t| t - tokens.start);
        PlanePart {
            stage: stage as usize,
            microbatch: inputs.microbatch.map(|microbatch| microbatch.0),
            spread: of(&state.spread),
            alike: pairs.collect(),
            scale,
            sure: sure.collect(),
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
            scale: &part.scale,
            sure: &part.sure,
            microbatch: part.microbatch.map(Microbatch),
        };
        let given = (captured, precision);
        if let Some(device) = self.device {
            return self.judge_span_there(device, stage, &span, given);
        }
        let mut plane = self.exact_plane(&span);
        let ties = self.suppose_plane(stage, &span, &mut plane);
        let found = self.judge_span(stage, &span, (&plane, &ties), given);
        let exact = if stage == Stage::Dlogits { &plane.dlogits } else { &plane.logits };
        let energies = self.emulate_span(stage, &mut |policy| {
            self.energy_of(policy, (stage, &span), (exact, precision))
        })?;
        Ok((found, energies))
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
        let bytes = match self.device {
            Some(device) => device.plane_bytes().map_err(failed)?,
            None => SPAN_BYTES,
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

    fn exact_plane(&self, span: &Span<'_>) -> Plane {
        let (rows, vocab) = (span.tokens.len(), span.head.k.rows);
        let zeros = || vec![0.0; rows * vocab];
        let mut plane =
            Plane { logits: zeros(), logits_var: zeros(), dlogits: zeros(), dlogits_var: zeros() };
        let (noise, cotangents) = (self.term_noise(span.head.q.cols), &span.cotangents);
        let on_tile = &mut |tile: reference::PlaneTile<'_>| {
            for (to, from) in [
                (&mut plane.logits, tile.logits),
                (&mut plane.logits_var, tile.logits_var),
                (&mut plane.dlogits, tile.dlogits),
                (&mut plane.dlogits_var, tile.dlogits_var),
            ] {
                place(to, vocab, &tile.tokens, &tile.cols, from);
            }
        };
        let progress = self.progress;
        let (tiles, lse) = (self.tiles, span.lse);
        reference::plane(&span.head, lse, cotangents, &noise, tiles, progress, on_tile);
        plane
    }

    /// dlogits as the world's policy has them, in place of the reference; how far those
    /// near ties may be off, empty for not at all.
    fn suppose_plane(&self, stage: Stage, span: &Span<'_>, plane: &mut Plane) -> Vec<f64> {
        let unit = (span.microbatch, None);
        let Some((of, tiles)) = self.world.policy_of(&self.roundings, unit) else {
            return Vec::new();
        };
        if stage != Stage::Dlogits {
            return Vec::new();
        }
        let vocab = span.head.k.rows;
        let elements = plane.dlogits.len();
        let emulated = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
            let mut found = vec![0.0; elements];
            let progress = self.progress;
            policy::plane(&of, head, lse, cotangents, tiles, progress, &mut |tile| {
                place(&mut found, vocab, &tile.tokens, &tile.cols, tile.dlogits);
            });
            found
        };
        let middle = emulated(&span.head, span.lse, &span.cotangents);
        let at = At { stage, microbatch: span.microbatch, rank: None };
        let rows: Vec<usize> = span.tokens.clone().collect();
        self.put_emulated((at, &rows), &middle, &mut plane.dlogits);
        if !self.world.at_ties() {
            return Vec::new();
        }
        let ends = near_ties(self.roundings.compute(), &span.head, span.lse);
        let [a, b] = ends.map(|end| {
            let [lse, label, smooth] = &end.cotangents(&span.cotangents);
            emulated(&end.head, &end.lse, &Cotangents { lse, label, smooth })
        });
        distance(&a, &b)
    }

    /// Error of the members that round most differently, beside the captured one.
    pub(super) fn emulate_span(
        &self,
        stage: Stage,
        energy: &mut dyn FnMut(&Policy) -> Result<f64, StepError>,
    ) -> Result<Vec<f64>, StepError> {
        if stage == Stage::Logprobs || self.trial {
            return Ok(Vec::new()); // the floor is propagated
        }
        self.ends().iter().map(|member| energy(&member.policy)).collect()
    }

    /// Squared errors of a policy's entries, stored in this precision.
    pub(super) fn energy_of(
        &self,
        policy: &Policy,
        (stage, span): (Stage, &Span<'_>),
        (exact, precision): (&[f64], Option<Precision>),
    ) -> Result<f64, StepError> {
        let vocab = span.head.k.rows;
        let mut energy = 0.0;
        let upstream = (span.lse, &span.cotangents);
        self.policy_plane(policy, &span.head, upstream, &mut |tile| {
            let values = if stage == Stage::Logits { tile.logits } else { tile.dlogits };
            let width = tile.cols.len().max(1);
            for (row, values) in tile.tokens.clone().zip(values.chunks(width)) {
                for (column, &x) in tile.cols.clone().zip(values) {
                    if stage == Stage::Dlogits || column < span.head.valid_vocab {
                        let x = precision.map_or(x, |p| p.round64(x));
                        energy += (x - exact[row * vocab + column]).powi(2);
                    }
                }
            }
        })?;
        Ok(energy)
    }
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
