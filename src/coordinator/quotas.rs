//! Limits on what one rank may send and ask for: far above what an unmodified rank needs, and low
//! enough that a faulty one can neither fill the coordinator's memory nor starve the others.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::event::{Closing, Event};
use super::limits::{
    MAX_FILES_PER_STEP, MAX_HELD_BYTES, MAX_RANK_STEP_BYTES, MAX_REQUESTS_PER_SECOND,
    MAX_SHARDS_PER_FILE, MAX_UPLOADS, MAX_UPLOADS_PER_RANK,
};
use super::refusal::Refusal;
use super::request::Member;
use super::state::AttemptState;
use crate::identity::{Name, Rank, Step};
use crate::manifest::FileRecord;

/// Memory of the smallest event, in bytes.
const EVENT_BYTES: u64 = 256;

impl AttemptState {
    /// Refuses a new event that exceeds a rank's limits. Separate from [`Self::check`], so that a
    /// journal that was written under other limits can still be read.
    pub(crate) fn check_quota(&self, event: &Event) -> Result<(), Refusal> {
        match event {
            Event::Reported { step, file } => {
                self.check_file(*step, file)?;
                self.check_held(file.rank, EVENT_BYTES)
            }
            Event::Closed { rank, closing, .. } => self.check_held(*rank, weight(closing)),
            _ => Ok(()),
        }
    }

    fn check_file(&self, step: Step, file: &FileRecord) -> Result<(), Refusal> {
        let (rank, shards) = (file.rank, file.shards.len());
        if shards > MAX_SHARDS_PER_FILE {
            let name = &file.name;
            return refuse(format!(
                "{name} holds {shards} shards, at most {MAX_SHARDS_PER_FILE} are accepted: record \
                 less, or give captures a microbatch"
            ));
        }
        let (files, bytes) = self.brought(step, rank);
        if files >= MAX_FILES_PER_STEP {
            return refuse(format!(
                "rank {rank} reported {files} files of step {step}, as many as are accepted: \
                 record fewer microbatches"
            ));
        }
        let more: u64 = file.shards.iter().fold(0, |sum, shard| sum.saturating_add(shard.length));
        if bytes.saturating_add(more) > MAX_RANK_STEP_BYTES {
            return refuse(format!(
                "rank {rank} brings more than {MAX_RANK_STEP_BYTES} bytes of step {step}: record \
                 less of it (max_step_bytes)"
            ));
        }
        Ok(())
    }

    fn check_held(&self, rank: Rank, more: u64) -> Result<(), Refusal> {
        let bytes = self.held_bytes(rank);
        if bytes.saturating_add(more) > MAX_HELD_BYTES {
            return refuse(format!(
                "{bytes} bytes of what rank {rank} said of steps that are not committed are kept, \
                 as many as are accepted: see which ranks they miss (coordinator status)"
            ));
        }
        Ok(())
    }
}

fn refuse(said: String) -> Result<(), Refusal> {
    Err(Refusal::Quota(said))
}

/// Memory of a close, in bytes.
pub(super) fn weight(closing: &Closing) -> u64 {
    let texts =
        closing.omissions.iter().map(|omission| omission.tensor.len() + omission.reason.len() + 96);
    let declared = PARSED * (text_length(&closing.head) + text_length(&closing.selection));
    EVENT_BYTES + declared + texts.sum::<usize>() as u64
}

/// How many times the size of its text a parsed value takes in memory, for maps of short names.
const PARSED: u64 = 16;

fn text_length(part: &Option<impl Serialize>) -> u64 {
    let text = part.as_ref().and_then(|part| serde_json::to_vec(part).ok());
    text.map_or(0, |text| text.len() as u64)
}

/// Counts the requests of each rank in the current second, in a hash table of fixed size. Two ranks
/// may share a place, for which the limit leaves room.
pub(super) struct Rates {
    hasher: RandomState,
    began: Instant,
    /// For each place the second that it counts and the number of requests.
    places: Mutex<Vec<(u64, u32)>>,
}

/// Number of places in the table.
const PLACES: usize = 1 << 14;

impl Default for Rates {
    fn default() -> Rates {
        let places = Mutex::new(vec![(0, 0); PLACES]);
        Rates { hasher: RandomState::new(), began: Instant::now(), places }
    }
}

impl Rates {
    /// Counts a request of a member; refuses it if there are too many.
    pub(super) fn count(&self, member: &Member) -> Result<(), Refusal> {
        let index = self.hasher.hash_one((member.run.as_str(), member.rank.0)) as usize % PLACES;
        let second = self.began.elapsed().as_secs();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = &mut places[index];
        *place = if place.0 == second { (second, place.1.saturating_add(1)) } else { (second, 1) };
        match place.1 > MAX_REQUESTS_PER_SECOND {
            true => Err(Refusal::TooMany(member.rank, MAX_REQUESTS_PER_SECOND)),
            false => Ok(()),
        }
    }
}

/// The open uploads. Their number is limited, also per rank. If a rank sends a file again, the new
/// upload replaces the first one, whose connection broke, perhaps without the coordinator having
/// noticed yet.
#[derive(Clone)]
pub(super) struct OpenUploads {
    places: Arc<Semaphore>,
    open: Arc<Mutex<OpenOfRanks>>,
}

/// The uploads of each rank of each run.
type OpenOfRanks = HashMap<(Name, Rank), Vec<Open>>;

struct Open {
    number: u64,
    file: (Step, Name),
    replaced: Arc<Notify>,
    _place: OwnedSemaphorePermit,
}

/// One open upload; dropping it frees its place.
pub(super) struct OpenUpload {
    uploads: OpenUploads,
    whose: (Name, Rank),
    number: u64,
    replaced: Arc<Notify>,
}

impl Default for OpenUploads {
    fn default() -> OpenUploads {
        OpenUploads { places: Arc::new(Semaphore::new(MAX_UPLOADS)), open: Arc::default() }
    }
}

impl OpenUploads {
    /// Opens an upload, or refuses it at once: a waiting one would occupy its flow-control window.
    pub(super) fn open(&self, member: &Member, file: (Step, Name)) -> Result<OpenUpload, Refusal> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let whose = (member.run.clone(), member.rank);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let uploads = open.get_mut(&whose).map_or(&mut [][..], Vec::as_mut_slice);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let replaced = Arc::new(Notify::new());
        if let Some(before) = uploads.iter_mut().find(|open| open.file == file) {
            before.replaced.notify_one();
            (before.number, before.replaced) = (number, replaced.clone());
        } else {
            if uploads.len() >= MAX_UPLOADS_PER_RANK {
                return Err(Refusal::UploadsOfRank(member.rank, MAX_UPLOADS_PER_RANK));
            }
            let place = self.places.clone().try_acquire_owned();
            let place = place.map_err(|_| Refusal::Busy(MAX_UPLOADS))?;
            let upload = Open { number, file, replaced: replaced.clone(), _place: place };
            open.entry(whose.clone()).or_default().push(upload);
        }
        Ok(OpenUpload { uploads: self.clone(), whose, number, replaced })
    }
}

impl OpenUpload {
    /// Completes when the same file is sent again.
    pub(super) async fn replaced(&self) -> Refusal {
        self.replaced.notified().await;
        Refusal::SentAgain
    }
}

impl Drop for OpenUpload {
    fn drop(&mut self) {
        let mut open = self.uploads.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(uploads) = open.get_mut(&self.whose) {
            uploads.retain(|open| open.number != self.number);
            if uploads.is_empty() {
                open.remove(&self.whose);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Attempt;

    fn member(rank: u32) -> Member {
        let run = Name::new("run").unwrap();
        Member { run, attempt: Attempt(0), rank: Rank(rank), incarnation: 1 }
    }

    #[test]
    fn a_rank_that_asks_too_often_is_refused_and_another_is_not() {
        let rates = Rates::default();
        let asked = (0..4 * MAX_REQUESTS_PER_SECOND).map(|_| rates.count(&member(0)));
        assert!(asked.filter(Result::is_err).count() > 0);
        let others = (1..20).filter(|&rank| rates.count(&member(rank)).is_ok()).count();
        assert!(others >= 18, "{others} of 19: at most a chance neighbour shares the place");
    }

    fn file(step: u64) -> (Step, Name) {
        (Step(step), Name::new("rank-00000.safetensors").unwrap())
    }

    #[test]
    fn a_rank_opens_a_few_uploads_and_gets_each_place_back() {
        let uploads = OpenUploads::default();
        let few = 0..MAX_UPLOADS_PER_RANK as u64;
        let opened: Vec<_> = few.map(|step| uploads.open(&member(0), file(step))).collect();
        assert!(opened.iter().all(Result::is_ok));
        assert!(uploads.open(&member(0), file(9)).is_err());
        assert!(uploads.open(&member(1), file(9)).is_ok());
        drop(opened);
        assert!(uploads.open(&member(0), file(9)).is_ok());
        assert_eq!(uploads.open.lock().unwrap().len(), 0, "nothing is kept of who is done");
        assert_eq!(uploads.places.available_permits(), MAX_UPLOADS);
    }

    #[tokio::test]
    async fn a_file_that_is_sent_again_takes_the_place_of_its_first_try() {
        let uploads = OpenUploads::default();
        let ranks = 0..MAX_UPLOADS as u32;
        let first: Vec<_> = ranks.map(|rank| uploads.open(&member(rank), file(0)).ok()).collect();
        assert!(uploads.open(&member(99), file(0)).is_err(), "all places are taken");
        let again = uploads.open(&member(0), file(0)).ok().unwrap();
        let stale = first[0].as_ref().unwrap();
        assert_eq!(stale.replaced().await, Refusal::SentAgain);
        drop(first);
        assert_eq!(uploads.places.available_permits(), MAX_UPLOADS - 1, "the second has its own");
        drop(again);
        assert_eq!(uploads.places.available_permits(), MAX_UPLOADS);
    }
}
