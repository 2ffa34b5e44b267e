//! What brings the sums of one device to another: NCCL between GPUs.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::CudaSlice;
use cudarc::nccl::{Comm, result as nccl};

use super::cuda::Cuda;
use super::error::DeviceError;
use super::machine::Machine;
use super::presence;

/// Joins some machines, known by their place among them.
pub(super) trait Links<M: Machine>: Sync {
    /// Copies the first bytes of a buffer of machine number `from` to one of machine number 0,
    /// behind what either was told before.
    fn bring(
        &self,
        from: (usize, &M::Buffer),
        to: &mut M::Buffer,
        bytes: usize,
    ) -> Result<(), DeviceError>;
}

/// Communicators of this process, one for each GPU.
pub(super) struct Nccl(Mutex<Vec<Comm>>);

// SAFETY: a communicator may be used by any thread, one at a time (NCCL, "Thread Safety"), and
// the mutex lets one.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

impl Nccl {
    /// Joins these GPUs.
    pub(super) fn join(machines: &[Cuda]) -> Result<Nccl, DeviceError> {
        presence::need(presence::nccl)?;
        let streams = machines.iter().map(Cuda::stream).collect();
        let joined = Comm::from_devices(streams).map_err(|why| failed("joining the GPUs", why))?;
        Ok(Nccl(Mutex::new(joined)))
    }

    /// As the report names it.
    pub(super) fn name() -> Result<String, DeviceError> {
        let version = nccl::get_nccl_version().map_err(|why| failed("asking its version", why))?;
        // As `NCCL_VERSION` packs it since 2.9.
        let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
        Ok(format!("NCCL {major}.{minor}.{patch}"))
    }
}

impl Links<Cuda> for Nccl {
    /// A send and a receive, not a reduction: whose order is NCCL's own.
    fn bring(
        &self,
        (from, buffer): (usize, &CudaSlice<u8>),
        to: &mut CudaSlice<u8>,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let comms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |why| failed("bringing sums from one GPU to another", why);
        let peer = i32::try_from(from).unwrap_or(i32::MAX);
        nccl::group_start().map_err(failed)?;
        let sent = comms[from].send(&buffer.slice(..bytes), 0);
        let received = comms[0].recv(&mut to.slice_mut(..bytes), peer);
        // A group is ended whatever was said inside it: the next would wait for it.
        let ended = nccl::group_end();
        sent.and(received.map(|_| ())).and(ended.map(|_| ())).map_err(failed)
    }
}

fn failed(what: &str, why: nccl::NcclError) -> DeviceError {
    DeviceError::call(what, format!("NCCL says {:?}", why.0))
}
