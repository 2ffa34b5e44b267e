//! Zeroed memory aligned for vector loads, viewed as any plain element type.
//!
//! All `unsafe` code of assembly is here. A `Vec<u8>` has no guaranteed alignment, and casting it
//! to `&[f32]` would be undefined behaviour where its address is not a multiple of 4.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

#[cfg(target_endian = "big")]
compile_error!("shards are little-endian on disk and are viewed in place");

/// Alignment of every assembled tensor: one cache line, one AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// Owned bytes, aligned to [`ALIGNMENT`].
pub(super) struct Buffer {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is owned by this value alone and reached only through
// its references, like a Vec<u8>'s.
unsafe impl Send for Buffer {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A zeroed buffer; `None` when there is not enough memory.
    pub(super) fn zeroed(length: usize) -> Option<Buffer> {
        let layout = Buffer::layout(length)?;
        if length == 0 {
            // An aligned dangling pointer is enough for an empty slice.
            let start = NonNull::<Line>::dangling().cast();
            return Some(Buffer { start, length });
        }
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { start, length })
    }

    fn layout(length: usize) -> Option<Layout> {
        Layout::from_size_align(length, ALIGNMENT).ok()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: start points to length initialised bytes that we own.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and we are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    /// The bytes as elements; a remainder that is shorter than an element is left out.
    pub(super) fn view<T: Element>(&self) -> &[T] {
        let count = self.length / size_of::<T>();
        // SAFETY: ALIGNMENT is a multiple of T's (checked at compile time), the
        // memory is initialised, and every bit pattern is a T.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), count) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(layout), false) = (Buffer::layout(self.length), self.length == 0) {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// A type with the alignment of a buffer; only used for a dangling pointer.
#[repr(align(64))]
struct Line;

/// Plain numbers.
///
/// # Safety
/// Every bit pattern must be a value, and the alignment must divide [`ALIGNMENT`].
pub(super) unsafe trait Element: Copy {}

macro_rules! elements {
    ($($type:ty)*) => { $(
        const _: () = assert!(ALIGNMENT.is_multiple_of(align_of::<$type>()));
        // SAFETY: a primitive number; the alignment is checked above.
        unsafe impl Element for $type {}
    )* };
}

elements!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zeroed_and_none_is_given_where_there_is_none() {
        for length in [0, 1, 63, 64, 65, 100_000] {
            let buffer = Buffer::zeroed(length).unwrap();
            assert_eq!(buffer.bytes().as_ptr().align_offset(ALIGNMENT), 0);
            assert_eq!(buffer.bytes(), vec![0; length]);
            assert_eq!(buffer.view::<f64>().len(), length / 8);
        }
        assert!(Buffer::zeroed(usize::MAX).is_none());
        assert!(Buffer::zeroed(1 << 60).is_none());
    }
}
