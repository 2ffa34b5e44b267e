//! Writes one shard file as the shards come, without holding them.
//!
//! The header stands first in a safetensors file and is known last, so room is
//! reserved for it. Where a header outgrows its room the file system inserts what is missing;
//! one that cannot costs a copy of the file.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

use super::backend::Backend;
use super::durable;
use super::header::{self, FileSelf};
use super::pieces::{Moved, Pieces, Torn};
use crate::faults;
use crate::hash::TrustHash;
use crate::identity::Name;
use crate::manifest::FileRecord;
use crate::shard::{ShardRecord, TensorKey};

/// Room reserved for the header: about 80 shards.
const HEADER_ROOM: usize = 64 << 10;

/// A shard file that is being written, under a scratch name beside its own.
pub struct ShardWriter {
    name: Name,
    scratch: PathBuf,
    pieces: Pieces,
    about: FileSelf,
    data: u64,
    /// How many shards have each name.
    same: HashMap<String, u32>,
    lost: Vec<(TensorKey, String)>,
    /// Whether its bytes are to survive a power cut.
    durable: bool,
}

/// A shard file that is complete and synced, still under its scratch name.
pub struct FinishedFile {
    /// What to report of it.
    pub record: FileRecord,
    /// Shards that were appended and are not in it, with the reason: their bytes were on their
    /// way when a write failed.
    pub lost: Vec<(TensorKey, String)>,
    scratch: PathBuf,
}

impl ShardWriter {
    /// Starts a file that will be `directory/name`.
    pub fn create(directory: &Path, name: Name, about: FileSelf) -> io::Result<ShardWriter> {
        ShardWriter::begin(directory, name, about, true)
    }

    /// Starts a file on its way to somewhere else. It is read again at once, so it stays in the
    /// page cache, and it is not synced: nothing is acknowledged before it has arrived.
    pub fn spool(directory: &Path, name: Name, about: FileSelf) -> io::Result<ShardWriter> {
        ShardWriter::begin(directory, name, about, false)
    }

    fn begin(
        directory: &Path,
        name: Name,
        about: FileSelf,
        durable: bool,
    ) -> io::Result<ShardWriter> {
        durable::create_directory(directory)?;
        let scratch = durable::scratch_beside(&directory.join(name.as_str()));
        let file = durable::create_private(&scratch)?;
        let pieces = Pieces::new(file, HEADER_ROOM as u64, durable);
        let (same, lost) = (HashMap::new(), Vec::new());
        Ok(ShardWriter { name, scratch, pieces, about, data: 0, same, lost, durable })
    }

    /// Appends one shard. The record's `entry` is chosen here: the tensor's
    /// name, with a number when the file holds several shards of it. A write that fails later
    /// takes its shards out again: see [`FinishedFile::lost`].
    pub fn append(&mut self, mut record: ShardRecord, bytes: &[u8]) -> io::Result<()> {
        let base = entry_base(&record);
        let same = self.same.get(&base).copied().unwrap_or(0);
        record.entry = if same == 0 { base.clone() } else { format!("{base}#{same}") };
        record.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        // A shard that fails (a full disk) is overwritten by the next one, and the file stays
        // sound.
        faults::point("shard.write")?;
        self.push(bytes)?;
        self.data += bytes.len() as u64;
        self.about.shards.push(record);
        *self.same.entry(base).or_default() += 1;
        Ok(())
    }

    fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        if faults::seeded("ignored-short-write") {
            let zeros = vec![0; bytes.len() / 2];
            let half = self.pieces.push(&bytes[zeros.len()..]);
            return half.and_then(|()| self.pieces.push(&zeros)).map_err(|torn| torn.error);
        }
        let alone = self.pieces.is_plain();
        match self.pieces.push(bytes) {
            Ok(()) => Ok(()),
            Err(torn) if alone => Err(torn.error),
            // It may have been an earlier shard: what has failed is named, this one tried again.
            Err(torn) => {
                self.tear(&torn);
                self.pieces.push(bytes).map_err(|torn| torn.error)
            }
        }
    }

    /// Takes out what a failed write left incomplete; the file goes on from there.
    fn tear(&mut self, torn: &Torn) {
        let sound = torn.from.saturating_sub(HEADER_ROOM as u64);
        let (mut end, mut kept) = (0, 0);
        for shard in &self.about.shards {
            if end + shard.length > sound {
                break;
            }
            end += shard.length;
            kept += 1;
        }
        let reason = format!("it could not be written: {}", torn.error);
        let lost = self.about.shards.drain(kept..);
        self.lost.extend(lost.map(|shard| (shard.key, reason.clone())));
        // Names count on: what is lost leaves a gap in the numbers, and no name is given twice.
        self.data = end;
        self.pieces.restart(HEADER_ROOM as u64 + end);
    }

    /// Counts there what is written from now on.
    pub fn count(&mut self, moved: &Moved) {
        self.pieces.count(moved);
    }

    /// Bytes of shards so far.
    pub fn data_length(&self) -> u64 {
        self.data
    }

    /// Writes the header and makes the contents durable.
    pub fn finish(mut self) -> io::Result<FinishedFile> {
        if let Err(torn) = self.pieces.finish() {
            self.tear(&torn);
        }
        let header = header::encode(&self.about, HEADER_ROOM)?;
        faults::point("shard.resize")?;
        self.pieces.file().set_len(HEADER_ROOM as u64 + self.data)?;
        if header.len() > HEADER_ROOM {
            self.make_room(header.len())?;
        }
        faults::point("shard.header")?;
        self.pieces.file().write_all_at(&header, 0)?;
        faults::point("shard.sync")?;
        if self.durable && !faults::seeded("name-before-data") {
            self.pieces.file().sync_all()?;
        }
        let record = FileRecord {
            name: self.name.clone(),
            rank: self.about.rank,
            length: header.len() as u64 + self.data,
            header_hash: TrustHash::of(&header),
            shards: std::mem::take(&mut self.about.shards),
        };
        let lost = std::mem::take(&mut self.lost);
        let scratch = std::mem::take(&mut self.scratch);
        Ok(FinishedFile { record, lost, scratch })
    }

    /// Moves the data back, so that a header of `room` bytes stands before it.
    fn make_room(&mut self, room: usize) -> io::Result<()> {
        faults::point("shard.move")?;
        let more = (room - HEADER_ROOM) as u64;
        let insert = FallocateFlags::INSERT_RANGE;
        match fallocate(self.pieces.file(), insert, HEADER_ROOM as u64, more) {
            Ok(()) => Ok(()),
            // tmpfs, btrfs and others have no such call, or larger blocks.
            Err(_) => self.move_data(room),
        }
    }

    /// Copies the data into a new file that has room for a larger header.
    fn move_data(&mut self, room: usize) -> io::Result<()> {
        let wider = self.scratch.with_extension("wide.tmp");
        let mut target = durable::create_private(&wider)?;
        target.seek(SeekFrom::Start(room as u64))?;
        let mut source: &File = self.pieces.file();
        source.seek(SeekFrom::Start(HEADER_ROOM as u64))?;
        let copied = io::copy(&mut source, &mut target).and_then(|n| {
            if n == self.data { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        });
        copied.and_then(|()| std::fs::rename(&wider, &self.scratch)).inspect_err(|_| {
            let _ = std::fs::remove_file(&wider);
        })?;
        self.pieces.replace(target);
        Ok(())
    }
}

/// The same name may be captured before and after a reduction in one file.
fn entry_base(record: &ShardRecord) -> String {
    match record.key.when.map(|when| serde_json::to_value(when).expect("a unit variant")) {
        Some(serde_json::Value::String(when)) => format!("{}@{when}", record.key.tensor),
        _ => record.key.tensor.to_string(),
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if !self.scratch.as_os_str().is_empty() {
            let _ = std::fs::remove_file(&self.scratch);
        }
    }
}

impl FinishedFile {
    /// Where the synced bytes are before they have their name.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// Gives the file its name; durable when this returns. False when a file of
    /// that name was there, which is then left alone.
    pub fn publish(mut self) -> io::Result<(FileRecord, bool)> {
        let target = self.scratch.with_file_name(self.record.name.as_str());
        let created = durable::publish(&self.scratch, &target)?;
        self.scratch = PathBuf::new();
        Ok((self.record.clone(), created))
    }

    /// Puts the file into a directory of another backend; durable when this returns. False
    /// when a file of that name was there. Counts what has left this host.
    pub fn put(&self, backend: &Backend, directory: &Path, moved: &Moved) -> io::Result<bool> {
        let target = directory.join(self.record.name.as_str());
        backend.publish_counted(&self.scratch, &target, moved)
    }
}

impl Drop for FinishedFile {
    fn drop(&mut self) {
        if !self.scratch.as_os_str().is_empty() {
            let _ = std::fs::remove_file(&self.scratch);
        }
    }
}

#[cfg(test)]
mod tests;
