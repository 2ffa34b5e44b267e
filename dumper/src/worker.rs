//! The recorder's own thread: it finds the coordinator, enters the run, and then does what the
//! queue holds.

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
use crate::recording::Recording;
use crate::rendezvous::Rendezvous;
use crate::scalars;
use crate::session::Session;
use crate::vouch::Vouching;

/// The pauses between tries while the coordinator is looked for; they grow.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// What each rank of the job adds to the longest pause, so that all of them together ask at most
/// 5,000 times a second.
const PAUSE_PER_RANK: Duration = Duration::from_micros(200);

/// Starts the thread. It is not joined, as a hung disk must not hold up the end of the job:
/// [`crate::queue::Queue::wait_end`] waits for it, for a bounded time.
pub(crate) fn spawn(recording: Arc<Recording>) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("backtape-recorder".into());
    thread.spawn(move || {
        let body = AssertUnwindSafe(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            match runtime {
                Ok(runtime) => {
                    runtime.block_on(work(recording.clone()));
                    runtime.shutdown_background();
                }
                Err(error) => {
                    give_up(&recording, &format!("its runtime cannot be started: {error}"))
                }
            }
        });
        if catch_unwind(body).is_err() {
            give_up(&recording, "its thread panicked, which is a bug in backtape");
        }
        recording.queue.end();
    })?;
    Ok(())
}

async fn work(recording: Arc<Recording>) {
    let incarnation = RandomState::new().hash_one(std::process::id());
    let settings = &recording.plan.settings;
    if settings.coordinator.is_some() || settings.rank > 0 {
        return match enter(&recording, incarnation).await {
            Ok((client, entered)) => record_all(&recording, client, &entered, None).await,
            Err(why) => give_up(&recording, &why),
        };
    }
    match Embedded::start(&recording.plan).await {
        Ok(embedded) => record_beside(&recording, incarnation, embedded).await,
        Err(error) => give_up(&recording, &error.to_string()),
    }
}

/// Records on rank 0 with the coordinator inside. It enters the run first, so that it opens the
/// attempt, and then lets the other ranks find the coordinator.
async fn record_beside(recording: &Arc<Recording>, incarnation: u64, embedded: Embedded) {
    let plan = &recording.plan;
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
            // In a bucket the token would lie beside the dumps, so a job of several ranks that
            // records into one has a coordinator of its own.
            let alone = is_url(&directory);
            if !alone && let Err(error) = rendezvous.publish(&directory) {
                let path = Rendezvous::path(&directory);
                recording.fault(format!(
                    "the other ranks cannot find the coordinator: {} was not written: {error}",
                    path.display()
                ));
            }
            record_all(recording, client, &entered, Some(&embedded)).await;
            if !alone {
                rendezvous.withdraw(&directory);
            }
        }
        Err(error) => give_up(recording, &error.to_string()),
    }
    embedded.stop(recording.patience.deadline(STOP_DEADLINE)).await;
}

/// Records tensors and scalars side by side, so that no row waits for a step's commit.
async fn record_all(
    recording: &Arc<Recording>,
    client: Client,
    entered: &Entered,
    embedded: Option<&Embedded>,
) {
    let _vouching = match entered.vouch.then(|| Vouching::start(recording.clone(), &client)) {
        Some(Err(error)) => {
            recording
                .fault(format!("other ranks cannot enter: a thread cannot be started: {error}"));
            None
        }
        vouching => vouching.and_then(Result::ok),
    };
    let scalars = scalars::work(recording, client.clone(), entered);
    tokio::join!(record(recording, client, entered, embedded), scalars);
}

/// Does what the queue holds until the recorder is closed, then waits for commits.
async fn record(
    recording: &Arc<Recording>,
    client: Client,
    entered: &Entered,
    embedded: Option<&Embedded>,
) {
    let heartbeat = start_heartbeat(recording, &client);
    let mut session = match Session::new(recording.clone(), client, entered).await {
        Ok(session) => session,
        Err(error) => return give_up(recording, &format!("it has no room to spool in: {error}")),
    };
    work_off(recording, &mut session).await;
    // Steps that the last steps of some rank triggered are asked for after the recorder was closed.
    if let Some(heartbeat) = heartbeat {
        heartbeat.finish(&recording.patience.deadline(END_DEADLINE)).await;
        work_off(recording, &mut session).await;
    }
    match embedded {
        Some(embedded) => session.settle_all(embedded).await,
        None => session.settle().await,
    }
}

async fn work_off(recording: &Recording, session: &mut Session) {
    while let Some(command) = recording.queue.next().await {
        faults::pass("recorder.thread");
        match command {
            Command::Capture(step, capture) => session.write(step, *capture),
            Command::Close(step, ending) => session.close(step, *ending).await,
            Command::Ring(step) => session.write_ring(step).await,
            Command::Abandon(step) => session.abandon(step).await,
        }
    }
}

/// Starts the heartbeat, where the settings ask for one. The selected steps are recorded without it
/// too.
fn start_heartbeat(recording: &Arc<Recording>, client: &Client) -> Option<Heartbeat> {
    if !recording.plan.settings.watches() {
        return None;
    }
    match Heartbeat::start(recording.clone(), client.clone()) {
        Ok(heartbeat) => Some(heartbeat),
        Err(error) => {
            recording
                .fault(format!("no heartbeats are sent: their thread cannot be started: {error}"));
            None
        }
    }
}

/// Looks for the coordinator and enters the run, within the join deadline.
async fn enter(recording: &Recording, incarnation: u64) -> Result<(Client, Entered), String> {
    let plan = &recording.plan;
    let deadline = recording.patience.deadline(plan.settings.join_deadline);
    let begin = Instant::now();
    let slowest = LONGEST_PAUSE.max(PAUSE_PER_RANK * plan.settings.world_size);
    let mut pause = FIRST_PAUSE;
    let mut client = None;
    loop {
        let tried = deadline.bound(try_enter(recording, incarnation, &mut client)).await;
        let why = match tried {
            Some(Ok(Answered::Inside(entered))) => {
                recording.patience.progressed();
                return Ok((client.ok_or("it has no connection")?, entered));
            }
            Some(Ok(Answered::Waits(why))) => format!("its launch was not found: {why}"),
            Some(Err(CallError::Refused(why))) => return Err(why),
            // A coordinator that the settings name meant this rank. Without one, the file of an
            // earlier launch may have led to another coordinator, and rank 0 replaces that file.
            Some(Err(CallError::NotNow(why))) if plan.settings.coordinator.is_some() => {
                return Err(why);
            }
            Some(Err(error)) => format!("no coordinator was found: {error}"),
            None => "no coordinator was found: it accepts connections and does not answer".into(),
        };
        recording.patience.unanswered(&why);
        if pause >= deadline.left() {
            let seconds = begin.elapsed().as_secs_f64();
            return Err(format!("it did not enter the run within {seconds:.1} s: {why}"));
        }
        deadline.pause(jittered(pause)).await;
        pause = (pause * 2).min(slowest);
    }
}

/// Tries once to enter. The connection to a coordinator that the settings name is kept for the next
/// try; one inside rank 0 may have another address by then.
async fn try_enter(
    recording: &Recording,
    incarnation: u64,
    kept: &mut Option<Client>,
) -> Result<Answered, CallError> {
    let plan = &recording.plan;
    let (address, access) = match &plan.settings.coordinator {
        Some(address) => (address.clone(), plan.access.clone()),
        None => {
            *kept = None;
            rendezvous(recording)?
        }
    };
    let encrypted = access.tls.is_some();
    let client = match kept {
        Some(client) => client,
        None => kept.insert(Client::new(&address, access, plan, incarnation)?),
    };
    client.join(plan).await.map_err(|error| match error {
        // Somebody listens there and closes the connection: most likely it asks for a certificate.
        CallError::Unreachable(why) if !encrypted && !why.contains("refused") => {
            CallError::Unreachable(format!(
                "{address}: {why}; where the coordinator has --credentials, set BACKTAPE_CREDENTIALS"
            ))
        }
        CallError::Unreachable(why) => CallError::Unreachable(format!("{address}: {why}")),
        other => other,
    })
}

fn rendezvous(recording: &Recording) -> Result<(String, Access), CallError> {
    let plan = &recording.plan;
    let directory = plan.run_directory();
    let path = Rendezvous::path(&directory);
    let rendezvous = Rendezvous::read(&directory).ok_or_else(|| {
        CallError::Unreachable(format!("rank 0 has not written {} yet", path.display()))
    })?;
    if rendezvous.host != plan.host.as_str() {
        return Err(CallError::Unreachable(format!(
            "ranks run on several hosts (rank 0 on {}, rank {} on {}): start `coordinator` and set \
             BACKTAPE_COORDINATOR",
            rendezvous.host, plan.settings.rank, plan.host
        )));
    }
    Ok((rendezvous.address, Access { tls: None, token: rendezvous.token }))
}

/// Gives recording up: says why, once, and names all that was queued.
fn give_up(recording: &Recording, why: &str) {
    let reason = format!("nothing is recorded on rank {}: {why}", recording.rank());
    recording.fault(reason.clone());
    scalars::abandon(recording);
    for command in recording.queue.kill(&reason) {
        match command {
            Command::Capture(step, capture) => {
                let microbatch = capture.key.microbatch.map(|mb| mb.0);
                recording.omitted(step, capture.key.tensor.as_str(), microbatch, &reason);
            }
            Command::Close(step, _) | Command::Ring(step) | Command::Abandon(step) => {
                recording.summary().steps_partial.insert(step);
            }
        }
    }
}
