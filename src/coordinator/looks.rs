//! Limits the memory for parsing headers: callers reserve ("take a seat") for the bytes of a
//! header, whose parsing takes several times its size.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::{LOOKED_AT_BYTES, MAX_ONLINE_HEADER};
use super::refusal::Refusal;

/// Bytes of header per permit of the semaphore.
const UNIT: u64 = 1 << 10;

/// The limit of one coordinator.
#[derive(Clone)]
pub(crate) struct Looks(Arc<Semaphore>);

/// A reservation, released when it is dropped: once the header's shards are journalled.
pub(crate) struct Seat(#[allow(dead_code)] OwnedSemaphorePermit);

impl Looks {
    pub(crate) fn new() -> Looks {
        Looks(Arc::new(Semaphore::new((LOOKED_AT_BYTES / UNIT) as usize)))
    }

    /// Waits until headers of so many bytes together may be parsed, and reserves for them.
    pub(crate) async fn seat(&self, bytes: u64) -> Result<Seat, Refusal> {
        let units = bytes.clamp(UNIT, MAX_ONLINE_HEADER).div_ceil(UNIT);
        // The semaphore is never closed, so that this cannot fail.
        let taken = self.0.clone().acquire_many_owned(units as u32).await;
        taken.map(Seat).map_err(|_| Refusal::Stopping)
    }

    /// The same, blocking, on a blocking thread of the runtime.
    pub(crate) fn wait(&self, bytes: u64) -> Result<Seat, Refusal> {
        Handle::current().block_on(self.seat(bytes))
    }
}
