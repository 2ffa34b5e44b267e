//! Writes the shards of one file as they arrive, without keeping them in memory.
//!
//! The header is at the beginning of a safetensors file but is only known at the end, so that room
//! is reserved for it. If the header is longer, a short file, whose data is still in memory, is
//! written behind it; otherwise the file system inserts blocks before the data; if it cannot, the
//! data is copied to a new file.

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

/// Room that is reserved for the header of a file that is written before its end: about 80 shards.
const HEADER_ROOM: usize = 64 << 10;

/// A shard file that is being written, under a temporary name in the same directory.
pub struct ShardWriter {
    name: Name,
    scratch: PathBuf,
    pieces: Pieces,
    about: FileSelf,
    /// Where the data begins in the file.
    room: usize,
    data: u64,
    /// Number of shards per entry name.
    same: HashMap<String, u32>,
    lost: Vec<(TensorKey, String)>,
    /// Whether to fsync it.
    durable: bool,
}

/// A shard file that is complete and synced, still under its temporary name.
pub struct FinishedFile {
    /// The file's record for the manifest.
    pub record: FileRecord,
    /// Shards that were appended but whose write failed later, with the reason; the file does not
    /// contain them.
    pub lost: Vec<(TensorKey, String)>,
    scratch: PathBuf,
}

impl ShardWriter {
    /// Starts a file that will be `directory/name`.
    pub fn create(directory: &Path, name: Name, about: FileSelf) -> io::Result<ShardWriter> {
        ShardWriter::begin(directory, name, about, true)
    }

    /// Starts a file that will be uploaded. Since the upload reads it soon, it is written through
    /// the page cache, and it is not synced: it counts only once the upload is complete.
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
        let room = HEADER_ROOM;
        Ok(ShardWriter { name, scratch, pieces, about, room, data: 0, same, lost, durable })
    }

    /// Appends one shard and sets the record's `entry`: the tensor's name, with a number if the
    /// file has several shards of it. The bytes are written later; if that fails, the shard moves
    /// to [`FinishedFile::lost`].
    pub fn append(&mut self, mut record: ShardRecord, bytes: &[u8]) -> io::Result<()> {
        let base = entry_base(&record);
        let same = self.same.get(&base).copied().unwrap_or(0);
        record.entry = if same == 0 { base.clone() } else { format!("{base}#{same}") };
        record.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        // If this fails (a full disk), `data` stays where it is: the next shard overwrites this one
        // and the file stays valid.
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
        let is_of_this_push = self.pieces.is_plain();
        match self.pieces.push(bytes) {
            Ok(()) => Ok(()),
            Err(torn) if is_of_this_push => Err(torn.error),
            // The failed bytes may be an earlier shard's: those are listed as lost, and this one is
            // tried again.
            Err(torn) => {
                self.tear(&torn);
                self.pieces.push(bytes).map_err(|torn| torn.error)
            }
        }
    }

    /// Removes the shards that a failed write left incomplete and continues the file after the last
    /// complete one.
    fn tear(&mut self, torn: &Torn) {
        let sound = torn.from.saturating_sub(self.room as u64);
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
        // `same` is not decremented: lost shards leave a gap in the numbers, and no name is used
        // twice.
        self.data = end;
        self.pieces.restart(self.room as u64 + end);
    }

    /// Adds the bytes written from now on to `moved`.
    pub fn count(&mut self, moved: &Moved) {
        self.pieces.count(moved);
    }

    /// Bytes of the shards appended so far.
    pub fn data_length(&self) -> u64 {
        self.data
    }

    /// Writes the header and makes the contents durable.
    pub fn finish(mut self) -> io::Result<FinishedFile> {
        let mut header = header::encode(&self.about, self.room)?;
        if self.pieces.begin_at(header.len() as u64) {
            self.room = header.len();
        }
        if let Err(torn) = self.pieces.finish() {
            self.tear(&torn);
            header = header::encode(&self.about, self.room)?;
        }
        faults::point("shard.resize")?;
        self.pieces.file().set_len(self.room as u64 + self.data)?;
        if header.len() > self.room {
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
        let more = (room - self.room) as u64;
        let insert = FallocateFlags::INSERT_RANGE;
        match fallocate(self.pieces.file(), insert, self.room as u64, more) {
            Ok(()) => Ok(()),
            // tmpfs, btrfs and others do not support it, or have larger blocks.
            Err(_) => self.move_data(room),
        }
    }

    /// Copies the data into a new file that has room for a larger header.
    fn move_data(&mut self, room: usize) -> io::Result<()> {
        let wider = self.scratch.with_extension("wide.tmp");
        let mut target = durable::create_private(&wider)?;
        target.seek(SeekFrom::Start(room as u64))?;
        let mut source: &File = self.pieces.file();
        source.seek(SeekFrom::Start(self.room as u64))?;
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

/// The entry's name without a number: the tensor's, with the moment of capture if there is one,
/// since one file may hold a tensor before and after a reduction.
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
    /// The path of the file before it is published.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// Gives the file its final name; durable when this returns. False if a file of that name
    /// existed, which stays unchanged.
    pub fn publish(mut self) -> io::Result<(FileRecord, bool)> {
        let created = self.name()?;
        Ok((self.take_record(), created))
    }

    /// As [`FinishedFile::publish`] does, for whoever needs the record where that fails too.
    pub fn name(&mut self) -> io::Result<bool> {
        let target = self.scratch.with_file_name(self.record.name.as_str());
        let created = durable::publish(&self.scratch, &target)?;
        self.scratch = PathBuf::new();
        Ok(created)
    }

    /// Moves the record out, whose shards may be thousands.
    pub fn take_record(&mut self) -> FileRecord {
        let shards = std::mem::take(&mut self.record.shards);
        FileRecord { shards, ..self.record.clone() }
    }

    /// Uploads the file to a directory of another backend; durable when this returns. False if a
    /// file of that name existed. Adds the uploaded bytes to `moved`.
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
