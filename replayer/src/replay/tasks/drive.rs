//! The driver's side: which tasks make up a pass, and in which order their sums meet.

use std::collections::VecDeque;
use std::ops::Range;

use backtape::role::Role;
use backtape::shard::TensorKey;

use super::task::{Emulated, Kind, Part, PlanePart, RowsOf, Session, Task, Tokens};
use super::{Cluster, Handle};
use crate::compare::Tally;
use crate::head::step::{StepError, vocabulary_slab};
use crate::head::{Scores, Unit};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::policy::{DkParts, DqParts};
use crate::kernels::reference::{self, Backward, DkSums, Forward, ForwardSums};
use crate::kernels::{Progress, span_of};
use crate::parcel::Parcel;
use crate::replay::microbatch::HeadMicrobatch;
use crate::replay::plan::Plan;
use crate::replay::plausible_policies::Member;
use crate::replay::problem::Problem;

/// Tokens of a task, unless a cut says otherwise.
const TOKENS: usize = 2048;
/// Bytes of one f64 buffer over a task's classes, likewise.
const CLASSES_BYTES: usize = 32 << 20;
/// Bytes of sums over classes that a walk may have waiting on the cluster, at least a slab.
const WAITING_BYTES: usize = 16 << 30;
/// Arrays `[classes, D]` that a slab's sums are, members' parts included.
const ARRAYS: usize = 16;

/// The tensor of a task, as it is sent.
pub(in crate::replay) fn tensor_json(key: &TensorKey) -> String {
    serde_json::to_string(key).expect("plain data")
}

/// A range in pieces of some whole tiles.
fn pieces(range: Range<usize>, size: usize, tile: usize) -> Vec<Range<usize>> {
    let size = size.div_ceil(tile).max(1) * tile;
    range.clone().step_by(size).map(|start| start..(start + size).min(range.end)).collect()
}

/// Where the matrices of a head lie in the dump.
struct Sources {
    q: Option<String>,
    k: Option<String>,
    given: Option<String>,
}

/// A replay on workers: who they are, and what each task begins with.
pub(in crate::replay) struct Driver<'a> {
    cluster: &'a Cluster<'a>,
    session: Session,
    plan: &'a Plan<'a>,
    progress: &'a dyn Progress,
}

impl<'a> Driver<'a> {
    /// What workers are told of a replay.
    pub(in crate::replay) fn new(
        cluster: &'a Cluster<'a>,
        plan: &'a Plan<'a>,
        progress: &'a dyn Progress,
    ) -> Driver<'a> {
        let dump = plan.step.dump;
        let session = Session {
            path: cluster.path.to_string_lossy().into_owned(),
            run: cluster.run.clone(),
            attempt: dump.attempt.0,
            step: dump.step.0,
            policy: cluster.policy.clone(),
            unusable: plan.step.unusable.keys().map(tensor_json).collect(),
            comparisons: plan.comparisons,
            whole: plan.whole_entries,
            spill: cluster.spill.clone(),
        };
        Driver { cluster, session, plan, progress }
    }
}

impl Driver<'_> {
    fn start(
        &self,
        task: Task,
        from: Vec<Option<Handle>>,
        gives: usize,
    ) -> Result<Vec<Handle>, StepError> {
        let started = self.cluster.workers.start(task.to_parcel(), from, gives);
        let started = started.map_err(|why| StepError::Task { why })?;
        match started.len() == gives {
            true => Ok(started),
            false => Err(StepError::Task { why: "it did not give what it should".into() }),
        }
    }

    fn fetch<T: Parcel>(&self, handle: Handle) -> Result<T, StepError> {
        let bytes = self.cluster.workers.fetch(handle).map_err(|why| StepError::Task { why })?;
        T::of_parcel(&bytes).map_err(|error| StepError::Task { why: error.to_string() })
    }

    fn task(&self, kind: Kind, part: Part) -> Task {
        let (session, tokens) = (self.session.clone(), Tokens::default());
        Task { session, kind, part, member: 0, first: 0, tokens, plane: None }
    }

    fn blocks(&self, tokens: usize) -> Vec<Range<usize>> {
        pieces(0..tokens, self.cluster.cut.tokens.unwrap_or(TOKENS), self.plan.tiles.tokens)
    }

    fn parts(&self, classes: Range<usize>, d: usize) -> Vec<Range<usize>> {
        let most = (CLASSES_BYTES / (8 * d.max(1))).max(self.plan.tiles.vocab);
        let most = most / self.plan.tiles.vocab * self.plan.tiles.vocab;
        pieces(classes, self.cluster.cut.classes.unwrap_or(most), self.plan.tiles.vocab)
    }
}

/// A part of a head: the tokens of `head`, which are `rows` of the dump, and some classes.
fn part(sources: &Sources, head: &HeadInputs<'_>, rows: &[usize], classes: Range<usize>) -> Part {
    let mut labels = Vec::new();
    let slab = vocabulary_slab(head, classes.clone(), &mut labels);
    let (valid, bias) = (slab.valid_vocab, slab.bias.map(<[f64]>::to_vec));
    let rows_of = |key: &Option<String>| {
        key.as_ref().map(|key| RowsOf::new(key.clone(), rows.iter().copied()))
    };
    let k = sources.k.as_ref().map(|key| RowsOf { key: key.clone(), runs: vec![classes.clone()] });
    Part {
        q: rows_of(&sources.q),
        k,
        given: rows_of(&sources.given),
        classes: classes.len(),
        valid,
        labels,
        bias,
        copies: head.copies.map(<[f64]>::to_vec),
        plain: false,
    }
}

fn upstream(lse: &[f64], cotangents: &Cotangents<'_, f64>) -> Tokens {
    let Cotangents { lse: g_lse, label, smooth } = *cotangents;
    let (g_lse, g_label, g_smooth) = (g_lse.to_vec(), label.to_vec(), smooth.to_vec());
    Tokens { lse: lse.to_vec(), g_lse, g_label, g_smooth }
}

impl Driver<'_> {
    fn sources(&self, microbatch: &HeadMicrobatch) -> Sources {
        let rows = Some(tensor_json(&microbatch.inputs.rows_key));
        match microbatch.inputs.scores {
            Scores::Product { .. } => {
                let k =
                    self.plan.step.recorded(Role::K, microbatch.inputs.microbatch).map(tensor_json);
                Sources { q: rows, k, given: None }
            }
            _ => Sources { q: None, k: None, given: rows },
        }
    }

    /// The forward pass as tasks.
    pub(in crate::replay) fn forward(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
    ) -> Result<Forward, StepError> {
        let (sources, v) = (self.sources(microbatch), head.k.rows);
        // Given logits are read by rows: a task has all of their columns.
        let parts = match head.given {
            Some(_) => std::iter::once(0..v).collect(),
            None => self.parts(0..v, head.q.cols),
        };
        let mut last = Vec::new();
        for tokens in self.blocks(head.q.rows) {
            let rows: Vec<usize> = tokens.clone().collect();
            let block = span_of(head, tokens);
            let mut sums = None;
            for classes in &parts {
                let part = part(&sources, &block, &rows, classes.clone());
                sums = self.start(self.task(Kind::Forward, part), vec![sums], 1)?.pop();
            }
            last.extend(sums);
        }
        let sums = last.into_iter().map(|sums| self.fetch(sums));
        let sums = joined(sums.collect::<Result<Vec<ForwardSums>, _>>()?);
        self.progress.advance(reference::forward_work(head));
        Ok(sums.finish(head.mask, v - head.valid_vocab))
    }

    /// The forward pass of spans of captured logits as tasks: sums that are not finished.
    pub(in crate::replay) fn forward_of_logits(
        &self,
        (key, spans): (&TensorKey, &[Range<usize>]),
        head: &HeadInputs<'_>,
    ) -> Result<Vec<ForwardSums>, StepError> {
        let sources = Sources { q: None, k: None, given: Some(tensor_json(key)) };
        let mut started = VecDeque::new();
        for tokens in spans {
            let rows: Vec<usize> = tokens.clone().collect();
            let block = HeadInputs { bias: None, ..span_of(head, tokens.clone()) };
            let part = part(&sources, &block, &rows, 0..head.k.rows);
            let task = self.task(Kind::Forward, Part { plain: true, ..part });
            started.extend(self.start(task, vec![None], 1)?);
        }
        started.into_iter().map(|sums| self.fetch(sums)).collect()
    }

    /// lse and label logits as a member has them, block by block of the tokens.
    pub(in crate::replay) fn emulated_forward(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
        member: usize,
    ) -> Result<(Vec<f64>, Vec<f64>), StepError> {
        let sources = self.sources(microbatch);
        let mut started = Vec::new();
        for tokens in self.blocks(head.q.rows) {
            let rows: Vec<usize> = tokens.clone().collect();
            let part = part(&sources, &span_of(head, tokens), &rows, 0..head.k.rows);
            let task = Task { member, ..self.task(Kind::EmulatedForward, part) };
            started.extend(self.start(task, Vec::new(), 1)?);
        }
        let (mut lse, mut label) = (Vec::new(), Vec::new());
        for sums in started {
            let (of_lse, of_label): (Vec<f64>, Vec<f64>) = self.fetch(sums)?;
            lse.extend(of_lse);
            label.extend(of_label);
        }
        Ok((lse, label))
    }

    /// The comparisons of spans of a captured plane, in their order.
    pub(in crate::replay) fn planes(
        &self,
        microbatch: &HeadMicrobatch,
        head: &HeadInputs<'_>,
        (lse, cotangents): (&[f64], &Cotangents<'_, f64>),
        spans: Vec<PlanePart>,
    ) -> Result<Vec<(Tally, Vec<f64>)>, StepError> {
        let sources = self.sources(microbatch);
        let mut started = VecDeque::new();
        for span in spans {
            let tokens = span.tokens.clone();
            let rows: Vec<usize> = tokens.clone().collect();
            let part = part(&sources, &span_of(head, tokens.clone()), &rows, 0..head.k.rows);
            let tokens = upstream(&lse[tokens.clone()], &cotangents.of(tokens));
            let task = Task { tokens, plane: Some(span), ..self.task(Kind::Plane, part) };
            started.extend(self.start(task, Vec::new(), 1)?);
        }
        started.into_iter().map(|handle| self.fetch(handle)).collect()
    }
}

fn joined(all: Vec<ForwardSums>) -> ForwardSums {
    let mut total = ForwardSums::default();
    for part in all {
        let ForwardSums { max, sum, label_logits, logit_sum, logit_squares } = part;
        total.max.extend(max);
        total.sum.extend(sum);
        total.label_logits.extend(label_logits);
        total.logit_sum.extend(logit_sum);
        total.logit_squares.extend(logit_squares);
    }
    total
}

/// A backward walk of one unit: its tasks, slab by slab.
pub(in crate::replay) struct ClusterWalk<'a> {
    driver: &'a Driver<'a>,
    problem: &'a Problem<'a>,
    sources: Sources,
    rows: &'a [usize],
    members: usize,
    blocks: Vec<Range<usize>>,
    slabs: VecDeque<Range<usize>>,
    /// dq of each block, as far as slabs were started.
    dq: Vec<Option<Handle>>,
    waiting: VecDeque<Started>,
    most_waiting: usize,
}

/// A slab whose tasks were started.
struct Started {
    /// dk of its parts, in order.
    parts: Vec<(Range<usize>, Handle)>,
    emulated: VecDeque<Handle>,
    classes: usize,
}

impl<'a> ClusterWalk<'a> {
    pub(in crate::replay) fn new(
        driver: &'a Driver<'a>,
        problem: &'a Problem<'a>,
        (microbatch, unit): (&HeadMicrobatch, &'a Unit),
        members: &[Member],
    ) -> ClusterWalk<'a> {
        let (tokens, d, v) = (problem.head.q.rows, problem.head.q.cols, problem.head.k.rows);
        let blocks = driver.blocks(tokens);
        let slabs: VecDeque<_> = driver.plan.slabs(d, v).collect();
        let of_slab = slabs.front().map_or(1, |slab| slab.len() * d * 8 * ARRAYS).max(1);
        ClusterWalk {
            driver,
            problem,
            sources: driver.sources(microbatch),
            rows: &unit.rows,
            members: members.len(),
            dq: blocks.iter().map(|_| None).collect(),
            blocks,
            slabs,
            waiting: VecDeque::new(),
            most_waiting: (WAITING_BYTES / of_slab).max(1),
        }
    }

    /// The sums of the next slab. The slabs behind it are started first, as many as may wait:
    /// they are what keeps more workers busy than there are blocks of tokens.
    pub(in crate::replay) fn slab(&mut self) -> Result<DkSums, StepError> {
        while self.waiting.len() < self.most_waiting
            && let Some(slab) = self.slabs.pop_front()
        {
            let started = self.begin(slab)?;
            self.waiting.push_back(started);
        }
        let Some(slab) = self.waiting.front_mut() else {
            return Err(StepError::Task { why: "the walk is over".into() });
        };
        let mut sums = DkSums::default();
        for (part, dk) in std::mem::take(&mut slab.parts) {
            sums.append(part.start, self.driver.fetch(dk)?);
        }
        let head = &self.problem.head;
        let work = reference::backward_work(head) / head.k.rows.max(1) as u64;
        self.driver.progress.advance(work * slab.classes as u64);
        Ok(sums)
    }

    fn begin(&mut self, slab: Range<usize>) -> Result<Started, StepError> {
        let head = &self.problem.head;
        let mut parts = Vec::new();
        for classes in self.driver.parts(slab.clone(), head.q.cols) {
            let mut dk = None;
            for (block, tokens) in self.blocks.iter().enumerate() {
                let task = self.task(Kind::Backward, tokens.clone(), classes.clone());
                let task = Task { first: tokens.start, ..task };
                let mut sums =
                    self.driver.start(task, vec![self.dq[block].take(), dk.take()], 2)?;
                (dk, self.dq[block]) = (sums.pop(), sums.pop());
            }
            parts.extend(dk.map(|dk| (classes.start - slab.start..classes.end - slab.start, dk)));
        }
        let mut emulated = VecDeque::new();
        for member in 0..self.members {
            let task = self.task(Kind::Emulated, 0..head.q.rows, slab.clone());
            emulated.extend(self.driver.start(Task { member, ..task }, Vec::new(), 1)?);
        }
        Ok(Started { parts, emulated, classes: slab.len() })
    }

    fn task(&self, kind: Kind, tokens: Range<usize>, classes: Range<usize>) -> Task {
        let block = span_of(&self.problem.head, tokens.clone());
        let part = part(&self.sources, &block, &self.rows[tokens.clone()], classes);
        let lse = &self.problem.lse[tokens.clone()];
        let tokens = upstream(lse, &self.problem.cotangents().of(tokens));
        Task { tokens, ..self.driver.task(kind, part) }
    }

    /// What the next member makes of the slab, in the order of the members.
    pub(in crate::replay) fn emulated(
        &mut self,
        on_dk: &mut dyn FnMut(DkParts<'_>),
    ) -> Result<DqParts, StepError> {
        let next = self.waiting.front_mut().and_then(|slab| slab.emulated.pop_front());
        let next = next.ok_or_else(|| StepError::Task { why: "the walk is over".into() })?;
        Ok(self.driver.fetch::<Emulated>(next)?.lend(on_dk))
    }

    /// Leaves the slab, so that others may wait.
    pub(in crate::replay) fn next(&mut self) {
        self.waiting.pop_front();
    }

    /// dq, once all slabs were walked.
    pub(in crate::replay) fn finish(self) -> Result<Backward, StepError> {
        let mut total = Backward::default();
        for dq in self.dq.into_iter().flatten() {
            total.extend(self.driver.fetch(dq)?);
        }
        Ok(total)
    }
}
