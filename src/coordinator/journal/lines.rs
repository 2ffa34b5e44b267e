//! A journal in a bucket: each line is a numbered object, created only if it does not exist.
//!
//! Two coordinators that serve one run cannot both write the next number: the second finds it taken
//! and stops, so that everything that either acknowledged is in the journal.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{AppendError, JournalError};
use crate::store::Backend;
use crate::store::layout::JOURNAL_LINES;

/// The journal's lines of one attempt.
#[derive(Debug)]
pub(super) struct Lines {
    backend: Backend,
    directory: PathBuf,
    next: u64,
}

impl Lines {
    /// A journal without lines.
    pub(super) fn begin(backend: &Backend, attempt: &Path) -> Lines {
        Lines { backend: backend.clone(), directory: attempt.join(JOURNAL_LINES), next: 0 }
    }

    /// The existing lines of an attempt.
    pub(super) fn existing(backend: &Backend, attempt: &Path) -> Result<Lines, JournalError> {
        let mut lines = Lines::begin(backend, attempt);
        let read = |source| JournalError::Read { path: lines.directory.clone(), source };
        let names = backend.list(&lines.directory).map_err(read)?.files;
        if names.is_empty() {
            return Err(read(io::ErrorKind::NotFound.into()));
        }
        lines.next = names.len() as u64;
        Ok(lines)
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reads all lines, one after the other. If one is missing between others, reading fails with
    /// an error that names it.
    pub(super) fn reader(&self) -> impl Read + '_ {
        LinesReader { lines: self, next: 0, some: io::Cursor::default() }
    }

    fn target(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:08}.jsonl"))
    }

    /// Puts the next line. After [`AppendError::Again`] the caller must put the same line again.
    pub(super) fn append(&mut self, line: &[u8]) -> Result<(), AppendError> {
        let target = self.target(self.next);
        let created = self.backend.create(&target, line).map_err(AppendError::Again)?;
        // The object may be this call's own: a put whose response was lost is repeated.
        if !created && self.backend.read(&target).map_err(AppendError::Again)? != line {
            return Err(AppendError::Final(io::Error::other(format!(
                "another coordinator has written {}: it serves this run now",
                target.display()
            ))));
        }
        self.next += 1;
        Ok(())
    }
}

/// Objects that are read at a time, because a bucket takes tens of milliseconds to answer.
const TOGETHER: u64 = 256;

struct LinesReader<'a> {
    lines: &'a Lines,
    next: u64,
    some: io::Cursor<Vec<u8>>,
}

impl Read for LinesReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.some.read(buffer)?;
            if read > 0 || buffer.is_empty() || self.next == self.lines.next {
                return Ok(read);
            }
            let to = self.lines.next.min(self.next + TOGETHER);
            let targets: Vec<PathBuf> =
                (self.next..to).map(|number| self.lines.target(number)).collect();
            self.some = io::Cursor::new(self.lines.backend.read_all(&targets)?.concat());
            self.next = to;
        }
    }
}
