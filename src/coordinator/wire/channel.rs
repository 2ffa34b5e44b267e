//! A caller's connection to a coordinator: with TLS if it has certificates, and with its token on
//! every call.

use std::time::Duration;

use backtape_proto::coordinator_client::CoordinatorClient;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

use crate::coordinator::limits::{
    CALLER_KEEPALIVE_INTERVAL, CALLER_KEEPALIVE_TIMEOUT, WINDOW_BYTES,
};
use crate::credentials::{Access, Tls};

/// How long a connection may take to open.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The header that carries the token, and the prefix of its value (RFC 6750).
pub(in crate::coordinator) const AUTHORIZATION: &str = "authorization";
pub(in crate::coordinator) const BEARER: &str = "Bearer ";

/// The header of every answer with the coordinator's version.
pub const VERSION: &str = "backtape-version";
/// The header with its build.
pub const BUILD: &str = "backtape-build";

/// The client of a coordinator.
pub type Rpc = CoordinatorClient<InterceptedService<Channel, Bearer>>;

/// Why no connection can be made, whether or not a coordinator answers.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ChannelError {
    #[error("{address:?} is not host:port of a coordinator")]
    Address { address: String },
    #[error("the certificate or its key cannot be used: {0}")]
    Tls(String),
}

/// Puts the token on each call.
#[derive(Clone)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert(AUTHORIZATION, token.clone());
        }
        Ok(request)
    }
}

/// A connection that the first call opens and that reconnects by itself.
pub fn connect(address: &str, access: &Access) -> Result<Rpc, ChannelError> {
    let scheme = if access.tls.is_some() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
    let endpoint = endpoint.map_err(|_| ChannelError::Address { address: address.into() })?;
    let endpoint = match &access.tls {
        Some(tls) => endpoint.tls_config(encrypted(tls)),
        None => Ok(endpoint),
    };
    let channel = endpoint
        .map_err(|error| ChannelError::Tls(error.to_string()))?
        .connect_timeout(CONNECT_DEADLINE)
        .http2_keep_alive_interval(CALLER_KEEPALIVE_INTERVAL)
        .keep_alive_timeout(CALLER_KEEPALIVE_TIMEOUT)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .tcp_nodelay(true)
        .connect_lazy();
    let token = access.token.as_ref().map(|token| format!("{BEARER}{}", token.as_str()));
    let mut token = token.and_then(|text| text.parse::<MetadataValue<Ascii>>().ok());
    token.iter_mut().for_each(|value| value.set_sensitive(true));
    Ok(CoordinatorClient::with_interceptor(channel, Bearer(token)))
}

fn encrypted(tls: &Tls) -> ClientTlsConfig {
    ClientTlsConfig::new()
        // The connect timeout covers only TCP's handshake: without this one the TLS handshake would
        // wait without end on a connection that a NAT or firewall has dropped.
        .timeout(CONNECT_DEADLINE)
        .ca_certificate(Certificate::from_pem(&tls.ca))
        .identity(Identity::from_pem(&tls.certificate, &tls.key))
}
