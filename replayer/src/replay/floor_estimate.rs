//! Draws the rows in which policies are emulated, and ends with the errors of all rows.

use super::captured_gradients::{Captured, error_energy};
use super::class_subset::OfClasses;
use super::context::Replay;
use super::dq_state::member_values;
use super::elementwise::sum;
use super::findings::Findings;
use super::forward::ForwardState;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::plausible_policies::Member;
use super::problem::Problem;
use super::sampled_floors::{DrawnRows, Floors};
use super::stage_values::{ValuesByStage, put_block};
use super::stratified_sample::{by_hits, by_size};
use crate::head::step::StepError;
use crate::head::{Stage, Unit};
use crate::kernels::matrix::{HeadInputs, IGNORED};
use crate::kernels::reference::Backward;

/// Elements of dq that are drawn at least, and tokens.
const OF_DQ: (usize, usize) = (1 << 17, 128);
/// Elements of dk that are drawn of the classes that are labels about equally often, and classes.
const OF_DK: (usize, usize) = (1 << 15, 32);
/// Most of the work over all rows that a sample may take: else all rows are taken.
const WORTH_IT: f64 = 0.5;
/// What is drawn from: the same rows every time.
const SEED: u64 = 0;

impl Replay<'_> {
    /// Share of all rows' work that emulating the policies takes.
    pub(super) fn share_emulated(&self, head: &HeadInputs<'_>) -> f64 {
        let share = share((rows(OF_DQ, head), of_classes(head).rows.len()), head);
        if self.executor.emulates_samples() && share <= WORTH_IT { share } else { 1.0 }
    }

    /// Draws the rows of a large problem, and emulates those of dk; `None`: all rows are taken.
    pub(super) fn floors(
        &self,
        problem: &Problem<'_>,
        unit: &Unit,
        state: &ForwardState,
        members: &[Member],
    ) -> Result<Option<Floors>, StepError> {
        let head = &problem.head;
        if !self.executor.emulates_samples() || problem.any_uncertain() || head.q.rows == 0 {
            return Ok(None);
        }
        let sizes = sizes(problem, &state.confidence(unit));
        let (drawn, weights) = by_size(&sizes, rows(OF_DQ, head), SEED);
        let tokens = DrawnRows { rows: drawn, weights };
        let classes = of_classes(head);
        if !(share((tokens.rows.len(), classes.rows.len()), head) <= WORTH_IT) {
            return Ok(None);
        }
        let of_classes = OfClasses::new(head, &classes.rows);
        let over = of_classes.head(head);
        let upstream = (&problem.lse[..], &problem.cotangents());
        let mut emulated = Vec::new();
        for member in members {
            let mut lists = ValuesByStage::new();
            let take = &mut |block: crate::kernels::policy::DkParts<'_>| {
                put_block(&mut lists, &block);
            };
            self.executor.policy_backward(&member.policy, &over, upstream, take)?;
            emulated.push(lists);
        }
        let depth = head.q.cols;
        Ok(Some(Floors { tokens, classes, depth, emulated, sums: Vec::new() }))
    }

    /// Emulates the drawn tokens' rows of dq, and ends with the errors of all rows.
    pub(super) fn finish_floors(
        &self,
        (microbatch, unit): (&HeadMicrobatch, &Unit),
        before: (&ForwardState, &Upstream),
        members: &[Member],
        (exact, captured): (&Backward, &Captured),
        findings: &mut Findings,
    ) -> Result<(), StepError> {
        let Some(mut floors) = findings.floors.take() else { return Ok(()) };
        let forced = captured.parts(&Stage::OF_Q, 0..0).is_some();
        let rows = floors.tokens.rows.iter().map(|&row| unit.rows[row]).collect();
        let drawn = Unit { ranks: unit.ranks.clone(), rows };
        let depth = floors.depth;
        let judged = |stage: &Stage| *stage != Stage::Dq || !forced;
        self.try_problem(microbatch, &drawn, before, &mut |problem| {
            for (number, member) in members.iter().enumerate() {
                let upstream = (&problem.lse[..], &problem.cotangents());
                let gradients = self.executor.policy_backward(
                    &member.policy,
                    &problem.head,
                    upstream,
                    &mut |_| {},
                )?;
                for gradient in captured.of(&Stage::OF_Q).filter(|gradient| judged(&gradient.stage))
                {
                    let values = member_values(&gradients, gradient.stage);
                    let mut energy = 0.0;
                    for (row, (&sampled_row, weight)) in values
                        .chunks(depth)
                        .zip(floors.tokens.rows.iter().zip(&floors.tokens.weights))
                    {
                        let span = sampled_row * depth..(sampled_row + 1) * depth;
                        let reference = match gradient.stage {
                            Stage::DqLse => exact.dq_lse[span].to_vec(),
                            Stage::DqLabel => exact.dq_label[span].to_vec(),
                            _ => sum(&exact.dq_lse[span.clone()], &exact.dq_label[span]),
                        };
                        energy += weight * error_energy(row, &reference, gradient.stored);
                    }
                    // A plain policy never tells the parts apart.
                    if !values.is_empty() {
                        floors.add(gradient.stage, number, energy);
                    }
                }
            }
            Ok(())
        })?;
        for (stage, energies) in floors.estimates() {
            findings.energies.push((stage, energies));
            findings.sampled.push(stage);
        }
        Ok(())
    }
}

/// What a token's rounded entries of dlogits come to, about: the square of the label's entry, and
/// that of all others as if one class had all that the label leaves. Tokens' weights may differ by
/// thousands, and then few tokens hold nearly all of dq's error.
fn sizes(problem: &Problem<'_>, confidence: &[f64]) -> Vec<f64> {
    let cotangents = problem.cotangents();
    let size_of_token = |(token, &p): (usize, &f64)| {
        let cotangent = cotangents.of_token(token);
        cotangent.entry(p, true).powi(2) + cotangent.dense(1.0 - p).powi(2)
    };
    confidence.iter().enumerate().map(size_of_token).collect()
}

/// The classes that stand for all, by how often they are labels.
fn of_classes(head: &HeadInputs<'_>) -> DrawnRows {
    let mut hits = vec![0; head.valid_vocab];
    for &label in head.labels.iter().filter(|&&label| label != IGNORED) {
        hits.get_mut(label as usize).into_iter().for_each(|hits| *hits += 1);
    }
    let (rows, weights) = by_hits(&hits, rows(OF_DK, head), SEED);
    DrawnRows { rows, weights }
}

/// Rows that hold so many elements, and so many rows, at least.
pub(super) fn rows((elements, least): (usize, usize), head: &HeadInputs<'_>) -> usize {
    (elements / head.q.cols.max(1)).max(least)
}

/// Share of the work over all rows that so many tokens and classes take.
fn share((tokens, classes): (usize, usize), head: &HeadInputs<'_>) -> f64 {
    let share_of = |part: usize, all: usize| part.min(all) as f64 / all.max(1) as f64;
    share_of(tokens, head.q.rows) + share_of(classes, head.k.rows)
}
