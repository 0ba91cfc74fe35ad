use super::conversion::Conversion;
use crate::{ActivationDtype, Epilogue};
#[cfg(feature = "cubecl-runtime")]
use cubecl::prelude::CubeDim;
use marlin_format::{GroupSize, Sparsity, WeightValue};
use std::fmt;

/// The number of stored rows of K in a chunk. A chunk, 64 stored rows by 64 columns, is the part of
/// the weight that one warp (two warps with 128 rows of activations) multiplies in one stage. A 2:4
/// weight stores 64 of 128 rows.
pub(crate) const CHUNK_K: usize = 64;
/// The number of columns of a chunk, equal to the columns of a tile of
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout).
pub(crate) const CHUNK_N: usize = 64;
/// The number of steps in which a chunk is multiplied, each of 16 stored rows of K.
pub(crate) const CHUNK_STEPS: usize = CHUNK_K / 16;
/// The number of bytes of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout). Tiles
/// that are side by side along N are contiguous in memory.
pub(crate) const TILE_BYTES: usize = 16 * CHUNK_N / 2;
/// The number of bytes of a stage's two barriers, `full` and `empty`.
pub(crate) const BARRIER_BYTES: usize = 16;
/// The number of rows of metadata tiles ([`SparseLayout`](marlin_format::layout::SparseLayout)) in
/// a chunk of a 2:4 weight. A metadata tile covers 64 rows of K and has as many bytes as a tile of
/// values.
pub(crate) const METADATA_ROWS: usize = 2;
/// The number of values of a row of activations that are contiguous in shared memory, for `wgmma`.
pub(crate) const ATOM_K: usize = 64;
/// The number of bytes of [`ATOM_K`] values.
pub(crate) const ATOM_ROW_BYTES: usize = ATOM_K * 2;
/// The number of padding floats after each row of the reduction buffer. The padding places the four
/// rows that a store touches in different banks.
pub(crate) const REDUCE_PADDING: usize = 4;

/// The division of a block's work, fixed when the kernel is compiled.
///
/// A block computes a tile of `8 * batch_tiles` rows of activations by `64 * warps_n` columns, in
/// steps of `64 * warps_k` stored rows of K. Warp `w` multiplies 64 columns, the run with the index
/// `w % warps_n`, and 64 stored rows of each step, the run with the index `w / warps_n`. With 128
/// rows of activations, a warp has registers for the sums of only 32 columns, half a chunk: see
/// [`sub_tiles`](Self::sub_tiles).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// The number of n8 tiles, each of eight rows of activations: 1, or an even number.
    pub batch_tiles: usize,
    /// The number of warps side by side along N.
    pub warps_n: usize,
    /// The number of warps along K, whose sums are added in shared memory.
    pub warps_k: usize,
    /// The number of blocks of a cluster. The blocks of a cluster compute one tile: they split its
    /// K and add their sums through distributed shared memory (`cluster.rs`). 1 if each block
    /// computes a stripe and blocks exchange sums through global memory.
    pub cluster: usize,
    /// The number of stages of the copy pipeline.
    pub stages: usize,
    /// The instruction that multiplies.
    pub product: Product,
}

/// The instruction that multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// `mma.sync`: each warp multiplies independently. Every card supports it.
    MmaSync,
    /// `wgmma`: the four warps of a warpgroup, side by side along N, multiply the same rows of K
    /// together. Only compute capability 9.0 supports it.
    Wgmma,
    /// `mma.sp.sync`: like `mma.sync`, for a 2:4 weight.
    SparseMmaSync,
    /// `wgmma.sp`: like `wgmma`, for a 2:4 weight.
    SparseWgmma,
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::MmaSync => "mma.sync",
            Self::Wgmma => "wgmma",
            Self::SparseMmaSync => "mma.sp",
            Self::SparseWgmma => "wgmma.sp",
        })
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let product = if self.product == Product::MmaSync {
            String::new()
        } else {
            format!(", {}", self.product)
        };
        let cluster = if self.cluster == 1 {
            String::new()
        } else {
            format!(", clusters of {}", self.cluster)
        };
        write!(
            f,
            "{} x {} x {}, {} stages{product}{cluster}",
            self.rows(),
            self.columns(),
            self.depth(),
            self.stages
        )
    }
}

impl Tile {
    /// Returns the number of rows of activations in a tile.
    pub const fn rows(&self) -> usize {
        8 * self.batch_tiles
    }

    /// Returns the number of columns of a tile.
    pub const fn columns(&self) -> usize {
        16 * self.sub_tiles() * self.warps_n
    }

    /// Returns the number of sub-tiles of 16 columns that a warp multiplies: the four of a chunk,
    /// or two with 128 rows of activations.
    pub const fn sub_tiles(&self) -> usize {
        if self.batch_tiles > 8 { 2 } else { 4 }
    }

    /// Returns the number of chunks of a tile along N.
    pub const fn chunks_n(&self) -> usize {
        self.columns() / CHUNK_N
    }

    /// Returns the number of chunks of a step.
    pub const fn chunks(&self) -> usize {
        self.chunks_n() * self.warps_k
    }

    /// Returns the number of rows of K in a chunk: the stored rows, or twice as many for a 2:4
    /// weight.
    pub const fn chunk_rows(&self) -> usize {
        if self.is_sparse() {
            2 * CHUNK_K
        } else {
            CHUNK_K
        }
    }

    /// Returns the number of rows of K in a step.
    pub const fn depth(&self) -> usize {
        self.chunk_rows() * self.warps_k
    }

    /// Returns the number of rows of metadata tiles in a chunk; 0 for a dense weight.
    pub(crate) const fn metadata_rows(&self) -> usize {
        if self.is_sparse() { METADATA_ROWS } else { 0 }
    }

    /// Returns the number of warps of a block that multiply.
    pub const fn warps(&self) -> usize {
        self.warps_n * self.warps_k
    }

    /// Returns true if blocks compute whole tiles in waves, one tile per block in each wave, and
    /// only the remaining tiles are divided into stripes. Tiles of few rows have no waves because
    /// there are few of these tiles, and clusters have none because each computes a single tile.
    pub const fn has_waves(&self) -> bool {
        self.batch_tiles > 8 && !self.is_clustered()
    }

    /// Returns true if the blocks of a cluster split K.
    pub const fn is_clustered(&self) -> bool {
        self.cluster > 1
    }

    /// Returns true if warpgroups multiply (`wgmma`).
    pub const fn is_wgmma(&self) -> bool {
        matches!(self.product, Product::Wgmma | Product::SparseWgmma)
    }

    /// Returns true if the weight is 2:4.
    pub const fn is_sparse(&self) -> bool {
        matches!(self.product, Product::SparseMmaSync | Product::SparseWgmma)
    }

    /// Returns the sparsity of the weights that the tile supports.
    pub const fn sparsity(&self) -> Sparsity {
        if self.is_sparse() {
            Sparsity::TwoFour
        } else {
            Sparsity::Dense
        }
    }

    /// Returns the number of stages that no copy may fill: the stage that is being multiplied and,
    /// with asynchronous products, the preceding stage.
    pub(crate) fn stages_in_use(&self) -> usize {
        if self.is_wgmma() { 2 } else { 1 }
    }

    /// Returns the number of threads of a block that multiply.
    pub const fn threads(&self) -> usize {
        32 * self.warps()
    }
}

/// The compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// The division of work.
    pub tile: Tile,
    /// Rows of K that share a scale.
    pub group: GroupSize,
    /// Width of a weight.
    pub value: WeightValue,
    /// True if the weight has zero points; otherwise they are the middle everywhere, 8 or 128.
    pub zero_points: bool,
    /// True if activations, scales, bias and output are in bf16; otherwise f16.
    pub bf16: bool,
    /// The operation on the output.
    pub epilogue: Epilogue,
}

/// The layout of shared memory, in order: the stages, each with weights, metadata, scales, zero
/// points and activations; the reduction buffer; the barriers of the stages; and the sums that a
/// block of a cluster receives from the other blocks, with a barrier.
impl Config {
    /// Returns true if a dedicated warp, the producer, copies and all other warps multiply.
    ///
    /// Each quarter of a multiprocessor has its own registers. With one more warp for the producer,
    /// a quarter has three warps of 168 registers per thread, or four of 128. If the sums do not
    /// fit in these registers, the warps that multiply share the copies, or a warpgroup of
    /// producers gives its registers to the other warpgroups.
    pub fn has_producer(&self) -> bool {
        self.tile.is_wgmma()
            && (self.tile.batch_tiles * self.tile.warps() <= 32 || self.moves_registers())
    }

    /// Returns true if a whole warpgroup is the producer. Only one of its warps copies. The
    /// warpgroup's registers go to the two warpgroups that multiply (`setmaxnreg`).
    pub fn moves_registers(&self) -> bool {
        self.tile.is_wgmma() && self.tile.batch_tiles > 8
    }

    /// Returns true if the epilogue is SwiGLU: half of a tile's columns are gates, the other half
    /// the corresponding ups.
    pub const fn is_gated(&self) -> bool {
        matches!(self.epilogue, Epilogue::SwiGlu)
    }

    /// Returns true if the tile supports the epilogue. SwiGLU requires an even number of chunks
    /// along N, half of them gates and half ups.
    pub const fn takes_epilogue(&self) -> bool {
        !self.is_gated() || self.tile.chunks_n().is_multiple_of(2)
    }

    /// Returns the number of output columns of the tile.
    pub const fn output_columns(&self) -> usize {
        self.tile.columns() / self.epilogue.columns()
    }

    /// Returns the dtype of activations, scales, bias and output.
    pub fn dtype(&self) -> ActivationDtype {
        if self.bf16 {
            ActivationDtype::BF16
        } else {
            ActivationDtype::F16
        }
    }

    /// Returns the conversion of the weight's values to the dtype of the activations.
    pub(crate) const fn conversion(&self) -> Conversion {
        Conversion::new(self.value, self.bf16)
    }

    /// Threads of a block.
    pub fn block_threads(&self) -> usize {
        let producers = match self.has_producer() {
            true if self.moves_registers() => 128,
            true => 32,
            false => 0,
        };
        self.tile.threads() + producers
    }

    /// Returns the number of tiles of words, one below the other, that a step of a chunk reads. A
    /// tile of 8-bit values has only 8 stored rows, so a step reads two.
    pub(crate) const fn tiles_in_step(&self) -> usize {
        match self.value {
            WeightValue::Int4 => 1,
            WeightValue::Int8 => 2,
        }
    }

    /// Returns the number of rows of tiles of words in a chunk.
    pub(crate) const fn word_rows(&self) -> usize {
        CHUNK_STEPS * self.tiles_in_step()
    }

    /// Returns the number of groups in a chunk; 1 if a group has at least as many rows as a chunk.
    pub const fn groups_in_chunk(&self) -> usize {
        match (self.group, self.tile.chunk_rows()) {
            (GroupSize::G32, rows) => rows / 32,
            (GroupSize::G64, rows) => rows / 64,
            _ => 1,
        }
    }

    /// Returns true if scales are copied into the stages with the weight. Otherwise the weight has
    /// a single group, and its scales are applied once at the end.
    pub(crate) fn grouped(&self) -> bool {
        self.group != GroupSize::Channel
    }

    /// Returns true if a group's products are summed separately and scaled in f32. For few rows of
    /// activations, this takes fewer instructions than scaling the weights. For many rows, it needs
    /// more registers than there are. With two groups in a chunk, the sums are scaled twice as
    /// often.
    pub fn scales_sums(&self) -> bool {
        let most = match (self.groups_in_chunk(), self.tile.product) {
            (1, Product::MmaSync | Product::SparseMmaSync) => 4,
            // Accumulators can be read only between groups, if a group's first product replaces
            // them. `wgmma.sp` always adds to its accumulators.
            (_, Product::SparseWgmma) => 0,
            (_, Product::Wgmma) if self.value == WeightValue::Int8 => 0,
            (1, Product::Wgmma) => 2,
            _ => 1,
        };
        self.grouped() && self.tile.batch_tiles <= most
    }

    /// Returns true if the stored values are multiplied directly, and the zero points are
    /// subtracted from a group's sums. A pair of weights then takes one instruction instead of two,
    /// at the cost of one further product with all activations. On an H200 this reduces the time of
    /// large weights by 8 to 18 % with 16 rows of activations, and increases it by 4 to 28 % with
    /// 32.
    ///
    /// Three kinds of weights are excluded. With a single group, the sums of a whole column would
    /// lose too much precision when the zero points are subtracted. With a 2:4 weight, each column
    /// needs the sum of different activations, which would double the number of products. With 8
    /// bits, a stored byte is not part of a number that tensor cores multiply.
    pub fn multiplies_subnormals(&self) -> bool {
        self.scales_sums()
            && self.tile.batch_tiles <= 2
            && !self.tile.is_sparse()
            && self.value == WeightValue::Int4
    }

    /// Returns true if a warp multiplies the two chunks of a group in two consecutive steps, so
    /// that its sums are scaled half as often.
    pub(crate) fn pairs_steps(&self) -> bool {
        self.tile.is_wgmma()
            && self.tile.batch_tiles > 1
            && self.multiplies_subnormals()
            && self.group == GroupSize::G128
    }

    /// Returns the number of steps for `chunks` chunks along K.
    pub(crate) fn steps(&self, chunks: usize) -> usize {
        let in_step = self.tile.warps_k;
        if self.pairs_steps() {
            2 * chunks.div_ceil(2 * in_step)
        } else {
            chunks.div_ceil(in_step)
        }
    }

    /// Returns the offset of the metadata in a stage, in bytes.
    pub(crate) const fn metadata_offset(&self) -> usize {
        self.tile.chunks() * self.word_rows() * TILE_BYTES
    }

    /// Returns the offset of the scales in a stage, in bytes.
    pub(crate) const fn scales_offset(&self) -> usize {
        self.metadata_offset() + self.tile.chunks() * self.tile.metadata_rows() * TILE_BYTES
    }

    /// Returns the number of bytes of a chunk's scales in a stage: for each group, 64 columns of 2
    /// bytes.
    pub(crate) fn scales_bytes(&self) -> usize {
        if self.grouped() {
            self.groups_in_chunk() * CHUNK_N * 2
        } else {
            0
        }
    }

    /// Returns the offset of the zero points in a stage, in bytes.
    pub(crate) fn zeros_offset(&self) -> usize {
        self.scales_offset() + self.tile.chunks() * self.scales_bytes()
    }

    /// Returns the number of bytes of the zero points of 64 columns in a group.
    pub(crate) const fn group_zeros_bytes(&self) -> usize {
        CHUNK_N / self.value.per_word() * 4
    }

    /// Returns the number of bytes of a chunk's zero points in a stage.
    pub(crate) fn zeros_bytes(&self) -> usize {
        if self.zero_points {
            self.groups_in_chunk() * self.group_zeros_bytes()
        } else {
            0
        }
    }

    /// Returns the number of bytes of a chunk with its metadata, scales and zero points.
    pub(crate) fn chunk_bytes(&self) -> usize {
        (self.word_rows() + self.tile.metadata_rows()) * TILE_BYTES
            + self.scales_bytes()
            + self.zeros_bytes()
    }

    /// Returns the offset of the activations in a stage, in bytes.
    pub(crate) fn activations_offset(&self) -> usize {
        (self.zeros_offset() + self.tile.chunks() * self.zeros_bytes())
            .next_multiple_of(self.alignment())
    }

    /// Returns the alignment of stages, and of the activations in a stage, in bytes: a run of eight
    /// values for `ldmatrix`, or eight rows of an atom for the swizzle of `wgmma`.
    pub(crate) fn alignment(&self) -> usize {
        if self.tile.is_wgmma() {
            ATOM_ROW_BYTES * 8
        } else {
            16
        }
    }

    /// Returns the number of bytes of a stage.
    pub(crate) fn stage_bytes(&self) -> usize {
        self.activations_offset() + self.tile.rows() * self.tile.depth() * 2
    }

    /// Returns the number of bytes of the barriers of a stage; 0 without `wgmma`.
    pub(crate) fn barrier_bytes(&self) -> usize {
        if self.tile.is_wgmma() {
            BARRIER_BYTES
        } else {
            0
        }
    }

    /// Returns the number of floats from one row of the reduction buffer to the next.
    pub(crate) const fn reduce_stride(&self) -> usize {
        self.tile.columns() + REDUCE_PADDING
    }

    /// Returns the number of floats of the reduction buffer: eight rows for each warp along K.
    pub(crate) const fn reduce_floats(&self) -> usize {
        self.tile.warps_k * 8 * self.reduce_stride()
    }

    /// Returns the number of bytes of shared memory of a block.
    pub fn shared_bytes(&self) -> usize {
        self.tile.stages * (self.stage_bytes() + self.barrier_bytes()) + self.end_bytes()
    }

    /// Returns the number of bytes of shared memory for the end of a tile: the reduction buffer,
    /// and the sums that a block of a cluster receives.
    pub(crate) fn end_bytes(&self) -> usize {
        let exchange = if self.tile.is_clustered() {
            self.received_bytes() + 8
        } else {
            0
        };
        self.reduce_floats() * 4 + exchange
    }

    /// Returns the dimensions of a cluster.
    #[cfg(feature = "cubecl-runtime")]
    pub(crate) fn cluster_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.tile.cluster as u32)
    }
}
