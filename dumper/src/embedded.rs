//! The coordinator inside rank 0. It has a thread and a runtime of its own, as the recorder's
//! thread blocks on its disk and the other ranks must not wait for that.

use std::io;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use backtape::coordinator::{Config, Coordinator, Handle, StartError};
use backtape::credentials::{Guard, Token, Tokens};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::patience::Deadline;
use crate::settings::Plan;

/// How long a coordinator that was told to stop is waited for.
pub(crate) const STOP_DEADLINE: Duration = Duration::from_secs(12);

/// Why rank 0 could not start the coordinator of its job.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EmbedError {
    #[error("rank 0 cannot listen on the loopback address: {0}")]
    Listen(io::Error),
    #[error("rank 0 cannot start its coordinator: {0}")]
    Runtime(io::Error),
    #[error("{0}: {1}")]
    Store(StartError, String),
    #[error("the coordinator of rank 0 ended while it started")]
    Ended,
    #[error("rank 0 cannot draw a token for its ranks: {0}")]
    Token(io::Error),
}

/// A running embedded coordinator.
pub(crate) struct Embedded {
    pub(crate) address: SocketAddr,
    pub(crate) handle: Handle,
    /// What ranks must show, as other users of this host reach the loopback address too.
    pub(crate) token: Token,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

type Started = Result<(SocketAddr, Handle), EmbedError>;

impl Embedded {
    pub(crate) async fn start(plan: &Plan) -> Result<Embedded, EmbedError> {
        let token = Token::draw().map_err(EmbedError::Token)?;
        let config = Config {
            guard: Guard { tls: None, tokens: Tokens::any(token.clone()) },
            run: Some(plan.run.clone()),
            new_attempt: true,
            step_deadline: plan.settings.step_deadline,
            rules: plan.settings.rules,
            ..Config::new(&plan.store, plan.settings.world_size)
        };
        let (stop, stopped) = oneshot::channel();
        let (report, started) = oneshot::channel();
        let body = move || serve(&config, report, stopped);
        let thread = std::thread::Builder::new().name("backtape-coordinator".into());
        let thread = thread.spawn(body).map_err(EmbedError::Runtime)?;
        let (address, handle) = started.await.map_err(|_| EmbedError::Ended)??;
        Ok(Embedded { address, handle, token, stop, thread })
    }

    /// Lets open calls end, then stops; gives up waiting on a disk that hangs.
    pub(crate) async fn stop(self, deadline: Deadline) {
        drop(self.handle);
        let _ = self.stop.send(());
        let thread = self.thread;
        let ended = tokio::task::spawn_blocking(move || thread.join());
        let _ = deadline.bound(ended).await;
    }
}

fn serve(config: &Config, report: oneshot::Sender<Started>, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = report.send(Err(EmbedError::Runtime(error)));
            return;
        }
    };
    runtime.block_on(async {
        let (coordinator, listener) = match prepare(config).await {
            Ok((coordinator, listener, address)) => {
                let _ = report.send(Ok((address, coordinator.handle())));
                (coordinator, listener)
            }
            Err(error) => {
                let _ = report.send(Err(error));
                return;
            }
        };
        let shutdown = async {
            let _ = stopped.await;
        };
        if let Err(error) = coordinator.serve(listener, shutdown).await {
            tracing::error!("the embedded coordinator stopped: {error}");
        }
    });
    // A look at a file on a hung disk must not hold up the end of the job.
    runtime.shutdown_background();
}

async fn prepare(config: &Config) -> Result<(Coordinator, TcpListener, SocketAddr), EmbedError> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(EmbedError::Listen)?;
    let address = listener.local_addr().map_err(EmbedError::Listen)?;
    let coordinator = Coordinator::open(config).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        EmbedError::Store(error, cause.unwrap_or_default())
    })?;
    Ok((coordinator, listener, address))
}
