//! New keys or values of one sequence into its slot of the cache, in place, for prefill. Decode writes its own in the attention kernel.

use super::shape::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::device::{elementwise, vector_size};
use marlin_kernels::problem::expect_length;

/// Keys or values of a layer for several sequences: [slots, kv_heads, max_len, head_dim].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Sequences that it has room for.
    pub slots: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Positions of a slot.
    pub max_len: usize,
    /// Features of a head.
    pub head_dim: usize,
}

impl CacheShape {
    /// Elements of keys, or of values.
    pub fn elements(&self) -> usize {
        self.slots * self.kv_heads * self.max_len * self.head_dim
    }
}

/// Writes `new` [kv_heads, seq, head_dim] to positions `start..start + seq` of a slot. `rows` of the shape are `kv_heads * seq`, `features` are
/// `head_dim`.
///
/// # Errors
/// A buffer of the wrong length, a slot or positions outside the cache, or a dtype that the device lacks.
pub fn write_cache(
    client: &Client,
    shape: &RowsShape,
    cache_shape: &CacheShape,
    [slot, start]: [usize; 2],
    new: BufferArg,
    cache: BufferArg,
) -> Result<(), KernelError> {
    let CacheShape { slots, kv_heads, max_len, head_dim } = *cache_shape;
    let seq = shape.rows / kv_heads.max(1);
    shape.dtype.expect_on(client)?;
    expect_length(shape, "new keys or values", kv_heads * seq * head_dim, new.len())?;
    expect_length(shape, "cache", cache_shape.elements(), cache.len())?;
    shape.expect_within("slot", slot + 1, slots)?;
    shape.expect_within("positions", start + seq, max_len)?;
    if new.is_empty() {
        return Ok(());
    }
    let size = vector_size(client, head_dim, shape.dtype);
    let units = new.len() / size;
    let (count, dim) = elementwise(client, units);
    let first = (slot * kv_heads * max_len + start) * head_dim / size;
    let (head, cache_head) = (seq * head_dim / size, max_len * head_dim / size);
    write_cache_rows::launch(client, count, dim, size, new, cache, first, head, cache_head, shape.dtype.elem());
    Ok(())
}

/// One unit a vector; `head` vectors are new in each head, `cache_head` are between heads of the cache, and `first` come before the first.
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
