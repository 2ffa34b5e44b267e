//! Which attempt a rank enters: pure, so that every case can be tried.

use super::refusal::Refusal;
use super::state::AttemptState;
use crate::identity::{Attempt, Name, Rank};

/// A rank that asks to enter a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entrant<'a> {
    /// Which run.
    pub run: &'a Name,
    /// Who.
    pub rank: Rank,
    /// Which process.
    pub incarnation: u64,
    /// The attempt, where the launcher counts restarts itself.
    pub explicit: Option<Attempt>,
}

/// The newest attempt of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latest<'a> {
    /// Its number.
    pub attempt: Attempt,
    /// What is known of it, or why nothing can be added to it.
    pub state: Result<&'a AttemptState, &'a str>,
    /// Whose launch it is.
    pub launch: Launch,
}

/// Whose launch an attempt is. An embedded coordinator is one launch: what it
/// finds on disk is older, and what it opened itself stays its only one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Launch {
    /// A coordinator that outlives launches cannot know.
    #[default]
    Any,
    /// An earlier one's.
    Older,
    /// This one's.
    Own,
}

/// Chooses the attempt; one above the latest means that it is to be opened.
pub(crate) fn choose(
    entrant: Entrant<'_>,
    latest: Option<Latest<'_>>,
    world_size: u32,
) -> Result<Attempt, Refusal> {
    let Some(latest) = latest else {
        return Ok(entrant.explicit.unwrap_or_default());
    };
    if let Some(attempt) = entrant.explicit {
        return if attempt < latest.attempt {
            Err(Refusal::OldAttempt {
                run: entrant.run.clone(),
                rank: entrant.rank,
                attempt,
                latest: latest.attempt,
            })
        } else {
            Ok(attempt)
        };
    }
    let next = Attempt(latest.attempt.0.saturating_add(1));
    match latest.launch {
        Launch::Older => return Ok(next),
        Launch::Own => return Ok(latest.attempt),
        Launch::Any => {}
    }
    let state = latest.state.map_err(|reason| Refusal::Poisoned {
        run: entrant.run.clone(),
        attempt: latest.attempt,
        reason: reason.into(),
    })?;
    // A job that was relaunched with another size is another launch.
    if state.opened().world_size != world_size {
        return Ok(next);
    }
    match state.check_member(entrant.rank, entrant.incarnation) {
        Err(_) if state.has_joined(entrant.rank) => Ok(next),
        _ => Ok(latest.attempt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::event::{Event, Joined, Opened};
    use crate::placement::Mesh;

    fn attempt_with(number: u32, ranks: &[(u32, u64)]) -> AttemptState {
        let mut state = AttemptState::new(Opened {
            format_version: crate::FORMAT_VERSION,
            run: Name::new("run").unwrap(),
            attempt: Attempt(number),
            world_size: 4,
            started_ms: 0,
            mesh: Mesh::default(),
            versions: Default::default(),
        });
        for &(rank, incarnation) in ranks {
            let joined = Joined {
                rank: Rank(rank),
                incarnation,
                host: Name::new("h").unwrap(),
                mesh: Mesh::default(),
            };
            state.apply(Event::Joined(joined), 0);
        }
        state
    }

    fn enters(
        rank: u32,
        incarnation: u64,
        explicit: Option<u32>,
        latest: Option<(&AttemptState, Launch)>,
    ) -> Result<u32, Refusal> {
        let run = Name::new("run").unwrap();
        let entrant =
            Entrant { run: &run, rank: Rank(rank), incarnation, explicit: explicit.map(Attempt) };
        let latest = latest.map(|(state, launch)| Latest {
            attempt: state.opened().attempt,
            state: Ok(state),
            launch,
        });
        choose(entrant, latest, 4).map(|attempt| attempt.0)
    }

    #[test]
    fn a_new_rank_enters_the_latest_attempt_and_a_restarted_one_opens_the_next() {
        let state = attempt_with(2, &[(0, 10), (1, 11)]);
        let latest = Some((&state, Launch::Any));
        assert_eq!(enters(2, 12, None, latest), Ok(2));
        assert_eq!(enters(1, 11, None, latest), Ok(2));
        assert_eq!(enters(1, 99, None, latest), Ok(3));
        assert_eq!(enters(0, 1, None, None), Ok(0));
    }

    #[test]
    fn an_explicit_attempt_wins_unless_it_is_older_than_the_latest() {
        let state = attempt_with(2, &[(0, 10)]);
        let latest = Some((&state, Launch::Any));
        assert_eq!(enters(0, 99, Some(5), latest), Ok(5));
        assert_eq!(enters(1, 11, Some(2), latest), Ok(2));
        assert!(matches!(enters(0, 10, Some(1), latest), Err(Refusal::OldAttempt { .. })));
        assert_eq!(enters(0, 1, Some(3), None), Ok(3));
    }

    #[test]
    fn what_an_embedded_coordinator_finds_on_disk_is_an_older_launch() {
        let state = attempt_with(0, &[(0, 10)]);
        assert_eq!(enters(1, 11, None, Some((&state, Launch::Older))), Ok(1));
        let restarted = enters(0, 99, None, Some((&state, Launch::Own)));
        assert_eq!(restarted, Ok(0), "the join itself refuses it: one launch, one attempt");
    }
}
