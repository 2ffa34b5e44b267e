//! Checks a reported file before it is accepted: in the store if the rank wrote it there, or while
//! it arrives if the rank uploads it.
//!
//! Nothing outside the step's directory is read or written: names are checked [`Name`]s, no
//! symbolic link is followed, and the directory is kept open by its descriptor, since its path
//! could be replaced between two calls.

use std::io;
use std::path::PathBuf;

use twox_hash::XxHash3_128;

use super::limits::MAX_ONLINE_HEADER;
use super::looks::{Looks, Seat};
use super::refusal::Refusal;
use super::request::{FileClaim, Member};
use crate::faults;
use crate::hash::ContentHash;
use crate::identity::Step;
use crate::manifest::FileRecord;
use crate::store::backend::ReadAt;
use crate::store::pieces::Pieces;
use crate::store::shard_file::{Description, describe, describe_header};
use crate::store::{AttemptDir, Backend, HeldDirectory, durable};

/// Files up to this length count as all header, without a look at the length of their header.
const SMALL_BYTES: u64 = 1 << 20;

/// A file that a member says it wrote, and where in the store it belongs.
#[derive(Clone, Debug)]
pub(crate) struct Claimed {
    pub(crate) backend: Backend,
    pub(crate) member: Member,
    pub(crate) step: Step,
    pub(crate) claim: FileClaim,
    pub(crate) attempt: AttemptDir,
    pub(crate) world_size: u32,
}

impl FileClaim {
    /// Whether [`Claimed::weight`] reads from the file.
    pub(crate) fn is_asked(&self) -> bool {
        self.length > SMALL_BYTES
    }
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

    fn too_large(&self, header: u64) -> Refusal {
        self.bad(format!("its header has {header} bytes, at most {MAX_ONLINE_HEADER} are accepted"))
    }

    /// The most bytes of header that [`Claimed::look`] will read. Errors are left to that call.
    pub(crate) fn weight(&self) -> u64 {
        if !self.claim.is_asked() {
            return self.claim.length;
        }
        let mut prefix = [0; 8];
        let read = self
            .open()
            .and_then(|file| file.read_exact_at(&mut prefix, 0).map_err(|error| self.bad(error)));
        read.map_or(SMALL_BYTES, |()| u64::from_le_bytes(prefix).min(MAX_ONLINE_HEADER))
    }

    /// Reads the header of the file where it lies in the store.
    pub(crate) fn look(&self) -> Result<FileRecord, Refusal> {
        faults::point("intake.open").map_err(|error| self.bad(error))?;
        self.compare(self.open()?.as_ref())
    }

    fn open(&self) -> Result<Box<dyn ReadAt>, Refusal> {
        let path = self.path();
        let opened = match self.backend {
            Backend::Directory => self.open_held(),
            Backend::Bucket(_) => self.backend.open(&path),
        };
        opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Refusal::FileAbsent { path },
            _ => self.bad(error),
        })
    }

    fn open_held(&self) -> io::Result<Box<dyn ReadAt>> {
        let directory = HeldDirectory::open(&self.directory())?;
        Ok(Box::new(directory.open_file(self.claim.name.as_str())?))
    }

    /// Checks the file against the claim and against the member that makes it.
    fn compare(&self, file: &dyn ReadAt) -> Result<FileRecord, Refusal> {
        faults::point("intake.read").map_err(|error| self.bad(error))?;
        let mut prefix = [0; 8];
        // `describe` below reports a file that is too short.
        if file.read_exact_at(&mut prefix, 0).is_ok() {
            let header = u64::from_le_bytes(prefix);
            if header > MAX_ONLINE_HEADER {
                return Err(self.too_large(header));
            }
            // Memory was reserved for the claimed length only.
            if header > self.claim.length {
                let said = self.claim.length;
                return Err(self.bad(format!("its header has {header} bytes, it {said} in all")));
            }
        }
        let description = describe(&self.path(), file).map_err(|error| self.bad(error))?;
        self.hold_against(description)
    }

    fn hold_against(&self, description: Description) -> Result<FileRecord, Refusal> {
        if description.length != self.claim.length {
            let (is, said) = (description.length, self.claim.length);
            return Err(self.bad(format!("it has {is} bytes, {said} were reported")));
        }
        if description.header_hash != self.claim.header_hash {
            let (is, said) = (description.header_hash, self.claim.header_hash);
            return Err(self.bad(format!("its header is {is}, {said} was reported")));
        }
        let (about, member) = (&description.about, &self.member);
        let is_of_member = about.run == member.run
            && about.attempt == member.attempt
            && about.rank == member.rank
            && about.step == self.step
            && about.world_size == self.world_size;
        if !is_of_member {
            let (run, attempt, step, rank) = (&about.run, about.attempt, about.step, about.rank);
            return Err(self.bad(format!(
                "it says that it is of run {run}, attempt {attempt}, step {step}, rank {rank}"
            )));
        }
        Ok(FileRecord {
            name: self.claim.name.clone(),
            rank: member.rank,
            length: description.length,
            header_hash: description.header_hash,
            shards: description.about.shards,
        })
    }
}

/// A file that is being uploaded by a rank. It is written under a temporary name in its step's
/// directory, or, if the store is a bucket, in this host's temporary directory. It is hashed while
/// it arrives, because reading it again would take as long as the upload. If it is dropped before
/// it is published, it removes the temporary file.
pub(crate) struct Arrival {
    claimed: Claimed,
    looks: Looks,
    pieces: Pieces,
    /// Where the temporary file is; `None` once it is published.
    place: Option<Place>,
    received: u64,
    looked: Looked,
}

/// How much of an arriving file's header is known.
enum Looked {
    /// The part of the header that has arrived.
    Header(Vec<u8>),
    /// The header has arrived: the positions and hashes of the shards are known. The rest of the
    /// header is dropped and read again at the end, because it may take many megabytes and the
    /// upload an hour.
    Shards(Box<Expected>),
}

/// The shards of an arriving file.
struct Expected {
    header: u64,
    spans: Vec<(u64, u64)>,
    hashes: Vec<ContentHash>,
    hashing: Hashing,
}

/// Where the temporary file of an upload is.
enum Place {
    /// Under this name in the step's directory.
    Beside(HeldDirectory, String),
    /// On this host, to be uploaded to a bucket.
    Here(PathBuf),
}

impl Arrival {
    pub(crate) fn begin(claimed: Claimed, looks: Looks) -> Result<Arrival, Refusal> {
        let path = claimed.path();
        let storage = |error: io::Error| match error.kind() {
            io::ErrorKind::InvalidData => claimed.bad(error),
            _ => Refusal::Storage(format!("{error} at {}", path.display())),
        };
        let scratch = claimed.backend.scratch(&path);
        let (file, place) = match claimed.backend {
            Backend::Directory => {
                let directory = HeldDirectory::create(&claimed.directory()).map_err(storage)?;
                let name = scratch.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let file = directory.create_private(&name).map_err(storage)?;
                (file, Place::Beside(directory, name))
            }
            Backend::Bucket(_) => {
                (durable::create_private(&scratch).map_err(storage)?, Place::Here(scratch))
            }
        };
        // A file for a bucket is read again soon, which the page cache makes faster.
        let direct = matches!(place, Place::Beside(..));
        let (pieces, looked) = (Pieces::new(file, 0, direct), Looked::Header(Vec::new()));
        Ok(Arrival { claimed, looks, pieces, place: Some(place), received: 0, looked })
    }

    pub(crate) fn write(&mut self, chunk: &[u8]) -> Result<(), Refusal> {
        let offset = self.received;
        self.received = offset.saturating_add(chunk.len() as u64);
        if self.received > self.claimed.claim.length {
            return Err(self.claimed.bad("more bytes arrive than were announced"));
        }
        self.look(offset, chunk)?;
        let written = faults::point("intake.write")
            .and_then(|()| self.pieces.push(chunk).map_err(|torn| torn.error));
        written.map_err(|error| self.storage(&error))
    }

    /// Collects the header until it is complete; then hashes the shards' bytes.
    fn look(&mut self, offset: u64, chunk: &[u8]) -> Result<(), Refusal> {
        let header = match &mut self.looked {
            Looked::Header(header) => header,
            Looked::Shards(expected) => {
                let Expected { spans, hashing, .. } = &mut **expected;
                hashing.take(spans, offset, chunk);
                return Ok(());
            }
        };
        header.extend_from_slice(chunk);
        let Some(prefix) = header.first_chunk::<8>() else { return Ok(()) };
        let said = u64::from_le_bytes(*prefix);
        if said > MAX_ONLINE_HEADER {
            return Err(self.claimed.too_large(said));
        }
        let length = 8 + said as usize;
        if header.len() < length {
            // Reserves exactly: growing by doubling would take up to twice the memory.
            header.reserve_exact(length - header.len());
            return Ok(());
        }
        let all = std::mem::take(header);
        let _seat = self.looks.wait(length as u64)?;
        let described =
            describe_header(&self.claimed.path(), &all[..length], self.claimed.claim.length);
        let mut description = described.map_err(|error| self.claimed.bad(error))?;
        let mut end = length as u64;
        for &(start, stop) in &description.spans {
            if start != end {
                return Err(self.claimed.bad("its shards are not in the order of their bytes"));
            }
            end = stop;
        }
        let spans = std::mem::take(&mut description.spans);
        let record = self.claimed.hold_against(description)?;
        let hashes = record.shards.iter().map(|shard| shard.hash).collect();
        let mut hashing = Hashing::default();
        hashing.take(&spans, length as u64, &all[length..]);
        let header = length as u64;
        self.looked = Looked::Shards(Box::new(Expected { header, spans, hashes, hashing }));
        Ok(())
    }

    /// Checks the hash of every shard, since a transfer may damage bytes, and then publishes the
    /// file.
    pub(crate) fn finish(mut self) -> Result<(FileRecord, Seat), Refusal> {
        self.pieces.finish().map_err(|torn| self.storage(&torn.error))?;
        let looked = std::mem::replace(&mut self.looked, Looked::Header(Vec::new()));
        let expected = match looked {
            Looked::Shards(expected) if self.received == self.claimed.claim.length => expected,
            // The upload ended early: `compare` says what is missing.
            _ => {
                let _seat = self.looks.wait(self.received)?;
                self.claimed.compare(self.pieces.file())?;
                return Err(self.claimed.bad("it did not arrive whole"));
            }
        };
        let Expected { header, spans, hashes, hashing } = *expected;
        for (shard, (hash, wanted)) in hashing.finish(&spans).into_iter().zip(hashes).enumerate() {
            faults::point("intake.hash").map_err(|error| self.storage(&error))?;
            if hash != wanted && !faults::seeded("hash-not-checked") {
                return Err(self.changed(shard, header));
            }
        }
        let synced = faults::point("intake.sync").and_then(|()| self.pieces.file().sync_all());
        synced.map_err(|error| self.storage(&error))?;
        let created = match self.place.take() {
            Some(Place::Beside(directory, scratch)) => {
                directory.publish(&scratch, self.claimed.claim.name.as_str())
            }
            Some(Place::Here(scratch)) => {
                self.claimed.backend.publish(&scratch, &self.claimed.path())
            }
            None => return Err(Refusal::Storage("it was published before".into())),
        };
        let created = created.map_err(|error| self.storage(&error))?;
        let seat = self.looks.wait(header)?;
        let record = match created {
            true => self.claimed.compare(self.pieces.file())?,
            // A file of this name exists, perhaps because the acknowledgement of an earlier upload
            // was lost: it must be the same.
            false => self.claimed.look()?,
        };
        Ok((record, seat))
    }

    /// The refusal that names the shard whose bytes changed.
    fn changed(&self, shard: usize, header: u64) -> Refusal {
        let compared =
            self.looks.wait(header).and_then(|_| self.claimed.compare(self.pieces.file()));
        match compared {
            Ok(record) => {
                let key = &record.shards[shard].key;
                self.claimed.bad(format!("{key} arrived with other bytes than were sent"))
            }
            Err(refusal) => refusal,
        }
    }

    fn storage(&self, error: &io::Error) -> Refusal {
        Refusal::Storage(format!("{error} at {}", self.claimed.path().display()))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let _ = match &self.place {
            Some(Place::Beside(directory, scratch)) => directory.remove(scratch),
            Some(Place::Here(scratch)) => std::fs::remove_file(scratch),
            None => Ok(()),
        };
    }
}

/// Hashes consecutive spans of a stream of bytes that arrives in pieces of any length.
#[derive(Default)]
struct Hashing {
    hasher: XxHash3_128,
    done: Vec<ContentHash>,
}

impl Hashing {
    fn take(&mut self, spans: &[(u64, u64)], mut offset: u64, mut bytes: &[u8]) {
        while let Some(&(_, end)) = spans.get(self.done.len()) {
            let n = usize::try_from(end - offset).map_or(bytes.len(), |left| left.min(bytes.len()));
            self.hasher.write(&bytes[..n]);
            (offset, bytes) = (offset + n as u64, &bytes[n..]);
            if offset < end {
                return;
            }
            let hasher = std::mem::take(&mut self.hasher);
            self.done.push(ContentHash(hasher.finish_128()));
        }
    }

    /// The hash of each span; a span of which nothing arrived counts as empty.
    fn finish(mut self, spans: &[(u64, u64)]) -> Vec<ContentHash> {
        self.done.resize(spans.len(), ContentHash::of(&[]));
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Goal: a shard's hash does not depend on the chunks in which its file arrives.
        #[test]
        fn hashes_are_of_the_shards_however_the_bytes_arrive(
            lengths in proptest::collection::vec(0usize..700, 0..8),
            cuts in proptest::collection::vec(0usize..2000, 0..12),
        ) {
            let bytes: Vec<u8> = (0..100 + lengths.iter().sum::<usize>()).map(|i| i as u8).collect();
            let mut end = 100;
            let span = |&length: &usize| {
                end += length as u64;
                (end - length as u64, end)
            };
            let spans: Vec<(u64, u64)> = lengths.iter().map(span).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.clamp(100, bytes.len())).collect();
            cuts.extend([100, bytes.len()]);
            cuts.sort_unstable();
            let mut hashing = Box::<Hashing>::default();
            for pair in cuts.windows(2) {
                hashing.take(&spans, pair[0] as u64, &bytes[pair[0]..pair[1]]);
            }
            let wanted = spans.iter().map(|&(a, b)| ContentHash::of(&bytes[a as usize..b as usize]));
            prop_assert_eq!(hashing.finish(&spans), wanted.collect::<Vec<_>>());
        }
    }
}
