//! How finished files reach the store: this rank gives them their name in it, puts them into its
//! bucket, or sends them to the coordinator.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use backtape::coordinator::limits::MAX_FILES_PER_REPORT;
use backtape::hash::TrustHash;
use backtape::manifest::FileRecord;
use backtape::store::backend::is_url;
use backtape::store::layout::RUN_RECORD;
use backtape::store::{Backend, FinishedFile, Moved};

use crate::client::{CallError, Client, Entered};
use crate::patience::Deadline;
use crate::recording::Recording;
use crate::settings::TransportChoice;

/// Files of a bucket that are reported together: the coordinator looks at each by three requests,
/// and at all of them within its deadline of one call, also where a request takes half a second.
const PUTS_PER_REPORT: usize = 16;

/// How files reach the store.
pub(crate) enum Way {
    /// They are made in it.
    Direct,
    /// They are made in a spool of this host, then put into the store's bucket.
    Bucket(Backend, tempfile::TempDir),
    /// They are made in a spool of this host, then sent to the coordinator.
    Stream(tempfile::TempDir),
}

impl Way {
    /// Finds out whether this rank reaches the store itself.
    pub(crate) async fn find(recording: Arc<Recording>, entered: Entered) -> std::io::Result<Way> {
        let spool = || tempfile::Builder::new().prefix("backtape-").tempdir();
        let bucket = is_url(&entered.directory);
        let looked = tokio::task::spawn_blocking(move || reached(&recording, &entered)).await;
        Ok(match looked.ok().flatten() {
            Some(backend) if bucket => Way::Bucket(backend, spool()?),
            Some(_) => Way::Direct,
            None => Way::Stream(spool()?),
        })
    }

    pub(crate) fn spool(&self) -> Option<&Path> {
        match self {
            Way::Direct => None,
            Way::Bucket(_, spool) | Way::Stream(spool) => Some(spool.path()),
        }
    }

    /// How many files are delivered together. Those that are sent are answered one by one.
    pub(crate) fn at_a_time(&self) -> usize {
        match self {
            Way::Stream(_) => 1,
            Way::Bucket(..) => PUTS_PER_REPORT,
            Way::Direct => MAX_FILES_PER_REPORT,
        }
    }
}

/// Finished files of one step of this rank, and where they go.
pub(crate) struct Delivery<'a> {
    pub(crate) way: &'a Way,
    pub(crate) client: &'a Client,
    pub(crate) step: u64,
    /// The step's directory in the store.
    pub(crate) directory: PathBuf,
    /// Whether a file that does not get there otherwise may be sent to the coordinator.
    pub(crate) may_stream: bool,
    pub(crate) deadline: Deadline,
    /// Counts the bytes that have been sent.
    pub(crate) moved: &'a Moved,
}

/// The shards of a file that was acknowledged, or why it was not.
type Outcome = Result<u64, CallError>;

impl Delivery<'_> {
    /// Puts files in their places and reports them together, or sends them. Returns the record and
    /// the outcome of each, in their order.
    pub(crate) async fn deliver(&self, files: Vec<FinishedFile>) -> Vec<(FileRecord, Outcome)> {
        let mut placed: Vec<(FileRecord, Option<Outcome>)> = Vec::new();
        for file in files {
            placed.push(self.place(file).await);
        }
        let named: Vec<&FileRecord> = placed
            .iter()
            .filter_map(|(record, outcome)| outcome.is_none().then_some(record))
            .collect();
        let reported = match named.is_empty() {
            true => Vec::new(),
            false => self.client.report_files(self.step, &named, &self.deadline).await,
        };
        let mut reported = reported.into_iter();
        let mut settled = Vec::new();
        for (record, outcome) in placed {
            let was_reported = outcome.is_none();
            let outcome = match outcome.or_else(|| reported.next()) {
                Some(Err(CallError::NotThere(_))) if was_reported && self.may_send_again() => {
                    // This rank's directory looked like the coordinator's and is another one: the
                    // file is sent instead.
                    let path = self.directory.join(record.name.as_str());
                    self.send(&record, &path).await
                }
                Some(outcome) => outcome,
                None => Err(CallError::Unreachable("no outcome came for it".into())),
            };
            settled.push((record, outcome));
        }
        settled
    }

    /// A file that was put into a bucket is no longer on this host, so it cannot be sent again.
    fn may_send_again(&self) -> bool {
        self.may_stream && matches!(self.way, Way::Direct)
    }

    async fn send(&self, record: &FileRecord, path: &Path) -> Outcome {
        self.client.upload_file(self.step, record, (path, self.moved), &self.deadline).await
    }

    /// Puts a file in its place in the store; beside its record the outcome where it is not to be
    /// reported: it was sent, or has no place.
    async fn place(&self, mut file: FinishedFile) -> (FileRecord, Option<Outcome>) {
        match self.way {
            Way::Stream(_) => {
                let outcome = self.send(&file.record, file.scratch()).await;
                (file.take_record(), Some(outcome))
            }
            Way::Bucket(backend, _) => self.put(backend, file).await,
            Way::Direct => match file.name() {
                Ok(_) => {
                    self.deadline.progressed();
                    (file.take_record(), None)
                }
                Err(error) => {
                    let directory = self.directory.display();
                    let why = format!("no file could be named in {directory}: {error}");
                    (file.take_record(), Some(Err(CallError::Refused(why))))
                }
            },
        }
    }

    /// Puts a file into the bucket; one that cannot be put is sent instead.
    async fn put(&self, backend: &Backend, file: FinishedFile) -> (FileRecord, Option<Outcome>) {
        let file = Arc::new(file);
        let (putting, backend, directory) = (file.clone(), backend.clone(), self.directory.clone());
        let moved = self.moved.clone();
        let put = tokio::task::spawn_blocking(move || putting.put(&backend, &directory, &moved));
        let why = match self.deadline.moving().bound(put).await {
            Some(Ok(Ok(_))) => {
                self.deadline.progressed();
                return (file.record.clone(), None);
            }
            Some(Ok(Err(error))) => error.to_string(),
            Some(Err(panicked)) => panicked.to_string(),
            None => "nothing of it was taken any more".into(),
        };
        if self.may_stream && file.scratch().exists() {
            let outcome = self.send(&file.record, file.scratch()).await;
            return (file.record.clone(), Some(outcome));
        }
        let (name, directory) = (&file.record.name, self.directory.display());
        let why = format!("{name} could not be put in {directory}: {why}");
        (file.record.clone(), Some(Err(CallError::Refused(why))))
    }
}

/// True where this rank sends its rows of scalars to the coordinator: when it does not reach the
/// store itself, and when the store is a bucket, to whose rows only the coordinator adds.
pub(crate) fn sends_rows(recording: &Recording, entered: &Entered) -> bool {
    is_url(&entered.directory) || reached(recording, entered).is_none()
}

/// The store, where this rank reaches it itself. With `Auto` that is so where the same `run.json`
/// lies at the same place; that it is the same store is proved when the coordinator looks at a
/// file that this rank has written.
fn reached(recording: &Recording, entered: &Entered) -> Option<Backend> {
    let transport = recording.plan.settings.transport;
    if transport == TransportChoice::Stream {
        return None;
    }
    let backend = Backend::of(&entered.directory).ok()?;
    if transport == TransportChoice::Direct {
        return Some(backend);
    }
    let here = backend.read(&entered.directory.join(RUN_RECORD)).ok()?;
    let same = Some(TrustHash::of(&here)) == entered.run_record;
    same.then_some(backend)
}
