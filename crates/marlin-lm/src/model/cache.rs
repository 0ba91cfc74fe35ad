use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_marlin::device::with_dedicated_memory;
use marlin_nn::{self as decode, CacheFormat, CacheShape, LayerCache, PageTable, Pages};

use super::split::RankCaches;
use crate::config::ModelConfig;

/// A KV cache: the keys and values of earlier positions, allocated once for `max_len` positions of
/// each of several sequences, or for a number of [pages](Self::paged) that the sequences share.
///
/// New positions are written in place: nothing else holds a layer's tensors between two forward
/// passes.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<KeyValues>,
    len: usize,
    shape: CacheShape,
    /// The page table, i32 [slots, pages of a slot], if the cache has pages.
    table: Option<Tensor<2, Int>>,
    /// The keys and values of one layer in the dtype of activations, through which prompts of all
    /// layers go, if the cache has another format.
    workspace: Option<KeyValues>,
    /// The caches of the other ranks, of a split model.
    pub(super) ranks: Option<RankCaches>,
}

/// The keys and values of one layer, of the dimensions [`CacheShape::dims`] each.
#[derive(Debug)]
pub(crate) struct KeyValues {
    keys: Tensor<4>,
    values: Tensor<4>,
}

impl KeyValues {
    /// Creates keys and values of zeros.
    pub(crate) fn new(shape: &CacheShape, dtype: FloatDType, device: &Device) -> Self {
        // A cache may be larger than all other tensors. In shared pages of memory it would make
        // every further page as large.
        let zeros = || with_dedicated_memory(device, || decode::cache(shape.dims(), dtype, device));
        Self {
            keys: zeros(),
            values: zeros(),
        }
    }

    /// Returns the cache of the layer, with the page table and the workspace of all layers.
    pub(crate) fn with_pages<'a>(
        &'a mut self,
        pages: Option<PageTable<'a>>,
        workspace: Option<&'a KeyValues>,
    ) -> LayerCache<'a> {
        LayerCache {
            keys: &mut self.keys,
            values: &mut self.values,
            pages,
            workspace: workspace.map(|KeyValues { keys, values }| [keys, values]),
        }
    }
}

/// The position of a cache from which new keys and values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CachePosition {
    /// The slot of the first sequence; others follow in the slots after it.
    pub(crate) slot: usize,
    /// The first position in each of the slots.
    pub(crate) start: usize,
}

impl KvCache {
    /// Creates an empty cache.
    ///
    /// `dtype` is the dtype of activations, and `max_len` is the number of positions of each of
    /// `slots` sequences.
    pub fn new(
        config: &ModelConfig,
        slots: usize,
        max_len: usize,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        Self::with_shape(config, shape(config, slots, max_len), dtype, device)
    }

    /// Creates a cache of pages in a format, which the caller assigns to the slots with
    /// [`set_pages`](Self::set_pages).
    ///
    /// `dtype` is the dtype of activations, and `max_len` is the maximum number of positions of
    /// each of `slots` sequences. With [`CacheFormat::E4m3`], only passes of
    /// [`BatchEngine`](crate::BatchEngine) read and write the cache.
    ///
    /// # Panics
    /// Panics if the size of a page is not a power of two, at least [`Pages::MIN_SIZE`].
    pub fn paged(
        config: &ModelConfig,
        slots: usize,
        max_len: usize,
        pages: Pages,
        format: CacheFormat,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        assert!(
            pages.has_valid_size(),
            "a page of {} positions; it must have a power of two, at least {}",
            pages.size,
            Pages::MIN_SIZE
        );
        let shape = CacheShape {
            pages: Some(pages),
            format,
            ..shape(config, slots, max_len)
        };
        Self::with_shape(config, shape, dtype, device)
    }

    fn with_shape(
        config: &ModelConfig,
        shape: CacheShape,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        let layers = (0..config.num_hidden_layers)
            .map(|_| KeyValues::new(&shape, dtype, device))
            .collect();
        Self {
            layers,
            len: 0,
            shape,
            table: shape.table_dims().map(|dims| decode::words(dims, device)),
            workspace: (shape.format != CacheFormat::Activations)
                .then(|| KeyValues::new(&shape.in_activations(), dtype, device)),
            ranks: None,
        }
    }

    /// Returns the size in bytes of a page of `page_size` positions.
    pub fn page_bytes(
        config: &ModelConfig,
        page_size: usize,
        format: CacheFormat,
        dtype: FloatDType,
    ) -> usize {
        let bytes = |format| {
            let shape = CacheShape {
                format,
                ..shape(config, 1, page_size)
            };
            shape
                .elements()
                .saturating_mul(2 * DType::from(dtype).size())
        };
        let workspace = match format {
            CacheFormat::Activations => 0,
            CacheFormat::E4m3 => bytes(CacheFormat::Activations),
        };
        bytes(format)
            .saturating_mul(config.num_hidden_layers)
            .saturating_add(workspace)
    }

    /// Returns the size in bytes of a cache with these sizes.
    pub fn size_bytes(
        config: &ModelConfig,
        slots: usize,
        max_len: usize,
        dtype: FloatDType,
    ) -> usize {
        let size = DType::from(dtype).size();
        shape(config, slots, max_len)
            .elements()
            .saturating_mul(2 * size * config.num_hidden_layers)
    }

    /// Returns the number of positions of each sequence that
    /// [`Model::forward`](super::Model::forward) has written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the cache holds no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum number of positions of a sequence.
    pub fn max_len(&self) -> usize {
        self.shape.max_len
    }

    /// Returns the shape of the cache of a layer.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Removes all positions; the memory stays allocated.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Sets the first pages of a slot: position `p` is in page `pages[p / page_size]`. Pages of
    /// later positions are not changed.
    ///
    /// # Panics
    /// Panics if the cache has no pages, or not this slot, or not so many pages for a slot, or not
    /// one of these pages.
    pub fn set_pages(&mut self, slot: usize, pages: &[u32]) {
        let shape = self.shape;
        let (Some(table), Some(Pages { count, .. }), Some([slots, columns])) =
            (&mut self.table, shape.pages, shape.table_dims())
        else {
            panic!("the cache has no pages");
        };
        assert!(
            slot < slots
                && pages.len() <= columns
                && pages.iter().all(|&page| (page as usize) < count),
            "pages {pages:?} of slot {slot} in a cache of {slots} slots of {columns} of {count} pages"
        );
        decode::write_words(table, slot, pages.iter().map(|&page| page as i32).collect());
    }

    /// Returns the cache of a layer.
    pub(crate) fn layer(&mut self, index: usize) -> LayerCache<'_> {
        let max_len = self.shape.max_len;
        let pages = self
            .table
            .as_ref()
            .map(|entries| PageTable { entries, max_len });
        self.layers[index].with_pages(pages, self.workspace.as_ref())
    }

    /// Adds to the length the positions that were written to every layer.
    pub(crate) fn advance(&mut self, positions: usize) {
        self.len += positions;
    }
}

/// Returns the shape of the cache of a layer without pages.
fn shape(config: &ModelConfig, slots: usize, max_len: usize) -> CacheShape {
    CacheShape::from([slots, config.num_key_value_heads, max_len, config.head_dim])
}

/// Writes keys and values [batch, kv_heads, seq, head_dim] from a position on. Returns the keys and
/// values of all positions of these slots so far.
pub(crate) fn append(
    cache: LayerCache<'_>,
    position: CachePosition,
    keys: Tensor<4>,
    values: Tensor<4>,
) -> (Tensor<4>, Tensor<4>) {
    let LayerCache {
        keys: of_keys,
        values: of_values,
        pages,
        ..
    } = cache;
    (
        append_to(of_keys, pages, position, keys),
        append_to(of_values, pages, position, values),
    )
}

fn append_to(
    cache: &mut Tensor<4>,
    pages: Option<PageTable<'_>>,
    position: CachePosition,
    new: Tensor<4>,
) -> Tensor<4> {
    let ([batch, _, seq, _], CachePosition { slot, start }) = (new.dims(), position);
    for index in 0..batch {
        decode::write_cache(
            cache,
            pages,
            new.clone().slice_dim(0, index..index + 1),
            slot + index,
            start,
        );
    }
    decode::read_cache(cache, pages, slot..slot + batch, 0..start + seq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_else_holds_the_memory_between_two_writes() {
        let device = Device::flex();
        let mut cache = decode::cache([3, 2, 8, 4], FloatDType::F32, &device);
        for start in 0..3 {
            let seen = append_to(
                &mut cache,
                None,
                CachePosition { slot: 1, start },
                Tensor::ones([2, 2, 1, 4], &device),
            );
            assert_eq!(seen.dims(), [2, 2, start + 1, 4]);
            assert_eq!(
                seen.into_data().iter::<f32>().sum::<f32>(),
                (16 * (start + 1)) as f32
            );
            assert!(cache.can_mut(), "position {start}");
        }
        assert_eq!(
            cache
                .slice_dim(0, 0..1)
                .into_data()
                .iter::<f32>()
                .sum::<f32>(),
            0.0
        );
    }
}
