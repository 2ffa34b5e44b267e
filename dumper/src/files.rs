//! The shard files of one step of one rank, written as the captures come: one
//! for each microbatch and one for what has none.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use backtape::fingerprint::Fingerprint;
use backtape::hash::ContentHash;
use backtape::identity::{Attempt, Microbatch, Name, Rank, Step};
use backtape::index_box::IndexBox;
use backtape::placement::Reduction;
use backtape::shard::{FingerprintSource, ShardRecord, TensorKey};
use backtape::store::header::FileSelf;
use backtape::store::{FinishedFile, Moved, ShardWriter, layout};

use crate::capture::Queued;
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
    /// Whether they are read again here, to be sent.
    spooled: bool,
    /// Where bytes that are written are counted.
    moved: Moved,
    files: BTreeMap<Option<Microbatch>, OpenFile>,
    /// What did not get in since the last look, for the step's close.
    pub(crate) omissions: Omissions,
}

struct OpenFile {
    writer: ShardWriter,
    seen: BTreeMap<Identity, ContentHash>,
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
    pub(crate) fn write(&mut self, plan: &Plan, queued: Queued) -> Result<(), String> {
        // The payload is the caller's code: it may panic here too.
        let measured = catch_unwind(AssertUnwindSafe(|| {
            let bytes = queued.payload.bytes().map_err(|why| format!("it was not read: {why}"))?;
            match bytes.len() as u64 == queued.length {
                true => Ok(measure(&queued, bytes)),
                false => Err("its payload changed its length".to_owned()),
            }
        }));
        let measured = measured.map_err(|_| "its payload panicked when it was read")?;
        let Measured { hash, fingerprint, source } = measured?;
        let identity = (queued.key.clone(), queued.place.clone(), queued.partial, queued.replica);
        let file = self.file(plan, queued.key.microbatch)?;
        match file.seen.get(&identity) {
            Some(first) if *first == hash => return Ok(()),
            Some(_) => {
                return Err("it was recorded before with other values: the first is kept; \
                 give the second another name, microbatch or when"
                    .into());
            }
            None => {}
        }
        let record = self.record(plan, &queued, (hash, fingerprint, source));
        let file = self.file(plan, queued.key.microbatch)?;
        let written = catch_unwind(AssertUnwindSafe(|| {
            let bytes = queued.payload.bytes().map_err(std::io::Error::other)?;
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

    fn record(
        &self,
        plan: &Plan,
        queued: &Queued,
        (hash, fingerprint, source): (ContentHash, Fingerprint, FingerprintSource),
    ) -> ShardRecord {
        ShardRecord {
            key: queued.key.clone(),
            role: queued.role,
            dtype: queued.dtype,
            shape: queued.shape.clone(),
            place: queued.place.clone(),
            rank: Rank(plan.settings.rank),
            host: plan.host.clone(),
            attempt: Attempt(self.attempt),
            mesh: plan.settings.coordinates.clone(),
            placement: queued.placement.clone(),
            partial: queued.partial,
            replica: queued.replica,
            hash,
            length: queued.length,
            fingerprint,
            fingerprint_source: source,
            compiled: queued.compiled,
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

    /// Makes every file durable; and the shards that are in none, with the reason.
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
