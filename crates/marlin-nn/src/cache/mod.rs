//! The KV cache of a layer: its tensors, the addresses of positions, and writes of a prompt's keys
//! and values.

#[cfg(feature = "cubecl-runtime")]
mod address;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod e4m3;
mod shape;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod write;

use crate::device::takes;
use crate::ops::DecodeBackend;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use std::ops::Range;

#[cfg(feature = "inspect")]
pub(crate) use address::CacheLengthsCompilationArg;
#[cfg(feature = "cubecl-runtime")]
pub(crate) use address::{CacheLengths, CacheLengthsLaunch, position_start};
pub use shape::{CacheFormat, CacheShape, Pages};

/// The KV cache of a layer, which a step writes in place.
#[derive(Debug)]
pub struct LayerCache<'a> {
    /// The keys, [slots, kv_heads, max_len, head_dim], or [pages, kv_heads, page_size, head_dim]
    /// with pages.
    pub keys: &'a mut Tensor<4>,
    /// The values, in the same shape.
    pub values: &'a mut Tensor<4>,
    /// The page table; `None` if every slot has a page of its own.
    pub pages: Option<PageTable<'a>>,
    /// Keys and values in the dtype of activations, of the same positions, if the cache has another
    /// format: the workspace of prompts. All layers may have the same.
    pub workspace: Option<[&'a Tensor<4>; 2]>,
}

/// The page table of a paged KV cache ([`CacheShape`]). All layers have the same.
#[derive(Debug, Clone, Copy)]
pub struct PageTable<'a> {
    /// The pages of the slots, i32 [slots, max_len / page_size rounded up]. Entries of positions
    /// that a sequence does not have yet are not read.
    pub entries: &'a Tensor<2, Int>,
    /// The maximum number of positions of a slot.
    pub max_len: usize,
}

impl LayerCache<'_> {
    /// Returns the shape of the cache.
    pub fn shape(&self) -> CacheShape {
        match self.workspace {
            None => cache_shape(self.keys, self.pages),
            Some([keys, _]) => CacheShape {
                format: CacheFormat::E4m3,
                ..cache_shape(keys, self.pages)
            },
        }
    }
}

/// Returns the shape of a cache of which `cache` is the keys or the values of a layer.
fn cache_shape(cache: &Tensor<4>, pages: Option<PageTable<'_>>) -> CacheShape {
    let [count, kv_heads, size, head_dim] = cache.dims();
    match pages {
        None => CacheShape::from(cache.dims()),
        Some(PageTable { entries, max_len }) => CacheShape {
            slots: entries.dims()[0],
            kv_heads,
            max_len,
            head_dim,
            pages: Some(Pages { count, size }),
            format: CacheFormat::Activations,
        },
    }
}

/// Allocates the keys or the values of a layer, of the dimensions [`CacheShape::dims`], filled with
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
pub fn write_cache(
    cache: &mut Tensor<4>,
    pages: Option<PageTable<'_>>,
    new: Tensor<4>,
    slot: usize,
    start: usize,
) {
    let (shape, seq) = (cache_shape(cache, pages), new.dims()[2]);
    expect_within(&shape, slot..slot + 1, start..start + seq);
    let entries = pages.map(|pages| pages.entries.clone());
    cache.inplace(|cache| match takes(&cache) {
        true => Tensor::from_dispatch(Dispatch::decode_write_cache(
            cache.into_dispatch(),
            new.into_dispatch(),
            entries.map(Tensor::into_dispatch).into(),
            shape,
            slot,
            start,
        )),
        false => assign(cache, &shape, entries, new, slot, start),
    });
}

/// Returns the keys or values of a range of slots, at a range of positions, [slots, kv_heads,
/// positions, head_dim].
///
/// # Panics
/// Panics if the slots or the positions are outside the cache.
pub fn read_cache(
    cache: &Tensor<4>,
    pages: Option<PageTable<'_>>,
    slots: Range<usize>,
    positions: Range<usize>,
) -> Tensor<4> {
    let shape = cache_shape(cache, pages);
    expect_within(&shape, slots.clone(), positions.clone());
    let [_, kv_heads, size, head_dim] = cache.dims();
    let Some(PageTable { entries, .. }) = pages else {
        return cache
            .clone()
            .slice([slots, 0..kv_heads, positions, 0..head_dim]);
    };
    let (first, count) = (positions.start / size, slots.len());
    let columns = positions.end.div_ceil(size) - first;
    let of_pages = entries.clone().slice([slots, first..first + columns]);
    let gathered = cache
        .clone()
        .select(0, of_pages.reshape([count * columns]))
        .reshape([count, columns, kv_heads, size, head_dim])
        .swap_dims(1, 2)
        .reshape([count, kv_heads, columns * size, head_dim]);
    let skipped = first * size;
    gathered.slice_dim(2, positions.start - skipped..positions.end - skipped)
}

fn expect_within(shape: &CacheShape, slots: Range<usize>, positions: Range<usize>) {
    assert!(
        slots.end <= shape.slots && positions.end <= shape.max_len,
        "slots {slots:?} of {}, positions {positions:?} of {}",
        shape.slots,
        shape.max_len
    );
}

/// Writes keys or values to a cache with Burn's operations, as [`write_cache`] does.
fn assign(
    mut cache: Tensor<4>,
    shape: &CacheShape,
    entries: Option<Tensor<2, Int>>,
    new: Tensor<4>,
    slot: usize,
    start: usize,
) -> Tensor<4> {
    let [_, heads, seq, head_dim] = new.dims();
    let Some(entries) = entries else {
        return cache.slice_assign(
            [slot..slot + 1, 0..heads, start..start + seq, 0..head_dim],
            new,
        );
    };
    let size = shape.dims()[2];
    let pages: Vec<i64> = entries
        .slice_dim(0, slot..slot + 1)
        .into_data()
        .iter::<i64>()
        .collect();
    let mut position = start;
    while position < start + seq {
        let (page, within) = (pages[position / size] as usize, position % size);
        let count = (size - within).min(start + seq - position);
        let part = new
            .clone()
            .slice_dim(2, position - start..position - start + count);
        cache = cache.slice_assign(
            [
                page..page + 1,
                0..heads,
                within..within + count,
                0..head_dim,
            ],
            part,
        );
        position += count;
    }
    cache
}
