//! The address of a position in the KV cache [slots, kv_heads, max_len, head_dim]: one function for
//! kernels, and one for the host.

use super::CacheShape;
#[cfg(feature = "cubecl-runtime")]
use cubecl::prelude::*;

/// Returns the offset of the first position of a key head of a slot. The unit of the offset may be
/// an element, a vector, a byte or a row: `per_position` is the number of units of a position. The
/// positions of a head are contiguous.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn head_start<I: Int>(
    slot: u32,
    kv_head: u32,
    kv_heads: u32,
    max_len: u32,
    #[comptime] per_position: u32,
) -> I {
    I::cast_from(slot * kv_heads + kv_head) * I::cast_from(max_len * per_position)
}

impl CacheShape {
    /// Returns the index of the first element of a position of a key head of a slot.
    pub fn element(&self, slot: usize, kv_head: usize, position: usize) -> usize {
        ((slot * self.kv_heads + kv_head) * self.max_len + position) * self.head_dim
    }
}
