//! What runs while the power is cut: backtape's own code, until it fails.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use backtape::coordinator::channel::Rpc;
use backtape::dtype::Dtype;
use backtape::hash::TrustHash;
use backtape::identity::{Attempt, Microbatch, Name, Step};
use backtape::index_box::IndexBox;
use backtape::manifest::FileRecord;
use backtape::role::Role;
use backtape::shard::TensorKey;
use backtape::store::{AttemptDir, durable};
use backtape_dumper::{Capture, Recorder, Settings};
use backtape_proto as proto;
use proto::upload_file_request::Part;
use tokio::runtime::Handle;

use super::ledger::{File, Ledger};
use crate::small_dump::{Owner, Shard, content, write_file};

pub(crate) const RUN: &str = "job";
pub(crate) const RANKS: u32 = 2;
/// More than gets done before any cut: who gets this far was not cut.
const MOST: u64 = 4096;
pub(crate) const LONGEST_FILE: u64 = 48 << 10;

/// What one cycle works on.
pub(crate) struct Cycle<'a> {
    pub(crate) seed: u64,
    pub(crate) number: u64,
    pub(crate) mount: &'a Path,
    /// Outside of the image.
    pub(crate) spool: &'a Path,
    pub(crate) ledger: &'a Mutex<Ledger>,
    /// Set before the power goes: what fails earlier is a fault.
    pub(crate) cut: &'a AtomicBool,
    /// How often somebody was told that something is durable.
    pub(crate) acknowledged: &'a AtomicU64,
}

/// A rank that goes on where it was, or begins anew as another process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) incarnation: u64,
    pub(crate) attempt: u32,
    pub(crate) next: u64,
}

impl Cycle<'_> {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters what was acknowledged, unless the power is gone: nobody is told anything then, and
    /// what a cut file system answers to those who still run here is worth nothing (xfs lets an
    /// fsync of a directory succeed).
    fn told(&self, enter: impl FnOnce(&mut Ledger)) {
        let mut ledger = self.ledger();
        if !self.cut.load(Ordering::SeqCst) {
            enter(&mut ledger);
            self.acknowledged.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Notes how a worker ended; after the cut every end is right.
    fn ended(&self, who: &str, how: Result<()>) {
        if let (Err(error), false) = (how, self.cut.load(Ordering::SeqCst)) {
            let said = format!("{who} before the cut: {error:#}");
            // Of two new processes one may have entered the old attempt before the other opened
            // the next: it is told to start again, and in this cycle it is not.
            if !said.contains("was superseded by attempt") {
                self.ledger().refused.push(said);
            }
        }
    }

    /// The store's durable writes by themselves, acknowledged as soon as they return.
    pub(crate) fn files(&self) {
        self.ended("files", self.write_files());
    }

    fn write_files(&self) -> Result<()> {
        let below = PathBuf::from(format!("files/{:06}", self.number));
        let directory = self.mount.join(&below);
        durable::create_directory(&directory)?;
        for i in 0..MOST {
            let coordinates = (self.number << 16) | i;
            match i % 3 {
                0 => {
                    let path = below.join(format!("created-{i}"));
                    let bytes = content(self.seed, coordinates, LONGEST_FILE);
                    durable::create(&self.mount.join(&path), &bytes)?;
                    self.told(|ledger| _ = ledger.created.insert(path, coordinates));
                }
                1 => {
                    let version = self.ledger().replaced.1 + 1;
                    self.ledger().replaced.1 = version;
                    let bytes = content(self.seed, version, LONGEST_FILE);
                    let bytes = [&version.to_le_bytes()[..], &bytes].concat();
                    durable::replace(&self.mount.join("replaced"), &bytes)?;
                    self.told(|ledger| ledger.replaced.0 = version);
                }
                _ => {
                    let owner = owner(0, i, 0)?;
                    let bytes = content(self.seed, coordinates, LONGEST_FILE);
                    let shard = Shard::bytes_of(Name::new("q")?, Some(i as u32), &owner, bytes);
                    let written = write_file(&directory, &owner, Some(i as u32), &[&shard])?;
                    let (record, _) = written.publish()?;
                    let file = acknowledged(below.join(record.name.as_str()), &record);
                    self.told(|ledger| ledger.files.push(file));
                }
            }
        }
        Ok(())
    }

    /// One rank of a job, through the coordinator.
    pub(crate) fn rank(&self, rank: u32, place: &mut Place, mut rpc: Rpc, runtime: &Handle) {
        self.ended(&format!("rank {rank}"), self.run_rank(rank, place, &mut rpc, runtime));
    }

    fn run_rank(&self, rank: u32, place: &mut Place, rpc: &mut Rpc, on: &Handle) -> Result<()> {
        let join = proto::JoinRequest {
            run: RUN.into(),
            rank,
            world_size: RANKS,
            incarnation: place.incarnation,
            host: "host-a".into(),
            format_version: backtape::FORMAT_VERSION,
            ..Default::default()
        };
        let entered = on.block_on(rpc.join(join))?.into_inner();
        if entered.attempt != place.attempt {
            *place = Place { attempt: entered.attempt, next: 0, ..*place };
        }
        let hash = TrustHash(entered.run_record.as_ref().try_into()?);
        self.told(|ledger| _ = ledger.runs.insert(entered.attempt, hash));
        while place.next < MOST {
            let step = place.next;
            self.ledger().touched.insert((place.attempt, step));
            let files = [Some(0), None];
            for microbatch in files {
                self.deliver(rank, *place, microbatch, rpc, on)?;
            }
            let close = proto::CloseStepRequest {
                member: Some(member(rank, *place)),
                step,
                files: files.len() as u32,
                ..Default::default()
            };
            let committed = on.block_on(rpc.close_step(close))?.into_inner().committed;
            self.told(|ledger| {
                let entry = ledger.steps.entry((place.attempt, step)).or_default();
                entry.closed.insert(rank);
                entry.committed |= committed;
            });
            place.next += 1;
        }
        Ok(())
    }

    /// Writes a file into the store, or sends it, and has it acknowledged.
    fn deliver(
        &self,
        rank: u32,
        place: Place,
        microbatch: Option<u32>,
        rpc: &mut Rpc,
        on: &Handle,
    ) -> Result<()> {
        let (attempt, step) = (place.attempt, place.next);
        let owner = owner(attempt, step, rank)?;
        let tensor = Name::new(if microbatch.is_some() { "q" } else { "k" })?;
        let coordinates = (u64::from(attempt) << 40) | (step << 8) | u64::from(rank * 2 + 1);
        // Both ranks hold equally much of a tensor.
        let mut bytes = content(self.seed, coordinates, 1 << 14);
        bytes.resize(1 << 12, rank as u8);
        let shard = Shard::bytes_of(tensor, microbatch, &owner, bytes);
        let below = AttemptDir::of(Path::new(RUN), Attempt(attempt)).step(Step(step)).path;
        let sent = (step + u64::from(rank)).is_multiple_of(3);
        let directory =
            if sent { self.spool.join(rank.to_string()) } else { self.mount.join(&below) };
        let written = write_file(&directory, &owner, microbatch, &[&shard])?;
        let report = |record: &FileRecord| proto::ReportFileRequest {
            member: Some(member(rank, place)),
            step,
            file: Some(proto::FileReport {
                name: record.name.to_string(),
                length: record.length,
                header_hash: record.header_hash.0.to_vec().into(),
            }),
        };
        let record = if sent {
            let bytes = bytes::Bytes::from(std::fs::read(written.scratch())?);
            let parts = [Part::Header(report(&written.record)), Part::Chunk(bytes)];
            let parts = parts.map(|part| proto::UploadFileRequest { part: Some(part) });
            on.block_on(rpc.upload_file(tokio_stream::iter(parts)))?;
            written.record.clone()
        } else {
            let (record, _) = written.publish()?;
            on.block_on(rpc.report_file(report(&record)))?;
            record
        };
        let file = acknowledged(below.join(record.name.as_str()), &record);
        self.told(|ledger| {
            let entry = ledger.steps.entry((attempt, step)).or_default();
            entry.files.insert(file.path.clone(), file);
        });
        Ok(())
    }

    /// Two recorders with the coordinator inside rank 0, as a job has them.
    pub(crate) fn recorders(&self) {
        let run = format!("recorded-{:06}", self.number);
        std::thread::scope(|scope| {
            for rank in 0..RANKS {
                let run = run.clone();
                scope.spawn(move || self.ended("a recorder", self.record(rank, &run)));
            }
        });
    }

    fn record(&self, rank: u32, run: &str) -> Result<()> {
        let mut settings = Settings::new(self.mount, rank, RANKS);
        settings.run = Some(run.into());
        settings.selection.steps = "0-3".parse()?;
        // Soon past the cut, when nothing answers any more.
        settings.join_deadline = Duration::from_millis(300);
        settings.step_deadline = Duration::from_millis(300);
        let mut recorder = Recorder::start(settings)?;
        for step in 0..4 {
            let tape = recorder.step(step)?;
            for microbatch in [Some(0), None] {
                let bytes = vec![step as u8; 1000];
                let start = u64::from(rank) * 1000;
                // Recording fails open: what does not get in is in the summary.
                let place = IndexBox(vec![(start, start + 1000)]);
                let mut shard = backtape::shard::Shard::new(Dtype::U8, vec![2000], place);
                shard.role = Some(Role::Q);
                let tensor = Name::new("q")?;
                let microbatch = microbatch.map(Microbatch);
                let key = TensorKey { tensor, microbatch, when: None };
                let _ = tape.record(Capture::new(key, shard, Box::new(bytes)));
            }
            tape.close()?;
        }
        // Looks until all is told, or the power is gone; a job would go on training.
        let mut told = (0, 0);
        while !self.cut.load(Ordering::SeqCst) {
            let summary = recorder.summary();
            if summary.shards > told.0 || summary.steps_committed.len() > told.1 {
                told = (summary.shards, summary.steps_committed.len());
                self.told(|ledger| {
                    let entry = ledger.recorded.entry((run.into(), rank)).or_default();
                    entry.committed.extend(summary.steps_committed.iter());
                    entry.shards = summary.shards;
                });
            }
            std::thread::park_timeout(Duration::from_micros(50));
        }
        recorder.close()?;
        Ok(())
    }
}

fn owner(attempt: u32, step: u64, rank: u32) -> Result<Owner> {
    Ok(Owner { run: Name::new(RUN)?, attempt, step, rank, world_size: RANKS })
}

fn member(rank: u32, place: Place) -> proto::Member {
    let (attempt, incarnation) = (place.attempt, place.incarnation);
    proto::Member { run: RUN.into(), attempt, rank, incarnation }
}

fn acknowledged(path: PathBuf, record: &FileRecord) -> File {
    File { path, header_hash: record.header_hash, shards: record.shards.len() as u64 }
}
