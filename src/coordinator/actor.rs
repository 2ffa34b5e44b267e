//! The thread that owns the runs and their journals. Requests arrive through a bounded channel; all
//! that are waiting share one fsync.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::{mpsc, oneshot};

use super::config::{Config, StartError};
use super::event::Event;
use super::limits::{MAX_BATCH, QUEUE_REQUESTS, REQUEST_DEADLINE};
use super::metrics::Totals;
use super::refusal::Refusal;
use super::request::{Admission, FileClaim, Member, Reply, Request};
use super::runs::Runs;
use super::state::Outcome;
use super::status::Unsettled;
use crate::faults;
use crate::identity::Step;
use crate::manifest::FileRecord;
use crate::store::Backend;

/// Sends requests to the actor, which ends when the last handle is dropped.
#[derive(Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
}

impl Handle {
    /// The steps that are not committed.
    pub async fn unsettled(&self) -> Result<Vec<Unsettled>, Refusal> {
        self.ask(Request::Unsettled).await
    }

    /// The totals over the newest attempt of each run.
    pub(crate) async fn totals(&self) -> Result<Totals, Refusal> {
        self.ask(Request::Totals).await
    }

    /// Sends one request and waits for its answer, within the deadline.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> Request,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        let exchange = async {
            let sent = self.requests.send(request(reply)).await;
            sent.map_err(|_| Refusal::Stopping)?;
            answer.await.map_err(|_| Refusal::Stopping)?
        };
        let answered = tokio::time::timeout(REQUEST_DEADLINE, exchange).await;
        answered.unwrap_or(Err(Refusal::Deadline(REQUEST_DEADLINE.as_secs())))
    }

    /// Has the actor check its deadlines. Dropped if the queue is full: the next tick comes soon.
    pub(crate) fn tick(&self) {
        let _ = self.requests.try_send(Request::Tick);
    }
}

/// Loads the store and starts the thread; the receiver completes when the thread has ended.
pub(crate) fn start(
    config: &Config,
    backend: &Backend,
) -> Result<(Handle, oneshot::Receiver<()>), StartError> {
    let runs = Runs::open(config, backend)?;
    let (requests, inbox) = mpsc::channel(QUEUE_REQUESTS);
    let (ended, end) = oneshot::channel();
    let thread = std::thread::Builder::new().name("backtape-journal".into());
    let body = move || {
        serve(runs, inbox);
        // A panic drops `ended`, which completes the receiver too.
        let _ = ended.send(());
    };
    thread.spawn(body).map_err(StartError::Thread)?;
    Ok((Handle { requests }, end))
}

/// Sends one request's answer; called once the batch is durable.
pub(super) type Answer = Box<dyn FnOnce(&mut Runs)>;

fn serve(mut runs: Runs, mut inbox: mpsc::Receiver<Request>) {
    let mut batch = Vec::new();
    let late = faults::seeded("ack-before-journal");
    while let Some(first) = inbox.blocking_recv() {
        if late {
            runs.flush(now_ms());
        }
        batch.push(first);
        while batch.len() < MAX_BATCH
            && let Ok(next) = inbox.try_recv()
        {
            batch.push(next);
        }
        let now_ms = now_ms();
        let answers: Vec<Answer> =
            batch.drain(..).map(|request| handle(&mut runs, request, now_ms)).collect();
        if !late {
            faults::pass("actor.before-flush");
            runs.flush(now_ms);
        }
        for answer in answers {
            faults::pass("actor.before-answer");
            answer(&mut runs);
        }
    }
}

/// Checks and stages one request; its answer waits for the flush.
pub(super) fn handle(runs: &mut Runs, request: Request, now_ms: u64) -> Answer {
    match request {
        Request::Join(join, reply) => {
            let (run, process) = (join.run.clone(), (join.rank, join.incarnation));
            let choice = runs.join(join, now_ms);
            answer(reply, move |runs| runs.answer(&run, process, choice?))
        }
        Request::Admit(member, step, claims, reply) => {
            let admissions: Vec<_> =
                claims.iter().map(|claim| admit(runs, &member, step, claim)).collect();
            answer(reply, move |runs| {
                // A file that is known may have been reported in this batch: if its flush failed,
                // this fails.
                runs.log(&member.run, member.attempt).map(|_| admissions)
            })
        }
        Request::Report(member, step, files, reply) => {
            let mut stage = |file: FileRecord| {
                let shards = file.shards.len() as u64;
                runs.submit(&member, Event::Reported { step, file }, now_ms).map(|()| shards)
            };
            // If the store cannot take one of the files for now, the whole request is refused, so
            // that the rank sends it again: a refusal of a single file would be final.
            let for_now = |staged: Result<u64, Refusal>| match staged {
                Err(refusal @ Refusal::Storage(_)) => Err(refusal),
                outcome => Ok(outcome),
            };
            let staged: Result<Vec<_>, _> = files.into_iter().map(|f| for_now(stage(f))).collect();
            answer(reply, move |runs| runs.log(&member.run, member.attempt).and(staged))
        }
        Request::Close(member, step, closing, reply) => {
            let rank = member.rank;
            let event = Event::Closed { step, rank, closing };
            let staged = runs.submit(&member, event, now_ms);
            answer(reply, move |runs| {
                staged?;
                let log = runs.log(&member.run, member.attempt)?;
                Ok(log.state.is_committed(step))
            })
        }
        Request::Status(run, attempt, ask, reply) => {
            answer(reply, move |runs| runs.log(&run, attempt).map(|log| log.state.status(ask)))
        }
        Request::Overview(run, reply) => answer(reply, move |runs| runs.overview(&run)),
        Request::Place(member, reply) => {
            let place = runs
                .member(&member)
                .map(|log| (log.directory.clone(), log.state.opened().world_size));
            answer(reply, move |_| place)
        }
        Request::Heartbeat(member, beat, reply) => {
            let refused = runs.heartbeat(&member, &beat, now_ms);
            answer(reply, move |runs| runs.orders(&member, &beat, refused?, now_ms))
        }
        Request::Plan(run, ask, reply) => {
            let planned = runs.plan(&run, ask, now_ms);
            answer(reply, move |runs| {
                let (attempt, plan) = planned?;
                runs.log(&run, attempt).map(|_| plan)
            })
        }
        Request::Trigger(run, ask, reply) => {
            let triggered = runs.trigger(&run, ask, now_ms);
            answer(reply, move |runs| {
                let (attempt, trigger) = triggered?;
                runs.log(&run, attempt).map(|_| trigger)
            })
        }
        Request::Totals(reply) => answer(reply, |runs| Ok(runs.totals())),
        Request::Unsettled(reply) => answer(reply, |runs| Ok(runs.unsettled())),
        Request::Tick => {
            runs.tick(now_ms);
            Box::new(|_| {})
        }
    }
}

fn answer<T: 'static>(
    reply: Reply<T>,
    judge: impl FnOnce(&mut Runs) -> Result<T, Refusal> + 'static,
) -> Answer {
    // Sending fails only if the caller gave up.
    Box::new(move |runs| drop(reply.send(judge(runs))))
}

fn admit(
    runs: &mut Runs,
    member: &Member,
    step: Step,
    claim: &FileClaim,
) -> Result<Admission, Refusal> {
    let log = runs.member(member)?;
    log.recall(step)?;
    let outcome = log.state.check_header(step, member.rank, &claim.name, claim.header_hash)?;
    Ok(match outcome {
        Outcome::Known => Admission::Known(log.state.shards(step, member.rank, &claim.name)),
        Outcome::New => Admission::Wanted(log.directory.clone(), log.state.opened().world_size),
    })
}

/// The coordinator's clock. Only deadlines and `run.json` use it.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
