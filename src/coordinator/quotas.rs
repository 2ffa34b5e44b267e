//! What one rank may bring and ask for: an honest one comes nowhere near, and one that is not
//! can neither fill the coordinator's memory nor keep it from the others.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::event::{Closing, Event};
use super::limits::{
    MAX_FILES_PER_STEP, MAX_HELD_BYTES, MAX_RANK_STEP_BYTES, MAX_REQUESTS_PER_SECOND,
    MAX_SHARDS_PER_FILE, MAX_UPLOADS_PER_RANK,
};
use super::refusal::Refusal;
use super::request::Member;
use super::state::AttemptState;
use crate::identity::{Name, Rank, Step};
use crate::manifest::FileRecord;

/// What the smallest event takes in memory.
const EVENT_BYTES: u64 = 256;

impl AttemptState {
    /// Refuses a new event that is more than a rank may bring. Apart from [`Self::check`]: a
    /// journal that was written under other quotas is still read.
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
        let held = self.held(rank);
        if held.saturating_add(more) > MAX_HELD_BYTES {
            return refuse(format!(
                "{held} bytes of what rank {rank} said of steps that are not committed are kept, \
                 as many as are accepted: see which ranks they miss (coordinator status)"
            ));
        }
        Ok(())
    }
}

fn refuse(said: String) -> Result<(), Refusal> {
    Err(Refusal::Quota(said))
}

/// What a close takes in memory.
pub(super) fn weight(closing: &Closing) -> u64 {
    let texts = closing.omissions.iter().map(|one| one.tensor.len() + one.reason.len() + 96);
    EVENT_BYTES + texts.sum::<usize>() as u64
}

/// Requests of each rank in the second that runs, in a table that does not grow whoever asks:
/// two ranks may share a place, which the limit is wide enough for.
pub(super) struct Rates {
    hasher: RandomState,
    began: Instant,
    /// The second that a place counts for, and its count.
    places: Mutex<Vec<(u64, u32)>>,
}

/// Places of the table.
const PLACES: usize = 1 << 14;

impl Default for Rates {
    fn default() -> Rates {
        let places = Mutex::new(vec![(0, 0); PLACES]);
        Rates { hasher: RandomState::new(), began: Instant::now(), places }
    }
}

impl Rates {
    /// Counts a request of a member; refuses it where it is one too many.
    pub(super) fn count(&self, member: &Member) -> Result<(), Refusal> {
        let at = self.hasher.hash_one((member.run.as_str(), member.rank.0)) as usize % PLACES;
        let second = self.began.elapsed().as_secs();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = &mut places[at];
        *place = if place.0 == second { (second, place.1.saturating_add(1)) } else { (second, 1) };
        match place.1 > MAX_REQUESTS_PER_SECOND {
            true => Err(Refusal::TooMany(member.rank, MAX_REQUESTS_PER_SECOND)),
            false => Ok(()),
        }
    }
}

/// Uploads that each rank has open. One rank must not take the places of all.
#[derive(Clone, Default)]
pub(super) struct OpenUploads(Arc<Mutex<HashMap<(Name, Rank), usize>>>);

/// One open upload; gives its place back when it is dropped.
pub(super) struct OpenUpload(OpenUploads, (Name, Rank));

impl OpenUploads {
    pub(super) fn open(&self, member: &Member) -> Result<OpenUpload, Refusal> {
        let whose = (member.run.clone(), member.rank);
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(whose.clone()).or_default();
        if *count >= MAX_UPLOADS_PER_RANK {
            return Err(Refusal::UploadsOfRank(member.rank, MAX_UPLOADS_PER_RANK));
        }
        *count += 1;
        Ok(OpenUpload(self.clone(), whose))
    }
}

impl Drop for OpenUpload {
    fn drop(&mut self) {
        let mut open = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.1);
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

    #[test]
    fn a_rank_opens_a_few_uploads_and_gets_each_place_back() {
        let uploads = OpenUploads::default();
        let held: Vec<_> = (0..MAX_UPLOADS_PER_RANK).map(|_| uploads.open(&member(0))).collect();
        assert!(held.iter().all(Result::is_ok));
        assert!(uploads.open(&member(0)).is_err());
        assert!(uploads.open(&member(1)).is_ok());
        drop(held);
        assert!(uploads.open(&member(0)).is_ok());
        assert_eq!(uploads.0.lock().unwrap().len(), 0, "nothing is kept of who is done");
    }
}
