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

mod lines;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use self::lines::Lines;
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

/// What a journal holds.
#[derive(Debug)]
pub(crate) struct Replay {
    /// Every durable batch, in order.
    pub batches: Vec<Batch>,
    /// Bytes of a last line that was cut off, and dropped.
    pub torn_bytes: u64,
    good_bytes: u64,
    chain: ContentHash,
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
    File { path: PathBuf, file: Option<File>, good_bytes: u64 },
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
    /// again, as it is made once.
    #[error("{0}")]
    Again(io::Error),
    /// Nothing may follow: a descriptor whose write failed is not used again (fsyncgate), and
    /// where another coordinator has written, this one is replaced.
    #[error("{0}")]
    Final(io::Error),
}

/// The checksum before the first line.
pub(super) fn chain_start() -> ContentHash {
    ContentHash::of(b"backtape journal 1")
}

fn link(previous: ContentHash, json: &[u8]) -> ContentHash {
    let mut text = previous.to_string().into_bytes();
    text.extend(json);
    ContentHash::of(&text)
}

/// Reads every durable batch of an attempt, and goes on after the last.
pub(crate) fn load(backend: &Backend, attempt: &Path) -> Result<(Replay, Journal), JournalError> {
    if let Backend::Directory = backend {
        let path = attempt.join(JOURNAL);
        let replay = replay(&path)?;
        let journal = Journal::after(path, &replay);
        return Ok((replay, journal));
    }
    let (path, bytes, lines) = Lines::load(backend, attempt)?;
    let replay = replay_bytes(&path, &bytes)?;
    if replay.torn_bytes > 0 {
        // An object is put whole or not at all: no crash cuts one off.
        let (line, detail) = (replay.batches.len() + 1, "it is not what was put".into());
        return Err(JournalError::Damaged { path, line, detail });
    }
    let chain = replay.chain;
    Ok((replay, Journal { medium: Medium::Objects(lines), chain }))
}

/// Reads every durable batch of a file.
pub(crate) fn replay(path: &Path) -> Result<Replay, JournalError> {
    let bytes = faults::point("journal.read").and_then(|()| std::fs::read(path));
    let bytes = bytes.map_err(|source| JournalError::Read { path: path.into(), source })?;
    replay_bytes(path, &bytes)
}

fn replay_bytes(path: &Path, bytes: &[u8]) -> Result<Replay, JournalError> {
    let mut replay =
        Replay { batches: Vec::new(), torn_bytes: 0, good_bytes: 0, chain: chain_start() };
    for (index, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        let end = replay.good_bytes + line.len() as u64;
        match read_line(line, replay.chain) {
            Ok((batch, chain)) => {
                replay.batches.push(batch);
                (replay.chain, replay.good_bytes) = (chain, end);
            }
            Err(_) if end == bytes.len() as u64 => {
                replay.torn_bytes = line.len() as u64;
                if faults::seeded("torn-line-believed") {
                    replay.good_bytes = end;
                }
            }
            Err(detail) => {
                return Err(JournalError::Damaged { path: path.into(), line: index + 1, detail });
            }
        }
    }
    Ok(replay)
}

fn read_line(line: &[u8], previous: ContentHash) -> Result<(Batch, ContentHash), String> {
    let (json, chain) = check_line(line, previous)?;
    let batch = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    Ok((batch, chain))
}

/// The JSON of a line whose checksum is right, and the checksum.
pub(super) fn check_line(
    line: &[u8],
    previous: ContentHash,
) -> Result<(&[u8], ContentHash), String> {
    let text = line.strip_suffix(b"\n").ok_or("it has no end")?;
    let (digits, rest) = text.split_at_checked(CHECKSUM_DIGITS).ok_or("it is too short")?;
    let json = rest.strip_prefix(b" ").ok_or("it has no checksum")?;
    let chain = link(previous, json);
    if digits != chain.to_string().as_bytes() {
        return Err("its checksum does not match its contents".into());
    }
    Ok((json, chain))
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
        let medium = Medium::File { path, file: None, good_bytes: 0 };
        Journal { medium, chain: chain_start() }
    }

    /// Goes on after what was replayed from a file.
    pub(crate) fn after(path: PathBuf, replay: &Replay) -> Journal {
        let medium = Medium::File { path, file: None, good_bytes: replay.good_bytes };
        Journal { medium, chain: replay.chain }
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
            Medium::File { path, file, good_bytes } => {
                append(path, file, *good_bytes, &line).map_err(AppendError::Final)?;
                *good_bytes += line.len() as u64;
            }
        }
        self.chain = chain;
        Ok(())
    }
}

fn append(path: &Path, file: &mut Option<File>, good_bytes: u64, line: &[u8]) -> io::Result<()> {
    let file = match file {
        Some(file) => file,
        slot => slot.insert(open(path, good_bytes)?),
    };
    write(file, line)
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
fn open(path: &Path, good_bytes: u64) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        durable::create_directory(directory)?;
    }
    faults::point("journal.open")?;
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)?;
    if file.metadata()?.len() != good_bytes {
        // A journal that nobody loaded is never cut off: what is in it was acknowledged.
        if good_bytes == 0 && !replay(path).is_ok_and(|found| found.batches.is_empty()) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it holds an older record"));
        }
        faults::point("journal.truncate")?;
        file.set_len(good_bytes)?;
        faults::point("journal.sync-truncated")?;
        file.sync_all()?;
    }
    durable::sync_parent(path)?;
    Ok(file)
}
