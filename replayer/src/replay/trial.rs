//! A trial: the same judgement as a replay's, in the world of a hypothesis, without
//! floors and norms, and on a sample of rows where all would be too many.
//!
//! Rows of dq are judged for some tokens against the whole vocabulary, rows of dk for
//! some classes over all tokens: each sampled row is judged as it would be in full.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;

use backtape::identity::Microbatch;

use super::captured_gradients::Captured;
use super::class_subset::OfClasses;
use super::context::Replay;
use super::dq_state::DqState;
use super::elementwise::{distance, sum};
use super::executor::pass_cache::PassCache;
use super::findings::Findings;
use super::forward::ForwardState;
use super::judge::Judge;
use super::loss::Upstream;
use super::microbatch::HeadMicrobatch;
use super::outcome::Outcome;
use super::problem::Problem;
use super::rounding_ties::near_ties;
use super::slab::Slab;
use super::stage_values::{StageValues, ValuesByStage, put_block};
use super::world::{StagePlace, World};
use super::world_replay::counted_in_world;
use crate::head::step::{StepError, vocabulary_slab};
use crate::head::{HeadStep, Scores, Stage, Unit};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::policy::{self, DqParts};
use crate::kernels::reference::Keep;
use crate::kernels::{NoProgress, Progress};

/// Rows that a trial looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Tokens of each microbatch, ascending: rows of dq.
    pub tokens: BTreeMap<Option<Microbatch>, Vec<usize>>,
    /// Classes, ascending: rows of dk.
    pub classes: Vec<usize>,
}

/// Judges the stages in a world. `rows`: which rows of dq and dk, `None` for all.
pub fn trial(
    step: &HeadStep<'_>,
    compared: &BTreeSet<Stage>,
    world: &dyn World,
    (rows, cache): (Option<&Rows>, Option<&PassCache>),
) -> Result<Outcome, StepError> {
    counted_trial(step, compared, world, (rows, cache, &NoProgress))
}

/// The same, with the work of its products told.
pub fn counted_trial(
    step: &HeadStep<'_>,
    compared: &BTreeSet<Stage>,
    world: &dyn World,
    (rows, cache, progress): (Option<&Rows>, Option<&PassCache>, &dyn Progress),
) -> Result<Outcome, StepError> {
    let mut judged = None;
    counted_in_world(step, compared, (world, cache, progress), &mut |replay, microbatches| {
        let mut outcome = Outcome::new(&replay.plan.wanted, &replay.plan.step.lacking);
        for microbatch in microbatches {
            replay.microbatch(microbatch, &mut outcome, &mut |unit, before, outcome| {
                replay.try_unit(microbatch, unit, before, rows, outcome)
            })?;
        }
        replay.judge.step_loss(microbatches, &mut outcome)?;
        replay.sums(microbatches, &mut outcome)?;
        outcome.finish(replay.plan.step, &BTreeSet::new());
        judged = Some(outcome);
        Ok(())
    })?;
    Ok(judged.expect("set where no error was returned"))
}

impl Replay<'_> {
    fn try_unit(
        &self,
        microbatch: &HeadMicrobatch,
        unit: &Unit,
        (state, upstream): (&ForwardState, &Upstream),
        rows: Option<&Rows>,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let Scores::Product { k, .. } = &microbatch.inputs.scores else { return Ok(()) };
        let dlogits = self.judge.usable_dlogits(microbatch, unit)?;
        let classes = rows.map(|rows| &rows.classes[..]).filter(|_| dlogits.is_none());
        let in_unit = (microbatch, unit);
        let captured = self.captured_once(in_unit, classes, outcome)?;
        if captured.gradients.is_empty() && self.plan.sums_without_addends.is_none() {
            return Ok(());
        }
        let mut findings = Findings::default();
        let dk = captured.of(&Stage::OF_CLASSES).next().is_some();
        let dk = dk || self.plan.sums_without_addends.is_some();
        let dq = captured.of(&Stage::OF_Q).next().is_some();
        // Of all rows one pass that is held gives both gradients; of a sample, and of what has
        // several slabs, each has a pass of its own.
        let (width, classes_in_all) = (microbatch.inputs.width(), k.shape[0] as usize);
        let one_slab = self.plan.slab_rows(width, classes_in_all) >= classes_in_all;
        let both = rows.is_none() && dk && dq && one_slab;
        let only = |keep| if both { Keep::Both } else { keep };
        if dk {
            let sampled = (rows, classes.is_some(), only(Keep::Dk));
            self.with_problem(microbatch, unit, state, upstream, &mut |problem| {
                self.try_dk(problem, in_unit, &captured, sampled, (&mut findings, outcome));
            });
        }
        if dq {
            let tokens = rows.and_then(|rows| rows.tokens.get(&microbatch.inputs.microbatch));
            let mut kept = unit.rows.clone();
            kept.retain(|t| tokens.is_none_or(|tokens| tokens.binary_search(t).is_ok()));
            let some = Unit { ranks: unit.ranks.clone(), rows: kept };
            let from = self.judge.sources(microbatch, &some);
            self.with_problem(microbatch, &from, state, upstream, &mut |problem| {
                self.try_dq(problem, &captured, (&some, only(Keep::Dq)), &mut findings);
            });
        }
        let from_dlogits = dlogits.as_ref().map(|_| captured.without_parts()).unwrap_or_default();
        if let Some(dlogits) = &dlogits {
            let stages = from_dlogits.clone();
            findings.forget(&stages);
            let (of_q, of_k): (Vec<Stage>, Vec<Stage>) =
                stages.into_iter().partition(|&stage| stage == Stage::Dq);
            self.with_problem(microbatch, unit, state, upstream, &mut |problem| {
                let for_k = (dlogits, &of_k[..]);
                self.judge_from_dlogits(problem, for_k, &captured, unit, &mut findings);
            });
            let from = self.judge.sources(microbatch, unit);
            if let Some(dlogits) =
                self.judge.usable_dlogits(microbatch, &from)?.filter(|_| !of_q.is_empty())
            {
                self.with_problem(microbatch, &from, state, upstream, &mut |problem| {
                    let for_q = (&dlogits, &of_q[..]);
                    self.judge_from_dlogits(problem, for_q, &captured, unit, &mut findings);
                });
            }
        }
        let judged = captured.all_but(&from_dlogits);
        if upstream.any_uncertain(&unit.rows) {
            self.with_problem(microbatch, unit, state, upstream, &mut |problem| {
                let stages = (&*captured, &judged[..]);
                self.plan.note_uncertain_tokens(in_unit, problem, stages, &mut findings, outcome);
            });
        }
        self.plan.report(findings, &captured, &microbatch.inputs, unit, outcome);
        Ok(())
    }

    /// What the dump holds of a unit's gradients, those of k at some classes only: read once
    /// for all trials, as long as no world has its own.
    fn captured_once(
        &self,
        (microbatch, unit): (&HeadMicrobatch, &Unit),
        classes: Option<&[usize]>,
        outcome: &mut Outcome,
    ) -> Result<Arc<Captured>, StepError> {
        let mut read = || {
            let all = self.judge.captured(microbatch, unit, outcome)?;
            Ok(match classes {
                Some(classes) => all.with_classes(classes),
                None => all,
            })
        };
        let place_of = |stage| StagePlace {
            stage,
            microbatch: microbatch.inputs.microbatch,
            rank: unit.rank(),
        };
        let is_supplied = |&stage: &Stage| self.judge.world.captured(&place_of(stage)).is_some();
        // What is left out of a tied embedding is said in each outcome.
        let each = self.plan.step.options.declared.tied_embedding
            || self.plan.wanted.iter().any(is_supplied);
        let read_as = (self.plan.roundings.widest.output, self.plan.step.options.transposed());
        let read_for = (microbatch.inputs.microbatch, &unit.ranks, &self.plan.wanted);
        let which = (read_for, read_as, classes);
        let shared = (!each).then_some(&which as &dyn Debug);
        self.executor.captured(shared, &mut read)
    }
}

impl Judge<'_> {
    /// The tokens whose gradients the rows of dq hold in this world.
    fn sources(&self, microbatch: &HeadMicrobatch, unit: &Unit) -> Unit {
        let place = StagePlace {
            stage: Stage::Dq,
            microbatch: microbatch.inputs.microbatch,
            rank: unit.rank(),
        };
        let from = |&t: &usize| self.world.token(place, t).min(microbatch.inputs.tokens() - 1);
        Unit { ranks: unit.ranks.clone(), rows: unit.rows.iter().map(from).collect() }
    }
}

impl Replay<'_> {
    fn try_dk(
        &self,
        problem: &Problem<'_>,
        microbatch_unit: (&HeadMicrobatch, &Unit),
        captured: &Captured,
        (rows, picked, keep): (Option<&Rows>, bool, Keep),
        (findings, outcome): (&mut Findings, &mut Outcome),
    ) {
        let Some(classes) = rows.map(|rows| &rows.classes) else {
            let (d, v) = (problem.head.q.cols, problem.head.k.rows);
            let mut dq = DqState::zeros(problem);
            for range in self.plan.slabs(d, v) {
                let mut labels = Vec::new();
                let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
                let onto = (&mut dq.exact, keep);
                let mut slab = self.executor.reference_slab(problem, &head, range.clone(), onto);
                self.emulate_dk(problem, &head, &mut slab);
                self.plan.allow_uncertain_tokens(problem, (&head, range), &mut slab);
                self.judge.judge_dk(problem, &slab, (captured, &Stage::OF_K), findings);
                self.judge.judge_dbias(problem, &slab, captured, findings);
                self.judge.keep_sum_without_addends(problem, &slab, microbatch_unit, outcome);
            }
            return;
        };
        let of_classes = OfClasses::new(&problem.head, classes);
        let head = of_classes.head(&problem.head);
        let problem = problem.over(head);
        let pass = self.executor.reference_pass(&problem, &head, Keep::Dk);
        let mut slab = pass.slab.clone();
        slab.classes = Some(classes.clone());
        self.emulate_dk(&problem, &head, &mut slab);
        self.plan.allow_uncertain_tokens(&problem, (&head, 0..classes.len()), &mut slab);
        let chosen = (!picked).then(|| captured.of_classes(classes));
        let captured = chosen.as_ref().unwrap_or(captured);
        self.judge.judge_dk(&problem, &slab, (captured, &Stage::OF_K), findings);
        self.judge.judge_dbias(&problem, &slab, captured, findings);
        self.judge.keep_sum_without_addends(&problem, &slab, microbatch_unit, outcome);
    }

    /// dk as the world's policy has it, in place of the reference.
    fn emulate_dk(&self, problem: &Problem<'_>, head: &HeadInputs<'_>, slab: &mut Slab) {
        let Some((policy, tiles)) =
            self.judge.world.policy_of(&self.plan.roundings, problem.unit())
        else {
            return;
        };
        let run = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
            let mut values: ValuesByStage = Vec::new();
            let progress = self.executor.progress();
            let take = &mut |block: policy::DkParts<'_>| put_block(&mut values, &block);
            policy::backward(&policy, head, lse, cotangents, tiles, progress, take);
            values
        };
        slab.instead = run(head, &problem.lse, &problem.cotangents());
        if !self.judge.world.at_ties() {
            return;
        }
        let ends = near_ties(self.plan.roundings.compute(), head, &problem.lse);
        let flips = self.flips(&policy, tiles, &ends, &problem.cotangents());
        let flipped = flips.of_dk(head);
        let [low, high] = ends.map(|end| {
            let [lse, label, smooth] = &end.cotangents(&problem.cotangents());
            run(&end.head, &end.lse, &Cotangents { lse, label, smooth })
        });
        let lost = |((stage, a), (_, b)): (&StageValues, &StageValues)| {
            let apart = distance(a, b);
            (*stage, if *stage == Stage::DkLabel { apart } else { sum(&apart, &flipped) })
        };
        slab.lost = low.iter().zip(&high).map(lost).collect();
    }

    fn try_dq(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        (unit, keep): (&Unit, Keep),
        findings: &mut Findings,
    ) {
        let (d, v) = (problem.head.q.cols, problem.head.k.rows);
        let mut dq = DqState::zeros(problem);
        for range in self.plan.slabs(d, v) {
            let mut labels = Vec::new();
            let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
            match range.len() == v {
                true => dq.exact.clone_from(&self.executor.reference_pass(problem, &head, keep).dq),
                false => {
                    drop(self.executor.reference_slab(problem, &head, range, (&mut dq.exact, keep)))
                }
            }
        }
        dq.once_a_row(problem.head.copies);
        if let Some((policy, tiles)) =
            self.judge.world.policy_of(&self.plan.roundings, problem.unit())
        {
            let progress = self.executor.progress();
            let run = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
                policy::backward(&policy, head, lse, cotangents, tiles, progress, &mut |_| {})
            };
            dq.instead = Some(run(&problem.head, &problem.lse, &problem.cotangents()));
            if self.judge.world.at_ties() {
                let ends = near_ties(self.plan.roundings.compute(), &problem.head, &problem.lse);
                let flips = self.flips(&policy, tiles, &ends, &problem.cotangents());
                let flipped = flips.of_dq(&problem.head);
                let [a, b] = ends.map(|end| {
                    let [lse, label, smooth] = &end.cotangents(&problem.cotangents());
                    run(&end.head, &end.lse, &Cotangents { lse, label, smooth })
                });
                dq.ties = Some(DqParts {
                    dq_lse: sum(&distance(&a.dq_lse, &b.dq_lse), &flipped),
                    dq_label: distance(&a.dq_label, &b.dq_label),
                    dq: sum(&distance(&a.dq, &b.dq), &flipped),
                });
            }
        }
        self.judge.judge_dq(problem, &dq, (captured, &Stage::OF_Q), unit, findings);
    }
}
