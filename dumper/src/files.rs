//! The shard files of one step of one rank, written as the captures come: one
//! for each microbatch and one for what has none.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::placement::Reduction;
use backtape::shard::{Shard, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::{FinishedFile, Moved, ShardWriter, layout};

use crate::capture::Capture;
use crate::measure::{Measured, measure};
use crate::omissions::Omissions;
use crate::settings::Plan;

/// What makes two captures of one rank the same shard.
type Identity = (TensorKey, IndexBox, Option<Reduction>, u32);

/// The files of one step while they are written.
pub(crate) struct StepFiles {
    step: u64,
    attempt: u32,
    /// The step's directory, or the spool of a rank that streams.
    directory: PathBuf,
    /// True for a spool: the files are read again on this host, to be sent.
    spooled: bool,
    /// Counts the bytes that are written.
    moved: Moved,
    files: BTreeMap<Option<Microbatch>, OpenFile>,
    /// Shards that are not in the files, with the reason, until the step's close takes them.
    pub(crate) omissions: Omissions,
}

struct OpenFile {
    writer: ShardWriter,
    seen: BTreeMap<Identity, ContentHash>,
}

/// Hash and fingerprint of a capture's bytes, which are read for the first time here. The payload
/// is the caller's code, which may panic.
fn read_and_measured(capture: &Capture) -> Result<Measured, String> {
    let measured = catch_unwind(AssertUnwindSafe(|| {
        let bytes = capture.payload.bytes().map_err(|why| format!("it was not read: {why}"))?;
        match bytes.len() as u64 == capture.length() {
            true => Ok(measure(capture, bytes)),
            false => Err("its payload changed its length".to_owned()),
        }
    }));
    measured.map_err(|_| "its payload panicked when it was read")?
}

impl StepFiles {
    pub(crate) fn new(
        (attempt, step): (u32, u64),
        directory: PathBuf,
        spooled: bool,
        moved: Moved,
    ) -> StepFiles {
        StepFiles {
            step,
            attempt,
            directory,
            spooled,
            moved,
            files: BTreeMap::new(),
            omissions: Omissions::default(),
        }
    }

    /// Writes one shard. An error is the reason why it is not in the file.
    pub(crate) fn write(&mut self, plan: &Plan, capture: Capture) -> Result<(), String> {
        let measured = read_and_measured(&capture)?;
        let (hash, length) = (measured.hash, capture.length());
        let Capture { key, shard, payload, .. } = capture;
        let record = self.record(plan, (key, shard), length, measured);
        let Shard { place, partial, replica, .. } = &record.shard;
        let identity = (record.key.clone(), place.clone(), *partial, *replica);
        let file = self.file(plan, record.key.microbatch)?;
        match file.seen.get(&identity) {
            Some(first) if *first == hash => return Ok(()),
            Some(_) => {
                return Err("it was recorded before with other values: the first is kept; \
                 give the second another name, microbatch or when"
                    .into());
            }
            None => {}
        }
        let written = catch_unwind(AssertUnwindSafe(|| {
            let bytes = payload.bytes().map_err(std::io::Error::other)?;
            file.writer.append(record, bytes)
        }));
        match written {
            Ok(Ok(())) => {
                file.seen.insert(identity, hash);
                Ok(())
            }
            Ok(Err(error)) => Err(format!("it could not be written: {error}")),
            Err(_) => Err("its payload panicked when it was written".into()),
        }
    }

    /// What the dump will say of a shard: the job's description, and beside it who held the bytes
    /// and what they were measured to be.
    fn record(
        &self,
        plan: &Plan,
        (key, shard): (TensorKey, Shard),
        length: u64,
        measured: Measured,
    ) -> ShardRecord {
        ShardRecord {
            key,
            shard,
            rank: Rank(plan.settings.rank),
            host: plan.host.clone(),
            attempt: Attempt(self.attempt),
            mesh: plan.settings.coordinates.clone(),
            hash: measured.hash,
            length,
            fingerprint: measured.fingerprint,
            fingerprint_source: measured.source,
            // The writer chooses the entry's name.
            entry: String::new(),
        }
    }

    fn file(
        &mut self,
        plan: &Plan,
        microbatch: Option<Microbatch>,
    ) -> Result<&mut OpenFile, String> {
        use std::collections::btree_map::Entry;
        let slot = match self.files.entry(microbatch) {
            Entry::Occupied(slot) => return Ok(slot.into_mut()),
            Entry::Vacant(slot) => slot,
        };
        let rank = Rank(plan.settings.rank);
        let name: Name = layout::file_name(rank, microbatch);
        let (attempt, step) = (Attempt(self.attempt), Step(self.step));
        let about = FileSelf::new(plan.run.clone(), attempt, step, rank, plan.settings.world_size);
        let create = if self.spooled { ShardWriter::spool } else { ShardWriter::create };
        let mut writer = create(&self.directory, name, about).map_err(|error| {
            format!("no file could be made for it in {}: {error}", self.directory.display())
        })?;
        writer.count(&self.moved);
        Ok(slot.insert(OpenFile { writer, seen: BTreeMap::new() }))
    }

    /// Makes every file durable. Returns the files, and the shards that are in none of them, with
    /// the reason.
    pub(crate) fn finish(&mut self) -> (Vec<FinishedFile>, Vec<(Vec<TensorKey>, String)>) {
        let (mut finished, mut failed) = (Vec::new(), Vec::new());
        for (_, file) in std::mem::take(&mut self.files) {
            let keys: Vec<TensorKey> = file.seen.into_keys().map(|(key, ..)| key).collect();
            match file.writer.finish() {
                Ok(mut done) => {
                    let lost = std::mem::take(&mut done.lost);
                    failed.extend(lost.into_iter().map(|(key, reason)| (vec![key], reason)));
                    finished.push(done);
                }
                Err(error) => {
                    failed.push((keys, format!("its file could not be made durable: {error}")));
                }
            }
        }
        (finished, failed)
    }

    /// Names shards that were written and are nevertheless not in the dump.
    pub(crate) fn omit_all(&mut self, keys: &[TensorKey], reason: &str) {
        for key in keys {
            let microbatch = key.microbatch.map(|mb| mb.0);
            self.omissions.add(key.tensor.as_str(), microbatch, reason);
        }
    }
}
