//! Looks at a reported file before it is believed: in place when the rank wrote
//! it into the store, or as it arrives when the rank sends it.
//!
//! Names are checked [`Name`]s and no link is followed, so nothing outside the
//! step's directory is read or written: it is held by its descriptor, as a path
//! may be another's by the next call.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use super::limits::MAX_ONLINE_HEADER;
use super::refusal::Refusal;
use super::request::{FileClaim, Member};
use crate::faults;
use crate::hash::ContentHash;
use crate::identity::Step;
use crate::manifest::FileRecord;
use crate::store::backend::ReadAt;
use crate::store::shard_file::{Description, describe};
use crate::store::{AttemptDir, Backend, HeldDirectory, durable};

/// Bytes hashed at a time.
const PIECE_BYTES: usize = 1 << 20;

/// A file that a member claims, and where it belongs.
#[derive(Clone, Debug)]
pub(crate) struct Claimed {
    pub(crate) backend: Backend,
    pub(crate) member: Member,
    pub(crate) step: Step,
    pub(crate) claim: FileClaim,
    pub(crate) attempt: AttemptDir,
    pub(crate) world_size: u32,
}

impl Claimed {
    fn directory(&self) -> PathBuf {
        self.attempt.step(self.step).path
    }

    fn path(&self) -> PathBuf {
        self.directory().join(self.claim.name.as_str())
    }

    fn bad(&self, detail: impl ToString) -> Refusal {
        Refusal::BadFile { path: self.path(), detail: detail.to_string() }
    }

    /// Reads the header of the file where it lies in the store.
    pub(crate) fn look(&self) -> Result<FileRecord, Refusal> {
        faults::point("intake.open").map_err(|error| self.bad(error))?;
        let path = self.path();
        let opened = match self.backend {
            Backend::Directory => self.open_held(),
            Backend::Bucket(_) => self.backend.open(&path),
        };
        let file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Refusal::FileAbsent { path },
            _ => self.bad(error),
        })?;
        self.compare(file.as_ref()).map(|(record, _)| record)
    }

    fn open_held(&self) -> io::Result<Box<dyn ReadAt>> {
        let directory = HeldDirectory::open(&self.directory())?;
        Ok(Box::new(directory.open_file(self.claim.name.as_str())?))
    }

    /// Holds the file against the claim and against who claims it.
    fn compare(&self, file: &dyn ReadAt) -> Result<(FileRecord, Description), Refusal> {
        faults::point("intake.read").map_err(|error| self.bad(error))?;
        let mut prefix = [0; 8];
        // A file that is too short says so below.
        if file.read_exact_at(&mut prefix, 0).is_ok() {
            let header = u64::from_le_bytes(prefix);
            if header > MAX_ONLINE_HEADER {
                return Err(self.bad(format!(
                    "its header has {header} bytes, at most {MAX_ONLINE_HEADER} are accepted"
                )));
            }
        }
        let found = describe(&self.path(), file).map_err(|error| self.bad(error))?;
        if found.length != self.claim.length {
            let (is, said) = (found.length, self.claim.length);
            return Err(self.bad(format!("it has {is} bytes, {said} were reported")));
        }
        if found.header_hash != self.claim.header_hash {
            let (is, said) = (found.header_hash, self.claim.header_hash);
            return Err(self.bad(format!("its header is {is}, {said} was reported")));
        }
        let (about, member) = (&found.about, &self.member);
        let own = about.run == member.run
            && about.attempt == member.attempt
            && about.rank == member.rank
            && about.step == self.step
            && about.world_size == self.world_size;
        if !own {
            let (run, attempt, step, rank) = (&about.run, about.attempt, about.step, about.rank);
            return Err(self.bad(format!(
                "it says that it is of run {run}, attempt {attempt}, step {step}, rank {rank}"
            )));
        }
        let record = FileRecord {
            name: self.claim.name.clone(),
            rank: member.rank,
            length: found.length,
            header_hash: found.header_hash,
            shards: found.about.shards.clone(),
        };
        Ok((record, found))
    }
}

/// A file that is arriving, under a scratch name in its step's directory, or on its way to a
/// bucket among this host's temporary files.
/// Dropped before it is published, it leaves nothing.
pub(crate) struct Arrival {
    claimed: Claimed,
    file: File,
    /// Where it lies until it has its name; nowhere any more once it has.
    place: Option<Place>,
    received: u64,
}

/// Where a file lies that is arriving.
enum Place {
    /// Under this name beside where it belongs.
    Beside(HeldDirectory, String),
    /// On this host, to be sent to a bucket.
    Here(PathBuf),
}

impl Arrival {
    pub(crate) fn begin(claimed: Claimed) -> Result<Arrival, Refusal> {
        let path = claimed.path();
        let storage = |error: io::Error| match error.kind() {
            io::ErrorKind::InvalidData => claimed.bad(error),
            _ => Refusal::Storage(format!("{error} at {}", path.display())),
        };
        let scratch = claimed.backend.scratch(&path);
        let (file, place) = match claimed.backend {
            Backend::Directory => {
                let held = HeldDirectory::create(&claimed.directory()).map_err(storage)?;
                let name = scratch.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let file = held.create_private(&name).map_err(storage)?;
                (file, Place::Beside(held, name))
            }
            Backend::Bucket(_) => {
                (durable::create_private(&scratch).map_err(storage)?, Place::Here(scratch))
            }
        };
        Ok(Arrival { claimed, file, place: Some(place), received: 0 })
    }

    pub(crate) fn write(&mut self, chunk: &[u8]) -> Result<(), Refusal> {
        self.received = self.received.saturating_add(chunk.len() as u64);
        if self.received > self.claimed.claim.length {
            return Err(self.claimed.bad("more bytes arrive than were announced"));
        }
        let written = faults::write_all("intake.write", &mut self.file, chunk);
        written.map_err(|error| self.storage(&error))
    }

    /// Checks every byte, then gives the file its name. A transfer is where
    /// bytes change, so every shard is hashed again.
    pub(crate) fn finish(mut self) -> Result<FileRecord, Refusal> {
        let (record, found) = self.claimed.compare(&self.file)?;
        for (shard, &span) in record.shards.iter().zip(&found.spans) {
            let hash = hash_span(&self.file, span).map_err(|error| self.storage(&error))?;
            if hash != shard.hash && !faults::seeded("hash-not-checked") {
                let detail = format!("{} arrived with other bytes than were sent", shard.key);
                return Err(self.claimed.bad(detail));
            }
        }
        let synced = faults::point("intake.sync").and_then(|()| self.file.sync_all());
        synced.map_err(|error| self.storage(&error))?;
        let created = match self.place.take() {
            Some(Place::Beside(held, scratch)) => {
                held.publish(&scratch, self.claimed.claim.name.as_str())
            }
            Some(Place::Here(scratch)) => {
                self.claimed.backend.publish(&scratch, &self.claimed.path())
            }
            None => return Err(Refusal::Storage("it was published before".into())),
        };
        if created.map_err(|error| self.storage(&error))? {
            Ok(record)
        } else {
            // It was sent before and its acknowledgement lost: the same or a conflict.
            self.claimed.look()
        }
    }

    fn storage(&self, error: &io::Error) -> Refusal {
        Refusal::Storage(format!("{error} at {}", self.claimed.path().display()))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let _ = match &self.place {
            Some(Place::Beside(held, scratch)) => held.remove(scratch),
            Some(Place::Here(scratch)) => std::fs::remove_file(scratch),
            None => Ok(()),
        };
    }
}

fn hash_span(file: &File, (mut at, end): (u64, u64)) -> io::Result<ContentHash> {
    let mut hasher = twox_hash::XxHash3_128::new();
    let mut piece = vec![0; PIECE_BYTES];
    while at < end {
        let n = usize::try_from(end - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        faults::point("intake.hash")?;
        file.read_exact_at(&mut piece[..n], at)?;
        hasher.write(&piece[..n]);
        at += n as u64;
    }
    Ok(ContentHash(hasher.finish_128()))
}
