//! Every limit of the coordinator, with its reason.

use std::time::Duration;

/// Largest accepted message. The largest that an unmodified rank sends is a step's close with
/// thousands of omissions: about 4 MiB.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// Bytes of one upload message: large enough to be fast, far below [`MAX_MESSAGE_BYTES`].
pub const CHUNK_BYTES: usize = 1 << 20;

/// HTTP/2 flow-control window. With 16 MiB windows and 1 MiB frames the throughput over loopback is
/// twice that of tonic's defaults (measured).
pub const WINDOW_BYTES: u32 = 16 << 20;

/// Largest HTTP/2 frame.
pub const FRAME_BYTES: u32 = 1 << 20;

/// Interval of keepalives from the coordinator: a peer that vanished without a reset is detected
/// within half a minute.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);

/// How long a peer may take to answer a keepalive.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of keepalives from a rank. A connection that a NAT or firewall has dropped accepts data
/// and never answers; a rank should reconnect within 10 s after the network works again. A frame of
/// 1 MiB must get through in that time, which needs 2 Mbit/s.
pub const CALLER_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);

/// How long the coordinator may take to answer such a keepalive.
pub const CALLER_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long a peer may take for its TLS handshake.
pub const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long a request may wait for the actor and its fsync. A disk that takes longer counts as
/// hung, and the rank gets an error.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(30);

/// How long an upload may pause.
pub const UPLOAD_IDLE: Duration = Duration::from_secs(30);

/// Uploads at a time: each may hold a flow-control window, a header and two pieces of its file
/// in memory, 48 MiB.
pub const MAX_UPLOADS: usize = 8;

/// Largest accepted file: ten times what one rank of a large model holds in f64.
pub const MAX_FILE_BYTES: u64 = 1 << 40;

/// Uploads of one rank at a time: it sends one file after the other, and another upload may still
/// be open on a broken connection.
pub const MAX_UPLOADS_PER_RANK: usize = 2;

/// Files of committed steps whose details are kept in memory (half a MiB), so that a request that
/// is repeated after a lost answer needs no manifest. Tests keep almost none, so that they read
/// manifests.
pub const KEPT_FILES: u64 = if cfg!(any(test, feature = "faults")) { 6 } else { 1024 };

/// Requests of one rank per second, without heartbeats: an unmodified rank waits for an fsync after
/// each.
pub const MAX_REQUESTS_PER_SECOND: u32 = 2000;

/// Files of one rank in one step, one for each microbatch: more than any job accumulates over.
pub const MAX_FILES_PER_STEP: u32 = 4096;

/// Shards in one file: a large model has 20,000 tensors.
pub const MAX_SHARDS_PER_FILE: usize = 32_768;

/// Bytes of shards of one rank in one step: the memory of a large host.
pub const MAX_RANK_STEP_BYTES: u64 = 4 << 40;

/// Bytes that are kept in memory of one rank's requests for steps that are not committed: three
/// steps with 32,768 shards of about 600 bytes each.
pub const MAX_HELD_BYTES: u64 = 64 << 20;

/// Largest header of a reported file: 20,000 shards take about 12 MiB, and parsing a header takes
/// several times its size in memory.
pub const MAX_ONLINE_HEADER: u64 = 16 << 20;

/// Bytes of headers that are parsed at a time or whose shards are not journalled yet, which take
/// several times as much memory: two of the largest.
pub const LOOKED_AT_BYTES: u64 = 2 * MAX_ONLINE_HEADER;

/// Bytes that are kept in memory of the closes of the latest committed steps, also of steps without
/// files.
pub const KEPT_BYTES: u64 = 4 << 20;

/// Largest declaration of a loss head: a real one has a few hundred bytes.
pub const MAX_DECLARATION_BYTES: usize = 64 << 10;

/// Largest mesh with which a rank may join: a real one has some hundred bytes, and the mesh of
/// every rank is kept.
pub const MAX_MESH_BYTES: usize = 4 << 10;

/// Largest list of versions: a dozen packages.
pub const MAX_VERSIONS_BYTES: usize = 16 << 10;

/// Attempts of one run: more than those of a job that restarts every hour for a month.
pub const MAX_ATTEMPTS: usize = 1000;

/// Runs of one store that are served at a time.
pub const MAX_RUNS: usize = 10_000;

/// Connections of each rank: its recorder, its heartbeat, and both again after a break.
pub const CONNECTIONS_PER_RANK: usize = 4;

/// Connections besides those of the ranks: command-line questions and health probes.
pub const MORE_CONNECTIONS: usize = 1024;

/// Connections that may be open at a time, for a job of so many ranks.
pub fn connections(world_size: u32) -> usize {
    world_size as usize * CONNECTIONS_PER_RANK + MORE_CONNECTIONS
}

/// Pause after accepting a connection failed, for example without file descriptors: without it the
/// same error would repeat at once.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Connections to the metrics server at a time, and how long each may last.
pub(super) const SCRAPES: usize = 32;
pub(super) const SCRAPE: Duration = Duration::from_secs(60);

/// A rate limit: so many turns at once, so many per second after that, and the longest wait for a
/// turn before the caller is refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    pub(super) at_once: f64,
    pub(super) per_second: f64,
    pub(super) most_wait: Duration,
}

/// New connections from the strangers of one host, that is without an authorised call yet. A rank's
/// connection is authorised by its first call and then gives its turn back.
pub(super) const STRANGERS: Turns =
    Turns { at_once: 1000.0, per_second: 20.0, most_wait: Duration::from_secs(1) };

/// Bytes that a stranger's connection may send before they are limited: a handshake with
/// certificates and a first call.
pub(super) const STRANGERS_FREE_BYTES: usize = 16 << 10;

/// Bytes that the strangers of one host send beyond that: with 17 bytes per ping half a MiB is
/// 30,000 frames. The largest first message of an unmodified rank has 4 MiB.
pub(super) const STRANGERS_BYTES: Turns =
    Turns { at_once: 4194304.0, per_second: 524288.0, most_wait: HANDSHAKE };

/// Hosts whose rate limits are kept, before those that have recovered fully are dropped.
pub(super) const MAX_HOSTS: usize = 4096;

/// Streams that a peer resets before they are handled, or that the coordinator resets because of
/// the peer's errors, before its connection is closed (CVE-2023-44487, CVE-2025-8671).
pub const MAX_RESETS: usize = 64;

/// Files of one report: more than a rank has microbatches, and few enough to check again if the
/// answer was lost.
pub const MAX_FILES_PER_REPORT: usize = 256;

/// Streams of one connection: a rank has a handful of calls in flight.
pub const MAX_STREAMS: u32 = 64;

/// Requests in the actor's queue; if it is full, callers wait in their tasks.
pub const QUEUE_REQUESTS: usize = 1024;

/// Requests that share one fsync.
pub const MAX_BATCH: usize = 256;

/// How often deadlines are checked and failed commits tried again.
pub const TICK: Duration = Duration::from_secs(1);

/// How long open calls may take to finish when the coordinator stops.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// How long a step may take from its first event before it is called partial.
pub const STEP_DEADLINE: Duration = Duration::from_secs(600);

/// Default limit of triggered recordings of a run: the first shows what went wrong, the next two
/// whether it happens again.
pub const MAX_TRIGGERS: u32 = 3;

/// Default pause after a triggered recording during which ranks cannot trigger another one, because
/// a divergence triggers at every step as long as it lasts.
pub const TRIGGER_COOLDOWN: Duration = Duration::from_secs(600);

/// Plans of one attempt: each is a line in the journal and is sent to every rank.
pub const MAX_PLANS: usize = 1000;

/// Heartbeats of one rank per second: an unmodified rank sends one, and a few more while a trigger
/// is being settled.
pub const MAX_BEATS_PER_SECOND: u32 = 64;

/// A rank's longer heartbeat period is cut to this.
pub const MAX_BEAT_PERIOD: Duration = Duration::from_secs(60);

/// A rank's larger number of steps per second is cut to this.
pub const MAX_STEP_RATE: f64 = 10_000.0;

/// Largest step number of a job.
pub const MAX_STEP: u64 = 1 << 53;

/// How much longer than the heartbeat's period an answer may take.
pub const HEARING_SLACK: Duration = Duration::from_millis(500);

/// How long a rank may send no heartbeat before it counts as absent; at least five of its own
/// periods.
pub const RANK_SILENCE: Duration = Duration::from_secs(10);

/// Steps that a ring buffer may hold.
pub const MAX_RING_STEPS: usize = 1024;

/// Bytes of a trigger's reason.
pub const MAX_REASON_BYTES: usize = 500;
