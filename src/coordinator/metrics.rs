//! A coordinator's metrics for Prometheus, and its health check.

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;

use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tokio::net::TcpListener;
use tonic::Code;

use super::actor::Handle;
use super::scrapes::Scrapes;

/// The content type of the metrics (OpenMetrics 1.0).
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Counters of calls; clones share them.
#[derive(Clone, Default)]
pub(super) struct Metrics {
    calls: Family<Call, Counter>,
    received: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    method: &'static str,
    code: String,
}

/// Totals over the newest attempt of each run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) runs: u64,
    pub(crate) ranks: u64,
    pub(crate) committed: u64,
    pub(crate) open: u64,
    pub(crate) partial: u64,
    pub(crate) bytes: u64,
}

impl Metrics {
    /// Counts an answered call.
    pub(super) fn answered(&self, method: &'static str, code: Code) {
        self.calls.get_or_create(&Call { method, code: format!("{code:?}") }).inc();
    }

    /// Counts received bytes of an upload.
    pub(super) fn received(&self, bytes: usize) {
        self.received.inc_by(bytes as u64);
    }

    /// All metrics as text, with these totals.
    fn text(&self, totals: Totals) -> String {
        let mut registry = Registry::with_prefix("backtape");
        registry.register("calls", "Calls that were answered", self.calls.clone());
        let (name, help) = ("upload", "Bytes that ranks sent");
        registry.register_with_unit(name, help, Unit::Bytes, self.received.clone());
        for (name, help, value) in [
            ("runs", "Runs of the store", totals.runs),
            ("ranks", "Ranks that joined the newest attempts", totals.ranks),
            ("steps_committed", "Steps with a manifest", totals.committed),
            ("steps_open", "Steps that ranks still write", totals.open),
            ("steps_partial", "Steps whose deadline passed", totals.partial),
            ("dumped_bytes", "Bytes of all acknowledged shards", totals.bytes),
        ] {
            let gauge = Gauge::<u64, AtomicU64>::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

/// Serves `/metrics` and `/healthz` in plain HTTP, until it is dropped.
pub(super) async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    handle: Handle,
) -> std::io::Result<()> {
    let asked = handle.clone();
    let scrape = move || async move {
        match asked.totals().await {
            Ok(totals) => {
                ([(header::CONTENT_TYPE, CONTENT_TYPE)], metrics.text(totals)).into_response()
            }
            Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, refusal.to_string()).into_response(),
        }
    };
    // The coordinator counts as healthy if the actor answers, which it does not if its journal
    // hangs.
    let alive = move || async move {
        match handle.totals().await {
            Ok(_) => {
                (StatusCode::OK, format!("backtape {} build {}\n", crate::VERSION, crate::BUILD))
            }
            Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, refusal.to_string()),
        }
    };
    let routes = axum::Router::new().route("/metrics", get(scrape)).route("/healthz", get(alive));
    axum::serve(Scrapes::new(listener), routes).await
}

/// Listens on the metrics' address.
pub(super) async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_method_and_outcome_beside_the_totals() {
        let metrics = Metrics::default();
        metrics.answered("join", Code::Ok);
        metrics.answered("join", Code::Ok);
        metrics.answered("join", Code::Unauthenticated);
        metrics.received(7);
        let text = metrics.text(Totals { committed: 3, ..Totals::default() });
        for line in [
            "backtape_calls_total{method=\"join\",code=\"Ok\"} 2",
            "backtape_calls_total{method=\"join\",code=\"Unauthenticated\"} 1",
            "backtape_upload_bytes_total 7",
            "backtape_steps_committed 3",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
