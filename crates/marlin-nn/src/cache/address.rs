//! The address of a position in the KV cache, in kernels.

use super::CacheShape;
use cubecl::prelude::*;

/// The lengths of a cache, as arguments of a kernel; see [`CacheShape`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct CacheLengths {
    pub slots: u32,
    pub kv_heads: u32,
    pub max_len: u32,
    /// The number of pages.
    pub pages: u32,
}

impl CacheLengthsLaunch {
    /// Returns the lengths of a cache.
    pub(crate) fn of(shape: &CacheShape) -> Self {
        let [pages, ..] = shape.dims();
        let [slots, kv_heads, max_len, pages] =
            [shape.slots, shape.kv_heads, shape.max_len, pages].map(|length| length as u32);
        Self::new(slots, kv_heads, max_len, pages)
    }
}

/// Returns the offset of a position of a key head of a slot. The unit of the offset may be an
/// element, a vector, a byte or a row: `per_position` is the number of units of a position.
///
/// `table` is the page table, and `page_size` the number of positions of a page; both are absent if
/// the cache has no pages. A page outside the cache is the last one, so that a wrong table reads
/// and writes no other memory. The positions of a page are contiguous.
#[cube]
pub(crate) fn position_start<I: Int>(
    table: &ComptimeOption<&[i32]>,
    slot: u32,
    kv_head: u32,
    position: u32,
    lengths: &CacheLengths,
    #[comptime] page_size: Option<usize>,
    #[comptime] per_position: u32,
) -> I {
    #[comptime]
    match table {
        ComptimeOption::Some(table) => {
            let size = comptime!(page_size.unwrap_or(1) as u32);
            let columns = lengths.max_len.div_ceil(size);
            let page = u32::cast_from(table[(slot * columns + position / size) as usize]);
            let row = min(page, lengths.pages - 1) * lengths.kv_heads + kv_head;
            I::cast_from(row) * I::cast_from(comptime!(size * per_position))
                + I::cast_from(position % size * per_position)
        }
        ComptimeOption::None => {
            I::cast_from(slot * lengths.kv_heads + kv_head)
                * I::cast_from(lengths.max_len * per_position)
                + I::cast_from(position * per_position)
        }
    }
}
