//! The state of one attempt: pure, without clock or I/O. `AttemptLog` checks each event, applies it
//! and writes it to the journal.
//!
//! A step is complete when every rank has closed its part and every file that the closes count is
//! reported. It is committed once its manifest is written and `set_committed` was called; that is
//! never undone.
//!
//! To limit memory, a file's text for the manifest is kept only until the step is committed, and
//! then its hash and counts; of a step that was committed a while ago only sums are kept
//! ("released"), as its manifest has the rest. Sums are updated with each event, so that answering
//! a question needs no walk over all shards.

mod released;
mod step;

use std::collections::{BTreeMap, BTreeSet};

use self::step::KeptFiles;
pub(super) use self::step::{StepState, Sums};
use super::event::{Closing, Event, Joined, Opened};
use super::orders::Orders;
use super::quotas;
use super::refusal::Refusal;
use crate::faults;
use crate::hash::TrustHash;
use crate::head::HeadDeclaration;
use crate::identity::{Name, Rank, Step};
use crate::index_box::IndexBox;
use crate::manifest::{FileRecord, Manifest};
use crate::placement::{Mesh, Reduction};
use crate::shard::{ShardRecord, TensorKey};
use crate::store::layout;

/// The result of checking an acceptable event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is new: to be applied and journalled.
    New,
    /// The same event happened before: it is answered without being recorded again.
    Known,
}

/// One launch of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AttemptState {
    pub(super) opened: Opened,
    pub(super) mesh: Mesh,
    pub(super) ranks: BTreeMap<Rank, Joined>,
    /// The steps that are not committed, and the latest committed ones.
    pub(super) steps: BTreeMap<Step, StepState>,
    /// The older committed steps, of which only sums are kept.
    pub(super) released: BTreeMap<Step, Sums>,
    /// For committed steps that are incomplete because a rank stopped recording early: the reason.
    pub(super) cut_short: BTreeMap<Step, String>,
    /// Plans and triggers.
    orders: Orders,
    /// Steps that are complete and not known to be committed.
    ready: BTreeSet<Step>,
    /// Steps that are not known to be committed.
    pub(super) open: BTreeSet<Step>,
    /// How many open steps are overdue.
    pub(super) overdue: u64,
    /// Sums over all steps.
    pub(super) sums: Sums,
    /// Bytes kept in memory of each rank's events of steps that are not committed.
    held_bytes: BTreeMap<Rank, u64>,
    /// Why the latest manifest could not be written; empty if it could.
    pub(super) trouble: String,
}

impl AttemptState {
    /// An attempt without ranks.
    pub(crate) fn new(opened: Opened) -> AttemptState {
        AttemptState {
            mesh: opened.mesh.clone(),
            opened,
            ranks: BTreeMap::new(),
            steps: BTreeMap::new(),
            released: BTreeMap::new(),
            cut_short: BTreeMap::new(),
            orders: Orders::default(),
            ready: BTreeSet::new(),
            open: BTreeSet::new(),
            overdue: 0,
            sums: Sums::default(),
            held_bytes: BTreeMap::new(),
            trouble: String::new(),
        }
    }

    /// The data that were fixed when it began.
    pub(crate) fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Plans and triggers.
    pub(crate) fn orders(&self) -> &Orders {
        &self.orders
    }

    /// True when some process joined as this rank.
    pub(crate) fn has_joined(&self, rank: Rank) -> bool {
        self.ranks.contains_key(&rank)
    }

    /// True when every rank has joined.
    pub(crate) fn all_joined(&self) -> bool {
        self.ranks.len() as u64 >= u64::from(self.opened.world_size)
    }

    /// Header hashes of a rank's reported files of a step, by name.
    #[cfg(test)]
    pub(super) fn files(&self, step: Step, rank: Rank) -> BTreeMap<Name, TrustHash> {
        let files = self.steps.get(&step).map(StepState::header_hashes).unwrap_or_default();
        let of_rank = files.into_iter().filter(|((of, _), _)| *of == rank);
        of_rank.map(|((_, name), hash)| (name, hash)).collect()
    }

    /// Header hashes of all files of a step, if every rank reported what it counted.
    pub(super) fn complete_files(&self, step: Step) -> Option<BTreeMap<(Rank, Name), TrustHash>> {
        let state = self.steps.get(&step)?;
        state.complete(self.opened.world_size).then(|| state.header_hashes())
    }

    /// Ranks that did not close a step.
    pub(super) fn unclosed(&self, step: Step) -> Vec<Rank> {
        let closed = self.steps.get(&step).map(|state| &state.closed);
        let open = |rank: &Rank| closed.is_none_or(|closed| !closed.contains_key(rank));
        (0..self.opened.world_size).map(Rank).filter(open).collect()
    }

    /// The loss head that was declared first for a step.
    pub(super) fn head(&self, step: Step) -> Option<&HeadDeclaration> {
        self.steps.get(&step)?.head.as_ref().map(|(_, head)| head)
    }

    /// The JSON of the file that an event has reported, until its step is committed.
    pub(crate) fn text(&self, event: &Event) -> Option<&str> {
        let Event::Reported { step, file } = event else { return None };
        let files = self.steps.get(step)?.files.get(&file.rank)?;
        let kept = files.get(&file.name).filter(|kept| kept.header_hash == file.header_hash)?;
        kept.text()
    }

    /// Shards of a reported file.
    pub(crate) fn shards(&self, step: Step, rank: Rank, file: &Name) -> u64 {
        let of_rank = self.steps.get(&step).and_then(|state| state.files.get(&rank));
        let file = of_rank.and_then(|files| files.get(file));
        file.map_or(0, |file| file.sums.shards)
    }

    /// The number of one rank's files in a step, and the bytes of their shards.
    pub(super) fn brought(&self, step: Step, rank: Rank) -> (u32, u64) {
        let of_rank = self.steps.get(&step).and_then(|state| state.files.get(&rank));
        let kept = of_rank.into_iter().flat_map(KeptFiles::values);
        kept.fold((0, 0), |(n, sum), file| (n + 1, file.sums.bytes.saturating_add(sum)))
    }

    /// Bytes kept in memory of a rank's events of steps that are not committed.
    pub(super) fn held_bytes(&self, rank: Rank) -> u64 {
        self.held_bytes.get(&rank).copied().unwrap_or_default()
    }

    /// True when a step's manifest is known to exist.
    pub(crate) fn is_committed(&self, step: Step) -> bool {
        self.is_released(step) || self.steps.get(&step).is_some_and(|state| state.committed)
    }

    /// Refuses a process that is not, or no longer, this rank of the attempt.
    pub(crate) fn check_member(&self, rank: Rank, incarnation: u64) -> Result<(), Refusal> {
        match self.ranks.get(&rank) {
            Some(joined) if joined.incarnation == incarnation => Ok(()),
            _ => Err(Refusal::NotJoined {
                run: self.opened.run.clone(),
                rank,
                attempt: self.opened.attempt,
            }),
        }
    }

    /// Checks an event without changing anything.
    pub(crate) fn check(&self, event: &Event) -> Result<Outcome, Refusal> {
        event.step().map_or(Ok(()), |step| self.check_known(step))?;
        match event {
            Event::Opened(_) => Err(Refusal::Malformed("an attempt opens once".into())),
            Event::Joined(joined) => self.check_join(joined),
            Event::Reported { step, file } => {
                let known = self.check_header(*step, file.rank, &file.name, file.header_hash)?;
                self.check_records(*step, file)?;
                Ok(known)
            }
            Event::Closed { step, rank, closing } => self.check_close(*step, *rank, closing),
            Event::Planned(plan) => self.orders.check_plan(plan),
            Event::Triggered(trigger) => self.orders.check_trigger(trigger),
            Event::RingChosen { number, steps } => self.orders.check_ring(*number, steps),
        }
    }

    fn check_join(&self, joined: &Joined) -> Result<Outcome, Refusal> {
        let (rank, world_size) = (joined.rank, self.opened.world_size);
        if rank.0 >= world_size {
            return Err(Refusal::RankOutside { rank, world_size });
        }
        let says = |mesh: &Mesh| !mesh.0.is_empty();
        if says(&joined.mesh) && says(&self.mesh) && joined.mesh != self.mesh {
            return Err(Refusal::Mesh {
                rank,
                found: joined.mesh.to_string(),
                first: self.mesh.to_string(),
            });
        }
        match self.ranks.get(&rank) {
            None => Ok(Outcome::New),
            Some(first) if first.incarnation == joined.incarnation => Ok(Outcome::Known),
            Some(_) => Err(Refusal::AttemptTaken {
                run: self.opened.run.clone(),
                rank,
                attempt: self.opened.attempt,
            }),
        }
    }

    /// Checks a report by the file's name and header hash alone, so that an upload can be refused,
    /// or answered as known, before its bytes are sent.
    pub(crate) fn check_header(
        &self,
        step: Step,
        rank: Rank,
        file: &Name,
        hash: TrustHash,
    ) -> Result<Outcome, Refusal> {
        self.check_known(step)?;
        let Some(state) = self.steps.get(&step) else {
            return Ok(Outcome::New);
        };
        let file = file.clone();
        let of_rank = state.files.get(&rank);
        if let Some(known) = of_rank.and_then(|files| files.get(&file)) {
            return if known.header_hash == hash || faults::seeded("dedupe-by-name") {
                Ok(Outcome::Known)
            } else {
                let (first, second) = (known.header_hash, hash);
                Err(Refusal::FileConflict { file, step, first, second })
            };
        }
        match state.closed.get(&rank) {
            Some(closing) if state.reported(rank) >= closing.files => {
                Err(Refusal::StepClosed { rank, step, files: closing.files, file })
            }
            _ => Ok(Outcome::New),
        }
    }

    /// Refuses records of another rank or attempt than the file's, and records in another file than
    /// the layout prescribes, so that no rank can report for another.
    fn check_records(&self, step: Step, file: &FileRecord) -> Result<(), Refusal> {
        let rank = file.rank;
        let foreign =
            |detail: String| Refusal::ForeignFile { file: file.name.clone(), rank, detail };
        let microbatch = file.shards.first().and_then(|shard| shard.key.microbatch);
        let expected = layout::file_name(rank, microbatch);
        if expected != file.name {
            return Err(foreign(format!("its shards belong in {expected}")));
        }
        let mut seen: BTreeMap<ShardIdentity, &ShardRecord> = BTreeMap::new();
        for shard in &file.shards {
            shard.check().map_err(|error| Refusal::Record {
                file: file.name.clone(),
                step,
                detail: error.to_string(),
            })?;
            if shard.rank != rank || shard.attempt != self.opened.attempt {
                let (other, attempt) = (shard.rank, shard.attempt);
                return Err(foreign(format!(
                    "it holds {} of rank {other}, attempt {attempt}",
                    shard.key
                )));
            }
            if shard.key.microbatch != microbatch {
                return Err(foreign(format!("{} is of another microbatch", shard.key)));
            }
            let first = seen.insert(identity(shard), shard);
            if first.is_some_and(|first| first.hash != shard.hash) {
                return Err(Refusal::ShardConflict {
                    file: file.name.clone(),
                    step,
                    rank,
                    shard: format!("{} {}", shard.key, shard.place),
                });
            }
        }
        Ok(())
    }

    fn check_close(&self, step: Step, rank: Rank, closing: &Closing) -> Result<Outcome, Refusal> {
        let Some(state) = self.steps.get(&step) else {
            return Ok(Outcome::New);
        };
        match state.closed.get(&rank) {
            Some(first) if state.same(first, closing) => return Ok(Outcome::Known),
            Some(_) => return Err(Refusal::CloseConflict { rank, step }),
            None => {}
        }
        let (counted, reported) = (closing.files, state.reported(rank));
        if counted < reported {
            return Err(Refusal::CountShort { rank, step, counted, reported });
        }
        Ok(Outcome::New)
    }

    /// Applies an event that [`AttemptState::check`] found new; `at_ms` is the time of its batch.
    pub(crate) fn apply(&mut self, event: &Event, at_ms: u64) {
        match event {
            Event::Opened(_) => {}
            Event::Joined(joined) => {
                if self.mesh.0.is_empty() {
                    self.mesh = joined.mesh.clone();
                }
                self.ranks.insert(joined.rank, joined.clone());
            }
            &Event::Reported { step, ref file } => {
                let (added, text_bytes) = self.step_at(step, at_ms).add(file);
                self.sums.add(added);
                *self.held_bytes.entry(file.rank).or_default() += text_bytes;
                self.note_complete(step);
            }
            &Event::Closed { step, rank, ref closing } => {
                let weight = quotas::weight(closing);
                *self.held_bytes.entry(rank).or_default() += weight;
                self.step_at(step, at_ms).close(rank, closing.clone(), weight);
                self.note_complete(step);
            }
            Event::Planned(plan) => self.orders.add_plan(plan.clone()),
            Event::Triggered(trigger) => self.orders.add_trigger(trigger.clone(), at_ms),
            Event::RingChosen { number, steps } => self.orders.choose_ring(*number, steps.clone()),
        }
    }

    fn note_complete(&mut self, step: Step) {
        let world_size = self.opened.world_size;
        let state = self.steps.get(&step);
        if state.is_some_and(|state| !state.committed && state.complete(world_size)) {
            self.ready.insert(step);
        }
    }

    fn step_at(&mut self, step: Step, at_ms: u64) -> &mut StepState {
        self.steps.entry(step).or_insert_with(|| {
            self.open.insert(step);
            StepState::begun(at_ms)
        })
    }

    /// Complete steps whose manifest is not known to exist.
    pub(crate) fn uncommitted(&self) -> Vec<Step> {
        self.ready.iter().copied().collect()
    }

    /// True of those steps.
    pub(crate) fn is_ready(&self, step: Step) -> bool {
        self.ready.contains(&step)
    }

    /// The contents of the manifest of a complete step that is not committed. The same events give
    /// the same bytes.
    pub(crate) fn manifest(&self, step: Step) -> Option<Vec<u8>> {
        let state = self.steps.get(&step)?;
        if state.committed || !state.complete(self.opened.world_size) {
            return None;
        }
        let omissions = state.closed.values().flat_map(|closing| &closing.omissions);
        let manifest = Manifest {
            format_version: crate::FORMAT_VERSION,
            version: crate::VERSION.into(),
            run: self.opened.run.clone(),
            attempt: self.opened.attempt,
            step,
            world_size: self.opened.world_size,
            mesh: self.mesh.clone(),
            head: state.head.as_ref().map(|(_, head)| head.clone()),
            files: Vec::new(),
            omissions: omissions.chain(&state.notes).cloned().collect(),
            selections: state.selections(),
            trigger: self.orders.trigger_of(step),
        };
        Some(manifest.to_bytes_of(state.texts()))
    }

    /// Marks a step as committed: its manifest exists.
    pub(crate) fn set_committed(&mut self, step: Step) {
        let Some(state) = self.steps.get_mut(&step).filter(|state| !state.committed) else {
            return;
        };
        self.cut_short.extend(state.cut_short().map(|why| (step, why)));
        for (rank, text_bytes) in state.settle() {
            if let Some(sum) = self.held_bytes.get_mut(&rank) {
                *sum = sum.saturating_sub(text_bytes);
            }
        }
        self.overdue -= u64::from(state.overdue);
        self.ready.remove(&step);
        self.open.remove(&step);
    }

    /// Forgets which steps are overdue, as a restart does.
    #[cfg(test)]
    pub(super) fn forget_overdue(&mut self) {
        self.overdue = 0;
        for state in self.steps.values_mut() {
            state.overdue = false;
        }
    }

    /// Marks the steps whose deadline has passed and returns those not marked before.
    pub(crate) fn newly_overdue(&mut self, now_ms: u64, deadline_ms: u64) -> Vec<Step> {
        let world_size = self.opened.world_size;
        let mut newly = Vec::new();
        for step in &self.open {
            let Some(state) = self.steps.get_mut(step) else { continue };
            let late = now_ms.saturating_sub(state.since_ms) >= deadline_ms;
            if late && !state.overdue && !state.complete(world_size) {
                state.overdue = true;
                newly.push(*step);
            }
        }
        self.overdue += newly.len() as u64;
        newly
    }
}

/// What identifies a shard among those of one rank.
type ShardIdentity = (TensorKey, IndexBox, Option<Reduction>, u32);

fn identity(shard: &ShardRecord) -> ShardIdentity {
    (shard.key.clone(), shard.place.clone(), shard.partial, shard.replica)
}
