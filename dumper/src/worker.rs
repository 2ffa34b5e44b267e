//! The recorder's own thread: finds the coordinator, then works off the queue.

use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use backtape::credentials::Access;
use backtape::faults;
use backtape::store::backend::is_url;
use tokio::time::Instant;

use crate::client::{Answered, CallError, Client, Entered, jittered};
use crate::embedded::{Embedded, STOP_DEADLINE};
use crate::heartbeat::{END_DEADLINE, Heartbeat};
use crate::queue::Command;
use crate::recorder::Shared;
use crate::rendezvous::Rendezvous;
use crate::scalars;
use crate::session::Session;
use crate::vouch::Vouching;

/// Pauses while the coordinator is looked for.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// What each rank of the job adds to the longest: together they ask 5,000 times a second at most.
const PAUSE_PER_RANK: Duration = Duration::from_micros(200);

/// Starts the thread. It is not joined: a hung disk must not hold up the end
/// of the job; [`crate::queue::Queue::wait_end`] waits for it, bounded.
pub(crate) fn spawn(shared: Arc<Shared>) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("backtape-recorder".into());
    thread.spawn(move || {
        let body = AssertUnwindSafe(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            match runtime {
                Ok(runtime) => {
                    runtime.block_on(work(shared.clone()));
                    runtime.shutdown_background();
                }
                Err(error) => give_up(&shared, &format!("its runtime cannot be started: {error}")),
            }
        });
        if catch_unwind(body).is_err() {
            give_up(&shared, "its thread panicked, which is a bug in backtape");
        }
        shared.queue.end();
    })?;
    Ok(())
}

async fn work(shared: Arc<Shared>) {
    let incarnation = RandomState::new().hash_one(std::process::id());
    let settings = &shared.plan.settings;
    if settings.coordinator.is_some() || settings.rank > 0 {
        return match enter(&shared, incarnation).await {
            Ok((client, entered)) => record_all(&shared, client, &entered, None).await,
            Err(why) => give_up(&shared, &why),
        };
    }
    match Embedded::start(&shared.plan).await {
        Ok(embedded) => carry(&shared, incarnation, embedded).await,
        Err(error) => give_up(&shared, &error.to_string()),
    }
}

/// Rank 0 with the coordinator inside: enters first, so that the attempt is
/// its own, then lets the other ranks find it.
async fn carry(shared: &Arc<Shared>, incarnation: u64, embedded: Embedded) {
    let plan = &shared.plan;
    let address = embedded.address.to_string();
    let directory = plan.run_directory();
    let rendezvous = Rendezvous {
        address: address.clone(),
        host: plan.host.to_string(),
        run: plan.run.to_string(),
        launch: incarnation,
        token: Some(embedded.token.clone()),
    };
    let access = Access { tls: None, token: Some(embedded.token.clone()) };
    let entered = async {
        let mut client = Client::new(&address, access, plan, incarnation)?;
        match client.join(plan).await? {
            Answered::Inside(entered) => Ok((client, entered)),
            Answered::Waits(why) => Err(CallError::NotNow(why)),
        }
    };
    match entered.await {
        Ok((client, entered)) => {
            // In a bucket the token would lie with the dumps, so there a job of several ranks
            // has a coordinator of its own.
            let alone = is_url(&directory);
            if !alone && let Err(error) = rendezvous.publish(&directory) {
                let path = Rendezvous::path(&directory);
                shared.fault(format!(
                    "the other ranks cannot find the coordinator: {} was not written: {error}",
                    path.display()
                ));
            }
            record_all(shared, client, &entered, Some(&embedded)).await;
            if !alone {
                rendezvous.withdraw(&directory);
            }
        }
        Err(error) => give_up(shared, &error.to_string()),
    }
    embedded.stop(shared.patience.deadline(STOP_DEADLINE)).await;
}

/// Tensors and scalars side by side: a row does not wait for a step's commit.
async fn record_all(
    shared: &Arc<Shared>,
    client: Client,
    entered: &Entered,
    embedded: Option<&Embedded>,
) {
    let _vouching = match entered.vouch.then(|| Vouching::start(shared.clone(), &client)) {
        Some(Err(error)) => {
            shared.fault(format!("other ranks cannot enter: a thread cannot be started: {error}"));
            None
        }
        vouching => vouching.and_then(Result::ok),
    };
    let scalars = scalars::work(shared, client.clone(), entered);
    tokio::join!(record(shared, client, entered, embedded), scalars);
}

/// Works off the queue until the recorder is closed, then waits for commits.
async fn record(
    shared: &Arc<Shared>,
    client: Client,
    entered: &Entered,
    embedded: Option<&Embedded>,
) {
    let heartbeat = start_heartbeat(shared, &client);
    let mut session = match Session::new(shared.clone(), client, entered).await {
        Ok(session) => session,
        Err(error) => return give_up(shared, &format!("it has no room to spool in: {error}")),
    };
    work_off(shared, &mut session).await;
    // What was triggered by the last steps is asked for after the recorder was closed.
    if let Some(heartbeat) = heartbeat {
        heartbeat.finish(&shared.patience.deadline(END_DEADLINE)).await;
        work_off(shared, &mut session).await;
    }
    match embedded {
        Some(embedded) => session.settle_all(embedded).await,
        None => session.settle().await,
    }
}

async fn work_off(shared: &Shared, session: &mut Session) {
    while let Some(command) = shared.queue.next().await {
        faults::pass("recorder.thread");
        match command {
            Command::Capture(step, queued) => session.write(step, *queued),
            Command::Close(step, ending) => session.close(step, *ending).await,
            Command::Ring(step) => session.write_ring(step).await,
            Command::Abandon(step) => session.abandon(step).await,
        }
    }
}

/// Where the job is watched. Without heartbeats the selected steps are recorded all the same.
fn start_heartbeat(shared: &Arc<Shared>, client: &Client) -> Option<Heartbeat> {
    if !shared.plan.settings.watches() {
        return None;
    }
    match Heartbeat::start(shared.clone(), client.clone()) {
        Ok(heartbeat) => Some(heartbeat),
        Err(error) => {
            shared
                .fault(format!("no heartbeats are sent: their thread cannot be started: {error}"));
            None
        }
    }
}

/// Looks for the coordinator and enters the run, within the join deadline.
async fn enter(shared: &Shared, incarnation: u64) -> Result<(Client, Entered), String> {
    let plan = &shared.plan;
    let deadline = shared.patience.deadline(plan.settings.join_deadline);
    let begin = Instant::now();
    let slowest = LONGEST_PAUSE.max(PAUSE_PER_RANK * plan.settings.world_size);
    let mut pause = FIRST_PAUSE;
    let mut client = None;
    loop {
        let tried = deadline.bound(try_enter(shared, incarnation, &mut client)).await;
        let why = match tried {
            Some(Ok(Answered::Inside(entered))) => {
                shared.patience.progressed();
                return Ok((client.ok_or("it has no connection")?, entered));
            }
            Some(Ok(Answered::Waits(why))) => format!("its launch was not found: {why}"),
            Some(Err(CallError::Refused(why))) => return Err(why),
            // In a job with its own coordinator a stale file may have led to
            // another launch: rank 0 replaces it. A remote one meant what it said.
            Some(Err(CallError::NotNow(why))) if plan.settings.coordinator.is_some() => {
                return Err(why);
            }
            Some(Err(error)) => format!("no coordinator was found: {error}"),
            None => "no coordinator was found: it accepts connections and does not answer".into(),
        };
        shared.patience.unanswered(&why);
        if pause >= deadline.left() {
            let seconds = begin.elapsed().as_secs_f64();
            return Err(format!("it did not enter the run within {seconds:.1} s: {why}"));
        }
        deadline.pause(jittered(pause)).await;
        pause = (pause * 2).min(slowest);
    }
}

/// One try. The connection to a coordinator of its own is kept for the next one; where rank 0
/// carries it, its address may be another by then.
async fn try_enter(
    shared: &Shared,
    incarnation: u64,
    kept: &mut Option<Client>,
) -> Result<Answered, CallError> {
    let plan = &shared.plan;
    let (address, access) = match &plan.settings.coordinator {
        Some(address) => (address.clone(), plan.access.clone()),
        None => {
            *kept = None;
            rendezvous(shared)?
        }
    };
    let encrypted = access.tls.is_some();
    let client = match kept {
        Some(client) => client,
        None => kept.insert(Client::new(&address, access, plan, incarnation)?),
    };
    client.join(plan).await.map_err(|error| match error {
        // Someone is there and breaks off: most likely it wants to see a certificate.
        CallError::Unreachable(why) if !encrypted && !why.contains("refused") => {
            CallError::Unreachable(format!(
                "{address}: {why}; where the coordinator has --credentials, set BACKTAPE_CREDENTIALS"
            ))
        }
        CallError::Unreachable(why) => CallError::Unreachable(format!("{address}: {why}")),
        other => other,
    })
}

fn rendezvous(shared: &Shared) -> Result<(String, Access), CallError> {
    let plan = &shared.plan;
    let directory = plan.run_directory();
    let path = Rendezvous::path(&directory);
    let found = Rendezvous::read(&directory).ok_or_else(|| {
        CallError::Unreachable(format!("rank 0 has not written {} yet", path.display()))
    })?;
    if found.host != plan.host.as_str() {
        return Err(CallError::Unreachable(format!(
            "ranks run on several hosts (rank 0 on {}, rank {} on {}): start `coordinator` and set \
             BACKTAPE_COORDINATOR",
            found.host, plan.settings.rank, plan.host
        )));
    }
    Ok((found.address, Access { tls: None, token: found.token }))
}

/// Recording is over before it began: says why, once, and names what was queued.
fn give_up(shared: &Shared, why: &str) {
    let reason = format!("nothing is recorded on rank {}: {why}", shared.rank());
    shared.fault(reason.clone());
    scalars::abandon(shared);
    for command in shared.queue.kill(&reason) {
        match command {
            Command::Capture(step, queued) => {
                let microbatch = queued.key.microbatch.map(|mb| mb.0);
                shared.omitted(step, queued.key.tensor.as_str(), microbatch, &reason);
            }
            Command::Close(step, _) | Command::Ring(step) | Command::Abandon(step) => {
                shared.summary().steps_partial.insert(step);
            }
        }
    }
}
