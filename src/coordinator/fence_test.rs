//! Goal: if two coordinators serve one directory, only one writes the journal, and nothing that it
//! acknowledged is lost. Method: a second coordinator loads the same journal, as if the first had
//! been restarted without being dead; both continue.

use super::actor::handle;
use super::attempt_log::AttemptLog;
use super::config::Config;
use super::event::Event;
use super::journal;
use super::recall_test::{close, directory, job, report};
use super::refusal::Refusal;
use super::request::{Join, Member, Reply, Request};
use super::runs::Runs;
use crate::identity::{Name, Rank, Step};
use crate::store::Backend;
use crate::store::layout::JOURNAL;

/// A time after the pause between two tries of a refused batch.
const LATER_MS: u64 = 60_000;

fn loaded(store: &std::path::Path) -> AttemptLog {
    AttemptLog::load(Backend::Directory, directory(store)).unwrap().unwrap()
}

/// Submits an event and flushes; says whether it may be acknowledged.
fn taken(log: &mut AttemptLog, step: u64, now_ms: u64) -> Result<(), Refusal> {
    log.submit(report(step, 0, 0), now_ms)?;
    log.flush(now_ms);
    log.usable()
}

#[test]
fn a_second_coordinator_cuts_nothing_off_that_the_first_acknowledged() {
    let store = tempfile::tempdir().unwrap();
    let mut first = job(store.path());
    let mut second = loaded(store.path());
    taken(&mut first, 100, 0).unwrap();
    let path = directory(store.path()).path.join(JOURNAL);
    let before = std::fs::read(&path).unwrap();
    let said = taken(&mut second, 101, 0).unwrap_err().to_string();
    assert!(said.contains("another coordinator is writing it"), "{said}");
    assert_eq!(std::fs::read(&path).unwrap(), before, "what was acknowledged was cut off");
    // The first has ended, but the second has not read what it wrote in the meantime.
    drop(first);
    let said = taken(&mut second, 102, LATER_MS).unwrap_err().to_string();
    assert!(said.contains("another coordinator"), "{said}");
    second.flush(LATER_MS);
    let said = second.usable().unwrap_err().to_string();
    assert!(said.contains("restart"), "{said}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    drop(second);
    let mut third = loaded(store.path());
    taken(&mut third, 101, 0).unwrap();
    assert_eq!(journal::read_file(&path, |_| Ok(())).unwrap().torn_bytes, 0);
}

#[test]
fn a_second_coordinator_goes_on_where_the_first_stopped_once_that_is_gone() {
    let store = tempfile::tempdir().unwrap();
    let first = job(store.path());
    let mut second = loaded(store.path());
    let refused = taken(&mut second, 100, 0).unwrap_err();
    // The refusal tells ranks to try again.
    assert!(matches!(refused, Refusal::Storage(_)), "{refused}");
    drop(first);
    second.flush(LATER_MS);
    second.usable().unwrap();
    second.submit(close(100, 0, 1), LATER_MS).unwrap();
    second.flush(LATER_MS);
    drop(second);
    assert_eq!(loaded(store.path()).state.files(Step(100), Rank(0)).len(), 1);
}

/// Goal: a report that arrives just when the store works again is not refused for good. Method: the
/// request whose flush writes the stalled journal is one that was refused because of it.
#[test]
fn a_report_that_the_store_did_not_take_for_now_is_told_to_come_back_whole() {
    let store = tempfile::tempdir().unwrap();
    let mut first = Served::open(store.path());
    let member = first.join();
    first.report(&member, 0, 0).unwrap();
    let mut second = Served::open(store.path());
    assert!(matches!(second.report(&member, 1, 0), Err(Refusal::Storage(_))));
    drop(first);
    // When it is answered the journal is written, but this file is not in it.
    let healing = second.report(&member, 2, LATER_MS);
    assert!(matches!(healing, Err(Refusal::Storage(_))), "{healing:?}");
    assert!(second.report(&member, 2, LATER_MS).unwrap()[0].is_ok());
}

/// Serves one request at a time, as the actor does.
struct Served(Runs);

impl Served {
    fn open(store: &std::path::Path) -> Served {
        Served(Runs::open(&Config::new(store, 1), &Backend::Directory).unwrap())
    }

    fn ask<T>(
        &mut self,
        request: impl FnOnce(Reply<T>) -> Request,
        now_ms: u64,
    ) -> Result<T, Refusal> {
        let (reply, mut answer) = tokio::sync::oneshot::channel();
        let judge = handle(&mut self.0, request(reply), now_ms);
        self.0.flush(now_ms);
        judge(&mut self.0);
        answer.try_recv().unwrap()
    }

    fn join(&mut self) -> Member {
        let join = Join {
            run: Name::new("run").unwrap(),
            rank: Rank(0),
            world_size: 1,
            incarnation: 7,
            host: Name::new("h").unwrap(),
            attempt: None,
            format_version: crate::FORMAT_VERSION,
            mesh: Default::default(),
            versions: Default::default(),
            launch: None,
            heard: None,
        };
        let (run, rank, incarnation) = (join.run.clone(), join.rank, join.incarnation);
        let answered = self.ask(|reply| Request::Join(join, reply), 0).unwrap();
        let attempt = answered.entry.unwrap().attempt;
        Member { run, attempt, rank, incarnation }
    }

    fn report(&mut self, member: &Member, step: u64, now_ms: u64) -> Answers {
        let Event::Reported { step, file } = report(step, 0, 0) else { unreachable!() };
        let request = |reply| Request::Report(member.clone(), step, vec![file], reply);
        self.ask(request, now_ms)
    }
}

/// The outcome of each file.
type Answers = Result<Vec<Result<u64, Refusal>>, Refusal>;
