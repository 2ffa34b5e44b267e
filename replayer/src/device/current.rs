//! Whose context is current on a thread: ours for as long as a call takes, then the thread's own.
//!
//! A thread that trains, or a notebook's, has a context of torch's or jax's. cudarc makes its own
//! current and leaves it so; and what it drops (memory, a handle of cuBLAS) it drops with whatever
//! context is current, where the null stream is another GPU's.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, DriverError, result, sys};

/// A context that is current on this thread until this is dropped.
pub(super) struct Current(());

impl Current {
    pub(super) fn of(context: &CudaContext) -> Result<Current, DriverError> {
        // SAFETY: a context that is retained as long as `context` is there.
        unsafe { sys::cuCtxPushCurrent_v2(context.cu_ctx()) }.result()?;
        Ok(Current(()))
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pops what `of` pushed. Without a context there is nothing to give back.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

/// What was current on this thread, which it has back when this is dropped.
pub(super) struct Before(sys::CUcontext);

// SAFETY: the handle's number; it is given back where it is dropped.
unsafe impl Send for Before {}
// SAFETY: as above.
unsafe impl Sync for Before {}

impl Before {
    /// The driver must have been set up.
    pub(super) fn now() -> Result<Before, DriverError> {
        Ok(Before(result::ctx::get_current()?.unwrap_or(std::ptr::null_mut())))
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        // SAFETY: whoever made it current keeps it so; null makes none current.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

/// What cudarc gives back when it is dropped, by calls that take the current context's word.
pub(super) struct InContext<T> {
    value: ManuallyDrop<T>,
    context: Arc<CudaContext>,
}

/// Bytes of a GPU: freed in the order of its own stream, where the null stream is that of the
/// current context.
pub(super) type Bytes = InContext<CudaSlice<u8>>;

impl<T> InContext<T> {
    pub(super) fn new(value: T, context: &Arc<CudaContext>) -> InContext<T> {
        InContext { value: ManuallyDrop::new(value), context: context.clone() }
    }
}

impl<T> Deref for InContext<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for InContext<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for InContext<T> {
    fn drop(&mut self) {
        let current = Current::of(&self.context);
        // SAFETY: it is dropped here and nowhere else.
        unsafe { ManuallyDrop::drop(&mut self.value) };
        drop(current);
    }
}
