use crate::{ActivationDtype, Epilogue};
use cubecl::prelude::CubeDim;
use marlin_format::{Bits, GroupSize, Sparsity};
use std::fmt;

/// Stored rows of K in a chunk: the part of the weight that one warp reads in one stage, by 64
/// columns. A 2:4 weight stores 64 of 128 rows.
pub(crate) const CHUNK_K: usize = 64;
/// Columns of a chunk: one tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout).
pub(crate) const CHUNK_N: usize = 64;
/// Steps in which a chunk is multiplied, of 16 stored rows of K each.
pub(crate) const CHUNK_STEPS: usize = CHUNK_K / 16;
/// Bytes of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout). Tiles that are side by
/// side follow each other in memory.
pub(crate) const TILE_BYTES: usize = 16 * CHUNK_N / 2;
/// Bytes of a stage's two barriers, `full` and `empty`.
pub(crate) const BARRIER_BYTES: usize = 16;
/// Rows of tiles of metadata in a chunk of a 2:4 weight: of
/// [`SparseLayout`](marlin_format::layout::SparseLayout), 64 rows of K each, as large as those of
/// the values.
pub(crate) const METADATA_ROWS: usize = 2;
/// Values of a row of activations that lie together in shared memory where `wgmma` reads them.
pub(crate) const ATOM_K: usize = 64;
/// Bytes of those.
pub(crate) const ATOM_ROW_BYTES: usize = ATOM_K * 2;
/// Floats between rows of the reduction buffer past its columns: puts the four rows that a store
/// touches in different banks.
pub(crate) const REDUCE_PADDING: usize = 4;

/// The division of a block's work, known when the kernel is compiled.
///
/// A block computes a tile of `8 * batch_tiles` rows of activations by `64 * warps_n` columns, in
/// steps of `64 * warps_k` stored rows of K. Warps differ in columns first: warp `w` has the 64
/// columns `w % warps_n` and the 64 stored rows of K `w / warps_n` of each step. With 128 rows of
/// activations a warp has registers for the sums of 32 columns, half a chunk: see
/// [`sub_tiles`](Self::sub_tiles).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// The number of n8 tiles, of 8 rows of activations each: 1, or an even number.
    pub batch_tiles: usize,
    /// Warps side by side along N.
    pub warps_n: usize,
    /// Warps along K, whose sums are added in shared memory.
    pub warps_k: usize,
    /// Blocks of a cluster, which have a tile, split its K and add their sums through distributed
    /// shared memory (`cluster.rs`); 1 for blocks with stripes, which exchange sums through global
    /// memory.
    pub cluster: usize,
    /// Stages of the copy pipeline.
    pub stages: usize,
    /// The instruction that multiplies.
    pub product: Product,
}

/// The instruction that multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// `mma.sync`: each warp by itself. Every card has it.
    MmaSync,
    /// `wgmma`: the four warps of a warpgroup, side by side along N, with the same rows of K. Only
    /// compute capability 9.0 has it.
    Wgmma,
    /// `mma.sp.sync`: as `mma.sync`, of a 2:4 weight.
    SparseMmaSync,
    /// `wgmma.sp`: as `wgmma`, of a 2:4 weight.
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
    /// Rows of activations in a tile.
    pub const fn rows(&self) -> usize {
        8 * self.batch_tiles
    }

    /// Columns of a tile.
    pub const fn columns(&self) -> usize {
        16 * self.sub_tiles() * self.warps_n
    }

    /// Sub-tiles of 16 columns that a warp multiplies: the four of a chunk, or two of them.
    pub const fn sub_tiles(&self) -> usize {
        if self.batch_tiles > 8 { 2 } else { 4 }
    }

    /// Chunks side by side along N.
    pub const fn chunks_n(&self) -> usize {
        self.columns() / CHUNK_N
    }

    /// Chunks of a step.
    pub const fn chunks(&self) -> usize {
        self.chunks_n() * self.warps_k
    }

    /// Rows of K in a chunk: those that are stored, or twice as many.
    pub const fn chunk_rows(&self) -> usize {
        if self.is_sparse() {
            2 * CHUNK_K
        } else {
            CHUNK_K
        }
    }

    /// Rows of K in a step.
    pub const fn depth(&self) -> usize {
        self.chunk_rows() * self.warps_k
    }

    /// Rows of tiles of metadata in a chunk.
    pub(crate) const fn metadata_rows(&self) -> usize {
        if self.is_sparse() { METADATA_ROWS } else { 0 }
    }

    /// Warps of a block that multiply.
    pub const fn warps(&self) -> usize {
        self.warps_n * self.warps_k
    }

    /// Returns true if whole tiles are visited in waves, one for each block at a time, and only
    /// what does not fill a wave is divided into stripes. For few rows of activations the tiles are
    /// few, and clusters have one each.
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

    /// The pattern of the weights that it takes.
    pub const fn sparsity(&self) -> Sparsity {
        if self.is_sparse() {
            Sparsity::TwoFour
        } else {
            Sparsity::Dense
        }
    }

    /// Stages that no copy may fill: the one that is being multiplied, and with asynchronous
    /// products the one before it.
    pub(crate) fn stages_in_use(&self) -> usize {
        if self.is_wgmma() { 2 } else { 1 }
    }

    /// Threads of a block that multiply.
    pub const fn threads(&self) -> usize {
        32 * self.warps()
    }
}

/// Everything that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// The division of work.
    pub tile: Tile,
    /// Rows of K that share a scale.
    pub group: GroupSize,
    /// Width of a weight.
    pub bits: Bits,
    /// True if the weight has zero points; otherwise they are the middle everywhere, 8 or 128.
    pub zero_points: bool,
    /// True if activations, scales, bias and output are in bf16; otherwise f16.
    pub bf16: bool,
    /// The operation on the output.
    pub epilogue: Epilogue,
}

/// Bytes of shared memory, in order: the stages, each with weights, metadata, scales, zero points
/// and activations, then the reduction buffer, the barriers of the stages, and what a block of a
/// cluster receives from the others, with a barrier.
impl Config {
    /// Returns true if a dedicated warp copies, and all others multiply.
    ///
    /// Each quarter of a multiprocessor has its own registers: with one warp more it has three for
    /// 168 registers a thread, or four for 128. If the sums would not fit, the warps that multiply
    /// do the copies between them; or a warpgroup of producers gives its registers to theirs.
    pub fn has_producer(&self) -> bool {
        self.tile.is_wgmma()
            && (self.tile.batch_tiles * self.tile.warps() <= 32 || self.moves_registers())
    }

    /// Returns true if a warpgroup copies, one of its warps in fact, whose registers go to the two
    /// that multiply (`setmaxnreg`).
    pub fn moves_registers(&self) -> bool {
        self.tile.is_wgmma() && self.tile.batch_tiles > 8
    }

    /// Returns true if gates and ups are multiplied: half of a tile's columns are gates, the other
    /// half the ups that belong to them.
    pub const fn is_gated(&self) -> bool {
        matches!(self.epilogue, Epilogue::SwiGlu)
    }

    /// Returns true if the tile can have the epilogue: for SwiGLU it has chunks of gates and as
    /// many of ups.
    pub const fn takes_epilogue(&self) -> bool {
        !self.is_gated() || self.tile.chunks_n().is_multiple_of(2)
    }

    /// Columns of the tile's outputs.
    pub const fn output_columns(&self) -> usize {
        self.tile.columns() / self.epilogue.columns()
    }

    /// Dtype of activations, scales, bias and output.
    pub fn dtype(&self) -> ActivationDtype {
        if self.bf16 {
            ActivationDtype::BF16
        } else {
            ActivationDtype::F16
        }
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

    /// Tiles of words, one below the other, that a step of a chunk reads: a tile of 8 bits has 8
    /// stored rows.
    pub(crate) const fn tiles_in_step(&self) -> usize {
        match self.bits {
            Bits::Four => 1,
            Bits::Eight => 2,
        }
    }

    /// Rows of tiles of words in a chunk.
    pub(crate) const fn word_rows(&self) -> usize {
        CHUNK_STEPS * self.tiles_in_step()
    }

    /// Groups that a chunk lies in.
    pub const fn groups_in_chunk(&self) -> usize {
        match (self.group, self.tile.chunk_rows()) {
            (GroupSize::G32, rows) => rows / 32,
            (GroupSize::G64, rows) => rows / 64,
            _ => 1,
        }
    }

    /// Returns true if scales travel with the weight; otherwise they are applied once at the end.
    pub(crate) fn grouped(&self) -> bool {
        self.group != GroupSize::Channel
    }

    /// Returns true if a group's products are summed by themselves and scaled in f32: for few rows
    /// of activations that is fewer instructions than to scale the weights, for many it is more
    /// registers than there are, and with two groups in a chunk it takes twice as many.
    pub fn scales_sums(&self) -> bool {
        let most = match (self.groups_in_chunk(), self.tile.product) {
            (1, Product::MmaSync | Product::SparseMmaSync) => 4,
            // Its sums cannot be read between products, but where a group's first product replaces
            // them.
            (_, Product::SparseWgmma) => 0,
            (_, Product::Wgmma) if self.bits == Bits::Eight => 0,
            (1, Product::Wgmma) => 2,
            _ => 1,
        };
        self.grouped() && self.tile.batch_tiles <= most
    }

    /// Returns true if weights are multiplied as they are stored, and a group's sums take the zero
    /// points: one instruction for a pair of weights in place of two, for a product more with all
    /// activations. On an H200 that takes 8 to 18 % off large weights with 16 rows of activations,
    /// and adds 4 to 28 % with 32. The sums of a whole channel would lose too much to what the zero
    /// points take from them. Of a 2:4 weight each column has activations of its own to sum, which
    /// would be as many products again. A byte is no part of a number that tensor cores multiply.
    pub fn multiplies_stored(&self) -> bool {
        self.scales_sums()
            && self.tile.batch_tiles <= 2
            && !self.tile.is_sparse()
            && self.bits == Bits::Four
    }

    /// Returns true if a warp takes two steps at a time, two chunks of the same group: its sums are
    /// scaled half as often.
    pub(crate) fn pairs_steps(&self) -> bool {
        self.tile.is_wgmma()
            && self.tile.batch_tiles > 1
            && self.multiplies_stored()
            && self.group == GroupSize::G128
    }

    /// Steps of `chunks` chunks along K.
    pub(crate) fn steps(&self, chunks: usize) -> usize {
        let in_step = self.tile.warps_k;
        if self.pairs_steps() {
            2 * chunks.div_ceil(2 * in_step)
        } else {
            chunks.div_ceil(in_step)
        }
    }

    /// The offset of the metadata in a stage.
    pub(crate) const fn metadata_offset(&self) -> usize {
        self.tile.chunks() * self.word_rows() * TILE_BYTES
    }

    /// The offset of the scales in a stage.
    pub(crate) const fn scales_offset(&self) -> usize {
        self.metadata_offset() + self.tile.chunks() * self.tile.metadata_rows() * TILE_BYTES
    }

    /// Bytes of a chunk's scales in a stage: 64 columns in 2 bytes for each group.
    pub(crate) fn scales_bytes(&self) -> usize {
        if self.grouped() {
            self.groups_in_chunk() * CHUNK_N * 2
        } else {
            0
        }
    }

    /// The offset of the zero points in a stage.
    pub(crate) fn zeros_offset(&self) -> usize {
        self.scales_offset() + self.tile.chunks() * self.scales_bytes()
    }

    /// Bytes of the zero points of 64 columns in a group.
    pub(crate) const fn group_zeros_bytes(&self) -> usize {
        CHUNK_N / self.bits.per_word() * 4
    }

    /// Bytes of a chunk's zero points in a stage.
    pub(crate) fn zeros_bytes(&self) -> usize {
        if self.zero_points {
            self.groups_in_chunk() * self.group_zeros_bytes()
        } else {
            0
        }
    }

    /// Bytes of a chunk with its metadata, scales and zero points.
    pub(crate) fn chunk_bytes(&self) -> usize {
        (self.word_rows() + self.tile.metadata_rows()) * TILE_BYTES
            + self.scales_bytes()
            + self.zeros_bytes()
    }

    /// The offset of the activations in a stage.
    pub(crate) fn activations_offset(&self) -> usize {
        (self.zeros_offset() + self.tile.chunks() * self.zeros_bytes())
            .next_multiple_of(self.alignment())
    }

    /// The alignment of the addresses of activations, and of stages with them: a run of eight
    /// values for `ldmatrix`, eight rows of an atom for the swizzle of `wgmma`.
    pub(crate) fn alignment(&self) -> usize {
        if self.tile.is_wgmma() {
            ATOM_ROW_BYTES * 8
        } else {
            16
        }
    }

    /// Bytes of a stage.
    pub(crate) fn stage_bytes(&self) -> usize {
        self.activations_offset() + self.tile.rows() * self.tile.depth() * 2
    }

    /// Bytes of the barriers of a stage.
    pub(crate) fn barrier_bytes(&self) -> usize {
        if self.tile.is_wgmma() {
            BARRIER_BYTES
        } else {
            0
        }
    }

    /// Floats between rows of the reduction buffer.
    pub(crate) const fn reduce_stride(&self) -> usize {
        self.tile.columns() + REDUCE_PADDING
    }

    /// Floats of the reduction buffer: eight rows for each warp along K.
    pub(crate) const fn reduce_floats(&self) -> usize {
        self.tile.warps_k * 8 * self.reduce_stride()
    }

    /// Bytes of shared memory of a block.
    pub fn shared_bytes(&self) -> usize {
        self.tile.stages * (self.stage_bytes() + self.barrier_bytes()) + self.end_bytes()
    }

    /// Bytes of shared memory for the end of a tile.
    pub(crate) fn end_bytes(&self) -> usize {
        let exchange = if self.tile.is_clustered() {
            self.received_bytes() + 8
        } else {
            0
        };
        self.reduce_floats() * 4 + exchange
    }

    /// The dimensions of a cluster.
    pub(crate) fn cluster_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.tile.cluster as u32)
    }
}
