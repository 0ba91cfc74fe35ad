//! The kernel that writes the new keys or values of one sequence to its slot of the cache, for
//! prefill. In decode, the attention kernel writes the new keys and values.

use super::CacheShape;
use super::address::{CacheLengths, CacheLengthsLaunch, position_start};
use crate::kernels::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::problem::{expect_length, expect_presence};
use marlin_kernels::{elementwise, vector_size};

/// Writes `new` [kv_heads, seq, head_dim] to positions `start..start + seq` of a slot of `cache`.
/// `shape.rows` is `kv_heads * seq`, and `shape.features` is `head_dim`. `table` is the page table
/// if the cache has pages.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, the slot or the positions are outside the
/// cache, or the device does not support the dtype.
pub fn write_cache(
    client: &Client,
    shape: &RowsShape,
    cache_shape: &CacheShape,
    [slot, start]: [usize; 2],
    new: BufferArg,
    cache: BufferArg,
    table: Option<BufferArg>,
) -> Result<(), KernelError> {
    let CacheShape {
        slots,
        kv_heads,
        max_len,
        head_dim,
        pages,
        ..
    } = *cache_shape;
    let seq = shape.rows / kv_heads.max(1);
    shape.dtype.expect_on(client)?;
    expect_length(
        shape,
        "new keys or values",
        kv_heads * seq * head_dim,
        new.len(),
    )?;
    expect_length(shape, "cache", cache_shape.elements(), cache.len())?;
    expect_table(shape, cache_shape, &table)?;
    shape.expect_within("slot", slot + 1, slots)?;
    shape.expect_within("positions", start + seq, max_len)?;
    if new.is_empty() {
        return Ok(());
    }
    let size = vector_size(client, head_dim, shape.dtype);
    let units = new.len() / size;
    let (count, dim) = elementwise(client, units);
    let vectors = head_dim / size;
    write_cache_rows::launch(
        client,
        count,
        dim,
        size,
        new,
        cache,
        table.into(),
        slot as u32,
        start as u32,
        seq * vectors,
        CacheLengthsLaunch::of(cache_shape),
        vectors,
        pages.map(|pages| pages.size),
        shape.dtype.elem(),
    );
    Ok(())
}

/// Checks that a page table is there if the cache has pages, and that it has the right length.
pub(crate) fn expect_table(
    problem: &impl std::fmt::Display,
    shape: &CacheShape,
    table: &Option<BufferArg>,
) -> Result<(), KernelError> {
    let dims = shape.table_dims();
    expect_presence(problem, "page table", dims.is_some(), table.is_some())?;
    if let (Some([slots, columns]), Some(table)) = (dims, table) {
        expect_length(problem, "page table", slots * columns, table.len())?;
    }
    Ok(())
}

/// Copies one vector per unit to a slot's positions from `start` on. `head` is the number of new
/// vectors of a head, and `vectors` that of a position of a head.
#[cube(launch)]
fn write_cache_rows<F: Float, N: Size>(
    new: &[Vector<F, N>],
    cache: &mut [Vector<F, N>],
    table: ComptimeOption<&[i32]>,
    slot: u32,
    start: u32,
    head: usize,
    lengths: CacheLengths,
    #[comptime] vectors: usize,
    #[comptime] page_size: Option<usize>,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= new.len() {
        terminate!();
    }
    let in_head = ABSOLUTE_POS % head;
    let first = position_start::<usize>(
        &table,
        slot,
        u32::cast_from(ABSOLUTE_POS / head),
        start + u32::cast_from(in_head / vectors),
        &lengths,
        page_size,
        comptime!(vectors as u32),
    );
    cache[first + in_head % vectors] = new[ABSOLUTE_POS];
}
