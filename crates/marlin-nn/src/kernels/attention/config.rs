//! The compile-time parameters of the kernel, derived from the shape and the device.

use super::shape::{AttentionPass, AttentionShape, MAX_HEAD_DIM, VECTOR};
use crate::cache::CacheFormat;
use crate::kernels::shape::shared_memory;
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use marlin_kernels::planes::Planes;
use marlin_kernels::{ActivationDtype, Runtime, Target};

/// The maximum number of f32 vectors for the lane groups' outputs in shared memory: 32 KiB.
const SHARED_VECTORS: usize = 1024;
/// The maximum number of bytes of shared memory that a block uses.
const WANTED_SHARED: usize = 48 * 1024;
/// The maximum number of f32 vectors that a lane holds as its output.
const OUTPUT_VECTORS: usize = 8;

/// The properties of a device that a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionTarget {
    /// The number of multiprocessors among which one launch can divide a sequence; 1 if the blocks
    /// of a launch cannot see each other's writes.
    pub multiprocessors: usize,
    /// The number of units of a plane, which exchange values by shuffles; 1 if the device has no
    /// planes.
    pub plane: usize,
    /// The maximum number of units of a block.
    pub units: usize,
}

impl AttentionTarget {
    /// The number of multiprocessors assumed for a device that does not report it.
    const DEFAULT_MULTIPROCESSORS: usize = 32;

    /// Returns the target of a CubeCL client.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let (features, hardware) = (&properties.features, &properties.hardware);
        let plane = Planes::of(client).size;
        let multiprocessors = hardware
            .num_streaming_multiprocessors
            .map_or(Self::DEFAULT_MULTIPROCESSORS, |count| count as usize);
        Self {
            multiprocessors: if features.device_memory_scope {
                multiprocessors
            } else {
                1
            },
            plane,
            units: Self::units(
                hardware.max_units_per_cube as usize,
                shared_memory(client),
                plane,
            ),
        }
    }

    /// Returns the maximum number of units of a block that has `shared` bytes of shared memory. The
    /// outputs of the lane groups take at most half of these bytes.
    fn units(most: usize, shared: usize, plane: usize) -> usize {
        if shared >= WANTED_SHARED {
            return most;
        }
        let vectors = if plane > 1 {
            OUTPUT_VECTORS
        } else {
            MAX_HEAD_DIM / VECTOR
        };
        most.min(shared / 2 / (vectors * VECTOR * size_of::<f32>()))
            .max(1)
    }
}

/// The type in which keys and values are loaded, held in registers and stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeyValueType {
    /// The type of one component.
    pub elem: ElemType,
    /// The number of components of a vector of [`VECTOR`] elements.
    pub size: usize,
}

impl KeyValueType {
    /// Returns words of 32 bits. CUDA's compiler would unpack vectors of 16-bit elements right
    /// after the load, and so would wait for the load there.
    fn words(dtype: ActivationDtype) -> Self {
        Self {
            elem: ElemType::UInt(UIntKind::U32),
            size: VECTOR * dtype.elem().size() / size_of::<u32>(),
        }
    }

    /// Returns the elements themselves, which need no reinterpretation as another type.
    fn elements(dtype: ActivationDtype) -> Self {
        Self {
            elem: dtype.elem(),
            size: VECTOR,
        }
    }

    /// Returns the words of [`CacheFormat::E4m3`].
    fn codes() -> Self {
        Self {
            elem: ElemType::UInt(UIntKind::U32),
            size: VECTOR / size_of::<u32>(),
        }
    }

    /// Returns the type of a cache's format on CUDA: words.
    pub(super) fn on_cuda(dtype: ActivationDtype, format: CacheFormat) -> Self {
        match format {
            CacheFormat::Activations => Self::words(dtype),
            CacheFormat::E4m3 => Self::codes(),
        }
    }

    /// Returns the type for a device: words on CUDA and of codes, elements elsewhere.
    pub(super) fn on(target: &Target, dtype: ActivationDtype, format: CacheFormat) -> Self {
        match format {
            CacheFormat::Activations if target.runtime != Runtime::Cuda => Self::elements(dtype),
            format => Self::on_cuda(dtype, format),
        }
    }
}

/// The compile-time parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionConfig {
    /// The number of features of a head.
    pub head_dim: usize,
    /// The number of features of a head that rotary embedding applies to.
    pub rotary_dim: usize,
    /// The number of query heads of a block.
    pub heads: usize,
    /// The number of blocks among which the query heads of one key head are divided.
    pub parts: usize,
    /// The number of lanes of a lane group; a power of two.
    pub lanes: usize,
    /// The number of threads of a block.
    pub threads: usize,
    /// The number of positions that a lane group processes at a time.
    pub positions: usize,
    /// True if a sequence may have several splits.
    pub is_split: bool,
    /// The kind of rows that the launch processes.
    pub pass: AttentionPass,
    /// The number of positions of a page, if the cache has pages.
    pub page_size: Option<usize>,
    /// The format of the cache.
    pub format: CacheFormat,
    /// True if codes are converted as pairs of f16.
    pub as_f16: bool,
    /// True if buffers and shared memory of scalars are accessed through views as vectors. CubeCL
    /// 0.11.3 cannot compile such a view to a shader.
    pub has_views: bool,
    /// True if the kernel [overlaps](marlin_kernels::pdl) with the kernels before and after it. The
    /// launch sets this field.
    pub uses_pdl: bool,
}

impl AttentionConfig {
    pub(super) fn new(shape: &AttentionShape, target: &AttentionTarget, is_split: bool) -> Self {
        let vectors = shape.cache.head_dim / VECTOR;
        let lanes = vectors
            .next_power_of_two()
            .min(power_of_two_below(target.plane));
        let lane_vectors = vectors.div_ceil(lanes);
        let group = shape.heads / shape.cache.kv_heads;
        let most = (OUTPUT_VECTORS / lane_vectors).max(1);
        // If a key head has more query heads than a block can hold, the query heads are divided
        // evenly among blocks, and each block reads the keys again.
        let heads = (1..=group.min(most))
            .rev()
            .find(|heads| group.is_multiple_of(*heads))
            .unwrap_or(1);
        let threads = if heads * lane_vectors <= 4 { 256 } else { 128 };
        let threads = power_of_two_below(
            threads
                .min(target.units)
                .min(SHARED_VECTORS / (lane_vectors * heads)),
        );
        let positions = if lanes == 1 {
            1
        } else if heads * lane_vectors <= 4 && shape.dtype != ActivationDtype::F32 {
            4
        } else {
            2
        };
        Self {
            head_dim: shape.cache.head_dim,
            rotary_dim: shape.rotary_dim,
            heads,
            parts: group / heads,
            lanes: lanes.min(threads),
            threads,
            positions,
            is_split,
            pass: shape.pass,
            page_size: shape.cache.pages.map(|pages| pages.size),
            format: shape.cache.format,
            as_f16: true,
            has_views: true,
            uses_pdl: false,
        }
    }

    /// Returns the number of heads in shared memory: the block's query heads, and in a step the
    /// token's key and value.
    pub(super) const fn staged_heads(&self) -> usize {
        match self.pass {
            AttentionPass::Step => self.heads + 2,
            AttentionPass::Prompt => self.heads,
        }
    }

    /// Returns the number of lane groups of a block.
    pub(super) const fn lane_groups(&self) -> usize {
        self.threads / self.lanes
    }

    /// Returns the number of vectors of a head.
    pub(super) const fn vectors(&self) -> usize {
        self.head_dim / VECTOR
    }

    /// Returns the number of vectors of a position of a head in the cache: those of its features,
    /// and one of a scale.
    pub(super) const fn row_vectors(&self) -> usize {
        match self.format {
            CacheFormat::Activations => self.vectors(),
            CacheFormat::E4m3 => self.vectors() + 1,
        }
    }

    /// Returns the number of scales that a lane holds of a tile's keys or values. Without scales it
    /// holds one, which is not read.
    pub(super) const fn scales(&self) -> usize {
        match self.format {
            CacheFormat::Activations => 1,
            CacheFormat::E4m3 => self.positions,
        }
    }

    /// Returns the maximum number of vectors of a head that a lane has.
    pub(super) const fn lane_vectors(&self) -> usize {
        self.vectors().div_ceil(self.lanes)
    }

    /// Returns true if every lane has the same number of vectors.
    pub(super) const fn is_even(&self) -> bool {
        self.vectors().is_multiple_of(self.lanes)
    }

    /// Returns true if loops over the values that a lane holds are unrolled, which keeps them in
    /// registers. Without planes a lane has whole heads, and keeps them in memory.
    pub(super) const fn unrolls(&self) -> bool {
        self.heads * self.lane_vectors() <= OUTPUT_VECTORS
    }

    /// Returns the number of elements that a block writes to the workspace: the outputs of its
    /// heads, then a maximum and a sum of each head.
    pub(super) const fn partial(&self) -> usize {
        self.heads * (self.head_dim + 2)
    }
}

/// Returns the largest power of two that is at most `value`; 1 for 0.
fn power_of_two_below(value: usize) -> usize {
    1 << value.max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_shared_memory_makes_small_blocks() {
        assert_eq!(AttentionTarget::units(1024, 48 * 1024, 32), 1024);
        assert_eq!(AttentionTarget::units(1024, 32 * 1024, 32), 64);
        assert_eq!(AttentionTarget::units(1024, 32 * 1024, 1), 8);
    }
}
