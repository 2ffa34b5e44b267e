//! The journal of one attempt: what was accepted, durable before it is answered.
//!
//! ```text
//! 5d3b…9a {"at_ms":1767225600000,"events":[{"joined":{"rank":3,…}}]}
//! ```
//!
//! One line is one group commit: all events that one fsync made durable. Its
//! checksum (xxh3-128) covers the checksum before it, so that a line cannot be
//! changed, dropped or moved unseen. A write that was cut off can only have
//! hurt the last line, and nothing of that line was answered: it is dropped. A
//! bad line before the last is damage to what was acknowledged: an error.
//!
//! After a failed write or fsync the descriptor is never used again (fsyncgate).
//! A bucket cannot append: there each line is an object of its own.
//!
//! One coordinator writes a journal: who appends holds a lock on it until it ends, however it
//! ends, and cuts off no more than what it found torn. A second one that has read it too (a
//! restart of a process that was not dead) waits, and stops where the first has gone on.

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

/// Hexadecimal digits of a checksum, before the blank.
const CHECKSUM_DIGITS: usize = 32;

/// Events that became durable together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Batch {
    /// When, in milliseconds since the epoch.
    pub at_ms: u64,
    /// What, in order.
    pub events: Vec<Event>,
}

/// A journal that is being written. Opened lazily: an attempt that is only
/// looked at is not touched.
#[derive(Debug)]
pub(crate) struct Journal {
    medium: Medium,
    chain: ContentHash,
}

/// What the lines are appended to.
#[derive(Debug)]
enum Medium {
    File { path: PathBuf, file: Option<File>, good_bytes: u64, torn_bytes: u64 },
    Objects(Lines),
}

/// Why a journal cannot be believed.
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
    /// A bucket did not take it, or did not say so: the same line at the same name can be put
    /// again, as it is made once. Or another coordinator has the file, and nothing was written.
    #[error("{0}")]
    Again(io::Error),
    /// Nothing may follow: a descriptor whose write failed is not used again (fsyncgate), and
    /// where another coordinator has written, this one is replaced.
    #[error("{0}")]
    Final(io::Error),
}

/// Reads every durable batch of an attempt, in order, and goes on after the last; an error of
/// `each` is damage of the line that the batch is. Bytes of a last line that a crash cut off are
/// told: they are dropped.
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
    let lines = Lines::found(backend, attempt)?;
    let path = lines.directory().to_path_buf();
    let end = reading::read(&path, BufReader::new(lines.reader()), parsed(each))?;
    if end.torn_bytes > 0 {
        // An object is put whole or not at all: no crash cuts one off.
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

    /// A file that does not exist yet.
    pub(crate) fn new(path: PathBuf) -> Journal {
        let medium = Medium::File { path, file: None, good_bytes: 0, torn_bytes: 0 };
        Journal { medium, chain: chain_start() }
    }

    /// Goes on after what was read from a file.
    pub(crate) fn after(path: PathBuf, end: &End) -> Journal {
        let (good_bytes, torn_bytes) = (end.good_bytes, end.torn_bytes);
        let medium = Medium::File { path, file: None, good_bytes, torn_bytes };
        Journal { medium, chain: end.chain }
    }

    /// Makes a batch durable. The error says whether the same batch may be appended again;
    /// another one never may.
    pub(crate) fn append(&mut self, batch: &Batch) -> Result<(), AppendError> {
        let json = serde_json::to_vec(batch).map_err(|error| AppendError::Final(error.into()))?;
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

/// Appends a line, durable.
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

/// Opens a journal to append after its good bytes; what a crash left behind
/// them is cut off, durably, before anything is written there.
fn open(path: &Path, good_bytes: u64, torn_bytes: u64) -> Result<File, AppendError> {
    let file = create(path).map_err(AppendError::Final)?;
    // Before its length is looked at: nobody else writes from here on.
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

/// Until the descriptor is closed, which a kill does too. File systems without locks are left to
/// whoever starts coordinators.
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
    let found = file.metadata()?.len();
    if found != good_bytes {
        let refuse = |what| Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        // A journal that nobody loaded is never cut off: what is in it was acknowledged.
        if good_bytes == 0 && !read_file(path, |_| Ok(())).is_ok_and(|end| end.lines == 0) {
            return refuse("it holds an older record");
        }
        // Nor is what came after it was read.
        if good_bytes > 0 && found != good_bytes + torn_bytes {
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
