//! The client of the command line: sends one question to a running coordinator. Ranks have their
//! own client.

use std::path::Path;
use std::time::{Duration, Instant};

use backtape_proto as proto;
use tonic::{Code, Request, Status};

use super::channel::{BUILD, ChannelError, VERSION, connect};
use crate::credentials::{Access, CredentialsError, Token};
use crate::identity::{Name, NameError};
use crate::selection::Changes;
use crate::store::layout::RENDEZVOUS;

/// Time limit of a question.
const PATIENCE: Duration = Duration::from_secs(35);

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AskError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(
        "no coordinator answers at {address} ({why}): give the address that it says it listens on, and --credentials where it has some"
    )]
    Unreachable { address: String, why: String },
    #[error("{path} does not say where a coordinator listens: give --coordinator HOST:PORT", path = .path.display())]
    NoRendezvous { path: std::path::PathBuf },
    #[error("{0}")]
    Refused(String),
}

/// A plan as a person writes it; absent parts do not change.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct PlanText {
    pub steps: Option<String>,
    pub tensors: Option<String>,
    pub ranks: Option<String>,
    pub microbatches: Option<String>,
    pub max_tensor_bytes: Option<String>,
    pub max_step_bytes: Option<String>,
}

/// A coordinator's address, and the credentials for it.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Place {
    pub address: String,
    pub access: Access,
}

/// The coordinator inside rank 0 of a run, by the run's directory.
pub fn embedded(run_directory: &Path) -> Result<Place, AskError> {
    let path = run_directory.join(RENDEZVOUS);
    let absent = || AskError::NoRendezvous { path: path.clone() };
    let bytes = std::fs::read(&path).map_err(|_| absent())?;
    let rendezvous: serde_json::Value = serde_json::from_slice(&bytes).map_err(|_| absent())?;
    let address = rendezvous.get("address").and_then(serde_json::Value::as_str);
    let address = address.map(str::to_string).ok_or_else(absent)?;
    let token = rendezvous.get("token").cloned();
    let token: Option<Token> = token.and_then(|token| serde_json::from_value(token).ok());
    Ok(Place { address, access: Access { tls: None, token } })
}

/// Sets a run's plan and returns a line that says from which step on it applies.
pub async fn plan(place: &Place, run: &str, text: PlanText) -> Result<String, AskError> {
    let request = proto::SetPlanRequest {
        run: run.into(),
        steps: text.steps,
        tensors: text.tensors,
        ranks: text.ranks,
        microbatches: text.microbatches,
        max_tensor_bytes: text.max_tensor_bytes,
        max_step_bytes: text.max_step_bytes,
    };
    let answer = connect(&place.address, &place.access)?.set_plan(patient(request)).await;
    let plan = answer.map_err(|status| refused(&place.address, status))?.into_inner().plan;
    let plan = plan.unwrap_or_default();
    let changes: Changes = serde_json::from_slice(&plan.changes).unwrap_or_default();
    Ok(format!("plan {} of run {run} holds from step {}: {changes}", plan.version, plan.from))
}

/// The status of a run in a few lines.
pub async fn status(place: &Place, run: &str) -> Result<String, AskError> {
    let request = proto::RunStatusRequest { run: run.into() };
    let answer = connect(&place.address, &place.access)?.run_status(patient(request)).await;
    let run_status = answer.map_err(|status| refused(&place.address, status))?.into_inner();
    let absent = match run_status.absent.as_str() {
        "" => String::new(),
        ranks => format!(" (not yet: {ranks})"),
    };
    let mut text = format!(
        "run {run} attempt {} in {}: {} of {} ranks joined{absent}; steps: {} committed, {} open; {}; coordinator {}",
        run_status.attempt,
        run_status.directory,
        run_status.joined,
        run_status.world_size,
        run_status.committed,
        run_status.open,
        size(run_status.bytes),
        run_status.version,
    );
    for step in &run_status.steps {
        let state = match (step.committed, step.partial) {
            (true, _) => "committed",
            (false, true) => "partial",
            (false, false) => "open",
        };
        text += &format!(
            "\nstep {} {state}: {} of {} ranks closed, {} files, {} shards, {}",
            step.step,
            step.closed_ranks,
            run_status.world_size,
            step.files,
            step.shards,
            size(step.bytes)
        );
        if !step.missing.is_empty() {
            text += &format!("; missing: {}", step.missing);
        }
    }
    Ok(text)
}

/// Triggers a recording and returns a line that says which step is recorded.
pub async fn trigger(
    place: &Place,
    run: &str,
    step: Option<u64>,
    reason: &str,
) -> Result<String, AskError> {
    let request = proto::TriggerRequest { run: run.into(), step, reason: reason.into() };
    let answer = connect(&place.address, &place.access)?.trigger(patient(request)).await;
    let answer = answer.map_err(|status| refused(&place.address, status))?.into_inner();
    let order = answer.trigger.unwrap_or_default();
    Ok(format!(
        "trigger {} of run {run}: every rank records step {}, and writes what its ring holds up to step {}",
        order.number, order.record, order.seen
    ))
}

/// What the coordinator at an address answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Greeting {
    /// Its version; empty if it is too old to send it.
    pub version: String,
    /// Its build, likewise.
    pub build: String,
    /// The shortest of several response times on an open connection.
    pub seconds: f64,
    /// Its answer about the run: the status, or that there is none of this name.
    pub says: String,
}

/// Number of calls whose response time is measured.
const GREETINGS: usize = 4;
/// Time limit of one such call.
const GREETING_PATIENCE: Duration = Duration::from_secs(10);

/// Asks the coordinator at an address for its version and the run, on a separate async runtime.
/// `credentials` is a rank's folder.
pub fn greet(address: &str, run: &str, credentials: Option<&Path>) -> Result<Greeting, GreetError> {
    let access = match credentials {
        Some(folder) => Access::read(folder, &Name::new(run)?)?,
        None => Access::default(),
    };
    let place = Place { address: address.into(), access };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(greeted(&place, run))?)
}

/// Why there was no greeting.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GreetError {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("the runtime cannot be started: {0}")]
    Runtime(#[from] std::io::Error),
}

async fn greeted(place: &Place, run: &str) -> Result<Greeting, AskError> {
    let mut rpc = connect(&place.address, &place.access)?;
    let mut fastest = None;
    for _ in 0..GREETINGS {
        let begin = Instant::now();
        let mut request = Request::new(proto::RunStatusRequest { run: run.into() });
        request.set_timeout(GREETING_PATIENCE);
        let answer = rpc.run_status(request).await;
        let seconds = begin.elapsed().as_secs_f64();
        let (metadata, says) = match answer {
            Ok(answer) => {
                let status = answer.get_ref();
                let (joined, all) = (status.joined, status.world_size);
                let says = format!("run {run}: {joined} of {all} ranks joined");
                (answer.metadata().clone(), says)
            }
            // The coordinator does not know the run: that is an answer too.
            Err(status) if status.code() == Code::FailedPrecondition => {
                (status.metadata().clone(), status.message().to_string())
            }
            Err(status) => return Err(refused(&place.address, status)),
        };
        let word = |name| {
            let value = metadata.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_string()
        };
        let before = fastest.map_or(f64::INFINITY, |before: Greeting| before.seconds);
        let seconds = seconds.min(before);
        fastest = Some(Greeting { version: word(VERSION), build: word(BUILD), seconds, says });
    }
    Ok(fastest.expect("asked at least once"))
}

/// A number of bytes in words: `1.5 GiB`.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

fn patient<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(PATIENCE);
    request
}

fn refused(address: &str, status: Status) -> AskError {
    match status.code() {
        Code::Unavailable
        | Code::Unknown
        | Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Unimplemented => {
            let mut why = status.message().to_string();
            let mut source = std::error::Error::source(&status);
            while let Some(error) = source {
                why = error.to_string();
                source = error.source();
            }
            AskError::Unreachable { address: address.into(), why }
        }
        _ => AskError::Refused(status.message().into()),
    }
}
