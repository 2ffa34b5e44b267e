//! A trial: the same judgement as a replay's, in the world of a hypothesis, without
//! floors and norms, and on a sample of rows where all would be too many.
//!
//! Rows of dq are judged for some tokens against the whole vocabulary, rows of dk for
//! some classes over all tokens: each sampled row is judged as it would be in full.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backtape::identity::Microbatch;

use super::backward::{Problem, sum};
use super::dk::Slab;
use super::findings::{Captured, DK, DQ, Findings};
use super::forward::ForwardState;
use super::gather::Gathered;
use super::loss::Upstream;
use super::outcome::Outcome;
use super::pass_cache::PassCache;
use super::plane::distance;
use super::ties::near_ties;
use super::world::{At, World};
use super::{Effort, Replay, Slice};
use crate::head::step::{StepError, vocabulary_slab};
use crate::head::{HeadStep, Roundings, Scores, Stage, Unit};
use crate::kernels::matrix::{Cotangents, HeadInputs, IGNORED, Matrix, Reads, Values};
use crate::kernels::policy::{self, DqParts};
use crate::kernels::reference::Keep;
use crate::kernels::{NoProgress, Progress, Tiles};

/// Rows that a trial looks at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Tokens of each microbatch, ascending: rows of dq.
    pub tokens: BTreeMap<Option<Microbatch>, Vec<usize>>,
    /// Classes, ascending: rows of dk.
    pub classes: Vec<usize>,
}

/// Given a replay in a world, and the microbatches as the world has them.
pub(super) type Within<'a> = dyn FnMut(&Replay<'_>, &[Slice]) -> Result<(), StepError> + 'a;

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
    let mut found = None;
    counted_in_world(step, compared, (world, cache, progress), &mut |replay, slices| {
        let mut outcome = Outcome::new(&replay.wanted, &replay.step.lacking);
        for slice in slices {
            replay.microbatch(slice, &mut outcome, &mut |unit, before, outcome| {
                replay.try_unit(slice, unit, before, rows, outcome)
            })?;
        }
        replay.step_loss(slices, &mut outcome)?;
        replay.sums(slices, &mut outcome)?;
        outcome.finish(replay.step, &BTreeSet::new());
        found = Some(outcome);
        Ok(())
    })?;
    Ok(found.expect("set where no error was returned"))
}

/// Lends a replay in a world, and the microbatches as the world has them.
pub(super) fn in_world(
    step: &HeadStep<'_>,
    compared: &BTreeSet<Stage>,
    (world, cache): (&dyn World, Option<&PassCache>),
    then: &mut Within<'_>,
) -> Result<(), StepError> {
    counted_in_world(step, compared, (world, cache, &NoProgress), then)
}

fn counted_in_world(
    step: &HeadStep<'_>,
    compared: &BTreeSet<Stage>,
    (world, cache, progress): (&dyn World, Option<&PassCache>, &dyn Progress),
    then: &mut Within<'_>,
) -> Result<(), StepError> {
    let mut altered = step.clone();
    world.options(&mut altered.options);
    let slices = super::slices(&altered, world, HeadStep::inputs)?;
    let roundings = Roundings::plausible(&altered.options, slices[0].inputs.dtype(&altered))?;
    let units: usize = slices.iter().map(|slice| slice.units.len()).sum();
    let whole = super::allowed::whole(&altered, &roundings);
    let replay = Replay {
        step: &altered,
        whole,
        wanted: compared.clone(),
        roundings,
        tiles: Tiles::default(),
        comparisons: compared.len().max(1) * units.max(1),
        effort: Effort::All,
        world,
        cache,
        trial: true,
        progress,
        draw: None,
        on: None,
        device: None,
    };
    then(&replay, &slices)
}

impl Replay<'_> {
    fn try_unit(
        &self,
        slice: &Slice,
        unit: &Unit,
        (state, upstream): (&ForwardState, &Upstream),
        rows: Option<&Rows>,
        outcome: &mut Outcome,
    ) -> Result<(), StepError> {
        let Scores::Product { k, .. } = &slice.inputs.scores else { return Ok(()) };
        let dlogits = self.usable_dlogits(slice, unit)?;
        let classes = rows.map(|rows| &rows.classes[..]).filter(|_| dlogits.is_none());
        let captured = self.captured_once((slice, unit), classes, outcome)?;
        if captured.gradients.is_empty() {
            return Ok(());
        }
        let mut findings = Findings::default();
        let dk = captured.of(&[DK[0], DK[1], DK[2], Stage::Dbias]).next().is_some();
        let dq = captured.of(&DQ).next().is_some();
        // Of all rows one pass that is held gives both gradients; of a sample, and of what has
        // several slabs, each has a pass of its own.
        let (width, classes_in_all) = (slice.inputs.width(), k.shape[0] as usize);
        let one_slab = self.slab_rows(width, classes_in_all) >= classes_in_all;
        let both = rows.is_none() && dk && dq && one_slab;
        let only = |one| if both { Keep::Both } else { one };
        if dk {
            let of = (rows, classes.is_some(), only(Keep::Dk));
            self.with_problem(slice, unit, state, upstream, &mut |problem| {
                self.try_dk(problem, &captured, of, &mut findings);
            });
        }
        if dq {
            let tokens = rows.and_then(|rows| rows.tokens.get(&slice.inputs.microbatch));
            let mut kept = unit.rows.clone();
            kept.retain(|t| tokens.is_none_or(|tokens| tokens.binary_search(t).is_ok()));
            let some = Unit { ranks: unit.ranks.clone(), rows: kept };
            let from = self.sources(slice, &some);
            self.with_problem(slice, &from, state, upstream, &mut |problem| {
                self.try_dq(problem, &captured, (&some, only(Keep::Dq)), &mut findings);
            });
        }
        let from_dlogits = dlogits.as_ref().map(|_| captured.without_parts()).unwrap_or_default();
        if let Some(dlogits) = &dlogits {
            let stages = from_dlogits.clone();
            findings.forget(&stages);
            let (of_q, of_k): (Vec<Stage>, Vec<Stage>) =
                stages.into_iter().partition(|&stage| stage == Stage::Dq);
            self.with_problem(slice, unit, state, upstream, &mut |problem| {
                let of = (dlogits, &of_k[..]);
                self.judge_from_dlogits(problem, of, &captured, unit, &mut findings);
            });
            let from = self.sources(slice, unit);
            if let Some(dlogits) = self.usable_dlogits(slice, &from)?.filter(|_| !of_q.is_empty()) {
                self.with_problem(slice, &from, state, upstream, &mut |problem| {
                    let of = (&dlogits, &of_q[..]);
                    self.judge_from_dlogits(problem, of, &captured, unit, &mut findings);
                });
            }
        }
        let own = captured.all_but(&from_dlogits);
        if upstream.any_open(&unit.rows) {
            self.with_problem(slice, unit, state, upstream, &mut |problem| {
                let (of, stages) = ((slice, unit), (&*captured, &own[..]));
                self.note_open(of, problem, stages, &mut findings, outcome);
            });
        }
        self.report(findings, &captured, &slice.inputs, unit, outcome);
        Ok(())
    }

    /// What the dump holds of a unit's gradients, those of k at some classes only: read once
    /// for all trials, as long as no world has its own.
    fn captured_once(
        &self,
        (slice, unit): (&Slice, &Unit),
        classes: Option<&[usize]>,
        outcome: &mut Outcome,
    ) -> Result<Arc<Captured>, StepError> {
        let mut read = || {
            let all = self.captured(slice, unit, outcome)?;
            Ok(match classes {
                Some(classes) => all.with_classes(classes),
                None => all,
            })
        };
        let of = |stage| At { stage, microbatch: slice.inputs.microbatch, rank: unit.rank() };
        let own = |&stage: &Stage| self.world.captured(&of(stage)).is_some();
        // What is left out of a tied embedding is said in each outcome.
        let each = self.step.options.declared.tied_embedding || self.wanted.iter().any(own);
        match self.cache.filter(|_| !each) {
            None => read().map(Arc::new),
            Some(cache) => {
                let read_as = (self.roundings.widest.output, self.step.options.transposed());
                let of = (slice.inputs.microbatch, &unit.ranks, &self.wanted);
                cache.captured(&(of, read_as, classes), &mut read)
            }
        }
    }

    /// The tokens whose gradients the rows of dq hold in this world.
    fn sources(&self, slice: &Slice, unit: &Unit) -> Unit {
        let at = At { stage: Stage::Dq, microbatch: slice.inputs.microbatch, rank: unit.rank() };
        let from = |&t: &usize| self.world.token(at, t).min(slice.inputs.tokens() - 1);
        Unit { ranks: unit.ranks.clone(), rows: unit.rows.iter().map(from).collect() }
    }

    fn try_dk(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        (rows, picked, keep): (Option<&Rows>, bool, Keep),
        findings: &mut Findings,
    ) {
        let Some(classes) = rows.map(|rows| &rows.classes) else {
            let (d, v) = (problem.head.q.cols, problem.head.k.rows);
            let mut dq = self.dq_zeros(problem);
            for range in self.slabs(d, v) {
                let mut labels = Vec::new();
                let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
                let onto = (&mut dq.exact, keep);
                let mut slab = self.reference_slab(problem, &head, range.clone(), onto);
                self.emulate_dk(problem, &head, &mut slab);
                self.allow_open(problem, (&head, range), &mut slab);
                self.judge_dk(problem, &slab, (captured, &DK), findings);
                self.judge_dbias(problem, &slab, captured, findings);
            }
            return;
        };
        let k = Gathered::new(&problem.head.k, classes);
        let place = |label: &u32| match classes.binary_search(&(*label as usize)) {
            Ok(row) if *label != IGNORED => row as u32,
            _ => IGNORED,
        };
        let labels: Vec<u32> = problem.head.labels.iter().map(place).collect();
        let valid_vocab = classes.partition_point(|&v| v < problem.head.valid_vocab);
        let bias = problem.head.bias.map(|b| classes.iter().map(|&v| b[v]).collect::<Vec<_>>());
        let bias = bias.as_deref();
        let read = problem.head.reads.map(|reads| {
            let scores = reads.scores.map(|(of, _)| columns_of(&of, classes));
            (Gathered::new(&reads.k, classes), scores, reads)
        });
        let reads = read.as_ref().map(|(k, scores, reads)| {
            let values = scores.as_deref().map(Values::F64);
            let (rows, cols) = (problem.head.q.rows, classes.len());
            let scores = values.map(|values| (Matrix { rows, cols, values }, 0));
            Reads { k: k.matrix(), scores, ..*reads }
        });
        let k = k.matrix();
        let head = HeadInputs { k, labels: &labels, valid_vocab, bias, reads, ..problem.head };
        let problem = problem.over(head);
        let pass = self.reference_pass(&problem, &head, Keep::Dk);
        let mut slab = pass.slab.clone();
        slab.classes = Some(classes.clone());
        self.emulate_dk(&problem, &head, &mut slab);
        self.allow_open(&problem, (&head, 0..classes.len()), &mut slab);
        let chosen = (!picked).then(|| captured.of_classes(classes));
        let captured = chosen.as_ref().unwrap_or(captured);
        self.judge_dk(&problem, &slab, (captured, &DK), findings);
        self.judge_dbias(&problem, &slab, captured, findings);
    }

    /// dk as the world's policy has it, in place of the reference.
    fn emulate_dk(&self, problem: &Problem<'_>, head: &HeadInputs<'_>, slab: &mut Slab) {
        let Some((of, tiles)) = self.world.policy(&self.roundings) else { return };
        let run = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
            let mut found: Lists = Vec::new();
            let progress = self.progress;
            policy::backward(&of, head, lse, cotangents, tiles, progress, &mut |block| {
                let all = [
                    (Stage::DkLse, block.dk_lse),
                    (Stage::DkLabel, block.dk_label),
                    (Stage::Dk, block.dk),
                    (Stage::Dbias, block.dbias),
                ];
                for (stage, values) in all.into_iter().filter(|(_, values)| !values.is_empty()) {
                    let width = values.len() / block.rows.len().max(1);
                    put(&mut found, stage, block.rows.start * width, values);
                }
            });
            found
        };
        slab.instead = run(head, &problem.lse, &problem.cotangents());
        if !self.world.at_ties() {
            return;
        }
        let ends = near_ties(self.roundings.compute(), head, &problem.lse);
        let flips = self.flips(&of, tiles, &ends, &problem.cotangents());
        let flipped = flips.of_dk(head);
        let [one, other] = ends.map(|end| {
            let [lse, label, smooth] = &end.cotangents(&problem.cotangents());
            run(&end.head, &end.lse, &Cotangents { lse, label, smooth })
        });
        let lost = |((stage, a), (_, b)): (&List, &List)| {
            let apart = distance(a, b);
            (*stage, if *stage == Stage::DkLabel { apart } else { sum(&apart, &flipped) })
        };
        slab.lost = one.iter().zip(&other).map(lost).collect();
    }

    fn try_dq(
        &self,
        problem: &Problem<'_>,
        captured: &Captured,
        (unit, keep): (&Unit, Keep),
        findings: &mut Findings,
    ) {
        let (d, v) = (problem.head.q.cols, problem.head.k.rows);
        let mut dq = self.dq_zeros(problem);
        for range in self.slabs(d, v) {
            let mut labels = Vec::new();
            let head = vocabulary_slab(&problem.head, range.clone(), &mut labels);
            match range.len() == v {
                true => dq.exact.clone_from(&self.reference_pass(problem, &head, keep).dq),
                false => drop(self.reference_slab(problem, &head, range, (&mut dq.exact, keep))),
            }
        }
        dq.once_a_row(problem.head.copies);
        if let Some((of, tiles)) = self.world.policy(&self.roundings) {
            let progress = self.progress;
            let run = |head: &HeadInputs<'_>, lse: &[f64], cotangents: &Cotangents<'_, f64>| {
                policy::backward(&of, head, lse, cotangents, tiles, progress, &mut |_| {})
            };
            dq.instead = Some(run(&problem.head, &problem.lse, &problem.cotangents()));
            if self.world.at_ties() {
                let ends = near_ties(self.roundings.compute(), &problem.head, &problem.lse);
                let flips = self.flips(&of, tiles, &ends, &problem.cotangents());
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
        self.judge_dq(problem, &dq, (captured, &DQ), unit, findings);
    }
}

/// Some columns of a matrix, widened.
fn columns_of(of: &Matrix<'_>, columns: &[usize]) -> Vec<f64> {
    let row = |row: usize| columns.iter().map(move |column| of.get_f64(row * of.cols + column));
    (0..of.rows).flat_map(row).collect()
}

/// Values by stage.
type List = (Stage, Vec<f64>);
type Lists = Vec<List>;

/// Writes values into the list of a stage, which grows as they come.
fn put(lists: &mut Lists, stage: Stage, at: usize, values: &[f64]) {
    let index = lists.iter().position(|(of, _)| *of == stage).unwrap_or_else(|| {
        lists.push((stage, Vec::new()));
        lists.len() - 1
    });
    let list = &mut lists[index].1;
    list.resize(list.len().max(at + values.len()), 0.0);
    list[at..at + values.len()].copy_from_slice(values);
}
