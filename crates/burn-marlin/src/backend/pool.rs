//! A pool of buffers for float weights that live for one matmul.
//!
//! The operating system maps fresh memory page by page, and clears each page before it is written.
//! For megabytes this takes longer than unpacking the weight. A buffer that is reused from layer to
//! layer is also still in the processor's caches when the next weight is written to it.

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut, zeroed_vec};
use cubecl_environment::bytes::{
    AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes,
};
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

/// The maximum number of buffers in the pool: the number of layers that run at the same time.
const MAX_BUFFERS: usize = 4;
/// The maximum size in bytes of a buffer in the pool: about the size of a third-level cache. A
/// larger buffer gains less from reuse, and would stay allocated.
const MAX_BYTES: usize = 32 << 20;

static POOL: Mutex<Vec<Vec<Line>>> = Mutex::new(Vec::new());

/// A cache line.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A buffer that is taken from the pool and returned to it when it is dropped.
pub struct Pooled {
    lines: Vec<Line>,
    bytes: usize,
}

impl Pooled {
    /// Takes a buffer for the given number of elements from the pool, or allocates one. Its
    /// contents are arbitrary.
    pub fn new<T: Pod>(elements: usize) -> Self {
        let bytes = elements * size_of::<T>();
        let lines = bytes.div_ceil(size_of::<Line>());
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = pool.iter().position(|buffer| buffer.len() >= lines);
        let mut buffer = fits.map_or_else(Vec::new, |index| pool.swap_remove(index));
        drop(pool);
        if buffer.is_empty() {
            // `zeroed_vec` takes zeroed memory from the allocator. `vec!` would write each line in
            // a loop that this crate compiles and that takes half a second for a large layer unless
            // it is optimised.
            buffer = zeroed_vec(lines);
        }
        Self {
            lines: buffer,
            bytes,
        }
    }

    /// Returns the elements of the buffer.
    pub fn elements<T: Pod>(&mut self) -> &mut [T] {
        &mut cast_slice_mut(&mut self.lines)[..self.bytes / size_of::<T>()]
    }

    /// Converts the buffer to the memory of a tensor.
    pub fn into_bytes(self) -> Bytes {
        let bytes = self.bytes;
        // SAFETY: the buffer has as many bytes, all of them written.
        unsafe { Bytes::from_controller(Box::new(self), bytes) }
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.len() < MAX_BUFFERS && size_of_val(lines.as_slice()) <= MAX_BYTES {
            pool.push(lines);
        }
    }
}

impl AllocationController for Pooled {
    fn alloc_align(&self) -> usize {
        align_of::<Line>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes: &mut [u8] = cast_slice_mut(&mut self.lines);
        // SAFETY: a `MaybeUninit<u8>` may hold any byte; callers only write initialised ones.
        Ok(unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes: &[u8] = cast_slice(&self.lines);
        // SAFETY: an initialised byte is a valid `MaybeUninit<u8>`.
        Ok(unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) })
    }
}
