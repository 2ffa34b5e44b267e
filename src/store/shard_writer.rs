//! Writes one shard file as the shards come, without holding them.
//!
//! The header stands first in a safetensors file and is known last, so room is
//! reserved for it. A header that outgrows its room costs one copy of the file.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::backend::Backend;
use super::durable;
use super::header::{self, FileSelf};
use crate::faults;
use crate::hash::TrustHash;
use crate::identity::Name;
use crate::manifest::FileRecord;
use crate::shard::ShardRecord;

/// Room reserved for the header: about 80 shards.
const HEADER_ROOM: usize = 64 << 10;

/// A shard file that is being written, under a scratch name beside its own.
pub struct ShardWriter {
    name: Name,
    scratch: PathBuf,
    file: File,
    about: FileSelf,
    data: u64,
}

/// A shard file that is complete and synced, still under its scratch name.
pub struct FinishedFile {
    /// What to report of it.
    pub record: FileRecord,
    scratch: PathBuf,
}

impl ShardWriter {
    /// Starts a file that will be `directory/name`.
    pub fn create(directory: &Path, name: Name, about: FileSelf) -> io::Result<ShardWriter> {
        durable::create_directory(directory)?;
        let scratch = durable::scratch_beside(&directory.join(name.as_str()));
        let file = durable::create_private(&scratch)?;
        Ok(ShardWriter { name, scratch, file, about, data: 0 })
    }

    /// Appends one shard. The record's `entry` is chosen here: the tensor's
    /// name, with a number when the file holds several shards of it.
    pub fn append(&mut self, mut record: ShardRecord, bytes: &[u8]) -> io::Result<()> {
        let base = entry_base(&record);
        let same = self.about.shards.iter().filter(|shard| entry_base(shard) == base).count();
        record.entry = if same == 0 { base } else { format!("{base}#{same}") };
        record.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        // At its own offset: a shard that failed half-way (a full disk) is
        // overwritten by the next one, and the file stays sound.
        faults::point("shard.write")?;
        let short = if faults::seeded("ignored-short-write") { bytes.len() / 2 } else { 0 };
        self.file.write_all_at(&bytes[short..], HEADER_ROOM as u64 + self.data)?;
        self.data += bytes.len() as u64;
        self.about.shards.push(record);
        Ok(())
    }

    /// Bytes of shards so far.
    pub fn data_length(&self) -> u64 {
        self.data
    }

    /// Writes the header and makes the contents durable.
    pub fn finish(mut self) -> io::Result<FinishedFile> {
        let header = header::encode(&self.about, HEADER_ROOM)?;
        faults::point("shard.resize")?;
        self.file.set_len(HEADER_ROOM as u64 + self.data)?;
        if header.len() > HEADER_ROOM {
            self.move_data(header.len())?;
        }
        faults::point("shard.header")?;
        self.file.write_all_at(&header, 0)?;
        faults::point("shard.sync")?;
        if !faults::seeded("name-before-data") {
            self.file.sync_all()?;
        }
        let record = FileRecord {
            name: self.name.clone(),
            rank: self.about.rank,
            length: header.len() as u64 + self.data,
            header_hash: TrustHash::of(&header),
            shards: std::mem::take(&mut self.about.shards),
        };
        let scratch = std::mem::take(&mut self.scratch);
        Ok(FinishedFile { record, scratch })
    }

    /// Copies the data into a new file that has room for a larger header.
    fn move_data(&mut self, room: usize) -> io::Result<()> {
        let wider = self.scratch.with_extension("wide.tmp");
        let mut target = durable::create_private(&wider)?;
        faults::point("shard.move")?;
        target.seek(SeekFrom::Start(room as u64))?;
        self.file.seek(SeekFrom::Start(HEADER_ROOM as u64))?;
        let copied = io::copy(&mut self.file, &mut target).and_then(|n| {
            if n == self.data { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        });
        copied.and_then(|()| std::fs::rename(&wider, &self.scratch)).inspect_err(|_| {
            let _ = std::fs::remove_file(&wider);
        })?;
        self.file = target;
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
    /// when a file of that name was there.
    pub fn put(&self, backend: &Backend, directory: &Path) -> io::Result<bool> {
        backend.publish(&self.scratch, &directory.join(self.record.name.as_str()))
    }
}

impl Drop for FinishedFile {
    fn drop(&mut self) {
        if !self.scratch.as_os_str().is_empty() {
            let _ = std::fs::remove_file(&self.scratch);
        }
    }
}
