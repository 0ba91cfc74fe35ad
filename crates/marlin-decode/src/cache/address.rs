//! The place of a position in the cache [slots, kv_heads, max_len, head_dim]: one function for
//! kernels, one for the host.

use super::CacheShape;
use cubecl::prelude::*;

/// Returns the start of a key head of a slot, in units of which a position has `per_position`: of
/// elements, vectors, bytes or rows. The positions of the head follow one another.
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
    /// Returns the first element of a position of a key head of a slot.
    pub fn element(&self, slot: usize, kv_head: usize, position: usize) -> usize {
        ((slot * self.kv_heads + kv_head) * self.max_len + position) * self.head_dim
    }
}
