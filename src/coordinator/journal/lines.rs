//! A journal in a bucket: each line is an object, numbered, and made only if nobody made it.
//!
//! Two coordinators that serve one run cannot both write the next number: the second finds it
//! taken and stops, so no acknowledgement of it is ever outside the record. A file of a
//! directory has no such fence.

use std::io;
use std::path::{Path, PathBuf};

use super::{AppendError, JournalError};
use crate::store::Backend;
use crate::store::layout::JOURNAL_LINES;

/// The lines of one attempt.
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

    /// Every line, one after the other, and the journal that goes on after them.
    pub(super) fn load(
        backend: &Backend,
        attempt: &Path,
    ) -> Result<(PathBuf, Vec<u8>, Lines), JournalError> {
        let mut lines = Lines::begin(backend, attempt);
        let path = lines.directory.clone();
        let read = |source| JournalError::Read { path: path.clone(), source };
        let names = backend.list(&lines.directory).map_err(read)?.files;
        if names.is_empty() {
            return Err(read(io::ErrorKind::NotFound.into()));
        }
        lines.next = names.len() as u64;
        let targets: Vec<PathBuf> = (0..lines.next).map(|number| lines.target(number)).collect();
        // One that is missing between others is not found, and named.
        let bytes = backend.read_all(&targets).map_err(read)?.concat();
        Ok((path, bytes, lines))
    }

    fn target(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:08}.jsonl"))
    }

    /// Puts the next line. After [`AppendError::Again`] the same line is the next one.
    pub(super) fn append(&mut self, line: &[u8]) -> Result<(), AppendError> {
        let target = self.target(self.next);
        let created = self.backend.create(&target, line).map_err(AppendError::Again)?;
        // The put may have been answered by a connection that broke, and made again.
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
