//! The journal of one attempt: the accepted events, which are durable before they are answered.
//!
//! ```text
//! 5d3b…9a {"at_ms":1767225600000,"events":[{"joined":{"rank":3,…}}]}
//! ```
//!
//! A line is a group commit: all events that one fsync made durable. Its checksum (xxh3-128) covers
//! the previous line's checksum, so that a changed, dropped or moved line is detected. An
//! interrupted write can only damage the last line, whose events were not acknowledged: that line
//! is dropped. A bad line before the last is damage to acknowledged events: an error.
//!
//! After a failed write or fsync the descriptor is never used again (fsyncgate). A bucket cannot
//! append: there each line is a separate object.
//!
//! Only one coordinator writes a journal: it holds a file lock until its process ends, and
//! truncates only the incomplete last line that it found. A second coordinator that has read the
//! same journal (a restart while the first was not dead) waits for the lock, and stops if the first
//! has appended since.

mod lines;
mod reading;

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use self::lines::Lines;
pub(crate) use self::reading::{End, read};
use self::reading::{chain_start, link};
use super::event::Event;
use crate::faults;
use crate::hash::ContentHash;
use crate::store::layout::JOURNAL;
use crate::store::{Backend, durable};

/// Hexadecimal digits of a checksum, before the space.
const CHECKSUM_DIGITS: usize = 32;

/// Events that became durable together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Batch {
    /// When they were staged, in milliseconds since the epoch.
    pub at_ms: u64,
    /// The events, in order.
    pub events: Vec<Event>,
}

impl Batch {
    /// The batch as a line has it. `text` gives the JSON of the file that an event reports, where it
    /// is known.
    fn to_json<'t>(&self, text: impl Fn(&Event) -> Option<&'t str>) -> serde_json::Result<Vec<u8>> {
        let mut json = format!("{{\"at_ms\":{},\"events\":[", self.at_ms).into_bytes();
        for (index, event) in self.events.iter().enumerate() {
            if index > 0 {
                json.push(b',');
            }
            match (event, text(event)) {
                (Event::Reported { step, .. }, Some(text)) => {
                    let begin = format!("{{\"reported\":{{\"step\":{step},\"file\":");
                    json.reserve(begin.len() + text.len() + 8);
                    json.extend(begin.as_bytes());
                    json.extend(text.as_bytes());
                    json.extend(b"}}");
                }
                _ => serde_json::to_writer(&mut json, event)?,
            }
        }
        json.extend(b"]}");
        Ok(json)
    }
}

/// A journal that is being written. The first append opens it, so that an attempt that is only read
/// is not touched.
#[derive(Debug)]
pub(crate) struct Journal {
    medium: Medium,
    chain: ContentHash,
}

/// Where the lines are written: a file, or objects in a bucket.
#[derive(Debug)]
enum Medium {
    File { path: PathBuf, file: Option<File>, good_bytes: u64, torn_bytes: u64 },
    Objects(Lines),
}

/// Why a journal cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum JournalError {
    #[error("{path} cannot be read", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} has {bytes} bytes: more than {most} are not read")]
    TooLarge { path: String, bytes: u64, most: u64 },
    #[error("{path} is damaged at line {line}, before its end: {detail}; restore it, or start a new attempt", path = path.display())]
    Damaged { path: PathBuf, line: usize, detail: String },
}

/// Why a batch is not known to be durable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AppendError {
    /// A bucket refused it or did not answer: the same line may be put again under the same name,
    /// since an object is created only once. Or another coordinator holds the lock, and nothing was
    /// written.
    #[error("{0}")]
    Again(io::Error),
    /// Nothing may be appended any more: a descriptor whose write failed is not used again
    /// (fsyncgate), or another coordinator has written and replaces this one.
    #[error("{0}")]
    Final(io::Error),
}

/// Passes every durable batch of an attempt to `each`, in order, and returns the journal to
/// continue after the last; if `each` fails, the batch's line counts as damaged. Also returns the
/// number of bytes of an incomplete last line, which is dropped.
pub(crate) fn load(
    backend: &Backend,
    attempt: &Path,
    each: impl FnMut(Batch) -> Result<(), String>,
) -> Result<(u64, Journal), JournalError> {
    if let Backend::Directory = backend {
        let path = attempt.join(JOURNAL);
        let end = read_file(&path, each)?;
        return Ok((end.torn_bytes, Journal::after(path, &end)));
    }
    let lines = Lines::existing(backend, attempt)?;
    let path = lines.directory().to_path_buf();
    let end = reading::read(&path, BufReader::new(lines.reader()), parsed(each))?;
    if end.torn_bytes > 0 {
        // An object is created atomically: unlike a file's last line it cannot be incomplete after
        // a crash.
        let (line, detail) = (end.lines + 1, "it is not what was put".into());
        return Err(JournalError::Damaged { path, line, detail });
    }
    Ok((0, Journal { medium: Medium::Objects(lines), chain: end.chain }))
}

/// Reads every durable batch of a file.
pub(crate) fn read_file(
    path: &Path,
    each: impl FnMut(Batch) -> Result<(), String>,
) -> Result<End, JournalError> {
    let file = faults::point("journal.read").and_then(|()| File::open(path));
    let file = file.map_err(|source| JournalError::Read { path: path.into(), source })?;
    let mut end = reading::read(path, BufReader::new(file), parsed(each))?;
    if faults::seeded("torn-line-believed") {
        end.good_bytes += end.torn_bytes;
    }
    Ok(end)
}

fn parsed(
    mut each: impl FnMut(Batch) -> Result<(), String>,
) -> impl FnMut(&[u8]) -> Result<(), String> {
    move |json| each(serde_json::from_slice(json).map_err(|error| error.to_string())?)
}

impl Journal {
    /// The journal of a new attempt; the first append creates it.
    pub(crate) fn begin(backend: &Backend, attempt: &Path) -> Journal {
        match backend {
            Backend::Directory => Journal::new(attempt.join(JOURNAL)),
            Backend::Bucket(_) => {
                let medium = Medium::Objects(Lines::begin(backend, attempt));
                Journal { medium, chain: chain_start() }
            }
        }
    }

    /// A journal in a file that does not exist yet.
    pub(crate) fn new(path: PathBuf) -> Journal {
        let medium = Medium::File { path, file: None, good_bytes: 0, torn_bytes: 0 };
        Journal { medium, chain: chain_start() }
    }

    /// Continues a file after the lines that were read from it.
    pub(crate) fn after(path: PathBuf, end: &End) -> Journal {
        let (good_bytes, torn_bytes) = (end.good_bytes, end.torn_bytes);
        let medium = Medium::File { path, file: None, good_bytes, torn_bytes };
        Journal { medium, chain: end.chain }
    }

    /// Makes a batch durable. The error says whether the same batch may be appended again. After an
    /// error no other batch may be.
    #[cfg(test)]
    pub(crate) fn append(&mut self, batch: &Batch) -> Result<(), AppendError> {
        self.append_with(batch, |_| None)
    }

    /// The same, where the JSON of the file that an event reports may be known: a step's records are
    /// megabytes, and they are in its manifest too.
    pub(crate) fn append_with<'t>(
        &mut self,
        batch: &Batch,
        text: impl Fn(&Event) -> Option<&'t str>,
    ) -> Result<(), AppendError> {
        let json = batch.to_json(text).map_err(|error| AppendError::Final(error.into()))?;
        let chain = link(self.chain, &json);
        let mut line = chain.to_string().into_bytes();
        line.push(b' ');
        line.extend(&json);
        line.push(b'\n');
        match &mut self.medium {
            Medium::Objects(lines) => lines.append(&line)?,
            Medium::File { path, file, good_bytes, torn_bytes } => {
                let file = match file {
                    Some(file) => file,
                    slot => slot.insert(open(path, *good_bytes, *torn_bytes)?),
                };
                write(file, &line).map_err(AppendError::Final)?;
                *good_bytes += line.len() as u64;
            }
        }
        self.chain = chain;
        Ok(())
    }
}

/// Appends a line durably.
fn write(file: &mut File, line: &[u8]) -> io::Result<()> {
    faults::write_all("journal.write", file, line)?;
    let synced = faults::point("journal.sync").and_then(|()| sync(file));
    if synced.is_err() && faults::seeded("retried-fsync") {
        file.sync_data()?;
    } else {
        synced?;
    }
    faults::pass("journal.synced");
    Ok(())
}

/// Makes what was written durable.
fn sync(file: &File) -> io::Result<()> {
    if faults::seeded("no-journal-fsync") {
        return Ok(());
    }
    file.sync_data()
}

/// Opens a journal to append after its valid bytes. An incomplete last line is truncated durably
/// before anything is written.
fn open(path: &Path, good_bytes: u64, torn_bytes: u64) -> Result<File, AppendError> {
    let file = create(path).map_err(AppendError::Final)?;
    // Before its length is read, so that nobody else can append after that.
    lock(&file)?;
    make_ready(path, &file, good_bytes, torn_bytes).map_err(AppendError::Final)?;
    Ok(file)
}

fn create(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        durable::create_directory(directory)?;
    }
    faults::point("journal.open")?;
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
}

/// Locks the file until the descriptor is closed, which the kernel also does when the process is
/// killed. On file systems without locks nothing prevents a second coordinator.
fn lock(file: &File) -> Result<(), AppendError> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            let said = "another coordinator is writing it: stop one of the two";
            Err(AppendError::Again(io::Error::new(io::ErrorKind::ResourceBusy, said)))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn make_ready(path: &Path, file: &File, good_bytes: u64, torn_bytes: u64) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length != good_bytes {
        let refuse = |what| Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        // A journal that was not loaded is never truncated: its lines were acknowledged.
        if good_bytes == 0 && !read_file(path, |_| Ok(())).is_ok_and(|end| end.lines == 0) {
            return refuse("it holds an older record");
        }
        // Nor are lines that were appended after it was loaded.
        if good_bytes > 0 && length != good_bytes + torn_bytes {
            return refuse(
                "another coordinator has written it since: restart this one once that is gone",
            );
        }
        faults::point("journal.truncate")?;
        file.set_len(good_bytes)?;
        faults::point("journal.sync-truncated")?;
        file.sync_all()?;
    }
    durable::sync_parent(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::TrustHash;
    use crate::identity::{Name, Rank, Step};
    use crate::manifest::FileRecord;

    /// Goal: a line that takes over the text of a file's record says what one without it says.
    #[test]
    fn a_line_with_a_known_text_is_read_as_the_same_batch() {
        let name = Name::new("rank-00003.safetensors").unwrap();
        let header_hash = TrustHash::of(b"header");
        let file = FileRecord { name, rank: Rank(3), length: 9, header_hash, shards: Vec::new() };
        let text = file.to_text();
        let reported = Event::Reported { step: Step(7), file };
        let chosen = Event::RingChosen { number: 1, steps: vec![Step(2)] };
        let batch = Batch { at_ms: 5, events: vec![reported.clone(), chosen, reported] };
        let json = batch.to_json(|_| Some(&text)).unwrap();
        assert_eq!(serde_json::from_slice::<Batch>(&json).unwrap(), batch);
        let plain = serde_json::to_vec(&batch).unwrap();
        assert_eq!(batch.to_json(|_| None).unwrap(), plain);
        assert_eq!(json.len(), plain.len());
    }
}
