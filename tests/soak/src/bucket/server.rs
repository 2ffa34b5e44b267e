//! An S3 server over a directory, on loopback (s3s-fs, which checks signatures and conditions as
//! S3 does), and before it a layer that fails: 500, 403, 503 SlowDown, answers that never come,
//! connections that are cut before or after the request was carried out.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;

use crate::random::Random;

/// Name and secret of the one user, and the bucket.
const USER: &str = "backtape-soak";
pub(crate) const BUCKET: &str = "dumps";
/// An answer that never comes is given up here.
const STALL: Duration = Duration::from_secs(40);

/// A way to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Internal,
    Forbidden,
    SlowDown,
    Stall,
    /// The request is not carried out.
    CutBefore,
    /// It is, and nobody hears of it.
    CutAfter,
}

pub(crate) const FAILURES: [Failure; 6] = [
    Failure::Internal,
    Failure::Forbidden,
    Failure::SlowDown,
    Failure::Stall,
    Failure::CutBefore,
    Failure::CutAfter,
];

/// How it fails from now on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Weather {
    /// One of these, drawn for each request; none: all is well.
    pub(crate) failures: Vec<Failure>,
    /// Of the requests.
    pub(crate) percent: u64,
}

struct State {
    weather: Mutex<(Weather, Random)>,
    failed: AtomicU64,
    /// Puts that only make are taken one at a time: s3s-fs looks whether an object is there and
    /// then writes it, which S3 does at once.
    creating: tokio::sync::Mutex<()>,
}

impl State {
    fn draw(&self) -> Option<Failure> {
        let mut held = self.weather.lock().unwrap_or_else(PoisonError::into_inner);
        let (weather, random) = &mut *held;
        let fails = random.below(100) < weather.percent && !weather.failures.is_empty();
        let drawn = random.below(weather.failures.len().max(1) as u64) as usize;
        let failure = fails.then(|| weather.failures[drawn])?;
        self.failed.fetch_add(1, Ordering::SeqCst);
        Some(failure)
    }
}

/// Serves until it is dropped.
pub(crate) struct Server {
    address: SocketAddr,
    root: PathBuf,
    state: Arc<State>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Server {
    /// Starts it over a directory.
    pub(crate) fn start(root: &Path, random: Random) -> Result<Server> {
        std::fs::create_dir_all(root.join(BUCKET))?;
        let files = s3s_fs::FileSystem::new(root);
        let files = files.map_err(|error| anyhow::anyhow!("s3s-fs: {error:?}"))?;
        let mut service = S3ServiceBuilder::new(files);
        service.set_auth(SimpleAuth::from_single(USER, USER));
        let service = service.build();
        let state = Arc::new(State {
            weather: Mutex::new((Weather::default(), random)),
            failed: AtomicU64::new(0),
            creating: tokio::sync::Mutex::new(()),
        });
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (ready, started) = std::sync::mpsc::channel();
        let serving = state.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let serve = async {
                let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
                let _ = ready.send(listener.local_addr().context("no address"));
                tokio::select! {
                    () = serve(listener, service, serving) => {}
                    _ = stopped => {}
                }
                anyhow::Ok(())
            };
            if let Err(error) = runtime.context("no runtime").and_then(|r| r.block_on(serve)) {
                let _ = ready.send(Err(error));
            }
        });
        let address = started.recv().context("the S3 server does not start")??;
        Ok(Server { address, root: root.into(), state, _stop: stop })
    }

    pub(crate) fn set(&self, weather: Weather) {
        self.state.weather.lock().unwrap_or_else(PoisonError::into_inner).0 = weather;
    }

    /// Requests that were failed.
    pub(crate) fn failed(&self) -> u64 {
        self.state.failed.load(Ordering::SeqCst)
    }

    /// Where the objects of the bucket lie, each a file.
    pub(crate) fn objects(&self) -> PathBuf {
        self.root.join(BUCKET)
    }

    /// What a process must have in its environment to reach the bucket.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT", format!("http://{}", self.address)),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_REGION", "us-east-1".into()),
            ("AWS_ACCESS_KEY_ID", USER.into()),
            ("AWS_SECRET_ACCESS_KEY", USER.into()),
        ]
    }
}

type Answer = http::Response<s3s::Body>;

async fn serve(listener: TcpListener, service: S3Service, state: Arc<State>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let Ok((socket, _)) = accepted else { continue };
        let (service, state) = (service.clone(), state.clone());
        let answer = tower::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            answer(request, service.clone(), state.clone())
        });
        connections.spawn(async move {
            let builder = auto::Builder::new(TokioExecutor::new());
            let connection = TowerToHyperService::new(answer);
            // An error of a request is a connection that is cut.
            let _ = builder.serve_connection(TokioIo::new(socket), connection).await;
        });
    }
}

async fn answer(
    request: http::Request<hyper::body::Incoming>,
    service: S3Service,
    state: Arc<State>,
) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let failure = state.draw();
    match failure {
        Some(Failure::Internal) => return refusal(500, "InternalError"),
        Some(Failure::Forbidden) => return refusal(403, "AccessDenied"),
        Some(Failure::SlowDown) => return refusal(503, "SlowDown"),
        Some(Failure::CutBefore) => return Err("cut before".into()),
        Some(Failure::Stall) => {
            tokio::time::sleep(STALL).await;
            return Err("stalled".into());
        }
        Some(Failure::CutAfter) | None => {}
    }
    let alone = match request.headers().contains_key("if-none-match") {
        true => Some(state.creating.lock().await),
        false => None,
    };
    let answer = service.call(request.map(s3s::Body::from)).await;
    drop(alone);
    match failure {
        Some(_) => Err("cut after".into()),
        None => Ok(answer.map_err(|error| format!("{error:?}"))?),
    }
}

fn refusal(status: u16, code: &str) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let text = format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>on purpose</Message></Error>"
    );
    let body = s3s::Body::from(bytes::Bytes::from(text));
    Ok(http::Response::builder()
        .status(status)
        .header("content-type", "application/xml")
        .body(body)?)
}
