//! Every limit of the coordinator, with its reason.

use std::time::Duration;

/// Largest message accepted. The largest honest one is a step's close with
/// thousands of omissions: about 4 MiB.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// Bytes of one upload message: large enough to be fast, far below the limit.
pub const CHUNK_BYTES: usize = 1 << 20;

/// HTTP/2 flow control: with 16 MiB windows and 1 MiB frames loopback moves
/// twice what tonic's defaults do (measured).
pub const WINDOW_BYTES: u32 = 16 << 20;

/// Largest HTTP/2 frame.
pub const FRAME_BYTES: u32 = 1 << 20;

/// Finds a peer that vanished without a reset within half a minute.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);

/// How long a peer may take to answer a keepalive.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The same for who waits for an answer: a connection that some box between has forgotten
/// takes everything and answers nothing, and a rank should be back within 10 s of a network
/// that is whole again. A frame of 1 MiB must get through meanwhile: 2 Mbit/s do.
pub const CALLER_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);

/// How long the coordinator may take to answer that.
pub const CALLER_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long a peer may take to show its certificate.
pub const HANDSHAKE: Duration = Duration::from_secs(10);

/// How long a request may wait for the actor and its fsync. A disk that takes
/// longer hangs, and the rank should know.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(30);

/// How long an upload may send nothing.
pub const UPLOAD_IDLE: Duration = Duration::from_secs(30);

/// Uploads at a time: each may hold a flow-control window, a header and two pieces of its file
/// in memory, 48 MiB.
pub const MAX_UPLOADS: usize = 8;

/// Largest file accepted: what one rank of a large model holds in f64, tenfold.
pub const MAX_FILE_BYTES: u64 = 1 << 40;

/// Uploads of one rank at a time: it sends one after the other, and one more may still be
/// ending on a connection that broke.
pub const MAX_UPLOADS_PER_RANK: usize = 2;

/// Files of committed steps that are known one by one, so that what is said again after a lost
/// answer is known again without a look at a manifest: half a MiB. The tests keep next to
/// nothing, so that they look.
pub const KEPT_FILES: u64 = if cfg!(any(test, feature = "faults")) { 6 } else { 1024 };

/// Requests of one rank in a second, heartbeats apart: an honest one waits for an fsync
/// after each.
pub const MAX_REQUESTS_PER_SECOND: u32 = 2000;

/// Files of one rank in one step, one for each microbatch: no job accumulates over more.
pub const MAX_FILES_PER_STEP: u32 = 4096;

/// Shards in one file: a large model has 20,000 tensors.
pub const MAX_SHARDS_PER_FILE: usize = 32_768;

/// Bytes of shards of one rank in one step: what a host holds in memory.
pub const MAX_RANK_STEP_BYTES: u64 = 4 << 40;

/// Bytes of text kept of what one rank said of steps that are not committed: three steps of
/// 32,768 shards at about 600 bytes each.
pub const MAX_HELD_BYTES: u64 = 64 << 20;

/// Largest header of a reported file: 20,000 shards take about 12 MiB, and reading one takes
/// several times its size in memory.
pub const MAX_ONLINE_HEADER: u64 = 16 << 20;

/// Headers that are understood at a time, in bytes, with the shards that they name until those
/// are journalled: several times as much in memory. Two of the largest.
pub const LOOKED_AT_BYTES: u64 = 2 * MAX_ONLINE_HEADER;

/// What the ranks of the latest committed steps said as they closed them, in bytes: kept as long
/// as the files, and of steps without files too.
pub const KEPT_BYTES: u64 = 4 << 20;

/// Largest declaration of a loss head: a real one has a few hundred bytes.
pub const MAX_DECLARATION_BYTES: usize = 64 << 10;

/// Largest mesh that a rank may join with: a real one has some hundred bytes, and it is kept for
/// every rank.
pub const MAX_MESH_BYTES: usize = 4 << 10;

/// Largest list of versions: a dozen packages.
pub const MAX_VERSIONS_BYTES: usize = 16 << 10;

/// Attempts of one run: a job that restarted every hour for a month.
pub const MAX_ATTEMPTS: usize = 1000;

/// Runs of one store that are served at a time.
pub const MAX_RUNS: usize = 10_000;

/// Connections of each rank: its recorder, its heartbeat, and both again after a break.
pub const CONNECTIONS_PER_RANK: usize = 4;

/// Connections beside those of the ranks: people who ask, probes.
pub const MORE_CONNECTIONS: usize = 1024;

/// Connections that are open at a time, of a job of so many ranks.
pub fn connections(world_size: u32) -> usize {
    world_size as usize * CONNECTIONS_PER_RANK + MORE_CONNECTIONS
}

/// How long nothing is accepted after that failed, as for want of descriptors: the same would fail
/// again at once, and again.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Connections at a time to who serves the numbers, and how long one may last.
pub(super) const SCRAPES: usize = 32;
pub(super) const SCRAPE: Duration = Duration::from_secs(60);

/// A budget of turns: so many at once, so many a second after that, and how long one may be told
/// to wait for its turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    pub(super) at_once: f64,
    pub(super) per_second: f64,
    pub(super) most_wait: Duration,
}

/// Connections that the strangers of one host begin. An honest one is known after its first call
/// and takes no turn then.
pub(super) const STRANGERS: Turns =
    Turns { at_once: 1000.0, per_second: 20.0, most_wait: Duration::from_secs(1) };

/// Bytes that a stranger's connection sends before it takes turns: a handshake with certificates
/// and a first call.
pub(super) const STRANGERS_FREE_BYTES: usize = 16 << 10;

/// Bytes that the strangers of one host send beyond that: at 17 bytes a ping, half a MiB is
/// 30,000 frames. The largest honest first message has 4 MiB.
pub(super) const STRANGERS_BYTES: Turns =
    Turns { at_once: 4194304.0, per_second: 524288.0, most_wait: HANDSHAKE };

/// Hosts whose strangers are counted, before those that are quiet are forgotten.
pub(super) const MAX_HOSTS: usize = 4096;

/// Streams that a peer resets before they were looked at, and that we reset for its errors,
/// before its connection is closed (CVE-2023-44487, CVE-2025-8671).
pub const MAX_RESETS: usize = 64;

/// Files of one report: more than a rank has microbatches, and little to look at again
/// when the answer was lost.
pub const MAX_FILES_PER_REPORT: usize = 256;

/// Streams of one connection: a rank has a handful of calls in flight.
pub const MAX_STREAMS: u32 = 64;

/// Requests that wait for the actor: beyond, the callers wait in their tasks.
pub const QUEUE_REQUESTS: usize = 1024;

/// Requests that share one fsync.
pub const MAX_BATCH: usize = 256;

/// How often deadlines are looked at and failed commits tried again.
pub const TICK: Duration = Duration::from_secs(1);

/// How long open calls may take to end when the coordinator stops.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// How long a step may take from its first event before it is called partial.
pub const STEP_DEADLINE: Duration = Duration::from_secs(600);

/// Triggered recordings of a run unless it is told otherwise: the first shows
/// what went wrong, the next two whether it does so again.
pub const MAX_TRIGGERS: u32 = 3;

/// How long ranks cannot trigger again: the same divergence triggers for as
/// long as it lasts.
pub const TRIGGER_COOLDOWN: Duration = Duration::from_secs(600);

/// Plans of one attempt: each is a line in the journal and is sent to every rank.
pub const MAX_PLANS: usize = 1000;

/// Heartbeats of one rank in a second: an honest one sends one, and a few more
/// while a trigger is settled.
pub const MAX_BEATS_PER_SECOND: u32 = 64;

/// Longest heartbeat period that is believed.
pub const MAX_BEAT_PERIOD: Duration = Duration::from_secs(60);

/// Fastest steps that are believed, each second.
pub const MAX_STEP_RATE: f64 = 10_000.0;

/// A step beyond this is no step of a job.
pub const MAX_STEP: u64 = 1 << 53;

/// What an answer may take beyond the heartbeat's period.
pub const HEARING_SLACK: Duration = Duration::from_millis(500);

/// How long a rank may be silent before nobody waits for its ring; never less
/// than five of its own periods.
pub const RANK_SILENCE: Duration = Duration::from_secs(10);

/// Steps that a ring may hold.
pub const MAX_RING_STEPS: usize = 1024;

/// Bytes of a trigger's reason.
pub const MAX_REASON_BYTES: usize = 500;
