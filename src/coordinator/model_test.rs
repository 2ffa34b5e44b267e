//! Goal: whatever the order of events, duplicates and restarts, a step is
//! committed exactly when every rank closed it and every file it counted is
//! reported, and nothing acknowledged is forgotten. Method: random operations
//! on the state machine with a real journal, against a model of two maps.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;

use super::attempt_log::AttemptLog;
use super::event::{Closing, Event, Joined, Opened};
use super::journal::{self, Batch, End, Journal, JournalError};
use super::metrics::Totals;
use super::request::StepAsk;
use super::state::{AttemptState, Outcome, StepState};
use crate::hash::TrustHash;
use crate::identity::{Attempt, Microbatch, Name, Rank, Step};
use crate::manifest::{FileRecord, Manifest};
use crate::placement::Mesh;
use crate::selection::{Changes, Planned, Trigger};
use crate::store::{AttemptDir, Backend, layout};

const WORLD: u32 = 3;

#[derive(Clone, Debug)]
enum Op {
    Join(u32),
    Report {
        rank: u32,
        step: u64,
        file: u32,
        version: u8,
    },
    Close {
        rank: u32,
        step: u64,
        files: u32,
    },
    /// A plan with this version, from this step on.
    Plan {
        version: u32,
        from: u64,
    },
    /// A trigger with this number, for this step.
    Trigger {
        number: u32,
        record: u64,
    },
    /// The choice of the steps that ranks write from their ring buffers.
    Ring {
        number: u32,
        step: u64,
    },
    /// Write the manifests of complete steps.
    Commit,
    /// Release the details of committed steps.
    Release,
    /// Check the deadlines.
    Tick,
    /// Kill the coordinator and load its journal.
    Restart,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (rank, step) = (0..WORLD, 0..2u64);
    let report = (rank.clone(), step.clone(), 0..2u32, prop_oneof![9 => Just(0u8), 1 => Just(1)])
        .prop_map(|(rank, step, file, version)| Op::Report { rank, step, file, version });
    let plan = (1..4u32, 0..3u64).prop_map(|(version, from)| Op::Plan { version, from });
    let trigger = (1..4u32, 0..3u64).prop_map(|(number, record)| Op::Trigger { number, record });
    let ring = (1..4u32, 0..2u64).prop_map(|(number, step)| Op::Ring { number, step });
    let close = (rank.clone(), step, 0..3u32).prop_map(|(rank, step, files)| Op::Close {
        rank,
        step,
        files,
    });
    let op = prop_oneof![
        1 => rank.prop_map(Op::Join), 6 => report, 3 => close, 1 => Just(Op::Restart),
        1 => plan, 1 => trigger, 1 => ring, 1 => Just(Op::Commit), 1 => Just(Op::Release),
        1 => Just(Op::Tick)
    ];
    proptest::collection::vec(op, 0..60)
}

fn opened() -> Opened {
    Opened {
        format_version: crate::FORMAT_VERSION,
        run: Name::new("model").unwrap(),
        attempt: Attempt(0),
        world_size: WORLD,
        started_ms: 0,
        mesh: Mesh::default(),
        versions: BTreeMap::new(),
        launch: None,
    }
}

fn event(op: &Op) -> Option<Event> {
    Some(match *op {
        Op::Restart | Op::Commit | Op::Release | Op::Tick => return None,
        Op::Join(rank) => Event::Joined(Joined {
            rank: Rank(rank),
            incarnation: u64::from(rank),
            host: Name::new("h").unwrap(),
            mesh: Mesh::default(),
        }),
        Op::Report { rank, step, file, version } => {
            let microbatch = file.checked_sub(1).map(Microbatch);
            let name = layout::file_name(Rank(rank), microbatch);
            let shards = microbatch.map(|mb| shard(rank, mb)).into_iter().collect();
            Event::Reported {
                step: Step(step),
                file: FileRecord {
                    name,
                    rank: Rank(rank),
                    length: 0,
                    header_hash: TrustHash::of(&[version]),
                    shards,
                },
            }
        }
        Op::Plan { version, from } => {
            let tensors = Some("q".parse().unwrap());
            let changes = Changes { tensors, ..Changes::default() };
            Event::Planned(Planned { version, from: Step(from), changes })
        }
        Op::Trigger { number, record } => Event::Triggered(Trigger {
            number,
            reason: "the loss is NaN".into(),
            rank: Some(Rank(0)),
            seen: Step(0),
            record: Step(record),
            ring: None,
        }),
        Op::Ring { number, step } => Event::RingChosen { number, steps: vec![Step(step)] },
        Op::Close { rank, step, files } => Event::Closed {
            step: Step(step),
            rank: Rank(rank),
            closing: Closing { files, ..Closing::default() },
        },
    })
}

fn shard(rank: u32, microbatch: Microbatch) -> crate::shard::ShardRecord {
    let json = serde_json::json!({
        "tensor": "q", "microbatch": microbatch, "when": null, "role": "q", "dtype": "f32",
        "shape": [1], "box": [[0, 1]], "rank": rank, "host": "h", "attempt": 0, "mesh": {},
        "placement": {}, "partial": null, "replica": 0, "hash": "0".repeat(32), "length": 4,
        "fingerprint": [0, 0], "fingerprint_source": "recorder", "entry": "q",
    });
    serde_json::from_value(json).unwrap()
}

/// The model: what was acknowledged, with the rules in their simplest form.
#[derive(Clone, Default)]
struct Model {
    files: BTreeMap<(u64, u32, u32), u8>,
    closed: BTreeMap<(u64, u32), u32>,
    /// `from` of each plan, `record` of each trigger, and each one's choice.
    plans: Vec<u64>,
    triggers: Vec<(u64, Option<u64>)>,
    committed: BTreeMap<u64, Manifest>,
}

impl Model {
    /// Files, shards and bytes of a step, counted one by one: a file with a microbatch has one
    /// shard.
    fn sums(&self, step: u64) -> (u64, u64, u64) {
        let of_step = self.files.keys().filter(|(s, ..)| *s == step);
        of_step.fold((0, 0, 0), |(files, shards, bytes), (.., file)| {
            let shard = u64::from(*file > 0);
            (files + 1, shards + shard, bytes + 4 * shard)
        })
    }

    /// Ranks from which a step still needs a close or files.
    fn owing(&self, step: u64) -> Vec<u32> {
        let owes = |rank: &u32| {
            self.closed.get(&(step, *rank)).is_none_or(|n| self.count(step, *rank) < *n)
        };
        (0..WORLD).filter(owes).collect()
    }

    fn count(&self, step: u64, rank: u32) -> u32 {
        self.files.keys().filter(|(s, r, _)| (*s, *r) == (step, rank)).count() as u32
    }

    /// Whether the operation must be acknowledged.
    fn accepts(&mut self, op: &Op) -> bool {
        match *op {
            Op::Join(_) | Op::Restart | Op::Commit | Op::Release | Op::Tick => true,
            Op::Report { rank, step, file, version } => {
                if let Some(first) = self.files.get(&(step, rank, file)) {
                    return *first == version;
                }
                let room =
                    self.closed.get(&(step, rank)).is_none_or(|n| self.count(step, rank) < *n);
                if room {
                    self.files.insert((step, rank, file), version);
                }
                room
            }
            Op::Close { rank, step, files } => {
                if let Some(first) = self.closed.get(&(step, rank)) {
                    return *first == files;
                }
                let honest = files >= self.count(step, rank);
                if honest {
                    self.closed.insert((step, rank), files);
                }
                honest
            }
            Op::Plan { version, from } => {
                let last = self.plans.last().copied();
                let again = last == Some(from) && self.plans.len() == version as usize;
                let next = self.plans.len() + 1 == version as usize && last <= Some(from);
                if next {
                    self.plans.push(from);
                }
                again || next
            }
            Op::Trigger { number, record } => {
                let again = self.triggers.len() == number as usize
                    && self.triggers.last() == Some(&(record, None));
                let next = self.triggers.len() + 1 == number as usize;
                if next {
                    self.triggers.push((record, None));
                }
                again || next
            }
            Op::Ring { number, step } => match self.triggers.get_mut(number as usize - 1) {
                None => false,
                Some((_, choice)) => *choice.get_or_insert(step) == step,
            },
        }
    }

    /// The trigger that had a step recorded, and whether from the ring buffers.
    fn trigger_of(&self, step: u64) -> Option<(u32, bool)> {
        let ours = |(record, ring): &(u64, Option<u64>)| *record == step || *ring == Some(step);
        let index = self.triggers.iter().position(ours)?;
        Some((index as u32 + 1, self.triggers[index].1 == Some(step)))
    }

    fn complete(&self, step: u64) -> bool {
        (0..WORLD).all(|rank| self.closed.get(&(step, rank)) == Some(&self.count(step, rank)))
    }
}

fn rebuild(batches: &[Batch]) -> Option<AttemptState> {
    let mut state: Option<AttemptState> = None;
    for batch in batches {
        for event in &batch.events {
            match (&mut state, event) {
                (None, Event::Opened(opened)) => state = Some(AttemptState::new(opened.clone())),
                (Some(state), event) => {
                    assert_eq!(state.check(event), Ok(Outcome::New), "journalled twice");
                    state.apply(event, batch.at_ms);
                }
                (None, _) => panic!("the opening is missing"),
            }
        }
    }
    state
}

/// The manifest of a complete step, read back.
fn manifest(state: &AttemptState, step: u64) -> Option<Manifest> {
    state.manifest(Step(step)).map(|bytes| Manifest::from_bytes(&bytes).unwrap())
}

/// Commits the complete steps and returns them with their manifests.
fn commit(state: &mut AttemptState) -> BTreeMap<u64, Manifest> {
    let ready = state.uncommitted().into_iter();
    let committed = |step: Step| {
        let manifest = manifest(state, step.0).unwrap();
        state.set_committed(step);
        (step.0, manifest)
    };
    ready.map(committed).collect()
}

fn release(state: &mut AttemptState, committed: &BTreeMap<u64, Manifest>) {
    committed.keys().for_each(|&step| state.release(Step(step)));
}

/// Compares the sums that the state updates with each event with sums counted from scratch.
fn compare_sums(state: &AttemptState, model: &Model) {
    let late = |state: &&StepState| state.overdue && !state.committed;
    let partial = state.steps.values().filter(late).count() as u64;
    let totals = state.add_to(Totals::default());
    let committed = model.committed.len() as u64;
    assert_eq!((totals.committed, totals.partial), (committed, partial));
    assert_eq!(totals.open, state.open.len() as u64 - partial);
    assert_eq!(totals.bytes, (0..2).map(|step| model.sums(step).2).sum::<u64>());
    let overview = state.overview();
    assert_eq!((overview.committed, overview.open), (committed, totals.open + partial));
    assert_eq!(overview.bytes, totals.bytes);
    for step_overview in overview.steps {
        assert_eq!(
            (step_overview.files, step_overview.shards, step_overview.bytes),
            model.sums(step_overview.step.0)
        );
        let status = state.status(StepAsk { step: step_overview.step, brief: true });
        assert_eq!(
            (step_overview.files, status.shards, status.bytes),
            model.sums(step_overview.step.0)
        );
        let missing = step_overview.missing;
        let named = missing.split("; ").filter(|text| !text.is_empty());
        let named = named.map(|text| text.split(' ').nth(1).unwrap().parse().unwrap());
        assert_eq!(named.collect::<Vec<u32>>(), model.owing(step_overview.step.0), "{missing}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn a_step_is_committed_exactly_when_all_closed_and_all_files_are_there(
        ops in ops(), cut in 0.0..1.0f64
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::new(path.clone());
        let mut state = AttemptState::new(opened());
        journal.append(&Batch { at_ms: 0, events: vec![Event::Opened(opened())] }).unwrap();
        let mut written = vec![std::fs::metadata(&path).unwrap().len()];
        let mut model = Model::default();
        for (index, op) in ops.iter().enumerate() {
            let Some(event) = event(op) else {
                match op {
                    Op::Commit => model.committed.extend(commit(&mut state)),
                    Op::Release => release(&mut state, &model.committed),
                    Op::Tick => drop(state.newly_overdue(index as u64, 10)),
                    _ => {
                        let (batches, sound) = load(&path).unwrap();
                        let mut again = rebuild(&batches).unwrap();
                        model.committed.keys().for_each(|&step| again.set_committed(Step(step)));
                        // A recalled step has fewer details: both states release theirs.
                        release(&mut again, &model.committed);
                        release(&mut state, &model.committed);
                        // After a restart the next tick finds overdue steps again.
                        state.forget_overdue();
                        prop_assert_eq!(&again, &state);
                        (state, journal) = (again, Journal::after(path.clone(), &sound));
                    }
                }
                compare_sums(&state, &model);
                continue;
            };
            if let Some(step) = event.step().filter(|&step| state.is_released(step)) {
                prop_assert!(state.check(&event).is_err(), "it would be opened anew");
                state.recall(step, &model.committed[&step.0]).unwrap();
            }
            let verdict = state.check(&event);
            prop_assert_eq!(verdict.is_ok(), model.accepts(op), "{:?}: {:?}", op, &verdict);
            if verdict == Ok(Outcome::New) {
                let at_ms = index as u64;
                journal.append(&Batch { at_ms, events: vec![event.clone()] }).unwrap();
                written.push(std::fs::metadata(&path).unwrap().len());
                state.apply(&event, at_ms);
            }
            let orders = state.orders();
            prop_assert_eq!(orders.plan().map(|plan| plan.from.0), model.plans.last().copied());
            prop_assert_eq!(orders.triggers().len(), model.triggers.len());
            compare_sums(&state, &model);
            for step in 0..2 {
                let ready = model.complete(step) && !model.committed.contains_key(&step);
                prop_assert_eq!(state.uncommitted().contains(&Step(step)), ready);
                let manifest = manifest(&state, step);
                prop_assert_eq!(manifest.is_some(), ready);
                let Some(manifest) = manifest else { continue };
                let named = manifest.trigger.map(|trigger| (trigger.number, trigger.ring));
                prop_assert_eq!(named, model.trigger_of(step));
                prop_assert_eq!(manifest.files.len() as u64, model.sums(step).0);
            }
        }
        // After a crash at any byte exactly the complete lines are read.
        drop(journal);
        let bytes = std::fs::read(&path).unwrap();
        let end = (bytes.len() as f64 * cut) as usize;
        std::fs::write(&path, &bytes[..end]).unwrap();
        let (batches, sound) = load(&path).unwrap();
        let whole = written.iter().filter(|&&at| at <= end as u64).count();
        prop_assert_eq!(batches.len(), whole);
        let after = Journal::after(path.clone(), &sound)
            .append(&Batch { at_ms: 9, events: vec![] });
        after.unwrap();
        prop_assert_eq!(load(&path).unwrap().0.len(), whole + 1);
    }
}

/// Loads every durable batch and where the valid lines end.
fn load(path: &Path) -> Result<(Vec<Batch>, End), JournalError> {
    let mut batches = Vec::new();
    let end = journal::read_file(path, |batch| {
        batches.push(batch);
        Ok(())
    })?;
    Ok((batches, end))
}

#[test]
fn a_changed_line_before_the_end_is_an_error_and_a_changed_last_line_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.jsonl");
    let mut journal = Journal::new(path.clone());
    for at_ms in 0..3 {
        journal.append(&Batch { at_ms, events: vec![Event::Opened(opened())] }).unwrap();
    }
    let good = std::fs::read(&path).unwrap();
    let line = good.len() / 3;
    for (offset, dropped) in [(40, None), (line + 40, None), (2 * line + 40, Some(2))] {
        let mut bad = good.clone();
        bad[offset] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let kept = load(&path).ok().map(|(batches, _)| batches.len());
        assert_eq!(kept, dropped, "byte {offset}");
    }
    // A missing line breaks the chain of checksums, although each line is valid by itself.
    let without = [&good[..line], &good[2 * line..], b"\n"].concat();
    std::fs::write(&path, without).unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("line 2"));
}

#[test]
fn a_failed_append_leaves_an_error_and_no_second_try_is_offered() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let mut journal = Journal::new(dir.path().join("file/journal.jsonl"));
    assert!(journal.append(&Batch { at_ms: 0, events: vec![] }).is_err());
}

#[test]
fn a_journal_that_was_not_loaded_is_never_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.jsonl");
    let batch = Batch { at_ms: 0, events: vec![Event::Opened(opened())] };
    Journal::new(path.clone()).append(&batch).unwrap();
    let good = std::fs::read(&path).unwrap();
    assert!(Journal::new(path.clone()).append(&batch).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), good);
    // Nothing of an incomplete first line was acknowledged.
    std::fs::write(&path, &good[..good.len() / 2]).unwrap();
    Journal::new(path.clone()).append(&batch).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), good);
}

/// Found by `soak kill`: a tick in the batch of the last close committed before the flush.
#[test]
fn a_manifest_is_never_ahead_of_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let directory = AttemptDir::of(dir.path(), Attempt(0));
    let manifest = directory.step(Step(0)).manifest();
    let mut log = AttemptLog::open(Backend::Directory, directory, opened());
    log.flush(0);
    for rank in 0..WORLD {
        log.submit(event(&Op::Join(rank)).unwrap(), 0).unwrap();
        log.submit(event(&Op::Close { rank, step: 0, files: 0 }).unwrap(), 0).unwrap();
    }
    log.commit();
    assert!(!manifest.exists(), "committed before the closes are durable");
    log.flush(0);
    log.commit();
    assert!(manifest.exists());
}

#[test]
fn ranks_that_disagree_on_the_head_keep_the_first_and_are_named() {
    let mut state = AttemptState::new(opened());
    for rank in 0..WORLD {
        let head = crate::head::HeadDeclaration {
            z_loss: if rank == 1 { 0.5 } else { 0.0 },
            ..Default::default()
        };
        let closing = Closing { head: Some(Box::new(head)), ..Closing::default() };
        let (step, rank) = (Step(0), Rank(rank));
        state.apply(&Event::Closed { step, rank, closing }, 0);
    }
    let manifest = manifest(&state, 0).unwrap();
    assert_eq!(manifest.head.unwrap().z_loss, 0.0);
    assert_eq!(manifest.omissions.len(), 1);
    assert!(manifest.omissions[0].reason.contains("z_loss"), "{:?}", manifest.omissions);
}

#[test]
fn an_overdue_step_says_of_each_missing_rank_what_is_known() {
    let mut state = AttemptState::new(opened());
    for op in [Op::Join(0), Op::Join(1), Op::Close { rank: 0, step: 5, files: 0 }] {
        state.apply(&event(&op).unwrap(), 1000);
    }
    assert_eq!(state.newly_overdue(1999, 1000), vec![]);
    assert_eq!(state.newly_overdue(2000, 1000), vec![Step(5)]);
    assert_eq!(state.newly_overdue(3000, 1000), vec![], "named once");
    let reason = state.status(StepAsk { step: Step(5), brief: false }).reason;
    assert!(reason.contains("rank 1 on h joined, reported nothing"), "{reason}");
    assert!(reason.contains("rank 2 never joined"), "{reason}");
    for rank in 1..WORLD {
        state.apply(&event(&Op::Close { rank, step: 5, files: 0 }).unwrap(), 4000);
    }
    assert!(state.manifest(Step(5)).is_some(), "a late close still commits");
}

#[test]
fn of_thousands_of_ranks_that_owe_a_few_are_named_and_the_others_counted() {
    let mut state = AttemptState::new(Opened { world_size: 10_000, ..opened() });
    for rank in (0..10_000).filter(|rank| rank % 5 > 0) {
        let close = Op::Close { rank, step: 0, files: u32::from(rank == 9_999) };
        state.apply(&event(&close).unwrap(), 0);
    }
    let text = state.missing(Step(0));
    assert!(text.starts_with("rank 0 never joined; rank 5 never joined; "), "{text}");
    assert!(text.ends_with("rank 35 never joined; and 1993 more ranks"), "{text}");
}
