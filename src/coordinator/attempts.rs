//! Which attempt a rank enters. Pure, so that tests can try every case.

use super::arrivals::Arrivals;
use super::event::Launched;
use super::refusal::Refusal;
use super::state::AttemptState;
use crate::identity::{Attempt, LaunchName, Name, Rank};

/// A process of a rank that asks to enter a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entrant<'a> {
    /// The run.
    pub run: &'a Name,
    /// Its rank.
    pub rank: Rank,
    /// The process's random number.
    pub incarnation: u64,
    /// The attempt, if the launcher counts restarts itself.
    pub explicit: Option<Attempt>,
    /// The launcher's name of its launch.
    pub launch: Option<&'a LaunchName>,
    /// Whether it asks again when the answer is to wait; ranks of earlier versions do not.
    pub waits: bool,
}

/// The newest attempt of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latest<'a> {
    /// Its number.
    pub attempt: Attempt,
    /// Its state, or why it accepts no events.
    pub state: Result<&'a AttemptState, &'a str>,
}

/// Whether the latest attempt belongs to the coordinator's own launch. An embedded coordinator
/// lives as long as one launch: attempts that it finds on disk are of older launches, and the one
/// that it opens is its only one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Launch {
    /// Not known: the coordinator serves several launches.
    #[default]
    Any,
    /// It belongs to an earlier launch.
    Older,
    /// It belongs to the coordinator's own launch.
    Own,
}

/// The answer to an entrant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// It enters this attempt, which is opened if it is one above the latest.
    Enter(Attempt),
    /// It is not decided yet, with the reason: the entrant must ask again.
    Wait(String),
}

/// Chooses the attempt.
///
/// ```text
/// an attempt is given     -> that one, unless a newer one was opened
/// embedded coordinator    -> what rank 0 opened: its process is the launch
/// rank 0 of any other     -> opens the next, once it has asked twice and no later rank 0 did
/// every other rank        -> the latest, once it and the rank 0 that opened it were alive
///                            together and call their launch the same; until then it waits
/// a rank that cannot wait -> the latest, or the next where its place is taken (versions before)
/// ```
pub(crate) fn choose(
    entrant: Entrant<'_>,
    launch: Launch,
    latest: Option<Latest<'_>>,
    arrivals: &Arrivals,
    world_size: u32,
) -> Result<Choice, Refusal> {
    if let Some(attempt) = entrant.explicit {
        return match latest.filter(|latest| attempt < latest.attempt) {
            Some(latest) => Err(entrant.superseded(attempt, latest.attempt)),
            None => Ok(Choice::Enter(attempt)),
        };
    }
    let next = latest.map_or(Attempt(0), |latest| Attempt(latest.attempt.0.saturating_add(1)));
    match (launch, latest) {
        (Launch::Older, _) | (Launch::Own, None) => return Ok(Choice::Enter(next)),
        (Launch::Own, Some(latest)) => {
            entrant.check_launch(latest)?;
            return Ok(Choice::Enter(latest.attempt));
        }
        (Launch::Any, _) => {}
    }
    match (entrant.waits, latest) {
        (true, latest) => meet(entrant, latest, next, arrivals, world_size),
        (false, Some(latest)) => enter_free_place(entrant, latest, next, world_size),
        (false, None) => Ok(Choice::Enter(next)),
    }
}

/// Chooses so that all ranks of a launch enter the attempt that their rank 0 opened.
fn meet(
    entrant: Entrant<'_>,
    latest: Option<Latest<'_>>,
    next: Attempt,
    arrivals: &Arrivals,
    world_size: u32,
) -> Result<Choice, Refusal> {
    let process = (entrant.rank, entrant.incarnation);
    let state = latest.and_then(|latest| latest.state.ok());
    let launched = state.and_then(|state| state.opened().launch.as_ref());
    entrant.check_order(launched)?;
    if entrant.rank == Rank(0) {
        return match (arrivals.came_back(process), arrivals.is_followed(process)) {
            (_, true) => Err(Refusal::LeftOver { run: entrant.run.clone(), rank: entrant.rank }),
            (false, false) => Ok(Choice::Wait("it has asked once".into())),
            (true, false) => Ok(Choice::Enter(next)),
        };
    }
    let wait = |why: String| Ok(Choice::Wait(why));
    let (Some(state), Some(launched)) = (state, launched) else {
        return wait(format!("rank 0 of its launch has not entered run {} yet", entrant.run));
    };
    let attempt = state.opened().attempt;
    let opener = (Rank(0), launched.opener);
    if state.opened().world_size != world_size {
        return wait(format!("attempt {attempt} was of another world size; rank 0 is waited for"));
    }
    if launched.name.as_ref() != entrant.launch {
        let (own_launch, others) =
            (launch_words(entrant.launch), launch_words(launched.name.as_ref()));
        return wait(format!(
            "it is of launch {own_launch} and rank 0 of attempt {attempt} of launch {others}; where they \
             are one launch, give all its ranks the same BACKTAPE_LAUNCH"
        ));
    }
    if state.has_joined(entrant.rank) {
        return wait(format!(
            "attempt {attempt} has a process of rank {} already; rank 0 opens the next one, so \
             start all ranks again",
            entrant.rank
        ));
    }
    if !arrivals.together(opener, process) || arrivals.is_followed(process) {
        return wait(format!(
            "rank 0 of attempt {attempt} was not heard of since: it is dead or of another launch, \
             and rank 0 of this one has not entered yet"
        ));
    }
    Ok(Choice::Enter(attempt))
}

/// Chooses for ranks of earlier versions, which send nothing about their launch.
fn enter_free_place(
    entrant: Entrant<'_>,
    latest: Latest<'_>,
    next: Attempt,
    world_size: u32,
) -> Result<Choice, Refusal> {
    let state = latest.state.map_err(|reason| Refusal::Poisoned {
        run: entrant.run.clone(),
        attempt: latest.attempt,
        reason: reason.into(),
    })?;
    // A job with another world size is another launch.
    let taken = state.has_joined(entrant.rank) || state.opened().world_size != world_size;
    Ok(Choice::Enter(if taken { next } else { latest.attempt }))
}

impl Entrant<'_> {
    pub(crate) fn superseded(&self, attempt: Attempt, latest: Attempt) -> Refusal {
        Refusal::OldAttempt { run: self.run.clone(), rank: self.rank, attempt, latest }
    }

    /// Refuses a rank of a launch that precedes the one that opened the latest attempt.
    fn check_order(&self, launched: Option<&Launched>) -> Result<(), Refusal> {
        let latest = launched.and_then(|launched| launched.name.as_ref());
        match self.launch.zip(latest) {
            Some((earlier, latest)) if earlier.precedes(latest) => Err(Refusal::OldLaunch {
                run: self.run.clone(),
                rank: self.rank,
                own: earlier.clone(),
                latest: latest.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses a rank that does not belong to the one launch of this coordinator.
    fn check_launch(&self, latest: Latest<'_>) -> Result<(), Refusal> {
        let opened = latest.state.ok().and_then(|state| state.opened().launch.as_ref());
        match opened {
            Some(opened) if self.waits && opened.name.as_ref() != self.launch => {
                Err(Refusal::OtherLaunch {
                    run: self.run.clone(),
                    rank: self.rank,
                    attempt: latest.attempt,
                    own: launch_words(self.launch),
                    others: launch_words(opened.name.as_ref()),
                })
            }
            _ => Ok(()),
        }
    }
}

fn launch_words(name: Option<&LaunchName>) -> String {
    name.map_or("without a name".into(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::event::{Event, Joined, Opened};
    use crate::placement::Mesh;

    fn attempt_with(number: u32, ranks: &[(u32, u64)], name: Option<&str>) -> AttemptState {
        let opener = ranks.iter().find(|(rank, _)| *rank == 0).map(|(_, incarnation)| *incarnation);
        let name = name.map(launch);
        let mut state = AttemptState::new(Opened {
            format_version: crate::FORMAT_VERSION,
            run: Name::new("run").unwrap(),
            attempt: Attempt(number),
            world_size: 4,
            started_ms: 0,
            mesh: Mesh::default(),
            versions: Default::default(),
            launch: opener.map(|opener| Launched { opener, name }),
        });
        for &(rank, incarnation) in ranks {
            let joined = Joined {
                rank: Rank(rank),
                incarnation,
                host: Name::new("h").unwrap(),
                mesh: Mesh::default(),
            };
            state.apply(&Event::Joined(joined), 0);
        }
        state
    }

    fn launch(text: &str) -> LaunchName {
        LaunchName::new(text).unwrap()
    }

    /// An entrant: rank, process, explicit attempt, name of the launch, and whether it can wait.
    struct Asks(u32, u64, Option<u32>, Option<&'static str>, bool);

    fn enters(
        Asks(rank, incarnation, explicit, name, waits): Asks,
        latest: Option<(&AttemptState, Launch)>,
        arrivals: &Arrivals,
    ) -> Result<Choice, Refusal> {
        let run = Name::new("run").unwrap();
        let name = name.map(launch);
        let entrant = Entrant {
            run: &run,
            rank: Rank(rank),
            incarnation,
            explicit: explicit.map(Attempt),
            launch: name.as_ref(),
            waits,
        };
        let whose = latest.map_or(Launch::Any, |(_, launch)| launch);
        let latest =
            latest.map(|(state, _)| Latest { attempt: state.opened().attempt, state: Ok(state) });
        choose(entrant, whose, latest, arrivals, 4)
    }

    fn enter(attempt: u32) -> Result<Choice, Refusal> {
        Ok(Choice::Enter(Attempt(attempt)))
    }

    #[test]
    fn a_rank_of_before_enters_the_latest_attempt_and_a_restarted_one_opens_the_next() {
        let state = attempt_with(2, &[(0, 10), (1, 11)], None);
        let latest = Some((&state, Launch::Any));
        let none = Arrivals::default();
        assert_eq!(enters(Asks(2, 12, None, None, false), latest, &none), enter(2));
        assert_eq!(enters(Asks(1, 99, None, None, false), latest, &none), enter(3));
        assert_eq!(enters(Asks(0, 1, None, None, false), None, &none), enter(0));
    }

    #[test]
    fn an_explicit_attempt_wins_unless_it_is_older_than_the_latest() {
        let state = attempt_with(2, &[(0, 10)], None);
        let latest = Some((&state, Launch::Any));
        let none = Arrivals::default();
        for waits in [false, true] {
            let asks = |rank, process, attempt| Asks(rank, process, Some(attempt), None, waits);
            assert_eq!(enters(asks(0, 99, 5), latest, &none), enter(5));
            assert_eq!(enters(asks(1, 11, 2), latest, &none), enter(2));
            let refused = enters(asks(0, 10, 1), latest, &none);
            assert!(matches!(refused, Err(Refusal::OldAttempt { .. })));
            assert_eq!(enters(asks(0, 1, 3), None, &none), enter(3));
        }
    }

    #[test]
    fn what_an_embedded_coordinator_finds_on_disk_is_an_older_launch() {
        let state = attempt_with(0, &[(0, 10)], Some("job/1"));
        let none = Arrivals::default();
        let asks_of = |launch| Asks(1, 11, None, launch, true);
        assert_eq!(enters(asks_of(None), Some((&state, Launch::Older)), &none), enter(1));
        let latest = Some((&state, Launch::Own));
        let restarted = enters(Asks(0, 99, None, Some("job/1"), true), latest, &none);
        assert_eq!(restarted, enter(0), "the join itself refuses it: one launch, one attempt");
        assert_eq!(enters(asks_of(Some("job/1")), latest, &none), enter(0));
        let other = enters(asks_of(Some("job/2")), latest, &none);
        assert!(matches!(other, Err(Refusal::OtherLaunch { .. })), "{other:?}");
    }

    #[test]
    fn rank_0_opens_the_next_attempt_when_it_has_asked_twice_and_is_the_latest() {
        let state = attempt_with(2, &[(0, 10)], None);
        let latest = Some((&state, Launch::Any));
        let mut arrivals = Arrivals::begin(7);
        let asks = |process| Asks(0, process, None, None, true);
        for process in [20, 30] {
            arrivals.note((Rank(0), process), None, 0);
            assert!(matches!(enters(asks(process), latest, &arrivals), Ok(Choice::Wait(_))));
        }
        arrivals.note((Rank(0), 20), None, arrivals.newest());
        assert_eq!(enters(asks(20), latest, &arrivals), enter(3));
        arrivals.note((Rank(0), 30), None, arrivals.newest());
        assert_eq!(enters(asks(30), latest, &arrivals), enter(3));
        let older = enters(asks(20), latest, &arrivals);
        assert!(matches!(older, Err(Refusal::LeftOver { .. })), "a later one is there");
    }

    #[test]
    fn a_rank_enters_with_the_rank_0_that_it_was_alive_with_and_with_no_other() {
        let state = attempt_with(2, &[(0, 10), (2, 12)], Some("job/1"));
        let latest = Some((&state, Launch::Any));
        let mut arrivals = Arrivals::begin(7);
        let asks = |rank, process, launch| Asks(rank, process, None, Some(launch), true);
        let (zero, first) = ((Rank(0), 10), (Rank(1), 11));
        // A rank 0 that was killed after it had opened the attempt sends nothing more.
        for process in [zero, first] {
            arrivals.note(process, None, 0);
            arrivals.note(process, None, arrivals.newest());
        }
        assert!(matches!(enters(asks(1, 11, "job/1"), latest, &arrivals), Ok(Choice::Wait(_))));
        arrivals.note(zero, None, arrivals.newest());
        assert_eq!(enters(asks(1, 11, "job/1"), latest, &arrivals), enter(2));
        for other in ["job/2", "other/1"] {
            let waits = enters(asks(1, 11, other), latest, &arrivals);
            assert!(matches!(waits, Ok(Choice::Wait(_))), "{other}: {waits:?}");
        }
        let old = enters(asks(1, 11, "job/0"), latest, &arrivals);
        assert!(matches!(old, Err(Refusal::OldLaunch { .. })), "{old:?}");
        // A process of this rank has joined already: this one is of another launch, whichever
        // processes live.
        arrivals.note((Rank(2), 99), None, 0);
        arrivals.note((Rank(2), 99), None, arrivals.newest());
        arrivals.note(zero, None, arrivals.newest());
        assert!(matches!(enters(asks(2, 99, "job/1"), latest, &arrivals), Ok(Choice::Wait(_))));
    }
}
