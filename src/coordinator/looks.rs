//! Seats for headers that are read and understood: what that takes in memory is several times
//! their size, whoever sent them.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::{LOOKED_AT_BYTES, MAX_ONLINE_HEADER};
use super::refusal::Refusal;

/// What one permit stands for.
const UNIT: u64 = 1 << 10;

/// The seats of one coordinator.
#[derive(Clone)]
pub(crate) struct Looks(Arc<Semaphore>);

/// Taken until it is dropped: once what was understood is journalled.
pub(crate) struct Seat(#[allow(dead_code)] OwnedSemaphorePermit);

impl Looks {
    pub(crate) fn new() -> Looks {
        Looks(Arc::new(Semaphore::new((LOOKED_AT_BYTES / UNIT) as usize)))
    }

    /// A seat for headers of so many bytes together.
    pub(crate) async fn seat(&self, bytes: u64) -> Result<Seat, Refusal> {
        let units = bytes.clamp(UNIT, MAX_ONLINE_HEADER).div_ceil(UNIT);
        // Never closed: an error cannot come.
        let taken = self.0.clone().acquire_many_owned(units as u32).await;
        taken.map(Seat).map_err(|_| Refusal::Stopping)
    }

    /// The same on a thread of the runtime that may block.
    pub(crate) fn wait(&self, bytes: u64) -> Result<Seat, Refusal> {
        Handle::current().block_on(self.seat(bytes))
    }
}
