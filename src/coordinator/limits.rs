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

/// How long a request may wait for the actor and its fsync. A disk that takes
/// longer hangs, and the rank should know.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(30);

/// How long an upload may send nothing.
pub const UPLOAD_IDLE: Duration = Duration::from_secs(30);

/// Uploads at a time: each may hold one flow-control window in memory.
pub const MAX_UPLOADS: usize = 16;

/// Largest file accepted: what one rank of a large model holds in f64, tenfold.
pub const MAX_FILE_BYTES: u64 = 1 << 40;

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
