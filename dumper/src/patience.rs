//! How long the job waits for the recorder. Once the recorder is being closed, the job waits a
//! fixed time (`close_patience`) after the last progress, and no longer. Progress is bytes that
//! move, files that are acknowledged, and steps that come to their end; it is none that a
//! coordinator answers "try again".
//!
//! The recorder's own thread gives up a little earlier than the thread that closes the recorder, so
//! that it can still say what it was waiting for.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use backtape::store::Moved;
use tokio::time::Instant;

use crate::recording::lock;

/// How often a wait looks whether there was progress meanwhile.
const LOOK: Duration = Duration::from_millis(200);

/// The time that one try always has, however little is left: a slow disk may have used up the rest.
pub(crate) const LEAST: Duration = Duration::from_secs(1);

/// A try that fails this shortly before the job stops waiting is taken to have failed for that.
const NEAR: Duration = Duration::from_secs(2);

/// How much earlier the recorder's own thread gives up than the thread that closes the recorder; at
/// most half of the patience.
const MARGIN: Duration = Duration::from_secs(3);

/// Outages of the coordinator that are shorter are not reported.
const WORTH_SAYING: Duration = Duration::from_secs(5);

/// When the last progress was, and how long the job waits after that.
pub(crate) struct Patience {
    longest: Duration,
    closed: OnceLock<Instant>,
    /// Counts the bytes that have moved towards the store.
    pub(crate) moved: Moved,
    state: Mutex<State>,
}

struct State {
    last: Instant,
    moved: u64,
    /// Since when the coordinator does not answer, and the error that came instead.
    outage: Option<(Instant, String)>,
    /// Why nothing more is waited for.
    given_up: Option<String>,
}

impl Patience {
    pub(crate) fn new(longest: Duration) -> Arc<Patience> {
        let state = State { last: Instant::now(), moved: 0, outage: None, given_up: None };
        let (closed, moved) = (OnceLock::new(), Moved::default());
        Arc::new(Patience { longest, closed, moved, state: Mutex::new(state) })
    }

    /// The recorder is being closed: from now on the job waits.
    pub(crate) fn close(&self) {
        let _ = self.closed.set(Instant::now());
    }

    pub(crate) fn closed_at(&self) -> Option<Instant> {
        self.closed.get().copied()
    }

    /// There was progress.
    pub(crate) fn progressed(&self) {
        self.progressed_at(Instant::now());
    }

    fn progressed_at(&self, now: Instant) {
        let mut state = lock(&self.state);
        (state.last, state.outage, state.given_up) = (now, None, None);
    }

    /// The coordinator answered, with nothing new.
    pub(crate) fn answered(&self) {
        lock(&self.state).outage = None;
    }

    /// The coordinator did not answer.
    pub(crate) fn unanswered(&self, why: &str) {
        let mut state = lock(&self.state);
        let since = state.outage.as_ref().map_or_else(Instant::now, |(since, _)| *since);
        state.outage = Some((since, why.into()));
    }

    /// The error that came instead of an answer; `None` while the coordinator answers.
    pub(crate) fn outage(&self) -> Option<String> {
        lock(&self.state).outage.as_ref().map(|(_, why)| why.clone())
    }

    /// What has not worked for a while, as one sentence; `None` where all is well.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble_at(Instant::now())
    }

    fn trouble_at(&self, now: Instant) -> Option<String> {
        let state = lock(&self.state);
        let (since, why) = state.outage.as_ref()?;
        let lasted = now.saturating_duration_since(*since);
        (lasted >= WORTH_SAYING).then(|| {
            format!(
                "the coordinator has taken nothing for {} s ({why}): what is recorded waits in \
                 memory, and is left out where it does not fit",
                lasted.as_secs()
            )
        })
    }

    /// When the last progress was. Bytes that moved since the last call are taken to move now.
    fn last(&self, now: Instant) -> Instant {
        let mut state = lock(&self.state);
        let moved = self.moved.load(Ordering::Relaxed);
        if moved != state.moved {
            (state.last, state.moved, state.given_up) = (now, moved, None);
        }
        state.last
    }

    /// When the thread that closes the recorder stops waiting, if there is no further progress;
    /// `None` while no thread closes it.
    pub(crate) fn end(&self) -> Option<Instant> {
        self.end_at(Instant::now())
    }

    fn end_at(&self, now: Instant) -> Option<Instant> {
        Some(self.closed_at()?.max(self.last(now)) + self.longest)
    }

    /// How long the job waits after the last progress.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }

    /// The deadline of something that begins now: it may take `longest`, or less once the recorder
    /// is being closed.
    pub(crate) fn deadline(self: &Arc<Patience>, longest: Duration) -> Deadline {
        let (patience, begin) = (self.clone(), Instant::now());
        Deadline { patience, begin, longest, moving: false }
    }
}

/// When to give up on something that has begun. It moves on while there is progress.
#[derive(Clone)]
pub(crate) struct Deadline {
    patience: Arc<Patience>,
    begin: Instant,
    longest: Duration,
    /// Whether `longest` counts from the last progress, and not only from the beginning.
    moving: bool,
}

impl Deadline {
    /// The same deadline for something that may take any time while there is progress.
    pub(crate) fn moving(&self) -> Deadline {
        Deadline { moving: true, ..self.clone() }
    }

    /// How long may still be waited, if there is no further progress.
    pub(crate) fn left(&self) -> Duration {
        self.left_at(Instant::now())
    }

    fn left_at(&self, now: Instant) -> Duration {
        let (last, closed) = (self.patience.last(now), self.patience.closed_at());
        let from = closed.map_or(self.begin, |closed| closed.max(self.begin));
        let own_end = if self.moving { from.max(last) } else { from } + self.longest;
        let end = self.granted_at(now).map_or(own_end, |granted| own_end.min(granted));
        end.saturating_duration_since(now)
    }

    /// A moment before the thread that closes the recorder stops waiting, so that there is time to
    /// say why; `None` while no thread closes it.
    fn granted_at(&self, now: Instant) -> Option<Instant> {
        let closed = self.patience.closed_at()?;
        let longest = self.patience.longest;
        Some(closed.max(self.patience.last(now)) + longest - MARGIN.min(longest / 2))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Waits for a call until the deadline, which may move meanwhile, and for [`LEAST`] at least.
    /// `None` where the call has not ended by then.
    pub(crate) async fn bound<T>(&self, call: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(call);
        let least = Instant::now() + LEAST;
        loop {
            let left = self.left().max(least.saturating_duration_since(Instant::now()));
            match tokio::time::timeout(left.min(LOOK), &mut call).await {
                Ok(done) => return Some(done),
                Err(_) if self.is_over() && Instant::now() >= least => return None,
                Err(_) => {}
            }
        }
    }

    /// Waits before the next try, but not beyond the deadline, which comes closer when the recorder
    /// is closed meanwhile.
    pub(crate) async fn pause(&self, pause: Duration) {
        let end = Instant::now() + pause;
        loop {
            let left = end.saturating_duration_since(Instant::now()).min(self.left());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LOOK)).await;
        }
    }

    pub(crate) fn progressed(&self) {
        self.patience.progressed();
    }

    pub(crate) fn unanswered(&self, why: &str) {
        self.patience.unanswered(why);
    }

    /// The reason, with the limit that was reached where that is the recorder's patience.
    pub(crate) fn explained(&self, why: &str) -> String {
        let now = Instant::now();
        match self.granted_at(now).filter(|granted| *granted <= now + NEAR) {
            None => why.into(),
            Some(_) => format!(
                "{why}; nothing got done any more, and close waits {} s after the last progress \
                 (close_patience_s)",
                self.patience.longest.as_secs_f64()
            ),
        }
    }

    /// Gives up: once the recorder is being closed, nothing more is asked of the coordinator.
    /// Returns the reason as [`Deadline::explained`] words it, the first one if there are several.
    pub(crate) fn give_up(&self, why: &str) -> String {
        let why = self.explained(why);
        match self.patience.closed_at() {
            None => why,
            Some(_) => lock(&self.patience.state).given_up.get_or_insert(why).clone(),
        }
    }

    /// Why nothing more is asked of the coordinator; `None` unless it was given up and there was no
    /// progress since.
    pub(crate) fn given_up(&self) -> Option<String> {
        // Bytes that have moved meanwhile are progress.
        self.patience.last(Instant::now());
        lock(&self.patience.state).given_up.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const PATIENCE: Duration = Duration::from_secs(30);

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn a_recorder_that_is_closed_is_waited_for_after_the_last_progress_alone() {
        let patience = Patience::new(PATIENCE);
        let deadline = patience.deadline(HOUR);
        assert_eq!(deadline.left_at(deadline.begin + seconds(100)), HOUR - seconds(100));
        assert_eq!(patience.end(), None, "nobody waits");
        patience.close();
        let closed = patience.closed_at().unwrap();
        assert_eq!(patience.end_at(closed), Some(closed + PATIENCE));
        assert_eq!(deadline.left_at(closed), seconds(27), "it gives up before its waiter does");
        patience.moved.fetch_add(1, Ordering::Relaxed);
        let moved = closed + seconds(20);
        assert_eq!(patience.end_at(moved), Some(moved + PATIENCE));
        let done = moved + seconds(20);
        patience.progressed_at(done);
        assert_eq!(deadline.left_at(done + seconds(1)), seconds(26));
        assert_eq!(deadline.left_at(done + seconds(27)), Duration::ZERO);
        assert_eq!(patience.end_at(done + PATIENCE), Some(done + PATIENCE));
    }

    #[test]
    fn what_moves_has_no_other_end_and_what_does_not_has() {
        let patience = Patience::new(PATIENCE);
        let deadline = patience.deadline(seconds(60));
        patience.close();
        let closed = patience.closed_at().unwrap();
        for minute in 1..300 {
            patience.progressed_at(closed + seconds(60 * minute));
        }
        let now = closed + seconds(60 * 299);
        assert_eq!(deadline.moving().left_at(now), seconds(27));
        assert_eq!(deadline.left_at(now), Duration::ZERO);
    }

    /// Goal: an upload that moves is never cut. Method: in real time, more than twice as long as it
    /// may stand still; then it stands still.
    #[tokio::test]
    async fn a_call_goes_on_while_bytes_move_and_ends_when_they_do_not() {
        let patience = Patience::new(seconds(2));
        patience.close();
        let (moved, upload) = (patience.moved.clone(), patience.deadline(HOUR).moving());
        let begin = Instant::now();
        let sending = async move {
            while begin.elapsed() < Duration::from_millis(2500) {
                moved.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        assert_eq!(upload.bound(sending).await, Some(()));
        assert_eq!(upload.bound(std::future::pending::<()>()).await, None);
    }

    #[test]
    fn an_outage_is_said_once_it_lasts_and_given_up_only_when_the_job_waits() {
        let patience = Patience::new(PATIENCE);
        let deadline = patience.deadline(HOUR);
        deadline.unanswered("connection refused");
        assert_eq!((patience.trouble(), deadline.give_up("gone").as_str()), (None, "gone"));
        let said = patience.trouble_at(Instant::now() + seconds(6)).unwrap();
        assert!(said.contains("6 s (connection refused)"), "{said}");
        patience.close();
        assert_eq!(deadline.give_up("gone"), "gone", "the limit was its own");
        assert!(deadline.given_up().is_some());
        patience.progressed();
        assert_eq!(patience.trouble_at(Instant::now() + seconds(6)), None);
        assert_eq!(deadline.given_up(), None);
        let none = Patience::new(Duration::ZERO);
        none.close();
        assert!(none.deadline(HOUR).give_up("gone").starts_with("gone; nothing got done"));
    }
}
