//! Stages of the token x vocabulary plane: logits, log-probabilities of every class,
//! dlogits. They are read and judged a span of tokens at a time.

use std::ops::Range;

use backtape::identity::Microbatch;
use backtape::shard::TensorKey;

use super::comparison::{Comparison, MemberError};
use super::context::Replay;
use super::elementwise::distance;
use super::executor::plane::{CapturedPlane, JudgedSpan, Plane, SpanUpstream, Stored, place_tile};
use super::forward::ForwardState;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::plan::Plan;
use super::plane_span::Span;
use super::plausible_policies::{Member, members};
use super::rounding_ties::near_ties;
use super::tasks::task::PlanePart;
use super::world::{StagePlace, UnitTokens};
use crate::compare::{RowTally, Tally};
use crate::device::PlaneComparison;
use crate::head::step::StepError;
use crate::head::{MicrobatchInputs, Stage};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::policy;

impl Replay<'_> {
    /// Judges what was captured of the plane.
    pub(super) fn plane(
        &self,
        microbatch: &HeadMicrobatch,
        state: &ForwardState,
        upstream: &Upstream,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &microbatch.inputs;
        let Some(head) = inputs.head(self.plan.step) else { return Ok(()) };
        for stage in [Stage::Logits, Stage::Logprobs, Stage::Dlogits] {
            let role = stage.role().expect("all three have one");
            let Some(key) = self.plan.step.find(role, inputs.microbatch) else { continue };
            // Logits that are the input have nothing before them to be judged by.
            let is_input = stage == Stage::Logits && head.given.is_some();
            let elements: u64 = self.plan.step.tensors[key].shape.iter().product();
            let one_a_token = stage == Stage::Logprobs && elements == inputs.tokens() as u64;
            if !self.plan.wants(stage) || is_input || one_a_token {
                continue;
            }
            if self.plan.step.judged(inputs).is_some() {
                let why = "ranks hold several versions of what it is computed from, and it is judged over all tokens at once";
                outcome.leave(stage, inputs.microbatch, why);
                continue;
            }
            let before = (state, upstream);
            let result = self.judge_plane((stage, key), (microbatch, &head), before, outcome);
            outcome.spared(result, (&[stage], inputs.microbatch))?;
        }
        Ok(())
    }

    fn judge_plane(
        &self,
        (stage, key): (Stage, &TensorKey),
        (microbatch, head): (&HeadMicrobatch, &HeadInputs<'_>),
        (state, upstream): (&ForwardState, &Upstream),
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let inputs = &microbatch.inputs;
        let all: Vec<usize> = (0..inputs.tokens()).collect();
        let (lse, g) = (&state.lse[..], &upstream.g[..]);
        let tokens = UnitTokens { inputs, rows: &all, lse, g, rank: None };
        let [g_lse, g_label, g_smooth] = self.judge.token_cotangents(&tokens);
        let bound = self.judge.bound(inputs.tokens(), head.k.rows);
        let mut tally = Tally::default();
        let mut energies: Vec<MemberError> = Vec::new();
        let cotangents = Cotangents { lse: &g_lse, label: &g_label, smooth: &g_smooth };
        let before = (state, upstream);
        let part_of =
            |tokens: Range<usize>| self.plan.plane_part((stage, key), inputs, before, tokens);
        let mut put = |(judged, part): JudgedSpan| {
            tally.merge(judged);
            self.plan.add_energies(&mut energies, &part);
        };
        let upstream_of_all = SpanUpstream { head: *head, lse, cotangents };
        let plane = CapturedPlane { key, microbatch, upstream: upstream_of_all };
        let mut judge = |part: &PlanePart, upstream: SpanUpstream<'_>, captured: Stored<'_>| {
            self.judge_plane_part(stage, part, upstream, captured)
        };
        self.executor.planes(&plane, &part_of, &mut judge, &mut put)?;
        if stage == Stage::Dlogits && self.plan.note_uncertain_rows(microbatch, upstream, outcome) {
            return Ok(());
        }
        let comparison = Comparison::new(inputs.microbatch, None, key.to_string(), tally, &bound);
        outcome.add(stage, Comparison { members: energies, ..comparison });
        Ok(())
    }
}

impl Plan<'_> {
    /// What a span of a stage's plane is judged by.
    fn plane_part(
        &self,
        (stage, key): (Stage, &TensorKey),
        inputs: &MicrobatchInputs,
        (state, upstream): (&ForwardState, &Upstream),
        tokens: Range<usize>,
    ) -> PlanePart {
        let select = |values: &[f64]| values[tokens.clone()].to_vec();
        let mut scale = select(&state.scale);
        if stage == Stage::Dlogits {
            let g = &upstream.variance[tokens.clone()];
            scale.iter_mut().zip(g).for_each(|(scale, g)| *scale += g);
        }
        let pairs = tokens.clone().map(|t| (state.alike[t], state.logit_variance[t]));
        let open = |t: usize| stage == Stage::Dlogits && upstream.is_uncertain(t);
        let sure = tokens.clone().filter(|&t| !open(t)).map(|t| t - tokens.start);
        PlanePart {
            stage: stage as usize,
            microbatch: inputs.microbatch.map(|microbatch| microbatch.0),
            spread: select(&state.spread),
            alike: pairs.collect(),
            scale,
            sure: sure.collect(),
            key: super::tasks::drive::tensor_json(key),
            tokens: tokens.clone(),
        }
    }
}

impl Replay<'_> {
    /// Compares a span with the reference; beside it the errors' energies of the members.
    pub(super) fn judge_plane_part(
        &self,
        stage: Stage,
        part: &PlanePart,
        upstream: SpanUpstream<'_>,
        (captured, precision): Stored<'_>,
    ) -> Result<JudgedSpan, StepError> {
        let SpanUpstream { head, lse, cotangents } = upstream;
        let span = Span {
            head,
            tokens: part.tokens.clone(),
            lse,
            cotangents,
            spread: &part.spread,
            alike: &part.alike,
            scale: &part.scale,
            sure: &part.sure,
            microbatch: part.microbatch.map(Microbatch),
        };
        let bound = self.judge.bound(span.tokens.len(), span.head.k.rows);
        let (allowance, tokens) = self.judge.plane_allowances(stage, &span, precision);
        let columns = self.judge.compared_columns(stage, &span);
        let comparison = PlaneComparison {
            captured,
            columns,
            stage: &allowance,
            tokens: &tokens,
            bound: bound.element,
        };
        let noise = self.judge.term_noise(span.head.q.cols);
        let mut sums = self.executor.plane(stage, upstream, &noise)?;
        let looked = sums.looked(&comparison, &mut |plane| {
            let ties = self.suppose_plane(stage, &span, plane);
            self.judge.look_at_span(stage, &span, (plane, &ties), &comparison)
        })?;
        let index = |row: usize| (span.tokens.start + span.sure[row]) as u64;
        let repeats = |row: usize| span.head.copies.map_or(1.0, |copies| copies[span.sure[row]]);
        let looked: Vec<RowTally> = span.sure.iter().map(|&row| looked[row]).collect();
        let tally = Tally::of_looked((&looked, columns), &index, &repeats, &bound);
        // Of log-probabilities the floor is propagated.
        let emulated = stage != Stage::Logprobs && !self.plan.trial;
        let members = if emulated { self.plan.extreme_members() } else { Vec::new() };
        let energy = |member: &Member| sums.energy(&member.policy, precision);
        Ok((tally, members.iter().map(energy).collect::<Result<_, _>>()?))
    }
}

impl Plan<'_> {
    /// The members that round most differently.
    fn extreme_members(&self) -> Vec<Member> {
        let all = members(&self.roundings);
        let last = all.len() - 1;
        let ends = all.into_iter().enumerate().filter(|(at, _)| *at == 0 || *at == last);
        ends.map(|(_, member)| member).collect()
    }

    fn add_energies(&self, energies: &mut Vec<MemberError>, part: &[f64]) {
        for (number, (member, &energy)) in self.extreme_members().into_iter().zip(part).enumerate()
        {
            match energies.get_mut(number) {
                Some(total) => total.energy += energy,
                None => energies.push(MemberError { name: member.name, energy }),
            }
        }
    }
}

impl Replay<'_> {
    /// dlogits as the world's policy has them, in place of the reference; how far those
    /// near ties may be off, empty for not at all.
    fn suppose_plane(&self, stage: Stage, span: &Span<'_>, plane: &mut Plane) -> Vec<f64> {
        let unit = (span.microbatch, None);
        let Some((policy, tiles)) = self.judge.world.policy_of(&self.plan.roundings, unit) else {
            return Vec::new();
        };
        if stage != Stage::Dlogits {
            return Vec::new();
        }
        let vocab = span.head.k.rows;
        let elements = plane.dlogits.len();
        let emulated = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
            let mut dlogits = vec![0.0; elements];
            let progress = self.executor.progress();
            policy::plane(&policy, head, lse, cotangents, tiles, progress, &mut |tile| {
                place_tile(&mut dlogits, vocab, &tile.tokens, &tile.cols, tile.dlogits);
            });
            dlogits
        };
        let middle = emulated(&span.head, span.lse, &span.cotangents);
        let place = StagePlace { stage, microbatch: span.microbatch, rank: None };
        let rows: Vec<usize> = span.tokens.clone().collect();
        self.judge.put_emulated((place, &rows), &middle, &mut plane.dlogits);
        if !self.judge.world.at_ties() {
            return Vec::new();
        }
        let ends = near_ties(self.plan.roundings.compute(), &span.head, span.lse);
        let [a, b] = ends.map(|end| {
            let [lse, label, smooth] = &end.cotangents(&span.cotangents);
            emulated(&end.head, &end.lse, &Cotangents { lse, label, smooth })
        });
        distance(&a, &b)
    }
}
