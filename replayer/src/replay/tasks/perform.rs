//! A task, computed: what a worker does.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use backtape::shard::TensorKey;
use backtape::store::layout::MANIFEST;

use super::error::TaskError;
use super::read::{PartMatrices, files, key, rows};
use super::task::{Emulated, EmulatedBlock, Kind, RowsOf, Session, Task};
use crate::dump::{self, OpenError, Place, StepDump};
use crate::head::roundings::precision_of;
use crate::head::step::StepError;
use crate::head::{HeadStep, Roundings, Stage};
use crate::kernels::matrix::{Cotangents, HeadInputs};
use crate::kernels::reference::{Backward, DkSums, ForwardSums, Keep, backward_onto};
use crate::kernels::{NoProgress, Tiles, policy};
use crate::parcel::{Parcel, ParcelError};
use crate::replay::context::Replay;
use crate::replay::executor::Executor;
use crate::replay::executor::plane::SpanUpstream;
use crate::replay::judge::Judge;
use crate::replay::plan::{Effort, Plan};
use crate::replay::plausible_policies::members;
use crate::replay::world::Declared;
use crate::spill::spill_to;

/// The dump that a worker has open: tasks of one replay read the same one.
#[derive(Default)]
pub struct Dumps(Mutex<Option<Open>>);

struct Open {
    session: Session,
    place: Place,
    dump: Arc<StepDump>,
    /// Files that were brought of a bucket.
    brought: BTreeSet<String>,
}

impl Open {
    fn new(session: &Session) -> Result<Open, OpenError> {
        let place = Place::of(Path::new(&session.path))?;
        let named = |name: &str| name == MANIFEST;
        let mut dump = dump::open_some(&place, &session.selection(), &named)?;
        if place.is_bucket() && !dump.committed() {
            // Only its files say what there is.
            dump = dump::open_some(&place, &session.selection(), &|_| true)?;
        }
        let brought = BTreeSet::new();
        Ok(Open { session: session.clone(), place, dump: Arc::new(dump), brought })
    }

    /// Brings what a task reads and no task before it did.
    fn bring(&mut self, task: &Task) -> Result<(), TaskError> {
        if !self.place.is_bucket() || !self.dump.committed() {
            return Ok(());
        }
        let mut wanted = files(&self.dump, task)?;
        wanted.retain(|name| !self.brought.contains(name));
        if wanted.is_empty() {
            return Ok(());
        }
        let is_wanted = |name: &str| wanted.contains(name);
        self.dump = Arc::new(dump::open_some(&self.place, &self.session.selection(), &is_wanted)?);
        self.brought.extend(wanted);
        Ok(())
    }
}

impl Dumps {
    fn open(&self, task: &Task) -> Result<Arc<StepDump>, TaskError> {
        let mut cached = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if cached.as_ref().is_none_or(|open| open.session != task.session) {
            *cached = Some(Open::new(&task.session)?);
        }
        let open = cached.as_mut().ok_or(ParcelError)?;
        open.bring(task)?;
        Ok(open.dump.clone())
    }
}

/// Computes a task onto the sums it was given (nothing: there are none before), and returns its
/// own.
pub fn perform(dumps: &Dumps, task: &[u8], sums: &[&[u8]]) -> Result<Vec<Vec<u8>>, TaskError> {
    let task = Task::of_parcel(task)?;
    task.session.spill.as_deref().map(|directory| spill_to(Path::new(directory))).transpose()?;
    let dump = dumps.open(&task)?;
    let step = head_step(&dump, &task.session)?;
    let first = step.scores_of(step.microbatches[0]);
    let (_, first) = first.ok_or_else(|| Box::new(step.missing(step.scores(), None)))?;
    let roundings = Roundings::plausible(&step.options, first.dtype);
    let roundings = roundings.map_err(|error| Box::new(StepError::Head(error)))?;
    let plan = Plan {
        step: &step,
        wanted: Default::default(),
        roundings,
        tiles: Tiles::default(),
        comparisons: task.session.comparisons,
        effort: Effort::All,
        whole_entries: task.session.whole,
        sums_without_addends: None,
        draw: None,
        trial: false,
    };
    let judge = Judge { plan: &plan, world: &Declared };
    let replay = Replay { plan: &plan, executor: Executor::of_task(&plan, &NoProgress), judge };
    let operands = PartMatrices::read(&dump, &step.options, &task.part)?;
    let head = operands.head(&step.options, &task.part);
    replay.perform(&task, &head, sums)
}

fn head_step<'d>(dump: &'d StepDump, session: &Session) -> Result<HeadStep<'d>, TaskError> {
    let policy = session.policy.as_deref().map(serde_json::from_str).transpose();
    let policy = policy.map_err(|_| ParcelError)?;
    let unusable: Vec<TensorKey> =
        session.unusable.iter().map(|json| key(json)).collect::<Result<_, _>>()?;
    let why = |key: &TensorKey| unusable.contains(key).then(String::new);
    Ok(HeadStep::new(dump, policy.as_ref(), why).map_err(Box::new)?)
}

/// The sums before, or those of none.
fn before<T: Parcel>(sums: Option<&&[u8]>, none: impl FnOnce() -> T) -> Result<T, ParcelError> {
    match sums {
        Some(bytes) if !bytes.is_empty() => T::of_parcel(bytes),
        _ => Ok(none()),
    }
}

impl Replay<'_> {
    fn perform(
        &self,
        task: &Task,
        head: &HeadInputs<'_>,
        sums: &[&[u8]],
    ) -> Result<Vec<Vec<u8>>, TaskError> {
        let (tiles, progress) = (self.plan.tiles, self.executor.progress());
        let emulated = (self.plan.roundings.tiles, progress);
        let super::task::Tokens { lse, g_lse, g_label, g_smooth } = &task.tokens;
        let cotangents = Cotangents { lse: &g_lse[..], label: &g_label[..], smooth: &g_smooth[..] };
        let member =
            || members(&self.plan.roundings).into_iter().nth(task.member).ok_or(ParcelError);
        Ok(match task.kind {
            Kind::Forward => {
                let mut sums = before(sums.first(), || ForwardSums::zeros(head.q.rows))?;
                sums.take(head, (tiles, progress), None);
                vec![sums.to_parcel()]
            }
            Kind::EmulatedForward => {
                let forward = policy::forward(&member()?.policy, head, emulated.0, emulated.1);
                vec![(forward.lse, forward.label_logits).to_parcel()]
            }
            Kind::Backward => {
                let noise = self.judge.term_noise(head.q.cols);
                let mut dq = before(sums.first(), || Backward::zeros(head, &noise))?;
                let mut dk = before(sums.get(1), || DkSums::zeros(head, &noise, tiles))?;
                let given = (&lse[..], &cotangents, &noise);
                let walking = (tiles, Keep::Both, progress);
                backward_onto((&mut dq, &mut dk), (head, task.first), given, walking);
                vec![dq.to_parcel(), dk.to_parcel()]
            }
            Kind::Emulated => {
                let policy = member()?.policy;
                let mut blocks = Vec::new();
                let take = &mut |block: policy::DkParts<'_>| blocks.push(EmulatedBlock::of(&block));
                let dq =
                    policy::backward(&policy, head, lse, &cotangents, emulated.0, emulated.1, take);
                let policy::DqParts { dq_lse, dq_label, dq } = dq;
                vec![Emulated { blocks, dq_lse, dq_label, dq }.to_parcel()]
            }
            Kind::Plane => {
                let part = task.plane.as_ref().ok_or(ParcelError)?;
                let stage = *Stage::ALL.get(part.stage).ok_or(ParcelError)?;
                let rows_of_plane =
                    RowsOf { key: part.key.clone(), runs: vec![part.tokens.clone()] };
                let captured = rows(self.plan.step.dump, &rows_of_plane)?;
                let dtype = self.plan.step.tensors.get(&key(&part.key)?).ok_or(ParcelError)?.dtype;
                let captured = (captured.matrix(), precision_of(dtype));
                let (tally, energies) = self
                    .judge_plane_part(
                        stage,
                        part,
                        SpanUpstream { head: *head, lse, cotangents },
                        captured,
                    )
                    .map_err(Box::new)?;
                vec![(tally, energies).to_parcel()]
            }
        })
    }
}
