//! Stores rows of scalars from ranks that do not share the store, in the same files that a rank
//! with access to the store writes itself.
//!
//! Rows are counted per process, so that a batch that is sent again changes nothing. After a
//! restart of the coordinator the count is read from the file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::refusal::Refusal;
use super::request::Member;
use crate::identity::{Attempt, Name, Rank};
use crate::scalars::files::LIMIT_BYTES;
use crate::scalars::{Header, Row, ScalarFiles, ScalarObjects, line};
use crate::store::{AttemptDir, Backend};

/// Rows that a rank sent.
#[derive(Clone, Debug)]
pub(crate) struct SentRows {
    pub(crate) member: Member,
    pub(crate) host: Name,
    /// Rows that this process sent before.
    pub(crate) first: u64,
    pub(crate) rows: Vec<Row>,
}

/// The run, launch and rank to which a set of files belongs.
type Whose = (Name, Attempt, Rank);

/// The files of all ranks that send rows.
pub(crate) struct Scalars {
    backend: Backend,
    open: Mutex<HashMap<Whose, Arc<Mutex<Files>>>>,
}

/// The files of one rank, and the process for which they were opened.
#[derive(Default)]
struct Files(Option<(u64, Kept)>);

/// Where the rows of one process are stored.
enum Kept {
    Files(Box<ScalarFiles>),
    Objects(Box<ScalarObjects>),
}

impl Scalars {
    pub(crate) fn new(backend: Backend) -> Scalars {
        Scalars { backend, open: Mutex::default() }
    }

    /// Appends those rows that are new; returns the number of rows of this process in the files.
    pub(crate) fn append(
        &self,
        sent: SentRows,
        attempt: &AttemptDir,
        world_size: u32,
    ) -> Result<u64, Refusal> {
        let key = (sent.member.run.clone(), sent.member.attempt, sent.member.rank);
        let files = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            match open.entry(key) {
                Entry::Occupied(slot) => slot.get().clone(),
                Entry::Vacant(slot) => slot.insert(Arc::default()).clone(),
            }
        };
        // The lock is per rank, so that ranks do not wait for each other's writes.
        let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = files.of(&self.backend, &sent, attempt, world_size)?;
        let known = kept.rows();
        let Some(skip) = known.checked_sub(sent.first) else {
            // Earlier rows are missing: the rank must send again from this number on.
            return Ok(known);
        };
        let new = sent.rows.get(usize::try_from(skip).unwrap_or(usize::MAX)..).unwrap_or_default();
        if !new.is_empty() {
            let written = kept.append(new);
            written.map_err(|error| refused(&sent.member, attempt, &error))?;
        }
        Ok(kept.rows())
    }
}

impl Files {
    fn of(
        &mut self,
        backend: &Backend,
        sent: &SentRows,
        attempt: &AttemptDir,
        world_size: u32,
    ) -> Result<&mut Kept, Refusal> {
        let member = &sent.member;
        if self.0.as_ref().is_none_or(|(incarnation, _)| *incarnation != member.incarnation) {
            let header = Header {
                schema: line::SCHEMA.into(),
                run: member.run.clone(),
                attempt: member.attempt,
                rank: member.rank,
                world_size,
                host: sent.host.clone(),
                incarnation: member.incarnation,
            };
            let opened = Kept::open(backend, attempt, header);
            let opened = opened.map_err(|error| refused(member, attempt, &error))?;
            self.0 = Some((member.incarnation, opened));
        }
        Ok(&mut self.0.as_mut().expect("just opened").1)
    }
}

impl Kept {
    fn open(backend: &Backend, attempt: &AttemptDir, header: Header) -> io::Result<Kept> {
        Ok(match backend {
            Backend::Directory => {
                Kept::Files(Box::new(ScalarFiles::open(&attempt.path, header, LIMIT_BYTES)?))
            }
            Backend::Bucket(_) => {
                Kept::Objects(Box::new(ScalarObjects::open(backend, &attempt.path, header)?))
            }
        })
    }

    fn rows(&self) -> u64 {
        match self {
            Kept::Files(files) => files.rows(),
            Kept::Objects(objects) => objects.rows(),
        }
    }

    fn append(&mut self, rows: &[Row]) -> io::Result<()> {
        match self {
            // An error of the CSV or the events does not matter here.
            Kept::Files(files) => files.append(rows).map(drop),
            Kept::Objects(objects) => objects.append(rows),
        }
    }
}

fn refused(member: &Member, attempt: &AttemptDir, error: &io::Error) -> Refusal {
    let (rank, path) = (member.rank, attempt.path.display());
    Refusal::Storage(format!("the scalars of rank {rank} below {path}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn sent(first: u64, steps: std::ops::Range<u64>) -> SentRows {
        let values = || vec![("loss".into(), 1.0)];
        SentRows {
            member: Member {
                run: Name::new("run-a").unwrap(),
                attempt: Attempt(0),
                rank: Rank(1),
                incarnation: 7,
            },
            host: Name::new("host-a").unwrap(),
            first,
            rows: steps.map(|step| Row { step, time: 1.0, values: values() }).collect(),
        }
    }

    /// Goal: sending is idempotent, also after a restart. Method: overlapping, repeated and
    /// premature batches, and a second service on the same store.
    fn sent_again(backend: &Backend, store: &Path) {
        let attempt = AttemptDir::of(store, Attempt(0));
        let first = Scalars::new(backend.clone());
        assert_eq!(first.append(sent(0, 0..3), &attempt, 2).unwrap(), 3);
        assert_eq!(first.append(sent(0, 0..3), &attempt, 2).unwrap(), 3);
        assert_eq!(first.append(sent(2, 2..5), &attempt, 2).unwrap(), 5);
        assert_eq!(first.append(sent(9, 9..10), &attempt, 2).unwrap(), 5, "4 are missing");
        let second = Scalars::new(backend.clone());
        assert_eq!(second.append(sent(4, 4..6), &attempt, 2).unwrap(), 6);
    }

    #[test]
    fn rows_that_are_sent_again_are_written_once_and_a_gap_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        sent_again(&Backend::Directory, dir.path());
        let path = crate::scalars::json_lines(dir.path(), Rank(1));
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.lines().count(), 7, "a header and six rows: {text}");
    }

    #[test]
    fn rows_in_a_bucket_come_back_as_the_files_that_a_directory_would_hold() {
        let store = Path::new("memory://scalars/run-a");
        let backend = Backend::of(store).unwrap();
        sent_again(&backend, store);
        let dir = tempfile::tempdir().unwrap();
        ScalarObjects::gather(&backend, store, Rank(1), dir.path()).unwrap();
        let path = crate::scalars::json_lines(dir.path(), Rank(1));
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.lines().count(), 7, "a header and six rows: {text}");
    }
}
