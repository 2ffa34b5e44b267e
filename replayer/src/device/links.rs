//! What brings the sums of one device to another: NCCL between GPUs.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaStream, DevicePtr};
use cudarc::nccl::{result as nccl, sys};

use super::cuda::Cuda;
use super::current::{Before, Bytes};
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

/// Communicators of this process, one for each GPU, and the streams that they send on.
///
/// Not cudarc's own type, whose drop panics where NCCL cannot end what it did.
pub(super) struct Nccl {
    comms: Mutex<Vec<sys::ncclComm_t>>,
    streams: Vec<Arc<CudaStream>>,
}

// SAFETY: a communicator may be used by any thread, one at a time (NCCL, "Thread Safety"), and
// the mutex lets one.
unsafe impl Send for Nccl {}
// SAFETY: as above.
unsafe impl Sync for Nccl {}

impl Drop for Nccl {
    fn drop(&mut self) {
        let before = Before::now();
        for &comm in self.comms.get_mut().unwrap_or_else(PoisonError::into_inner).iter() {
            // SAFETY: made by `join` and ended here alone. Abort, as destroy waits for what is
            // under way, which after an error may not come to an end.
            let _ = unsafe { nccl::comm_abort(comm) };
        }
        drop(before);
    }
}

impl Nccl {
    /// Joins these GPUs.
    pub(super) fn join(machines: &[Cuda]) -> Result<Nccl, DeviceError> {
        presence::need(presence::nccl)?;
        let failed = |why| failed("joining the GPUs", why);
        let streams: Vec<_> = machines.iter().map(Cuda::stream).collect();
        let number = |stream: &Arc<CudaStream>| stream.context().ordinal() as c_int;
        let ordinals: Vec<c_int> = streams.iter().map(number).collect();
        let mut comms = vec![std::ptr::null_mut(); streams.len()];
        let before = Before::now();
        // SAFETY: as many communicators as there are numbers.
        let joined = unsafe {
            nccl::comm_init_all(comms.as_mut_ptr(), comms.len() as c_int, ordinals.as_ptr())
        };
        drop(before);
        joined.map_err(failed)?;
        Ok(Nccl { comms: Mutex::new(comms), streams })
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
        (from, buffer): (usize, &Bytes),
        to: &mut Bytes,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        assert!(bytes <= buffer.len() && bytes <= to.len(), "both buffers hold as much");
        let comms = self.comms.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |why| failed("bringing sums from one GPU to another", why);
        let peer = c_int::try_from(from).unwrap_or(c_int::MAX);
        let stream = |nth: usize| self.streams[nth].cu_stream().cast();
        let datatype = sys::ncclDataType_t::ncclUint8;
        let source = buffer.device_ptr(&self.streams[from]).0 as *const c_void;
        let target = to.device_ptr(&self.streams[0]).0 as *mut c_void;
        let before = Before::now();
        nccl::group_start().map_err(failed)?;
        // SAFETY: both buffers hold so many bytes, and live until their streams have come there:
        // they are freed in their streams' order.
        let (sent, received) = unsafe {
            (
                nccl::send(source, bytes, datatype, 0, comms[from], stream(from)),
                nccl::recv(target, bytes, datatype, peer, comms[0], stream(0)),
            )
        };
        // A group is ended whatever was said inside it: the next would wait for it.
        let ended = nccl::group_end();
        drop(before);
        sent.and(received).and(ended).map(|_| ()).map_err(failed)
    }
}

fn failed(what: &str, why: nccl::NcclError) -> DeviceError {
    DeviceError::call(what, format!("NCCL says {:?}", why.0))
}
