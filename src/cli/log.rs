//! Log lines with a prefix that names the host, so that the logs of all hosts can be merged.

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Starts logging to stderr; `RUST_LOG` chooses which lines. Does nothing if this process already
/// has a log.
pub(super) fn start() {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or(EnvFilter::new("info")))
        .with_writer(std::io::stderr)
        .event_format(Prefixed { host: host() })
        .try_init();
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// `[backtape][Hnode-0][coordinator] INFO …`
struct Prefixed {
    host: String,
}

impl<S, N> FormatEvent<S, N> for Prefixed
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let level = event.metadata().level();
        write!(writer, "[backtape][H{}][coordinator] {level} ", self.host)?;
        for span in context.event_scope().into_iter().flatten() {
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                write!(writer, "{fields} ")?;
            }
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
