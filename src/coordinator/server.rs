//! The async server: accepts connections, sends ticks and shuts down gracefully.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;

use backtape_proto::coordinator_server::CoordinatorServer;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use super::accepted::Door;
use super::actor::{self, Handle};
use super::config::{Config, ServeError, StartError};
use super::limits;
use super::metrics::{self, Metrics};
use super::service::{self, Service};
use crate::credentials::{Guard, Tls};
use crate::store::Backend;

/// A coordinator that has loaded its store and is ready to serve.
pub struct Coordinator {
    handle: Handle,
    backend: Backend,
    actor_end: oneshot::Receiver<()>,
    guard: Guard,
    metrics: Option<SocketAddr>,
    /// Most connections at a time.
    connections: usize,
}

impl Coordinator {
    /// Loads the store: attempts of an earlier coordinator continue from what it acknowledged.
    pub fn open(config: &Config) -> Result<Coordinator, StartError> {
        if config.world_size == 0 {
            return Err(StartError::NoRanks);
        }
        let backend = Backend::of(&config.store)?;
        let (handle, actor_end) = actor::start(config, &backend)?;
        Ok(Coordinator {
            handle,
            backend,
            actor_end,
            guard: config.guard.clone(),
            metrics: config.metrics,
            connections: limits::connections(config.world_size),
        })
    }

    /// A handle to the actor, for programs that run a coordinator in their own process.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until `shutdown` completes, then lets open calls end.
    pub async fn serve(
        mut self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), ServeError> {
        let (stop, stopped) = oneshot::channel::<()>();
        let metrics = Metrics::default();
        let door = service::door(self.guard.tokens.clone(), metrics.clone());
        let tokens = self.guard.tokens;
        let service = Service::new(self.handle.clone(), self.backend, tokens, metrics.clone());
        let service =
            CoordinatorServer::new(service).max_decoding_message_size(limits::MAX_MESSAGE_BYTES);
        let service = InterceptedService::new(service, door);
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_serving::<CoordinatorServer<Service>>().await;
        // The metrics server ends when this is dropped at the end of the call.
        let _scraped = match self.metrics {
            Some(address) => Some(scraped(address, metrics, self.handle.clone()).await?),
            None => None,
        };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let incoming = Door::new(incoming, self.connections);
        let serving = transport(self.guard.tls.as_ref())?
            .layer(service::Marking)
            .add_service(health)
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, async {
                let _ = stopped.await;
            });
        let (mut serving, mut shutdown) = (pin!(serving), pin!(shutdown));
        let mut ticks = tokio::time::interval(limits::TICK);
        loop {
            tokio::select! {
                ended = &mut serving => return ended.map_err(ServeError::Transport),
                () = &mut shutdown => break,
                _ = &mut self.actor_end => return Err(ServeError::ActorDied),
                _ = ticks.tick() => self.handle.tick(),
            }
        }
        reporter.set_not_serving::<CoordinatorServer<Service>>().await;
        drop(stop);
        // A peer that keeps its call open does not delay the end for longer; whatever was
        // acknowledged is durable.
        let _ = tokio::time::timeout(limits::SHUTDOWN_GRACE, serving).await;
        Ok(())
    }
}

/// Starts the metrics server, which ends when the returned set is dropped.
async fn scraped(
    address: SocketAddr,
    metrics: Metrics,
    handle: Handle,
) -> Result<tokio::task::JoinSet<()>, ServeError> {
    let listener = metrics::listen(address).await;
    let listener = listener.map_err(|source| ServeError::Metrics(address, source))?;
    let address = listener.local_addr().unwrap_or(address);
    tracing::info!("metrics and health are served on http://{address}");
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move {
        if let Err(error) = metrics::serve(listener, metrics, handle).await {
            tracing::error!("metrics are served no more: {error}");
        }
    });
    Ok(tasks)
}

/// The gRPC server's settings: its limits, and TLS with client certificates of the authority if
/// there is one.
pub fn transport(tls: Option<&Tls>) -> Result<Server, StartError> {
    let mut server = Server::builder();
    if let Some(tls) = tls {
        let config = ServerTlsConfig::new()
            .identity(Identity::from_pem(&tls.certificate, &tls.key))
            .client_ca_root(Certificate::from_pem(&tls.ca))
            .timeout(limits::HANDSHAKE);
        let encrypted = server.tls_config(config);
        server = encrypted.map_err(|error| StartError::Tls(error.to_string()))?;
    }
    Ok(server
        .http2_keepalive_interval(Some(limits::KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(limits::KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(limits::WINDOW_BYTES)
        .initial_connection_window_size(limits::WINDOW_BYTES)
        .max_frame_size(limits::FRAME_BYTES)
        .max_concurrent_streams(limits::MAX_STREAMS)
        .http2_max_pending_accept_reset_streams(Some(limits::MAX_RESETS))
        .http2_max_local_error_reset_streams(Some(limits::MAX_RESETS)))
}

/// Opens the store and serves it on `listener` until `shutdown` completes.
pub async fn run(
    listener: TcpListener,
    config: &Config,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    Coordinator::open(config)?.serve(listener, shutdown).await
}
