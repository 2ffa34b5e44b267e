//! Marks connections on which a call was authorised, which are no longer limited as strangers.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Extensions, Request, Response};
use tonic::Status;
use tonic::transport::server::TlsConnectInfo;
use tower::{Layer, Service};

use super::super::strangers::Standing;

/// Path prefix of the service's methods; health checks need no authorisation and do not count.
const METHODS: &str = "/backtape.v1.Coordinator/";

/// The standing of a request's connection.
pub(super) fn standing(extensions: &Extensions) -> Option<&Standing> {
    let encrypted = || extensions.get::<TlsConnectInfo<Standing>>().map(TlsConnectInfo::get_ref);
    extensions.get::<Standing>().or_else(encrypted)
}

/// Marks the connections of calls that were not refused.
#[derive(Clone, Copy)]
pub(in crate::coordinator) struct Marking;

impl<S> Layer<S> for Marking {
    type Service = Marked<S>;

    fn layer(&self, inner: S) -> Marked<S> {
        Marked(inner)
    }
}

/// A service whose answers are checked for a refusal.
#[derive(Clone)]
pub(in crate::coordinator) struct Marked<S>(S);

impl<S, B, A> Service<Request<B>> for Marked<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let is_own_method = request.uri().path().starts_with(METHODS);
        let standing =
            standing(request.extensions()).filter(|one| is_own_method && !one.is_known()).cloned();
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            // A refused call has its status in the headers, an accepted one in the trailers.
            if let Some(standing) = standing
                && Status::from_header_map(answer.headers()).is_none()
            {
                standing.set_known();
            }
            Ok(answer)
        })
    }
}
