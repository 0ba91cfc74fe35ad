//! The kernel that writes the new keys or values of one sequence to its slot of the cache, for
//! prefill. In decode, the attention kernel writes the new keys and values.

use super::CacheShape;
use crate::kernels::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::problem::expect_length;
use marlin_kernels::{elementwise, vector_size};

/// Writes `new` [kv_heads, seq, head_dim] to positions `start..start + seq` of a slot of `cache`.
/// `shape.rows` is `kv_heads * seq`, and `shape.features` is `head_dim`.
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
) -> Result<(), KernelError> {
    let CacheShape {
        slots,
        kv_heads,
        max_len,
        head_dim,
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
    shape.expect_within("slot", slot + 1, slots)?;
    shape.expect_within("positions", start + seq, max_len)?;
    if new.is_empty() {
        return Ok(());
    }
    let size = vector_size(client, head_dim, shape.dtype);
    let units = new.len() / size;
    let (count, dim) = elementwise(client, units);
    let first = cache_shape.element(slot, 0, start) / size;
    let (head, cache_head) = (seq * head_dim / size, cache_shape.element(0, 1, 0) / size);
    write_cache_rows::launch(
        client,
        count,
        dim,
        size,
        new,
        cache,
        first,
        head,
        cache_head,
        shape.dtype.elem(),
    );
    Ok(())
}

/// Copies one vector per unit. `head` is the number of new vectors of a head, `cache_head` the
/// number of vectors between the starts of two heads of the cache, and `first` the index of the
/// first vector that is written to the cache.
#[cube(launch)]
fn write_cache_rows<F: Float, N: Size>(
    new: &[Vector<F, N>],
    cache: &mut [Vector<F, N>],
    first: usize,
    head: usize,
    cache_head: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= new.len() {
        terminate!();
    }
    cache[first + ABSOLUTE_POS / head * cache_head + ABSOLUTE_POS % head] = new[ABSOLUTE_POS];
}
