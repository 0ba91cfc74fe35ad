//! The KV cache of a layer: its tensors, the addresses of positions, and writes of a prompt's keys
//! and values.

mod address;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod write;

use crate::device::takes;
use crate::ops::DecodeBackend;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Tensor};

#[cfg(feature = "cubecl-runtime")]
pub(crate) use address::head_start;

/// The shape of the keys or the values of a layer: [slots, kv_heads, max_len, head_dim].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// The number of slots, each of which holds one sequence.
    pub slots: usize,
    /// The number of heads of the keys, which is also that of the values.
    pub kv_heads: usize,
    /// The number of positions of a slot.
    pub max_len: usize,
    /// The number of features of a head.
    pub head_dim: usize,
}

impl From<[usize; 4]> for CacheShape {
    fn from([slots, kv_heads, max_len, head_dim]: [usize; 4]) -> Self {
        Self {
            slots,
            kv_heads,
            max_len,
            head_dim,
        }
    }
}

impl CacheShape {
    /// Returns the number of elements; `usize::MAX` if the number overflows.
    pub fn elements(&self) -> usize {
        [self.kv_heads, self.max_len, self.head_dim]
            .into_iter()
            .fold(self.slots, usize::saturating_mul)
    }
}

/// The KV cache of a layer, which a step writes in place.
#[derive(Debug)]
pub struct LayerCache<'a> {
    /// The keys, [slots, kv_heads, max_len, head_dim].
    pub keys: &'a mut Tensor<4>,
    /// The values, in the same shape.
    pub values: &'a mut Tensor<4>,
}

/// Allocates the keys or the values of a layer, [slots, kv_heads, max_len, head_dim], filled with
/// zeros.
pub fn cache(shape: [usize; 4], dtype: FloatDType, device: &Device) -> Tensor<4> {
    // A tensor of several dimensions may be allocated with gaps between its rows, but kernels that
    // write in place need contiguous memory.
    Tensor::<1>::zeros(
        [shape.iter().product::<usize>()],
        (device, DType::from(dtype)),
    )
    .reshape(shape)
}

/// Writes keys or values `new` [1, kv_heads, seq, head_dim] to positions `start..start + seq` of a
/// slot of a cache.
///
/// # Panics
/// Panics if the slot or the positions are outside the cache.
pub fn write_cache(cache: &mut Tensor<4>, new: Tensor<4>, slot: usize, start: usize) {
    let ([slots, _, max_len, _], seq) = (cache.dims(), new.dims()[2]);
    assert!(
        slot < slots && start + seq <= max_len,
        "slot {slot} of {slots}, positions {start}..{} of {max_len}",
        start + seq
    );
    cache.inplace(|cache| match takes(&cache) {
        true => Tensor::from_dispatch(Dispatch::decode_write_cache(
            cache.into_dispatch(),
            new.into_dispatch(),
            slot,
            start,
        )),
        false => assign(cache, new, slot, start),
    });
}

/// Writes keys or values to a cache with Burn's operations, as [`write_cache`] does.
fn assign(cache: Tensor<4>, new: Tensor<4>, slot: usize, start: usize) -> Tensor<4> {
    let [_, heads, seq, head_dim] = new.dims();
    cache.slice_assign(
        [slot..slot + 1, 0..heads, start..start + seq, 0..head_dim],
        new,
    )
}
